# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU what no machine without one can show, and prints one table.

    python -m tools.gpu check [--results DIR] [--only PART...]

It needs torch, Triton and a GPU, and runs from the checkout.  Each row runs in processes of its own
with empty cache directories: kernels recorded and replayed by Triton, kernels that were built
without a GPU, launches by us without Triton (launches.py), the time to the first launches
(first_launches.py), and what a launch costs the CPU (launch_cost.py).  Exit status 1 when any row
is wrong.  The raw result goes to docs/results/gpu-check.json, from which `python -m tools.bench
page` makes the table in docs/benchmarks.md.

Kernels that were built without a GPU come from a process here that sees none; this machine's JIT
has to find each and compile none.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.gpu import first_launches, launch_cost, launches, steps
from tools.gpu.steps import Row, Step, bundler_command
from tools.shared import example_kernels, measurement, programs
from tools.shared.measurement import check


def main() -> int:
    """Run every row, print the table, write the result."""
    if programs.run_step(STEPS):
        return 0
    options = programs.arguments(
        __doc__,
        results=(measurement.RESULTS, "where gpu-check.json goes"),
        only=([*PARTS], f"run some parts only, of {', '.join(PARTS)}"),
    )
    with tempfile.TemporaryDirectory(prefix="gpu-check.") as folder:
        rows, figures = check_all(Path(folder), options.only)
    result = {"rows": rows, "figures": figures}
    return 1 if measurement.report("gpu-check", result, options.results) else 0


def check_all(folder: Path, parts: Sequence[str]) -> tuple[list[Row], dict[str, Any]]:
    """Run the parts, in the order in which they are written down; what breaks a part is a row of
    its own.
    """
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    launches.build_extensions()
    for name, part in PARTS.items():
        if name in parts:
            started = time.monotonic()
            try:
                found, measured = part(functools.partial(steps.step, "check"), folder)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                said = str(error).rstrip().splitlines()[-1]
                found, measured = [check(name, False, f"broke off: {said}")], {}
            rows += found
            figures |= {**measured, f"{name}: seconds": time.monotonic() - started}
    return rows, figures


def replays(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Record once, then replay by Triton from everything and from the launch set alone."""
    bundle = folder / "kernels.tbundle"
    first = step(folder, "record", str(bundle), cache=folder / "first")
    shutil.rmtree(folder / "first")
    kernels, compiles, proven = first["kernels"], first["compiles"], first["proven"]
    said = f"{kernels} kernels, {compiles} compiles, {first['run_s']:.2f} s, bundle"
    said += f" {bundle.stat().st_size / 1e3:.0f} kB"
    facts = "every recorded kernel has launch facts and proven key parts"
    rows = [
        check("record examples/kernels.py", 0 < compiles <= kernels, said),
        check(facts, proven == kernels, f"{proven} of {kernels}"),
    ]
    figures: dict[str, Any] = {"record": first}
    for keep, label in (("all", "everything"), ("launch", "launch set")):
        cache = folder / f"restored-{keep}"
        restored = step(folder, "restore", str(bundle), keep, cache=cache)
        replay = step(folder, "replay", cache=cache, refuse_ptxas=True)
        again, calls = replay["compiles"], replay["ptxas_calls"]
        equal = sum(replay["numbers"].get(k) == v for k, v in first["numbers"].items())
        placed = f"{restored['usable']} kernels, {restored['files']} files,"
        placed += f" {restored['seconds'] * 1e3:.1f} ms"
        said = f"{again} compiles, {replay['hits']} hits, {calls} ptxas calls,"
        said += f" {replay['run_s']:.2f} s (cold {first['run_s']:.2f} s)"
        same, run = f"{equal} of {len(first['numbers'])} kernels equal", f"run again ({label})"
        where = f"restore {label} into an empty directory"
        rows += [
            check(where, restored["usable"] == kernels, placed),
            check(f"{run}: compiles", again == calls == 0, said),
            check(f"{run}: numbers, bit for bit", replay["numbers"] == first["numbers"], same),
        ]
        figures[f"restore {keep}"], figures[f"replay {keep}"] = restored, replay
    return rows, figures


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
    names = ("usable", "skipped", "files", "bytes", "seconds", "unchecked")
    return {name: getattr(report, name) for name in names}


def replay() -> dict[str, Any]:
    """Run the examples without any code of ours, counting hits and compiles with Triton's own
    listener.
    """
    listener = steps.Listener()
    result = run_examples()
    if "bundler" in sys.modules:
        raise RuntimeError("the replay must not import bundler")
    return {**result, "hits": listener.hits, "compiles": listener.compiles}


def run_examples() -> dict[str, Any]:
    """Launch every example kernel; returns checksums of the outputs and the seconds it took."""
    kernels = example_kernels.load()
    started = time.monotonic()
    ok, numbers = kernels.launch_and_check("cuda")
    if not ok:
        raise RuntimeError("a kernel's numbers differ from torch's")
    return {"numbers": numbers, "run_s": time.monotonic() - started}


def built(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Restore what a process without a GPU built into a new directory, and run the examples there
    with a ptxas that refuses to assemble.
    """
    bundle, cache = folder / "here.tbundle", folder / "built-here"
    made = step(folder, "built-here", str(bundle), cache=folder / "built-here-unused")
    what = f"built here for {made['target']}, without a GPU: compiles of the JIT"
    restored = step(folder, "restore", str(bundle), "all", cache=cache)
    usable = restored["usable"]
    if not usable:
        reasons = "; ".join(sorted({reason for _, reason in restored["skipped"]}))
        return [check(what, False, f"nothing can be used here: {reasons}")], {}
    again = step(folder, "replay", cache=cache, refuse_ptxas=True)
    compiles, calls, hits = (again[name] for name in ("compiles", "ptxas_calls", "hits"))
    said = f"{compiles} compiles, {hits} hits, {calls} ptxas calls; {usable} kernels restored"
    # Every kernel that was built is one that the examples launch.
    return [check(what, compiles == calls == 0 < usable == hits, said)], {}


def build_here(output: str) -> dict[str, Any]:
    """Build the examples for this machine's GPU in a process that cannot see it."""
    from bundler.toolchain.targets import visible_targets

    target = str((visible_targets() or ())[0])
    words = ("build", "examples/kernels.py", "--target", target, "-o", output)
    done = bundler_command(*words, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"build failed: {done.stderr or done.stdout}")
    return {"target": target}


PARTS: dict[str, Callable[[Step, Path], tuple[list[Row], dict[str, Any]]]] = {
    "replay": replays,
    "built": built,
    "launch": launches.rows,
    "first": first_launches.rows,
    "cost": launch_cost.rows,
}
STEPS: dict[str, Step] = {
    "record": record,
    "restore": restore,
    "replay": replay,
    "built-here": build_here,
    **launches.STEPS,
    **first_launches.STEPS,
    **launch_cost.STEPS,
}
