# SPDX-License-Identifier: Apache-2.0
"""What a missed target of a restore has to be compared with: the sum of the calls that cannot be
left out, from `bare_steps.py`.

`page.py` and `remote.py` show `table` below what a restore's time goes into, and `told` behind
each row whose target is missed; `bundle.py` and `remote.py` print `missed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from tools.bench.bare_steps import (
    IN_THREADS,
    MANIFEST,
    MOST_WRITERS,
    PIPELINED,
    READER,
    SERVER,
    THREADS,
    WRITER,
)
from tools.shared.measurement import shown, target
from tools.shared.measurement import table as markdown

# Results are kept in the order of the alphabet.
_READ = ("read", "sha256 of what was read", "zstd")
_STEPS = {
    SERVER: (f"connect, log in, GET everything, {PIPELINED} in a pipeline",),
    MANIFEST: (*_READ, "decode its MessagePack"),
    READER: (*_READ, "decode five members of each metadata file"),
    WRITER: ("sha256 of the files", "mkdir", "open", "write", "close", "rename"),
}
ORDER = tuple(f"{who}: {step}" for who, steps in _STEPS.items() for step in steps)
# Where a row was measured and what -> which floor it has, and whether what comes before the first
# kernel counts.
ROWS = {
    ("tmpfs", "restore everything, digests verified"): ("all", False),
    ("tmpfs", "restore the launch set"): ("launch", False),
    ("tmpfs", "load and restore everything: how much faster"): ("all", True),
    ("tmpfs", "load and restore the launch set: how much faster"): ("launch", True),
    ("0 ms", "restore everything: how much faster"): ("all", True),
    ("0 ms", "restore the launch set: how much faster"): ("launch", True),
    ("0 ms", "restore everything"): ("all", True),
    ("0 ms", "restore the launch set"): ("launch", True),
}
INTRODUCTION = """### {title}

The same bytes, by bare loops in Python over the calls that any verified restore makes, one after the other in one thread; they check
nothing else, and keep nothing. Only what a writer does can be done in several threads at once without the interpreter: the line `together` is
how long the extension takes for that, with {threads}, and with nothing to prepare.
"""
BELOW = """No restore is faster than {before} the writers' steps together, and the reader's steps {beside}. That is the floor in this
table, and what it would give for each target, with the peer's time of the same run. What we take above it is shown, step by step, before:
"""
_SERVERS_PART = "the server's part, the manifest,"
_MANIFEST_ALONE = "the manifest, where loading counts,"
_DIVIDED = "divided by {cores} processors, all of which the writers use"


def floor(steps: Mapping[str, float], cores: int, *, whole: bool) -> float:
    """Return the seconds below which no restore comes that makes these calls; `whole` with what
    comes before the first kernel.
    """
    reader = _sum(steps, READER)
    # Where the writers use all processors, the reader takes its time from them.
    writers = steps[IN_THREADS]
    both = max(reader, writers) if cores > MOST_WRITERS else writers + reader / cores
    return both + (_sum(steps, MANIFEST) + _sum(steps, SERVER) if whole else 0.0)


def _sum(steps: Mapping[str, float], who: str) -> float:
    return sum(spent for name, spent in steps.items() if name.startswith(f"{who}: "))


def told(line: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return what the page says of the floor of a missed row; nothing for a row without one."""
    if _place_of(line) not in ROWS or "floor" not in result:
        return ""
    lowest, figure = _floor_of(line, result)
    verdict = (
        "even that misses the target"
        if _misses(line, figure)
        else (
            "that meets the target, and what we take beyond it is our own, which the page shows"
            " step by step"
        )
    )
    return (
        f" Its floor, which the page shows call by call: {shown(lowest * 1e3, 'ms')} of our"
        f" {shown(line['ours_ms'], 'ms')}, which would be {shown(figure, 'x')}: {verdict}."
    )


def missed(line: dict[str, Any], result: Mapping[str, Any]) -> str:
    """Return what a benchmark prints of a row whose target is missed."""
    figure = f"{line['work']}: {shown(line['figure'], line['unit'])}, {target(line)}."
    return figure + told(line, {"machine": {"cores": len(os.sched_getaffinity(0))}, **result})


def table(result: Mapping[str, Any], title: str) -> str:
    """Return the tables of a result; nothing where it has no floor."""
    if "floor" not in result:
        return ""
    columns, cores = result["floor"], result["machine"]["cores"]
    names = [name for name in ORDER if name in columns["all"]]
    count = int(columns["all"][THREADS])

    def line(name: str, spent: Iterable[float], form: str = "{}") -> list[str]:
        return [form.format(each) for each in (name, *(shown(one * 1e3, "ms") for one in spent))]

    rows = [line(name, (steps[name] for steps in columns.values())) for name in names]
    sums = (sum(steps[name] for name in names) for steps in columns.values())
    rows.append(line("sum, in one thread", sums, "**{}**"))
    rows.append(line(IN_THREADS, (steps[IN_THREADS] for steps in columns.values())))
    lowest = []
    for one in result["rows"]:
        if _place_of(one) in ROWS:
            least, figure = _floor_of(one, result)
            times = [shown(spent, "ms") for spent in (one["ours_ms"], least * 1e3)]
            factors = [shown(factor, "x") for factor in (one["figure"], figure)]
            lowest.append([one["work"], *times, *factors, target(one)])
    before = _SERVERS_PART if names[0].startswith(SERVER) else _MANIFEST_ALONE
    beside = "beside them" if cores > MOST_WRITERS else _DIVIDED.format(cores=cores)
    parts = [
        INTRODUCTION.format(title=title, threads=f"{count} threads" if count > 1 else "one"),
        markdown(
            ["step", *({"all": "everything", "launch": "launch set"}[k] for k in columns)], rows
        ),
        BELOW.format(before=before, beside=beside),
        markdown(["work", "ours", "floor", "ratio", "ratio at the floor", "target"], lowest),
    ]
    return "\n".join(parts)


def _place_of(line: Mapping[str, Any]) -> tuple[str, str]:
    place, _, work = line["work"].partition(": ")
    return place, work


def _floor_of(line: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float]:
    keep, whole = ROWS[_place_of(line)]
    lowest = floor(result["floor"][keep], result["machine"]["cores"], whole=whole)
    ratio = lowest * 1e3 / line["peer_ms"]
    return lowest, 1 / ratio if "faster" in line["work"] else ratio


def _misses(line: Mapping[str, Any], figure: float) -> bool:
    return bool(figure > line["most"] if line["least"] is None else figure < line["least"])
