# SPDX-License-Identifier: Apache-2.0
"""`CacheDirectory`: puts kernels into a Triton cache directory, each whole or not at all.

`PlacementQueue` has the verified kernels of a restore on their way there, in batches: where the
extension of `kernel_writer.py` was built, threads that need no interpreter write them while the
caller verifies the next ones; elsewhere the caller writes each batch itself.

`place_kernel` publishes one with it; a restore puts many into a `KernelBatch` each, by way of
`PlacementQueue`.  `look` reads a kernel as Triton would, for `bundler.check`.

::

    <cache>/tmp.bundler.<pid>.<random>/     written here, then renamed once to
    <cache>/<KEY>/                          what Triton sees
    <cache>/tmp.bundler.old.<pid>.<random>/ a broken directory, renamed aside; swept a day later

The group file is the commit record that Triton looks for: it is generated from the files that were
written and becomes visible with them, in the one rename.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.bundle_file import cleaned_up, os_errors, typed
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.sentinel import json_text
from bundler.lifecycle.kernel_writer import (
    OCCUPIED,
    REFUSED,
    UNSURE,
    Finish,
    NewKernel,
    ReadyKernel,
    Threads,
    begin_writing,
    make_directories,
    new_kernel,
    remove_tree,
    write_file,
    write_kernels,
)
from bundler.package_loggers import logger

if TYPE_CHECKING:
    from bundler.lifecycle.kernel_directory import KernelFiles, Rejected
from collections import deque

from bundler.format.limits import MIB
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.threaded_call import processors

Outcome = Literal["restored", "present", "repaired"]

TEMPORARY_PREFIX = "tmp.bundler."
ASIDE_PREFIX = "tmp.bundler.old."
# Long enough that no living restore or reader still uses what it left.
STALE_AFTER_S = 24 * 3600
ATTEMPTS = 4
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}
_log = logger("bundler.lifecycle")


class CacheDirectory:
    """One cache directory that kernels are restored into.

    Safe for any number of threads and processes, ours and Triton's: they see a kernel whole or not
    at all, and losing a race is success.  Not guaranteed: a process that is compiling the very same
    kernel at this moment goes on writing its own files into the directory that we published; they
    are files of the same kernel.

    Making one lists the directory and sweeps what killed processes left, so that who places one
    kernel after the other keeps it: the listing only saves writing what is there already, and may
    be out of date.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be made or written.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._prefix = os.path.join(self.path, "")
        self._json_prefix = json_text(self._prefix)
        # Numbers of temporary directories.  Two processes begin at different random numbers, also
        # on hosts that share the directory and use one process id; threads of one process share the
        # counter, so each gets another number.
        self._numbers = itertools.count(int.from_bytes(os.urandom(8)) >> 1)
        with os_errors(self.path, "write to"):
            make_directories(self.path)
            self._present = set(os.listdir(self.path))
        # In a cache that cannot be written the kernels may still all be there.
        with contextlib.suppress(OSError):
            self._sweep()

    def publish(self, kernel: ReadyKernel) -> Outcome:
        """Put a kernel, of which each file was verified, in place."""
        if self.has(kernel):
            return "present"
        batch = KernelBatch(self, [kernel])

        def write() -> Outcome:
            batch.begin(threads=0)
            batch.finish()
            ((_, outcome),) = batch.settled()
            if isinstance(outcome, BundlerError):
                raise outcome
            return outcome

        return cleaned_up(write, batch.clear)

    def listed(self, key: str) -> bool:
        """Tell whether something had the kernel's name when the directory was listed."""
        return key in self._present

    def has(self, kernel: ReadyKernel) -> bool:
        """Tell whether the kernel, of which each file was verified, was there when the directory
        was listed, and is.
        """
        return self.listed(kernel.key) and self._usable(kernel)

    def new_kernel(self, kernel: ReadyKernel) -> NewKernel:
        """Return what has to be written for a kernel, under a name of its own."""
        # An f-string reads its format anew each time, which takes ten times as long.
        parts = (TEMPORARY_PREFIX, os.getpid(), next(self._numbers))
        temporary = "%s%d.%016x" % parts  # noqa: UP031
        return new_kernel(kernel, temporary, self._json_prefix)

    def begin(self, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
        """Begin to write kernels; returns what waits for it, and says what `write_kernels` says of
        each.
        """
        return functools.partial(
            self._finished, begin_writing(self.path, kernels, threads), kernels, threads
        )

    def _finished(
        self, finish: Finish, kernels: tuple[NewKernel, ...], threads: Threads
    ) -> list[int]:
        codes = finish()
        for _ in range(ATTEMPTS):
            if errno.ENOENT not in codes:
                break
            # The program may have removed its whole cache since this object was made.
            left = [
                number
                for number, code in enumerate(codes)
                if code in {errno.ENOENT, errno.ECANCELED}
            ]
            try:
                make_directories(self.path)
                again = write_kernels(self.path, tuple(kernels[number] for number in left), threads)
            except OSError as error:
                again = [error.errno or errno.EIO] * len(left)
            for number, code in zip(left, again, strict=True):
                codes[number] = code
        return codes

    def replace(self, temporary: str, kernel: ReadyKernel) -> Outcome:
        """Put a kernel that is in a temporary directory in the place where something else is,
        unless that is this kernel.
        """
        for _ in range(ATTEMPTS):
            if self._usable(kernel):
                return "present"
            self._move_aside(kernel.key)
            if self._rename(self._prefix + temporary, kernel.key):
                return "repaired"
        raise BundlerError(
            f"{self.place_of(kernel.key)}: another process keeps writing a broken kernel there; "
            "stop it, or remove the directory",
            path=self.place_of(kernel.key),
        )

    def place_of(self, name: str) -> str:
        """Return the path of a kernel, or of a temporary directory."""
        return self._prefix + name

    def publish_file(self, path: str, chunks: Callable[[], Iterable[bytes]]) -> bool | None:
        """Put a single file in place unless one is there.

        Args:
            path: where, below the directory.
            chunks: returns its bytes in pieces, each time it is called; what it raises leaves
                nothing behind.

        Returns:
            True when it was written, False when the same bytes were there, None when anything else
            was.
        """
        target = os.path.join(self.path, path)
        with os_errors(target, "write"):
            try:
                make_directories(os.path.dirname(target))
            except (FileExistsError, NotADirectoryError):
                return None
            temporary = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))

            def write_and_link() -> None:
                write_file(temporary, chunks())
                _create(temporary, target)

            try:
                cleaned_up(write_and_link, lambda: _unlink(temporary))
            except FileExistsError:
                return False if _holds(target, chunks()) else None
        return True

    def _rename(self, temporary: str, key: str) -> bool:
        try:
            os.rename(temporary, self._prefix + key)
        except OSError as error:
            if error.errno in OCCUPIED:
                return False
            raise
        return True

    def _usable(self, kernel: ReadyKernel) -> bool:
        """Tell whether the directory holds this kernel, in our bytes or in those of another
        complete build.
        """
        from bundler.lifecycle.kernel_directory import Rejected

        found = look(self.path, kernel.key)
        if isinstance(found, Rejected):
            if not found.missing:
                _log.info("%s is broken: %s", self.place_of(kernel.key), found.reason)
            return False
        return all(found.files.get(name) == data for name, data in kernel.files) or same_launch(
            self.path, found, bytes(kernel.stored_metadata)
        )

    def _move_aside(self, key: str) -> None:
        # Not deleted at once: a process that opened the kernel before may still read its files.
        with contextlib.suppress(FileNotFoundError):
            os.rename(
                os.path.join(self.path, key), os.path.join(self.path, _temporary_name(ASIDE_PREFIX))
            )

    def _sweep(self) -> None:
        leftovers = [name for name in self._present if name.startswith(TEMPORARY_PREFIX)]
        if not leftovers:
            return
        probe = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))

        def make_and_look() -> float:
            os.mkdir(probe)
            # The file system's own clock: the local one may differ from a server's by hours.
            return os.stat(probe).st_mtime

        now = cleaned_up(make_and_look, lambda: remove_tree(probe))
        for name in leftovers:
            path = os.path.join(self.path, name)
            with contextlib.suppress(FileNotFoundError):
                if now - os.lstat(path).st_ctime > STALE_AFTER_S:
                    remove_leftover(path)


class KernelBatch:
    """Kernels that are written into one cache directory together.

    `begin` returns while they are being written, and `finish` waits.  After it `settled` says what
    became of the kernels, and in the end `clear` removes what is left, however they ended.
    """

    def __init__(self, directory: CacheDirectory, kernels: Sequence[ReadyKernel]) -> None:
        self._directory, self._kernels = directory, kernels
        self._new = tuple(map(directory.new_kernel, kernels))
        self._finish: Finish | None = None
        self._codes: list[int] | None = None

    def begin(self, threads: Threads) -> None:
        """Begin to write them; errors of the file system show when they are settled."""
        self._finish = self._directory.begin(self._new, threads)

    def finish(self) -> None:
        """Wait until they are written, if that was begun; calling it again is fine."""
        if self._codes is None and self._finish is not None:
            self._codes = self._finish()

    def settled(self) -> Iterator[tuple[Sequence[ReadyKernel], Outcome | BundlerError]]:
        """Yield kernels that are in place now or were refused, and what became of them, then raise
        what the first of the others met.

        Nothing became of any of them when they were not written to the end.
        """
        if self._codes is None:
            return
        if not any(self._codes):
            yield self._kernels, "restored"
            return
        failure: BundlerError | OSError | None = None
        failed = ""
        for kernel, (temporary, *_), code in zip(
            self._kernels, self._new, self._codes, strict=True
        ):
            if code == errno.ECANCELED:
                continue
            try:
                yield [kernel], self._outcome(kernel, temporary, code)
            except (OSError, BundlerError) as error:
                failure, failed = (failure or error), (failed or kernel.key)
        if isinstance(failure, OSError):
            raise typed(failure, self._directory.place_of(failed), "write") from failure
        if failure is not None:
            raise failure

    def _outcome(self, kernel: ReadyKernel, temporary: str, code: int) -> Outcome | BundlerError:
        if code == 0:
            return "restored"
        if code in REFUSED:
            return self._refused(kernel, code)
        if -code in OCCUPIED:
            return self._directory.replace(temporary, kernel.edited())
        raise OSError(abs(code), os.strerror(abs(code)))

    def _refused(self, kernel: ReadyKernel, code: int) -> Outcome | BundlerError:
        """Look for ourselves at a kernel that the writer refused, and place it if only the writer
        could not tell.
        """
        try:
            sound = kernel.verified()
        except BundlerError as error:
            return error
        if code == UNSURE:
            return self._directory.publish(sound)
        return DigestMismatch(
            f"{kernel.key}: its bytes changed in memory while it was written; restore it again",
            what=kernel.key,
        )

    def clear(self) -> None:
        """Remove temporary directories that are still there; calling it twice is fine."""
        if self._codes is not None and not any(self._codes):
            return
        for number, (temporary, *_) in enumerate(self._new):
            if self._codes is None or self._codes[number] < 0:
                remove_tree(self._directory.place_of(temporary))


def look(directory: str, key: str) -> KernelFiles | Rejected:
    """Read a kernel where Triton would, changing nothing."""
    from bundler.lifecycle.kernel_directory import Rejected, read_kernel

    target = os.path.join(directory, key)
    found = read_kernel(target, DEFAULT_LIMITS)
    if not isinstance(found, Rejected) and not all(
        _leads_here(path, target, name) for name, path in found.child_paths.items()
    ):
        return Rejected("its group file names files elsewhere")
    return found


def same_launch(directory: str, found: KernelFiles, stored_metadata: bytes) -> bool:
    """Tell whether a complete kernel is another build of the one whose stored metadata is given."""
    # Only where another build may be in the way.
    from bundler.format.bundle_union import metadata_identity
    from bundler.lifecycle.bundle_builder import portable

    theirs, _ = portable(found.files[found.metadata_name], {directory, *found.written_roots})
    try:
        return metadata_identity(theirs) == metadata_identity(stored_metadata)
    except FormatError:
        return False


def look_for_file(directory: str, path: str, chunks: Iterable[bytes]) -> bool | None:
    """Tell what `publish_file` would answer: True when there is no such file, False for the same
    bytes, else None.
    """
    target = os.path.join(directory, path)
    try:
        os.lstat(target)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    return False if _holds(target, chunks) else None


def _create(temporary: str, target: str) -> None:
    """Give a file its name; raises `FileExistsError` when the name is taken, so whoever was first
    stays.
    """
    try:
        os.link(temporary, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without hard links two writers may both see the name free; the later rename wins, whole.
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        os.rename(temporary, target)


def remove_leftover(path: str) -> None:
    """Remove a temporary directory, or what lies in its place; what a live process still writes
    there is lost.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        import shutil  # what lies there for a day may be anything

        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _holds(path: str, chunks: Iterable[bytes]) -> bool:
    """Tell whether a regular file, to which no link leads, holds these bytes."""
    from bundler.format.bundle_file import open_regular

    try:
        opened = open_regular(path, links=False)
    except OSError:
        return False
    with open(opened, "rb") as file:
        try:
            return all(file.read(len(chunk)) == chunk for chunk in chunks) and not file.read(1)
        except BundlerError:
            raise
        except OSError:
            return False


def _leads_here(path: str, directory: str, name: str) -> bool:
    if path == os.path.join(directory, name):
        return True
    try:
        return os.path.samefile(path, os.path.join(directory, name))
    except OSError:
        return False


def _temporary_name(prefix: str) -> str:
    return f"{prefix}{os.getpid()}.{os.urandom(8).hex()}"


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
        self._hand_over(last=True)
        self._settle(0)
        self._threads = None

    def close(self) -> None:
        """After an error, wait for what is being written, and leave nothing half-written; calling
        it twice is fine.
        """
        for under_way in self._writing:
            under_way.abandon(self._placed)

    def _hand_over(self, *, last: bool = False) -> None:
        alone = last and self._count == 1  # nothing is written meanwhile, so threads gain nothing
        batches = [KernelBatch(directory, kernels) for directory, kernels in self._waiting.values()]
        self._waiting, self._count, self._bytes = {}, 0, 0
        self._most = min(KERNELS_PER_BATCH, 2 * self._most)
        # A few at a time: that bounds the memory, and an error shows before more is written.
        self._settle(self._most_under_way - 1)
        if batches:
            self._writing.append(_BatchesUnderWay(batches))
            if self._threads is None:
                available = 1 if alone else processors(MOST_WRITERS)
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
