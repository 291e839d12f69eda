# SPDX-License-Identifier: Apache-2.0
"""Blobs of a pulled bundle, fetched from the store when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from bundler.backends.base import Backend
from bundler.errors import BundlerError, DigestMismatch, FormatError, LimitExceeded, NotFound
from bundler.format.digest import digest_text
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.store.errors_map import store_errors
from bundler.store.layout import BATCH_BYTES, BATCH_KEYS, Unit, split_unit, units_of, unseal

CACHED_BYTES = 32 * 1024 * 1024
DAMAGED = (DigestMismatch, FormatError)
T = TypeVar("T")
_log = logging.getLogger("bundler.store")


class StoreBlobs:
    """Reads units in batches and keeps the last ones decoded.

    A damaged unit is removed from the store, if that is permitted, so that the next push sends it again; reading it raises.
    Safe under threads.
    """

    def __init__(
        self, backend: Backend, name: str, content: Content, limits: Limits, *, read_only: bool = False
    ) -> None:
        self._backend, self._name, self._limits, self._read_only = backend, name, limits, read_only
        self.waits = not backend.reads_are_cheap
        self._units: dict[bytes, list[Unit]] = {}
        for unit in units_of(content):
            for digest, _ in unit.blobs:
                self._units.setdefault(digest, []).append(unit)
        # No lock: another thread could hold it at the moment of a fork.  Single dictionary operations are atomic.
        self._cache: dict[bytes, bytes] = {}
        self._damaged: dict[str, BundlerError] = {}

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises `NotFound`, `DigestMismatch`, `FormatError`, `StoreUnavailable`."""
        cached = self._cache.get(digest)
        if cached is not None:
            return cached
        failures: list[BundlerError] = []
        for unit in self._units.get(digest, []):
            try:
                return self._fetch(unit)[digest]
            except (NotFound, *DAMAGED) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        raise NotFound(f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest))

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Fetch the units of these blobs in few round trips; what is missing or damaged shows when it is read."""
        wanted: dict[str, Unit] = {}
        # A blob that is in several units comes with one that is fetched anyway, if there is one.
        for units in sorted((self._units.get(d, []) for d in digests if d not in self._cache), key=len):
            if units and not any(unit.key in wanted for unit in units):
                wanted[units[0].key] = units[0]
        for batch in batches(list(wanted.values())):
            with store_errors(self._name):
                found = self._backend.get([unit.key for unit in batch])
            for key, value in found.items():
                try:
                    self._open(wanted[key], value)
                except DAMAGED as error:
                    self._damaged[key] = error  # reading the blob raises it

    def close(self) -> None:
        """Forget what was decoded; the store stays open."""
        self._cache.clear()

    def _fetch(self, unit: Unit) -> dict[bytes, bytes]:
        damage = self._damaged.pop(unit.key, None)
        if damage is not None:
            raise damage
        with store_errors(self._name):
            value = self._backend.get([unit.key]).get(unit.key)
        if value is None:
            raise NotFound(f"{self._name}: {unit.key} is missing; push the bundle again", key=unit.key)
        return self._open(unit, value)

    def _open(self, unit: Unit, value: bytes) -> dict[bytes, bytes]:
        def split(value: bytes) -> dict[bytes, bytes]:
            return split_unit(unseal(value, unit.key, unit.size, self._limits), unit)

        removable = () if self._read_only else DAMAGED
        blobs = checked(self._backend, self._name, unit.key, value, split, removable)
        self._cache.update(blobs)
        kept = sum(map(len, list(self._cache.values())))
        for oldest in list(self._cache):
            if kept <= CACHED_BYTES:
                break
            kept -= len(self._cache.pop(oldest, b""))
        return blobs


def checked(
    backend: Backend,
    name: str,
    key: str,
    value: bytes,
    check: Callable[[bytes], T],
    removable: tuple[type[BundlerError], ...] = DAMAGED,
) -> T:
    """Return what `check` makes of a stored value.

    A damaged one is asked for once more.  If it was damaged on its way here, the second is right; what the store gives twice
    the same is removed, and the next push sends it again.

    Args:
        backend, name: the store.
        key, value: the object as the store gave it.
        check: raises `DigestMismatch` or `FormatError` for a damaged value.
        removable: for which of these it is removed; what is over a limit of ours stays.
    """
    try:
        return check(value)
    except DAMAGED as error:
        with store_errors(name):
            again = backend.get([key]).get(key)
        if again is not None and again != value:
            return check(again)
        if isinstance(error, removable) and not isinstance(error, LimitExceeded):
            _log.warning("%s: %s is damaged; it is removed, and the next push sends it again: %s", name, key, error)
            _quarantine(backend, name, key)
        raise


def _quarantine(backend: Backend, name: str, key: str) -> None:
    """Remove a damaged object; where that is not permitted it stays, and is damaged for the next reader too."""
    try:
        with store_errors(name):
            backend.delete([key])
    except BundlerError as error:
        _log.warning("%s cannot be removed: %s", key, error)


def batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Split units so that one call carries at most `BATCH_KEYS` of them and about `BATCH_BYTES`."""
    batch: list[Unit] = []
    size = 0
    for unit in units:
        if batch and (len(batch) >= BATCH_KEYS or size + unit.size > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += unit.size
    if batch:
        yield batch
