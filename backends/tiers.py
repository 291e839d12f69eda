# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the port says what each method does
"""`Tiers`: several byte stores as one, the nearest first.

::

    near, writable       copies of what was read or written; fetched by one process of the host for all
    peers, read-only     other processes that hand on what they have; asked for objects alone, of which the bytes are proof
    truth, writable      the farthest writable tier, which others share: what is there, and what tags say
    below, read-only     a base that was made before

Objects are the same wherever they are, since their content decides their key: the nearest answer is
right.  Refs change, so the truth decides; nearer tiers hold what it said last, for the time that it
does not answer.

Each store is asked through a `Tier`, with its counters and the rules by which it finds out damage.
`Rules` says how to check objects and what refs name, which `bundler/store/store_urls.py` knows.
Where the nearest tier is a directory that the processes of a host share, `SharedFetches` lets one
of them fetch while the others wait.

`bundler/store/store_urls.py` makes one when several URLs are given.
"""

from __future__ import annotations

import contextlib
import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
    InvalidKey,
)
from bundler.backends.keys import check_key, check_keys
from bundler.backends.port import (
    OBJECT_LIMIT,
    Backend,
    HeldLease,
    Lease,
    OwnLock,
    Stat,
    TierCounters,
    Unread,
)

T = TypeVar("T")
# Longer than a fetch may take; after that a waiting process fetches for itself, so a process that
# was killed delays nobody longer.
FETCH_S = 4.0
# A lease leaves an empty lock file behind in a directory, so there are few names.  Fetches that
# share a slot wait for each other without need.
SLOTS = 64
_POLL_S = (0.002, 0.05)


class SharedFetches:
    """Fetches that are under way on this host, by leases in a near store.

    For efficiency alone: without a lease, or after `FETCH_S`, each process fetches for itself.
    What the fetching process finds must be put into the near store in the order of `write_order`.

    Args:
        near: a store that all processes of the host share, with leases.
    """

    def __init__(self, near: Backend) -> None:
        self._near = near

    @contextlib.contextmanager
    def joined(self, keys: Collection[str]) -> Iterator[bool]:
        """Fetch in the block; yields True when another process has fetched meanwhile, so that the
        near store is worth a look.

        A process that comes late and already finds some of the keys still waits for the same fetch:
        a fetch is known by its least key, and `write_order` has that key written last.
        """
        least = min(keys)
        slot = f"fetch/{zlib.crc32(least.encode()) % SLOTS:02x}"
        lease = self._take(slot)
        # With the lease in hand, look again: another process may have finished since the caller
        # looked.
        waited = self._wait(slot, least) if lease is None else self._is_near(least)
        try:
            yield waited
        finally:
            if lease is not None:
                _release(lease)

    def _is_near(self, least: str) -> bool:
        with contextlib.suppress(BackendError):
            return bool(self._near.exists([least]))
        return False

    def _take(self, slot: str) -> Lease | None:
        # On a full disk, for instance, every process fetches.
        with contextlib.suppress(BackendError):
            return self._near.lease(slot, FETCH_S)
        return None

    def _wait(self, slot: str, least: str) -> bool:
        """Wait until the objects are near or the fetch has ended; False when that cannot be
        told.
        """
        pause_s, until_s = _POLL_S[0], time.monotonic() + FETCH_S
        with contextlib.suppress(BackendError):
            while not self._near.exists([least]) and time.monotonic() < until_s:
                time.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311  # no secret
                pause_s = min(pause_s * 2, _POLL_S[1])
                lease = self._near.lease(slot, FETCH_S)
                if lease is not None:
                    # The fetching process found nothing, or was killed.  The waiting processes now
                    # fetch side by side, not in turn.
                    _release(lease)
                    break
            return True
        return False


def _release(lease: Lease) -> None:
    with contextlib.suppress(BackendError):  # it expires by itself
        lease.release()


def write_order(keys: Collection[str]) -> list[str]:
    """Return keys in the order in which they are to be put into the near store: see
    `SharedFetches.joined`.
    """
    return sorted(keys, reverse=True)


_COUNTED: dict[type[BackendError], str] = {BackendTimeout: "timeouts", BackendSuspended: "rested"}
_CAUSES: dict[type[BackendError], str] = {
    BackendTimeout: "timeout",
    BackendUnavailable: "unavailable",
    BackendFull: "full",
    BackendDenied: "denied",
}


@dataclass(frozen=True)
class Rules:
    """What tiers are told about what they hold, which a byte store does not know by itself.

    Attributes:
        is_sound: whether an object's bytes are those that were stored once, by its key and them;
            compares their digest.  None: that cannot be told, and what a tier gives is taken as it
            is.
        named_by: which objects a ref's value names; a near tier gets the ref when it has them.
            None: it cannot be told.
        on_failure: called once for each tier and cause of a failure that no caller gets as an
            error: tier, cause, message.
    """

    is_sound: Callable[[str, bytes], bool] | None = None
    named_by: Callable[[str, bytes], Collection[str] | None] = field(
        default=lambda _key, _value: ()
    )
    on_failure: Callable[[str, str, str], None] = field(
        default=lambda _tier, _cause, _message: None
    )


class Tier:
    """A store with its name and numbers; counts safely under threads, and in a forked child, which
    goes on from its parent's numbers.

    Args:
        name: what to call it, without any secret.
        backend: the store; one that is not `writable` is never written.
        rules: what is known of objects and refs.
    """

    def __init__(self, name: str, backend: Backend, rules: Rules) -> None:
        self.name, self.backend, self.rules = name, backend, rules
        self.writable = backend.writable
        self._counts, self._lock = Counter[str](), OwnLock()

    @property
    def counters(self) -> TierCounters:
        """The numbers as they are now."""
        with self._lock:
            return TierCounters(
                self.name, **{k: v for k, v in self._counts.items() if " " not in k}
            )

    def count(self, what: str, number: int = 1) -> int:
        """Count something that is called as an attribute of `TierCounters`; returns the sum."""
        with self._lock:
            self._counts[what] += number
            return self._counts[what]

    def ask(self, call: Callable[[Backend], T]) -> T:
        """Make a call, and count how it failed if it does."""
        try:
            return call(self.backend)
        except InvalidKey:
            raise
        except BackendError as error:
            self.count(_COUNTED.get(type(error), "errors"))
            raise

    def get_sound(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the undamaged objects; what comes damaged twice is removed, so that it is filled
        again.
        """
        got = self.ask(lambda b: b.get_within(max_bytes))
        is_sound = self.rules.is_sound or (lambda _key, _value: True)
        damaged = [key for key, value in got.items() if not is_sound(key, value)]
        if damaged:
            again = self.ask(lambda b: b.get_within({key: max_bytes[key] for key in damaged}))
            whole = {key: value for key, value in again.items() if is_sound(key, value)}
            self._remove([key for key in damaged if key not in whole], again)
            got = {key: value for key, value in got.items() if key not in damaged} | whole
        self.count("hits", len(got))
        self.count("misses", len(max_bytes) - len(got))
        return got

    def _remove(self, damaged: list[str], found: Mapping[str, bytes]) -> None:
        if damaged:
            first = found.get(damaged[0])
            self.count("damaged", len(damaged))
            why = f": {first.why}" if isinstance(first, Unread) else ""
            self._tell("damaged", f"{damaged[0]} is not what was stored{why}")
            if self.writable:
                with self.tolerating():
                    self.ask(lambda b: b.delete(damaged))

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Run a block whose `BackendError` is counted, and reported once for each cause, in place
        of being raised.
        """
        try:
            yield
        except BackendError as error:
            self.tolerate(error)

    def tolerate(self, error: BackendError) -> None:
        """Report a failure that no caller gets as an error, once for each cause."""
        if not isinstance(error, BackendSuspended):  # the failure before the rest was reported
            self._tell(_CAUSES.get(type(error), "error"), str(error))

    def _tell(self, cause: str, message: str) -> None:
        if self.count(f"cause {cause}") == 1:
            self.rules.on_failure(self.name, cause, message)


WhenDown = Literal["raise", "degrade"]
_Failures = list[tuple[Tier, BackendError]]
# Tags whose bundle is not near yet; more than a process reads before it fetches what they name.
_UNMIRRORED = 1000


class Tiers(Backend):
    """Several byte stores as one.

    * Objects are read from the nearest tier that has them and copied to the nearer writable ones;
      what is damaged in a tier is removed there, and asked of the next.
    * Objects are written to the truth first, then to the nearer writable tiers.  `exists`, `touch`
      and `lease` ask the truth: the truth has to hold whole bundles by itself.
    * Refs are read from the truth and changed there; below it a base may have some that the truth
      does not set.
    * Reading leaves out what fails: a ref is then what a nearer tier was told last, an object is
      absent unless another tier has it.  The error is raised only when no tier answers, or no tier
      that answers has the ref.
    * Writing raises when the truth fails; with `when_down="degrade"` the next nearer writable tier
      stands in for one that does not answer or is full, and what is written meanwhile stays there.

    Guarantees what `Backend` does, for objects as soon as the truth has them.  Does not guarantee
    that near tiers hold all. Safe under threads and forks where the tiers are.

    Args:
        tiers: the nearest first; one that is not `writable` is never written.
        when_down: what writing does while the truth does not answer.
    """

    def __init__(self, tiers: Sequence[Tier], when_down: WhenDown = "raise") -> None:
        self._tiers, self._when_down = tuple(tiers), when_down
        self._writable = [tier for tier in tiers if tier.writable]
        self._truth = self._writable[-1] if self._writable else None
        # Peers have objects alone: what they do not say about refs, lists and times counts for
        # nothing.
        self._stores = [tier for tier in tiers if not tier.backend.asks_peers]
        self._read_only = [tier for tier in self._stores if not tier.writable]
        self.writable = bool(self._writable)
        # One tier without a check, and what this store returns may come from it.
        self.verified = all(tier.rules.is_sound is not None for tier in tiers)
        self.asks_peers = any(tier.backend.asks_peers for tier in tiers)
        self._fetches, self._far_from = self._fetch_tier()
        self._unmirrored: dict[str, bytes] = {}

    @property
    def counters(self) -> tuple[TierCounters, ...]:
        """What each tier did so far, the nearest first."""
        return tuple(tier.counters for tier in self._tiers)

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self.get_within(dict.fromkeys(keys, OBJECT_LIMIT))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        check_keys(max_bytes)
        wanted = dict(max_bytes)
        errors: _Failures = []
        found = self._read(range(self._far_from), wanted, errors)
        missing = _without(wanted, found)
        if missing and self._fetches is not None:
            found |= self._fetch(self._fetches, missing, errors)
        # Only when no store answered: an object may be absent everywhere else, and absent is an
        # answer, but of a peer.
        if not found and wanted and {tier for tier, _ in errors}.issuperset(self._stores):
            raise next(error for tier, error in reversed(errors) if tier in self._stores)
        _tolerate_all(errors)
        return found

    def _fetch(
        self, fetches: SharedFetches, missing: dict[str, int], errors: _Failures
    ) -> dict[str, bytes]:
        """Read from the far tiers, which one process of the host asks for all processes."""
        far = range(self._far_from, len(self._tiers))
        with fetches.joined(missing) as waited:
            # Errors of the near tiers were counted when they were read the first time.
            found = self._read(range(self._far_from), missing, []) if waited else {}
            return found | self._read(far, _without(missing, found), errors)

    def _read(
        self, positions: range, wanted: dict[str, int], errors: _Failures
    ) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for position in positions:
            tier, missing = self._tiers[position], _without(wanted, found)
            if not missing:
                break
            try:
                got = tier.get_sound(missing)
            except BackendError as error:
                errors.append((tier, error))
                continue
            # At once, for the processes that wait for this fetch.
            self._fill(self._tiers[:position], got)
            found |= got
        return found

    def _fill(self, nearer: Sequence[Tier], got: dict[str, bytes]) -> None:
        if not nearer and not self._unmirrored:
            return
        # What was read in part only (`Unread`) must not be stored as if it were whole.
        items = {key: got[key] for key in write_order(got) if not isinstance(got[key], Unread)}
        for tier in nearer:
            if items and tier.writable:
                with tier.tolerating():
                    tier.count("filled", len(tier.ask(lambda b: b.put(items))))
        # A tag whose bundle was not near may be served from near, once its last object has arrived.
        for key, value in list(self._unmirrored.items()):
            named = self._truth.rules.named_by(key, value) if self._truth else None
            if self._truth and not got.keys().isdisjoint(named or ()):
                self._mirror(key, value, self._truth)

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        created, holder = self._at_truth(lambda b: b.put(items))
        # Only what was created is copied: under a key that content does not decide, the truth may
        # hold another writer's bytes.
        copies = {key: items[key] for key in created}
        self._at_nearer(holder, lambda b: b.put(copies))
        return created

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        wanted = check_keys(keys)
        if self._truth is None:
            return self._among(self._stores, wanted)
        return self._there(wanted, *self._at_truth(lambda b: b.exists(wanted)))

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        wanted = check_keys(keys)
        if self._truth is None:
            return self._among(self._stores, wanted)
        there, holder = self._at_truth(lambda b: b.claim(wanted))
        self._at_nearer(holder, lambda b: b.touch(wanted))
        return self._there(wanted, there, holder)

    def _there(self, wanted: list[str], there: frozenset[str], holder: Tier) -> frozenset[str]:
        """Return what a writable tier has, and read-only ones below it."""
        below = self._tiers[self._tiers.index(holder) + 1 :]
        return there | self._among(
            [tier for tier in below if not tier.writable], [k for k in wanted if k not in there]
        )

    def _among(self, tiers: Sequence[Tier], keys: list[str]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for tier in tiers:
            missing = [key for key in keys if key not in found]
            if missing:
                with tier.tolerating():
                    found |= tier.ask(lambda b, keys=missing: b.exists(keys))  # type: ignore[misc]
        return found

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        """Remove objects wherever we may; how old they are the truth decides, by its own clock.
        See `Backend`.
        """
        wanted = list(keys)
        gone, holder = self._at_truth(lambda b: b.delete(wanted, unmodified_since_s))
        # Near copies have other times, so with a limit of time only what the truth removed is
        # removed near.
        copies = wanted if unmodified_since_s is None else sorted(gone)
        return gone.union(*self._at_nearer(holder, lambda b: b.delete(copies)))

    def touch(self, keys: Collection[str]) -> None:
        wanted = check_keys(keys)
        if self._truth is not None:
            _, holder = self._at_truth(lambda b: b.touch(wanted))
            self._at_nearer(holder, lambda b: b.touch(wanted))

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield what the truth and read-only tiers hold; see `Backend`."""
        found: dict[str, Stat] = {}
        # The first answer counts: the truth's time, not that of a base below it.
        for stats in self._answers(lambda b: [*b.list(prefix)]):
            found = {stat.key: stat for stat in stats} | found
        return iter(found.values())

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        """Yield the refs of the truth and of read-only tiers; see `Backend`."""
        return iter(set().union(*self._answers(lambda b: [*b.list_refs(prefix)])))

    def read_ref(self, key: str) -> bytes | None:
        check_key(key)
        errors: _Failures = []
        if self._truth is not None:
            try:
                value = self._truth.ask(lambda b: b.read_ref(key))
            except BackendError as error:
                errors.append((self._truth, error))
            else:
                self._mirror(key, value, self._truth)
                if value is not None:
                    return value
        # A near tier's copy of a ref may be old, so it counts only while the truth cannot be asked.
        others = [tier for tier in self._stores if tier is not self._truth]
        return self._first_ref(others if errors else self._read_only, key, errors)

    @staticmethod
    def _first_ref(tiers: Sequence[Tier], key: str, errors: _Failures) -> bytes | None:
        """Return the value of the first tier that has one; raises when there is none and not all
        could be asked.
        """
        for tier in tiers:
            try:
                value = tier.ask(lambda b: b.read_ref(key))
            except BackendError as error:
                errors.append((tier, error))
            else:
                if value is not None:
                    _tolerate_all(errors)
                    return value
        if errors:
            raise errors[0][1]
        return None

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        check_key(key)
        swapped, holder = self._at_truth(lambda b: self._swap_at(b, key, expected, value))
        if swapped:
            self._mirror(key, value, holder)
        return swapped

    def _swap_at(
        self, backend: Backend, key: str, expected: bytes | None, value: bytes | None
    ) -> bool:
        """Swap, where what a base says counts as the value as long as the truth says nothing."""
        base = self._first_ref(self._read_only, key, [])
        # The truth may already have a value of its own, which hides the base's; else the base's
        # value is the current one.
        if base is None:
            return backend.swap_ref(key, expected, value)
        if expected is not None and backend.swap_ref(key, expected, value):
            return True
        if expected != base:
            return False
        if value is None:
            raise BackendDenied(
                f"{key} is set in a tier that is only read, and cannot be removed there"
            )
        return backend.swap_ref(key, None, value)

    def _mirror(self, key: str, value: bytes | None, holder: Tier) -> None:
        """Copy a ref to nearer tiers; a tier that lacks an object the ref names keeps the last
        value that it could serve.
        """
        self._unmirrored.pop(key, None)
        named = () if value is None else holder.rules.named_by(key, value)
        for tier in self._nearer(holder) if named is not None else ():
            with tier.tolerating():
                told = self._tell_ref(tier, key, value, named or ())
                if value is not None and not told and len(self._unmirrored) < _UNMIRRORED:
                    self._unmirrored[key] = value

    @staticmethod
    def _tell_ref(tier: Tier, key: str, value: bytes | None, named: Collection[str]) -> bool:
        current = tier.ask(lambda b: b.read_ref(key))
        if current != value:
            # A near tag must not name what is not near: while the truth is down, readers could not
            # follow it.
            if not tier.ask(lambda b: b.exists(named)).issuperset(named):
                return False
            tier.ask(lambda b: b.swap_ref(key, current, value))
        return True

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take a lease where all share it, at the truth; see `Backend`."""
        return self._at_truth(lambda b: b.lease(key, ttl_s))[0]

    def leases(self) -> Iterator[HeldLease]:
        return (self._truth or self._stores[-1]).ask(lambda b: b.leases())

    def now_s(self) -> float:
        return (self._truth or self._stores[0]).ask(lambda b: b.now_s())

    def flush(self) -> None:
        if self._truth is not None:
            _, holder = self._at_truth(lambda b: b.flush())
            self._at_nearer(holder, lambda b: b.flush())

    def close(self) -> None:
        for tier in self._tiers:
            tier.backend.close()

    def __repr__(self) -> str:
        return f"<Tiers {', '.join(tier.name for tier in self._tiers)}>"

    def _fetch_tier(self) -> tuple[SharedFetches | None, int]:
        """Return fetches by the nearest tier that can keep them, and from which tier on
        they fetch.
        """
        for position, tier in enumerate(self._tiers[:-1]):
            backend = tier.backend
            if tier.writable and backend.reads_are_cheap:
                return SharedFetches(backend), position + 1
        return None, len(self._tiers)

    def _at_truth(self, call: Callable[[Backend], T]) -> tuple[T, Tier]:
        """Make a call at the truth, or at the tier that stands in for it; returns the answer and
        the tier that gave it.
        """
        for tier in reversed(self._writable):
            try:
                return tier.ask(call), tier
            except (BackendUnavailable, BackendFull) as error:
                if self._when_down == "raise" or tier is self._writable[0]:
                    raise
                tier.tolerate(error)
        raise BackendDenied("every tier is opened for reading only")

    def _nearer(self, holder: Tier) -> Sequence[Tier]:
        return self._writable[: self._writable.index(holder)]

    def _at_nearer(self, holder: Tier, call: Callable[[Backend], T]) -> Sequence[T]:
        """Make a call at every nearer writable tier; failures there are reported, not raised."""
        answers: deque[T] = deque()
        for tier in self._nearer(holder):
            with tier.tolerating():
                answers.append(tier.ask(call))
        return answers

    def _answers(self, call: Callable[[Backend], T]) -> Sequence[T]:
        """Ask the truth and the read-only tiers; when the truth fails, all other tiers."""
        answers: deque[T] = deque()
        errors: deque[tuple[Tier, BackendError]] = deque()
        tiers = [*([self._truth] if self._truth else []), *self._read_only]
        for tier in tiers:  # grows when the truth fails
            try:
                answers.append(tier.ask(call))
            except BackendError as error:
                errors.append((tier, error))
                if tier is self._truth:
                    tiers += self._nearer(tier)
        if not answers:
            raise errors[0][1]
        _tolerate_all(errors)
        return answers


def _without(wanted: dict[str, int], found: Collection[str]) -> dict[str, int]:
    """Return the keys that were not found, with how large each may be."""
    if not found:
        return wanted
    return {key: most for key, most in wanted.items() if key not in found}


def _tolerate_all(errors: Iterable[tuple[Tier, BackendError]]) -> None:
    """Report failures of tiers, once it is clear that the caller gets an answer in spite of
    them.
    """
    for tier, error in errors:
        tier.tolerate(error)
