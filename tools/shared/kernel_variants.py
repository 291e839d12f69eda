# SPDX-License-Identifier: Apache-2.0
"""The kernels that the benchmark moves about: real compiles for sm_90, made once and kept.

    python -m tools.shared.kernel_variants COUNT PART OF     compile every OF-th kernel, from the PART-th, into TRITON_CACHE_DIR

A third each is element-wise, a softmax over rows, and a matrix product; constants tell the variants
apart.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.shared.processes import ROOT, command

PROCESSES = len(os.sched_getaffinity(0))
TARGET = ("cuda", 90, 32)
_SHAPES = ("scaled_gelu", "scaled_softmax", "scaled_matmul")


def cache_of(count: int, keep: Path) -> Path:
    """Return a cache directory with `count` kernels, compiled now unless an earlier run has left
    them in `keep`.
    """
    wanted = [
        importlib.metadata.version("triton"),
        Path(__file__).with_name("kernel_shapes.py").read_text(),
        TARGET,
    ]
    name = hashlib.sha256(repr([*wanted, *variants(count)]).encode()).hexdigest()[:16]
    cache, done = keep / f"kernels-{name}", keep / f"kernels-{name}.done"
    if not done.exists():
        print(f"compiling {count} kernels into {cache}", file=sys.stderr, flush=True)
        _compile(count, cache)
        found = len(list(cache.glob("*/__grp__*.json")))
        if found != count:
            raise RuntimeError(
                f"{found} kernels in {cache}, expected {count}: remove it and run again"
            )
        done.touch()
    return cache


def _compile(count: int, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    started = [
        subprocess.Popen(
            command(__name__, str(count), str(part), str(PROCESSES)), env=environment, cwd=ROOT
        )
        for part in range(PROCESSES)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError(f"compiling the kernels failed with {codes}")


def variants(count: int) -> Iterator[tuple[str, dict[str, str], dict[str, int], dict[str, int]]]:
    """Yield (name of the kernel, types of its arguments, constants, options), `count` times."""
    options = {"num_warps": 4, "num_stages": 3}
    for number in range(count):
        shape, step = number % 3, number // 3
        if shape == 0:
            constants = {"BLOCK": 256 << step % 4, "SCALE": 1 + step // 4}
            types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
        elif shape == 1:
            constants = {"BLOCK": 512 << step % 3, "SCALE": 1 + step // 3}
            types = {"x": "*fp32", "out": "*fp32", "stride": "i32", "n": "i32"}
        else:
            tile = {"M": 32 << step % 2, "N": 32 << step // 2 % 2, "K": 32}
            constants = {**tile, "SCALE": 1 + step // 4}
            types = {"a": "*fp16", "b": "*fp16", "out": "*fp16", "m": "i32", "n": "i32", "k": "i32"}
        yield _SHAPES[shape], types, constants, options


def compile_part(count: int, part: int, of: int) -> None:
    """Compile some of the kernels; where they are already, Triton finds them."""
    for number, variant in enumerate(variants(count)):
        if number % of == part:
            compile_variant(*variant)


def compile_variant(
    name: str, types: dict[str, str], constants: dict[str, int], options: dict[str, int]
) -> None:
    """Compile one kernel."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = source_of(name, types, constants)
    triton.compile(source, target=GPUTarget(*TARGET), options=options)


def source_of(name: str, types: dict[str, str], constants: dict[str, int]) -> Any:
    """Return the source of one kernel, as Triton takes it."""
    from triton.compiler import ASTSource

    from tools.shared import kernel_shapes

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    function = getattr(kernel_shapes, name)
    return ASTSource(function, signature, constexprs=constants, attrs=aligned)


if __name__ == "__main__":
    compile_part(*map(int, sys.argv[1:4]))
