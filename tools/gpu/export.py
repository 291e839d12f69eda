# SPDX-License-Identifier: Apache-2.0
"""Exports a tuned kernel, launches it from a program in C++, and looks at it with torch's profiler.

    python -m tools.gpu export [--results DIR] [--programs DIR]
    python -m tools.gpu export --prepare DIR [--arch 90]

The first form needs torch, Triton, a GPU and g++.  Where the GPU's machine has no g++, `--prepare`
writes exports and programs on another machine, for an architecture, without a GPU, and `--programs`
runs those.  Exit status 1 when any row is wrong; the result goes to
docs/results/gpu-export.json.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tools.shared import measurement, programs
from tools.shared.measurement import row
from tools.shared.processes import ROOT, captured

EXAMPLE = ROOT / "examples" / "exported_kernel.cpp"
# Elements; all divisible by 16, as the exported binary takes for granted.  The first is less than a
# block.
SIZES = (16, 1008, 100_000, 1 << 20, 1 << 25)
BLOCK = 1024
# One of a plain launch, one that needs launch attributes.
CASES: dict[str, dict[str, Any]] = {"plain": {}, "cluster of 2": {"num_ctas": 2}}
_OF_KERNEL = ("file", "hash", "kwargs", "num_gb")
FACTS = ("grid", "stream", "num_warps", "num_stages", *(f"kernel_{name}" for name in _OF_KERNEL))
_TIMEOUT_S = 120


def main() -> int:
    """Run every row, print the table, write the result."""
    options = programs.arguments(
        __doc__,
        results=(measurement.RESULTS, "where gpu-export.json goes"),
        prepare=(Path, "write exports and programs there, and end"),
        programs=(Path, "what --prepare wrote; else it is made now"),
        arch=("90", "that --prepare compiles for"),
    )
    if options.prepare is not None:
        prepare(options.prepare, options.arch)
        print(f"written to {options.prepare}")
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-export.") as folder:
        if options.programs is None:
            prepare(Path(folder), None)
        rows = [*program_rows(options.programs or Path(folder)), *profiler_rows(Path(folder))]
    return 1 if measurement.report("gpu-export", {"rows": rows}, options.results) else 0


# ----------------------------------------------------------------------------------------- Programs


def prepare(folder: Path, arch: str | None) -> None:
    """Export each case, and compile the program for it; `arch` None takes the GPU of this
    machine.
    """
    import torch

    from bundler import autotune
    from bundler.runtime import Config, DeviceProperties, DryDriver, TextGrid, TunerOptions
    from tools.gpu.kernels import add

    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit(
            "there is no compiler of C++ here; run with --prepare elsewhere, and give --programs"
        )
    driver = (
        None
        if arch is None
        else DryDriver(properties=DeviceProperties(arch, 1024, 232448, 32, 132, cooperative=True))
    )
    x = torch.empty(BLOCK)
    for name, more in CASES.items():
        options = TunerOptions(driver=driver, workers=1, record=False)
        kernel = autotune([Config({"BLOCK": BLOCK}, **more)], ["n"], options=options)(add)
        place = folder / name.replace(" ", "-")
        exported = kernel.export(place, x, x, x, BLOCK, grid=TextGrid("-(-n // BLOCK)"))
        flags = ("-std=c++17", "-O2", "-static-libstdc++", "-static-libgcc", "-include")
        command: list[str | Path] = [
            compiler,
            *flags,
            exported.header,
            EXAMPLE,
            "-ldl",
            "-o",
            place / "program",
        ]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S)


def program_rows(programs: Path) -> list[dict[str, Any]]:
    """Run each program with each size."""
    rows = []
    for name in CASES:
        place = programs / name.replace(" ", "-")
        for size in SIZES:
            done = captured(place / "program", place, size, timeout=_TIMEOUT_S)
            said = done.stdout.splitlines()
            expected = [f"grid {-(-size // BLOCK)} 1 1", f"0 of {size} wrong"]
            right = done.returncode == 0 and said[:2] == expected
            peer = said[2] if right else f"{done.stdout} {done.stderr}".strip()
            what = f"C++, {name}: {size:,} sums and the grid right"
            rows.append(row(what, int(right), "", least=1, peer=peer))
    return rows


# ------------------------------------------------------------------------------------- The profiler


def profiler_rows(folder: Path) -> list[dict[str, Any]]:
    """Time one kernel by events and by the profiler; look at what a trace tells of its launches;
    keep its tensors.
    """
    import torch

    from bundler import autotune
    from bundler.runtime import (
        BandwidthReport,
        Config,
        LaunchDump,
        ProfilerClock,
        TextGrid,
        TunerOptions,
    )
    from bundler.runtime.tuning.benchmark import CudaClock
    from tools.gpu.kernels import add

    size, grid = SIZES[-1], TextGrid("-(-n // BLOCK)")
    x, y, out = (torch.full((size,), float(value), device="cuda") for value in (1, 2, 0))
    report = BandwidthReport(clock=ProfilerClock)
    dump = LaunchDump(folder / "launches", tensors=folder / "tensors")
    options = TunerOptions(
        workers=1, record=False, bandwidth=report, dump=dump, gigabytes=size * 12 / 1e9
    )
    kernel = autotune([Config({"BLOCK": BLOCK})], ["n"], options=options)(add)
    kernel[grid](x, y, out, size)
    handle = kernel.handle(x, y, out, size)
    stream, programs = torch.cuda.current_stream().cuda_stream, -(-size // BLOCK)
    launch = functools.partial(handle.launch, programs, 1, 1, stream, x, y, out, size)
    events_ms = CudaClock().sample(launch, lambda: None).median_ms
    (seen,) = report.rows
    with torch.profiler.profile(record_shapes=True) as profiler:
        kernel[grid](x, y, out, size)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    told = [
        event["args"]
        for event in events
        if event.get("name") == "add" and "kernel_hash" in event.get("args", {})
    ]
    known = sum(name in told[0] for name in FACTS) if told else 0
    (kept,) = (folder / "tensors").glob("*/tensor_2.pt")
    saved = torch.load(kept, weights_only=True)
    ratio, kernel_us = seen.milliseconds / events_ms, seen.milliseconds * 1e3
    times = f"{kernel_us:.1f} us, {seen.gb_per_s:,.0f} GB/s; events {events_ms * 1e3:.1f} us"
    count, right = len(FACTS), int(bool((saved == 3).all()))
    return [
        row(
            "a kernel by the profiler against events", ratio, "x", least=0.7, most=1.05, peer=times
        ),
        row("facts in a range of the trace", known, f"of {count}", least=count, peer=f"{told[:1]}"),
        row("ranges of one launch", len(told), "", least=1, most=1),
        row("a tensor as it was before the last launch", right, "", least=1),
    ]
