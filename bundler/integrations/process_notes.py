# SPDX-License-Identifier: Apache-2.0
"""Notes of processes: who used the cache manager, since when, and what came of it, for who asks
later what the latest run did.

::

    <our directory>/processes/<start>-<process>.json

A process writes its `ProcessNote` through `MissNotes` (`miss_notes.py`), which also calls
`sweep_processes`; `explanations.py` calls `read_processes` and `of_one_run`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from bundler.integrations.user_directories import LocalDirectory, write_whole

# A job of a few hundred ranks, a few times over; each note is a file of half a kilobyte.
KEPT = 1000
_DIRECTORY, _SUFFIX = "processes", ".json"
_MOST_BYTES = 1 << 16
# Shells, launchers and containers around a process; more of them is no real tree.
_MOST_ANCESTORS = 32
_NS = 1_000_000_000
# Of the fields in /proc/<process>/stat, counted after the program's name.
_PARENT, _START = 1, 19


class ProcessNote(NamedTuple):
    """One process that asked the cache manager for a kernel.

    Attributes:
        pid: its process id.
        began_ns: when its session began.
        lineage: what tells it and its ancestors apart from every other process, itself first; a
            fork counts as its parent.
        hits, compiled, missed: how many kernels it found, compiled, and did not find; None while it
            runs, or when nothing ran at its end.
    """

    pid: int
    began_ns: int
    lineage: tuple[str, ...] = ()
    hits: int | None = None
    compiled: int | None = None
    missed: int | None = None

    @property
    def began_s(self) -> float:
        """When its session began, in seconds since the epoch."""
        return self.began_ns / _NS

    @property
    def identity(self) -> str:
        """What tells it apart."""
        return self.lineage[0] if self.lineage else f"{self.began_ns}"

    def write(self, local: LocalDirectory) -> None:
        """Write it, in place of what was noted of this process before; does nothing where there is
        no place for it.

        Raises:
            OSError: it cannot be written.
        """
        directory = local.notes(_DIRECTORY, make=True)
        if directory is not None:
            path = os.path.join(directory, f"{self.began_ns:020d}-{self.pid}{_SUFFIX}")
            write_whole(path, json.dumps(self._asdict()).encode())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a note; raises `ValueError` for anything else."""
        found = json.loads(data)
        # one class for all that is none
        lineage = found.get("lineage") if isinstance(found, dict) else None
        if not isinstance(lineage, list) or any(type(name) is not str for name in lineage):
            raise ValueError("not a note of a process")
        numbers = [found.get(name) for name in ("pid", "began_ns", "hits", "compiled", "missed")]
        known = numbers[:2] + [number for number in numbers[2:] if number is not None]
        if any(type(number) is not int for number in known):
            raise ValueError("not a note of a process")
        pid, began_ns, hits, compiled, missed = numbers
        return cls(pid, began_ns, tuple(lineage), hits, compiled, missed)


def read_processes(local: LocalDirectory) -> Iterator[ProcessNote]:
    """Yield the noted processes of this user on this host; a note that cannot be read is
    left out.
    """
    directory = local.notes(_DIRECTORY, make=False)
    if directory is None:
        return
    for name in filter(lambda name: name.endswith(_SUFFIX), _names(directory)):
        with (
            contextlib.suppress(OSError, ValueError, RecursionError),
            open(os.path.join(directory, name), "rb") as file,
        ):
            yield ProcessNote.decode(file.read(_MOST_BYTES))


def sweep_processes(local: LocalDirectory) -> None:
    """Remove the oldest notes, beyond those that are kept."""
    directory = local.notes(_DIRECTORY, make=False)
    for name in _names(directory)[:-KEPT] if directory is not None else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(str(directory), name))


def _names(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith((_SUFFIX, ".tmp")))


def of_one_run(processes: Iterable[ProcessNote]) -> tuple[ProcessNote, ...]:
    """Return the latest process, and with it those of the same run, by start: forks, and what a
    noted process started.

    torch's compile workers compile for the process that started them, which then finds everything.
    """
    noted = sorted(processes, key=lambda process: (process.began_ns, process.pid))
    known = {process.identity for process in noted}
    roots = [
        next((each for each in reversed(process.lineage) if each in known), process.identity)
        for process in noted
    ]
    return tuple(process for process, root in zip(noted, roots, strict=True) if root == roots[-1])


def this_process(began_ns: int) -> ProcessNote:
    """Return the note of this process as it begins."""
    return ProcessNote(os.getpid(), began_ns, _lineage())


def _lineage() -> tuple[str, ...]:
    """Return this process and its ancestors; empty where the system does not say."""
    found: list[str] = []
    pid, before = os.getpid(), b""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(8)
        while pid > 1 and len(found) < _MOST_ANCESTORS:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read(_MOST_BYTES)
            if found and line == before:
                found.pop()  # a fork that executed nothing since
            found.append(f"{boot}:{pid}:{int(fields[_START])}")
            pid, before = int(fields[_PARENT]), line
    return tuple(found)
