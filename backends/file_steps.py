# SPDX-License-Identifier: Apache-2.0
"""File-system steps of the local store: write a whole file, create it if absent, read up to a size,
remove.

Also: whether a directory can be trusted, and the operating system's errors as `BackendError`.
Called by `LocalBackend`, by its leases and refs, and by `bundler.compile.source_modules`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendUnavailable,
    UntrustedRoot,
)
from bundler.backends.port import BEGINNING_BYTES, OBJECT_LIMIT, Unread

FULL = {errno.ENOSPC, errno.EDQUOT}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
ABSENT = {errno.ENOENT, errno.ENOTDIR}
# What network file systems answer while another client renames: not an answer, ask again.
PASSING = {errno.ESTALE, errno.EBUSY}
# What file systems without hard links answer.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}
# What says that bytes which were written before are lost.
LOST = {errno.EIO, *FULL}
# What opening answers for a symbolic link, and for a socket or a device without a driver.
NO_FILE = {errno.ELOOP: "a symbolic link", errno.ENXIO: "a socket or device"}
ATTEMPTS = 3
T = TypeVar("T")
# Opening a named pipe would otherwise wait for somebody to write to it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_TEMPORARY = re.compile(r"\d+\.[0-9a-f]{16}")


@dataclass(frozen=True)
class Permissions:
    """Modes of what the store creates: for its owner alone, or for a group."""

    directory: int
    file: int
    group: bool


PRIVATE = Permissions(0o700, 0o600, group=False)
# Set-group-ID, so that what others create in it belongs to the group too.
GROUP = Permissions(0o2770, 0o660, group=True)


@contextlib.contextmanager
def errors_by_meaning(path: str, verb: str) -> Iterator[None]:
    """Map the operating system's errors to this package's; `verb` says what was tried."""
    try:
        yield
    except OSError as error:
        kind: type[BackendError] = BackendUnavailable
        fix = "check the file system"
        if error.errno in FULL:
            kind, fix = BackendFull, "free some space, or prune the store"
        elif error.errno in DENIED:
            kind, fix = BackendDenied, "check owner and permissions, or open it for reading only"
        raise kind(f"cannot {verb} {path}: {error.strerror or error}; {fix}") from error


def check_root(path: str, permissions: Permissions) -> bool:
    """Refuse a directory that an untrusted user could write to; False when there is no directory.

    Raises:
        UntrustedRoot: writable by everyone; or, in private mode, by a group; or of another user
            (but root).
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise BackendUnavailable(f"{path} is not a directory; choose another path for the store")
    why, fix = None, ""
    if found.st_mode & stat.S_IWOTH:
        why, fix = "everyone may write to it", "chmod o-w"
    elif not permissions.group and found.st_mode & stat.S_IWGRP:
        why, fix = "its group may write to it", "chmod g-w, or open it with ?mode=group"
    elif found.st_uid not in {0, os.geteuid()} and not (
        permissions.group and found.st_gid in {os.getegid(), *os.getgroups()}
    ):
        why = f"it belongs to user {found.st_uid}"
        fix = "use a directory of your own, or ?mode=group"
    if why is not None:
        raise UntrustedRoot(
            f"{path} cannot be trusted: {why}, and kernels in it run on your GPU; {fix}"
        )
    return True


def make_directories(path: str, root: str, permissions: Permissions) -> None:
    """Create `path` below `root`, and `root` itself, each with our permissions."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        if path == root:
            os.makedirs(os.path.dirname(root), exist_ok=True)
            break
        path = os.path.dirname(path)
    else:
        # The process that made it may have been stopped before it set the mode.
        found = os.stat(path)
        lacking = permissions.directory & ~stat.S_IMODE(found.st_mode)
        if found.st_uid == os.geteuid() and lacking:
            os.chmod(path, permissions.directory)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, permissions.directory & 0o777)
            # mkdir is subject to the umask, which may hide a group's bits.
            os.chmod(directory, permissions.directory)


def with_temporary(path: str, work: Callable[[], T]) -> T:
    """Do work that makes a temporary file at `path`, and remove that file however the work ends.

    An exception that a signal raises, such as `KeyboardInterrupt`, may arrive between any two
    instructions: before the file's maker has returned, or in the clean-up itself.  So the name is
    known before the file is made, and what the inner clean-up was kept from removing, the outer one
    removes.
    """
    try:
        try:
            return work()
        finally:
            remove(path)
    except BaseException:
        remove(path)
        raise


def write_new(path: str, data: bytes, permissions: Permissions) -> None:
    """Write a file that must not exist; the caller removes it when that fails, see
    `with_temporary`.
    """
    fd = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, permissions.file
    )
    try:
        if permissions.group:
            os.fchmod(fd, permissions.file)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)  # where a network file system says that the disk is full


def create(temporary: str, target: str) -> bool:
    """Give a written file its name unless the name is taken; True when it was given.  `temporary`
    stays.
    """
    try:
        os.link(temporary, target, follow_symlinks=False)
    except FileExistsError:
        # A network file system that lost its answer asks the server again, which then says that the
        # name is taken: by us.
        return os.lstat(temporary).st_nlink > 1
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # Two writers may both find the name free; the later rename wins, whole, and both believe
        # that they were first.
        if os.path.lexists(target):
            return False
        os.rename(temporary, target)
    return True


def read(path: str, max_bytes: int = OBJECT_LIMIT) -> bytes | None:
    """Return a file's bytes, None when there is none; what is larger, or no regular file, comes as
    `Unread`.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _read(path, max_bytes)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            if error.errno in NO_FILE:
                return Unread(b"", _no_file(path, NO_FILE[error.errno]))
            if error.errno not in PASSING or attempt == ATTEMPTS - 1:
                raise
    return None


def _read(path: str, max_bytes: int) -> bytes:
    fd = os.open(path, _READ)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            kind = next(
                (words for is_kind, words in _KINDS if is_kind(found.st_mode)), "no regular file"
            )
            return Unread(b"", _no_file(path, kind))
        if found.st_size > max_bytes:
            return Unread.too_large(
                os.pread(fd, BEGINNING_BYTES, 0), path, found.st_size, max_bytes
            )
        # Up to the limit, not the size: a network file system may have told an old one.
        return _read_up_to(fd, max_bytes, found.st_size + 1)
    finally:
        os.close(fd)


def _read_up_to(fd: int, max_bytes: int, chunk_bytes: int) -> bytes:
    part = os.read(fd, min(max_bytes, chunk_bytes))
    if len(part) == chunk_bytes - 1 <= max_bytes:
        return part  # the whole file, as its size says, and no byte behind it
    parts: list[bytes] = []
    left = max_bytes
    while part:
        parts.append(part)
        left -= len(part)
        part = os.read(fd, min(left, chunk_bytes)) if left else b""
    return b"".join(parts)


def _no_file(path: str, kind: str) -> str:
    return f"{path} is {kind}, expected a file"


def remove(path: str) -> bool:
    """Remove a file, or an empty directory in its place; True when it was there."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        if not os.path.isdir(path) or os.path.islink(path):
            raise
        if os.listdir(path):
            raise OSError(
                errno.ENOTEMPTY, f"{path} is a directory with something in it; remove it by hand"
            ) from error
        os.rmdir(path)
    return True


def remove_unmodified(path: str, aside: str, since_s: float) -> bool:
    """Remove a file unless it was modified after `since_s`; True when it was removed.

    Under the name `aside` no other process touches the file; one that was touched before gets its
    own name back.
    """
    try:
        found = os.lstat(path)
        if found.st_mtime > since_s:
            return False
        if stat.S_ISDIR(found.st_mode):
            return remove(path)  # a directory is no object, so nobody touches it meanwhile
        return with_temporary(aside, lambda: _stays_aside(path, aside, since_s))
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise


def _stays_aside(path: str, aside: str, since_s: float) -> bool:
    """Give a file the name `aside`, and its own back if it was modified after `since_s`; True when
    it was not.
    """
    try:
        os.rename(path, aside)
        touched = _modified_s(aside) > since_s
        if touched:
            create(aside, path)
    except BaseException:
        # Interrupted before the file's time was compared, so the file gets its name back.
        with contextlib.suppress(FileNotFoundError):
            create(aside, path)
        raise
    return not touched


def _modified_s(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0  # swept, so it was old


def sync(fd: int) -> None:
    """Write a whole file system to the disk: one call instead of one a file."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is not None and syncfs(fd) == 0:
        return
    if syncfs is not None and ctypes.get_errno() in LOST:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.fsync(fd)  # not Linux, or not permitted


def temporary_name() -> str:
    """Return a name that nobody else uses."""
    return f"{os.getpid()}.{secrets.token_hex(8)}"


def is_temporary_name(name: str) -> bool:
    """Tell whether a name is of the kind that `temporary_name` makes."""
    return _TEMPORARY.fullmatch(name) is not None
