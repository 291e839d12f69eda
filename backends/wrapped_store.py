# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the port says what each method does
"""`Wrapped`: a byte store around another one, for those that add something; `ReadOnly`: one that is
never changed, even where the system would permit it.

`bundler/store/store_urls.py` puts `ReadOnly` around a store where the URL or the caller asks for
that; `Guarded` (`breaker.py`) is the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from bundler.backends.backend_errors import BackendDenied
from bundler.backends.lease_holders import HeldLease
from bundler.backends.port import Backend, Stat

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


class ReadOnly(Wrapped):
    """Another byte store, of which every change is denied; marking objects as used does nothing."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.writable = self.asks_peers = False

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        raise self._denied()

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        raise self._denied()

    def touch(self, keys: Collection[str]) -> None:
        """Leave it as it is; see `Backend`."""

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        return self.exists(keys)

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        raise self._denied()

    @staticmethod
    def _denied() -> BackendDenied:
        return BackendDenied("it was opened for reading only")
