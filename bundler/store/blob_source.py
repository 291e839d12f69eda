# SPDX-License-Identifier: Apache-2.0
"""`StoreBlobs`: the blobs of a pulled bundle, fetched from the store when they are read.

`BundleStore.pull` makes one for each bundle, whose units `BundleUnits` lists; `unit_batches` splits
units into calls of the byte store, and `open_unit` opens one alone, also for `KernelRecords`.  A
restore fetches hundreds of units at once: `FetchedUnits` decodes each when the first of its blobs
is read, so that writing begins with the first kernel.  Blobs are compared with their digests then,
or, in a restore, where they are written.

`UsageMarks` marks what was pulled as in use, at once or while it is placed; `prune` spares what is
marked.  In a restore `StoreBlobs` begins it when the first units were read: from then on kernels
are written, and nobody waits for the server.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import zstandard

from bundler.backends.batches import batches
from bundler.backends.port import Backend
from bundler.errors import BundlerError, NotFound
from bundler.format.bundle import BlobSource, Keep
from bundler.format.digest import digest_text
from bundler.format.entries import Kernel
from bundler.format.frames import FrameBuffers, frame_bytes
from bundler.format.lazy_kernel import blobs_of_files
from bundler.format.limits import KIB, Limits
from bundler.format.manifest import Content, Observation
from bundler.package_loggers import logger
from bundler.store import object_proofs, store_layout
from bundler.store.dictionaries import Dictionaries
from bundler.store.store_failures import DAMAGED, NamedStore, checked, quarantine
from bundler.store.store_layout import (
    BATCH_BYTES,
    BATCH_KEYS,
    Hint,
    Unit,
    blobs_of,
    checked_frame,
    decompress,
    decompressor,
    dictionary_key,
    dictionary_of,
    frame_of,
    split_unit,
    units_of,
)

# One fetch is decoded while the next arrives, and kernels of the one before are still being read.
_FETCHES_IN_USE = 3
# Decoded into memory that was used a moment before, and copied from there: a stream, which needs no
# copy, takes longer to set up.
_COPIED_BYTES = 64 * KIB
# A run of kernels that is written, and one that is fetched meanwhile
# (bundler/lifecycle/restore_plan.py).
CACHED_BYTES = 40 * 1024 * 1024
# Marking begins when so many units that were fetched, or half of them, were read: until then nobody
# writes, and that is to come first.
UNMARKED_UNITS = 16
# What one call may bring when each of its units is as large as the largest may be.
LIED_BYTES = 8 * BATCH_BYTES


class BundleUnits:
    """The units of one bundle.

    Safe under threads, without a lock, which another thread could hold at the moment of a fork: two
    may make the same units.

    Args:
        content: of the bundle.

    Attributes:
        launch: those of the launch sets of its kernels.
    """

    def __init__(self, content: Content) -> None:
        self._content = content
        self._all: Sequence[Unit] | None = None
        # Thousands have few targets, each of them one object, which its kernels keep: so no other
        # one has its `id`.
        kernels = content.kernels
        targets = {id(kernel.target): kernel.target for kernel in kernels}
        families = {known: f"{target}/launch" for known, target in targets.items()}
        self.launch: Sequence[Unit] = [
            Unit(tuple(sorted({*blobs_of_files(kernel, "launch")})), families[id(kernel.target)])
            for kernel in kernels
        ]

    def all(self) -> Sequence[Unit]:
        """Return all of them."""
        if self._all is None:
            self._all = [*self.launch, *units_of(self._content, launch=False)]
        return self._all


class FetchedUnits:
    """Units by key, with what the store gave for each, in the order in which they came.

    Safe under threads, without locks: whoever takes a unit out is alone with it.

    Args:
        dictionaries: where to look for those that were fetched.
        verified: whether values come compared with the digest in their head.
    """

    def __init__(self, dictionaries: Dictionaries, *, verified: bool) -> None:
        self._dictionaries, self._verified = dictionaries, verified
        self._waiting: dict[str, tuple[Unit, bytes, memoryview]] = {}
        self._buffers = FrameBuffers(_FETCHES_IN_USE)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def add(self, units: Iterable[Unit], values: Mapping[str, bytes]) -> None:
        """Add those of some units that the store gave."""
        found = [unit for unit in units if unit.key in values]
        # Pages of it take memory as they are written, so a value that is damaged costs none.
        size = sum([unit.size for unit in found])
        room, start = self._buffers.take(size), 0
        for unit in found:
            end = start + unit.size
            self._waiting[unit.key] = unit, values[unit.key], room[start:end]
            start = end

    def take(self, key: str) -> tuple[bytes, memoryview | None] | None:
        """Take a unit out; returns its value, and its payload of the right size, or None where it
        has to be opened by who can say why.

        No blob is compared with its digest.  None: the unit is not here.
        """
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return None
        unit, value, room = waiting
        return value, room.toreadonly() if self._is_decoded(unit, value, room) else None

    def drop(self, key: str) -> bool:
        """Forget a unit; True when it was here."""
        return self._waiting.pop(key, None) is not None

    def sizes(self) -> list[tuple[str, int]]:
        """Return the key of each unit and the size of its payload, the oldest first."""
        return [(key, unit.size) for key, (unit, _, _) in list(self._waiting.items())]

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._buffers.clear()

    def _is_decoded(self, unit: Unit, value: bytes, room: memoryview) -> bool:
        """Decode a value into the room that its payload has; tell whether it filled it."""
        digest, frame = frame_of(value)
        dictionary = None if digest is None else self._dictionaries.known(digest)
        if dictionary is None and digest is not None:
            return False
        try:
            if not self._verified or not frame:
                checked_frame(value, unit.key, unit.size)
            if zstandard.frame_content_size(frame) != unit.size or not unit.size:
                return False
            decoder = decompressor(None if dictionary is None else dictionary.data)
            if unit.size <= _COPIED_BYTES:
                room[:] = decoder.decompress(
                    frame, max_output_size=unit.size, allow_extra_data=False
                )
                return True
            with decoder.stream_reader(frame) as reader:
                # The decoder compares the checksum when it is asked for more than there is, and
                # does not tell what follows the frame.
                return (
                    reader.readinto(room) == unit.size
                    and not reader.read(1)
                    and frame_bytes(frame) == len(frame)
                )
        except (*DAMAGED, zstandard.ZstdError):
            return False


class StoreBlobs(BlobSource):
    """Reads units in batches and keeps the last ones decoded.

    A damaged unit, or one whose dictionary is gone, is removed from the store, if that is
    permitted, so that the next push sends it again; reading it raises.  Safe under threads.

    Args:
        store: the store.
        units: of the bundle that the blobs are of.
        limits: bounds on what is read.
        hints: dictionaries that its units are likely to need.
        marks: marks what was pulled as in use, beside what is done with the first units; None where
            that was done.
    """

    verified = True
    verifies_stored = False

    def __init__(
        self,
        store: NamedStore,
        units: Iterable[Unit] | BundleUnits,
        limits: Limits,
        *,
        hints: Sequence[Hint] = (),
        marks: UsageMarks | None = None,
    ) -> None:
        self._backend, self._limits = store, limits
        self._marks, self._unread, self._fetching = marks, UNMARKED_UNITS, False
        self.waits = not store.reads_are_cheap
        self._hints = list(hints)
        self._dictionaries = Dictionaries(store)
        self._fetched = FetchedUnits(self._dictionaries, verified=store.verified)
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
            found = self._backend.get_within(
                unit_bounds(self._backend, batch, self._limits, hinted)
            )
            self._dictionaries.take({key: found.pop(key) for key in hinted if key in found})
            lost = learn_dictionaries(found.values(), self._dictionaries)
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
        found = self._backend.get_within(unit_bounds(self._backend, [unit], self._limits))
        learn_dictionaries(found.values(), self._dictionaries)
        blobs = self._open(unit, found.get(unit.key))
        self._cache.update(blobs)
        self._trim(unit.size)
        return blobs

    def _open(self, unit: Unit, value: bytes | None) -> dict[bytes, memoryview]:
        return open_unit(unit, value, self._backend, self._limits, self._dictionaries)

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


class StoredKernel(BlobSource):
    """A kernel of the store, and once it was read the source of its bytes.

    Attributes:
        kernel: the kernel.
        seen: what was observed when it was recorded.
        named_by: keys of the objects that lead to its units.
        code: whether signatures let code of the bundle that it came with be used.
        units: what its files are stored in.
        blobs: its verified bytes, by raw digest.
    """

    verified = True

    def __init__(
        self,
        kernel: Kernel,
        seen: Observation,
        named_by: tuple[str, ...] = (),
        *,
        code: bool = False,
    ) -> None:
        self.kernel, self.seen, self.named_by, self.code = kernel, seen, named_by, code
        self.units = list(store_layout.units_of_kernels([kernel]))
        self.blobs: dict[bytes, memoryview] = {}

    @property
    def seconds(self) -> float:
        """How long its compile took, 0 when that is not known."""
        return sum([us for _, us in self.seen.times_us]) / 1e6

    def keeping(self, keep: Keep) -> StoredKernel:
        """Return the same with the files that are wanted of it."""
        if keep == "all":
            return self
        kernel = self.kernel.with_artifacts(self.kernel.launch_set)
        return StoredKernel(kernel, self.seen, self.named_by, code=self.code)

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a file; raises `NotFound`."""
        return bytes(self.view_blobs([digest])[0])

    def view_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes of several files; raises `NotFound`."""
        try:
            return [self.blobs[digest] for digest in digests]
        except KeyError as error:
            raise NotFound(f"{self.kernel.key}: no such file", key=self.kernel.key) from error

    def stored_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the same."""
        return self.view_blobs(digests)

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Its bytes are here."""


def unit_bounds(
    backend: Backend, units: Collection[Unit], limits: Limits, dictionaries: Collection[str] = ()
) -> dict[str, int]:
    """Return how large units and dictionaries may be, with what proves it where somebody is asked
    who is not trusted.
    """
    if backend.asks_peers:
        return object_proofs.of_dictionaries(dictionaries) | object_proofs.of_units(units, limits)
    return store_layout.bounds_of_keys(dictionaries) | store_layout.bounds_of_units(units)


def learn_dictionaries(values: Iterable[bytes], dictionaries: Dictionaries) -> list[bytes]:
    """Fetch the dictionaries that some units need, where that is not known; returns those that are
    not to be had.
    """
    needed = {digest for digest in map(dictionary_of, values) if digest is not None}
    return dictionaries.learn(needed) if needed else []


def open_unit(
    unit: Unit,
    value: bytes | None,
    store: NamedStore,
    limits: Limits,
    dictionaries: Dictionaries,
) -> dict[bytes, memoryview]:
    """Return the verified blobs of a stored unit; one that is damaged, or whose dictionary is gone,
    is removed, unless the store is to be left as it is.

    Raises:
        DigestMismatch, FormatError: it is damaged.
        NotFound: the store has no such unit, or its dictionary is not to be had.
    """
    if value is None:
        raise NotFound(f"{store.name}: {unit.key} is missing; push the bundle again", key=unit.key)

    def split(value: bytes) -> dict[bytes, memoryview]:
        payload = unit_payload(
            value, unit.key, unit.size, limits, dictionaries, verified=store.verified
        )
        return split_unit(payload, unit)

    try:
        return checked(unit.key, value, store, split)
    except NotFound:
        digest = dictionary_of(value)
        if digest is not None and not store.read_only:
            # Nowhere, and not only kept from us by a tier that is silent.
            with contextlib.suppress(BundlerError):
                if not store.exists([dictionary_key(digest)]):
                    quarantine(store, unit.key)
        raise


def unit_payload(
    value: bytes,
    key: str,
    size: int | None,
    limits: Limits,
    dictionaries: Dictionaries,
    *,
    verified: bool = False,
) -> bytes:
    """Return the payload of a unit.

    Raises as `checked_frame` and `decompress`, and `NotFound` when the dictionary that it needs is
    missing.
    """
    # Before the store is asked for what a damaged one names.
    frame = checked_frame(value, key, size, verified=verified)
    digest = dictionary_of(value)
    if digest is None:
        return decompress(frame, key, size, limits)
    dictionary = dictionaries.get(digest)
    if dictionary is None:
        raise NotFound(
            f"{dictionaries.name}: {key} needs the dictionary {dictionary_key(digest)}, which is"
            " missing; push the bundle again",
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


_log = logger("bundler.store")


class UsageMarks:
    """Objects that are touched once: in a thread of its own after `begin`, else in `finish`.

    A store that we may only read, or that does not answer, stays as it is.

    Args:
        store: the store.
        keys: of a manifest and dictionaries.
        units: returns those of the bundle; they are asked for, and their keys computed, when they
            are touched.
    """

    def __init__(
        self,
        store: NamedStore,
        keys: Collection[str],
        units: Callable[[], Collection[Unit]],
    ) -> None:
        self._backend, self._keys, self._units = store, keys, units
        # An interrupt may arrive while the thread is being started: who touches them is decided
        # under this lock.
        self._gate = threading.Lock()
        self._asked = self._taken = self._apart = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Begin, unless that was done."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # no thread can be had: it is left to `finish`
                _thread.start_new_thread(self._touch_apart, ())

    def wait(self) -> None:
        """Wait for the thread, if it has begun."""
        if self._apart:
            self._ended.wait()

    def finish(self) -> None:
        """See to it that they were touched; calling this again is fine."""
        with self._gate:
            ours, self._taken = not self._taken, True
        if ours:
            self._touch()
        self.wait()

    def _touch_apart(self) -> None:
        with self._gate:
            if self._taken:
                return
            self._taken = self._apart = True
        try:
            self._touch()
        finally:
            self._ended.set()

    def _touch(self) -> None:
        try:
            self._backend.touch([*self._keys, *[unit.key for unit in self._units()]])
        except BundlerError as error:
            _log.info("%s: not marked as in use: %s", self._backend.name, error)
