# SPDX-License-Identifier: Apache-2.0
"""`CacheDirectory`: puts kernels into a Triton cache directory, each whole or not at all.

`PlacementQueue` has the kernels of a restore on their way there, in batches, and counts what became
of them: where the extension of `kernel_writer.py` was built, threads that need no interpreter write
them while the caller reads the next ones; elsewhere the caller writes each batch itself.
`place_kernel` puts one kernel there, and `look` reads one as Triton would, for `bundler.check`.

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
import itertools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Literal

from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format.bundle import BlobSource, Keep
from bundler.format.bundle_file import (
    cleaned_up,
    open_regular,
    os_errors,
    typed,
    unlink_if_there,
)
from bundler.format.entries import Kernel
from bundler.format.frames import processors
from bundler.format.limits import DEFAULT_LIMITS, MIB
from bundler.format.sentinel import json_text
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.kernel_placement import (
    Placement,
    Trust,
    localized,
    planned,
    read,
    why_not_trusted,
)
from bundler.lifecycle.kernel_writer import (
    OCCUPIED,
    REFUSED,
    UNSURE,
    Finish,
    NewKernel,
    Threads,
    begin_writing,
    make_directories,
    remove_tree,
    write_file,
    write_kernels,
)
from bundler.package_loggers import logger

if TYPE_CHECKING:
    from bundler.lifecycle.kernel_directory import KernelFiles, Rejected

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

    def listed(self, key: str) -> bool:
        """Tell whether something had the kernel's name when the directory was listed."""
        return key in self._present

    def has(self, kernel: Placement) -> bool:
        """Tell whether the kernel, of which each file was verified, was there when the directory
        was listed, and is.
        """
        return self.listed(kernel.key) and self._usable(kernel)

    def temporary_name(self) -> str:
        """Return the name of a temporary directory, another one each time."""
        # An f-string reads its format anew each time, which takes ten times as long.
        parts = (TEMPORARY_PREFIX, os.getpid(), next(self._numbers))
        return "%s%d.%016x" % parts  # noqa: UP031

    def new_kernels(self, kernels: Iterable[Placement]) -> tuple[NewKernel, ...]:
        """Return what has to be written for kernels, each under a name of its own."""
        return tuple([one.new_kernel(self.temporary_name(), self._json_prefix) for one in kernels])

    def publish(self, kernel: Placement) -> Outcome:
        """Put a kernel in place.

        Raises:
            DigestMismatch, FormatError: it is damaged, or Triton could not read it.
            AccessDenied, StoreFull, NotFound: it cannot be written.
        """
        if self.listed(kernel.key):
            kernel = kernel.verified()  # before its bytes are compared with those that are there
            if self.has(kernel):
                return "present"
        new = self.new_kernels([kernel])
        codes: list[int] | None = None

        def write() -> Outcome:
            nonlocal codes
            codes = self.written(new, begin_writing(self.path, new, 0), 0)
            ((_, outcome),) = self.settled([kernel], new, codes)
            if isinstance(outcome, BundlerError):
                raise outcome
            return outcome

        return cleaned_up(write, lambda: self.clear(new, codes))

    def written(
        self, kernels: tuple[NewKernel, ...], finish: Finish, threads: Threads
    ) -> list[int]:
        """Wait until kernels are written, and return what `write_kernels` says of each."""
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

    def settled(
        self, kernels: Sequence[Placement], new: tuple[NewKernel, ...], codes: list[int] | None
    ) -> Iterator[tuple[Sequence[Placement], Outcome | BundlerError]]:
        """Yield kernels that are in place now or were refused, and what became of them, then raise
        what the first of the others met.

        Nothing became of any of them when they were not written to the end, and there are no codes.
        """
        if codes is None:
            return
        if not any(codes):
            yield kernels, "restored"
            return
        failure: BundlerError | OSError | None = None
        failed = ""
        for kernel, (temporary, *_), code in zip(kernels, new, codes, strict=True):
            if code == errno.ECANCELED:
                continue
            try:
                yield [kernel], self._outcome(kernel, temporary, code)
            except (OSError, BundlerError) as error:
                failure, failed = (failure or error), (failed or kernel.key)
        if isinstance(failure, OSError):
            raise typed(failure, self.place_of(failed), "write") from failure
        if failure is not None:
            raise failure

    def _outcome(self, kernel: Placement, temporary: str, code: int) -> Outcome | BundlerError:
        if code == 0:
            return "restored"
        if -code in OCCUPIED:
            return self.replace(temporary, kernel.edited())
        if code not in REFUSED:
            raise OSError(abs(code), os.strerror(abs(code)))
        # The writer refused it: we look for ourselves, and place it if only the writer could not
        # tell.
        try:
            sound = kernel.verified()
        except BundlerError as error:
            return error
        if code == UNSURE:
            return self.publish(sound)
        return DigestMismatch(
            f"{kernel.key}: its bytes changed in memory while it was written; restore it again",
            what=kernel.key,
        )

    def replace(self, temporary: str, kernel: Placement) -> Outcome:
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

    def clear(self, kernels: tuple[NewKernel, ...], codes: list[int] | None) -> None:
        """Remove temporary directories that writing these kernels left; calling it twice is
        fine.
        """
        if codes is not None and not any(codes):
            return
        for number, (temporary, *_) in enumerate(kernels):
            if codes is None or codes[number] < 0:
                remove_tree(self.place_of(temporary))

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
                cleaned_up(write_and_link, lambda: unlink_if_there(temporary))
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

    def _usable(self, kernel: Placement) -> bool:
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


def place_kernel(
    source: BlobSource,
    kernel: Kernel,
    directory: CacheDirectory,
    *,
    keep: Keep,
    trust: Trust,
    triton_dir: str | None,
    checked: bool = False,
) -> tuple[Outcome, Placement] | Rejected:
    """Place one kernel where Triton asks for it at this moment.

    The caller knows that this machine can use the kernel: Triton computed its key here, and the key
    covers target, Triton's build and ptxas.  So no fact of this machine is looked up, and none can
    be out of date when the visible GPUs change.  All else is as for `bundler.restore`.

    Args:
        source: where the bytes of its bundle are.
        kernel: which.
        directory: the cache directory, whatever the layout that the kernel was recorded under.
        keep, trust: as for `bundler.restore`.
        triton_dir: where Triton is installed, None when it is not.
        checked: whether these very bytes were found readable for Triton before; their digests
            are compared all the same.

    Returns:
        `Rejected` when its bytes are damaged, when Triton could not read them, or when it needs
        more trust.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be written.
        StoreUnavailable: its bytes cannot be read now.
    """
    # First, so that nothing is fetched for a kernel that is refused.
    untrusted = why_not_trusted(kernel, keep, trust)
    if untrusted is not None:
        return _rejected(untrusted)
    placement = planned(kernel, keep)
    placement.checked = checked
    # From a store all files come in one round trip, not in one each.
    source.prefetch(placement.digests)
    try:
        read(source, [placement])
        placement = localized(placement, directory.path, triton_dir)
    except (DigestMismatch, FormatError, NotFound) as error:
        # The kernel is compiled instead.  Trouble with the directory is no fault of the kernel, and
        # goes to the caller.
        return _rejected(error.message)
    try:
        return directory.publish(placement), placement
    except (DigestMismatch, FormatError) as error:
        if isinstance(error, DigestMismatch):
            _show_source(source, placement)
        return _rejected(error.message)


def _show_source(source: BlobSource, damaged: Placement) -> None:
    """Let the source, which left the digests to us, compare them too: a store removes what it finds
    damaged.
    """
    with contextlib.suppress(BundlerError):
        source.view_blobs(damaged.digests)


def _rejected(reason: str) -> Rejected:
    # A kernel that is placed needs nothing of it.
    from bundler.lifecycle.kernel_directory import Rejected

    return Rejected(reason)


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


def _holds(path: str, chunks: Iterable[bytes]) -> bool:
    """Tell whether a regular file, to which no link leads, holds these bytes."""
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


# Kernels that are being written into a directory, and what waits for them; None before they are
# begun.
_Batch = tuple[CacheDirectory, list[Placement], tuple[NewKernel, ...], Finish | None]


class PlacementQueue:
    """Kernels that wait to be written, those that are being written, and what became of the others.

    Not for several threads at once.  Call `finish` when the last kernel was added, and `close` in
    any case.  Of a hundred thousand kernels the keys are named here, which are those of the bundle,
    and hardly anything else: eight bytes for each.

    Args:
        source: where the bytes of the kernels came from, to be told of those that are damaged.

    Attributes:
        written: keys of kernels that were written, one for each directory, by the names of the
            files that hold a path of this machine.
        present, repaired: keys of those that were there, and of those that replaced something.
        skipped: (name, reason) of what is damaged; `damaged` has the names alone.
        files, bytes: how much was written.
        companions: names of other files that are in place.
        rewritten: those of them that hold a path of this machine.
        directories: where kernels and files went, by path.
    """

    def __init__(self, source: BlobSource) -> None:
        self._source = source
        self.directories: dict[str, CacheDirectory] = {}
        self.companions: list[str] = []
        self.rewritten: set[str] = set()
        self.written: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        self.present: list[str] = []
        self.repaired: set[str] = set()
        self.skipped: list[tuple[str, str]] = []
        # Also by itself: most of what a report calls skipped is whole, and of no use on this
        # machine.
        self.damaged: list[str] = []
        self.files = self.bytes = 0
        self._waiting: dict[str, tuple[CacheDirectory, list[Placement]]] = {}
        self._waiting_count = self._waiting_bytes = 0
        self._most = KERNELS_AT_FIRST
        self._writing: deque[_Batch] = deque()
        self._threads: Threads | None = None

    def directory(self, root: str) -> CacheDirectory:
        """Return a cache directory, which is listed when it is first asked for; raises as
        `CacheDirectory`.
        """
        if root not in self.directories:
            self.directories[root] = CacheDirectory(root)
        return self.directories[root]

    def add(self, directory: CacheDirectory, kernel: Placement) -> None:
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
                self.refused(kernel, error)
                return
            if directory.has(kernel):
                self.placed([kernel], "present")
                return
        waiting = self._waiting.get(directory.path)
        if waiting is None:
            waiting = self._waiting[directory.path] = (directory, [])
        waiting[1].append(kernel)
        self._waiting_count += 1
        self._waiting_bytes += kernel.size_bytes
        if self._waiting_count >= self._most or self._waiting_bytes >= BYTES_PER_BATCH:
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
        while self._writing:
            with contextlib.suppress(BundlerError):
                self._settle_oldest()

    def placed(self, kernels: Sequence[Placement], outcome: Outcome) -> None:
        """Count kernels by what became of them in one directory."""
        for kernel in kernels:
            if outcome == "present":
                self.present.append(kernel.key)
                continue
            if outcome == "repaired":
                self.repaired.add(kernel.key)
            self.written[kernel.rewritten].append(kernel.key)
            # One file more than the bundle has: Triton's group file.
            self.wrote(len(kernel.names) + 1, kernel.size_bytes)

    def wrote(self, files: int, size: int) -> None:
        """Count files that were written."""
        self.files += files
        self.bytes += size

    def refused(self, kernel: Placement, error: BundlerError) -> None:
        """Count a kernel that is damaged."""
        if isinstance(error, DigestMismatch):
            _show_source(self._source, kernel)
        self.spoiled(kernel.key, error)

    def spoiled(self, name: str, error: BundlerError) -> None:
        """Count a kernel, or another file, that is damaged."""
        self.skipped.append((name, error.message))
        self.damaged.append(name)

    def keys(self) -> Mapping[Outcome, tuple[str, ...]]:
        """Return the keys of kernels by what became of them: by the most that was done for one that
        goes to several directories.
        """
        written = chain.from_iterable(self.written.values())
        return {
            "restored": _once(written, self.repaired),
            "repaired": _once(self.repaired),
            "present": _once(
                self.present,
                set(chain.from_iterable(self.written.values())) if self.present else (),
            ),
        }

    def _hand_over(self, *, last: bool = False) -> None:
        alone = last and self._waiting_count == 1  # nothing is written meanwhile: no use of threads
        batches = [*self._waiting.values()]
        self._waiting, self._waiting_count, self._waiting_bytes = {}, 0, 0
        self._most = min(KERNELS_PER_BATCH, 2 * self._most)
        # A few at a time: that bounds the memory, and an error shows before more is written.
        # Without the extension a batch is written when it is begun, and nothing is gained by
        # waiting.
        compiled = kernel_writer.compiled_writer() is not None
        self._settle(len(batches) * (MOST_UNDER_WAY - 1) if compiled else 0)
        if batches and self._threads is None:
            available = 1 if alone else processors(MOST_WRITERS)
            # One of them stays idle until somebody waits.  With one processor a thread would
            # cost more than it saves.
            self._threads = kernel_writer.start_threads(available + 1 if available > 1 else 0)
        for directory, kernels in batches:
            new = directory.new_kernels(kernels)
            self._writing.append((directory, kernels, new, None))
            finish = begin_writing(directory.path, new, self._threads)
            self._writing[-1] = (directory, kernels, new, finish)

    def _settle(self, left: int) -> None:
        """Wait for the oldest batches, until so many are left."""
        while len(self._writing) > left:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Wait for the oldest batch, and count its kernels; raises what the first that could not be
        written met.
        """
        directory, kernels, new, finish = self._writing[0]
        codes = None if finish is None else directory.written(new, finish, self._threads)
        self._writing.popleft()

        def tell() -> None:
            for some, outcome in directory.settled(kernels, new, codes):
                if isinstance(outcome, BundlerError):
                    self.refused(some[0], outcome)
                else:
                    self.placed(some, outcome)

        cleaned_up(tell, lambda: directory.clear(new, codes))


def _once(keys: Iterable[str], without: Container[str] = ()) -> tuple[str, ...]:
    """Return keys in order, each once; a set of a hundred thousand would take more memory than
    their kernels.
    """
    return tuple(key for key, _ in groupby(sorted(keys)) if key not in without)
