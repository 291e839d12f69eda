# SPDX-License-Identifier: Apache-2.0
"""The port: what every byte store offers.

`Backend` is the base class of all byte stores; rooms above ask nothing but its methods and
attributes.  What a store may do better than others (ask for a size before the bytes, grant leases,
compare digests) has a default here that is correct and slow, or refuses.  `Stat`, `Unread` and
`Lease` are what its methods return, `Provable` is what they may be given.  `TierCounters` is what
users see of each of several stores.

Whose a lease is, the token tells that its holder drew::

    <32 hex>@<host>:<process id>@<key>      the key only where the store does not keep it otherwise

The digits make a token unlike any other; the rest is for people, who ask `Backend.leases` who
compiles what.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from bundler.backends.backend_errors import BackendDenied

_HOST_CHARACTERS, _KEY_CHARACTERS = 64, 128
_NOT_OF_A_HOST = re.compile(r"[^A-Za-z0-9._-]")


class HeldLease(NamedTuple):
    """A lease that somebody holds.

    Attributes:
        key: what it is called; empty where the store does not know that.
        holder: `host:process id`; empty where the holder did not say.
        left_s: seconds until it ends, if it is not renewed; None where the store does not say.
    """

    key: str
    holder: str
    left_s: float | None


def new_token(key: str = "") -> str:
    """Return a token that nobody else has."""
    host = _NOT_OF_A_HOST.sub("_", socket.gethostname())[:_HOST_CHARACTERS]
    known = key if len(key) <= _KEY_CHARACTERS else ""
    return f"{secrets.token_hex(16)}@{host}:{os.getpid()}" + (f"@{known}" if known else "")


def held_lease(token: str, left_s: float | None, key: str = "") -> HeldLease:
    """Return the lease of a token, which may be of an older version, or of anybody's making."""
    _, holder, known = (*token.split("@", 2), "", "")[:3]
    return HeldLease(key or known, holder, left_s)


# The most bytes that a reader takes for one object by default: four times as much as a manifest may
# have.
OBJECT_LIMIT = 64 * 1024 * 1024
# So much is read of an object that is too large: the head of a stored value.
BEGINNING_BYTES = 128


@dataclass(frozen=True)
class Stat:
    """One stored object; `modified_s` is on the store's own clock (`Backend.now_s`)."""

    key: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True)
class TierCounters:
    """What one tier did so far in this process.

    Attributes:
        name: the tier.
        hits, misses: objects that were asked for, and were there, or not.  A lookup that failed
            counts as neither.
        filled: objects that were copied here from a farther tier.
        damaged: objects that were there, but not what was once stored.
        errors: operations that failed, those that timed out not counted.
        timeouts: operations without an answer in time.
        rested: operations that were not tried, since the tier failed lately.
    """

    name: str
    hits: int = 0
    misses: int = 0
    filled: int = 0
    damaged: int = 0
    errors: int = 0
    timeouts: int = 0
    rested: int = 0


class Unread(bytes):
    """Stands for an object that was not read whole, being too large or no file; its bytes are the
    beginning of it, or none.

    Attributes:
        why: what was found in place of what was expected, and where.
        size_bytes, max_bytes: how large it is, and may be; None for what is no file.
    """

    why: str
    size_bytes: int | None
    max_bytes: int | None

    def __new__(
        cls, beginning: bytes, why: str, size_bytes: int | None = None, max_bytes: int | None = None
    ) -> Self:
        """Make one of the bytes that were read."""
        made = super().__new__(cls, beginning)
        made.why, made.size_bytes, made.max_bytes = why, size_bytes, max_bytes
        return made

    @staticmethod
    def too_large(beginning: bytes, what: str, size_bytes: int, max_bytes: int) -> Unread:
        """Return what stands for `what`, which has more bytes than it may have."""
        why = f"{what} has {size_bytes:,} bytes, expected at most {max_bytes:,}"
        return Unread(beginning[:BEGINNING_BYTES], why, size_bytes, max_bytes)


class Provable(int):
    """How many bytes an object may have (`Backend.get_within`), where its bytes can prove by
    themselves that they are what its key says.

    Only such objects are taken from whom nobody trusts to keep them.

    Attributes:
        prove: makes of what was sent the bytes to take: empty when something is missing to tell,
            None when they are something else. Gets the bytes, and a function that asks who sent
            them for another object, up to a size.
    """

    prove: Callable[[bytes, Callable[[str, int], bytes | None]], bytes | None]

    def __new__(
        cls, most: int, prove: Callable[[bytes, Callable[[str, int], bytes | None]], bytes | None]
    ) -> Self:
        """Make one of a number of bytes."""
        made = super().__new__(cls, most)
        made.prove = prove
        return made


class Backend(ABC):
    """Bytes under keys.

    Two kinds of thing: *objects*, written once under a key that their content determines, and
    *refs*, small values that change by compare-and-set.  They do not share keys.

    Guarantees, for any number of threads and processes: a reader sees an object or ref whole, as
    one writer wrote it, or not at all; every call may be repeated; of two that swap one ref from
    the same value exactly one succeeds. Does not guarantee that bytes are undamaged: readers
    compare digests.

    Every method raises `InvalidKey` for a bad key, `BackendUnavailable`, `BackendFull` or
    `BackendDenied`.
    """

    #: Whether reading back what is stored is about as cheap as asking if it is there.
    reads_are_cheap: bool = False
    #: Whether changes are possible at all; False for a store that was opened for reading only.
    writable: bool = True
    #: Whether peers are asked, who are believed nothing: then it is worth while to ask by
    #: `Provable`.
    asks_peers: bool = False
    #: Whether every object that `get` and `get_within` return has been compared with the digest in
    #: its head; `Unread` has not.
    verified: bool = False

    @property
    def counters(self) -> tuple[TierCounters, ...]:
        """What each tier did so far, the nearest first; empty for a store that is not made of
        tiers.
        """
        return ()

    @abstractmethod
    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the objects that are there, by key; one of more than `OBJECT_LIMIT` bytes may come
        as `Unread`.
        """

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the objects that are there, each up to a size; a larger one, or what is no file,
        comes as `Unread`.

        Args:
            max_bytes: keys, and how large each may be.  Override it where a size can be asked for
                before the bytes.
        """
        return {
            key: within(value, max_bytes[key], key)
            for key, value in self.get(max_bytes.keys()).items()
        }

    @abstractmethod
    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        """Create objects; one that exists stays as it is.  Returns the keys that were created."""

    @abstractmethod
    def exists(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys that are there."""

    @abstractmethod
    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        """Remove objects; with `unmodified_since_s` only those that nobody touched after it, in one
        atomic step.

        Returns the keys that were removed.
        """

    @abstractmethod
    def touch(self, keys: Collection[str]) -> None:
        """Set the modification time of objects to now; absent ones and read-only stores are left
        alone.
        """

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        """Touch objects, then return the keys that are there: one exchange where that is less than
        two.
        """
        self.touch(keys)
        return self.exists(keys)

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield the objects whose key is `prefix` or begins with `prefix/`, in no order; all for an
        empty prefix.
        """

    @abstractmethod
    def read_ref(self, key: str) -> bytes | None:
        """Return the value of a ref, None when it is not set."""

    @abstractmethod
    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Set a ref if its value is `expected` (None: not set; as new value: remove).  True when it
        was.
        """

    @abstractmethod
    def list_refs(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys of refs that are set, by the same rule as `list`."""

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take the lease called `key` for `ttl_s` seconds; None while somebody else holds it.

        Raises:
            BackendDenied: this kind of store has no leases.
        """
        raise BackendDenied(f"{type(self).__name__} has no leases")

    def leases(self) -> Iterator[HeldLease]:
        """Yield the leases that are held, for people who ask who compiles what; none where the
        store does not know them.
        """
        return iter(())

    @abstractmethod
    def now_s(self) -> float:
        """Return the time on the clock that `Stat.modified_s` is on, in seconds."""

    def flush(self) -> None:  # noqa: B027  # a store without a disk has nothing to do
        """Make what was put so far survive a power failure, where the store has a disk."""

    def close(self) -> None:  # noqa: B027  # a store may hold nothing
        """Release what is held; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unchangeable(Backend):
    """A byte store of which every change is denied; marking objects as used does nothing."""

    writable = False

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        """Refuse; see `Backend`."""
        raise self._denied()

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        """Refuse; see `Backend`."""
        raise self._denied()

    def touch(self, keys: Collection[str]) -> None:
        """Leave them as they are; see `Backend`."""

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys that are there; see `Backend`."""
        return self.exists(keys)

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Refuse; see `Backend`."""
        raise self._denied()

    @abstractmethod
    def _denied(self) -> BackendDenied:
        """Return the error for who wants to change it."""


class Lease:
    """A right that was granted for a time; for efficiency, never for correctness.

    A holder that was frozen, and wakes after its expiry, finds that it lost the lease; another
    holder's is never touched.

    Args:
        change: prolongs it to so many seconds from now, or gives it back for None; False when it
            was lost before.
    """

    def __init__(self, change: Callable[[float | None], bool]) -> None:
        self._change = change

    def renew(self, ttl_s: float) -> bool:
        """Prolong it to `ttl_s` seconds from now; False when it was lost."""
        return self._change(ttl_s)

    def release(self) -> bool:
        """Give it back; False when it was lost before."""
        return self._change(None)


class OwnLock:
    """A lock for `with`, which a forked child gets anew: another thread could hold the parent's at
    the moment of the fork, and in the child nobody would release it.

    Args:
        forked: called in a child before its first use.
    """

    def __init__(self, forked: Callable[[], None] = lambda: None) -> None:
        self._lock, self._pid, self._forked = threading.Lock(), os.getpid(), forked

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._forked()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def within(value: bytes, max_bytes: int, what: str) -> bytes:
    """Return a value, as `Unread` when it is larger than it may be."""
    if len(value) <= max_bytes:
        return value
    return Unread.too_large(value, what, len(value), max_bytes)


def in_prefix(key: str, prefix: str) -> bool:
    """Tell whether `list(prefix)` includes `key`."""
    return not prefix or key == prefix or key.startswith(f"{prefix}/")
