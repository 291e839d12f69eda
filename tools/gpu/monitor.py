# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU that vLLM's own JIT monitor, armed in error mode, is silent after
a replay and raises without.

    python -m tools.gpu monitor --monitor jit_monitor.py [--only NAME,...] [--captures DIR] [--results DIR]

`jit_monitor.py` is vllm/utils/jit_monitor.py of vLLM's wheel (`python -m tools.servers wheels`
unpacks it).  For examples/kernels.py, and for Liger and FLA where they can be imported, forward and
backward: a capture compiles the kernels on all cores; one process records; others restore and
replay into an empty cache directory, and
make 100 calls with a `jit_post_compile_hook` that raises, then 100 with the monitor; the last one only restores, and the monitor has to raise.
Exit status 1 when any row is wrong.  The raw result goes to docs/results/gpu-monitor.json.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu import client_workloads, replay, steps
from tools.gpu.steps import Row
from tools.shared import measurement, programs
from tools.shared.vllm_monitor import lay_out_monitor

_MODULE = "tools.gpu.monitor"
_CAPTURED = "captured.tbundle"
_RAISED = "JIT compilation during inference"


class Monitor(replay.Witness):
    """vLLM's monitor in error mode, in place of a hook of ours."""

    def arm(self) -> None:
        """Arm it as a worker of vLLM does after its warm-up."""
        importlib.import_module("vllm.utils.jit_monitor").activate(mode="error")


def main() -> int:
    """Run every row, print the table, write the result."""
    options = programs.arguments(
        __doc__,
        monitor=(Path, "vllm/utils/jit_monitor.py of the wheel"),
        only=("", "workloads, separated by commas: examples, liger, fla"),
        captures=(Path, "where captured bundles are, and stay, for other programs"),
        results=(measurement.RESULTS, "where gpu-monitor.json goes"),
    )
    if options.monitor is None:
        raise SystemExit("--monitor is missing: the file jit_monitor.py of vLLM's wheel")
    names = [*filter(None, options.only.split(","))] or client_workloads.available()
    with tempfile.TemporaryDirectory(prefix="gpu-monitor.") as name:
        folder = Path(name)
        package = lay_out_monitor(folder / "package", options.monitor)
        captures = options.captures or folder / "captures"
        rows = (
            row
            for name in names
            for row in check(folder / name, name, package, captures / f"{name}.tbundle")
        )
        found = steps.told("gpu-monitor", rows, options.results)
    return 0 if all(row["ok"] for row in found) else 1


def check(folder: Path, workload: str, package: Path, captured: Path) -> Iterator[Row]:
    """Record a workload in one process, serve it in others."""
    folder.mkdir()
    client_workloads.capture(captured, _MODULE, "call", folder, workload, "")
    (folder / _CAPTURED).symlink_to(captured.absolute())

    def run(step: str, witness: str = "hook") -> dict[str, Any]:
        return replay.process(folder, step, workload, witness, module=_MODULE, path=package)

    recorded = run("record")
    yield replay.row(f"{workload}: recorded", recorded, ok=recorded["error"] == "")
    witnesses = {"hook": "a hook that raises", "monitor": "vLLM's monitor in error mode"}
    for witness, words in witnesses.items():
        done = run("replay", witness)
        silent = done["error"] == "" and done["launches"] >= replay.CALLS
        yield replay.row(f"{workload}: replayed, {words}", done, ok=silent)
    restored = run("restore", "monitor")
    alone = f"{workload}: restored alone, the monitor raises"
    yield replay.row(alone, restored, ok=_RAISED in restored["error"])


def _step(step: str, where: str, workload: str, witness: str) -> dict[str, Any]:
    """Run one step of this program in this process."""
    import bundler

    folder, load = Path(where), client_workloads.LOADERS[workload]
    bundle = folder / "recorded.tbundle"
    if step == "call":
        return {"called": sorted(load().run_all("cuda"))}
    if step == "record":
        # Triton compiles what the capture did not get.
        if (folder / _CAPTURED).is_file():
            bundler.restore(folder / _CAPTURED)
        return replay.record(folder, load)

    def before() -> tuple[str, float]:
        if step == "restore":
            restored = bundler.restore(bundle)
            return repr(restored), restored.seconds * 1e3
        replayed = bundler.replay(bundle)
        return repr(replayed), replayed.milliseconds

    return replay.serve(
        before, load=load, witness=Monitor() if witness == "monitor" else replay.Witness()
    )


if __name__ == "__main__":
    print(json.dumps(_step(*sys.argv[1:])))
