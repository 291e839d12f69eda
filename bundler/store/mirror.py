# SPDX-License-Identifier: Apache-2.0
"""`Mirror`: brings one store to what another one has, tag by tag, moving only what is missing.

::

    for each tag:  dictionaries ─▶ units ─▶ signatures ─▶ manifest ─▶ tag (compare-and-set) ─▶ entries of the kernel index

As in a push, what is missing comes before what names it: a run that is interrupted leaves units,
and the next run finds them there. `Store.sync_to` calls it.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from bundler.backends.batches import batches
from bundler.backends.port import Unread
from bundler.errors import (
    AccessDenied,
    BundlerError,
    ConfigError,
    DigestMismatch,
    FormatError,
    MergeConflict,
    NotFound,
    UnsupportedVersion,
)
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.package_loggers import logger
from bundler.store import store_layout
from bundler.store.blob_source import unit_batches
from bundler.store.kernel_index import BundlePlace, KernelIndex, names_in, sample
from bundler.store.maintenance import Watch
from bundler.store.object_proofs import unit_payload_of
from bundler.store.store_failures import NamedStore
from bundler.store.store_reports import SyncReport
from bundler.store.store_signatures import check_envelope, envelope_keys, envelopes_in
from bundler.store.stored_manifests import did_you_mean, read_manifest
from bundler.trust.envelope import Envelope
from bundler.trust.statements import TagStatement

# Another process set the tag at the same time; so often in a row is no accident.
_SWAPS = 5
# Keys of which it is remembered that the target has them, some 50 MB; tags of one model share most
# of their units.
_REMEMBERED = 400_000
# What is wrong with one tag leaves the others as they are; a store that does not answer, or is
# full, ends the run.
_OF_ONE_TAG = (
    NotFound,
    DigestMismatch,
    FormatError,
    AccessDenied,
    UnsupportedVersion,
    MergeConflict,
)
_log = logger("bundler.store")


class Mirror:
    """One run, from a source to a target.

    Guarantees: the target's tags never name what it lacks; everything is compared with its digest
    before it is written; at most a batch of 16 MiB is in memory.  What is signed goes along as it
    is, and no tag is set back to an older statement about it.

    Args:
        source: the store that is read; it is left as it is.
        target: the store that is brought up to date.
        limits: bounds on what is read.
        dry_run: change nothing.
    """

    def __init__(
        self,
        source: NamedStore,
        target: NamedStore,
        limits: Limits,
        *,
        dry_run: bool,
    ) -> None:
        self._source, self._source_name = source.untouched, source.name
        self._target, self._target_name = target, target.name
        self._limits, self._dry_run = limits, dry_run
        self._there: set[str] = set()
        self._units_moved = self._units_present = self._bytes_moved = 0
        self._units_sent = 0
        self._watch: Watch | None = None

    def run(
        self,
        globs: Sequence[str] = (),
        *,
        delete_tags: bool = False,
        told: Callable[[str], object] = lambda _tag: None,
        watch: Watch | None = None,
    ) -> SyncReport:
        """Mirror the tags that match one of the globs, all without any; raises as `Store.sync_to`.

        Args:
            globs: of tags.
            delete_tags: remove tags of the target that match, and that the source does not have.
            told: is told of each tag before it is looked at.
            watch: is told how many units were moved, of those that are known so far to be missing.
        """
        started = time.monotonic()
        self._check_target()
        tags = self._tags(self._source, globs)
        if globs and not tags:
            near = self._near(globs)
            hint = f"; {did_you_mean(near)}" if near else ""
            raise NotFound(
                f"{self._source_name}: no tag matches {', '.join(globs)}{hint}",
                store=self._source_name,
                near=near,
            )
        if delete_tags and not tags:
            raise ConfigError(
                f"{self._source_name}: has no tags, so all of {self._target_name} would be deleted;"
                " delete them with `tags --delete`"
            )
        moved: list[str] = []
        kept: list[str] = []
        failed: list[tuple[str, str]] = []
        self._watch = watch
        for tag in tags:
            told(tag)
            try:
                (moved if self._mirror(tag) else kept).append(tag)
            except _OF_ONE_TAG as error:
                _log.info("tag %s is not mirrored: %s", tag, error)
                failed.append((tag, error.message))
        deleted = self._delete(set(tags), globs) if delete_tags else ()
        return SyncReport(
            tuple(moved),
            tuple(kept),
            tuple(deleted),
            tuple(failed),
            self._units_moved,
            self._units_present,
            self._bytes_moved,
            time.monotonic() - started,
        )

    def _check_target(self) -> None:
        if not self._dry_run and not self._target.writable:
            raise AccessDenied(
                f"{self._target_name}: it is only read here; give a store that may be written",
                store=self._target_name,
            )
        if self._source_name == self._target_name and not self._source_name.startswith("memory:"):
            raise ConfigError(f"{self._source_name}: source and target are the same store")

    @staticmethod
    def _tags(store: NamedStore, globs: Sequence[str]) -> list[str]:
        tags = sorted(
            key.removeprefix(f"{store_layout.TAGS}/") for key in store.list_refs(store_layout.TAGS)
        )
        return [tag for tag in tags if not globs or any(fnmatchcase(tag, glob) for glob in globs)]

    def _near(self, globs: Sequence[str]) -> tuple[str, ...]:
        """Return tags of the source that are called almost as was asked for."""
        there = self._tags(self._source, ())
        return tuple(
            dict.fromkeys(tag for glob in globs for tag in difflib.get_close_matches(glob, there))
        )

    def _mirror(self, tag: str) -> bool:
        """Mirror one tag; False when the target had it and all that it reaches."""
        if len(self._there) > _REMEMBERED:
            self._there.clear()
        key = store_layout.tag_key(tag)
        value = self._source.read_ref(key)
        if value is None:
            raise NotFound(f"{self._source_name}: tag {tag} was removed meanwhile", tag=tag)
        self._check_newer(tag, value)
        manifest = store_layout.decode_tag(value, tag)
        stored = read_manifest(self._source, manifest, self._limits)
        content = Content.decode(stored[0], self._limits)
        units = {unit.key: unit for unit in store_layout.units_of(content)}
        keys = names_in(content)
        signed = envelope_keys(self._source, manifest)
        hinted = [store_layout.dictionary_key(digest) for _, digest in store_layout.hints_of(value)]
        entries = sample(keys)
        self._look([manifest, *signed, *hinted, *entries, *units])
        missing = [unit for name, unit in units.items() if name not in self._there]
        self._units_present += len(units) - len(missing)
        self._units_moved += len(missing)
        complete = not missing and {manifest, *signed} <= self._there
        if self._dry_run:
            self._there.update(unit.key for unit in missing)  # the next tag would find them
            return not (complete and self._named(key) == value)
        self._move_hinted([name for name in hinted if name not in self._there])
        self._move_units(missing)
        self._move_signatures([name for name in signed if name not in self._there])
        if manifest not in self._there:
            # before the manifest: after a power failure it must not name what was lost
            self._flush()
            self._put({manifest: store_layout.encode_manifest(*stored)})
        if not complete:
            self._flush()
        moved = self._set(tag, key, value) or not complete
        index = KernelIndex(self._target, self._limits)
        indexed = not moved and self._there.issuperset(entries)
        over, held = bool(signed or envelopes_in(value)), keys if indexed else ()
        fresh = len(missing) == len(units)
        self._bytes_moved += index.add(
            content, BundlePlace(manifest, tag), held, fresh=fresh, over=over
        )
        return moved

    def _look(self, keys: Iterable[str]) -> None:
        """Learn which objects the target has, and mark them as in use, so that a prune
        spares them.
        """
        ask = self._target.exists if self._dry_run else self._target.claim
        for batch in batches(
            [key for key in dict.fromkeys(keys) if key not in self._there], store_layout.BATCH_KEYS
        ):
            self._there |= ask(batch)

    def _move_units(self, units: Collection[store_layout.Unit]) -> None:
        for batch in unit_batches(units):
            found = self._source.get_within(store_layout.bounds_of_units(batch))
            for unit in batch:
                value = found.get(unit.key)
                if value is None:
                    raise NotFound(
                        f"{self._source_name}: {unit.key} is missing; push the bundle again",
                        key=unit.key,
                    )
                unit_payload_of(unit, self._limits, value, self._dictionary)
            self._move_hinted(sorted({*map(_dictionary_key, found.values())} - self._there - {""}))
            self._put(found)
            self._units_sent += len(batch)
            if self._watch is not None:
                self._watch(self._units_sent, self._units_moved)

    def _dictionary(self, key: str, most: int) -> bytes | None:
        found = self._source.get_within({key: most}).get(key)
        return None if isinstance(found, Unread) else found

    def _move_hinted(self, dictionaries: Collection[str]) -> None:
        """Move dictionaries; one that the source has lost is of no use to anybody, and what needs
        it is reported as damaged.
        """
        from bundler.store.dictionaries import opened

        for key in dictionaries:
            value = self._dictionary(key, store_layout.bound_of_key(key))
            if value is not None:
                opened(key, value)
                self._put({key: value})

    def _move_signatures(self, keys: Collection[str]) -> None:
        found = self._source.get_within(store_layout.bounds_of_keys(keys)) if keys else {}
        for key, value in found.items():
            check_envelope(key, value)
        self._put(found)

    def _put(self, values: dict[str, bytes]) -> None:
        if values:
            self._target.put(values)
            self._there |= values.keys()
            self._bytes_moved += sum(map(len, values.values()))

    def _flush(self) -> None:
        self._target.flush()

    def _named(self, key: str) -> bytes | None:
        return self._target.read_ref(key)

    def _set(self, tag: str, key: str, value: bytes) -> bool:
        """Set a tag in the target; False when it says so already."""
        for _ in range(_SWAPS):
            before = self._named(key)
            if before == value:
                return False
            self._check_newer(tag, value)
            if self._target.swap_ref(key, before, value):
                return True
        raise MergeConflict(f"{self._target_name}: tag {tag} keeps changing; sync again", tag=tag)

    def _check_newer(self, tag: str, value: bytes) -> None:
        """Refuse to set a tag back: to what was signed before what the target has, or to what
        nobody signed.
        """
        held, offered = _epoch(self._named(store_layout.tag_key(tag))), _epoch(value)
        if held > offered:
            what = (
                f"an older statement (epoch {offered}, there {held})"
                if offered
                else "what nobody signed"
            )
            raise MergeConflict(
                f"{self._target_name}: tag {tag} is signed there, and would be set back to {what};"
                " delete the tag there to do so",
                tag=tag,
            )

    def _delete(self, tags: Collection[str], globs: Sequence[str]) -> list[str]:
        """Remove tags of the target that the source does not have; what they named stays until
        prune.
        """
        gone = []
        for tag in self._tags(self._target, globs):
            if tag not in tags:
                key = store_layout.tag_key(tag)
                before = self._named(key)
                if self._dry_run or (
                    before is not None and self._target.swap_ref(key, before, None)
                ):
                    gone.append(tag)
        return gone


def _dictionary_key(value: bytes) -> str:
    digest = store_layout.dictionary_of(value)
    return "" if digest is None else store_layout.dictionary_key(digest)


def _epoch(value: bytes | None) -> int:
    """Return the highest epoch that statements in a tag's value name, whoever signed them; 0
    without any.
    """
    epochs = [0]
    for data in envelopes_in(value):
        try:
            epochs.append(
                TagStatement.decode(Envelope.decode(data, TagStatement.payload_type).payload).epoch
            )
        except BundlerError:
            continue  # about the bundle, or of a newer version
    return max(epochs)
