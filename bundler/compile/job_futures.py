# SPDX-License-Identifier: Apache-2.0
"""`CompileFuture`: a future as in `concurrent.futures`, but a running job can be cancelled too.

The service hands one to each caller of `submit`; the pool has another one for each task.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Generic, TypeVar

from bundler.errors import CompileFailed

T = TypeVar("T")


class CompileFuture(Future[T], Generic[T]):
    """The result of one job, computed once; `result()` returns or raises the same each time.

    Works with `concurrent.futures.wait` and `as_completed`.  `cancel()` also stops a job that runs:
    its worker is killed, unless another future waits for the same job.  Callbacks run in the
    service's thread and must not wait for other futures. Thread-safe.  In a forked child the
    futures of its parent have failed.

    Attributes:
        name: the job's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._on_cancel: Callable[[], None] | None = None
        self._cancelling = threading.Lock()
        self._told = False
        self._started = False

    def running(self) -> bool:
        """Return whether a worker has begun with it."""
        return self._started and not self.done()

    def cancel(self) -> bool:
        """Give the job up, queued or running; False when it is done already."""
        if not super().cancel():
            return False
        with self._cancelling:
            first, self._told = not self._told, True
        if first:
            # What an executor does when it meets a cancelled job: wakes those in `wait` and
            # `as_completed`.
            self.set_running_or_notify_cancel()
            if self._on_cancel is not None:
                self._on_cancel()
        return True

    def on_cancel(self, function: Callable[[], None]) -> None:
        """Have a function called once when the future is cancelled; its maker sets it."""
        self._on_cancel = function

    def mark_started(self) -> None:
        """Say that a worker has begun."""
        self._started = True

    def settle(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Set the result, or the error; nothing happens when it was cancelled meanwhile."""
        with contextlib.suppress(InvalidStateError):
            if error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]  # no error, so there is a result

    def abandon(self) -> None:
        """Fail in a forked child: the parent compiles the job, and a thread that does not exist
        here may hold the lock.
        """
        # Not `done()`, which would wait for that lock.
        if self._state not in {"CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED"}:
            self._condition = threading.Condition()
            self._done_callbacks: list[Callable[[Future[T]], object]] = []
            message = (
                f"{self.name}: the parent of this forked process compiles it; submit it again here"
            )
            self.settle(
                error=CompileFailed(message, name=self.name, reason="forked", line=None, words="")
            )
