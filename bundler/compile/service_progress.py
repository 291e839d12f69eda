# SPDX-License-Identifier: Apache-2.0
"""How far a compile service is: `ServiceCounters`, `Progress` for each thing that happens,
`JobTiming` for where the time went.

The service writes them down in a `ProgressCounter`; the `build` command shows them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bundler.package_loggers import logger

# The timings of so many jobs are kept, the latest.
TIMINGS = 10_000
# The rate is that of so many jobs, the latest; a rate needs two of them.
_PACE, _TWO = 200, 2
_LOG = logger("bundler.compile")

Happening = Literal["submitted", "started", "compiled", "hit", "remembered", "failed", "cancelled"]


@dataclass(frozen=True)
class ServiceCounters:
    """What a service has done so far; a snapshot.

    Attributes:
        submitted: jobs handed in.
        compiled: jobs that Triton compiled.
        hits: jobs whose kernel was in the cache directory already, or came from elsewhere.
        remembered: jobs answered from memory.
        joined: jobs that waited for an equal one which was under way.
        failed, cancelled: jobs that ended so.
        retried: jobs tried again because their worker died.
    """

    submitted: int = 0
    compiled: int = 0
    hits: int = 0
    remembered: int = 0
    joined: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0

    @property
    def done(self) -> int:
        """How many jobs have an end; those that `joined` end with the one that they wait for."""
        return (
            self.compiled + self.hits + self.remembered + self.joined + self.failed + self.cancelled
        )


@dataclass(frozen=True)
class Progress:
    """One thing that happened, and how far everything is.

    Attributes:
        name: the kernel.
        happened: what happened to it.
        counters: as they are after that.
        running: names of the kernels that workers have begun, oldest first.
        left_s: seconds until everything submitted so far is done, at the pace so far; None before
            the first job ended.
        error: why it failed.
        machines: how many machines have answered so far.
        rate: jobs that ended in a second, of late; None before the second one ended.
    """

    name: str
    happened: Happening
    counters: ServiceCounters
    running: tuple[str, ...]
    left_s: float | None
    error: str = ""
    machines: int = 1
    rate: float | None = None


@dataclass(frozen=True)
class JobTiming:
    """Where the time of one job went, in seconds.

    Attributes:
        name: the kernel.
        happened: `compiled`, `hit` or `failed`.
        queued_s: waiting for a worker.
        worker_s: in the worker, imports included.
        total_s: from `submit` to the result.
        stages: (stage of Triton's compiler, seconds); empty for a hit.
    """

    name: str
    happened: Happening
    queued_s: float
    worker_s: float
    total_s: float
    stages: tuple[tuple[str, float], ...] = ()


class ProgressCounter:
    """Counts what happens and calls the listener, in order; thread-safe.

    Args:
        workers: how many jobs are compiled at once; 0 where that is an engine's to say.
        listener: called with each `Progress`; must not submit.
    """

    def __init__(self, workers: int, listener: Callable[[Progress], None] | None) -> None:
        self._workers, self._listener = workers, listener
        self._lock = threading.RLock()
        self._counters = ServiceCounters()
        self._timings: deque[JobTiming] = deque(maxlen=TIMINGS)
        self._running: dict[str, str] = {}
        self._worked_s, self._worked = 0.0, 0
        self._ends: deque[float] = deque(maxlen=_PACE)
        self._hosts: set[str] = set()

    @property
    def counters(self) -> ServiceCounters:
        """What was counted so far."""
        return self._counters

    @property
    def timings(self) -> tuple[JobTiming, ...]:
        """The timings kept, in the order in which the jobs ended."""
        with self._lock:
            return tuple(self._timings)

    def tell(self, name: str, happened: Happening, error: str = "", **counts: int) -> None:
        """Count what happened, and call the listener with it."""
        with self._lock:
            now = self._counters
            self._counters = replace(
                now, **{count: getattr(now, count) + more for count, more in counts.items()}
            )
            if self._listener is None:
                return
            running = tuple(self._running.values())
            try:
                machines, rate = max(1, len(self._hosts)), self._rate()
                left_s = self._left_s()
                self._listener(
                    Progress(name, happened, self._counters, running, left_s, error, machines, rate)
                )
            except Exception:  # noqa: BLE001  # the seam: the user's bar must not stop compiles
                _LOG.exception("on_progress raised")

    def saw(self, host: str) -> None:
        """A worker of a machine has answered."""
        with self._lock:
            self._hosts.add(host)

    def began(self, key: str, name: str) -> None:
        """A worker has begun with a job."""
        with self._lock:
            self._running[key] = name
            self.tell(name, "started")

    def ended(self, key: str, timing: JobTiming | None) -> None:
        """A job is no longer under way; None when it was cancelled."""
        with self._lock:
            self._running.pop(key, None)
            if timing is not None:
                self._timings.append(timing)
                self._worked_s += timing.worker_s
                self._worked += 1
                self._ends.append(time.monotonic())

    def _rate(self) -> float | None:
        if len(self._ends) < _TWO or self._ends[-1] <= self._ends[0]:
            return None
        return (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])

    def _left_s(self) -> float | None:
        left = self._counters.submitted - self._counters.done
        if not self._workers:  # how many work at once is not known, but how fast they are
            rate = self._rate()
            return None if rate is None else left / rate
        return left * self._worked_s / self._worked / self._workers if self._worked else None
