# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the port says what each method does
"""`Guarded`: a byte store that may be slow or dead, with a deadline for each operation and a
circuit breaker.

::

    closed --- failures in a row, or too much time lost ---> open        every call is refused at once
    open   --- a call after `probe_s` ---------------------> half open   one question, asked in a thread of its own
    half open: an answer closes it, a failure opens it again

`Deadlines` holds its limits, and `bounded` wraps a store. `bundler/store/store_urls.py` puts it
around each server of a store with tiers.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from bundler.backends.backend_errors import (
    BackendError,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.lease_holders import HeldLease
from bundler.backends.port import Backend, Lease, Stat

T = TypeVar("T")

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


class Guarded(Backend):
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
        self.inner, self.deadlines = inner, deadlines or Deadlines()
        self.reads_are_cheap, self.writable, self.verified = (
            inner.reads_are_cheap,
            inner.writable,
            inner.verified,
        )
        self.asks_peers = inner.asks_peers
        self._breaker = _Breaker(self.deadlines.budget_s, self.deadlines.probe_s, changed)

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self._call(lambda: self.inner.get(keys), len(keys) * self.deadlines.bytes_per_key)

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        return self._call(
            lambda: self.inner.get_within(max_bytes), len(max_bytes) * self.deadlines.bytes_per_key
        )

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        return self._call(lambda: self.inner.put(items), sum(map(len, items.values())))

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
        # A listing takes longer the larger the store is; no launch of a kernel waits for one, so
        # its limit is another.
        return iter(self._call(lambda: list(self.inner.list(prefix)), unhurried=True))

    def read_ref(self, key: str) -> bytes | None:
        return self._call(lambda: self.inner.read_ref(key))

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        return self._call(lambda: self.inner.swap_ref(key, expected, value))

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        return iter(self._call(lambda: list(self.inner.list_refs(prefix)), unhurried=True))

    def now_s(self) -> float:
        return self._call(self.inner.now_s)

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        # Nobody would release a lease that is granted after we stopped waiting for it.
        lease = self._call(
            lambda: self.inner.lease(key, ttl_s), too_late=lambda late: late and late.release()
        )
        return None if lease is None else _GuardedLease(self, lease)

    def leases(self) -> Iterator[HeldLease]:
        return iter(self._call(lambda: list(self.inner.leases()), unhurried=True))

    def flush(self) -> None:
        self._call(self.inner.flush, unhurried=True)

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"<Guarded {self.inner!r}, {self._breaker.state}>"

    def _call(
        self,
        call: Callable[[], T],
        size_bytes: int = 0,
        *,
        unhurried: bool = False,
        too_late: Callable[[T], object] | None = None,
    ) -> T:
        breaker = self._breaker
        if not breaker.admits(self._probe):
            raise BackendSuspended(
                f"{breaker.reason}; it is left alone, and asked again {breaker.in_words()}"
            )
        most_s = self.deadlines.deadline_s + size_bytes / self.deadlines.bytes_per_s
        allowed_s = self.deadlines.unhurried_s if unhurried else breaker.allowed_s(most_s)
        started = time.monotonic()
        try:
            answer = call() if allowed_s is None else _TimedCall(call, too_late).result(allowed_s)
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
                _TimedCall(lambda: self.inner.exists([_PROBE_KEY]), None).result(
                    self.deadlines.deadline_s
                )
            except BackendUnavailable:
                self._breaker.still_dead()
            except Exception:  # noqa: BLE001  # any other error is an answer, so the store is alive
                self._breaker.answered()
            else:
                self._breaker.answered()

        threading.Thread(target=ask, name="bundler-probe", daemon=True).start()


def bounded(call: Callable[[], T], timeout_s: float) -> T:
    """Return what a call returns, or raise `BackendTimeout`; a call that takes longer goes on in
    its thread.
    """
    return _TimedCall(call, None).result(timeout_s)


class _GuardedLease:
    def __init__(self, guarded: Guarded, lease: Lease) -> None:
        self._guarded, self._lease = guarded, lease

    def renew(self, ttl_s: float) -> bool:
        # the same module
        return self._guarded._call(lambda: self._lease.renew(ttl_s))  # noqa: SLF001

    def release(self) -> bool:
        return self._guarded._call(self._lease.release)  # noqa: SLF001  # the same module


class _TimedCall(Generic[T]):
    """One call in a thread of its own, which is left behind when it takes too long.

    A thread for each call, not a pool: a pool whose threads all hang would have to grow, and none
    survives a fork.
    """

    def __init__(self, call: Callable[[], T], too_late: Callable[[T], object] | None) -> None:
        self._call, self._too_late = call, too_late
        self._done, self._lock, self._left = threading.Event(), threading.Lock(), False
        self._answer: list[T] = []
        self._error: BaseException | None = None

    def result(self, timeout_s: float) -> T:
        try:
            # `threading.Thread` would wait until the new one runs, before this one waits for what
            # it does.
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter is about to end, or the system has no more threads
            self._run()
        if not self._done.wait(timeout_s):
            with self._lock:
                self._left = not self._done.is_set()
            if self._left:
                raise BackendTimeout(f"no answer within {timeout_s:.2f} s")
        if self._error is not None:
            raise self._error
        return self._answer[0]

    def _run(self) -> None:
        try:
            self._answer = [self._call()]
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            self._error = error
        with self._lock:
            self._done.set()
            late = self._left
        if late and self._answer and self._too_late is not None:
            with contextlib.suppress(BackendError):  # it expires by itself
                self._too_late(self._answer[0])


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
        self._own_lock, self._pid = threading.Lock(), os.getpid()

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

    @property
    def _lock(self) -> threading.Lock:
        if self._pid != os.getpid():
            # Another thread could hold the lock at the moment of a fork, and the thread of a probe
            # does not exist in the child.
            self._own_lock, self._pid, self._probing = threading.Lock(), os.getpid(), False
        return self._own_lock
