# SPDX-License-Identifier: Apache-2.0
"""`begin_writing` and `write_kernels`: write kernels below one directory, each whole, by one rename; `ReadyKernel` is one that only has to be written.

The extension `_kernel_writer` does it where it was built, in threads that need no interpreter; elsewhere `write_in_python` does the same,
one kernel after the other, before it returns.  `CacheDirectory` calls them, and knows what to do about each answer.  `StoredKernel` makes a
`ReadyKernel` for each directory, and `PlacementQueue` passes it on.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.bundle_file import cleaned_up
from bundler.format.digest import DIGEST_BYTES, check_digest, sha256
from bundler.format.sentinel import Edit, edited
from bundler.lifecycle.elf import why_unusable

Buffer = bytes | memoryview
# Name and bytes; and the raw digest that the bytes must have, unless it was compared before; and what is changed in them after that.
NewFile = tuple[str, Buffer] | tuple[str, Buffer, bytes] | tuple[str, Buffer, bytes, tuple[Edit, ...]]
# Name of the temporary directory, name of the kernel's, and the files in it; and which of these is the device binary, unless that was
# looked at before.
NewKernel = tuple[str, str, tuple[NewFile, ...]] | tuple[str, str, tuple[NewFile, ...], int]
# Waits, and returns the codes; calling it again returns them again.  Not for two threads at once.
Finish = Callable[[], list[int]]
# How many, or what `start_threads` returned.
Threads = object
BeginWriting = Callable[[str, tuple[NewKernel, ...], Threads], Finish]

# The codes of a kernel of which a file does not have its digest, and of one whose device binary is not a whole ELF file; no error number
# of a system is that large.
DAMAGED = 1 << 16
NO_BINARY = DAMAGED + 1

# What stands in the place of a kernel; after any other error the next kernel would meet the same one.
OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
# How long is waited before a directory is asked for again, which is said to be there and to be missing.
_PAUSES_S = (0.05, 0.25, 0.75)
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Files = Mapping[str, Buffer]
_ALL_COMPARED: Mapping[str, bytes] = {}
_NO_EDITS: Mapping[str, tuple[Edit, ...]] = {}


class ReadyKernel(Struct, frozen=True):
    """A kernel that only has to be written.

    Attributes:
        key: its kernel key, the name of the directory.
        files: name -> bytes of every file but the group file, in Triton's order.
        stored_metadata: the metadata as the bundle stores it, with sentinels, to recognise another build by.
        rewritten: names of the files that hold a path of this machine.
        digests: name -> raw digest of the files that were not verified yet; who writes the kernel compares them.
        edits: name -> what is changed in a file that was not verified yet, when it is written.
        growth: how many bytes the files have more then.
        binary: the device binary, if nobody has looked yet whether it is whole; who writes the kernel does.
    """

    key: str
    files: Files
    stored_metadata: bytes
    rewritten: tuple[str, ...] = ()
    digests: Mapping[str, bytes] = _ALL_COMPARED
    binary: str | None = None
    edits: Mapping[str, tuple[Edit, ...]] = _NO_EDITS
    growth: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the group file, as they are written."""
        return sum(map(len, self.files.values())) + self.growth

    def verified(self) -> ReadyKernel:
        """Return the same kernel with nothing left to verify; raises `DigestMismatch` or `FormatError`."""
        for name, digest in self.digests.items():
            check_digest(self.files[name], digest, name)
        if self.binary is not None:
            reason = why_unusable(self.files[self.binary])
            if reason is not None:
                raise FormatError(f"{self.binary} is {reason}", key=self.key)
        return replace(self.edited(), digests=_ALL_COMPARED, binary=None)

    def edited(self) -> ReadyKernel:
        """Return the same kernel with its files as they are written."""
        changed = {name: edited(self.files[name], edits) for name, edits in self.edits.items()}
        return replace(self, files={**self.files, **changed}, edits=_NO_EDITS, growth=0) if changed else self

    def why_refused(self) -> BundlerError:
        """Return what is wrong with a kernel that the writer refused."""
        try:
            self.verified()
        except BundlerError as error:
            return error
        # Nothing was written, so there is something to tell.
        return DigestMismatch(
            f"{self.key}: its bytes changed in memory while it was written; restore it again", what=self.key
        )


def make_directories(path: str) -> None:
    """Make a directory and those above it; one that is there is fine.

    A file system that remembers missing names (FUSE, some network mounts) may say that the name is taken, by the client that was faster,
    and for a moment that nothing is there.  So it is asked again.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            if pause_s is None or os.path.lexists(path):
                raise
            time.sleep(pause_s)
        else:
            return


def _extension() -> Any:
    try:
        return importlib.import_module("bundler.lifecycle._kernel_writer")
    except ImportError:
        return None


def start_threads(count: int) -> Threads:
    """Return threads that write one batch after the other; they end when nobody has them any more."""
    return count if compiled_writer() is None else _extension().start_threads(count)


def compiled_writer() -> BeginWriting | None:
    """Return `begin_writing` of the extension, None where it was not built."""
    extension = _extension()
    if extension is None:
        return None

    def begin(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
        finish: Finish = extension.begin_writing(root, kernels, threads).finish
        return finish

    return begin if extension.COMPARES_DIGESTS else functools.partial(_compare_first, begin)


def begin_writing(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    """Begin what `write_kernels` does, and return what waits for it.

    With no thread it is done while the caller waits, and without the extension when this returns.
    """
    return (compiled_writer() or _write_at_once)(root, kernels, threads)


def _write_at_once(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    codes = write_in_python(root, kernels, threads)
    return lambda: codes


def write_kernels(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> list[int]:
    """Write kernels, each into a temporary directory beside its place, which is then renamed once.

    Before that, the bytes of each file that comes with a digest are compared with it, and then the headers of a device binary with its
    length.  What is to be changed in a file is changed as it is written.

    Args:
        root: the directory.
        kernels: what to write.
        threads: so many write at once, or those that `start_threads` returned; in Python, and with 0, the caller does.

    Returns:
        A code for each kernel: 0, it is in place.  A positive error number: it could not be written, and nothing of it is left;
        `ECANCELED` when it was not begun, because another one had failed; `DAMAGED` when a file does not have its digest and
        `NO_BINARY` when the binary is none, which stop no other kernel.  A negative one: the rename failed with that number, and the
        temporary directory is there, whole.
    """
    return begin_writing(root, kernels, threads)()


def write_in_python(root: str, kernels: tuple[NewKernel, ...], _threads: Threads) -> list[int]:
    """Do what `write_kernels` says."""
    for kernel in kernels:
        _check_form(kernel)
    codes = [errno.ECANCELED] * len(kernels)
    for number, kernel in enumerate(kernels):
        temporary, key, files, *_ = kernel
        codes[number] = _why_unsound(kernel) or _write_kernel(
            os.path.join(root, temporary), os.path.join(root, key), files
        )
        if codes[number] not in {0, DAMAGED, NO_BINARY} and -codes[number] not in OCCUPIED:
            break
    return codes


def _check_form(kernel: NewKernel) -> None:
    temporary, key, files, *binary = kernel
    for name in (temporary, key, *(file[0] for file in files)):
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise ValueError(f"not the name of a file: {name!r}")
    for _, data, *more in files:
        if more and len(more[0]) != DIGEST_BYTES:
            raise ValueError("not a SHA-256 digest")
        _check_edits(data, *more[1:])
    if any(not 0 <= number < len(files) for number in binary):
        raise ValueError("the binary is none of the files")


def _check_edits(data: Buffer, edits: tuple[Edit, ...] = ()) -> None:
    end = 0
    for offset, old, _ in edits:
        if not end <= offset <= len(data) or data[offset : offset + len(old)] != old:
            raise ValueError("not the bytes that are to be changed")
        end = offset + len(old)


def _compare_first(begin: BeginWriting, root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    """Do what `begin_writing` says with a writer that compares no digests."""
    for kernel in kernels:
        _check_form(kernel)
    unsound = [_why_unsound(kernel) for kernel in kernels]
    plain = [(temporary, key, tuple(map(_as_written, files))) for temporary, key, files, *_ in kernels]
    finish = begin(root, tuple([kernel for kernel, why in zip(plain, unsound, strict=True) if not why]), threads)

    def codes() -> list[int]:
        written = iter(finish())
        return [why or next(written) for why in unsound]

    return codes


def _why_unsound(kernel: NewKernel) -> int:
    """Return `DAMAGED`, `NO_BINARY` or 0."""
    _, _, files, *binary = kernel
    if any(sha256(file[1]) != file[2] for file in files if len(file) > 2):  # noqa: PLR2004  # it has a digest
        return DAMAGED
    return NO_BINARY if any(why_unusable(files[number][1]) is not None for number in binary) else 0


def _as_written(file: NewFile) -> tuple[str, Buffer]:
    return file[0], edited(file[1], file[3]) if len(file) > 3 else file[1]  # noqa: PLR2004  # there is something to change


def _write_kernel(temporary: str, target: str, files: tuple[NewFile, ...]) -> int:
    ours = True

    def write_and_rename() -> int:
        nonlocal ours
        try:
            os.mkdir(temporary)
        except OSError as error:
            ours = False  # it may be somebody else's
            return error.errno or errno.EIO
        try:
            _write_files(temporary, files)
        except OSError as error:
            return error.errno or errno.EIO
        ours = False  # the caller's now
        try:
            os.rename(temporary, target)
        except OSError as error:
            return -(error.errno or errno.EIO)
        return 0

    def clear() -> None:
        if ours:
            remove_tree(temporary)

    return cleaned_up(write_and_rename, clear)


def _write_files(temporary: str, files: tuple[NewFile, ...]) -> None:
    folder = os.open(temporary, _READ_DIRECTORY)
    try:
        for file in files:
            write_file(*_as_written(file), folder)
    finally:
        os.close(folder)


def write_file(path: str, data: Buffer, folder: int | None = None) -> None:
    """Write a new file; `folder` is a descriptor of the directory that `path` is relative to."""
    fd = os.open(path, _CREATE_FILE, 0o666, dir_fd=folder)
    try:
        done = os.write(fd, data) if data else 0
        while done < len(data):
            done += os.write(fd, memoryview(data)[done:])
    finally:
        os.close(fd)


def remove_tree(path: str) -> None:
    """Remove a temporary directory of ours, which has files in it and nothing else, unless it was renamed, as it is nearly always.

    `shutil.rmtree` does it too, and takes longer to import than a restore of a hundred kernels: it knows every kind of archive.
    """
    if os.path.lexists(path):
        with contextlib.suppress(OSError):
            for name in os.listdir(path):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
            os.rmdir(path)
