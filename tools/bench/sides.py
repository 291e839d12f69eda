# SPDX-License-Identifier: Apache-2.0
"""The processes in which the sides of a benchmark do their jobs, and the arguments that the
benchmarks share.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.shared import measurement
from tools.shared.processes import ROOT, command, python_path

_POPULATE_WRITE = 23  # of madvise on Linux


class Side:
    """A process that has imported what one side needs and forks a child for each job.

    Args:
        module: what serves, by its full name; it gets the name of the side.
        name: the side.
    """

    def __init__(self, module: str, name: str) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        self._process = subprocess.Popen(
            command(module, name),
            env=environment,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def do(self, job: str, *arguments: object) -> dict[str, float]:
        """Run a job; returns seconds, bytes or counts, by name."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([job, list(map(str, arguments))]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{job}{arguments} failed")
        result: dict[str, float] = json.loads(line)
        return result

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


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
def sides(module: str, *names: str) -> Iterator[dict[str, Side]]:
    """Start the processes that run the jobs, by name."""
    started = {name: Side(module, name) for name in names}
    try:
        yield started
    finally:
        for side in started.values():
            side.close()


def arguments(description: str | None, kernels: int, rounds: int) -> argparse.Namespace:
    """Read the command line of a benchmark; `kernels` and `rounds` are what it takes when nothing
    else is said.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--kernels", type=int, metavar="N", help=f"how many kernels ({kernels})")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how many rounds ({rounds})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few kernels and rounds: shows that it runs, not how fast",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=measurement.RESULTS,
        metavar="DIR",
        help="where the samples go",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=ROOT / ".build" / "bench",
        metavar="DIR",
        help="where the kernels stay for the next run",
    )
    return parser.parse_args()
