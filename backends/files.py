# SPDX-License-Identifier: Apache-2.0
"""File-system steps of the local store: whole writes, create-if-absent, trust in a directory, errors by meaning."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from bundler.backends.errors import BackendDenied, BackendError, BackendFull, BackendUnavailable, UntrustedRoot

FULL = {errno.ENOSPC, errno.EDQUOT}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
ABSENT = {errno.ENOENT, errno.ENOTDIR}
# What network file systems answer while another client renames: not an answer, ask again.
PASSING = {errno.ESTALE, errno.EBUSY}
# What file systems without hard links answer.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}
# What says that bytes which were written before are lost.
LOST = {errno.EIO, *FULL}
ATTEMPTS = 3
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
    except BackendError:
        raise
    except OSError as error:
        kind: type[BackendError] = BackendUnavailable
        fix = "check the file system"
        if error.errno in FULL:
            kind, fix = BackendFull, "free some space, or prune the store"
        elif error.errno in DENIED:
            kind, fix = BackendDenied, "check owner and permissions, or open it for reading only"
        raise kind(f"cannot {verb} {path}: {error.strerror or error}; {fix}") from error


def check_root(path: str, permissions: Permissions) -> bool:
    """Refuse a directory that somebody could write to whom we have no reason to trust; False when there is none.

    Raises:
        UntrustedRoot: writable by everyone; or, in private mode, by a group; or of another user (but root).
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
        why, fix = f"it belongs to user {found.st_uid}", "use a directory of your own, or ?mode=group"
    if why is not None:
        raise UntrustedRoot(f"{path} cannot be trusted: {why}, and kernels in it run on your GPU; {fix}")
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
        # Whoever made it may have been stopped before it had its mode.
        found = os.stat(path)
        if (
            found.st_uid == os.geteuid()
            and stat.S_IMODE(found.st_mode) & permissions.directory != permissions.directory
        ):
            os.chmod(path, permissions.directory)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, permissions.directory & 0o777)
            # mkdir is subject to the umask, which may hide a group's bits.
            os.chmod(directory, permissions.directory)


def write_new(path: str, data: bytes, permissions: Permissions) -> None:
    """Write a file that must not exist; removed again when that fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, permissions.file)
    try:
        try:
            if permissions.group:
                os.fchmod(fd, permissions.file)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)  # where a network file system says that the disk is full
    except BaseException:
        os.unlink(path)
        raise


def create(temporary: str, target: str) -> bool:
    """Give a written file its name unless the name is taken; True when it was given.  `temporary` stays."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except FileExistsError:
        # A network file system that lost its answer asks the server again, which then says that the name is taken: by us.
        return os.lstat(temporary).st_nlink > 1
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # Two writers may both find the name free; the later rename wins, whole, and both believe that they were first.
        if os.path.lexists(target):
            return False
        os.rename(temporary, target)
    return True


def read(path: str) -> bytes | None:
    """Return a file's bytes, None when there is none; a symbolic link is refused."""
    for attempt in range(ATTEMPTS):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                return file.read()
        except OSError as error:
            if error.errno in ABSENT:
                return None
            if error.errno not in PASSING or attempt == ATTEMPTS - 1:
                raise
    return None


def remove(path: str) -> bool:
    """Remove a file; True when it was there."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    return True


def remove_unmodified(path: str, aside: str, since_s: float) -> bool:
    """Remove a file unless it was modified after `since_s`; True when it was removed.

    Once it has the name `aside` nobody touches it any more: what was touched before that is put back.
    """
    try:
        if os.lstat(path).st_mtime > since_s:
            return False
        os.rename(path, aside)
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    try:
        touched = os.lstat(aside).st_mtime > since_s
        if touched:
            create(aside, path)
        return not touched
    except FileNotFoundError:
        return True  # swept: it was old
    finally:
        remove(aside)


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
