# SPDX-License-Identifier: Apache-2.0
"""Notes of misses, of processes and of sources, for who asks later why a kernel was compiled.

::

    <our directory>/misses/<start of the process>-<time>-<process>-<number>.record
    <our directory>/processes/<start>-<process>.json
    <our directory>/kernel-sources/<sha256 of the text>

A miss tells what was compiled, by which process, and what its key was made of; a process, since
when it used the cache manager and what came of it; a source is known by its digest, which key parts
have.  The lookup engine writes all of them through `MissNotes`; `explanations.py` reads them with
`read_misses`, `read_processes` and `read_source`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

from bundler.errors import FormatError
from bundler.integrations.user_directories import LocalDirectory, write_whole

if TYPE_CHECKING:
    from bundler.toolchain.recording.spool_records import SpooledEvent

# The notes of a few runs; each is a few kilobytes.
KEPT_MISSES = 2000
_MISSES, _SUFFIX = "misses", ".record"
_NS = 1_000_000_000
# A job of a few hundred ranks, a few times over; each note is a file of half a kilobyte.
KEPT_PROCESSES = 1000
_PROCESSES, _PROCESS_SUFFIX = "processes", ".json"
_MOST_BYTES = 1 << 16
# Shells, launchers and containers around a process; more of them is no real tree.
_MOST_ANCESTORS = 32
# Of the fields in /proc/<process>/stat, counted after the program's name.
_PARENT, _START = 1, 19
KEPT_SOURCES = 2000
# A generated kernel of a thousand lines; what is larger is no text to read changes in.
MOST_SOURCE_BYTES = 1 << 17
_SOURCES = "kernel-sources"
_DIGITS = 64


class SourceTexts:
    """The sources that one process used, until they are written; safe from any thread.

    Args:
        local: our directory.
    """

    def __init__(self, local: LocalDirectory) -> None:
        self._local = local
        self._pending: dict[str, bytes] = {}
        self._written: set[str] = set()

    def add(self, text: str) -> None:
        """Remember a source; what is too long, or one too many for a process, is left out."""
        data = text.encode("utf-8", "replace")
        if len(data) > MOST_SOURCE_BYTES or len(self._written) + len(self._pending) >= KEPT_SOURCES:
            return
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._written:
            self._pending[digest] = data

    def write(self) -> None:
        """Write what was remembered and is not there yet; does nothing where there is no place for
        it.

        Raises:
            OSError: one cannot be written.
        """
        directory = self._local.notes(_SOURCES, make=True) if self._pending else None
        if directory is None:
            return
        if not self._written:
            _sweep_sources(directory)
        for digest in list(self._pending):
            data = self._pending.pop(digest, None)
            if data is not None:
                self._written.add(digest)
                _write(os.path.join(directory, digest), data)


def _write(path: str, data: bytes) -> None:
    try:
        os.utime(path)  # sweeping goes by the time of the last use
    except FileNotFoundError:
        write_whole(path, data)


def _sweep_sources(directory: str) -> None:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    _remove(directory, [name for _, name in sorted(found)[:-KEPT_SOURCES]])


def read_source(local: LocalDirectory, digest: str) -> str | None:
    """Return a source by its digest (hex); None when it was never used on this host, or is
    damaged.
    """
    directory = local.notes(_SOURCES, make=False)
    if directory is None or len(digest) != _DIGITS or not digest.isalnum():
        return None
    try:
        with open(os.path.join(directory, digest), "rb") as file:
            data = file.read(MOST_SOURCE_BYTES + 1)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if hashlib.sha256(data).hexdigest() == digest else None


def source_diff(name: str, recorded: str, asked: str) -> str:
    """Return a unified diff from the source that was recorded to the one that is here; lines count
    from the kernel's first.
    """
    import difflib  # who asks for it waits for a person

    lines = difflib.unified_diff(
        recorded.splitlines(), asked.splitlines(), f"{name}, recorded", f"{name}, here", lineterm=""
    )
    return "\n".join(lines)


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
        directory = local.notes(_PROCESSES, make=True)
        if directory is not None:
            path = os.path.join(directory, f"{self.began_ns:020d}-{self.pid}{_PROCESS_SUFFIX}")
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
    directory = local.notes(_PROCESSES, make=False)
    if directory is None:
        return
    for name in filter(lambda name: name.endswith(_PROCESS_SUFFIX), _names(directory)):
        with (
            contextlib.suppress(OSError, ValueError, RecursionError),
            open(os.path.join(directory, name), "rb") as file,
        ):
            yield ProcessNote.decode(file.read(_MOST_BYTES))


def sweep_processes(local: LocalDirectory) -> None:
    """Remove the oldest notes, beyond those that are kept."""
    directory = local.notes(_PROCESSES, make=False)
    if directory is not None:
        _remove(directory, _names(directory)[:-KEPT_PROCESSES])


def _names(directory: str) -> list[str]:
    return sorted(
        name for name in os.listdir(directory) if name.endswith((_PROCESS_SUFFIX, ".tmp"))
    )


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


class NotedMiss(NamedTuple):
    """A kernel that was compiled: what is known of it, when the process began that compiled it,
    when it was done, and which it was.
    """

    event: SpooledEvent
    process_began_ns: int
    at_ns: int
    pid: int

    @property
    def at_s(self) -> float:
        """When, in seconds since the epoch."""
        return self.at_ns / _NS


class MissNotes:
    """Writes the notes of one process; any failure is the caller's to handle.

    Args:
        local: our directory.

    Attributes:
        begun: whether this process was noted.
        used_sources: sources of kernels that were asked for, to be written with the next misses, or
            at the end.  Whoever is asked for a kernel adds its source, up to `KEPT_SOURCES`,
            which costs next to nothing while all are hits.
    """

    def __init__(self, local: LocalDirectory) -> None:
        self.begun = False
        self.used_sources: set[str] = set()
        self._local = local
        self._began_ns = time.time_ns()
        self._numbers = itertools.count()
        self._swept = False
        self._process: ProcessNote | None = None
        self._sources = SourceTexts(local)

    def begin(self) -> None:
        """Note this process, the first time; a process that compiles nothing is known by that
        alone.

        Raises:
            OSError: it cannot be written.
        """
        if not self.begun:
            self.begun = True
            self._process = this_process(self._began_ns)
            self._process.write(self._local)
            sweep_processes(self._local)

    def end(self, hits: int, compiled: int, missed: int) -> None:
        """Note what came of this process, if it was noted at all.

        Raises:
            OSError: it cannot be written.
        """
        if self._process is not None:
            found = self._process._replace(hits=hits, compiled=compiled, missed=missed)
            found.write(self._local)
            self._write_sources()

    def reset_after_fork(self) -> None:
        """Let the child note itself when it asks for a kernel; what was remembered is its parent's
        to write.
        """
        self.begun, self._process, self._sources = False, None, SourceTexts(self._local)
        self.used_sources.clear()

    def write(self, events: Iterable[SpooledEvent]) -> None:
        """Note misses, and the sources that were remembered; does nothing where there is no place
        for them.

        Raises:
            OSError: one cannot be written.
        """
        from bundler.toolchain.recording import spool_records

        self._write_sources()
        for event in events:
            directory = self._local.notes(_MISSES, make=True)
            if directory is None:
                return
            if not self._swept:
                self._swept = True
                _remove(directory, sorted(_notes(directory), key=_time)[:-KEPT_MISSES])
            number = next(self._numbers)
            spool_records.write(
                directory,
                f"{self._began_ns:020d}-{time.time_ns():020d}-{os.getpid()}-{number}",
                event,
            )

    def _write_sources(self) -> None:
        with contextlib.suppress(KeyError):  # none is left; another thread may add one at any time
            while True:
                self._sources.add(self.used_sources.pop())
        self._sources.write()


def read_misses(local: LocalDirectory) -> Iterator[NotedMiss]:
    """Yield the misses of this user on this host, the latest first; a note that cannot be read is
    left out.
    """
    from bundler.format.bundle_file import read_regular
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.toolchain.recording import spool_records
    from bundler.toolchain.recording.spool_records import SpooledEvent

    directory = local.notes(_MISSES, make=False)
    if directory is None:
        return
    for name in sorted(_notes(directory), key=_time, reverse=True):
        with contextlib.suppress(OSError, FormatError, ValueError):
            path = os.path.join(directory, name)
            record = spool_records.decode(
                read_regular(path, DEFAULT_LIMITS.manifest_bytes, links=False)
            )
            if isinstance(record, SpooledEvent):
                began_ns, at_ns, pid = map(int, name.split("-")[:3])
                yield NotedMiss(record, began_ns, at_ns, pid)


def _notes(directory: str) -> list[str]:
    return [
        name
        for name in os.listdir(directory)
        if name.endswith(_SUFFIX) and name.count("-") == 3  # noqa: PLR2004  # its parts
    ]


def _time(name: str) -> str:
    return name.split("-")[1]


def _remove(directory: str, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):  # another process removes them too
            os.unlink(os.path.join(directory, name))
