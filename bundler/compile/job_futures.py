# SPDX-License-Identifier: Apache-2.0
"""`CompileFuture`: a future as in `concurrent.futures`, but a running job can be cancelled too;
`JoinedFuture`: one of what is made of the results of several others, such as a kernel of its
compiled candidates.

The service hands a future to each caller of `submit`; the pool has another one for each task.
Kernels that compile their candidates in workers, and multi-kernels, make joined ones;
`resolve_scope` waits for a whole namespace of futures, for `CompileService.wait`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bundler.compile.worker_messages import as_failure, failure
from bundler.errors import BundlerError, CompileTimeout
from bundler.fork_safety import ForkSafeLock, after_fork

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
            said = "the parent of this forked process compiles it; submit it again here"
            self.settle(error=failure(self.name, "forked", said))


class JoinedFuture(CompileFuture[T]):
    """What a function makes of the results of other futures; made once, in the thread that asks for
    it first.

    It is done when its parts are.  `cancel()` cancels the parts.  In a forked child it fails with
    the parts.  Thread-safe.

    Args:
        name: of the kernel, for errors.
        parts: the futures.
        make: gets for each part, in order, the result or the error; returns the result, or raises.
    """

    def __init__(
        self, name: str, parts: Sequence[Future[Any]], make: Callable[[list[Any]], T]
    ) -> None:
        super().__init__(name)
        self._parts, self._make = tuple(parts), make
        self._making = ForkSafeLock()
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._counting, self._left = threading.Lock(), len(self._parts)
        self.on_cancel(self._cancel_parts)
        # Who waits for it in a forked child is told at once, as by its parts, and asks them for the
        # reason.
        after_fork(self.abandon)
        for part in self._parts:
            part.add_done_callback(self._part_done)
        if not self._parts:
            self.settle()

    def running(self) -> bool:
        """Return whether a part has begun."""
        return not self.done() and any(part.running() or part.done() for part in self._parts)

    def result(self, timeout: float | None = None) -> T:
        """Return what was made of the parts; raises what making it raised, and `TimeoutError`."""
        value, error = self._wait(timeout)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # no error, so there is a result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` would raise."""
        return self._wait(timeout)[1]

    def _wait(self, timeout: float | None) -> tuple[T | None, BaseException | None]:
        if self.cancelled():
            raise CancelledError
        # Of the innermost parts, since a forked child has these settled, and nobody there to tell
        # the joined ones.
        if concurrent.futures.wait(self._innermost(), timeout).not_done:
            raise TimeoutError(f"{self.name}: not compiled within {timeout:g} s")
        with self._making.lock:
            if self._outcome is None:
                try:
                    self._outcome = self._make([*map(outcome_of, self._parts)]), None
                except Exception as error:  # noqa: BLE001  # kept: each who asks gets the same
                    self._outcome = None, error
            return self._outcome

    def _innermost(self) -> list[Future[Any]]:
        found: list[Future[Any]] = []
        for part in self._parts:
            # one class
            found += part._innermost() if isinstance(part, JoinedFuture) else [part]  # noqa: SLF001
        return found

    def _part_done(self, _part: Future[Any]) -> None:
        with self._counting:
            self._left -= 1
            last = self._left == 0
        if last:
            self.settle()

    def _cancel_parts(self) -> None:
        for part in self._parts:
            part.cancel()


def outcome_of(future: Future[Any]) -> Any:
    """Wait for a future; returns its result, or its error as one of ours."""
    name = getattr(future, "name", "a kernel")
    try:
        return future.result()
    except BundlerError as error:
        return error
    except CancelledError:
        return failure(name, "cancelled")
    except Exception as error:  # noqa: BLE001  # a future of somebody else's may raise anything
        return as_failure(name, error, "")


@dataclass(frozen=True)
class ScopeProgress:
    """One future of a namespace that was resolved.

    Attributes:
        name: its name there.
        done, total: how many of the futures are resolved by now, and how many there are.
    """

    name: str
    done: int
    total: int


def resolve_scope(
    scope: MutableMapping[str, Any],
    timeout_s: float | None,
    on_progress: Callable[[ScopeProgress], None] | None,
) -> None:
    """Put results in the place of the futures of a namespace; see `CompileService.wait`."""
    names: dict[Future[Any], list[str]] = {}
    for name, value in scope.items():
        if isinstance(value, Future):
            names.setdefault(value, []).append(name)  # one future may stand there under two names
    done = 0
    pending = concurrent.futures.as_completed(names, timeout_s)
    while (future := _next(pending, names, timeout_s)) is not None:
        result = _result(future, names[future][0])
        done += 1
        scope.update(dict.fromkeys(names[future], result))
        if on_progress is not None:
            on_progress(ScopeProgress(names[future][0], done, len(names)))


def _next(
    pending: Any, names: dict[Future[Any], list[str]], timeout_s: float | None
) -> Future[Any] | None:
    try:
        found: Future[Any] | None = next(pending, None)
    except TimeoutError as error:
        late = [named[0] for future, named in names.items() if not future.done()]
        raise CompileTimeout(
            f"{', '.join(late)}: not compiled within {timeout_s:g} s; they go on, so wait again, or"
            " cancel them",
            name=late[0],
            reason="timeout",
            line=None,
            words="",
            timeout_s=timeout_s,
        ) from error
    return found


def _result(future: Future[Any], name: str) -> Any:
    name = getattr(future, "name", name)
    try:
        return future.result()
    except CancelledError as error:
        raise failure(name, "cancelled") from error
    except Exception as error:
        told = as_failure(name, error, "")
        if name in told.message:
            raise told from (None if told is error else error)
        raise type(told)(f"{name}: {told.message}", **told.facts) from error
