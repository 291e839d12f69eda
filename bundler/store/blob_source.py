# SPDX-License-Identifier: Apache-2.0
"""`StoreBlobs`: the blobs of a pulled bundle, fetched from the store when they are read.

`BundleStore.pull` and `KernelRecords.look_up` make one for each bundle; `unit_batches` splits units
into calls of the byte store, and `unit_payload` opens a stored unit, also for `Maintenance`.  Units
that were fetched ahead are decoded as they are read (`unit_decoding.py`). Their blobs are compared
with their digests then, or, in a restore, where they are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from bundler.backends.batches import batches
from bundler.backends.port import Backend
from bundler.errors import BundlerError, NotFound
from bundler.format.bundle import BlobSource
from bundler.format.digest import digest_text
from bundler.format.frames import FrameBuffers
from bundler.format.limits import Limits
from bundler.store import object_proofs, store_layout
from bundler.store.bundle_units import BundleUnits
from bundler.store.dictionaries import Dictionaries
from bundler.store.pull_marks import Marks
from bundler.store.store_failures import DAMAGED, checked, quarantine, store_errors
from bundler.store.store_layout import (
    BATCH_BYTES,
    BATCH_KEYS,
    Hint,
    Unit,
    blobs_of,
    check_seal,
    decompress,
    dictionary_key,
    dictionary_of,
    split_unit,
)
from bundler.store.unit_decoding import FetchedUnits

# A run of kernels that is written, and one that is fetched meanwhile
# (bundler/lifecycle/restore_plan.py).
CACHED_BYTES = 40 * 1024 * 1024
# Marking begins when so many units that were fetched, or half of them, were read: until then nobody
# writes, and that is to come first.
UNMARKED_UNITS = 16
# What one call may bring when each of its units is as large as the largest may be.
LIED_BYTES = 8 * BATCH_BYTES


class StoreBlobs(BlobSource):
    """Reads units in batches and keeps the last ones decoded.

    A damaged unit, or one whose dictionary is gone, is removed from the store, if that is
    permitted, so that the next push sends it again; reading it raises.  Safe under threads.

    Args:
        backend, name: the store.
        units: of the bundle that the blobs are of.
        limits: bounds on what is read.
        hints: dictionaries that its units are likely to need.
        dictionaries: where to look for them, when somebody has some already.
        read_only: leave the store as it is.
        marks: marks what was pulled as in use, beside what is done with the first units; None where
            that was done.
        buffers: memory for decoded units, where somebody has some from earlier ones.
    """

    verified = True
    verifies_stored = False

    def __init__(
        self,
        backend: Backend,
        name: str,
        units: Iterable[Unit] | BundleUnits,
        limits: Limits,
        *,
        hints: Sequence[Hint] = (),
        dictionaries: Dictionaries | None = None,
        read_only: bool = False,
        marks: Marks | None = None,
        buffers: FrameBuffers | None = None,
    ) -> None:
        self._backend, self._name, self._limits, self._read_only = backend, name, limits, read_only
        self._marks, self._unread, self._fetching = marks, UNMARKED_UNITS, False
        self.waits = not backend.reads_are_cheap
        self._hints = list(hints)
        self._dictionaries = dictionaries or Dictionaries(backend, name, read_only=read_only)
        self._fetched = FetchedUnits(self._dictionaries, verified=backend.verified, buffers=buffers)
        # Of the launch sets until another blob is asked for.
        self._lazy_units = units if isinstance(units, BundleUnits) else None
        self._units = _by_digest(units.launch if isinstance(units, BundleUnits) else list(units))
        # No lock: another thread could hold it at the moment of a fork.  Single dictionary
        # operations are atomic.
        self._cache: dict[bytes, memoryview] = {}
        # Decoded, and not compared with their digests yet; whoever compares one moves it.
        self._uncompared: dict[bytes, memoryview] = {}
        self._damaged: dict[str, BundlerError] = {}
        # At most so much is kept; counting it each time would take longer than to fetch a few
        # kernels from a directory.
        self._most_bytes = 0

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> memoryview:
        """Return the verified bytes of a blob where they lie among the units that came with it,
        which stay in memory as long.

        Raises:
            NotFound: the bundle has no such blob, or the store has lost it.
            DigestMismatch, FormatError: the store's bytes are damaged.
            StoreUnavailable: they cannot be had now.
        """
        found = self._cache.get(digest)
        if found is None:
            found = self._compared(digest)
        if found is not None:
            return found
        failures: list[BundlerError] = []
        self._know_every_unit()  # one that was not thought of may be whole
        for unit in self._units.get(digest, []):
            try:
                return self._fetch(unit)[digest]
            except (NotFound, *DAMAGED) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        raise NotFound(f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest))

    def view_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the verified bytes of several blobs; raises as `view_blob`."""
        return [self.view_blob(digest) for digest in digests]

    def stored_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes of several blobs, which the caller compares with their digests; raises
        as `view_blob`.
        """
        found: list[memoryview] = []
        for digest in digests:
            data = self._uncompared.get(digest)
            if data is None:
                data = self._decoded(digest)
            found.append(self._told_again(digest) if data is None else data)
        return found

    def _told_again(self, digest: bytes) -> memoryview:
        """Return a blob as `view_blob`; what it raises, the next who reads the blob gets too: of
        several, each is asked for alone then.
        """
        try:
            return self.view_blob(digest)
        except (NotFound, *DAMAGED) as error:
            for unit in self._units.get(digest, ())[:1]:
                self._damaged[unit.key] = error
            raise

    def _decoded(self, digest: bytes) -> memoryview | None:
        """Return a blob of a unit that was fetched, as it was decoded; None where there is no such
        unit.
        """
        for unit in self._units.get(digest, ()):
            taken = self._fetched.take(unit.key)
            if taken is None:
                continue
            value, payload = taken
            self._unread -= 1
            if self._unread < 0 and not self._fetching and self._marks is not None:
                self._marks.begin()
            if payload is not None:
                blobs = blobs_of(payload, unit)
                self._uncompared.update(blobs)
                return blobs[digest]
            self._open_alone(unit, value)
        return None

    def _compared(self, digest: bytes) -> memoryview | None:
        """Return a fetched blob if it and what came in its unit is what its digest says, and keep
        all that; None when it has to be fetched.
        """
        data = self._uncompared.get(digest)
        if data is not None and hashlib.sha256(data).digest() == digest:
            self._cache[digest] = data
            self._uncompared.pop(digest, None)
            return data
        for unit in self._units.get(digest, ()):
            taken = self._fetched.take(unit.key)
            if taken is not None:
                value, payload = taken
                blobs = {} if payload is None else blobs_of(payload, unit)
                if blobs and all(
                    hashlib.sha256(data).digest() == name for name, data in blobs.items()
                ):
                    self._cache.update(blobs)
                else:
                    self._open_alone(unit, value)
        return self._cache.get(digest)

    def _open_alone(self, unit: Unit, value: bytes) -> None:
        """Open a unit that is likely to be damaged, or lacks its dictionary, and note what is wrong
        with it.
        """
        try:
            self._cache.update(self._open(unit, value))
        except (NotFound, *DAMAGED) as error:
            self._damaged[unit.key] = error  # reading the blob raises it

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Fetch the units of these blobs in few round trips; what is missing or damaged shows when
        it is read.
        """
        wanted = self._lacking(digests)
        if not wanted:
            return
        if self._marks is not None:
            # they need the connection, and another one would take longer to make
            self._marks.wait()
        self._fetching, self._unread = True, min(self._unread, len(wanted) // 2)
        try:
            self._fetch_all(wanted)
        finally:
            self._fetching = False

    def _fetch_all(self, wanted: Mapping[str, Unit]) -> None:
        for batch in unit_batches(wanted.values()):
            hinted = self._hinted({unit.family for unit in batch})
            with store_errors(self._name):
                found = self._backend.get_within(
                    unit_bounds(self._backend, batch, self._limits, hinted)
                )
            self._dictionaries.take({key: found.pop(key) for key in hinted if key in found})
            lost = self._learn(found.values())
            for key in (
                [key for key, value in found.items() if dictionary_of(value) in lost]
                if lost
                else ()
            ):
                self._open_alone(wanted[key], found.pop(key))
            self._fetched.add(batch, found)
            self._trim(sum([unit.size for unit in batch]))

    def _lacking(self, digests: Collection[bytes]) -> dict[str, Unit]:
        """Return the units that have to be fetched for some blobs, by key."""
        cache, uncompared = self._cache, self._uncompared
        if self._lazy_units is not None and not all(digest in self._units for digest in digests):
            self._know_every_unit()
        wanted: dict[str, Unit] = {}
        several: list[Sequence[Unit]] = []
        for digest in digests:
            units = (
                self._units.get(digest, ())
                if digest not in cache and digest not in uncompared
                else ()
            )
            if len(units) == 1:
                wanted[units[0].key] = units[0]
            elif units:
                several.append(units)
        if wanted and self._fetched:
            wanted = {key: unit for key, unit in wanted.items() if key not in self._fetched}
        # A blob that is in several units comes with one that is fetched anyway, if there is one.
        for units in sorted(several, key=len):
            if not any(unit.key in wanted or unit.key in self._fetched for unit in units):
                wanted[units[0].key] = units[0]
        return wanted

    def _know_every_unit(self) -> None:
        units = self._lazy_units
        if units is not None:
            self._units = _by_digest(units.all())
            self._lazy_units = None

    def _hinted(self, families: Collection[str]) -> list[str]:
        """Return the keys of dictionaries that these units are likely to need, each once."""
        chosen = [hint for hint in self._hints if hint[0] in families]
        self._hints = [hint for hint in self._hints if hint not in chosen]
        return [
            dictionary_key(digest)
            for digest in self._dictionaries.unknown(digest for _, digest in chosen)
        ]

    def _learn(self, values: Collection[bytes]) -> list[bytes]:
        return learn_dictionaries(
            self._backend, self._dictionaries, values, read_only=self._read_only
        )

    def close(self) -> None:
        """Forget what was decoded; the store stays open."""
        self._cache.clear()
        self._uncompared.clear()
        self._fetched.clear()
        if self._marks is not None:
            self._marks.finish()

    def _fetch(self, unit: Unit) -> dict[bytes, memoryview]:
        damage = self._damaged.pop(unit.key, None)
        if damage is not None:
            raise damage
        with store_errors(self._name):
            value = self._backend.get_within(unit_bounds(self._backend, [unit], self._limits)).get(
                unit.key
            )
        if value is None:
            raise missing_unit(self._name, unit)
        self._learn([value])
        blobs = self._open(unit, value)
        self._cache.update(blobs)
        self._trim(unit.size)
        return blobs

    def _open(self, unit: Unit, value: bytes) -> dict[bytes, memoryview]:
        return open_unit(
            self._backend,
            self._name,
            unit,
            value,
            self._limits,
            self._dictionaries,
            read_only=self._read_only,
        )

    def _trim(self, more_bytes: int) -> None:
        """Let go of what came first, when so much more has come that what is kept has to be counted
        anew.
        """
        self._most_bytes += more_bytes
        if self._most_bytes <= CACHED_BYTES + CACHED_BYTES // 10:
            return
        waiting = self._fetched.sizes()
        kept = sum([size for _, size in waiting])
        kept += sum(
            [
                len(data)
                for cache in (self._cache, self._uncompared)
                for data in list(cache.values())
            ]
        )
        for cache in (self._cache, self._uncompared):
            for oldest in list(cache) if kept > CACHED_BYTES else ():
                kept -= len(cache.pop(oldest, b"")) if kept > CACHED_BYTES else 0
        for key, size in waiting:
            if kept > CACHED_BYTES and self._fetched.drop(key):
                kept -= size
        self._most_bytes = kept


def unit_bounds(
    backend: Backend, units: Collection[Unit], limits: Limits, dictionaries: Collection[str] = ()
) -> dict[str, int]:
    """Return how large units and dictionaries may be, with what proves it where somebody is asked
    who is not trusted.
    """
    if backend.asks_peers:
        return object_proofs.of_dictionaries(dictionaries) | object_proofs.of_units(units, limits)
    return store_layout.bounds_of_keys(dictionaries) | store_layout.bounds_of_units(units)


def learn_dictionaries(
    backend: Backend,
    dictionaries: Dictionaries,
    values: Iterable[bytes],
    *,
    read_only: bool = False,
) -> list[bytes]:
    """Fetch the dictionaries of some units that nobody told us of, and mark them as in use; returns
    those that are not to be had.
    """
    needed = {digest for digest in map(dictionary_of, values) if digest is not None}
    new = dictionaries.unknown(needed) if needed else []
    if not new:
        return []
    dictionaries.fetch(new)
    if not read_only:
        with contextlib.suppress(BundlerError), store_errors(dictionaries.name):
            backend.touch([dictionary_key(digest) for digest in new])
    return dictionaries.unknown(new)


def missing_unit(name: str, unit: Unit) -> NotFound:
    """Return the error for a unit that a store lacks."""
    return NotFound(f"{name}: {unit.key} is missing; push the bundle again", key=unit.key)


def open_unit(
    backend: Backend,
    name: str,
    unit: Unit,
    value: bytes,
    limits: Limits,
    dictionaries: Dictionaries,
    *,
    read_only: bool = False,
) -> dict[bytes, memoryview]:
    """Return the verified blobs of a stored unit; one that is damaged, or whose dictionary is gone,
    is removed, unless the store is to be left as it is.

    Raises:
        DigestMismatch, FormatError: it is damaged.
        NotFound: its dictionary is not to be had.
    """

    def split(value: bytes) -> dict[bytes, memoryview]:
        payload = unit_payload(
            value, unit.key, unit.size, limits, dictionaries, name, verified=backend.verified
        )
        return split_unit(payload, unit)

    try:
        return checked(backend, name, unit.key, value, split, () if read_only else DAMAGED)
    except NotFound:
        digest = dictionary_of(value)
        if digest is not None and not read_only:
            # Nowhere, and not only kept from us by a tier that is silent.
            with contextlib.suppress(BundlerError), store_errors(name):
                if not backend.exists([dictionary_key(digest)]):
                    quarantine(backend, name, unit.key)
        raise


def unit_payload(
    value: bytes,
    key: str,
    size: int | None,
    limits: Limits,
    dictionaries: Dictionaries,
    name: str,
    *,
    verified: bool = False,
) -> bytes:
    """Return the payload of a unit.

    Raises as `check_seal` and `decompress`, and `NotFound` when the dictionary that it needs is
    missing.
    """
    frame = check_seal(
        value, key, size, verified=verified
    )  # before the store is asked for what a damaged one names
    digest = dictionary_of(value)
    if digest is None:
        return decompress(frame, key, size, limits)
    dictionary = dictionaries.get(digest)
    if dictionary is None:
        raise NotFound(
            f"{name}: {key} needs the dictionary {dictionary_key(digest)}, which is missing; push"
            " the bundle again",
            key=key,
        )
    return decompress(frame, key, size, limits, dictionary.data)


def unit_batches(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Split units so that one call carries at most `BATCH_KEYS` of them and about `BATCH_BYTES`.

    Sorted by size, since a damaged store may give as much for each unit as the largest one of a
    batch may have.
    """
    ordered = sorted(units, key=_size)
    largest = ordered[-1].size if ordered else 0
    if len(ordered) <= BATCH_KEYS and len(ordered) * largest <= BATCH_BYTES:
        return iter([ordered] if ordered else [])
    return batches(ordered, BATCH_KEYS, BATCH_BYTES, _size, most_if_alike=LIED_BYTES)


_size = operator.attrgetter("size")


def _by_digest(units: Sequence[Unit]) -> Mapping[bytes, Sequence[Unit]]:
    """Return the units that have each blob: of nearly all blobs one."""
    alone = {digest: only for unit in units for only in ((unit,),) for digest, _ in unit.blobs}
    if len(alone) == sum([len(unit.blobs) for unit in units]):
        return alone
    found: dict[bytes, list[Unit]] = {}
    for unit in units:
        for digest, _ in unit.blobs:
            found.setdefault(digest, []).append(unit)
    return found
