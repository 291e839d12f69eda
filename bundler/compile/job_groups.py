# SPDX-License-Identifier: Apache-2.0
"""`JobGroups`: which jobs go to an engine next, and how many in one message.

A message costs an engine milliseconds, however little there is to do for it.  Kernels that take
long go one by one and all at once, so that the engine sees how much there is and places each where
it likes.  Short ones go several in one message, and no more messages are out than keep the workers
busy.  `ExecutorPool` has one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

# Jobs are short where the middle one of the last so many took less.
_LAST, _SHORT_S = 32, 0.1
# A message has so many jobs at most, and work for about so long.
_MOST, _GROUP_S = 16, 0.25
# So many messages are out for each worker that has answered, and at least so many.
_AHEAD, _LEAST = 4, 8
# Without an answer for so long twice as many may go out: there may be workers that have nothing to
# do and so were not heard of.
PATIENCE_S = 0.5


class JobGroups(Generic[T]):
    """Jobs that wait to be sent; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[T, Hashable]] = deque()
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._workers: set[str] = set()
        self._least, self._moved_s = _LEAST, 0.0

    def add(self, job: T, kind: Hashable) -> None:
        """Take a job; those of one kind may go together."""
        if not self._waiting:
            self._moved_s = time.monotonic()
        self._waiting.append((job, kind))

    def note(self, worker: str, seconds: list[float]) -> None:
        """Take note of an answer: the worker's name, and how long each of its jobs took."""
        self._workers.add(worker)
        self._seconds.extend(seconds)
        self._moved_s = time.monotonic()

    def pause_s(self) -> float | None:
        """Return after how many seconds without an answer to `take` again; None where nothing
        waits.
        """
        rest_s = self._moved_s + PATIENCE_S - time.monotonic()
        return max(0.0, rest_s) if self._waiting else None

    def take(self, out: int) -> list[T]:
        """Return the jobs of the next message while so many messages are out; empty where nothing
        waits, or an answer is to be waited for.
        """
        if not self._waiting:
            return []
        if self._seconds and statistics.median(self._seconds) >= _SHORT_S:
            return [self._waiting.popleft()[0]]
        if self.pause_s() == 0.0:
            self._least, self._moved_s = 2 * max(out, self._least), time.monotonic()
        if out >= max(self._least, _AHEAD * len(self._workers)):
            return []
        return self._group()

    def _group(self) -> list[T]:
        # Of the mean, unlike the middle one: a few long ones among short ones are not grouped much.
        mean_s = statistics.fmean(self._seconds) if self._seconds else _GROUP_S
        size = math.ceil(_GROUP_S / max(mean_s, 0.001))
        # Towards the end fewer go together, so that all workers have something to do.
        share = math.ceil(len(self._waiting) / (2 * max(1, len(self._workers))))
        first, kind = self._waiting.popleft()
        group, size = [first], min(size, share, _MOST)
        while len(group) < size and self._waiting and self._waiting[0][1] == kind:
            group.append(self._waiting.popleft()[0])
        return group
