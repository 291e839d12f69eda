# SPDX-License-Identifier: Apache-2.0
"""`Task`: one job on its way through the pool; the words for each way in which it can go wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bundler.backends.base import Lease
from bundler.compile.futures import CompileFuture
from bundler.compile.messages import Surroundings
from bundler.errors import BundlerError, CompileFailed, CompileTimeout, WorkerDied

# Between two looks at a lease that another process holds.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True)
class Outcome:
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
        key: equal for equal jobs, so that one that ends workers is known again.
        lease_name: equal for equal jobs of all processes of the host.
        payload: for `perform`.
        surroundings: for the worker.
        timeout_s: how long `perform` may take; None for ever.
        future: gets the outcome.
        number: of its last journey to a worker.
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
    surroundings: Surroundings
    timeout_s: float | None
    future: CompileFuture[Outcome] = field(init=False)
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
            f"{self.name}: not compiled within {self.timeout_s:g} s, its worker was ended; give the service a larger timeout_s",
            name=self.name, reason="timeout", line=None, words="", timeout_s=self.timeout_s,
        )  # fmt: skip

    def killed_workers(self, how: str, words: str) -> BundlerError:
        """Return the error of a task that ended its workers; `how` the last one ended, and what it printed."""
        said = f"; its last words:\n{words}" if words else "; it printed nothing"
        what = (
            f"compiling it ended {self.deaths} workers"
            if self.deaths > 1
            else f"{self.misses} workers died before they began"
        )
        return WorkerDied(
            f"{self.name}: {what}, so it is not tried again: {how}{said}",
            name=self.name, reason=how, line=None, words=words,
        )  # fmt: skip

    def without_workers(self, reason: str) -> BundlerError:
        """Return the error of a task that no worker can be had for."""
        return WorkerDied(
            f"{self.name}: the compile processes cannot work: {reason}",
            name=self.name,
            reason=reason,
            line=None,
            words="",
        )

    def forked(self) -> BundlerError:
        """Return the error of a task that a forked child inherited."""
        message = f"{self.name}: the parent of this forked process compiles it; submit it again here"
        return CompileFailed(message, name=self.name, reason="forked", line=None, words="")
