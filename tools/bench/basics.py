# SPDX-License-Identifier: Apache-2.0
"""What the package costs a program that uses it: its import, and recording compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from tools.shared import example_kernels, measurement
from tools.shared.measurement import row
from tools.shared.processes import ROOT

IMPORT_TARGET_MS = 60.0
RECORDING_TARGET_US = 200.0


def basics(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of both."""
    return [import_cost(rounds), recording_cost(rounds)]


def import_cost(rounds: int) -> dict[str, Any]:
    """Time `import bundler` in fresh interpreters against an interpreter that imports nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled bytecode
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        samples: dict[str, list[float]] = {"pass": [], "import bundler": []}
        for number in range(rounds + 1):
            for code, times in samples.items():
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], env=environment, check=True)
                if number:  # the first pair fills the bytecode cache
                    times.append((time.perf_counter() - started) * 1e3)
    figure = measurement.median([b - a for a, b in zip(samples["pass"], samples["import bundler"], strict=True)])
    return row("import bundler, added to interpreter start", figure, "ms", most=IMPORT_TARGET_MS, samples=samples)


def recording_cost(rounds: int) -> dict[str, Any]:
    """Time cache hits of Triton with and without a recording."""
    with tempfile.TemporaryDirectory(prefix="bench.", dir=measurement.fast_directory()) as folder:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = folder
        import bundler

        kernels = example_kernels.load()
        targets = list(kernels.DEFAULT_TARGETS)
        count = len(kernels.compile_all(targets))
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            samples["without"].append(_timed(kernels.compile_all, targets) / count * 1e6)
            with bundler.recording():
                samples["with"].append(_timed(kernels.compile_all, targets) / count * 1e6)
        os.environ.pop("TRITON_CACHE_DIR")
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    figure = measurement.median([b - a for a, b in zip(samples["without"], samples["with"], strict=True)])
    work = "recording, added to each compile call (here: a hit)"
    return row(work, figure, "us", most=RECORDING_TARGET_US, samples=samples)


def _timed(work: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started
