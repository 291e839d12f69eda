# SPDX-License-Identifier: Apache-2.0
"""What the memory of a restore consists of: of each kind of mapping what came in, and Python's
objects that grow with the kernels.

A restore of `scale.py` notes it with `parts_of`, in a process of its own; `table` shows it on the
page.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.shared.measurement import median, shown

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

Parts = dict[str, float]


def resident() -> Parts:
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
            found[
                FRAMES
                if own and _OF_FRAMES in line.split()
                else STACKS_AND_HEAP
                if own
                else LIBRARIES
            ] += size
    return found


def parts_of(restore: Callable[[], Any], reporting: Any) -> Parts:
    """Run a restore, and return what came into memory until its report was made; `reporting` is the
    module whose `_report` makes it.
    """
    # where all is in memory that will be
    before, plain, found = resident(), reporting._report, Parts()  # noqa: SLF001

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
    one, many = (_medians(parts[name]) for name in ("one", "many"))
    more = ", ".join(f"{part} {shown((many[part] - one[part]) / 1e6, 'MB')}" for part in _KINDS)
    return f" What the many take more, when the report is made: {more}."


def table(parts: Mapping[str, Sequence[Parts]], titles: Mapping[str, str]) -> str:
    """Return the table, medians of the samples; nothing where there are none."""
    if not parts:
        return ""
    columns = {name: _medians(samples) for name, samples in sorted(parts.items(), reverse=True)}
    rows = [
        [part, *(shown(column[part] / 1e6, "MB") for column in columns.values())]
        for part in (*_KINDS, OBJECTS)
    ]
    sums = [shown(sum(column[part] for part in _KINDS) / 1e6, "MB") for column in columns.values()]
    head = ["part", *(titles[name] for name in columns)]
    lines = [
        head,
        ["---"] * len(head),
        *rows,
        ["**sum, without what is of another line**", *(f"**{each}**" for each in sums)],
    ]
    return f"{MEMORY}\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _medians(samples: Sequence[Parts]) -> Parts:
    return {part: median([one[part] for one in samples]) for part in (*_KINDS, OBJECTS)}
