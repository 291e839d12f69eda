# SPDX-License-Identifier: Apache-2.0
"""`CacheDirectory`: puts kernels into a Triton cache directory, each whole or not at all.

Restores use it, for many kernels, and `place_kernel` for one; `look` reads a kernel as Triton would, for `bundler.check`.

::

    <cache>/tmp.bundler.<pid>.<random>/     written here, then renamed once to
    <cache>/<KEY>/                          what Triton sees
    <cache>/tmp.bundler.old.<pid>.<random>/ a broken directory, renamed aside; swept a day later

The group file is the commit record that Triton looks for: it is generated from the files that were written and
becomes visible with them, in the one rename.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from typing import Literal

from bundler.errors import BundlerError, FormatError
from bundler.format import names
from bundler.format.bundle_file import cleaned_up, os_errors, typed
from bundler.format.bundle_union import metadata_identity
from bundler.format.limits import DEFAULT_LIMITS
from bundler.lifecycle.bundle_builder import portable
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_file, read_kernel

Outcome = Literal["restored", "present", "repaired"]
Files = Mapping[str, bytes | memoryview]

TEMPORARY_PREFIX = "tmp.bundler."
ASIDE_PREFIX = "tmp.bundler.old."
# Long enough that no living restore or reader still uses what it left.
STALE_AFTER_S = 24 * 3600
ATTEMPTS = 4

_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}
_log = logging.getLogger("bundler.lifecycle")


class CacheDirectory:
    """One cache directory that kernels are restored into.

    Safe for any number of threads and processes, ours and Triton's: they see a kernel whole or not at all, and losing
    a race is success.  Not guaranteed: a process that is compiling the very same kernel at this moment goes on writing
    its own files into the directory that we published; they are files of the same kernel.

    Making one lists the directory and sweeps what killed processes left, so that who places one kernel after the other keeps it:
    the listing only saves writing what is there already, and may be out of date.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be made or written.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._prefix = os.path.join(self.path, "")
        self._json_prefix = json.dumps(self._prefix)[1:-1]
        # Numbers of temporary directories.  Two processes begin at different random numbers, also on hosts that share the
        # directory and use one process id; threads of one process share the counter, so each gets another number.
        self._numbers = itertools.count(secrets.randbits(63))
        with os_errors(self.path, "write to"):
            os.makedirs(self.path, exist_ok=True)
            self._present = set(os.listdir(self.path))
        # In a cache that cannot be written the kernels may still all be there.
        with contextlib.suppress(OSError):
            self._sweep()

    def publish(self, key: str, files: Files, stored_metadata: bytes) -> Outcome:
        """Put a kernel in place.

        Args:
            key: its kernel key, the name of the directory.
            files: name -> bytes of every file but the group file, in Triton's order; already verified.
            stored_metadata: the metadata as the bundle stores it, with sentinels, to recognise another build by.
        """
        if key in self._present and self._usable(key, files, stored_metadata):
            return "present"
        try:
            return self._publish(key, files, stored_metadata)
        except BundlerError:
            raise
        except OSError as error:
            raise typed(error, self._prefix + key, "write") from error

    def _publish(self, key: str, files: Files, stored_metadata: bytes) -> Outcome:
        temporary = f"{self._prefix}{TEMPORARY_PREFIX}{os.getpid()}.{next(self._numbers):016x}"

        def write_and_rename() -> Outcome:
            self._write(temporary, key, files)
            outcome: Outcome = "restored"
            for _ in range(ATTEMPTS):
                if self._rename(temporary, key):
                    return outcome
                if self._usable(key, files, stored_metadata):
                    return "present"
                self._move_aside(key)
                outcome = "repaired"
            raise BundlerError(
                f"{self._prefix}{key}: another process keeps writing a broken kernel there; "
                "stop it, or remove the directory",
                path=self._prefix + key,
            )

        return cleaned_up(write_and_rename, lambda: _remove_tree(temporary))

    def publish_file(self, path: str, data: bytes) -> bool | None:
        """Put a single file in place unless one is there.

        Returns:
            True when it was written, False when the same bytes were there, None when anything else was.
        """
        target = os.path.join(self.path, path)
        with os_errors(target, "write"):
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                return None
            temporary = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))

            def write_and_link() -> None:
                _write_file(temporary, data)
                _create(temporary, target)

            try:
                cleaned_up(write_and_link, lambda: _unlink(temporary))
            except FileExistsError:
                return False if _holds(target, data) else None
        return True

    def _write(self, temporary: str, key: str, files: Files) -> None:
        try:
            os.mkdir(temporary)
        except FileNotFoundError:
            # The program may have removed its whole cache since this object was made.
            os.makedirs(temporary)
        folder = os.open(temporary, _READ_DIRECTORY)
        try:
            for name, data in files.items():
                _write_file(name, data, folder)
            metadata_name = next(name for name in files if name.endswith(".json"))
            _write_file(names.GROUP_PREFIX + metadata_name, self._group_file(key, files), folder)
        finally:
            os.close(folder)

    def _group_file(self, key: str, files: Iterable[str]) -> bytes:
        # As json.dumps writes it; key and names are of characters that JSON leaves alone, so only our path needs it.
        members = ", ".join([f'"{name}": "{self._json_prefix}{key}/{name}"' for name in files])
        return f'{{"child_paths": {{{members}}}}}'.encode()

    def _rename(self, temporary: str, key: str) -> bool:
        try:
            os.rename(temporary, self._prefix + key)
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            raise
        return True

    def _usable(self, key: str, files: Files, stored_metadata: bytes) -> bool:
        """Tell whether the directory holds this kernel, in our bytes or in those of another complete build."""
        found = look(self.path, key)
        if isinstance(found, Rejected):
            if not found.missing:
                _log.info("%s is broken: %s", os.path.join(self.path, key), found.reason)
            return False
        return all(found.files.get(name) == data for name, data in files.items()) or same_launch(
            self.path, found, stored_metadata
        )

    def _move_aside(self, key: str) -> None:
        # Not deleted at once: a process that opened the kernel before may still read its files.
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.path, key), os.path.join(self.path, _temporary_name(ASIDE_PREFIX)))

    def _sweep(self) -> None:
        leftovers = [name for name in self._present if name.startswith(TEMPORARY_PREFIX)]
        if not leftovers:
            return
        probe = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))

        def make_and_look() -> float:
            os.mkdir(probe)
            # The file system's own clock: the local one may differ from a server's by hours.
            return os.stat(probe).st_mtime

        now = cleaned_up(make_and_look, lambda: _remove_tree(probe))
        for name in leftovers:
            path = os.path.join(self.path, name)
            with contextlib.suppress(FileNotFoundError):
                if now - os.lstat(path).st_ctime > STALE_AFTER_S:
                    _remove(path)


def look(directory: str, key: str) -> KernelFiles | Rejected:
    """Read a kernel where Triton would, changing nothing."""
    target = os.path.join(directory, key)
    found = read_kernel(target, DEFAULT_LIMITS)
    if not isinstance(found, Rejected) and not all(
        _leads_here(path, target, name) for name, path in found.child_paths.items()
    ):
        return Rejected("its group file names files elsewhere")
    return found


def same_launch(directory: str, found: KernelFiles, stored_metadata: bytes) -> bool:
    """Tell whether a complete kernel is another build of the one whose stored metadata is given."""
    theirs, _ = portable(found.files[found.metadata_name], {directory, *found.written_roots})
    try:
        return metadata_identity(theirs) == metadata_identity(stored_metadata)
    except FormatError:
        return False


def look_for_file(directory: str, path: str, data: bytes) -> bool | None:
    """Tell what `publish_file` would answer: True when there is no such file, False for the same bytes, else None."""
    target = os.path.join(directory, path)
    try:
        os.lstat(target)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    return False if _holds(target, data) else None


def _create(temporary: str, target: str) -> None:
    """Give a file its name; raises `FileExistsError` when the name is taken, so whoever was first stays."""
    try:
        os.link(temporary, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Without hard links two writers may both see the name free; the later rename wins, whole.
        if os.path.lexists(target):
            raise FileExistsError(target) from error
        os.rename(temporary, target)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _remove_tree(path: str) -> None:
    """Remove a temporary directory unless it was renamed, as it is nearly always."""
    if os.path.lexists(path):
        shutil.rmtree(path, ignore_errors=True)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _holds(path: str, data: bytes) -> bool:
    try:
        return read_file(*os.path.split(path), DEFAULT_LIMITS) == data
    except OSError:
        return False


def _leads_here(path: str, directory: str, name: str) -> bool:
    if path == os.path.join(directory, name):
        return True
    try:
        return os.path.samefile(path, os.path.join(directory, name))
    except OSError:
        return False


def _write_file(path: str, data: bytes | memoryview, folder: int | None = None) -> None:
    fd = os.open(path, _CREATE_FILE, 0o666, dir_fd=folder)
    try:
        done = os.write(fd, data) if data else 0
        while done < len(data):
            done += os.write(fd, memoryview(data)[done:])
    finally:
        os.close(fd)


def _temporary_name(prefix: str) -> str:
    return f"{prefix}{os.getpid()}.{secrets.token_hex(8)}"
