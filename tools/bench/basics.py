# SPDX-License-Identifier: Apache-2.0
"""What the package costs a program that uses it: its imports, kernels that are found, and recording
compiles.
"""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

from tools.bench.fresh import imports
from tools.bench.hits import hits
from tools.bench.sides import working_folder
from tools.bench.signature_cost import signature_cost
from tools.shared import example_kernels, measurement
from tools.shared.measurement import differences, median, row

RECORDING_TARGET_US = 200.0


def basics(rounds: int) -> dict[str, Any]:
    """Return the rows of all, and by name the seconds of each step of what has steps."""
    with working_folder(measurement.fast_directory()) as folder:
        found, hit = hits(folder, rounds)
        signatures, judging = signature_cost(rounds)
        rows = [*imports(rounds), *found, recording_cost(rounds), *signatures]
    return {"rows": rows, "profile": {"store hit": hit} | ({"judging": judging} if judging else {})}


def recording_cost(rounds: int) -> dict[str, Any]:
    """Time cache hits of Triton with and without a recording."""
    with (
        working_folder(measurement.fast_directory()) as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
    ):
        import bundler

        kernels = example_kernels.load()
        targets = list(kernels.DEFAULT_TARGETS)
        count = len(kernels.compile_all(targets))
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            samples["without"].append(_timed(kernels.compile_all, targets) / count * 1e6)
            with bundler.recording():
                samples["with"].append(_timed(kernels.compile_all, targets) / count * 1e6)
    figure = median(differences(samples["with"], samples["without"]))
    work = "recording, added to each compile call (here: a hit)"
    return row(work, figure, "us", most=RECORDING_TARGET_US, samples=samples)


def _timed(work: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started
