# SPDX-License-Identifier: Apache-2.0
"""`take`, `held`: leases in files, among processes of one host: a token and an expiry,
changed under a short file lock.

`LocalBackend.lease` calls `take`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from bundler.backends import file_steps
from bundler.backends.lease_holders import HeldLease, held_lease, new_token
from bundler.backends.port import Lease

# A store that is only read takes no lease, and `filelock` is slow to import.
if TYPE_CHECKING:
    import filelock

# The lock is held only while a few bytes are read and written; a process that waits longer than
# this goes on without the lease.
LOCK_TIMEOUT_S = 1.0
_LEASE_BYTES = 512
# Of a directory that a crash filled nobody wants to see more.
_MOST_LISTED = 10_000


def take(
    path: str, ttl_s: float, permissions: file_steps.Permissions, key: str = ""
) -> Lease | None:
    """Take the lease at `path`, which people call `key`; None while another holds it, or while its
    file is busy.
    """
    import filelock

    token = new_token(key)
    try:
        with _lock(path, permissions):
            holder = _holder(path)
            if holder is not None and holder[1] > time.time():
                return None
            _write(path, token, ttl_s, permissions)
    except filelock.Timeout:
        return None
    return Lease(partial(_change, path, token, permissions))


def _change(
    path: str, token: str, permissions: file_steps.Permissions, ttl_s: float | None
) -> bool:
    import filelock

    with file_steps.errors_by_meaning(path, "change"):
        try:
            with _lock(path, permissions):
                holder = _holder(path)
                if holder is None or holder[0] != token or holder[1] <= time.time():
                    return False
                if ttl_s is None:
                    file_steps.remove(path)
                else:
                    _write(path, token, ttl_s, permissions)
                return True
        except filelock.Timeout:
            return False


def held(folder: str) -> Iterator[HeldLease]:
    """Yield the leases in a directory that somebody holds; reads them without the lock, since each
    is replaced whole.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in itertools.islice(found, _MOST_LISTED):
            holder = None if entry.name.endswith((".lock", ".new")) else _holder(entry.path)
            if holder is not None and holder[1] > time.time():
                yield held_lease(holder[0], holder[1] - time.time())


def _lock(path: str, permissions: file_steps.Permissions) -> filelock.BaseFileLock:
    import filelock

    return filelock.FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S, mode=permissions.file)


def _holder(path: str) -> tuple[str, float] | None:
    data = file_steps.read(path, _LEASE_BYTES)
    token, _, expiry = (data or b"").decode("ascii", "replace").partition(" ")
    try:
        return token, float(expiry)
    except ValueError:
        return None  # empty or damaged: nobody holds it


def _write(path: str, token: str, ttl_s: float, permissions: file_steps.Permissions) -> None:
    temporary = f"{path}.new"
    file_steps.remove(
        temporary
    )  # left by a process that was killed: under the lock nobody else writes it
    content = f"{token} {time.time() + ttl_s!r}".encode()

    def write_and_rename() -> None:
        file_steps.write_new(temporary, content, permissions)
        os.replace(temporary, path)

    file_steps.with_temporary(temporary, write_and_rename)
