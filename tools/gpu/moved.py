# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU that kernels which only moved compute what freshly compiled ones
do, bit by bit, and prints a table.

    python3 -m tools.gpu moved [--results DIR]

It needs torch, Triton, a GPU and gcc, no network, and runs from the checkout.  One process records
examples/kernels.py, in which one kernel calls a function beside it.  Then comments go above every
function.  A process without us compiles what moved; others, each with an empty cache directory,
take the recorded kernels for it: in a session by key, in one by tag, by a restore and by a replay.
Each launches all kernels, and the bytes of all results are compared with those of the fresh
compiles; none may compile anything, by Triton's own listener.  Last the code of the called function
is changed, which has to compile again.  Exit status 1 when any row is wrong.  The raw result goes
to docs/results/gpu-moved.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.gpu import steps
from tools.gpu.steps import Row
from tools.shared import example_kernels
from tools.shared.measurement import check

_BODY = "0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))"
_HELPER = f"@triton.jit\ndef gelu_of(x):\n    return {_BODY}\n\n\n"
_KERNELS = 8


def main() -> int:
    """Run every row, print the table, write the result."""
    return steps.run("gpu-moved", __doc__, check_all)


def check_all(folder: Path) -> Iterator[Row]:
    """Record in one process, launch what moved in others."""
    write_kernels(folder)
    recorded = process(folder, "recorded", "recorded")
    yield row("recorded where the kernels were", recorded, recorded["compiles"] > 0)
    fresh = process(folder, "fresh", "moved")
    yield row("moved, compiled afresh: same bits", fresh, fresh["compiles"] > 0, recorded)
    for words, step in (
        ("session by key, moved=True", "key"),
        ("session by tag, TRITON_BUNDLER_MOVED=1", "tag"),
        ("restore(moved=True)", "restore"),
        ("replay(moved=True)", "replay"),
    ):
        done = process(folder, step, "moved")
        silent = done["compiles"] == 0 and done["moved"] >= _KERNELS
        yield row(f"{words}: nothing compiled, same bits", done, silent, fresh)
    changed = process(folder, "key", "changed")
    only_one = changed["compiles"] == 1 and changed["moved"] >= _KERNELS - 1
    yield row("the code of one function changed: that one is compiled", changed, only_one)
    asserting = process(folder, "asserts", "moved")
    yield row("asserts that tell lines: compiled", asserting, asserting["compiles"] > 0)


def row(what: str, done: dict[str, Any], ok: bool, like: dict[str, Any] | None = None) -> Row:
    """Return a row of the table of what a process did; `like` has the results that it
    should have.
    """
    same = done["bits"] is not None and (like is None or done["bits"] == like["bits"])
    found = f"{done['compiles']} compiles, {done['hits']} hits, {done['moved']} moved"
    if like is not None:
        found += f"; {'equal' if same else 'DIFFERENT'} bits of {len(done['bits'] or ())} results"
    return {**done, **check(what, ok and same, f"{found} {done['error'][:120]}")}


def write_kernels(folder: Path) -> None:
    """Write the kernels as they were recorded, moved, and changed."""
    text = example_kernels.PATH.read_text(encoding="utf-8")
    called = text.replace(_BODY, "gelu_of(x)").replace(
        "@triton.jit\ndef gelu_kernel", f"{_HELPER}@triton.jit\ndef gelu_kernel"
    )
    if _BODY in called.replace(_HELPER, "") or "gelu_of(x)" not in called:
        raise SystemExit(f"{example_kernels.PATH} has another gelu_kernel than this program knows")
    moved = called.replace("\n@triton.", "\n# A comment.\n\n@triton.")
    changed = moved.replace(_BODY, f"{_BODY} + 0.0 * x")
    for name, variant in (("recorded", called), ("moved", moved), ("changed", changed)):
        (folder / f"{name}.py").write_text(variant, encoding="utf-8")


def process(folder: Path, step: str, kernels: str) -> dict[str, Any]:
    """Run one step in a process with an empty cache; returns what it printed last."""
    variables = {
        "TRITON_CACHE_DIR": str(folder / f"cache-{step}-{kernels}"),
        "TRITON_BUNDLER_LOCAL": str(folder / "local"),
        "TRITON_BUNDLER_MOVED": "1" if step == "tag" else "0",
    }
    nothing = {"bits": None, "compiles": -1, "hits": -1, "moved": -1}
    words = (step, str(folder), kernels)
    return nothing | steps.process("tools.gpu.moved", *words, environment=variables)


def _step(step: str, where: str, name: str) -> dict[str, Any]:
    import bundler

    folder = Path(where)
    kernels = example_kernels.load(folder / f"{name}.py")
    store, bundle = f"file://{folder}/store", folder / "recorded.tbundle"
    listener, moved = steps.Listener(), 0
    match step:
        case "recorded":
            with bundler.session(store, "prod"), bundler.recording() as recording:
                bits = _bits(kernels)
            with recording.collect() as made:
                made.save(bundle)
        case "fresh":
            bits = _bits(kernels)
        case "restore":
            moved = len(bundler.restore(bundle, moved=True).moved)
            bits = _bits(kernels)
        case "replay":
            moved = len(bundler.replay(bundle, moved=True).moved)
            bits = _bits(kernels)
        case "asserts":
            return _with_asserts(folder, store, listener)
        case _:
            given: dict[str, Any] = {"tag": "prod"} if step == "tag" else {"moved": True}
            with bundler.session(store, push=None, **given) as session:
                bits = _bits(kernels)
            moved = session.counters.moved
    return _told(bits, listener, moved)


def _told(bits: dict[str, str], listener: steps.Listener, moved: int) -> dict[str, Any]:
    found = {"bits": bits, "compiles": listener.compiles, "hits": listener.hits, "moved": moved}
    return {**found, "error": ""}


def _bits(kernels: Any) -> dict[str, str]:
    """Launch every kernel; returns a digest of the bytes of each result."""
    return {name: kernels.checksum(tensor) for name, tensor in kernels.run_all("cuda").items()}


_ASSERTING = """
import torch
import triton
import triton.language as tl


{above}@triton.jit(debug=True)
def positive(x_ptr):
    value = tl.load(x_ptr)
    tl.device_assert(value > 0, "positive")
    tl.store(x_ptr, value + 1)
"""


def _with_asserts(folder: Path, store: str, listener: steps.Listener) -> dict[str, Any]:
    """Compile a kernel with an assert into the store, move it, and launch it with a session that
    takes what moved.
    """
    import torch

    import bundler

    def launch(above: str, clear: Callable[[], None]) -> int:
        path = folder / "asserting.py"
        path.write_text(_ASSERTING.format(above=above), encoding="utf-8")
        kernels = example_kernels.load(path)
        clear()
        with bundler.session(store, moved=True) as session:
            x = torch.ones(1, device="cuda")
            kernels.positive[(1,)](x)
            torch.cuda.synchronize()
            session.flush()
            return session.counters.moved

    def clear() -> None:
        import linecache

        linecache.clearcache()
        listener.compiles = listener.hits = 0

    launch("", clear)
    moved = launch("# A comment.\n", clear)
    return _told({}, listener, moved)


if __name__ == "__main__":
    print(json.dumps(_step(*sys.argv[1:])))
