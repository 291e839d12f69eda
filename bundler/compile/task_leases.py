# SPDX-License-Identifier: Apache-2.0
"""`TaskLeases`: of the processes of one host, one compiles a kernel, while the others go on with
other tasks.

`WorkerPool` asks before it gives a task to a worker; `shared_leases` is where the service gets
leases from.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.local import LocalBackend
from bundler.backends.port import Lease
from bundler.compile.pool_tasks import LONGEST_PAUSE_S, Task
from bundler.package_loggers import logger
from bundler.toolchain.private_directory import TemporaryPlace
from bundler.user_warnings import show

# Longer than a machine pauses; a holder that is killed delays the others by no more than this.
LEASE_S = 30.0
_ATTEMPTS = 3
_NAME = "triton-bundler"
_LOG = logger("bundler.compile")

TakeLease = Callable[[str, float], Lease | None]


class TaskLeases:
    """The leases of one pool's tasks; for efficiency alone: where leases fail, two processes may
    compile the same kernel.

    Args:
        take: asks for a lease by name and seconds; None while another process has it.
    """

    def __init__(self, take: TakeLease | None) -> None:
        self._take = take
        self._names: set[str] = set()

    def may_start(self, task: Task, now_s: float) -> bool:
        """Take a task's lease; when another process has it, say when to ask again, and return
        False.
        """
        # Equal jobs of a pool are one task, so another task of that name is another job: names are
        # few.
        if self._take is None or task.lease_name in self._names:
            return True
        try:
            task.lease = self._take(task.lease_name, LEASE_S)
        except BackendError as error:
            _LOG.warning("other processes of this host may compile the same kernels: %s", error)
            self._take = None
            return True
        if task.lease is not None:
            self._names.add(task.lease_name)
            task.renew_s = now_s + LEASE_S / 3
            return True
        # jitter, no secret
        task.not_before_s = now_s + task.pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        task.pause_s = min(2 * task.pause_s, LONGEST_PAUSE_S)
        return False

    def renew(self, task: Task, now_s: float) -> None:
        """Prolong the lease of a task that runs, when it is time."""
        if now_s >= task.renew_s and task.lease is not None:
            task.renew_s = now_s + LEASE_S / 3
            with contextlib.suppress(
                BackendError
            ):  # a renewal may fail twice before the lease runs out
                task.lease.renew(LEASE_S)

    def release(self, task: Task) -> None:
        """Give a task's lease back, if it has one."""
        lease, task.lease, task.renew_s = task.lease, None, math.inf
        if lease is not None:
            self._names.discard(task.lease_name)
            with contextlib.suppress(BackendError):  # it expires by itself
                # The lease's file may be busy, and an unreleased lease delays others by all of its
                # time.
                any(lease.release() for _ in range(_ATTEMPTS))


class HostLeases:
    """Leases among the processes of this user on this host, in a directory that is looked at before
    each use.
    """

    def __init__(self) -> None:
        self._place = TemporaryPlace(_NAME, show)
        self._backend: LocalBackend | None = None

    def take(self, name: str, ttl_s: float) -> Lease | None:
        """Take a lease, None while another process has it.

        Raises:
            BackendError: leases cannot be had here.
        """
        try:
            root = self._place.made()
        except OSError as error:
            raise BackendUnavailable(f"no directory for leases can be made: {error}") from error
        if self._backend is None or self._backend.root != root:
            self._backend = LocalBackend(root)
        return self._backend.lease(name, ttl_s)


def shared_leases() -> TakeLease | None:
    """Return how to take a lease among the processes of this user on this host; None where users
    have no numbers.
    """
    return HostLeases().take if hasattr(os, "getuid") else None
