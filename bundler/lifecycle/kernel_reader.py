# SPDX-License-Identifier: Apache-2.0
"""`read_ahead`: the files of many kernel directories, read by threads while the caller looks at
those that were read before.

The extension `_kernel_reader` reads and hashes, where it was built.  It answers only for
directories in which nothing is out of the ordinary; for all others `kernel_directory.py`, which
calls this, reads one by one and knows the reasons.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

from bundler.format.frames import processors
from bundler.format.limits import MIB, Limits

DIRECTORIES_PER_BATCH = 32
# What one batch may bring; the directories beyond are read one by one.
BYTES_PER_BATCH = 32 * MIB
# Of one batch the files are listed, and those of the one before it are read, while the caller looks
# at a third.
_AHEAD = 2
_MOST_THREADS = 4

# Bytes and raw digest of each file by name; no digests where the extension found no library that
# computes them.
Files = tuple[dict[str, bytes], Mapping[str, bytes]]


class Reading(Protocol):
    """Directories that are being read; not for two threads at once."""

    def go_on(self) -> None:
        """Wait until the files are listed, and begin to read them."""

    def finish(self) -> list[Files | None]:
        """Wait for all, and return what each directory holds, None for one that is to be read by
        itself.
        """


# The last is how many threads read, or what `start_threads` of the extension returned.
BeginReading = Callable[[tuple[bytes, ...], int, int, object], Reading]


def compiled_reader() -> BeginReading | None:
    """Return the extension's `begin_reading`, None where it was not built.

    It takes paths, how many files a directory and how many bytes all of them may have, and threads;
    with none the caller reads while it waits.  A directory is to be read by itself when there is
    anything in it but regular files, when there are more or larger ones, when it cannot be read, or
    when a file was replaced, written or added before the last one was read.
    """
    extension = _extension()
    found: BeginReading | None = None if extension is None else extension.begin_reading
    return found


def _extension() -> Any:
    try:
        return importlib.import_module("bundler.lifecycle._kernel_reader")
    except ImportError:
        return None


def read_ahead(directories: Sequence[str], limits: Limits) -> Iterator[Files | None]:
    """Yield the files of each directory, or None for one that has to be read by itself."""
    begin = compiled_reader()
    if begin is None:
        yield from repeat(None, len(directories))
        return
    # The group file is none of the files that are counted.
    most = min(limits.files_per_kernel + 1, 4096)
    available = processors(_MOST_THREADS)
    threads = _extension().start_threads(available if available > 1 else 0)
    under_way: deque[Reading] = deque()
    for start in range(0, len(directories), DIRECTORIES_PER_BATCH):
        paths = tuple(map(os.fsencode, directories[start : start + DIRECTORIES_PER_BATCH]))
        under_way.append(begin(paths, most, BYTES_PER_BATCH, threads))
        if len(under_way) > _AHEAD:
            yield from _next_of(under_way)
    while under_way:
        yield from _next_of(under_way)


def _next_of(under_way: deque[Reading]) -> list[Files | None]:
    """Return what the oldest reading found; the one after it goes on meanwhile."""
    oldest = under_way.popleft()
    found = oldest.finish()
    if under_way:
        under_way[0].go_on()
    return found
