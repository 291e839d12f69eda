# SPDX-License-Identifier: Apache-2.0
"""`CloudBackend`: a byte store in an object store, or, for reading, behind a plain web server.

::

    <prefix>/catalog           every key: which pack, offset, size, last use; and every ref.  Replaced by compare-and-set
    <prefix>/packs/<16 hex>    the objects of one `put`, one after another; written once, never changed
    <prefix>/leases/<32 hex>   who may compile what, for a time

What costs time there is the number of requests.  What one call puts is one pack, and what one call
gets is a range of each of its packs; a catalog of 10,000 objects has about 1 MB.  Since all that
changes is one file, each change is atomic, conditions on times and values included: of two writers
that replace it the second gets a conflict, and does its change anew.  A pack is written before the
catalog names it, and removed after none does; one that a writer left when it died is removed by a
later `delete`, a day old. A pack of which less than half is in use is written anew.  Writers of one
store take turns, so a store is for some thousand bundles, and dozens of writers.

Leases are small files that are written on condition of their ETag: creating one, or replacing one
that has expired, succeeds for one of any number of writers.  One that is given back is replaced and
not removed, as no object store need remove on condition; what nobody wrote for a day is removed
later.  Expiry is by the clocks of the hosts, which object stores keep within minutes of each other:
a wrong clock costs a wait or a second compile.

`bundler/store/store_urls.py` opens it by its URL.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendUnavailable,
)
from bundler.backends.cloud.object_exchange import Absent, Bucket, Conflict, Revision, Unchanged
from bundler.backends.cloud.pack_catalog import (
    CATALOG_BYTES,
    Catalog,
    PackSpan,
    decode_catalog,
    encode_catalog,
    new_pack,
    pack_name,
)
from bundler.backends.keys import check_key, check_prefix
from bundler.backends.port import (
    BEGINNING_BYTES,
    OBJECT_LIMIT,
    Backend,
    Lease,
    Stat,
    Unread,
    in_prefix,
)

CATALOG = "catalog"
PACK_BYTES = 64 * 1024 * 1024
REF_BYTES = 1024 * 1024
THREADS = 8
# A change that met others so often gives up; with dozens of writers a handful of conflicts is
# usual.
ATTEMPTS = 100
LONGEST_PAUSE_S = 0.25
ORPHAN_S = 24 * 3600.0
_Change = Callable[[Catalog], Catalog | None]


class CloudBackend(Backend):
    """Objects and refs in an object store, and leases, shared by processes of any number of hosts.

    Guarantees what `Backend` does where the object store honours If-Match and If-None-Match.  Times
    are those of the hosts, and never run backwards; a host whose clock is wrong by minutes is
    refused by the object stores themselves. An object that another handle has deleted may be got
    for as long as its pack is there. Does not guarantee: that a swap of a ref is reported as made
    when its answer was lost and more than 64 other changes came before the next attempt.

    Args:
        bucket: where it lies.
        writable: False for a server that is only read.
        touch_every_s: an object that was in use so recently is not marked again; `delete` allows
            for it.
    """

    reads_are_cheap = False

    def __init__(
        self, bucket: Bucket, *, writable: bool = True, touch_every_s: float = 60.0
    ) -> None:
        self._bucket, self.writable = bucket, writable
        self._touch_every_ms = int(touch_every_s * 1000)
        # One attribute, so that threads see a catalog and its revision together.
        self._known: tuple[Catalog, Revision | None] = (Catalog(), None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._bucket.shown}>"

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self.get_within(dict.fromkeys(keys, OBJECT_LIMIT))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        wanted = {check_key(key): most for key, most in max_bytes.items()}
        if not wanted:
            return {}
        catalog, _ = self._known
        fresh = not wanted.keys() <= catalog.objects.keys()
        if fresh:
            catalog = self._latest()
        found, lost = self._read(catalog, wanted)
        if lost and not fresh:
            # A pack was written anew, or removed, since we read the catalog.
            left = {key: most for key, most in wanted.items() if key not in found}
            again, lost = self._read(self._latest(), left)
            found |= again
        if lost:
            self._forget(lost)
        return found

    def _read(
        self, catalog: Catalog, wanted: Mapping[str, int]
    ) -> tuple[dict[str, bytes], set[int]]:
        """Return the objects that are there, and the packs that are not."""
        of_pack: dict[int, list[str]] = defaultdict(list)
        for key in wanted:
            if key in catalog.objects:
                of_pack[catalog.objects[key].pack].append(key)

        def read_pack(pack: int) -> dict[str, bytes] | None:
            return self._read_pack(
                pack, {key: (catalog.objects[key], wanted[key]) for key in of_pack[pack]}
            )

        found: dict[str, bytes] = {}
        lost: set[int] = set()
        for pack, parts in zip(of_pack, _in_threads(read_pack, of_pack), strict=True):
            if parts is None:
                lost.add(pack)
            else:
                found |= parts
        return found, lost

    def _read_pack(
        self, pack: int, wanted: Mapping[str, tuple[PackSpan, int]]
    ) -> dict[str, bytes] | None:
        sizes = {
            key: place.size if place.size <= most else min(place.size, BEGINNING_BYTES)
            for key, (place, most) in wanted.items()
        }
        ranges = {key: (wanted[key][0].offset, size) for key, size in sizes.items() if size}
        parts: list[bytes] = []
        if ranges:
            try:
                parts = self._bucket.read_ranges(pack_name(pack), list(ranges.values()))
            except Absent:
                return None
        found = dict.fromkeys(wanted, b"") | dict(zip(ranges, parts, strict=True))
        for key, (place, most) in wanted.items():
            if place.size > most:
                found[key] = Unread.too_large(found[key], key, place.size, most)
        return found

    def _forget(self, lost: Collection[int]) -> None:
        """Drop objects whose pack somebody removed, so that they can be put again."""

        def change(catalog: Catalog) -> Catalog | None:
            kept = {key: place for key, place in catalog.objects.items() if place.pack not in lost}
            if len(kept) == len(catalog.objects):
                return None
            return catalog.evolved(_now_ms(), objects=kept)

        if self.writable:
            # Who may not write finds the objects absent all the same.
            with contextlib.suppress(BackendError):
                self._change(change)

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        for key in map(check_key, items):
            if len(items[key]) > OBJECT_LIMIT:
                raise BackendFull(
                    f"{key} has {len(items[key]):,} bytes, and an object at most {OBJECT_LIMIT:,}"
                )
        if not items:
            return frozenset()
        self._check_writable()
        places: dict[str, PackSpan] = {}
        packs: dict[int, int] = {}
        created: set[str] = set()

        def change(catalog: Catalog) -> Catalog | None:
            missing = [key for key in items if key not in catalog.objects]
            unwritten = {key: items[key] for key in missing if key not in places}
            self._write_packs(unwritten, places, packs)
            created.clear()
            created.update(missing)
            now_ms = max(_now_ms(), catalog.time_ms)
            mine = {key: _used(places[key], now_ms) for key in missing}
            if not mine:
                return None
            every = catalog.objects | mine
            return catalog.evolved(now_ms, packs=catalog.packs | packs, objects=every)

        self._change(change)
        unused = packs.keys() - {places[key].pack for key in created}
        self._remove_packs(unused)
        return frozenset(created)

    def _write_packs(
        self, items: Mapping[str, bytes], places: dict[str, PackSpan], packs: dict[int, int]
    ) -> None:
        """Write objects as packs, and note where each lies."""
        left = dict(items)
        while left:
            pack, size = new_pack(), 0
            parts: list[bytes] = []
            while left and (not parts or size + len(next(iter(left.values()))) <= PACK_BYTES):
                key = next(iter(left))
                parts.append(left.pop(key))
                places[key] = PackSpan(pack, size, len(parts[-1]), 0)
                size += len(parts[-1])
            # A conflict is our own request, made again when its answer was lost: the number of the
            # pack is random.
            with contextlib.suppress(Conflict):
                self._bucket.create(pack_name(pack), b"".join(parts))
            packs[pack] = size

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        wanted = frozenset(map(check_key, keys))
        return wanted.intersection(self._latest().objects) if wanted else wanted

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        wanted = frozenset(map(check_key, keys))
        if not wanted:
            return wanted
        self._check_writable()
        gone: dict[str, PackSpan] = {}
        until_ms = math.inf if unmodified_since_s is None else unmodified_since_s * 1000 + 0.001

        def change(catalog: Catalog) -> Catalog | None:
            gone.clear()
            for key in wanted & catalog.objects.keys():
                place = catalog.objects[key]
                if self._last_use_ms(place) <= until_ms:
                    gone[key] = place
            kept = {key: place for key, place in catalog.objects.items() if key not in gone}
            return catalog.evolved(_now_ms(), objects=kept) if gone else None

        after = self._change(change)
        if gone:
            self._clean(after, {place.pack for place in gone.values()})
        return frozenset(gone)

    def _last_use_ms(self, place: PackSpan) -> int:
        # A touch that came so soon after the last one was not written.
        return place.modified_ms + self._touch_every_ms

    def _clean(self, catalog: Catalog, touched: Collection[int]) -> None:
        """Remove packs that nothing lies in, and write those anew of which less than half is in
        use.
        """
        live: dict[int, int] = defaultdict(int)
        for place in catalog.objects.values():
            live[place.pack] += place.size
        self._remove_packs([pack for pack in touched if pack not in catalog.packs])
        sparse = {pack for pack in touched if live[pack] * 2 < catalog.packs.get(pack, 0)}
        with contextlib.suppress(BackendError):  # what was asked for is done; the next one cleans
            if sparse:
                self._rewrite(catalog, sparse)
            self._sweep()

    def _rewrite(self, catalog: Catalog, sparse: Collection[int]) -> None:
        old = {key: place for key, place in catalog.objects.items() if place.pack in sparse}
        values, _ = self._read(catalog, dict.fromkeys(old, OBJECT_LIMIT))
        whole = {key: value for key, value in values.items() if not isinstance(value, Unread)}
        places: dict[str, PackSpan] = {}
        packs: dict[int, int] = {}
        self._write_packs(whole, places, packs)

        def change(latest: Catalog) -> Catalog | None:
            moved = {
                key: _used(place, latest.objects[key].modified_ms)
                for key, place in places.items()
                if key in latest.objects and latest.objects[key].pack == old[key].pack
            }
            if not moved:
                return None
            every = latest.objects | moved
            return latest.evolved(_now_ms(), packs=latest.packs | packs, objects=every)

        after = self._change(change)
        self._remove_packs([pack for pack in {*sparse, *packs} if pack not in after.packs])

    def _sweep(self) -> None:
        """Remove packs that a writer left when it died."""
        packs = dict(self._bucket.names("packs"))
        now_s = min(max(packs.values(), default=0.0), time.time())
        old = {name for name, written_s in packs.items() if written_s < now_s - ORPHAN_S}
        orphans = old - {pack_name(pack) for pack in self._latest().packs}
        if orphans:
            self._bucket.remove(sorted(orphans))
        remove_old(self._bucket)

    def _remove_packs(self, packs: Collection[int]) -> None:
        if packs:
            with contextlib.suppress(BackendError):  # it is an orphan now
                self._bucket.remove([pack_name(pack) for pack in packs])

    def touch(self, keys: Collection[str]) -> None:
        wanted = frozenset(map(check_key, keys))
        if self.writable and wanted:
            with contextlib.suppress(BackendDenied):
                self._change(lambda catalog: self._touched(catalog, wanted))

    def _touched(self, catalog: Catalog, wanted: frozenset[str]) -> Catalog | None:
        now_ms = max(_now_ms(), catalog.time_ms)
        due = {
            key: _used(place, now_ms)
            for key in wanted & catalog.objects.keys()
            if self._last_use_ms(place := catalog.objects[key]) <= now_ms
        }
        return catalog.evolved(now_ms, objects=catalog.objects | due) if due else None

    def list(self, prefix: str = "") -> Iterator[Stat]:
        check_prefix(prefix)
        for key, place in self._latest().objects.items():
            if in_prefix(key, prefix):
                yield Stat(key, place.size, place.modified_ms / 1000)

    def read_ref(self, key: str) -> bytes | None:
        check_key(key)
        return self._latest().refs.get(key)

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        check_key(key)
        if value is not None and len(value) > REF_BYTES:
            raise BackendFull(f"{key} has {len(value):,} bytes, and a ref at most {REF_BYTES:,}")
        self._check_writable()
        agreed = False

        def change(catalog: Catalog) -> Catalog | None:
            nonlocal agreed
            agreed = catalog.refs.get(key) == expected
            if not agreed or value == expected:
                return None
            refs = {name: held for name, held in catalog.refs.items() if name != key}
            return catalog.evolved(_now_ms(), refs=refs if value is None else refs | {key: value})

        self._change(change)
        return agreed

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        return iter([key for key in self._latest().refs if in_prefix(key, prefix)])

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        check_key(key)
        self._check_writable()
        return take_lease(self._bucket, key, ttl_s)

    def now_s(self) -> float:
        return max(_now_ms(), self._latest().time_ms) / 1000

    def _check_writable(self) -> None:
        if not self.writable:
            raise BackendDenied(
                f"{self._bucket.shown}: a web server is only read; write by s3:, gs: or az:"
            )

    def _latest(self) -> Catalog:
        """Return the catalog that is there now; it comes again only when it has changed."""
        catalog, revision = self._known
        try:
            data, found = self._bucket.read(CATALOG, CATALOG_BYTES + BEGINNING_BYTES, revision)
        except Unchanged:
            return catalog
        except Absent:
            if not self.writable:
                raise BackendUnavailable(
                    f"{self._bucket.shown}: holds no store: there is no file `catalog`"
                ) from None
            self._known = (Catalog(), None)
            return self._known[0]
        catalog = decode_catalog(data, self._bucket.shown)
        self._known = (catalog, found)
        return catalog

    def _change(self, change: _Change) -> Catalog:
        """Make a change, again and again until nobody was faster; returns the catalog after it.

        Args:
            change: returns the catalog as it is to be, None for no change; called with each catalog
                that is met.
        """
        known, revision = self._known
        fresh = False
        mine: list[bytes] = []
        for attempt in range(ATTEMPTS):
            if not fresh:
                # What is known may be old: a conflict would say so, and where nothing is to be
                # changed nobody would.
                fresh = revision is None or attempt > 0
                if fresh:
                    self._latest()
                    known, revision = self._known
                    if any(token in known.tokens for token in mine):
                        return known  # the answer was lost, and the change was made
            wanted = change(known)
            if wanted is None and fresh:
                return known
            if wanted is not None:
                mine.append(wanted.tokens[-1])
                data = encode_catalog(wanted, self._bucket.shown)
                try:
                    if revision is None:
                        new = self._bucket.create(CATALOG, data)
                    else:
                        new = self._bucket.replace(CATALOG, data, revision)
                except Conflict:
                    time.sleep(random.uniform(0, min(LONGEST_PAUSE_S, 0.002 * 2**attempt)))  # noqa: S311
                else:
                    self._known = (wanted, new)
                    return wanted
            fresh = False
        raise BackendUnavailable(
            f"{self._bucket.shown}: others changed it {ATTEMPTS} times meanwhile; try again"
        )


def _in_threads(
    call: Callable[[int], dict[str, bytes] | None], packs: Collection[int]
) -> list[dict[str, bytes] | None]:
    """Return what a call returns for each pack; several are asked at once."""
    if len(packs) < 2:  # noqa: PLR2004
        return list(map(call, packs))
    with ThreadPoolExecutor(min(THREADS, len(packs)), "bundler-packs") as pool:
        return list(pool.map(call, packs))


def _used(place: PackSpan, modified_ms: int) -> PackSpan:
    return replace(place, modified_ms=modified_ms)


def _now_ms() -> int:
    return int(time.time() * 1000)


LEASES = "leases"
OLD_S = 24 * 3600.0
_LEASE_BYTES = 256


def take_lease(bucket: Bucket, key: str, ttl_s: float) -> Lease | None:
    """Take the lease called `key`; None while another holds it, or was faster."""
    name = f"{LEASES}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    token, expiry_s = secrets.token_hex(16), time.time() + ttl_s
    content = _content(token, expiry_s)
    try:
        revision: Revision | None = bucket.create(name, content)
    except Conflict:
        found, revision = _read(bucket, name)
        if found != content:
            if revision is None or _expiry_s(found) > time.time():
                return None
            try:
                revision = bucket.replace(name, content, revision)
            except Conflict:
                found, revision = _read(bucket, name)
                if found != content:
                    return None

    def change(ttl_s: float | None) -> bool:
        # The content and revision as they were last written.
        nonlocal revision, expiry_s
        if revision is None or expiry_s <= time.time():
            return False
        new_expiry_s = 0.0 if ttl_s is None else time.time() + ttl_s
        content = _content(token, new_expiry_s)
        try:
            revision = bucket.replace(name, content, revision)
        except Conflict:
            # Ours, when the answer to our first attempt was lost.
            found, revision = _read(bucket, name)
            if found != content:
                revision = None
                return False
        expiry_s = new_expiry_s
        return True

    return Lease(change)


def remove_old(bucket: Bucket) -> None:
    """Remove leases that nobody wrote for a day; taken at this very moment one is lost, which costs
    a second compile.
    """
    written = dict(bucket.names(LEASES))
    now_s = min(max(written.values(), default=0.0), time.time())
    old = [name for name, written_s in written.items() if written_s < now_s - OLD_S]
    if old:
        bucket.remove(old)


def _content(token: str, expiry_s: float) -> bytes:
    return f"{token} {expiry_s!r}".encode()


def _read(bucket: Bucket, name: str) -> tuple[bytes, Revision | None]:
    try:
        return bucket.read(name, _LEASE_BYTES)
    except Absent:
        return b"", None


def _expiry_s(content: bytes) -> float:
    try:
        return float(content.partition(b" ")[2])
    except ValueError:
        return 0.0  # damaged: nobody holds it
