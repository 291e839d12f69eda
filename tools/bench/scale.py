# SPDX-License-Identifier: Apache-2.0
"""Measures whether a bundle of 100,000 kernels costs a hundred times what one of 1,000 costs, and
no more.

    python -m tools.bench scale [--check] [--kernels N] [--rounds N] [--quick] [--results DIR] [--keep DIR]

N real kernels are compiled once, as for `bundle`; the larger bundle has a hundred different copies
of the launch set of each. Facts of launches and parts of keys are in them too; those of copies are
equal.  Both bundles are loaded and restored in turn, each time by an interpreter of its own.
Memory is the peak above an interpreter that has imported the package; what a restore takes is
counted above the loaded bundle, whose manifest and kernels are in memory.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from tools.bench import tables
from tools.bench.memory import multiply, peak_bytes
from tools.bench.sides import arguments, concluded, working_folder
from tools.shared import measurement, programs
from tools.shared.kernel_variants import cache_of, compile_part
from tools.shared.measurement import differences, median, ratios, row
from tools.shared.processes import answer, output

KERNELS, ROUNDS, COPIES = (1000, 20), (5, 2), 100
QUICK_COPIES = 3
LOAD_TARGET_MS, MANY_LOAD_TARGET_MS, MANY_LOAD_TARGET_MB = 20.0, 2500.0, 400.0
TIME_TARGET, MEMORY_TARGET, FLAT_TARGET_MB = 1.15, 1.3, 60.0
SECTION = """`python -m tools.bench scale`. The launch sets of {kernels:,} kernels, and of {copies} different copies of each; {rounds} rounds in
which the two take turns, each in a new interpreter. Memory is the peak of the process: of a load above an interpreter that has imported
the package, of a restore above the loaded bundle with its kernels.
"""
Sample = dict[str, float]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    copies = QUICK_COPIES if options.quick else COPIES
    cache = cache_of(options.kernels, options.keep)
    with working_folder(measurement.fast_directory()) as work:
        samples = measure(cache, options.kernels, work, copies, options.rounds)
    facts = {"kernels": options.kernels, "copies": copies, "rounds": options.rounds}
    result = {**facts, "samples": samples, "rows": rows_of(samples)}
    return concluded("bench-scale", result, options)


def measure(
    cache: Path, kernels: int, work: Path, copies: int, rounds: int
) -> dict[str, list[Sample]]:
    """Return the samples of both bundles, `one` and `many`."""
    sides = {"one": 1, "many": copies}
    for name, times in sides.items():
        words = ("--step", "make", str(kernels), str(work / f"{name}.tbundle"), str(times))
        output(__name__, *words, environment={"TRITON_CACHE_DIR": str(cache)})

    found: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in sides:
            restored = ("--step", "restore", str(work / f"{name}.tbundle"), str(work / "out"))
            found[name].append(answer(__name__, *restored, environment={}))
            shutil.rmtree(work / "out")
    return found


def rows_of(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Return the rows: what each costs, and what a kernel of the many costs beside one of
    the few.
    """
    one, many = samples["one"], samples["many"]
    few, lots = f"{int(one[0]['kernels']):,}", f"{int(many[0]['kernels']):,}"

    def of(found: list[Sample], name: str) -> list[float]:
        return [sample[name] for sample in found]

    def each(found: list[Sample]) -> list[float]:
        return ratios(of(found, "restore_s"), of(found, "kernels"))

    memory, less_memory = of(many, "restore_bytes"), of(one, "restore_bytes")
    beside = f"restore {lots} launch sets beside {few}"
    table: tuple[tuple[str, list[float], float, str, float | None], ...] = (
        (f"load {few} kernels", of(one, "load_s"), 1e3, "ms", LOAD_TARGET_MS),
        (f"load {lots} kernels", of(many, "load_s"), 1e3, "ms", MANY_LOAD_TARGET_MS),
        (
            f"load {lots} kernels: peak memory",
            of(many, "load_bytes"),
            1e-6,
            "MB",
            MANY_LOAD_TARGET_MB,
        ),
        (f"restore {few} launch sets: a kernel", each(one), 1e6, "us", None),
        (f"restore {lots} launch sets: a kernel", each(many), 1e6, "us", None),
        (f"{beside}: time of a kernel", ratios(each(many), each(one)), 1, "x", TIME_TARGET),
        (f"{beside}: peak memory", ratios(memory, less_memory), 1, "x", MEMORY_TARGET),
        (
            f"{beside}: peak memory, more",
            differences(memory, less_memory),
            1e-6,
            "MB",
            FLAT_TARGET_MB,
        ),
    )
    return [
        row(work, median(found) * scale, unit, most=most)
        for work, found, scale, unit, most in table
    ]


def record(kernels: str, file: str, copies: str) -> None:
    """Record the kernels, which Triton finds in its cache, and save so many copies of their launch
    sets as one bundle.
    """
    import bundler

    with bundler.recording() as recording:
        compile_part(int(kernels), 0, 1)
    with recording.collect(keep="launch") as bundle:
        multiply(bundle, file, int(copies))


def restore(file: str, into: str) -> Sample:
    """Load and restore a bundle; returns seconds and bytes."""
    import bundler

    # imported on first use, which is not what is measured here
    bundler.Bundle, bundler.restore  # noqa: B018
    before, started = peak_bytes(), time.perf_counter()
    with bundler.Bundle.load(file) as bundle:
        count = len(bundle.kernels)  # made when they are first read, and kept by the bundle
        loaded, after_load = time.perf_counter(), peak_bytes()
        report = bundler.restore(bundle, into)
        restored, after = time.perf_counter(), peak_bytes()
    assert len(report.restored) == count
    seconds = {"load_s": loaded - started, "restore_s": restored - loaded}
    sizes = {"load_bytes": after_load - before, "restore_bytes": after - after_load}
    return {"kernels": count, **seconds, **sizes}


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    rows = tables.of_rows(result["rows"], work="what", figure="figure", target="target")
    return f"## A hundred times the kernels\n\n{SECTION.format(**result)}\n{rows}"


if __name__ == "__main__":
    programs.run_step({"make": record, "restore": restore})
