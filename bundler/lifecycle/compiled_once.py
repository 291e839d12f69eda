# SPDX-License-Identifier: Apache-2.0
"""`compile_once` and `CompileLeases`: of many processes that need a kernel at once, one compiles it and the
others use its build.

A lease says whose turn it is.  Where a lease is lost or runs out, two processes may compile; a
kernel that fails to come is compiled by whoever waited for it.  Users call `compile_once`; a
session asks `CompileLeases` for each miss (`bundler/integrations/kernel_lookup.py`).

::

    look up -- there ----------------------------------------------> its bytes
       |  missing
       v
    lease --- granted --- look up again --- compile --- publish ---> the first build's bytes, ours
    or not
       |  held
       v
    wait: look up, ask for the lease, sleep with jitter; after the deadline compile without a lease

Leases are for efficiency.  What is right does not depend on them, nor on any clock: who publishes
first has made the kernel, and everybody is given those bytes.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeVar

from bundler import observers
from bundler.backends.port import Lease
from bundler.errors import (
    AccessDenied,
    BundlerError,
    CompileFailed,
    ConfigError,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.format.bundle import Bundle
from bundler.format.manifest import Content, Observed
from bundler.format.summary import Summarized, count
from bundler.lifecycle.machine_store import Store
from bundler.store.kernel_records import KernelRecords, LookUp, ToldFailure

# While we run the compiler the lease is renewed three times before it ends: a dead holder is missed
# after this time.
LEASE_S = 15.0
WAIT_S = 300.0
# Where Triton runs it, nobody tells us of a failure: a lease lasts as long as a compile usually
# may.
BLIND_LEASE_S = 60.0
BLIND_LEASE_FACTOR = 3
LEAST_BLIND_LEASE_S = 1.0
_RENEWALS = 3
_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.01, 0.5, 1.6

T = TypeVar("T")
How = Literal["found", "waited", "compiled", "late"]


@dataclass(frozen=True, repr=False)
class CompiledOnce(Summarized):
    """A kernel that was asked for.

    Attributes:
        bundle: that kernel, with the bytes that everybody gets from the store.
        how: `found` in the store; `waited` for another's compile; `compiled` here; `late`: compiled
            here, but another build was published first, and is what `bundle` holds.
        waited_s: seconds spent on waiting for others.
        published: whether the store holds it; False when the store failed, or holds what only a
            newer version can read.
    """

    bundle: Bundle
    how: How
    waited_s: float
    published: bool


def compile_once(
    store: Store,
    key: str,
    compile_kernel: Callable[[], Bundle],
    *,
    lease_s: float = LEASE_S,
    wait_s: float = WAIT_S,
) -> CompiledOnce:
    """Return a kernel from a store, or compile it, once for all who ask for it at the same time.

    Of any number of threads, processes and hosts that share the store, one compiles and the others
    wait.  It is compiled more often only when the store fails, or the one who compiles dies or is
    stopped for `lease_s`, or takes longer than `wait_s`. Whoever publishes first has made it: all
    are given the same bytes, also who woke up late.  When the store cannot be used, the kernel is
    compiled here.

    Args:
        store: where kernels are shared; the farthest writable tier decides who compiles.
        key: the kernel's key, as Triton names its directory.
        compile_kernel: makes a bundle that holds this kernel, for instance with a recording around
            a compile; other kernels in it are not published.
        lease_s: for how long a holder counts as alive without a sign from it; it is renewed while
            `compile_kernel` runs.
        wait_s: how long to wait for others, in seconds, before compiling it here.

    Raises:
        CompileFailed: another process that we waited for could not compile it; `reason` says what
            its compiler said.
        NotFound: `compile_kernel` returned a bundle without this kernel.
        UnsafeName, ConfigError: an argument that cannot be used.
        Whatever `compile_kernel` raises.

    Warns:
        BundlerWarning: the store failed; the kernel was compiled without it.
    """
    if not lease_s > 0 or not wait_s >= 0:
        raise ConfigError(
            f"lease_s={lease_s!r}, wait_s={wait_s!r}: expected seconds, the first more than 0"
        )
    return CompileLeases(store.kernel_records()).run(
        key, compile_kernel, lease_s=lease_s, wait_s=wait_s
    )


class AlreadyThere(NamedTuple):
    """The kernel is there; `waited_s` seconds were spent on waiting for it."""

    there: LookUp
    waited_s: float


class CompileLease:
    """The right to compile a kernel now: with the lease, or, where that could not be had, without.

    A context manager: the block's end gives the lease back.

    Attributes:
        holds: whether others wait for us.
        waited_s: seconds spent on waiting for others.
    """

    def __init__(
        self, records: KernelRecords, key: str, lease: Lease | None, waited_s: float
    ) -> None:
        self._records, self._key, self._lease = records, key, lease
        self.holds, self.waited_s = lease is not None, waited_s
        self._over = threading.Event()
        observers.count("leases", result="granted" if self.holds else "without")
        if self.holds:
            observers.count("leases_held")

    def publish(self, bundle: Bundle) -> CompiledOnce:
        """Store the kernel if nobody was faster, and give the lease back.

        When the store fails, what was compiled is returned all the same, after a `BundlerWarning`.

        Raises:
            NotFound: the bundle does not hold this kernel.
        """
        mine = _only(bundle, self._key)
        try:
            published = self._records.publish(mine)
        except BundlerError as error:
            self._records.report_failure(error)
            return CompiledOnce(mine, "compiled", self.waited_s, published=False)
        finally:
            self.close()
        how: How = "late" if self._key in published.others else "compiled"
        there = self._key in published.created | published.others
        return CompiledOnce(published.bundle, how, self.waited_s, published=there)

    def keep_renewing(self, lease_s: float) -> None:
        """Renew the lease in the background until the turn is over, or the lease is lost."""
        if self._lease is not None:
            threading.Thread(
                target=self._renew, args=(self._lease, lease_s), name="bundler-lease", daemon=True
            ).start()

    def tell_failure(self, error: Exception) -> None:
        """Tell those who wait that the compile failed; without the lease nobody waits for us."""
        if self.holds:
            with contextlib.suppress(
                BundlerError
            ):  # the error itself is raised; waiters try for themselves
                self._records.tell_failure(self._key, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Give the lease back; closing twice is fine."""
        self._over.set()
        lease, self._lease = self._lease, None
        if lease is not None:
            observers.count("leases_held", -1)
            with contextlib.suppress(BundlerError):  # it expires by itself
                lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _renew(self, lease: Lease, lease_s: float) -> None:
        while not self._over.wait(lease_s / _RENEWALS):
            # A store that fails for a moment may answer the next time, as long as the lease has not
            # run out.
            with contextlib.suppress(BundlerError):
                if not lease.renew(lease_s):
                    return


class CompileLeases:
    """Decides who compiles; the compile is somebody else's, ours to call (`run`) or not (`begin`).

    Stateless but for what was warned of; threads, processes and forks as the store.

    Args:
        records: the store's kernels.
    """

    def __init__(self, records: KernelRecords) -> None:
        self._records = records

    def run(
        self,
        key: str,
        compile_kernel: Callable[[], Bundle],
        *,
        lease_s: float = LEASE_S,
        wait_s: float = WAIT_S,
    ) -> CompiledOnce:
        """Return a kernel or compile it; see `compile_once`."""
        turn = self._turn(key, lambda _recorded_s: (lease_s, wait_s), hears=True)
        if isinstance(turn, AlreadyThere):
            how: How = "waited" if turn.waited_s else "found"
            return CompiledOnce(turn.there.bundle, how, turn.waited_s, published=True)
        with turn:
            turn.keep_renewing(lease_s)
            try:
                with observers.step("compile_once", key=key):
                    made = _only(compile_kernel(), key)
            except Exception as error:
                turn.tell_failure(error)
                raise
            return turn.publish(made)

    def begin(
        self,
        key: str,
        expected_s: float | None = None,
        instead: Callable[[], T | None] | None = None,
    ) -> AlreadyThere | CompileLease | T:
        """Return a kernel, or the turn to compile it, where the compiler is called by somebody who
        does not tell us how it ends.

        The lease is short and never renewed, and nobody waits longer than it lasts:
        `BLIND_LEASE_FACTOR` times what the compile took when it was recorded, and `BLIND_LEASE_S`
        at most.  The turn may be closed without publishing.

        Args:
            key: the kernel's key.
            expected_s: how long the compile took when it was recorded; None when that is not known
                here.
            instead: asked where the store does not have the kernel, before anybody waits for it;
                what it returns is returned.

        Raises:
            UnsafeName: not a kernel key.
            Whatever `instead` raises.
        """

        def times(recorded_s: float | None) -> tuple[float, float]:
            known_s = expected_s or recorded_s
            blind_s = BLIND_LEASE_S if known_s is None else known_s * BLIND_LEASE_FACTOR
            blind_s = min(max(blind_s, LEAST_BLIND_LEASE_S), BLIND_LEASE_S)
            return blind_s, blind_s

        return self._turn(key, times, hears=False, instead=instead)

    def _turn(
        self,
        key: str,
        times: Callable[[float | None], tuple[float, float]],
        *,
        hears: bool,
        instead: Callable[[], T | None] | None = None,
    ) -> AlreadyThere | CompileLease | T:
        started = time.monotonic()
        try:
            found = self._records.look_up([key])
            if not found.missing:
                return AlreadyThere(found, 0.0)
            other = instead() if instead is not None else None
            if other is not None:
                return other
            if not self._records.readable:  # nobody waits for what would not be used
                return CompileLease(self._records, key, None, 0.0)
            lease_s, wait_s = times(found.seconds.get(key))
            return _LeaseWait(self._records, key, lease_s, hears=hears).take(wait_s)
        except (StoreUnavailable, StoreFull, AccessDenied) as error:
            self._records.report_failure(error)
            return CompileLease(self._records, key, None, time.monotonic() - started)


class _LeaseWait:
    """One wait for one kernel."""

    def __init__(self, records: KernelRecords, key: str, lease_s: float, *, hears: bool) -> None:
        self._records, self._key, self._lease_s, self._hears = records, key, lease_s, hears
        self._started, self._waited = time.monotonic(), False
        self._known: ToldFailure | None = None

    def take(self, wait_s: float) -> AlreadyThere | CompileLease:
        pause_s = _PAUSE_S
        while (lease := self._records.lease(self._key, self._lease_s)) is None:
            if not self._waited:
                observers.count("leases", result="waited")
                self._known = self._records.failure(self._key) if self._hears else None
            self._waited = True
            left_s = wait_s - self._seconds
            if left_s <= 0:
                return CompileLease(self._records, self._key, None, self._seconds)
            # With jitter, or all who wait would ask in the same moment, again and again.
            time.sleep(min(left_s, random.uniform(pause_s / 2, pause_s)))  # noqa: S311  # no secret
            pause_s = min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
            hit = self._look()
            if hit is not None:
                return hit
        turn = CompileLease(self._records, self._key, lease, self._seconds)
        try:
            # It may have been published, or have failed, since we looked.
            hit = self._look()
            if hit is None:
                self._hear()
                return turn
        except BaseException:
            turn.close()
            raise
        turn.close()
        return hit

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started if self._waited else 0.0

    def _look(self) -> AlreadyThere | None:
        found = self._records.look_up([self._key])
        return None if found.missing else AlreadyThere(found, self._seconds)

    def _hear(self) -> None:
        """Raise what came of the compile that we waited for, if it failed; an older failure may
        have had other reasons.
        """
        failure = self._records.failure(self._key) if self._waited and self._hears else None
        if failure is not None and failure != self._known:
            raise CompileFailed(
                f"{self._key} does not compile: {failure.message} (in the process that compiled it"
                " for all)",
                key=self._key,
                name=None,
                line=None,
                reason=failure.message,
                words=failure.message,
            )


def _only(bundle: Bundle, key: str) -> Bundle:
    """Return a bundle of this one kernel; raises `NotFound`."""
    for kernel in bundle.kernels:
        if kernel.key == key:
            seen = bundle.observed.kernels.get(key)
            return Bundle(Content.of([kernel]), Observed({key: seen} if seen else {}), bundle.blobs)
    raise NotFound(
        f"the compile gave no kernel {key}, but {count(len(bundle.kernels), 'other')}", key=key
    )
