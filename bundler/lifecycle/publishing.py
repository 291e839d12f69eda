# SPDX-License-Identifier: Apache-2.0
"""Puts one kernel directory in place, whole or not at all.

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
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Literal

from bundler.errors import BundlerError, FormatError
from bundler.format import names
from bundler.format.combine import metadata_identity
from bundler.format.file import os_errors
from bundler.format.limits import DEFAULT_LIMITS
from bundler.lifecycle.building import portable
from bundler.lifecycle.reading import KernelFiles, Rejected, read_file, read_kernel

Outcome = Literal["restored", "present", "repaired"]

TEMPORARY_PREFIX = "tmp.bundler."
ASIDE_PREFIX = "tmp.bundler.old."
# Long enough that no living restore or reader still uses what it left.
STALE_AFTER_S = 24 * 3600
ATTEMPTS = 4

_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
# What file systems without hard links answer.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}
_log = logging.getLogger("bundler.lifecycle")


class CacheDirectory:
    """One cache directory that kernels are restored into.

    Safe for any number of threads and processes, ours and Triton's: they see a kernel whole or not at all, and losing
    a race is success.  Not guaranteed: a process that is compiling the very same kernel at this moment goes on writing
    its own files into the directory that we published; they are files of the same kernel.

    Raises:
        AccessDenied, StoreFull, NotFound: the directory cannot be made or written.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        with os_errors(self.path, "write to"):
            os.makedirs(self.path, exist_ok=True)
            self._present = set(os.listdir(self.path))
        # In a cache that cannot be written the kernels may still all be there.
        with contextlib.suppress(OSError):
            self._sweep()

    def publish(self, key: str, files: Mapping[str, bytes], stored_metadata: bytes) -> Outcome:
        """Put a kernel in place.

        Args:
            key: its kernel key, the name of the directory.
            files: name -> bytes of every file but the group file, in Triton's order; already verified.
            stored_metadata: the metadata as the bundle stores it, with sentinels, to recognise another build by.
        """
        if key in self._present and self._usable(key, files, stored_metadata):
            return "present"
        with os_errors(os.path.join(self.path, key), "write"):
            return self._publish(key, files, stored_metadata)

    def _publish(self, key: str, files: Mapping[str, bytes], stored_metadata: bytes) -> Outcome:
        temporary = self._write(key, files)
        outcome: Outcome = "restored"
        try:
            for _ in range(ATTEMPTS):
                if self._rename(temporary, key):
                    return outcome
                if self._usable(key, files, stored_metadata):
                    return "present"
                self._move_aside(key)
                outcome = "repaired"
            raise BundlerError(
                f"{os.path.join(self.path, key)}: another process keeps writing a broken kernel there; "
                "stop it, or remove the directory",
                path=os.path.join(self.path, key),
            )
        finally:
            if os.path.isdir(temporary):
                shutil.rmtree(temporary, ignore_errors=True)

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
            try:
                _write_file(temporary, data)
                _create(temporary, target)
            except FileExistsError:
                return False if _holds(target, data) else None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        return True

    def _write(self, key: str, files: Mapping[str, bytes]) -> str:
        temporary = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))
        os.mkdir(temporary)
        try:
            folder = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name, data in files.items():
                    _write_file(name, data, folder)
                metadata_name = next(name for name in files if name.endswith(".json"))
                group = {name: os.path.join(self.path, key, name) for name in files}
                _write_file(names.GROUP_PREFIX + metadata_name, json.dumps({"child_paths": group}).encode(), folder)
            finally:
                os.close(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return temporary

    def _rename(self, temporary: str, key: str) -> bool:
        try:
            os.rename(temporary, os.path.join(self.path, key))
        except OSError as error:
            if error.errno in _OCCUPIED:
                return False
            raise
        return True

    def _usable(self, key: str, files: Mapping[str, bytes], stored_metadata: bytes) -> bool:
        """Tell whether the directory holds this kernel, in our bytes or in those of another complete build."""
        target = os.path.join(self.path, key)
        found = read_kernel(target, DEFAULT_LIMITS)
        if isinstance(found, Rejected):
            if not found.missing:
                _log.info("%s is broken: %s", target, found.reason)
            return False
        if not all(_leads_here(path, target, name) for name, path in found.child_paths.items()):
            _log.info("%s is broken: its group file names files elsewhere", target)
            return False
        if all(found.files.get(name) == data for name, data in files.items()):
            return True
        return self._same_launch(found, stored_metadata)

    def _same_launch(self, found: KernelFiles, stored_metadata: bytes) -> bool:
        theirs, _ = portable(found.files[found.metadata_name], {self.path, *found.written_roots})
        try:
            return metadata_identity(theirs) == metadata_identity(stored_metadata)
        except FormatError:
            return False

    def _move_aside(self, key: str) -> None:
        # Not deleted at once: a process that opened the kernel before may still read its files.
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(self.path, key), os.path.join(self.path, _temporary_name(ASIDE_PREFIX)))

    def _sweep(self) -> None:
        leftovers = [name for name in self._present if name.startswith(TEMPORARY_PREFIX)]
        if not leftovers:
            return
        probe = os.path.join(self.path, _temporary_name(TEMPORARY_PREFIX))
        os.mkdir(probe)
        try:
            # The file system's own clock: the local one may differ from a server's by hours.
            now = os.stat(probe).st_mtime
        finally:
            os.rmdir(probe)
        for name in leftovers:
            path = os.path.join(self.path, name)
            with contextlib.suppress(FileNotFoundError):
                if now - os.lstat(path).st_ctime > STALE_AFTER_S:
                    _remove(path)


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


def _write_file(path: str, data: bytes, folder: int | None = None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666, dir_fd=folder)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _temporary_name(prefix: str) -> str:
    return f"{prefix}{os.getpid()}.{secrets.token_hex(8)}"
