# SPDX-License-Identifier: Apache-2.0
"""`PlacementQueue`: verified kernels on their way into cache directories.  A restore fills it.

Kernels are written in batches.  Where the extension of `kernel_writer.py` was built, threads that
do not need the interpreter write batches while the caller reads and verifies the next ones;
elsewhere the caller writes each batch itself.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.bundle_file import cleaned_up
from bundler.format.limits import MIB
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.cache_directory import CacheDirectory, KernelBatch, Outcome
from bundler.lifecycle.kernel_writer import ReadyKernel
from bundler.lifecycle.threaded_call import processors

# Enough to keep several threads busy, and few enough that little waits in memory: what waits keeps
# its decoded frames there too.
KERNELS_PER_BATCH = 64
BYTES_PER_BATCH = 4 * MIB
# Hashing and writing take three times as long as reading and checking, which one thread does.
MOST_WRITERS = 8
# While the last kernels of a batch are written, threads begin the next one.
MOST_UNDER_WAY = 3
# Nothing is written while the first batch is filled.
KERNELS_AT_FIRST = 16

# What became of kernels; one that is damaged is not placed, and the error says why.
Placed = Callable[[Sequence[ReadyKernel], Outcome | BundlerError], None]


class PlacementQueue:
    """Kernels that wait to be written, and those that are being written.

    Not for several threads at once.  Call `finish` when the last kernel was added, and `close` in
    any case.

    Args:
        placed: is told what became of the kernels, in the thread that fills the queue.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self._waiting: dict[str, tuple[CacheDirectory, list[ReadyKernel]]] = {}
        self._count = self._bytes = 0
        self._most = KERNELS_AT_FIRST
        self._writing: deque[_BatchesUnderWay] = deque()
        # Without the extension a batch is written when it is begun, and nothing is gained by
        # waiting.
        self._most_under_way = MOST_UNDER_WAY if kernel_writer.compiled_writer() is not None else 1
        self._threads: kernel_writer.Threads | None = None

    def add(self, directory: CacheDirectory, kernel: ReadyKernel) -> None:
        """Add a kernel.

        Raises:
            AccessDenied, StoreFull, NotFound, BundlerError: a kernel that was added before could
                not be written; so does `finish`.
        """
        # A restore into a full cache ends here for each kernel, and starts no thread.
        if directory.listed(kernel.key):
            try:
                # Before its bytes are compared with those that are there.
                kernel = kernel.verified()
            except (DigestMismatch, FormatError) as error:
                self._placed([kernel], error)
                return
            if directory.has(kernel):
                self._placed([kernel], "present")
                return
        waiting = self._waiting.get(directory.path)
        if waiting is None:
            waiting = self._waiting[directory.path] = (directory, [])
        waiting[1].append(kernel)
        self._count += 1
        self._bytes += kernel.size_bytes
        if self._count >= self._most or self._bytes >= BYTES_PER_BATCH:
            self._hand_over()

    def finish(self) -> None:
        """Write what waits, and wait for it."""
        self._hand_over()
        self._settle(0)
        self._threads = None

    def close(self) -> None:
        """After an error, wait for what is being written, and leave nothing half-written; calling
        it twice is fine.
        """
        for under_way in self._writing:
            under_way.abandon(self._placed)

    def _hand_over(self) -> None:
        batches = [KernelBatch(directory, kernels) for directory, kernels in self._waiting.values()]
        self._waiting, self._count, self._bytes = {}, 0, 0
        self._most = min(KERNELS_PER_BATCH, 2 * self._most)
        # A few at a time: that bounds the memory, and an error shows before more is written.
        self._settle(self._most_under_way - 1)
        if batches:
            self._writing.append(_BatchesUnderWay(batches))
            if self._threads is None:
                available = processors(MOST_WRITERS)
                # One of them stays idle until somebody waits.  With one processor a thread would
                # cost more than it saves.
                self._threads = kernel_writer.start_threads(available + 1 if available > 1 else 0)
            self._writing[-1].start(self._threads)

    def _settle(self, left: int) -> None:
        """Wait for the oldest batches, until so many are left."""
        while len(self._writing) > left:
            self._writing[0].settle(self._placed)
            self._writing.popleft()


class _BatchesUnderWay:
    """Batches that are being written, one for each cache directory."""

    def __init__(self, batches: Iterable[KernelBatch]) -> None:
        self._batches = deque(batches)

    def start(self, threads: kernel_writer.Threads) -> None:
        for batch in self._batches:
            batch.begin(threads)

    def settle(self, placed: Placed) -> None:
        """Wait, tell what became of the kernels, and raise what went wrong."""
        self._wait()
        while self._batches:
            _tell(self._batches.popleft(), placed)

    def abandon(self, placed: Placed) -> None:
        """Wait, tell what became of the kernels, and leave out what went wrong."""
        self._wait()
        while self._batches:
            batch = self._batches.popleft()
            with contextlib.suppress(BundlerError):
                _tell(batch, placed)

    def _wait(self) -> None:
        for batch in self._batches:
            batch.finish()


def _tell(batch: KernelBatch, placed: Placed) -> None:
    def tell() -> None:
        for kernels, outcome in batch.settled():
            placed(kernels, outcome)

    cleaned_up(tell, batch.clear)
