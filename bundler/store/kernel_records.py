# SPDX-License-Identifier: Apache-2.0
"""Kernels of a store one by one, found by their kernel keys.

::

    v1/k/<kernel key>   an object: magic, digest and zstd as of a manifest, and in it [1, content, observed] of that one kernel
    v1/u/<64 hex>       its units, shared with every bundle that holds the kernel
    v1/f/<kernel key>   a ref, for a while: [1, token, message] of the last compile that failed
    v1/b/<kernel key>   where there is no record: which bundle that was pushed has the kernel (kernel_index.py)

A record is created and never changed: the first complete build of a key is everybody's.  Units come
before the record that names them.  A record whose units are gone or damaged is a miss; it is
removed, so that the next build can be published.  A kernel that was pushed in a bundle is found by
the same look-up.

`KernelRecords` looks kernels up and publishes them: `Store.kernel_records` makes it for sessions,
`compile_once` and the build service; `maintenance.py` prunes what it wrote.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bundler.backends.batches import batches
from bundler.backends.breaker import bounded
from bundler.backends.port import Backend, Lease, Stat
from bundler.errors import (
    BundlerError,
    FormatError,
    LimitExceeded,
    NotFound,
    UnsafeName,
    Untrusted,
)
from bundler.format import names, wire
from bundler.format.bundle import Bundle, Keep, MemoryBlobs
from bundler.format.bundle_union import merge
from bundler.format.cached_properties import cached_property
from bundler.format.entries import Kernel
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observation, Observed
from bundler.format.summary import Summarized
from bundler.package_loggers import logger
from bundler.store import store_layout
from bundler.store.blob_source import (
    StoredKernel,
    learn_dictionaries,
    open_unit,
    unit_batches,
    unit_bounds,
)
from bundler.store.dictionaries import Dictionaries
from bundler.store.kernel_index import (
    FILES_INDEX,
    INDEX,
    KernelIndex,
    MovedIndex,
    index_key,
)
from bundler.store.store_failures import DAMAGED, checked, named, store_errors
from bundler.user_warnings import warn

RECORDS = store_layout.RECORDS
FAILURES, LEASES = f"{store_layout.MAJOR}/f", f"{store_layout.MAJOR}/c"
# A record that another published, and that is lost when we look at it, leaves room for ours; until
# the next is faster again.
ATTEMPTS = 3
_VERSION = 1
# Of what a compiler said; the end of it says most.
_MESSAGE_CHARACTERS = 1000
_log = logger("bundler.store")


class LookUp:
    """What was found of the kernels asked for.

    Attributes:
        found: the kernels that are there, by key, with their verified bytes.
        missing: keys of the others, in the order asked for.
        damaged: those of `missing` whose record was there, but not all that it names: key ->
            reason.
        seconds: of the damaged ones whose record could be read, how long their compile took.
    """

    def __init__(self) -> None:
        self.found: dict[str, StoredKernel] = {}
        self.missing: tuple[str, ...] = ()
        self.damaged: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    @cached_property
    def bundle(self) -> Bundle:
        """The kernels that are there, with their bytes in memory."""
        content = Content.of([one.kernel for one in self.found.values()])
        observed = Observed({key: one.seen for key, one in self.found.items()})
        blobs = {digest: data for one in self.found.values() for digest, data in one.blobs.items()}
        return Bundle(content, observed, MemoryBlobs(blobs, verified=True))

    @property
    def code(self) -> frozenset[str]:
        """Keys of kernels of bundles whose code may be used, by what the policy asks of signatures;
        never of a kernel that was published by itself, which nobody signed.
        """
        return frozenset(key for key, one in self.found.items() if one.code)


@dataclass(frozen=True, repr=False)
class Published(Summarized):
    """What became of kernels that were published.

    Attributes:
        bundle: the builds that everybody gets: ours, or for a key that another was first with, the
            other's.
        created: keys whose record is ours.
        others: keys that another was first with.  What is in neither could be read by nobody, and
            is not in the store.
    """

    bundle: Bundle
    created: frozenset[str]
    others: frozenset[str]


class ToldFailure(NamedTuple):
    """A compile that failed somewhere: a token that tells it from others of the same key, and what
    the compiler said.
    """

    token: str
    message: str


class KernelRecords:
    """The kernels of a store by their keys.

    Guarantees: units are acknowledged before the record that names them; of builds of one key,
    published at once or one after the other, the first complete one wins, and every caller is given
    its bytes; what is read is verified.  Threads, processes and forks as the byte store. Does not
    guarantee that a record stays: what was evicted, or removed as damaged, can be published anew by
    another build.

    Args:
        backend: the byte store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.
        on_failure: is told instead of the user that the store failed and the program goes on.
        index: where kernels that were pushed are found; None for all bundles of the store, whoever
            signed them.
    """

    # Under which keys kernels were recorded that only moved since.
    moved: MovedIndex
    # Whether kernels that were published by themselves are taken, and whether nothing is said if
    # they are not (`UnsignedRecords`).
    readable, quiet = True, False

    def __init__(
        self,
        backend: Backend,
        name: str,
        limits: Limits = DEFAULT_LIMITS,
        on_failure: Callable[[BundlerError], None] | None = None,
        index: KernelIndex | None = None,
    ) -> None:
        self._backend, self.name, self._limits = named(backend, name), name, limits
        self._index = index or KernelIndex(self._backend, limits)
        self.moved = self._index.moved
        self._told: set[str] = set()
        self._dictionaries = Dictionaries(self._backend)
        self._on_failure = on_failure

    def look_up(self, keys: Collection[str], keep: Keep = "all") -> LookUp:
        """Return the kernels with these keys that are there whole.

        One round trip for the records of up to `store_layout.BATCH_KEYS` kernels, one for each
        batch of units, and one to mark what was found as in use.  Where there is no record, one
        more for which bundles have the kernels, and two for each of these that was not read before;
        kernels of bundles that were read before are asked for at once.

        Args:
            keys: kernel keys.
            keep: `launch` fetches device binaries and metadata only.

        Raises:
            UnsafeName: not a kernel key.
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        wanted = list(dict.fromkeys(map(names.check_kernel_key, keys)))
        looked_up = LookUp()
        for batch in batches(wanted, store_layout.BATCH_KEYS):
            found, damaged, lost = self._look_up(batch, keep)
            looked_up.found |= found
            looked_up.damaged = damaged | looked_up.damaged
            looked_up.seconds |= {key: record.seconds for key, record in lost.items()}
        looked_up.missing = tuple([key for key in wanted if key not in looked_up.found])
        return looked_up

    def find(self, key: str, keep: Keep = "all") -> StoredKernel | None:
        """Return one kernel; None where it is not there whole.  Raises as `look_up`."""
        return self._look_up([names.check_kernel_key(key)], keep)[0].get(key)

    def _look_up(
        self, keys: list[str], keep: Keep
    ) -> tuple[dict[str, StoredKernel], dict[str, str], dict[str, StoredKernel]]:
        """Return kernels that are there whole, why others are not, and those of which there is a
        record.
        """
        found: dict[str, StoredKernel] = {}
        damaged: dict[str, str] = {}
        left = keys
        if self._index.held:
            held = self._index.remembered(keys)
            found = self._read_all(held, keep, damaged)
            left = [key for key in keys if key not in found]
            if held.keys() & set(left):
                self._index.forget()
                damaged.clear()
        alone = self._records(left, damaged)
        found |= self._read_all(alone, keep, damaged)
        lost = {key: record for key, record in alone.items() if key in damaged}
        rest = [key for key in left if key not in found]
        if rest:
            pushed = self._index.find(rest)
            lacking: dict[str, str] = {}
            found |= self._read_all(pushed, keep, lacking)
            damaged = lacking | damaged
        self._keep_alive(found.values())
        if lost:
            self._remove_dangling(lost)
        return found, damaged, lost

    def publish(self, bundle: Bundle) -> Published:
        """Store the kernels of a bundle, each under its key: first all units, then the records.

        Raises:
            StoreFull, AccessDenied, StoreUnavailable: they could not be stored; what was stored is
                whole.
            FormatError, DigestMismatch: the bundle is damaged.
        """
        mine = {
            k.key: StoredKernel(k, bundle.observed.kernels.get(k.key, Observation()))
            for k in bundle.kernels
        }
        if not self.readable:  # whoever was first, his is not used here
            return Published(bundle, self._create(mine, bundle), frozenset())
        created: frozenset[str] = frozenset()
        theirs: list[Bundle] = []
        left = dict(mine)
        for _ in range(ATTEMPTS):
            created |= self._create(left, bundle)
            others = self.look_up([key for key in left if key not in created])
            theirs.append(others.bundle)
            left = {key: left[key] for key in others.missing}
            if not left:
                break
        won = frozenset(kernel.key for one in theirs for kernel in one.kernels)
        ours = Bundle(
            Content.of([record.kernel for key, record in mine.items() if key not in won]),
            Observed({key: record.seen for key, record in mine.items() if key not in won}),
            bundle.blobs,
        )
        return Published(merge([ours, *theirs]), created, won)

    def recorded(self, most: int, within_s: float | None = None) -> Iterator[Kernel]:
        """Yield the kernels of the store, the newest first, without reading their bytes; damaged
        records are left out.

        Args:
            most: how many kernels to look at.
            within_s: how long the store may take to list them; None for as long as any listing may.

        Raises:
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        with store_errors(self.name):
            stats = self._listed() if within_s is None else bounded(self._listed, within_s)
        stats.sort(key=lambda stat: -stat.modified_s)
        # A kernel may have been pushed and published by itself.
        found = dict.fromkeys(stat.key.rpartition("/")[2] for stat in stats)
        keys = [*filter(names.is_kernel_key, found)][:most]
        for batch in batches(keys, store_layout.BATCH_KEYS):
            records = self._records(batch, {})
            yield from (record.kernel for record in records.values())
            rest = self._index.find([key for key in batch if key not in records])
            yield from (one.kernel for one in rest.values())

    def _listed(self) -> list[Stat]:
        kinds = (RECORDS, INDEX) if self.readable else (INDEX,)
        stats = (stat for kind in kinds for stat in self._backend.list(kind))
        return [stat for stat in stats if not stat.key.startswith(f"{FILES_INDEX}/")]

    def units(self, stored: str, value: bytes) -> list[store_layout.Unit]:
        """Return the units that a record names, by its key in the store and its value; raises as a
        damaged object does.
        """
        try:
            return self._decode(
                names.check_kernel_key(stored.removeprefix(f"{RECORDS}/")), value
            ).units
        except UnsafeName as error:
            raise FormatError(f"{stored}: no key of a record", key=stored) from error

    def remove(self, keys: Collection[str]) -> None:
        """Remove what leads to kernels that no Triton can read; the next build can be published
        then.
        """
        named = [name for key in keys for name in (_key(RECORDS, key), index_key(key))]
        self._backend.delete(named)

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take the right to compile a kernel for everyone; None while another has it.

        Raises:
            StoreUnavailable, AccessDenied: the store has no leases, or cannot be written.
        """
        return self._backend.lease(_key(LEASES, key), ttl_s)

    def failure(self, key: str) -> ToldFailure | None:
        """Return the last failure of a compile that was told; None when there is none, or it cannot
        be read.
        """
        value = self._backend.read_ref(_key(FAILURES, key))
        if value is not None:
            with contextlib.suppress(FormatError):
                return decode_failure(value, f"the last failure of {key}")
        return None

    def tell_failure(self, key: str, message: str) -> None:
        """Tell those who wait for a kernel that its compile failed, and what the compiler said."""
        text = message[-_MESSAGE_CHARACTERS:].encode("utf-8", "replace").decode()
        value = wire.pack([_VERSION, secrets.token_hex(16), text])
        # Another failure of the same compile, told at the same time, says the same.
        self._backend.swap_ref(
            _key(FAILURES, key), self._backend.read_ref(_key(FAILURES, key)), value
        )

    def reporting_to(self, on_failure: Callable[[BundlerError], None]) -> KernelRecords:
        """Return the same kernels for somebody who is told of failures instead of the user."""
        return type(self)(self._backend, self.name, self._limits, on_failure, self._index)

    def report_failure(self, error: BundlerError) -> None:
        """Tell once for each cause that the store failed and the program goes on without it."""
        if self._on_failure is not None:
            self._on_failure(error)
            return
        _log.warning("%s", error)
        if error.code not in self._told:
            self._told.add(error.code)
            warn(f"{error}; the program goes on without the store")

    def _records(self, keys: list[str], damaged: dict[str, str]) -> dict[str, StoredKernel]:
        wanted = {_key(RECORDS, key): key for key in keys} if self.readable else {}
        asked = store_layout.bounds_of_keys(wanted, self._limits)
        with store_errors(self.name):
            values = self._backend.inner.get_within(asked) if wanted else {}
        records = {}
        for stored, value in values.items():
            key = wanted[stored]
            try:
                decode = partial(self._decode, key)
                records[key] = checked(stored, value, self._backend, decode)
            except DAMAGED as error:
                damaged[key] = error.message
        return records

    def _decode(self, key: str, value: bytes) -> StoredKernel:
        what = _key(RECORDS, key)
        payload = wire.unpack(
            store_layout.decode_object(value, what, None, self._limits), what, self._limits
        )
        version, content_bytes, observed_bytes = wire.fields(
            payload, what, int, bytes, bytes, open_ended=True
        )
        if version != _VERSION:
            raise LimitExceeded(
                f"{what}: version {version}, expected {_VERSION}; upgrade triton-bundler", key=what
            )
        content = Content.decode(content_bytes, self._limits)
        if [kernel.key for kernel in content.kernels] != [key] or len(list(content.entries)) != 1:
            raise FormatError(f"{what}: expected this kernel and nothing else", key=what)
        seen = Observed.decode(observed_bytes, self._limits).kernels.get(key, Observation())
        return StoredKernel(content.kernels[0], seen, (what,))

    def _read_all(
        self,
        records: dict[str, StoredKernel],
        keep: Keep,
        damaged: dict[str, str],
    ) -> dict[str, StoredKernel]:
        """Fetch the units of kernels; returns those that are whole."""
        # Each hit comes by here, so the byte store is called without a detour.
        direct = self._backend.inner
        wanted = [record.keeping(keep) for record in records.values()]
        units = {unit.key: unit for record in wanted for unit in record.units}
        opened: dict[str, dict[bytes, memoryview]] = {}
        why: dict[str, str] = {}
        for batch in unit_batches(units.values()):
            asked = unit_bounds(direct, batch, self._limits)
            with store_errors(self.name):
                values = direct.get_within(asked)
            learn_dictionaries(values.values(), self._dictionaries)
            for unit in batch:
                try:
                    value = values.get(unit.key)
                    opened[unit.key] = open_unit(
                        unit, value, self._backend, self._limits, self._dictionaries
                    )
                except (NotFound, *DAMAGED) as error:
                    why[unit.key] = error.message
        found = {}
        for record in wanted:
            reason = next((why[unit.key] for unit in record.units if unit.key in why), None)
            if reason is not None:
                damaged[record.kernel.key] = reason
                continue
            for unit in record.units:
                record.blobs |= opened[unit.key]
            found[record.kernel.key] = record
        return found

    def _create(self, records: dict[str, StoredKernel], bundle: Bundle) -> frozenset[str]:
        """Store units, then records; returns the keys whose record we created."""
        units = {unit.key: unit for record in records.values() for unit in record.units}
        for batch in unit_batches(units.values()):
            self._backend.put({unit.key: _sealed(unit, bundle) for unit in batch})
        encoded = {_key(RECORDS, key): _encode(record) for key, record in records.items()}
        values = {
            key: value for key, value in encoded.items() if len(value) <= store_layout.RECORD_BYTES
        }
        created = self._backend.put(values) if values else frozenset()
        mine = {key: one for key, one in records.items() if _key(RECORDS, key) in created}
        self.moved.add(record.kernel for record in mine.values())
        return frozenset(mine)

    def _keep_alive(self, found: Collection[StoredKernel]) -> None:
        """Mark what was found as in use; a store that we may only read stays as it is."""
        keys = [key for r in found for key in (*r.named_by, *(unit.key for unit in r.units))]
        if keys:
            try:
                with store_errors(self.name):
                    self._backend.inner.touch(keys)
            except BundlerError as error:
                _log.info("%s: not marked as in use: %s", self.name, error)

    def _remove_dangling(self, lost: dict[str, StoredKernel]) -> None:
        """Remove records whose units are gone, so that the next build can be published; not because
        a tier is silent.
        """
        try:
            there = self._backend.exists(
                [unit.key for record in lost.values() for unit in record.units]
            )
            gone = [
                key
                for key, record in lost.items()
                if any(unit.key not in there for unit in record.units)
            ]
            self._backend.delete([_key(RECORDS, key) for key in gone])
        except BundlerError as error:
            _log.warning(
                "%s: records of %s cannot be removed: %s", self.name, ", ".join(lost), error
            )


def decode_failure(value: bytes, what: str) -> ToldFailure:
    """Return the failure that a ref tells; raises `FormatError`."""
    version, token, message = wire.fields(
        store_layout.unpack_ref(value, what), what, int, str, str, open_ended=True
    )
    if version != _VERSION:
        raise FormatError(f"{what}: version {version}, expected {_VERSION}", got=version)
    return ToldFailure(token, message)


def _key(kind: str, kernel: str) -> str:
    return f"{kind}/{names.check_kernel_key(kernel)}"


def _encode(record: StoredKernel) -> bytes:
    content = Content.of([record.kernel])
    observed = Observed({record.kernel.key: record.seen})
    return store_layout.encode_object(wire.pack([_VERSION, content.encode(), observed.encode()]))


def _sealed(unit: store_layout.Unit, bundle: Bundle) -> bytes:
    # Verified: what is published first is everybody's.
    return store_layout.encode_object(
        b"".join(bundle.view_blob(digest, unit.key) for digest, _ in unit.blobs)
    )


class UnsignedRecords(KernelRecords):
    """The kernels of a store where signatures are required, which kernels that were published one
    by one have not: of these none is taken, and new ones are published.

    Kernels of bundles are taken where the signature of their bundle counts.  The first look that
    finds no signed kernel says so, once for each process that asks the store.
    """

    readable = False

    def look_up(self, keys: Collection[str], keep: Keep = "all") -> LookUp:
        """Return the kernels that a signed bundle of the store has."""
        found = super().look_up(keys, keep)
        if found.missing:
            self.say()
        return found

    def find(self, key: str, keep: Keep = "all") -> StoredKernel | None:
        """Return a kernel that a signed bundle of the store has."""
        found = super().find(key, keep)
        if found is None:
            self.say()
        return found

    def say(self) -> None:
        """Say once that kernels of the store are not used."""
        if not self.quiet:
            self.quiet = True
            self.report_failure(
                Untrusted(
                    f"{self.name}: signatures are required, and kernels that were published one by"
                    " one have none, so that none of them is used; push them as a bundle with"
                    " a key"
                )
            )
