# SPDX-License-Identifier: Apache-2.0
"""The processes in which the sides of a benchmark do their jobs, their watch, and the arguments
that the benchmarks share.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.shared import measurement, programs
from tools.shared.processes import ROOT, Helper

#: Under which kernels are pushed.
TAG = "bench/kernels"
# What jobs count, beside the seconds of their steps.
COUNTED = ("kernels", "files", "round trips")
_POPULATE_WRITE = 23  # of madvise on Linux

Samples = dict[str, list[float]]
#: A side, what its work is called, the job, the arguments, and the step that is the sample.
Turn = tuple[str, str, str, tuple[object, ...], str]


class Side(Helper):
    """A process that has imported what one side needs and forks a child for each job."""

    def do(self, job: str, *arguments: object) -> dict[str, float]:
        """Run a job; returns seconds, bytes or counts, by name."""
        result: dict[str, float] = self.ask([job, list(map(str, arguments))])
        return result


def answer(jobs: Mapping[str, Callable[..., Any]]) -> None:
    """Do the jobs that standard input names, each in a forked child, until it ends."""
    gc.collect()
    gc.freeze()  # so that no side pays for looking through the objects of its imports
    for line in sys.stdin:
        name, given = json.loads(line)
        child = os.fork()
        if not child:
            copy_shared_pages()
            print(json.dumps(jobs[name](*given)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


def copy_shared_pages() -> None:
    """Copy what a forked process shares with its parent, where the system can: Linux since 5.14.

    The first write to each page copies it, in the midst of the work; a process that was not forked
    has no such pages.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text(encoding="utf-8").splitlines():
        addresses, permissions = line.split()[:2]
        if permissions == "rw-p":
            start, end = (int(address, 16) for address in addresses.split("-"))
            madvise(start, end - start, _POPULATE_WRITE)


@contextmanager
def sides(**imported: tuple[str, ...]) -> Iterator[dict[str, Side]]:
    """Start the processes that run the jobs of `jobs.py`, by name; each is told what to import."""
    started = {name: Side("tools.bench.jobs", *words) for name, words in imported.items()}
    try:
        yield started
    finally:
        for side in started.values():
            side.close()


def take_turns(
    turns: Iterable[Turn], samples: Samples, serving: Mapping[str, Side], out: Path
) -> None:
    """Run the jobs of one round, each of which may fill `out`; adds the sample of each, and what it
    counted.
    """
    for side, name, job, words, step in turns:
        found = serving[side].do(job, *words)
        samples.setdefault(name, []).append(found[step])
        for what in COUNTED:
            if what in found:
                samples.setdefault(f"{name}: {what}", []).append(found[what])
        shutil.rmtree(out, ignore_errors=True)


def arguments(
    description: str | None, kernels: tuple[int, int], rounds: tuple[int, int]
) -> argparse.Namespace:
    """Read the command line of a benchmark; `kernels` and `rounds` are what it takes when nothing
    else is said, and with `--quick`.
    """
    options = programs.arguments(
        description,
        check=(False, "exit 1 when a target is missed"),
        kernels=(int, f"how many kernels ({kernels[0]})"),
        rounds=(int, f"how many rounds ({rounds[0]})"),
        quick=(False, "few kernels and rounds: shows that it runs, not how fast"),
        results=(measurement.RESULTS, "where the samples go"),
        keep=(ROOT / ".build" / "bench", "where the kernels stay for the next run"),
    )
    options.kernels = options.kernels or kernels[options.quick]
    options.rounds = options.rounds or rounds[options.quick]
    options.keep = options.keep.resolve()
    return options


@contextmanager
def working_folder(parent: Path | str | None) -> Iterator[Path]:
    """Make a folder for the time of a measurement."""
    # Processes of an engine may still end while it is removed.
    folder = tempfile.TemporaryDirectory(prefix="bench.", dir=parent, ignore_cleanup_errors=True)
    with folder as name:
        yield Path(name)


class Watch:
    """Times one step after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Give the time since the last lap a name."""
        self.seconds[name] = time.perf_counter() - self._since
        self._since = time.perf_counter()


def concluded(name: str, result: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the rows of a result, write it, and name those that miss their target; returns the exit
    status.
    """
    lines = measurement.report(name, result, options.results)
    measurement.missed(lines)
    return 1 if options.check and lines else 0
