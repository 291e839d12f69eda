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

import gc
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench import tables
from tools.bench.floors import concluded
from tools.bench.memory import multiply, peak_bytes
from tools.bench.sides import arguments, working_folder
from tools.shared import measurement, programs
from tools.shared.kernel_variants import cache_of, compile_part
from tools.shared.measurement import differences, median, medians, ratios, row, shown, table
from tools.shared.processes import answer, output

KERNELS, ROUNDS, COPIES = (1000, 20), (5, 2), 100
PARTS_ROUNDS = 3
QUICK_COPIES = 3
LOAD_TARGET_MS, MANY_LOAD_TARGET_MS, MANY_LOAD_TARGET_MB = 20.0, 2500.0, 400.0
TIME_TARGET, MEMORY_TARGET, FLAT_TARGET_MB = 1.15, 1.3, 60.0
SECTION = """`python -m tools.bench scale`. The launch sets of {kernels:,} kernels, and of {copies} different copies of each; {rounds} rounds in
which the two take turns, each in a new interpreter. Memory is the peak of the process: of a load above an interpreter that has imported
the package, of a restore above the loaded bundle with its kernels.
"""
FRAMES = "buffers that frames are decoded into"
STACKS_AND_HEAP = (
    "everything else in memory of the process's own: C's heap, objects of Python, stacks of threads"
)
LIBRARIES = "code and data of libraries, as far as they were touched first by the restore"
OBJECTS = "of that, lists of keys: in the report, by what was written, in the directory"
_KINDS = (FRAMES, LIBRARIES, STACKS_AND_HEAP)
# Keys of kernels are those of the loaded bundle, and take nothing here.
MEMORY = """What the memory of a restore consists of while its report is made, above the loaded bundle: what the system says of each mapping of the
process. Of a restore of few kernels nearly all is what any number of them takes once.
"""
_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_OF_FRAMES = "hg"  # what a buffer for frames is advised to be of: huge pages


Sample = dict[str, float]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    copies = QUICK_COPIES if options.quick else COPIES
    cache = cache_of(options.kernels, options.keep)
    with working_folder(measurement.fast_directory()) as work:
        samples, parts = measure(cache, options.kernels, work, copies, options.rounds)
    facts = {"kernels": options.kernels, "copies": copies, "rounds": options.rounds}
    result = {**facts, "samples": samples, "parts": parts, "rows": rows_of(samples)}
    return concluded("bench-scale", result, options)


def measure(
    cache: Path, kernels: int, work: Path, copies: int, rounds: int
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]]]:
    """Return the samples of both bundles, `one` and `many`, and what the memory of a restore
    consists of.
    """
    sides = {"one": 1, "many": copies}
    for name, times in sides.items():
        words = ("--step", "make", str(kernels), str(work / f"{name}.tbundle"), str(times))
        output(__name__, *words, environment={"TRITON_CACHE_DIR": str(cache)})

    def taken(what: str, rounds: int) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name in sides:
                words = ("--step", what, str(work / f"{name}.tbundle"), str(work / "out"))
                found[name].append(answer(__name__, *words, environment={}))
                shutil.rmtree(work / "out")
        return found

    parts = taken("parts", min(rounds, PARTS_ROUNDS))
    return taken("restore", rounds), parts


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


def parts(file: str, into: str) -> Sample:
    """Load and restore a bundle; returns what came into memory."""
    import bundler
    from bundler.lifecycle import restoration

    bundler.Bundle, bundler.restore  # noqa: B018  # as in `restore`
    with bundler.Bundle.load(file) as bundle:
        _ = bundle.kernels  # as in `restore`
        return parts_of(lambda: bundler.restore(bundle, into), restoration)


def resident() -> Sample:
    """Return the bytes that are in memory of this process, by kind of mapping."""
    found = dict.fromkeys((FRAMES, STACKS_AND_HEAP, LIBRARIES), 0.0)
    name, size = "", 0.0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = _HEAD.match(line)
        if head is not None:
            name, size = head[1], 0.0
        elif line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
        elif line.startswith("VmFlags:"):
            own = not name or name.startswith("[")
            of_frames = own and _OF_FRAMES in line.split()
            found[FRAMES if of_frames else STACKS_AND_HEAP if own else LIBRARIES] += size
    return found


def parts_of(restore: Callable[[], Any], reporting: Any) -> Sample:
    """Run a restore, and return what came into memory until its report was made; `reporting` is the
    module whose `_report` makes it.
    """
    # where all is in memory that will be
    before, plain, found = resident(), reporting._report, Sample()  # noqa: SLF001

    def report(plan: Any, queue: Any, *more: Any) -> Any:
        made = plain(plan, queue, *more)
        now = resident()
        found.update({name: now[name] - before[name] for name in now})
        listed = [place._present for place in queue.directories.values()]  # noqa: SLF001
        found[OBJECTS] = sum(map(sys.getsizeof, (made.restored, *queue.written.values(), *listed)))
        return made

    gc.collect()
    reporting._report = report  # noqa: SLF001
    try:
        restore()
    finally:
        reporting._report = plain  # noqa: SLF001
    return found


def told(line: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return of what the many kernels of a row of `scale.py` take more than the few; nothing for
    other rows, and without parts.
    """
    parts = result.get("parts")
    if not parts or " beside " not in line["work"] or ": peak memory" not in line["work"]:
        return ""
    one, many = (medians(parts[name]) for name in ("one", "many"))
    more = ", ".join(f"{part} {shown((many[part] - one[part]) / 1e6, 'MB')}" for part in _KINDS)
    return f" What the many take more, when the report is made: {more}."


def parts_table(parts: Mapping[str, Sequence[Sample]], titles: Mapping[str, str]) -> str:
    """Return what the memory of a restore consists of, medians of the samples; nothing where there
    are none.
    """
    if not parts:
        return ""
    columns = {name: medians(samples) for name, samples in sorted(parts.items(), reverse=True)}
    rows = [
        [part, *(shown(column[part] / 1e6, "MB") for column in columns.values())]
        for part in (*_KINDS, OBJECTS)
    ]
    sums = [shown(sum(column[part] for part in _KINDS) / 1e6, "MB") for column in columns.values()]
    rows.append(["**sum, without what is of another line**", *(f"**{each}**" for each in sums)])
    return f"{MEMORY}\n" + table(["part", *(titles[name] for name in columns)], rows)


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    rows = tables.of_rows(result["rows"], work="what", figure="figure", target="target")
    titles = {
        name: f"{int(samples[0]['kernels']):,} kernels"
        for name, samples in result["samples"].items()
    }
    more = parts_table(result.get("parts", {}), titles)
    text = f"## A hundred times the kernels\n\n{SECTION.format(**result)}\n{rows}"
    return f"{text}\n{more}" if more else text


if __name__ == "__main__":
    programs.run_step({"make": record, "parts": parts, "restore": restore})
