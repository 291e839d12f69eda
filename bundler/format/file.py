# SPDX-License-Identifier: Apache-2.0
"""The one module of this room that touches the file system: opens bundle files and replaces them atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bundler.errors import AccessDenied, BundlerError, NotFound, StoreFull

# What a killed writer left is removed by a later one that replaces the same file; long enough that no living one uses it.
STALE_AFTER_S = 24 * 3600

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class FileSource:
    """Random access to an open bundle file; the file may be unlinked or replaced while it is open.

    Safe under threads and after a fork: every read carries its own offset.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with os_errors(path, "open"):
            # Without O_NONBLOCK, opening a named pipe waits for a writer; pread then refuses it.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Fails with EISDIR for a directory, which open() alone accepts.
                os.pread(self._fd, 1, 0)
                self.size = os.fstat(self._fd).st_size
            except OSError:
                self.close()
                raise

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


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Write a file that readers see whole or not at all.

    Yields a temporary file in the same directory.  When the block ends well it is flushed to disk and renamed over
    `path`; otherwise it is removed and what was at `path` stays.  Temporary files of this `path` that killed writers left
    are removed once they are a day old.

    Raises:
        StoreFull, AccessDenied, NotFound, BundlerError: the operating system refused; the cause is chained.
    """
    target = Path(path)
    with os_errors(path, "write"):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is a device, pipe or socket, expected a bundle file", str(target))
        name = str(target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(8)}.tmp"))
        # The mode leaves the user's umask to decide, as for any new file.
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with open(handle, "wb") as out:
                # Before the writing, which may need the space; the new file's time is the file system's own clock.
                with contextlib.suppress(OSError):
                    _sweep(target, os.fstat(handle).st_mtime)
                yield out
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _sync_directory(target.parent)


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
        return AccessDenied(f"cannot {verb} {where}: {why}; check its owner and permissions", path=where)
    if error.errno in {errno.EEXIST, errno.ENOTDIR}:
        return NotFound(f"cannot {verb} {where}: a file is there, expected a directory; check the path", path=where)
    if error.errno == errno.ENOENT:
        return NotFound(f"cannot {verb} {where}: {why}; check the path", path=where)
    if error.errno == errno.EISDIR:
        return BundlerError(f"cannot {verb} {where}: it is a directory, expected a bundle file", path=where)
    return BundlerError(f"cannot {verb} {where}: {why}", path=where)


def _temporary_prefix(target: Path) -> str:
    return f".{target.name[:64]}."


def _sweep(target: Path, now_s: float) -> None:
    temporary = re.compile(rf"{re.escape(_temporary_prefix(target))}[0-9a-f]{{16}}\.tmp")
    for name in filter(temporary.fullmatch, os.listdir(target.parent)):
        with contextlib.suppress(FileNotFoundError):
            if now_s - os.lstat(target.parent / name).st_mtime > STALE_AFTER_S:
                os.unlink(target.parent / name)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
