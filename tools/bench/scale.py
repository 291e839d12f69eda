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

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.memory import multiply, peak_bytes
from tools.bench.memory_parts import Parts, parts_of
from tools.bench.memory_parts import table as memory_table
from tools.bench.sides import arguments
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of, compile_part
from tools.shared.measurement import median, row, shown
from tools.shared.processes import output

KERNELS, ROUNDS, COPIES = 1000, 5, 100
PARTS_ROUNDS = 3
QUICK_KERNELS, QUICK_ROUNDS, QUICK_COPIES = 20, 2, 3
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
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    copies = QUICK_COPIES if options.quick else COPIES
    cache = cache_of(kernels, options.keep.resolve())
    with tempfile.TemporaryDirectory(prefix="bench.", dir=measurement.fast_directory()) as work:
        samples, parts = measure(cache, kernels, Path(work), copies, rounds)
    result = {
        "kernels": kernels,
        "copies": copies,
        "rounds": rounds,
        "samples": samples,
        "parts": parts,
    }
    result["rows"] = rows = rows_of(samples)
    for line in rows:
        verdict = "" if not measurement.target(line) else "ok" if line["ok"] else "MISSED"
        print(
            f"{line['work']:<72} {shown(line['figure'], line['unit']):>10} "
            f" {measurement.target(line):<18} {verdict}"
        )
    print(f"written to {measurement.save('bench-scale', result, options.results)}")
    return 1 if options.check and not all(line["ok"] for line in rows) else 0


def measure(
    cache: Path, kernels: int, work: Path, copies: int, rounds: int
) -> tuple[dict[str, list[Sample]], dict[str, list[Parts]]]:
    """Return the samples of both bundles, `one` and `many`, and what the memory of a restore
    consists of.
    """
    sides = {"one": 1, "many": copies}
    for name, times in sides.items():
        words = ("make", str(kernels), str(work / f"{name}.tbundle"), str(times))
        output(__name__, *words, environment={"TRITON_CACHE_DIR": str(cache)})
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    parts: dict[str, list[Parts]] = {name: [] for name in sides}
    for _ in range(min(rounds, PARTS_ROUNDS)):
        for name, noted in parts.items():
            answer = output(
                __name__, "parts", str(work / f"{name}.tbundle"), str(work / "out"), environment={}
            )
            noted.append(json.loads(answer))
            shutil.rmtree(work / "out")
    for _ in range(rounds):
        for name, found in samples.items():
            answer = output(
                __name__,
                "restore",
                str(work / f"{name}.tbundle"),
                str(work / "out"),
                environment={},
            )
            found.append(json.loads(answer))
            shutil.rmtree(work / "out")
    return samples, parts


def rows_of(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Return the rows: what each costs, and what a kernel of the many costs beside one of
    the few.
    """
    one, many = samples["one"], samples["many"]
    few, lots = f"{int(one[0]['kernels']):,}", f"{int(many[0]['kernels']):,}"

    def of(found: list[Sample], name: str) -> list[float]:
        return [sample[name] for sample in found]

    def each(found: list[Sample]) -> list[float]:
        return [sample["restore_s"] / sample["kernels"] for sample in found]

    grown = [
        more / less
        for more, less in zip(of(many, "restore_bytes"), of(one, "restore_bytes"), strict=True)
    ]
    slower = [more / less for more, less in zip(each(many), each(one), strict=True)]
    flat = [
        (more - less) / 1e6
        for more, less in zip(of(many, "restore_bytes"), of(one, "restore_bytes"), strict=True)
    ]
    return [
        row(f"load {few} kernels", median(of(one, "load_s")) * 1e3, "ms", most=LOAD_TARGET_MS),
        row(
            f"load {lots} kernels", median(of(many, "load_s")) * 1e3, "ms", most=MANY_LOAD_TARGET_MS
        ),
        row(
            f"load {lots} kernels: peak memory",
            median(of(many, "load_bytes")) / 1e6,
            "MB",
            most=MANY_LOAD_TARGET_MB,
        ),
        row(f"restore {few} launch sets: a kernel", median(each(one)) * 1e6, "us"),
        row(f"restore {lots} launch sets: a kernel", median(each(many)) * 1e6, "us"),
        row(
            f"restore {lots} launch sets beside {few}: time of a kernel",
            median(slower),
            "x",
            most=TIME_TARGET,
        ),
        row(
            f"restore {lots} launch sets beside {few}: peak memory",
            median(grown),
            "x",
            most=MEMORY_TARGET,
        ),
        row(
            f"restore {lots} launch sets beside {few}: peak memory, more",
            median(flat),
            "MB",
            most=FLAT_TARGET_MB,
        ),
    ]


def record(kernels: int, file: str, copies: int) -> None:
    """Record the kernels, which Triton finds in its cache, and save so many copies of their launch
    sets as one bundle.
    """
    import bundler

    with bundler.recording() as recording:
        compile_part(kernels, 0, 1)
    with recording.collect(keep="launch") as bundle:
        multiply(bundle, file, copies)


def restore(file: str, into: str) -> None:
    """Load and restore a bundle; prints seconds and bytes as JSON."""
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
    found = {
        "kernels": len(report.restored),
        "load_s": loaded - started,
        "restore_s": restored - loaded,
        "load_bytes": after_load - before,
        "restore_bytes": after - after_load,
    }
    print(json.dumps(found))


def parts(file: str, into: str) -> None:
    """Load and restore a bundle; prints what came into memory as JSON."""
    import bundler
    from bundler.lifecycle import restoration

    bundler.Bundle, bundler.restore  # noqa: B018  # as in `restore`
    with bundler.Bundle.load(file) as bundle:
        _ = bundle.kernels  # as in `restore`
        print(json.dumps(parts_of(lambda: bundler.restore(bundle, into), restoration)))


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    lines = [
        f"| {line['work']} | {_verdict(line)} | {measurement.target(line)} |"
        for line in result["rows"]
    ]
    table = "\n".join(["| what | figure | target |", "| --- | --- | --- |", *lines])
    titles = {
        name: f"{int(samples[0]['kernels']):,} kernels"
        for name, samples in result["samples"].items()
    }
    more = memory_table(result.get("parts", {}), titles)
    return f"## A hundred times the kernels\n\n{SECTION.format(**result)}\n{table}\n" + (
        f"\n{more}" if more else ""
    )


def _verdict(line: dict[str, Any]) -> str:
    figure = shown(line["figure"], line["unit"])
    return figure if line["ok"] else f"**{figure}**"


if __name__ == "__main__":
    if sys.argv[1] == "make":
        record(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1] == "parts":
        parts(sys.argv[2], sys.argv[3])
    else:
        restore(sys.argv[2], sys.argv[3])
