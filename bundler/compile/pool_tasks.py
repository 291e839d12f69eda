# SPDX-License-Identifier: Apache-2.0
"""`Task`: one job on its way through the pool, with the errors that it may end in; `TaskOutcome`:
what a worker made of it; `TaskLeases`: of the processes of one host, one compiles a kernel, while
the others go on with other tasks.

The service makes tasks, the pool gives them to workers and asks for the lease before;
`shared_leases` is where the service gets leases from.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.local import LocalBackend
from bundler.backends.port import Lease
from bundler.compile.job_futures import CompileFuture
from bundler.compile.worker_messages import JobEnvironment, failure
from bundler.errors import BundlerError, CompileTimeout, WorkerDied
from bundler.package_loggers import logger
from bundler.toolchain.diagnostics import telling_line
from bundler.toolchain.private_directory import TemporaryPlace
from bundler.user_warnings import show

# The pause before a lease that another process holds is asked for again; doubles up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
# Longer than a machine pauses; a holder that is killed delays the others by no more than this.
LEASE_S = 30.0
_ATTEMPTS = 3
_NAME = "triton-bundler"
_LOG = logger("bundler.compile")
# Of what a worker printed before it ended, so many characters go into the message; the error's
# `words` have all.
LAST_WORDS = 4096


@dataclass(frozen=True)
class TaskOutcome:
    """What a worker made of a task.

    Attributes:
        data: what `perform` returned.
        queued_s: from `submit` until a worker began.
        worker_s: in `perform`.
    """

    data: bytes
    queued_s: float
    worker_s: float


@dataclass(eq=False)
class Task:
    """One job on its way through the pool.

    Attributes:
        name: for messages.
        key: equal for equal jobs, so that a job that ended workers is refused when it comes again.
        lease_name: equal for equal jobs of all processes of the host.
        payload: for `perform`.
        environment: for the worker.
        timeout_s: how long `perform` may take; None for ever.
        future: gets the outcome.
        number: counts what is sent to workers, so that a late answer to an earlier try is told
            apart.
        deaths: how many workers it has ended.
        misses: how many workers died before they began with it.
        submitted_s, started_s: on the monotonic clock.
        not_before_s: when to ask for its lease again.
        renew_s: when to renew the lease.
    """

    name: str
    key: str
    lease_name: str
    payload: bytes
    environment: JobEnvironment
    timeout_s: float | None
    future: CompileFuture[TaskOutcome] = field(init=False)
    number: int = 0
    deaths: int = 0
    misses: int = 0
    submitted_s: float = 0.0
    started_s: float | None = None
    not_before_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    lease: Lease | None = None
    renew_s: float = math.inf

    def __post_init__(self) -> None:
        self.future = CompileFuture(self.name)

    @property
    def deadline_s(self) -> float:
        """When its time runs out."""
        started, allowed = self.started_s, self.timeout_s
        return math.inf if started is None or allowed is None else started + allowed

    def timed_out(self) -> BundlerError:
        """Return the error of a task that took too long."""
        said = (
            f"not compiled within {self.timeout_s:g} s, its worker was ended; give the service a"
            " larger timeout_s"
        )
        return failure(self.name, "timeout", said, kind=CompileTimeout, timeout_s=self.timeout_s)

    def killed_workers(self, how: str, words: str) -> BundlerError:
        """Return the error of a task that ended its workers; `how`: how the last one ended;
        `words`: what it printed.
        """
        line = telling_line(words)
        why = f": {line}" if line is not None else ""
        said = f"{why}; its last words:\n{words[-LAST_WORDS:]}" if words else "; it printed nothing"
        what = (
            f"compiling it ended {self.deaths} workers"
            if self.deaths > 1
            else f"{self.misses} workers died before they began"
        )
        return self._died(how, f"{what}, so it is not tried again: {how}{said}", words)

    def lost_by_engine(self, how: str) -> BundlerError:
        """Return the error of a task that an engine gave no answer to; `how`: what the engine says
        instead.
        """
        lost = f"its worker was lost {self.deaths} times, so it is not tried again"
        return self._died(how, f"{lost}; the engine says {how}")

    def without_workers(self, reason: str) -> BundlerError:
        """Return the error of a task when no worker can be started."""
        return self._died(reason, f"the compile processes cannot work: {reason}")

    def _died(self, how: str, said: str, words: str = "") -> BundlerError:
        return failure(self.name, how, said, words, WorkerDied)


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
