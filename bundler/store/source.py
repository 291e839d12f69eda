# SPDX-License-Identifier: Apache-2.0
"""Blobs of a pulled bundle, fetched from the store when they are read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence

from bundler.backends.base import Backend
from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format.digest import digest_text
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.store.errors_map import store_errors
from bundler.store.layout import BATCH_BYTES, BATCH_KEYS, Unit, split_unit, units_of, unseal

CACHED_BYTES = 32 * 1024 * 1024
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
        self._units: dict[bytes, Unit] = {}
        for unit in units_of(content):
            for digest, _ in unit.blobs:
                self._units.setdefault(digest, unit)
        self._lock = threading.Lock()
        self._cache: dict[bytes, bytes] = {}

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises `NotFound`, `DigestMismatch`, `FormatError`, `StoreUnavailable`."""
        cached = self._cache.get(digest)
        if cached is not None:
            return cached
        unit = self._units.get(digest)
        if unit is None:
            raise NotFound(f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest))
        with store_errors(self._name):
            value = self._backend.get([unit.key]).get(unit.key)
        if value is None:
            raise NotFound(f"{self._name}: {unit.key} is missing; push the bundle again", key=unit.key)
        return self._open(unit, value)[digest]

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Fetch the units of these blobs in few round trips; what is missing or damaged shows when it is read."""
        wanted = {unit.key: unit for d in digests if d not in self._cache and (unit := self._units.get(d)) is not None}
        for batch in batches(list(wanted.values())):
            with store_errors(self._name):
                found = self._backend.get([unit.key for unit in batch])
            for key, value in found.items():
                try:
                    self._open(wanted[key], value)
                except (DigestMismatch, FormatError) as error:
                    _log.info("%s", error)  # reading the blob raises it

    def close(self) -> None:
        """Forget what was decoded; the store stays open."""
        with self._lock:
            self._cache.clear()

    def _open(self, unit: Unit, value: bytes) -> dict[bytes, bytes]:
        try:
            blobs = split_unit(unseal(value, unit.key, unit.size, self._limits), unit)
        except (DigestMismatch, FormatError) as error:
            if not self._read_only:
                _log.warning("%s: %s is damaged; the next push sends it again: %s", self._name, unit.key, error)
                quarantine(self._backend, self._name, unit.key)
            raise
        with self._lock:
            self._cache.update(blobs)
            kept = sum(map(len, self._cache.values()))
            for oldest in list(self._cache):
                if kept <= CACHED_BYTES:
                    break
                kept -= len(self._cache.pop(oldest))
        return blobs


def quarantine(backend: Backend, name: str, key: str) -> None:
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
