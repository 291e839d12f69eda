# SPDX-License-Identifier: Apache-2.0
"""`Task`: one job on its way through the pool, with the errors that it may end in; `TaskOutcome`:
what a worker made of it.

The service makes tasks, the pool gives them to workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bundler.backends.port import Lease
from bundler.compile.job_futures import CompileFuture
from bundler.compile.worker_messages import JobEnvironment
from bundler.errors import BundlerError, CompileTimeout, WorkerDied
from bundler.toolchain.diagnostics import telling_line

# The pause before a lease that another process holds is asked for again; doubles up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
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
        return CompileTimeout(
            f"{self.name}: not compiled within {self.timeout_s:g} s, its worker was ended; give the"
            " service a larger timeout_s",
            name=self.name,
            reason="timeout",
            line=None,
            words="",
            timeout_s=self.timeout_s,
        )

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
        return WorkerDied(
            f"{self.name}: {what}, so it is not tried again: {how}{said}",
            name=self.name,
            reason=how,
            line=None,
            words=words,
        )

    def lost_by_engine(self, how: str) -> BundlerError:
        """Return the error of a task that an engine gave no answer to; `how`: what the engine says
        instead.
        """
        return WorkerDied(
            f"{self.name}: its worker was lost {self.deaths} times, so it is not tried again; the"
            f" engine says {how}",
            name=self.name,
            reason=how,
            line=None,
            words="",
        )

    def without_workers(self, reason: str) -> BundlerError:
        """Return the error of a task when no worker can be started."""
        return WorkerDied(
            f"{self.name}: the compile processes cannot work: {reason}",
            name=self.name,
            reason=reason,
            line=None,
            words="",
        )
