# SPDX-License-Identifier: Apache-2.0
"""`Maintenance`: lists what is in a store, checks whether it is sound, and removes what no tag
reaches.

`BundleStore` is derived from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from bundler.backends.batches import batches
from bundler.backends.port import Backend, Stat
from bundler.errors import AccessDenied, ConfigError, FormatError, NotFound
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.format.summary import count
from bundler.store import store_layout
from bundler.store.blob_source import unit_payload
from bundler.store.dictionaries import Dictionaries, opened
from bundler.store.file_records import FILES
from bundler.store.kernel_index import (
    FILES_INDEX,
    INDEX,
    BundlePlace,
    KernelIndex,
    decode_kernel,
    decode_place,
    index_key,
    moved_entry,
    moved_keys,
    names_in,
)
from bundler.store.kernel_records import FAILURES, RECORDS, KernelRecords, decode_failure
from bundler.store.store_failures import DAMAGED, checked, named, quarantine
from bundler.store.store_reports import (
    AGE,
    GRACE,
    ROOM,
    TAGS,
    UNREAD_TAGS,
    USE,
    Held,
    PruneReport,
    StoreStats,
    TagInfo,
    VerifyReport,
)
from bundler.store.store_signatures import check_envelope, envelopes_by_manifest

# Objects read in one call: the larger, the more memory; the smaller, the more round trips.
READ_AT_ONCE = 64
MOVED = store_layout.MOVED
# For so long a prune removes nothing: another process may have found an object present, and be
# about to name it in a manifest.
GRACE_S = 24 * 3600.0
# Every kind of object; manifests and records, which name units, come before the units, and so do
# dictionaries.
KINDS = (
    store_layout.MANIFESTS,
    RECORDS,
    INDEX,
    MOVED,
    FILES,
    store_layout.DICTIONARIES,
    store_layout.ENVELOPES,
    store_layout.UNITS,
)
# An entry of a moved kernel names one of the kernel index, that names a manifest, that and a record
# name units, and a unit may need a dictionary.
_MOVED, _INDEX, _NAMES_UNITS, _UNIT, _DICTIONARY = _RANKS = range(5)
T = TypeVar("T")
Watch = Callable[[int, int], object]


def _nobody(_done: int, _total: int) -> None:
    """Tell nobody how far the work is."""


# A tag, the key of its manifest, and where that cannot be told, why.
_Tagged = tuple[str, str | None, str]


class _Reached(NamedTuple):
    """What tags reach.

    Attributes:
        keys: of objects.
        unfollowed: (tag, reason) of tags of which it is not known what they reach.
        bundles: what each of the others names, and the names of what is in it.
        moved: keys of these kernels, by what is the same once they moved.
    """

    keys: set[str]
    unfollowed: tuple[tuple[str, str], ...]
    bundles: list[tuple[BundlePlace, frozenset[str]]]
    moved: dict[str, str]


class Maintenance:
    """Operations over a whole store.

    Args:
        backend: the byte store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.
    """

    def __init__(self, backend: Backend, name: str, limits: Limits) -> None:
        self._backend, self.name, self._limits = named(backend, name), name, limits
        self._records = KernelRecords(self._backend, name, limits)
        self._index = KernelIndex(self._backend, limits)
        self._dictionaries = Dictionaries(self._backend.untouched)

    def tags(self) -> tuple[TagInfo, ...]:
        """Return every tag, by name, with what is in its bundle."""
        return tuple(self._tag_infos())

    def _tag_infos(self) -> Iterator[TagInfo]:
        tagged = list(self._tagged())
        wanted = {manifest for _, manifest, _ in tagged if manifest is not None}
        stats = [stat for stat in self._backend.list(store_layout.MANIFESTS) if stat.key in wanted]
        # The listing asks the farthest tier; a nearer one may have a manifest that was written
        # while that tier was down.
        stats += [
            Stat(key, store_layout.BATCH_BYTES, 0.0)
            for key in sorted(wanted - {stat.key for stat in stats})
        ]
        infos = {key: self._tag_info(key, value) for key, value in self._read(stats)}
        for tag, manifest, why in tagged:
            if manifest is None:
                yield TagInfo(tag, None, problem=why)
            elif manifest in infos:
                yield replace(infos[manifest], name=tag)
            else:
                digest = store_layout.digest_of_manifest(manifest)
                yield TagInfo(
                    tag,
                    digest,
                    problem=f"the manifest of {digest} is missing; push the bundle again",
                )

    def _tag_info(self, manifest: str, value: bytes) -> TagInfo:
        digest = store_layout.digest_of_manifest(manifest)
        try:
            content = checked(
                manifest, value, self._backend.untouched, partial(self._content, manifest)
            )
        except DAMAGED as error:
            return TagInfo("", digest, problem=error.message)
        targets = sorted({str(kernel.target) for kernel in content.kernels})
        return TagInfo(
            "", digest, len(content.kernels), tuple(targets), sum(size for _, size in content.blobs)
        )

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        manifests, records, entries, moved, files, dictionaries, _, units = [
            [*self._backend.list(prefix)] for prefix in KINDS
        ]
        tags, failures = (
            len([*self._backend.list_refs(prefix)]) for prefix in (store_layout.TAGS, FAILURES)
        )
        reached = self._reached().keys
        return StoreStats(
            len(units),
            _bytes(units),
            len(manifests),
            _bytes(manifests),
            tags,
            sum(
                stat.size_bytes
                for stat in (*units, *manifests, *dictionaries, *entries, *moved)
                if stat.key in reached
            ),
            len(records) + len(files),
            _bytes([*records, *files]),
            failures,
            len(dictionaries),
            _bytes(dictionaries),
            len({s.key.rpartition("/")[2] for s in (*records, *entries) if not _is_file(s.key)}),
            _bytes([*entries, *moved]),
        )

    def verify(
        self, repair: bool = False, *, watch: Callable[[int, int], object] | None = None
    ) -> VerifyReport:
        """Read and check everything; with `repair`, damaged objects are removed, so that the next
        push sends them again.

        `watch` is told how many objects of how many were read.
        """
        # Tags are read before objects: a bundle that is pushed meanwhile is complete, and need not
        # be checked.
        tagged = list(self._tagged())
        damaged: dict[str, str] = {}
        sound: set[str] = set()
        known: dict[str, store_layout.Unit] = {}
        needed: dict[str, list[str]] = {}
        store = self._backend if repair else self._backend.untouched
        # Manifests and records first, by the order of KINDS: they say what the units that follow
        # have to hold.
        for key, value in self._everything(watch or _nobody):
            try:
                checked(key, value, store, partial(self._check, key, known, needed))
                sound.add(key)
            except DAMAGED as error:
                damaged[key] = error.message
        lacking = self._without_units(needed, sound, damaged)
        unread = self._unread_failures(repair=repair)
        bad = {*damaged, *filter(_is_record, lacking)}
        # Damaged objects were removed as they were read; a record that lacks a unit is whole
        # itself, and removed here.
        for key in bad - damaged.keys() if repair else ():
            quarantine(self._backend, key)
        removed = (bad - self._backend.exists(bad)) | unread.keys() if repair else set()
        dangling = {(_called(key), lacks) for key, lacks in lacking.items()}
        # What was pushed by a version without an index, or lost its entries, is found by its keys
        # again.
        indexed = self._mend(self._reached()) if repair else 0
        return VerifyReport(
            len(sound) + len(damaged),
            tuple(sorted((damaged | unread).items())),
            tuple(sorted({*self._without_manifest(tagged, sound, damaged), *dangling})),
            tuple(sorted(removed)),
            indexed,
        )

    def _unread_failures(self, *, repair: bool) -> dict[str, str]:
        """Return the failures of compiles that cannot be read, and why; removed where that is
        wanted.
        """
        unread = {}
        for key in sorted(self._backend.list_refs(FAILURES)):
            value = self._backend.read_ref(key)
            try:
                decode_failure(value or b"", key)
            except FormatError as error:
                # By compare-and-set: a process may have written a new note of a failure
                # meanwhile.
                if value is not None and (not repair or self._backend.swap_ref(key, value, None)):
                    unread[key] = error.message
        return unread

    def prune(
        self,
        max_bytes: int | None = None,
        older_than_s: float | None = None,
        dry_run: bool = False,
        *,
        grace_s: float = GRACE_S,
        watch: Callable[[int, int], object] | None = None,
    ) -> PruneReport:
        """Remove what no tag reaches, oldest first; never what a tag reaches.  `watch` is told how
        many objects of how many are gone.

        Args:
            max_bytes: stop when the store holds no more than this; None removes all that may be
                removed.
            older_than_s: only what was not used for so many seconds.
            dry_run: remove nothing, only say what would be.
            grace_s: nothing that was used in so many last seconds on the store's own clock, since a
                push may be about to name it; one that takes longer may lose units, whose kernels
                are misses until the next push.
        """
        if not 0 <= grace_s < math.inf:
            raise ConfigError(f"grace_s={grace_s!r}: expected seconds, 0 or more", got=grace_s)
        if not dry_run and not self._backend.writable:
            raise AccessDenied(
                f"{self.name}: it is only read here, so nothing can be removed; prune it where it"
                " may be written, or with dry_run",
                store=self.name,
            )
        now_s = self._backend.now_s()
        everything = [stat for prefix in KINDS for stat in self._backend.list(prefix)]
        found = self._reached()
        reached, unfollowed = found.keys, found.unfollowed
        if not dry_run:  # entries may name what is about to be removed
            with contextlib.suppress(AccessDenied):
                self._mend(found)
        signed = envelopes_by_manifest([stat.key for stat in everything])
        reached.update(*(signed[key] for key in reached & signed.keys()))
        compressed_with = self._dictionaries_needed(everything)
        reached |= {compressed_with[key] for key in reached if key in compressed_with}
        loose = [s for s in everything if s.key not in reached]
        needed = self._needed_by([s for s in loose if _is_entry(s.key) or _names_units(s.key)])
        needed |= {s.key: [compressed_with[s.key]] for s in loose if s.key in compressed_with}
        for manifest in needed.keys() & signed.keys():
            needed[manifest] += signed[manifest]
        used_s = _last_used_s(loose, needed)
        loose.sort(key=lambda s: (used_s[s.key], _rank(s.key), s.key))
        tagged = [s for s in everything if s.key in reached]
        # A tag that cannot be read does not say what it reaches: then nothing is known to be loose.
        before_s = now_s - grace_s
        least_s = None if older_than_s is None else now_s - older_than_s
        chosen, groups = _choose(tagged, loose, used_s, before_s, least_s, max_bytes)
        if unfollowed:
            chosen, groups = [], [(TAGS, tagged), (UNREAD_TAGS, loose)]
        gone = {stat.key for stat in chosen}
        if not dry_run:
            keys = [stat.key for stat in chosen]
            gone = self._remove(keys, needed, before_s, watch or _nobody)
            if any(_is_entry(key) for key in gone):
                with contextlib.suppress(AccessDenied):  # a push may have relied on them meanwhile
                    self._mend(self._reached())
        removed = [stat for stat in chosen if stat.key in gone]
        kept_bytes = _bytes(everything) - _bytes(removed)
        # What was to go and is still there was used while this ran.
        groups.append((USE, [stat for stat in chosen if stat.key not in gone]))
        held = tuple(Held(by, len(stats), _bytes(stats)) for by, stats in groups if stats)
        return PruneReport(
            tuple(stat.key for stat in removed),
            _bytes(removed),
            kept_bytes,
            _bytes(tagged),
            sum(one.objects for one in held if one.by in {GRACE, UNREAD_TAGS}),
            0 if max_bytes is None else max(0, kept_bytes - max_bytes),
            unfollowed,
            held,
            grace_s,
        )

    def _remove(
        self, keys: list[str], needed: dict[str, list[str]], before_s: float, watch: Watch
    ) -> set[str]:
        """Remove objects that were not touched meanwhile, each before the objects that it needs;
        returns the keys that were removed.
        """
        gone: set[str] = set()
        still_needed: set[str] = set()
        done = 0
        watch(done, len(keys))
        # In the order of ranks a process that is killed here leaves units that nothing names, never
        # a name without its unit.
        for rank in _RANKS:
            of_rank = [key for key in keys if _rank(key) == rank]
            for batch in batches(
                [key for key in of_rank if key not in still_needed], store_layout.BATCH_KEYS
            ):
                # The store compares times itself: an object that was used since it was listed
                # stays.
                gone |= self._backend.delete(batch, unmodified_since_s=before_s)
                watch(done := done + len(batch), len(keys))
            still_needed |= {
                name for key in of_rank if key not in gone for name in needed.get(key, ())
            }
        return gone

    def _needed_by(self, stats: list[Stat]) -> dict[str, list[str]]:
        """Return what each manifest, record and entry of an index names; one that cannot be read
        counts as naming nothing.
        """
        needed = {}
        for key, value in self._read(stats):
            with contextlib.suppress(*DAMAGED):
                if key.startswith(f"{MOVED}/"):
                    kernel = decode_kernel(key, value)
                    needed[key] = [f"{RECORDS}/{kernel}", index_key(kernel)]
                elif key.startswith(f"{INDEX}/"):
                    needed[key] = [decode_place(key, value).manifest]
                else:
                    needed[key] = [unit.key for unit in self._units(key, value)]
        return needed

    def _mend(self, reached: _Reached) -> int:
        """Let kernels that tags reach be found by their keys, and once they moved; returns how many
        could not be by their keys.
        """
        indexed = self._index.mend(reached.bundles)
        self._index.moved.mend(reached.moved)
        return indexed

    def _dictionaries_needed(self, stats: list[Stat]) -> dict[str, str]:
        """Return the dictionary that each unit needs, as the head of the unit says; reads none
        where there are no dictionaries.
        """
        if not any(_rank(stat.key) == _DICTIONARY for stat in stats):
            return {}
        heads = (
            (k, store_layout.dictionary_of(v))
            for k, v in self._read([s for s in stats if _rank(s.key) == _UNIT], whole=False)
        )
        return {
            key: store_layout.dictionary_key(digest) for key, digest in heads if digest is not None
        }

    def _read(self, stats: list[Stat], *, whole: bool = True) -> Iterator[tuple[str, bytes]]:
        """Yield those of these objects that are there, a few at a time, each up to the limit of its
        kind, or only their heads.
        """
        limits = store_layout.bounds_of_keys([stat.key for stat in stats], self._limits)

        def expected(stat: Stat) -> int:
            return min(stat.size_bytes, limits[stat.key])

        for batch in batches(stats, READ_AT_ONCE, store_layout.BATCH_BYTES, expected):
            keys = [stat.key for stat in batch]
            asked = (
                {key: limits[key] for key in keys} if whole else store_layout.bounds_of_heads(keys)
            )
            values = self._backend.get_within(asked)
            # Popped, so that no more than one batch is in memory.
            for key in list(values):
                yield key, values.pop(key)

    def _reached(self) -> _Reached:
        reached: set[str] = set()
        unfollowed: list[tuple[_Tagged, str]] = []
        bundles: list[tuple[BundlePlace, frozenset[str]]] = []
        moved: dict[str, str] = {}
        for tag, manifest, why, hinted in self._tagged_and_hinted():
            reached.update(hinted)  # a dictionary that a tag names serves its next push
            tagged = tag, manifest, why
            if manifest is None:
                unfollowed.append((tagged, why))
                continue
            value = self._backend.get_within(
                store_layout.bounds_of_keys([manifest], self._limits)
            ).get(manifest)
            reached.add(manifest)
            if value is None:
                unfollowed.append((tagged, f"its manifest {manifest} is missing"))
                continue
            try:
                content = checked(
                    manifest, value, self._backend.untouched, partial(self._content, manifest)
                )
            except DAMAGED as error:
                unfollowed.append((tagged, error.message))
                continue
            names = names_in(content)
            reached |= {unit.key for unit in store_layout.units_of(content)}
            reached |= set(map(index_key, names))
            moved |= moved_keys(content.kernels)
            # A ref of another program may have a name that no tag has.
            place = BundlePlace(manifest, tag if store_layout.is_tag(tag) else "")
            bundles.append((place, names))
        reached |= set(map(moved_entry, moved))
        return _Reached(reached, tuple(self._still_so(unfollowed)), bundles, moved)

    def _still_so(self, found: list[tuple[_Tagged, str]]) -> Iterator[tuple[str, str]]:
        """Yield the tags with what was found wrong with them, but not those that were set anew
        meanwhile: what such a tag named before may have been pruned.
        """
        still = set(self._tagged()) if found else set()
        for tagged, reason in found:
            if tagged in still:
                yield tagged[0], reason

    def _tagged(self) -> Iterator[_Tagged]:
        """Yield each tag, the key of its manifest, and where that cannot be told, why."""
        return ((tag, manifest, why) for tag, manifest, why, _ in self._tagged_and_hinted())

    def _tagged_and_hinted(self) -> Iterator[tuple[str, str | None, str, list[str]]]:
        """Yield the same, and the keys of the dictionaries that the tag names."""
        refs = {
            key: self._backend.read_ref(key)
            for key in sorted(self._backend.list_refs(store_layout.TAGS))
        }
        for key, value in refs.items():
            if value is not None:
                tag = key.removeprefix(f"{store_layout.TAGS}/")
                hinted = [
                    store_layout.dictionary_key(digest)
                    for _, digest in store_layout.hints_of(value)
                ]
                try:
                    yield tag, store_layout.decode_tag(value, tag), "", hinted
                except FormatError as error:
                    yield tag, None, error.message.removeprefix(f"tag {tag} "), hinted

    def _everything(self, watch: Watch) -> Iterator[tuple[str, bytes]]:
        stats = [stat for prefix in KINDS for stat in self._backend.list(prefix)]
        watch(0, len(stats))
        for done, pair in enumerate(self._read(stats), 1):
            yield pair
            watch(done, len(stats))

    def _check(
        self,
        key: str,
        known: dict[str, store_layout.Unit],
        needed: dict[str, list[str]],
        value: bytes,
    ) -> None:
        """Check one object; manifests and records come before units and say what is in them, so
        units are checked blob by blob.
        """
        if _names_units(key):
            units = {unit.key: unit for unit in self._units(key, value)}
            known.update(units)
            needed[key] = list(units)
        elif key.startswith(f"{store_layout.DICTIONARIES}/"):
            opened(key, value)
        elif key.startswith(f"{INDEX}/"):
            decode_place(key, value)
        elif key.startswith(f"{MOVED}/"):
            decode_kernel(key, value)
        elif key.startswith(f"{store_layout.ENVELOPES}/"):
            check_envelope(key, value)
        else:
            unit = known.get(key)
            store_layout.checked_frame(value, key, None if unit is None else unit.size)
            if _rank(key) == _UNIT:
                self._check_unit(key, unit, value)

    def _check_unit(self, key: str, unit: store_layout.Unit | None, value: bytes) -> None:
        digest = store_layout.dictionary_of(value)
        try:
            if unit is not None:
                payload = unit_payload(value, key, unit.size, self._limits, self._dictionaries)
                store_layout.split_unit(payload, unit)
            elif digest is not None and self._dictionaries.get(digest) is None:
                raise NotFound(
                    f"{key} needs the dictionary {store_layout.dictionary_key(digest)}, which is"
                    " missing"
                )
        except NotFound as error:
            # Either the dictionary is missing, which is this unit's damage, or it is there and
            # damaged itself, and reported so.
            there = digest is not None and self._backend.exists(
                [store_layout.dictionary_key(digest)]
            )
            if not there:
                raise FormatError(error.message, key=key) from error

    def _units(self, key: str, value: bytes) -> list[store_layout.Unit]:
        if _is_record(key):
            return self._records.units(key, value)
        return list(store_layout.units_of(self._content(key, value)))

    def _content(self, manifest: str, value: bytes) -> Content:
        content_bytes, _ = store_layout.decode_manifest(value, manifest, self._limits)
        return Content.decode(content_bytes, self._limits)

    def _without_manifest(
        self, tagged: list[_Tagged], sound: set[str], damaged: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        found: list[tuple[_Tagged, str]] = []
        bad = self._still_bad(
            {manifest for _, manifest, _ in tagged if manifest is not None} - sound, damaged
        )
        for entry in tagged:
            _, manifest, why = entry
            if manifest is None:
                found.append((entry, why))
            elif manifest in bad:
                found.append((entry, f"its manifest {manifest} is missing or damaged"))
        return self._still_so(found)

    def _without_units(
        self, needed: dict[str, list[str]], sound: set[str], damaged: Collection[str]
    ) -> dict[str, str]:
        """Return the manifests and records whose units are missing or damaged, each with
        how many.
        """
        bad = self._still_bad(
            {unit for units in needed.values() for unit in units} - sound, damaged
        )
        lacking = {
            manifest: [unit for unit in units if unit in bad] for manifest, units in needed.items()
        }
        # A prune may have removed a manifest and its units since they were listed; then nothing
        # is missing.
        there = self._backend.exists([manifest for manifest, missing in lacking.items() if missing])
        return {
            key: (
                f"{len(lacking[key])} of {count(len(needed[key]), 'unit')} missing or damaged, such"
                f" as {lacking[key][0]}"
            )
            for key in there
        }

    def _still_bad(self, keys: set[str], damaged: Collection[str]) -> set[str]:
        """Return which of these are damaged or still missing: an object that was not found may have
        been pushed meanwhile.
        """
        return keys.intersection(damaged) | (keys - self._backend.exists(keys) if keys else set())


def _last_used_s(stats: list[Stat], needed: dict[str, list[str]]) -> dict[str, float]:
    """Return when each object was used last: not before any that needs it, itself or through
    others, so that this one is removed first.
    """
    used_s = {stat.key: stat.modified_s for stat in stats}
    # In the order of ranks what an object passes on has reached it before.
    for key in sorted(needed, key=_rank):
        for name in needed[key]:
            if name in used_s:
                used_s[name] = max(used_s[name], used_s[key])
    return used_s


def _is_entry(key: str) -> bool:
    return key.startswith((f"{INDEX}/", f"{MOVED}/"))


def _is_file(key: str) -> bool:
    return key.startswith(f"{FILES_INDEX}/")


def _is_record(key: str) -> bool:
    return key.startswith(f"{RECORDS}/")


def _names_units(key: str) -> bool:
    return key.startswith((f"{store_layout.MANIFESTS}/", f"{RECORDS}/"))


def _rank(key: str) -> int:
    """Return the order of removal among objects that were last used at the same time: each before
    the objects that it needs.
    """
    prefix = "/".join(key.split("/", 2)[:2])
    ranks = {
        store_layout.DICTIONARIES: _DICTIONARY,
        store_layout.ENVELOPES: _UNIT,
        store_layout.UNITS: _UNIT,
        INDEX: _INDEX,
        MOVED: _MOVED,
    }
    return ranks.get(prefix, _NAMES_UNITS)


def _called(key: str) -> str:
    """Return the name of a manifest or record in messages: the digest of its bundle, or the kernel
    key.
    """
    return (
        key.removeprefix(f"{RECORDS}/") if _is_record(key) else store_layout.digest_of_manifest(key)
    )


def _bytes(stats: Iterable[Stat]) -> int:
    return sum(stat.size_bytes for stat in stats)


def _choose(
    reached: Sequence[Stat],
    loose: Sequence[Stat],
    used_s: Mapping[str, float],
    before_s: float,
    least_s: float | None,
    max_bytes: int | None,
) -> tuple[list[Stat], list[tuple[str, Sequence[Stat]]]]:
    """Return what a prune is going to remove, oldest first, and by what each of the others is held.

    Args:
        reached: objects that tags reach.
        loose: the others, in the order in which they are to be removed.
        used_s: when each of these was used last.
        before_s: what was used later is left.
        least_s: as well, where only objects of some age are asked for.
        max_bytes: as of `Store.prune`.
    """
    young = [stat for stat in loose if used_s[stat.key] > before_s]
    old = [stat for stat in loose if used_s[stat.key] <= before_s]
    aged = len(old) if least_s is None else sum(used_s[stat.key] < least_s for stat in old)
    removed: list[Stat] = []
    kept_bytes = _bytes([*reached, *loose])
    for stat in old[:aged]:
        if max_bytes is not None and kept_bytes <= max_bytes:
            break
        removed.append(stat)
        kept_bytes -= stat.size_bytes
    groups = [(TAGS, reached), (GRACE, young), (AGE, old[aged:]), (ROOM, old[len(removed) : aged])]
    return removed, groups
