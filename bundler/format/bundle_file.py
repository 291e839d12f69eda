# SPDX-License-Identifier: Apache-2.0
"""The one module of this room that touches the file system: opens bundle files and replaces them
atomically.

`open_regular`, `read_regular` and `FileSource` open files, `replace_file` and `replace_content`
replace them, `os_errors` makes errors of the system ours.  `Bundle` calls it, and so does every
other room that reads or writes a file of a user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from bundler.errors import AccessDenied, BundlerError, LimitExceeded, NotFound, StoreFull

# What a killed writer left is removed by a later one that replaces the same file; long enough that
# no living one uses it.
STALE_AFTER_S = 24 * 3600

T = TypeVar("T")
# Opening a named pipe would otherwise wait for somebody to write to it.
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_KINDS = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def open_regular(
    path: str | os.PathLike[str], *, links: bool = True, folder: int | None = None
) -> int:
    """Return a descriptor for reading a regular file; whatever is there, it neither waits nor takes
    it for one.

    Args:
        path: where.
        links: follow a symbolic link at the end of the path.
        folder: a descriptor of the directory that a relative path begins in; None for the working
            directory.

    Raises:
        OSError: it cannot be opened, or is no regular file: `EISDIR` for a directory, `EINVAL` for
            anything else.
    """
    try:
        flags = _READ if links else _READ | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(path, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(
                errno.EINVAL, "it is a socket or device, expected a file", os.fspath(path)
            ) from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no regular file")
            raise OSError(errno.EINVAL, f"it is {kind}, expected a file", os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(
    path: str | os.PathLike[str],
    max_bytes: int,
    *,
    links: bool = True,
    folder: int | None = None,
    check: Callable[[int], object] | None = None,
) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: where.
        max_bytes: how many it may have.
        links, folder: as for `open_regular`.
        check: gets the descriptor before anything is read, to ask whose file it is; what a path
            leads to may change meanwhile.

    Raises:
        OSError: as `open_regular`.
        LimitExceeded: it has more.
    """
    with open(open_regular(path, links=links, folder=folder), "rb") as file:
        if check is not None:
            check(file.fileno())
        size = os.fstat(file.fileno()).st_size
        # No more than is there, as far as that is known: the buffer is made before it is filled.
        data = file.read(min(size, max_bytes) + 1)
        if len(data) > size:
            data += file.read(max_bytes + 1 - len(data))
    if max(size, len(data)) > max_bytes:
        raise LimitExceeded(
            f"{os.fspath(path)}: {max(size, len(data))} bytes, over the limit of {max_bytes}",
            limit=max_bytes,
            got=size,
        )
    return data


class FileSource:
    """Random access to an open bundle file; the file may be unlinked or replaced while it is open.

    Safe under threads and after a fork: every read carries its own offset.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with os_errors(path, "open"):
            self._fd = open_regular(path)
            self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes at `offset`."""
        parts: list[bytes] = []
        with os_errors(self._path, "read"):
            while size and (part := os.pread(self._fd, size, offset)):
                parts.append(part)
                offset += len(part)
                size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class BytesSource:
    """Random access to bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes at `offset`."""
        return bytes(self._data[offset : offset + size])

    def close(self) -> None:
        """Nothing to release."""


def replace_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file that readers see whole or not at all.

    `write` gets a temporary file in the same directory, which is then flushed to disk and renamed
    over `path`.  When it raises, the temporary file is removed and what was at `path` stays.
    Temporary files of this `path` that killed writers left are removed once they are a day old.

    Raises:
        StoreFull, AccessDenied, NotFound, BundlerError: the operating system refused; the cause is
            chained.
    """
    target = os.fspath(path)
    with os_errors(path, "write"):
        _check_replaceable(target)
        directory, base = os.path.split(target)
        directory = directory or os.curdir
        name = os.path.join(directory, f"{_temporary_prefix(base)}{os.urandom(8).hex()}.tmp")

        def write_and_rename() -> None:
            # The mode leaves the user's umask to decide, as for any new file.
            handle = os.open(
                name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
            with open(handle, "wb") as out:
                # Before the writing, which may need the space; the new file's time is the file
                # system's own clock.
                with contextlib.suppress(OSError):
                    _sweep(directory, base, os.fstat(handle).st_mtime)
                write(out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, target)

        cleaned_up(write_and_rename, lambda: unlink_if_there(name))
        _sync_directory(directory)


def replace_content(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file that readers see whole or not at all; raises as `replace_file`."""
    replace_file(path, lambda out: out.write(data))


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise what `replace_file` would raise because of what is at `path` now."""
    with os_errors(path, "write"):
        _check_replaceable(os.fspath(path))


def _check_replaceable(target: str) -> None:
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(
            errno.EINVAL, "it is a device, pipe or socket, expected a bundle file", target
        )


def cleaned_up(work: Callable[[], T], clean_up: Callable[[], object]) -> T:
    """Do work and clean up, however the work ends; `clean_up` may be called twice.

    An exception that a signal raises, such as `KeyboardInterrupt`, may arrive between any two
    instructions, also in the clean-up itself; what the inner one was kept from doing, the outer one
    does.  A context manager cannot promise that: it may be interrupted before it is left.
    `backends/file_steps.py`, which imports nothing of ours, has the same for files.
    """
    try:
        try:
            return work()
        finally:
            clean_up()
    except BaseException:
        clean_up()
        raise


@contextlib.contextmanager
def os_errors(path: str | os.PathLike[str], verb: str) -> Iterator[None]:
    """Map the operating system's errors at `path` to typed ones; `verb` says what we tried."""
    try:
        yield
    except BundlerError:
        raise
    except OSError as error:
        raise typed(error, path, verb) from error


def typed(error: OSError, path: str | os.PathLike[str], verb: str) -> BundlerError:
    """Return the typed error for an `OSError` at `path`."""
    where, why = os.fspath(path), error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(f"cannot {verb} {where}: {why}; free some space and run again", path=where)
    if error.errno in _DENIED:
        return AccessDenied(
            f"cannot {verb} {where}: {why}; check its owner and permissions", path=where
        )
    if error.errno in {errno.EEXIST, errno.ENOTDIR}:
        return NotFound(
            f"cannot {verb} {where}: a file is there, expected a directory; check the path",
            path=where,
        )
    if error.errno == errno.ENOENT:
        return NotFound(f"cannot {verb} {where}: {why}; check the path", path=where)
    if error.errno == errno.EISDIR:
        return BundlerError(
            f"cannot {verb} {where}: it is a directory, expected a bundle file", path=where
        )
    return BundlerError(f"cannot {verb} {where}: {why}", path=where)


def _temporary_prefix(base: str) -> str:
    return f".{base[:64]}."


def _sweep(directory: str, base: str, now_s: float) -> None:
    temporary = re.compile(rf"{re.escape(_temporary_prefix(base))}[0-9a-f]{{16}}\.tmp")
    for name in filter(temporary.fullmatch, os.listdir(directory)):
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):
            if now_s - os.lstat(path).st_mtime > STALE_AFTER_S:
                os.unlink(path)


def unlink_if_there(path: str) -> None:
    """Remove a file; one that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
