# SPDX-License-Identifier: Apache-2.0
"""The port: what every byte store offers, and what some offer besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable


@dataclass(frozen=True)
class Stat:
    """One stored object; `modified_s` is on the store's own clock (`Backend.now_s`)."""

    key: str
    size_bytes: int
    modified_s: float


class Backend(ABC):
    """Bytes under keys.

    Two kinds of thing: *objects*, written once under a key that their content determines, and *refs*, small values that
    change by compare-and-set.  They do not share keys.

    Guarantees, for any number of threads and processes: a reader sees an object or ref whole, as one writer wrote it, or
    not at all; every call may be repeated; of two that swap one ref from the same value exactly one succeeds.
    Does not guarantee that bytes are undamaged: who reads checks digests.

    Every method raises `InvalidKey` for a bad key, `BackendUnavailable`, `BackendFull` or `BackendDenied`.
    """

    #: Whether reading back what is stored is about as cheap as asking if it is there.
    reads_are_cheap: bool = False

    @abstractmethod
    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the objects that are there, by key."""

    @abstractmethod
    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        """Create objects; one that exists stays as it is.  Returns the keys that were created."""

    @abstractmethod
    def exists(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys that are there."""

    @abstractmethod
    def delete(self, keys: Collection[str], unmodified_since_s: float | None = None) -> frozenset[str]:
        """Remove objects; with `unmodified_since_s` only those that nobody touched after it, in one step with the look.

        Returns the keys that were removed.
        """

    @abstractmethod
    def touch(self, keys: Collection[str]) -> None:
        """Set the modification time of objects to now; absent ones and read-only stores are left alone."""

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        """Touch objects, then return the keys that are there: one exchange where that is less than two."""
        self.touch(keys)
        return self.exists(keys)

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield the objects whose key is `prefix` or begins with `prefix/`, in no order; all for an empty prefix."""

    @abstractmethod
    def read_ref(self, key: str) -> bytes | None:
        """Return the value of a ref, None when it is not set."""

    @abstractmethod
    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Set a ref if its value is `expected` (None: not set; as new value: remove).  True when it was."""

    @abstractmethod
    def list_refs(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys of refs that are set, by the same rule as `list`."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the time on the clock that `Stat.modified_s` is on, in seconds."""

    def flush(self) -> None:  # noqa: B027  # a store without a disk has nothing to do
        """Make what was put so far survive a power failure, where that means something."""

    def close(self) -> None:  # noqa: B027  # a store may hold nothing
        """Release what is held; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Lease(Protocol):
    """A right that was granted for a time; for efficiency, never for correctness."""

    def renew(self, ttl_s: float) -> bool:
        """Prolong it to `ttl_s` seconds from now; False when it was lost."""

    def release(self) -> bool:
        """Give it back; False when it was lost before.  Another holder's lease is never touched."""


@runtime_checkable
class Leasing(Protocol):
    """An ability that a backend may have."""

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take the lease called `key` for `ttl_s` seconds; None while somebody else holds it."""


def in_prefix(key: str, prefix: str) -> bool:
    """Tell whether `list(prefix)` includes `key`."""
    return not prefix or key == prefix or key.startswith(f"{prefix}/")
