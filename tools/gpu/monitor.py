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

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu import client_workloads, replay
from tools.shared import measurement
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--monitor",
        type=Path,
        required=True,
        metavar="FILE",
        help="vllm/utils/jit_monitor.py of the wheel",
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="workloads: examples, liger, fla"
    )
    parser.add_argument(
        "--captures",
        type=Path,
        metavar="DIR",
        help="where captured bundles are, and stay, for other programs",
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where gpu-monitor.json goes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-monitor.") as folder:
        package = lay_out_monitor(Path(folder) / "package", options.monitor)
        captures = options.captures or Path(folder) / "captures"
        rows: list[dict[str, Any]] = []
        for name in (
            filter(None, options.only.split(",")) if options.only else client_workloads.available()
        ):
            for row in check(Path(folder) / name, name, package, captures / f"{name}.tbundle"):
                rows.append(row)
                print(
                    f"{'ok  ' if row['ok'] else 'FAIL'}  {row['check']:<60}  {row['found']}",
                    flush=True,
                )
                # After each row: a machine that is taken away leaves what was found.
                measurement.save("gpu-monitor", {"rows": rows}, options.results)
    print(f"\nwritten to {options.results}")
    return 0 if all(row["ok"] for row in rows) else 1


def check(folder: Path, workload: str, package: Path, captured: Path) -> Iterator[dict[str, Any]]:
    """Record a workload in one process, serve it in others."""
    folder.mkdir()
    client_workloads.capture(captured, _MODULE, "call", folder, workload, "")
    (folder / _CAPTURED).symlink_to(captured.absolute())

    def run(step: str, witness: str = "hook") -> dict[str, Any]:
        return replay.process(folder, step, workload, witness, module=_MODULE, path=package)

    recorded = run("record")
    yield replay.row(f"{workload}: recorded", recorded, ok=recorded["error"] == "")
    for witness, words in (
        ("hook", "a hook that raises"),
        ("monitor", "vLLM's monitor in error mode"),
    ):
        done = run("replay", witness)
        silent = done["error"] == "" and done["launches"] >= replay.CALLS
        yield replay.row(f"{workload}: replayed, {words}", done, ok=silent)
    restored = run("restore", "monitor")
    yield replay.row(
        f"{workload}: restored alone, the monitor raises", restored, ok=_RAISED in restored["error"]
    )


def _step(step: str, where: str, workload: str, witness: str) -> dict[str, Any]:
    """Run one step of this program in this process."""
    import bundler

    folder, load = Path(where), client_workloads.available()[workload]
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
