# SPDX-License-Identifier: Apache-2.0
"""Measures on a machine with a GPU what the first calls of a process cost with our launcher for
Triton, and prints a table.

    python -m tools.gpu launcher [--rounds N] [--results DIR]

It needs torch, Triton, a GPU and gcc, and runs from the checkout.  One process records every
workload; fresh ones, each with an empty cache directory and trust in kernels alone, restore it in a
session and make the first calls: with our launcher, with Triton's, and, for comparison, without us
from the warm directory.  A wrapper around gcc counts its runs.  Then every case of the GPU check is
launched with both launchers and compared bit for bit, and one launch by each is timed in one
process.  Exit status 1 when a result differs, gcc ran with ours, or a target is missed.  The raw
result goes to docs/results/gpu-launcher.json.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.gpu import cases, launches, steps
from tools.gpu.steps import Row
from tools.shared import example_kernels, measurement, programs
from tools.shared.measurement import check, median, ratios

_MODULE = "tools.gpu.launcher"
# First calls with our launcher may take this many times those from the warm directory, and a launch
# what one of Triton's takes.
MOST_FIRST, MOST_LAUNCH = 1.15, 1.0
_LAUNCHES, _PAIRS = 2000, 9
WAYS = {
    "warm": "warm directory, Triton alone",
    "ours": "restored, our launcher",
    "triton": "restored, Triton's launcher",
}
Calls = Callable[[], dict[str, Any]]


def main() -> int:
    """Run everything, print the table, write the result."""
    options = programs.arguments(
        __doc__,
        rounds=(3, "fresh processes a way and workload"),
        results=(measurement.RESULTS, "where gpu-launcher.json goes"),
    )
    launches.build_extensions()
    with tempfile.TemporaryDirectory(prefix="gpu-launcher.") as folder:
        found = steps.told("gpu-launcher", _rows(Path(folder), options.rounds), options.results)
    return 0 if all(row["ok"] for row in found) else 1


def _rows(folder: Path, rounds: int) -> Iterator[Row]:
    for name in WORKLOADS:
        recorded = _process(folder, "record", name)
        if recorded.get("error"):
            yield check(f"{name}: recorded", False, recorded["error"])
            continue
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, done in runs.items():
                done.append(_process(folder, "first", name, way))
        yield from _workload_rows(name, recorded, runs)
    yield _cases_row(folder)
    yield _cost_row(_process(folder, "cost"))


def _workload_rows(
    name: str, recorded: dict[str, Any], runs: dict[str, list[dict[str, Any]]]
) -> Iterator[Row]:
    errors = {
        way: next((run["error"] for run in done if run.get("error")), "")
        for way, done in runs.items()
    }
    if any(errors.values()):
        for way, error in errors.items():
            yield check(f"{name}: {WAYS[way]}", not error, error or "fine", runs=runs[way])
        return
    first = {way: median(run["first_ms"] for run in done) for way, done in runs.items()}
    for way, done in runs.items():
        same = all(run["numbers"] == recorded["numbers"] for run in done)
        builds, begun = max(r["compiler_runs"] for r in done), median(r["begun_ms"] for r in done)
        ratio, limit = first[way] / first["warm"], ""
        ok = same
        if way == "ours":
            limit = f" (at most {MOST_FIRST})"
            ok = same and not builds and ratio <= MOST_FIRST
        yield check(
            f"{name}: {WAYS[way]}",
            ok,
            f"first calls {first[way]:.0f} ms, {ratio:.2f} x the warm directory{limit};"
            f" {builds} runs of gcc; session began in {begun:.0f} ms;"
            f" {'the same numbers' if same else 'OTHER NUMBERS'} {done[0]['launchers']}",
            ratio=ratio,
            runs=done,
        )


def _cases_row(folder: Path) -> Row:
    name = "launch cases, both launchers"
    theirs, ours = _process(folder, "cases", "triton"), _process(folder, "cases", "ours")
    if theirs.get("error") or ours.get("error"):
        return check(name, False, f"{theirs.get('error')}; {ours.get('error')}")
    numbers, launchers = theirs["numbers"], ours["launchers"]
    different = [case for case, digest in numbers.items() if ours["numbers"].get(case) != digest]
    same = not different and theirs["refused"] == ours["refused"]
    same = same and launchers[0] > 0 and not launchers[1]
    found = f"different: {different}; {launchers}"
    if same:
        found = f"{len(numbers)} cases, the same bits"
    return check(name, same, found, theirs=theirs, ours=ours)


def _cost_row(done: dict[str, Any]) -> Row:
    if done.get("error"):
        return check("one launch", False, done["error"])
    ours, theirs = done["ours_us"], done["triton_us"]
    ratio = median(ratios(ours, theirs))
    found = f"{median(ours):.2f} us, Triton's {median(theirs):.2f} us: {ratio:.2f} x"
    found += f" (at most {MOST_LAUNCH})"
    return check("one launch, our launcher", ratio <= MOST_LAUNCH, found, ratio=ratio, **done)


def _process(folder: Path, step: str, *words: str) -> dict[str, Any]:
    """Run one step in a process of its own; returns what it printed last, and how often it ran the
    C compiler.
    """
    warm = folder / f"warm-{words[0]}" if step == "record" or words[-1:] == ("warm",) else None
    cache = warm or Path(tempfile.mkdtemp(prefix="cache-", dir=folder))
    compiler, log = counting_compiler(Path(tempfile.mkdtemp(prefix="cc-", dir=folder)))
    variables = {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_CACHE_AUTOTUNING": "1",
        "CC": compiler,
        "TRITON_BUNDLER_LAUNCHER": "bundler" if words[-1:] == ("ours",) else "triton",
        "TRITON_BUNDLER_LOCAL": str(folder / "local"),
    }
    found = steps.process(_MODULE, step, str(folder), *words, environment=variables)
    return {**found, "compiler_runs": len(log.read_text().splitlines()) if log.exists() else 0}


def counting_compiler(folder: Path) -> tuple[str, Path]:
    """Return a C compiler that notes each of its runs in a file, and that file."""
    log, wrapper = folder / "runs", folder / "cc"
    real = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "/bin/false"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(log))}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper), log


# -------------------------------------------------------------- Steps, each in a process of its own


def _record(folder: Path, name: str) -> dict[str, Any]:
    import bundler

    with bundler.session(f"file://{folder}/store-{name}", "prod"):
        return {"numbers": WORKLOADS[name]()()}


def _first(folder: Path, name: str, way: str) -> dict[str, Any]:
    """Make the first calls; the session begins before the workload is imported, since packages ask
    Triton for its driver as they are.

    Torch, its context on the GPU and the workload's imports come before the clock of the calls
    starts.
    """
    import torch

    import bundler

    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    store = f"file://{folder}/store-{name}"
    session = None if way == "warm" else bundler.session(store, "prod", push=None)
    begin_ms = (time.perf_counter() - began) * 1e3
    calls = WORKLOADS[name]()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    numbers = calls()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    launchers = _launchers(session.counters) if session is not None else []
    if session is not None:
        session.close()
    times = {"first_ms": (ended - begun) * 1e3, "begun_ms": begin_ms}
    return {**times, "numbers": numbers, "launchers": launchers}


def _launchers(counters: Any) -> list[Any]:
    return [counters.launchers, dict(counters.launchers_of_triton)]


def _cases(folder: Path, way: str) -> dict[str, Any]:
    import bundler

    with bundler.session(f"file://{folder}/store-cases-{way}", push=None) as session:
        found = launches.record(str(folder / f"cases-{way}.tbundle"))
        return {**found, "launchers": _launchers(session.counters)}


def _cost(_folder: Path) -> dict[str, Any]:
    """Time launches of one loaded kernel by both launchers, in turns: processor time of this
    process for one call.
    """
    import torch
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    from bundler.runtime.launch.jit.jit_modules import JitModules
    from bundler.toolchain.driver_modules import driver_modules

    x, out = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    kernel = launches.load_kernels().add[(1,)](x, x, out, 1024, BLOCK=1024)
    theirs = nvidia.CudaLauncher(kernel.src, kernel.metadata)
    answers: list[str | None] = []
    driver_modules.supply(JitModules(answers.append))
    active: Any = driver.active
    # one object, whose functions are ours from now on; `theirs` holds its own
    active.utils = nvidia.CudaUtils()
    ours = nvidia.CudaLauncher(kernel.src, kernel.metadata)
    if any(answers):
        raise RuntimeError(f"our launcher was not given: {answers}")
    stream = torch.cuda.current_stream().cuda_stream
    leading = (1, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None)

    def timed(launcher: Callable[..., None]) -> float:
        torch.cuda.synchronize()
        began = time.process_time_ns()
        for number in range(_LAUNCHES):
            launcher(*leading, x, x, out, 1024, 1024)
            if number % 500 == 499:
                # the driver's queue never fills, which would be timed otherwise
                torch.cuda.synchronize()
        return (time.process_time_ns() - began) / _LAUNCHES / 1e3

    for launcher in (theirs, ours):
        timed(launcher)
    pairs = [(timed(ours), timed(theirs)) for _ in range(_PAIRS)]
    return {"ours_us": [pair[0] for pair in pairs], "triton_us": [pair[1] for pair in pairs]}


_STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "record": _record,
    "first": _first,
    "cases": _cases,
    "cost": _cost,
}


def _workload_cases() -> Calls:
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernels = launches.load_kernels()
    launches.allocate_scratch()

    def digest(case: cases.Case) -> str:
        return launches.digest_of(torch, case, TensorDescriptor, getattr(kernels, case.kernel))

    return lambda: {case.row: digest(case) for case in cases.cases(1)}


def _workload_examples() -> Calls:
    kernels = example_kernels.load()
    return lambda: {
        name: kernels.checksum(tensor) for name, tensor in kernels.run_all("cuda").items()
    }


WORKLOADS = {"cases": _workload_cases, "examples": _workload_examples}

if __name__ == "__main__":
    print(json.dumps(_STEPS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
