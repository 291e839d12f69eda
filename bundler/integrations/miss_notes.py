# SPDX-License-Identifier: Apache-2.0
"""Notes of misses: what was compiled, by which process, and what its key was made of, for who asks
later why.

::

    <our directory>/misses/<start of the process>-<time>-<process>-<number>.record

The lookup engine writes them through `MissNotes`, which also keeps the notes of processes and
sources; `explanations.py` reads them with `read_misses`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from bundler.errors import FormatError
from bundler.integrations.process_notes import ProcessNote, sweep_processes, this_process
from bundler.integrations.source_texts import SourceTexts
from bundler.integrations.user_directories import LocalDirectory

if TYPE_CHECKING:
    from bundler.toolchain.recording.spool_records import SpooledEvent

# The notes of a few runs; each is a few kilobytes.
KEPT = 2000
_DIRECTORY, _SUFFIX = "misses", ".record"
_NS = 1_000_000_000


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
            at the end.  Whoever is asked for a kernel adds its source, up to `source_texts.KEPT`,
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
            directory = self._local.notes(_DIRECTORY, make=True)
            if directory is None:
                return
            if not self._swept:
                self._swept = True
                _sweep(directory)
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

    directory = local.notes(_DIRECTORY, make=False)
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


def _sweep(directory: str) -> None:
    for name in sorted(_notes(directory), key=_time)[:-KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name))
