# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 -- the port says what each method does
"""`ReadOnly`: another byte store that is never changed, even where the system would permit it.

`bundler/store/store_urls.py` wraps a store in it where the URL or the caller asks for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from bundler.backends.backend_errors import BackendDenied
from bundler.backends.lease_holders import HeldLease
from bundler.backends.port import Backend, Stat


class ReadOnly(Backend):
    """Another byte store, of which every change is denied; marking objects as used does nothing.

    Safe under threads and forks where the inner store is.
    """

    writable = False

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.reads_are_cheap, self.verified = inner.reads_are_cheap, inner.verified

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self.inner.get(keys)

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        return self.inner.get_within(max_bytes)

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        raise self._denied()

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        return self.inner.exists(keys)

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        raise self._denied()

    def touch(self, keys: Collection[str]) -> None:
        """Leave it as it is; see `Backend`."""

    def list(self, prefix: str = "") -> Iterator[Stat]:
        return self.inner.list(prefix)

    def read_ref(self, key: str) -> bytes | None:
        return self.inner.read_ref(key)

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        raise self._denied()

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        return self.inner.list_refs(prefix)

    def leases(self) -> Iterator[HeldLease]:
        return self.inner.leases()

    def now_s(self) -> float:
        return self.inner.now_s()

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return f"<ReadOnly {self.inner!r}>"

    @staticmethod
    def _denied() -> BackendDenied:
        return BackendDenied("it was opened for reading only")
