# SPDX-License-Identifier: Apache-2.0
"""Notes of misses: what was compiled, by which process, and what its key was made of, for who asks later why.

::

    <our directory>/misses/<start of the process>-<time>-<process>-<number>.record
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bundler.errors import FormatError
from bundler.format.limits import DEFAULT_LIMITS
from bundler.integrations.local_places import misses_directory
from bundler.toolchain import records
from bundler.toolchain.records import SpooledEvent

# The notes of a few runs; each is a few kilobytes.
KEPT = 2000
_NS = 1_000_000_000


@dataclass(frozen=True)
class Miss:
    """A kernel that was compiled: what is known of it, when the process began that compiled it, and when it was done."""

    event: SpooledEvent
    process_began_ns: int
    at_ns: int

    @property
    def at_s(self) -> float:
        """When, in seconds since the epoch."""
        return self.at_ns / _NS


class Notes:
    """Writes the notes of one process; any failure is the caller's to excuse.

    Args:
        chosen: our directory, as the user chose it.
    """

    def __init__(self, chosen: str | None) -> None:
        self._chosen = chosen
        self._began_ns = time.time_ns()
        self._numbers = itertools.count()
        self._swept = False

    def write(self, events: Iterable[SpooledEvent]) -> None:
        """Note misses; does nothing where there is no place for them.

        Raises:
            OSError: one cannot be written.
        """
        for event in events:
            directory = misses_directory(self._chosen, make=True)
            if directory is None:
                return
            if not self._swept:
                self._swept = True
                _sweep(directory)
            number = next(self._numbers)
            records.write(directory, f"{self._began_ns:020d}-{time.time_ns():020d}-{os.getpid()}-{number}", event)


def read_misses(chosen: str | None) -> Iterator[Miss]:
    """Yield the misses of this user on this host, the latest first; a note that cannot be read is left out."""
    directory = misses_directory(chosen, make=False)
    if directory is None:
        return
    for name in sorted(_notes(directory), key=_time, reverse=True):
        with contextlib.suppress(OSError, FormatError, ValueError):
            with open(os.path.join(directory, name), "rb") as file:
                record = records.decode(file.read(DEFAULT_LIMITS.manifest_bytes))
            if isinstance(record, SpooledEvent):
                yield Miss(record, int(name.split("-")[0]), int(name.split("-")[1]))


def _notes(directory: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.endswith(records.SUFFIX) and name.count("-") == 3]  # noqa: PLR2004  # its parts


def _time(name: str) -> str:
    return name.split("-")[1]


def _sweep(directory: str) -> None:
    for name in sorted(_notes(directory), key=_time)[:-KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name))
