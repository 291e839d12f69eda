# SPDX-License-Identifier: Apache-2.0
"""`MemoryBackend`: a byte store in this process's memory, for tests and for a tier that needs no
disk.

`bundler/store/store_urls.py` opens it for `memory://` URLs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from bundler.backends.keys import check_key, check_prefix
from bundler.backends.port import (
    Backend,
    HeldLease,
    Lease,
    OwnLock,
    Stat,
    held_lease,
    in_prefix,
    new_token,
)


class MemoryBackend(Backend):
    """Objects, refs and leases in dictionaries under one lock.  A forked child has a copy of its
    own.
    """

    reads_are_cheap = True

    def __init__(self) -> None:
        self._lock = OwnLock()
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._refs: dict[str, bytes] = {}
        self._leases: dict[str, tuple[str, float]] = {}

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        with self._lock:
            return {
                key: self._objects[key][0] for key in map(check_key, keys) if key in self._objects
            }

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        with self._lock:
            created = [key for key in map(check_key, items) if key not in self._objects]
            self._objects.update({key: (bytes(items[key]), time.time()) for key in created})
            return frozenset(created)

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        with self._lock:
            return frozenset(key for key in map(check_key, keys) if key in self._objects)

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        wanted = frozenset(map(check_key, keys))
        with self._lock:
            gone = frozenset(
                key
                for key in wanted & self._objects.keys()
                if unmodified_since_s is None or self._objects[key][1] <= unmodified_since_s
            )
            for key in gone:
                del self._objects[key]
        return gone

    def touch(self, keys: Collection[str]) -> None:
        with self._lock:
            for key in map(check_key, keys):
                if key in self._objects:
                    self._objects[key] = (self._objects[key][0], time.time())

    def list(self, prefix: str = "") -> Iterator[Stat]:
        check_prefix(prefix)
        with self._lock:
            found = [
                Stat(key, len(data), at)
                for key, (data, at) in self._objects.items()
                if in_prefix(key, prefix)
            ]
        return iter(found)

    def read_ref(self, key: str) -> bytes | None:
        with self._lock:
            return self._refs.get(check_key(key))

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        with self._lock:
            if self._refs.get(check_key(key)) != expected:
                return False
            if value is None:
                self._refs.pop(key, None)
            else:
                self._refs[key] = value
            return True

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        with self._lock:
            return iter([key for key in self._refs if in_prefix(key, prefix)])

    def now_s(self) -> float:
        return time.time()

    def leases(self) -> Iterator[HeldLease]:
        now_s = time.monotonic()
        with self._lock:
            held = [
                (token, until_s - now_s, key)
                for key, (token, until_s) in self._leases.items()
                if until_s > now_s
            ]
        return (held_lease(*one) for one in held)

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take a lease; see `Backend`."""
        token = new_token()
        with self._lock:
            holder = self._leases.get(check_key(key))
            if holder is not None and holder[1] > time.monotonic():
                return None
            self._leases[key] = (token, time.monotonic() + ttl_s)
        return Lease(partial(self._renew, key, token))

    def _renew(self, key: str, token: str, ttl_s: float | None) -> bool:
        with self._lock:
            holder = self._leases.get(key)
            if holder is None or holder[0] != token or holder[1] <= time.monotonic():
                return False
            if ttl_s is None:
                del self._leases[key]
            else:
                self._leases[key] = (token, time.monotonic() + ttl_s)
            return True
