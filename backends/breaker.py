# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the port says what each method does
"""Byte stores around another one: `Guarded`, one that may be slow or dead, with a deadline for each
operation and a circuit breaker; `ReadOnly`, one that is never changed, even where the system would
permit it; `Wrapped`, what both are made of.

::

    closed --- failures in a row, or too much time lost ---> open        every call is refused at once
    open   --- a call after `probe_s` ---------------------> half open   one question, asked in a thread of its own
    half open: an answer closes it, a failure opens it again

`Deadlines` holds its limits. `bundler/store/store_urls.py` puts `Guarded` around each server of a
store with tiers, and `ReadOnly` around a store where the URL or the caller asks for that.
"""

from __future__ import annotations

import _thread
import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.port import Backend, HeldLease, Lease, OwnLock, Stat, Unchangeable

T = TypeVar("T")


class Wrapped(Backend):
    """Another byte store, whose every method goes through `_call`; for those that add something.

    Safe under threads and forks where the inner store is.

    Attributes:
        inner: the store.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.reads_are_cheap, self.writable = inner.reads_are_cheap, inner.writable
        self.verified, self.asks_peers = inner.verified, inner.asks_peers

    def _call(
        self,
        call: Callable[[], T],
        *,
        keys: int = 0,
        size_bytes: int = 0,
        unhurried: bool = False,
    ) -> T:
        """Make a call of the inner store; what is known of it is for who overrides this.

        Args:
            call: the call.
            keys: how many objects it reads.
            size_bytes: what it carries.
            unhurried: it takes longer the larger the store is.
        """
        return call()

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self._call(lambda: self.inner.get(keys), keys=len(keys))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        return self._call(lambda: self.inner.get_within(max_bytes), keys=len(max_bytes))

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        size_bytes = sum(map(len, items.values()))
        return self._call(lambda: self.inner.put(items), size_bytes=size_bytes)

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        return self._call(lambda: self.inner.exists(keys))

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        return self._call(lambda: self.inner.delete(keys, unmodified_since_s))

    def touch(self, keys: Collection[str]) -> None:
        self._call(lambda: self.inner.touch(keys))

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        return self._call(lambda: self.inner.claim(keys))

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return iter(self._call(lambda: [*self.inner.list(prefix)], unhurried=True))

    def read_ref(self, key: str) -> bytes | None:
        return self._call(lambda: self.inner.read_ref(key))

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        return self._call(lambda: self.inner.swap_ref(key, expected, value))

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        return iter(self._call(lambda: [*self.inner.list_refs(prefix)], unhurried=True))

    def leases(self) -> Iterator[HeldLease]:
        return iter(self._call(lambda: [*self.inner.leases()], unhurried=True))

    def now_s(self) -> float:
        return self._call(self.inner.now_s)

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"


class ReadOnly(Unchangeable, Wrapped):
    """Another byte store, of which every change is denied; marking objects as used does nothing."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.writable = self.asks_peers = False

    def _denied(self) -> BackendDenied:
        return BackendDenied("it was opened for reading only")


# One failure may be a lost packet; three in a row are a server that is gone.
FAILURES_IN_A_ROW = 3
PROBE_S = 30.0
# The share by which the time of a probe varies; see `_Breaker._rest`.
JITTER = 0.2
_PROBE_KEY = "probe"


@dataclass(frozen=True)
class Deadlines:
    """How long a guarded store is waited for.

    Attributes:
        deadline_s: for one operation, without its bytes.
        bytes_per_s: how much longer, by the bytes that it carries.
        bytes_per_key: the size that is assumed for each object that is read, since sizes are not
            known before.
        budget_s: what a store that never answers may cost in all.
        probe_s: how long an open breaker waits before it asks again, give or take `JITTER`.
        unhurried_s: for a listing or a flush, which take as long as the store is large; None for no
            deadline but the store's own.
    """

    deadline_s: float = 0.5
    bytes_per_s: float = 10e6
    bytes_per_key: int = 32 * 1024
    budget_s: float = 1.0
    probe_s: float = PROBE_S
    unhurried_s: float | None = None


class Guarded(Wrapped):
    """Another byte store, behind a deadline and a breaker.

    Guarantees: a call returns or raises within its deadline, whatever the store does; one that
    never answered costs `budget_s` in all, and while the breaker is open nothing; an open breaker
    is tried again in the background.  A call that takes longer raises `BackendTimeout` and goes on
    in its thread, so what it asked for may still happen. Does not guarantee that a store that used
    to answer, and dies in the middle of a large operation, costs less than that operation's
    deadline.  Safe under threads and forks where the inner store is.

    Args:
        inner: the store.
        deadlines: how long to wait.
        changed: is told the breaker's state at each change: `closed`, `open`, `half open`; must not
            raise.
    """

    def __init__(
        self,
        inner: Backend,
        deadlines: Deadlines | None = None,
        changed: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(inner)
        self.deadlines = deadlines or Deadlines()
        self._breaker = _Breaker(self.deadlines.budget_s, self.deadlines.probe_s, changed)

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        # Nobody would release a lease that is granted after we stopped waiting for it.
        lease = self._call(
            lambda: self.inner.lease(key, ttl_s), too_late=lambda late: late and late.release()
        )
        if lease is None:
            return None
        return Lease(
            lambda ttl_s: self._call(lease.release if ttl_s is None else lambda: lease.renew(ttl_s))
        )

    def flush(self) -> None:
        self._call(self.inner.flush, unhurried=True)

    def __repr__(self) -> str:
        return f"<Guarded {self.inner!r}, {self._breaker.state}>"

    def _call(
        self,
        call: Callable[[], T],
        *,
        keys: int = 0,
        size_bytes: int = 0,
        unhurried: bool = False,
        too_late: Callable[[T], object] | None = None,
    ) -> T:
        breaker = self._breaker
        if not breaker.admits(self._probe):
            raise BackendSuspended(
                f"{breaker.reason}; it is left alone, and asked again {breaker.in_words()}"
            )
        size_bytes += keys * self.deadlines.bytes_per_key
        most_s = self.deadlines.deadline_s + size_bytes / self.deadlines.bytes_per_s
        allowed_s = self.deadlines.unhurried_s if unhurried else breaker.allowed_s(most_s)
        started = time.monotonic()
        try:
            answer = call() if allowed_s is None else bounded(call, allowed_s, too_late)
        except BackendUnavailable as error:
            breaker.failed(time.monotonic() - started, str(error))
            raise
        except Exception:
            breaker.answered()  # full, denied, a bad key: that is an answer
            raise
        breaker.answered()
        return answer

    def _probe(self) -> None:
        """Ask one cheap question, in the background: the program does not wait for a store that may
        be dead.
        """

        def ask() -> None:
            try:
                bounded(lambda: self.inner.exists([_PROBE_KEY]), self.deadlines.deadline_s)
            except BackendUnavailable:
                self._breaker.still_dead()
            except Exception:  # noqa: BLE001  # any other error is an answer, so the store is alive
                self._breaker.answered()
            else:
                self._breaker.answered()

        threading.Thread(target=ask, name="bundler-probe", daemon=True).start()


def bounded(
    call: Callable[[], T], timeout_s: float, too_late: Callable[[T], object] | None = None
) -> T:
    """Return what a call returns, or raise `BackendTimeout`.

    The call runs in a thread of its own, which is left behind when it takes too long.  Not in a
    pool: one whose threads all hang would have to grow, and none survives a fork.

    Args:
        call: the call.
        timeout_s: how long to wait.
        too_late: gets what the call returns after that.
    """
    ended, lock, left = threading.Event(), threading.Lock(), False
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            errors.append(error)
        with lock:
            ended.set()
            late = left
        if late and answers and too_late is not None:
            with contextlib.suppress(BackendError):  # it expires by itself
                too_late(answers[0])

    try:
        # `threading.Thread` would wait until the new one runs, before this one waits for what it
        # does.
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the interpreter is about to end, or the system has no more threads
        run()
    if not ended.wait(timeout_s):
        with lock:
            left = not ended.is_set()
        if left:
            raise BackendTimeout(f"no answer within {timeout_s:.2f} s")
    if errors:
        raise errors[0]
    return answers[0]


class _Breaker:
    """The state of the breaker: whether the store may be asked, and how long; a forked child makes
    its lock anew.
    """

    def __init__(
        self, budget_s: float, probe_s: float, changed: Callable[[str], object] | None = None
    ) -> None:
        self._budget_s, self._probe_s = budget_s, probe_s
        self._lost_s, self._failures, self._ever_answered = 0.0, 0, False
        self._open, self._probing, self._probe_at_s = False, False, 0.0
        self.reason = ""
        self._changed, self._told = changed or (lambda _state: None), "closed"
        self._lock = OwnLock(self._forked)

    @property
    def state(self) -> str:
        return "half open" if self._probing else "open" if self._open else "closed"

    def in_words(self) -> str:
        left_s = self._probe_at_s - time.monotonic()
        return "right now" if self._probing or left_s <= 0 else f"in {left_s:.0f} s"

    def admits(self, probe: Callable[[], None]) -> bool:
        """Tell whether the store may be asked; starts a probe when one is due."""
        with self._lock:
            if not self._open:
                return True
            due = not self._probing and time.monotonic() >= self._probe_at_s
            self._probing = self._probing or due
        if due:
            self._tell()
            probe()
        return False

    def allowed_s(self, deadline_s: float) -> float:
        """Return how long to wait.

        Before the first answer ever that is what is left of the budget, whatever is asked:
        connecting takes round trips too, and nothing is known of how far away the store is.
        """
        with self._lock:
            return deadline_s if self._ever_answered else max(self._budget_s - self._lost_s, 0.0)

    def answered(self) -> None:
        with self._lock:
            self._failures, self._ever_answered = 0, True
            self._open = self._probing = False
        self._tell()

    def failed(self, seconds: float, reason: str) -> None:
        with self._lock:
            self.reason = reason
            self._failures += 1
            self._lost_s += seconds
            # The time lost is never forgotten: a store that has cost half of its budget rests at
            # each further failure.
            if self._failures >= FAILURES_IN_A_ROW or self._lost_s >= self._budget_s / 2:
                self._rest()
        self._tell()

    def still_dead(self) -> None:
        with self._lock:
            self._rest()
        self._tell()

    def _tell(self) -> None:
        """Say the state if it is another than was said last, outside the lock: who hears it may
        take locks of its own.
        """
        state = self.state
        if state != self._told:
            self._told = state
            self._changed(state)

    def _rest(self) -> None:
        # With jitter: a thousand processes that lost their server together are not to come back
        # together.
        self._open, self._probing = True, False
        self._probe_at_s = time.monotonic() + self._probe_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311

    def _forked(self) -> None:
        self._probing = False  # the thread of a probe does not exist in the child
