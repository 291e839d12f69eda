# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU what no machine without one can show, and prints one table.

    python -m tools.gpu check [--results DIR] [--only PART...]

It needs torch, Triton and a GPU, and runs from the checkout.  Each row runs in processes of its own
with empty cache directories: kernels recorded and replayed by Triton, kernels that were built
without a GPU, launches by us without Triton (launches.py), the time to the first launches
(first_launches.py), and what a launch costs the CPU (launch_cost.py).  Exit status 1 when any row
is wrong.  The raw result goes to docs/results/gpu-check.json, from which `python -m tools.bench
page` makes the table in docs/benchmarks.md.

Of kernels that a machine without a GPU built, this machine's JIT has to find each and compile none.
Each bundle in `.whl/built/` of the checkout is one: `py312.tbundle` for the Python that it was
built under.  One that is built here, in a process that sees no GPU, is added, so that the rows
never depend on somebody's files alone.  To make the others, on any machine, under each Python:

    triton-bundler build examples/kernels.py --target cuda:90 -o .whl/built/py312.tbundle
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gpu import first_launches, launch_cost, launches, steps
from tools.gpu.steps import Row, Step, bundler_command
from tools.shared import example_kernels, measurement, programs
from tools.shared.measurement import check
from tools.shared.processes import ROOT

BUILT = ROOT / ".whl" / "built"
_NAME = re.compile(r"py(\d)(\d+)")


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
    launches.build_extension(folder / "build")
    os.environ["GPU_CHECK_BUILD"] = str(folder / "build")
    for name, part in PARTS.items():
        if name in parts:
            started = time.monotonic()
            try:
                found, measured = part(functools.partial(steps.step, "check"), folder)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                found, measured = [broken(name, error)], {}
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


def built(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return a row for each bundle: how often the JIT compiled after it was restored."""
    found = [_built_here(step, folder)]
    for path in sorted(BUILT.glob("*.tbundle")):
        match = _NAME.match(path.name)
        version = (int(match[1]), int(match[2])) if match is not None else sys.version_info[:2]
        found += _built_elsewhere(step, folder, path, version)
    return found, {}


def _built_here(step: Step, folder: Path) -> Row:
    bundle = folder / "here.tbundle"
    try:
        built = step(folder, "built-here", str(bundle), cache=folder / "built-here-unused")
    except RuntimeError as error:  # the bundles that came from elsewhere do not need it
        return broken("build here, without a GPU", error)
    return _jit_row(f"built here for {built['target']}, without a GPU", step, folder, bundle)


def _built_elsewhere(
    step: Step, folder: Path, path: Path, version: tuple[int, ...]
) -> Iterator[Row]:
    name = f"built elsewhere under Python {version[0]}.{version[1]}"
    if version == sys.version_info[:2]:
        yield _jit_row(name, step, folder, path)
        return
    plain = step(folder, "built-restore", str(path), "", cache=folder / f"built-{path.stem}-plain")
    reasons = _reasons(plain)
    refused = plain["usable"] == 0 and "rekey=True" in reasons
    yield check(f"{name}: skipped, and why", refused, reasons or "nothing was skipped")
    yield _jit_row(f"{name}, rekey=True", step, folder, path, rekey=True)


def _jit_row(name: str, step: Step, folder: Path, bundle: Path, *, rekey: bool = False) -> Row:
    """Restore into a new directory, and run the examples there with a ptxas that refuses to
    assemble.
    """
    what, cache = f"{name}: compiles of the JIT", folder / f"built-{bundle.stem}"
    restored = step(folder, "built-restore", str(bundle), "rekey" if rekey else "", cache=cache)
    usable = restored["usable"]
    if not usable:
        return check(what, False, f"nothing can be used here: {_reasons(restored)}")
    try:
        replay = step(folder, "replay", cache=cache, refuse_ptxas=True)
    except RuntimeError as error:
        return broken(what, error)
    compiles, calls, hits = (replay[name] for name in ("compiles", "ptxas_calls", "hits"))
    said = f"{compiles} compiles, {hits} hits, {calls} ptxas calls; {usable} kernels restored,"
    said += f" {restored['rekeyed']} of them rekeyed"
    # Every kernel that was built is one that the examples launch.
    return check(what, compiles == calls == 0 < usable == hits, said)


def _reasons(restored: dict[str, Any]) -> str:
    return "; ".join(sorted({reason for _, reason in restored["skipped"]}))


def broken(what: str, error: RuntimeError) -> Row:
    """Return the row of what could not be looked at."""
    return check(what, False, f"broke off: {str(error).rstrip().splitlines()[-1]}")


def build_here(output: str) -> dict[str, Any]:
    """Build the examples for this machine's GPU in a process that cannot see it."""
    from bundler.toolchain.targets import visible_targets

    target = str((visible_targets() or ())[0])
    words = ("build", "examples/kernels.py", "--target", target, "-o", output)
    done = bundler_command(*words, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"build failed: {done.stderr or done.stdout}")
    return {"target": target}


def restore_built(path: str, rekey: str) -> dict[str, Any]:
    """Restore where Triton looks."""
    import bundler

    report = bundler.restore(path, rekey=bool(rekey))
    return {"usable": report.usable, "rekeyed": len(report.rekeyed), "skipped": report.skipped}


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
    "built-restore": restore_built,
    **launches.STEPS,
    **first_launches.STEPS,
    **launch_cost.STEPS,
}
