# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU what no machine without one can show, and prints one table.

    python -m tools.gpu check [--results DIR] [--only PART...]

It needs torch, Triton and a GPU, and runs from the checkout.  Each row runs in processes of its own
with empty cache directories: kernels recorded and replayed by Triton, kernels that were built
without a GPU (built_kernels.py), launches by us without Triton (launches.py), the time to the first
launches (first_launches.py), and what a launch costs the CPU (launch_cost.py).  Exit status 1 when
any row is wrong.  The raw result goes to docs/results/gpu-check.json, from which `python -m
tools.bench page` makes the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.gpu import built_kernels, first_launches, launch_cost, launches
from tools.shared import example_kernels, measurement
from tools.shared.processes import output


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    ok: bool
    found: str


def main() -> int:
    """Run every row, print the table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where gpu-check.json goes"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(PARTS),
        default=sorted(PARTS),
        help="run some parts only",
    )
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step[0]](*options.step[1:])))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check.") as folder:
        rows, figures = check_all(Path(folder), options.only)
    width = max(len(row.check) for row in rows)
    for row in rows:
        print(f"{'ok  ' if row.ok else 'FAIL'}  {row.check:<{width}}  {row.found}")
    path = measurement.save(
        "gpu-check", {"rows": [asdict(row) for row in rows], "figures": figures}, options.results
    )
    print(f"\nwritten to {path}")
    return 0 if all(row.ok for row in rows) else 1


def check_all(folder: Path, parts: Sequence[str]) -> tuple[list[Row], dict[str, Any]]:
    """Run the parts, in the order in which they are written down; what breaks a part is a row of
    its own.
    """
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    launches.build_extension(folder / "build")
    os.environ["GPU_CHECK_BUILD"] = str(folder / "build")
    for name, part in PARTS.items():
        if name in parts:
            started = time.monotonic()
            try:
                found, measured = part(step, folder)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                found, measured = (
                    [
                        {
                            "check": name,
                            "ok": False,
                            "found": f"broke off: {str(error).splitlines()[-1]}",
                        }
                    ],
                    {},
                )
            rows += [Row(**row) for row in found]
            figures |= {**measured, f"{name}: seconds": time.monotonic() - started}
    return rows, figures


def replays(step: Step, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Record once, then replay by Triton from everything and from the launch set alone."""
    bundle = folder / "kernels.tbundle"
    first = step(folder, "record", str(bundle), cache=folder / "first")
    shutil.rmtree(folder / "first")
    rows = [
        Row(
            "record examples/kernels.py",
            first["compiles"] > 0 and first["kernels"] >= first["compiles"],
            f"{first['kernels']} kernels, {first['compiles']} compiles, {first['run_s']:.2f} s, "
            f"bundle {bundle.stat().st_size / 1e3:.0f} kB",
        ),
        Row(
            "every recorded kernel has launch facts and proven key parts",
            first["proven"] == first["kernels"],
            f"{first['proven']} of {first['kernels']}",
        ),
    ]
    figures: dict[str, Any] = {"record": first}
    for keep in ("all", "launch"):
        cache = folder / f"restored-{keep}"
        restored = step(folder, "restore", str(bundle), keep, cache=cache)
        replay = step(folder, "replay", cache=cache, refuse_ptxas=True)
        label = {"all": "everything", "launch": "launch set"}[keep]
        rows += [
            Row(
                f"restore {label} into an empty directory",
                restored["usable"] == first["kernels"],
                f"{restored['usable']} kernels, {restored['files']} files,"
                f" {restored['seconds'] * 1e3:.1f} ms",
            ),
            Row(
                f"run again ({label}): compiles",
                replay["compiles"] == 0 and replay["ptxas_calls"] == 0,
                f"{replay['compiles']} compiles, {replay['hits']} hits, {replay['ptxas_calls']}"
                f" ptxas calls, {replay['run_s']:.2f} s (cold {first['run_s']:.2f} s)",
            ),
            Row(
                f"run again ({label}): numbers, bit for bit",
                replay["numbers"] == first["numbers"],
                f"{sum(replay['numbers'].get(k) == v for k, v in first['numbers'].items())} "
                f"of {len(first['numbers'])} kernels equal",
            ),
        ]
        figures[f"restore {keep}"], figures[f"replay {keep}"] = restored, replay
    return [asdict(row) for row in rows], figures


def step(
    folder: Path, name: str, *arguments: str, cache: Path, refuse_ptxas: bool = False
) -> dict[str, Any]:
    """Run one step in a process of its own, with `cache` as Triton's cache directory."""
    environment, log = (
        measurement.refusing_ptxas(folder) if refuse_ptxas else ({}, folder / "absent")
    )
    log.unlink(missing_ok=True)
    said = output(
        "tools.gpu",
        "check",
        "--step",
        name,
        *arguments,
        environment={**environment, "TRITON_CACHE_DIR": str(cache)},
    )
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    if refuse_ptxas:
        result["ptxas_calls"] = len(log.read_text().splitlines()) if log.exists() else 0
    return result


def record(path: str) -> dict[str, Any]:
    """Run the examples under a recording and save the bundle."""
    import bundler

    with bundler.recording() as recording:
        result = run_examples()
    bundle = recording.collect()
    bundle.save(path)
    proven = sum(1 for kernel in bundle.kernels if kernel.parts is not None and kernel.parts.proven)
    return {
        **result,
        "kernels": len(bundle.kernels),
        "proven": proven,
        "left_out": recording.report.left_out,
        "compiles": recording.report.compiles,
        "hits": recording.report.hits,
    }


def restore(path: str, keep: str) -> dict[str, Any]:
    """Restore where Triton looks."""
    import bundler

    report = bundler.restore(path, keep="launch" if keep == "launch" else "all")
    return {
        "usable": report.usable,
        "skipped": report.skipped,
        "files": report.files,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "unchecked": report.unchecked,
    }


def replay() -> dict[str, Any]:
    """Run the examples without any code of ours, counting hits and compiles with Triton's own
    listener.
    """
    from triton import knobs

    counts = {"hits": 0, "compiles": 0}

    def listen(*, cache_hit: bool, **_: Any) -> None:
        counts["hits" if cache_hit else "compiles"] += 1

    knobs.compilation.listener = listen
    result = run_examples()
    if "bundler" in sys.modules:
        raise RuntimeError("the replay must not import bundler")
    return {**result, **counts}


def run_examples() -> dict[str, Any]:
    """Launch every example kernel; returns checksums of the outputs and the seconds it took."""
    kernels = example_kernels.load()
    started = time.monotonic()
    ok, numbers = kernels.launch_and_check("cuda")
    if not ok:
        raise RuntimeError("a kernel's numbers differ from torch's")
    return {"numbers": numbers, "run_s": time.monotonic() - started}


Step = Callable[..., dict[str, Any]]
PARTS: dict[str, Callable[[Step, Path], tuple[list[dict[str, Any]], dict[str, Any]]]] = {
    "replay": replays,
    "built": built_kernels.rows,
    "launch": launches.rows,
    "first": first_launches.rows,
    "cost": launch_cost.rows,
}
STEPS: dict[str, Step] = {
    "record": record,
    "restore": restore,
    "replay": replay,
    **built_kernels.STEPS,
    **launches.STEPS,
    **first_launches.STEPS,
    **launch_cost.STEPS,
}
