# SPDX-License-Identifier: Apache-2.0
"""`read_ahead`: the files of many kernel directories, read by a thread while the caller looks at those that were read before.

The extension `_kernel_reader` reads, where it was built.  It answers only for directories in which nothing is out of the ordinary;
for all others `kernel_directory.py`, which calls this, reads one by one and knows the reasons.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

from bundler.format.limits import MIB, Limits
from bundler.lifecycle.threaded_call import ThreadedCall, processors

DIRECTORIES_PER_BATCH = 32
# What one batch may bring; the directories beyond are read one by one.
BYTES_PER_BATCH = 32 * MIB

Files = dict[str, bytes]
ReadDirectories = Callable[[tuple[bytes, ...], int, int, int], list[Files | None]]


def compiled_reader() -> ReadDirectories | None:
    """Return the extension's `read_directories`, None where it was not built.

    It takes paths, how many files a directory and how many bytes all of them may have, and a number of threads.  For each directory it
    returns name -> bytes, or None when there is anything in it but regular files, when there are more or larger ones, when it cannot be
    read, or when a file was replaced, written or added before the last one was read.
    """
    try:
        extension = importlib.import_module("bundler.lifecycle._kernel_reader")
    except ImportError:
        return None
    found: ReadDirectories = extension.read_directories
    return found


def read_ahead(directories: Sequence[str], limits: Limits) -> Iterator[Files | None]:
    """Yield the files of each directory, or None for one that has to be read by itself."""
    reader = compiled_reader()
    if reader is None:
        yield from repeat(None, len(directories))
        return
    # The group file is none of the files that are counted.
    most = min(limits.files_per_kernel + 1, 4096)
    under_way: deque[ThreadedCall[list[Files | None]]] = deque()
    for start in range(0, len(directories), DIRECTORIES_PER_BATCH):
        paths = tuple(map(os.fsencode, directories[start : start + DIRECTORIES_PER_BATCH]))
        call = ThreadedCall(partial(reader, paths, most, BYTES_PER_BATCH, processors()))
        call.start(apart=True)
        under_way.append(call)
        if len(under_way) > 1:
            yield from under_way.popleft().result()
    for call in under_way:
        yield from call.result()
