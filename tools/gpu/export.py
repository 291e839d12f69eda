# SPDX-License-Identifier: Apache-2.0
"""Exports a tuned kernel, and launches it from a program in C++.

    python -m tools.gpu export [--results DIR] [--programs DIR]
    python -m tools.gpu export --prepare DIR [--arch 90]

The first form needs torch, Triton, a GPU and g++.  Where the GPU's machine has no g++, `--prepare`
writes exports and programs on another machine, for an architecture, without a GPU, and `--programs`
runs those.  Exit status 1 when any row is wrong; the result goes to
docs/results/gpu-export.json.
"""

from __future__ import annotations

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
        rows = program_rows(options.programs or Path(folder))
    return 1 if measurement.report("gpu-export", {"rows": rows}, options.results) else 0


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
