# SPDX-License-Identifier: Apache-2.0
"""Compares the occupancy that reports show with what CUDA's driver says, for kernels built for this
GPU.

    python -m tools.gpu occupancy [BUNDLE...] [--results DIR]

Without a bundle it builds those of examples/kernels.py, which needs Triton and no torch.  Exit
status 1 when any differs; the result goes to docs/results/gpu-occupancy.json.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Target
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.tuning.occupancy import block_occupancy
from bundler.toolchain.targets import visible_targets
from tools.gpu.first_launches import Card
from tools.gpu.steps import TIMEOUT_S, bundler_command
from tools.shared import measurement, programs
from tools.shared.processes import ROOT

_MAX_DYNAMIC_SHARED = 8
_ASK = "cuOccupancyMaxActiveBlocksPerMultiprocessor"


def main() -> int:
    """Compare every kernel, print the table, write the result."""
    parser = programs.parser(
        __doc__, results=(measurement.RESULTS, "where gpu-occupancy.json goes")
    )
    parser.add_argument("bundles", nargs="*", type=Path)
    options = parser.parse_args()
    card, target = Card(), (visible_targets() or ())[0]
    with tempfile.TemporaryDirectory(prefix="gpu-occupancy.") as folder:
        bundles = options.bundles or [_built(Path(folder), target)]
        rows = [row for path in bundles for row in _rows(card, path, target)]
    wrong = measurement.report("gpu-occupancy", {"rows": rows}, options.results)
    return 1 if wrong or not rows else 0


def _built(folder: Path, target: Target) -> Path:
    path, kernels = folder / "examples.tbundle", ROOT / "examples" / "kernels.py"
    words = ("build", kernels, "--target", target, "-o", path)
    bundler_command(*words, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return path


def _rows(card: Card, path: Path, target: Target) -> list[dict[str, Any]]:
    with Bundle.load(path) as bundle:
        return [_row(card, bundle, kernel) for kernel in bundle.kernels if kernel.target == target]


def _row(card: Card, bundle: Bundle, kernel: Kernel) -> dict[str, Any]:
    binary, spec = bytes(bundle.read(kernel.binary)), kernel.spec
    taken = read_resources(binary, spec.entry)
    resources = (spec.num_warps, taken.registers, taken.shared_bytes, spec.shared_bytes)
    ours = block_occupancy(kernel.target, *resources)
    blocks = _blocks(card, binary, spec, spec.num_warps * kernel.target.warp_size)
    told, limit = (ours.blocks, ours.limit) if ours is not None else (None, "what is not known")
    needs = f"{spec.num_warps} warps, {taken.registers} registers, {spec.shared_bytes} bytes shared"
    return {
        "work": f"{kernel.name}, {needs}",
        "ok": told == blocks,
        "found": f"{told} blocks, the driver says {blocks}; held back by {limit}",
    }


def _blocks(card: Card, binary: bytes, spec: Any, threads: int) -> int:
    """Return how many blocks of a kernel the driver says that fit."""
    module, function, blocks = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    shared = ctypes.c_size_t(spec.shared_bytes)
    for name, words in (
        ("cuModuleLoadData", (ctypes.byref(module), binary)),
        ("cuModuleGetFunction", (ctypes.byref(function), module, spec.entry.encode())),
        ("cuFuncSetAttribute", (function, _MAX_DYNAMIC_SHARED, spec.shared_bytes)),
        (_ASK, (ctypes.byref(blocks), function, threads, shared)),
        ("cuModuleUnload", (module,)),
    ):
        card.check(getattr(card.cuda, name)(*words), name)
    return blocks.value


if __name__ == "__main__":
    sys.exit(main())
