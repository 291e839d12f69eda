# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU that after a replay no call compiles, hits a disk, fires a hook or
benchmarks, and prints a table.

    python -m tools.gpu replay [--results DIR]

It needs torch, Triton, a GPU and gcc, and runs from the checkout.  One process records
examples/kernels.py; further ones, each with an empty cache directory, replay it into kernels that
are there, into kernels that are imported later, and in a session, then launch them 100 times and
more with a `jit_post_compile_hook` that raises; one only restores, to show that the check can fail.
Exit status 1 when any row is wrong. The raw result goes to docs/results/gpu-replay.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.gpu import steps
from tools.gpu.steps import Row
from tools.shared import example_kernels
from tools.shared.measurement import check

# Calls of a server after it was armed.
CALLS = 100


class Witness:
    """Counts what must not happen; the hook raises, as a server's monitor does."""

    def __init__(self) -> None:
        self.listened = self.benchmarks = 0

    def arm(self) -> None:
        """Watch from now on."""
        from triton import knobs

        def fired(**facts: Any) -> None:
            raise AssertionError(f"jit_post_compile_hook fired for {facts['repr']}")

        knobs.runtime.jit_post_compile_hook = fired
        knobs.compilation.listener = self._hear

    def _hear(self, **_: Any) -> None:
        self.listened += 1

    def watch(self, tuner: Any) -> None:
        """Count the benchmarks of a tuner."""
        benchmark = tuner.do_bench

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.benchmarks += 1
            return benchmark(*args, **kwargs)

        tuner.do_bench = counted


def main() -> int:
    """Run every row, print the table, write the result."""
    return steps.run("gpu-replay", __doc__, check_all)


def check_all(folder: Path) -> Iterator[Row]:
    """Record in one process, serve in others."""
    recorded = process(folder, "record")
    yield row("recorded", recorded, recorded["error"] == "")
    for words, step in (
        ("replayed into kernels that are there", "present"),
        ("replayed before the kernels are imported", "later"),
        ("a session with replay=True, strict mode armed", "session"),
    ):
        done = process(folder, step)
        silent = done["error"] == "" and not done["listened"] and not done["benchmarks"]
        same = done["numbers"] is not None and done["numbers"] == recorded["numbers"]
        yield row(words, done, silent and same and done["launches"] >= CALLS)
    restored = process(folder, "restored")
    fired = "jit_post_compile_hook fired" in restored["error"]
    yield row("restored alone: the hook fires", restored, fired)
    # The time of the first round of calls, without the hook.
    replayed, restored = (process(folder, step, "unarmed") for step in ("present", "restored"))
    figures = {"replayed_ms": replayed["first_ms"], "restored_ms": restored["first_ms"]}
    known, found = all(figures.values()), "failed"
    if known:
        found = "{replayed_ms:.1f} ms, restored alone {restored_ms:.1f} ms".format_map(figures)
    yield check("first round of all kernels, replayed", known, found, **figures)


def row(what: str, done: dict[str, Any], ok: bool) -> Row:
    """Return a row of the table of what a process did."""
    found = (
        f"{done['launches']} launches, {done['listened']} compiles or hits, {done['benchmarks']}"
        f" benchmarks; {done['report']} {done['error'][:120]}"
    )
    return {**done, **check(what, ok, found.strip())}


def process(folder: Path, step: str, *words: str) -> dict[str, Any]:
    """Run one step in a process with a cache of its own; returns what it printed last."""
    variables = {
        "TRITON_CACHE_DIR": str(folder / "-".join(["cache", step, *words])),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_BUNDLER_LOCAL": str(folder / "local"),
    }
    line = (step, str(folder), *words)
    return _told() | steps.process("tools.gpu.replay", *line, environment=variables)


def _told(**found: Any) -> dict[str, Any]:
    """Return what a step found, and of the rest that it is not known."""
    nothing = {"numbers": None, "listened": -1, "benchmarks": -1, "launches": 0, "report": ""}
    return {**nothing, "first_ms": None, "replay_ms": None, "error": "", **found}


def serve(before: Callable[[], tuple[str, float]], *, late: bool, armed: bool) -> dict[str, Any]:
    """Call every kernel many times, and see what must not happen.

    Args:
        before: what a server does before traffic; returns a report and its milliseconds.
        late: load the kernels after that.
        armed: whether a compile raises.
    """
    witness = Witness()
    kernels = None if late else example_kernels.load()
    _first_use_of_the_gpu()
    report, milliseconds = before()
    kernels = kernels or example_kernels.load()
    witness.watch(kernels.swiglu_kernel)
    if armed:
        witness.arm()
    error, numbers, launches, first_ms = "", None, 0, None
    try:
        while launches < CALLS:
            began = time.perf_counter()
            out = kernels.run_all("cuda")
            _synchronize()
            first_ms = (time.perf_counter() - began) * 1e3 if launches == 0 else first_ms
            launches += len(out)
            numbers = {name: kernels.checksum(tensor) for name, tensor in out.items()}
    except Exception as problem:  # noqa: BLE001  # the row shows it
        error = f"{type(problem).__name__}: {problem}"
    return _told(
        numbers=numbers,
        listened=witness.listened,
        benchmarks=witness.benchmarks,
        launches=launches,
        report=report,
        first_ms=first_ms,
        replay_ms=milliseconds,
        error=error,
    )


def _first_use_of_the_gpu() -> None:
    import torch

    torch.zeros(1, device="cuda")
    _synchronize()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def record(folder: Path) -> dict[str, Any]:
    """Call everything once while it is recorded, into a bundle and a store in the folder."""
    import bundler

    kernels = example_kernels.load()
    with bundler.session(f"file://{folder}/store", "prod"), bundler.recording() as recording:
        out = kernels.run_all("cuda")
        numbers = {name: kernels.checksum(tensor) for name, tensor in out.items()}
    with recording.collect() as bundle:
        bundle.save(folder / "recorded.tbundle")
        report = repr(bundle)
    compiles = recording.report.compiles
    return _told(numbers=numbers, listened=compiles, launches=len(out), report=report)


def _step(step: str, where: str, *words: str) -> dict[str, Any]:
    """Run one step of this program in this process."""
    import bundler

    folder = Path(where)
    bundle = folder / "recorded.tbundle"

    def replay() -> tuple[str, float]:
        report = bundler.replay(bundle)
        return repr(report), report.milliseconds

    def restore() -> tuple[str, float]:
        report = bundler.restore(bundle)
        return repr(report), report.seconds * 1e3

    def session() -> tuple[str, float]:
        begun = bundler.session(f"file://{folder}/store", "prod", push=None, replay=True)
        begun.arm_strict("error")
        assert begun.replayed is not None
        return repr(begun.replayed), begun.replayed.milliseconds

    if step == "record":
        return record(folder)
    before = {"restored": restore, "session": session}.get(step, replay)
    return serve(before, late=step == "later", armed=not words)


if __name__ == "__main__":
    print(json.dumps(_step(*sys.argv[1:])))
