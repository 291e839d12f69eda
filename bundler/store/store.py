# SPDX-License-Identifier: Apache-2.0
"""`BundleStore`: push, pull and tags."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, Self

from bundler.backends.base import Backend
from bundler.errors import (
    BundlerError,
    ConfigError,
    DigestMismatch,
    FormatError,
    MergeConflict,
    NotFound,
    StoreUnavailable,
    UnsupportedVersion,
)
from bundler.format.bundle import Bundle
from bundler.format.combine import entry_name, merge
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content, Observed
from bundler.store import layout
from bundler.store.damage import DAMAGED, checked
from bundler.store.dictionaries import Packing
from bundler.store.errors_map import store_errors
from bundler.store.layout import Hint
from bundler.store.maintenance import READ_AT_ONCE, Maintenance
from bundler.store.reports import PruneReport, PushReport, StoreStats, TagInfo, VerifyReport
from bundler.store.source import StoreBlobs, batches

Mode = Literal["merge", "replace", "create"]
MODES = ("merge", "replace", "create")
# Each lost race means that another push succeeded; so many in a row for one tag is no race any more.
SWAP_ATTEMPTS = 100
_log = logging.getLogger("bundler.store")


@dataclass
class _Sent:
    """What a push sent so far."""

    units: int = 0
    present: int = 0
    bytes: int = 0
    repaired: int = 0


class BundleStore:
    """Bundles in a byte store, shared by any number of processes.

    Guarantees: a manifest is written after every unit that it names was acknowledged, and a tag after its manifest; what is
    read is verified; every operation may be repeated, and stopped anywhere.  Of pushes to one tag at once with
    `mode="merge"`, the tag holds all.  Thread-safe; may be used on both sides of a fork.
    Does not guarantee: that a push survives a power failure before it returned; that what no tag reaches stays longer than
    `prune` says.

    Args:
        backend: the byte store; closed with the store.
        name: what to call it in messages; holds no secret.
        limits: bounds on what is read.
    """

    def __init__(self, backend: Backend, name: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self._backend, self.name, self._limits = backend, name, limits
        self._maintenance = Maintenance(backend, name, limits)

    def push(self, bundle: Bundle, tag: str | None = None, mode: Mode = "merge") -> PushReport:
        """Store a bundle, sending only what is missing.

        Args:
            bundle: what to store.
            tag: a name for it, such as `llama3/h200`; None stores it under its digest alone.
            mode: `merge` makes the tag name the union of what it named and this; `replace` makes it name this; `create`
                refuses when it names something else.

        Raises:
            ConfigError: not a tag, or another mode.
            FormatError: what the tag says is damaged or of a newer version; `replace` does not mind.
            UnsupportedVersion: the bundle has features that we can read but not write.
            MergeConflict: with `create`, the tag is set; with `merge`, one key stands for two kernels.
            StoreFull, AccessDenied, StoreUnavailable: it could not be stored; push again.  The tag names what it named
                before, or, when it was only the last answer that got lost, what it should.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: expected {', '.join(map(repr, MODES))}", got=mode)
        started = time.monotonic()
        key = None if tag is None else layout.tag_key(tag)
        sent = _Sent()
        for _ in range(SWAP_ATTEMPTS):
            before = self._ref(key)
            current, hints = self._current(before, tag, mode), layout.hints_of(before)
            final = self._combined(bundle, tag, current, mode, hints)
            if not final.writable:
                raise UnsupportedVersion(
                    "this bundle was written by a newer version, with features that this one would lose; upgrade triton-bundler"
                )
            manifest, hints = self._send(final, sent, hints)
            value = layout.encode_tag(manifest, hints)
            if key is None or before == value or self._swap(key, before, value):
                return PushReport(
                    final.digest, sent.units, sent.present, sent.bytes, sent.repaired, final.variants_dropped,
                    current and layout.digest_of_manifest(current), None if key is None else final.digest,
                    time.monotonic() - started,
                )  # fmt: skip
        raise StoreUnavailable(
            f"{self.name}: tag {tag} changed {SWAP_ATTEMPTS} times while we pushed; try again", tag=tag
        )

    def pull(self, tag_or_digest: str, *, read_only: bool = False) -> Bundle:
        """Return a bundle by tag or `sha256:…` digest; its content is fetched when it is read.

        Args:
            tag_or_digest: which bundle.
            read_only: leave the store as it is; else what is pulled is marked as in use, so that `prune` spares it, and
                what is found damaged is removed, so that the next push sends it again.

        Raises:
            NotFound: no such tag or bundle, or its manifest is missing.
            ConfigError: neither a tag nor a digest.
            DigestMismatch: the manifest is damaged; push again.
            FormatError: the tag or the manifest is none that this version reads.
            StoreUnavailable, AccessDenied: the store cannot be read.
        """
        return self._open(*self._manifest_of(tag_or_digest), read_only=read_only)

    def tags(self) -> tuple[TagInfo, ...]:
        """Return every tag, by name, with what is in its bundle."""
        return tuple(self._maintenance.tags())

    def delete_tag(self, tag: str) -> bool:
        """Remove a tag; True when it was set.  What it named stays until `prune`."""
        key = layout.tag_key(tag)
        with store_errors(self.name):
            for _ in range(SWAP_ATTEMPTS):
                value = self._backend.read_ref(key)
                if value is None:
                    return False
                if self._backend.swap_ref(key, value, None):
                    return True
        raise StoreUnavailable(f"{self.name}: tag {tag} keeps changing; try again", tag=tag)

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        return self._maintenance.stats()

    def verify(self, repair: bool = False) -> VerifyReport:
        """Read and check everything.

        Args:
            repair: remove damaged objects, so that the next push sends them again.
        """
        return self._maintenance.verify(repair=repair)

    def prune(
        self, max_bytes: int | None = None, older_than_s: float | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Remove what no tag reaches, oldest first.

        Nothing that a tag reaches is removed, and nothing that was touched in the last 24 hours on the store's own clock:
        another process may be about to name it.

        Args:
            max_bytes: stop when the store holds no more than this; None removes all that may be removed.
            older_than_s: only what was not touched for so many seconds.
            dry_run: remove nothing, only say what would be.
        """
        return self._maintenance.prune(max_bytes, older_than_s, dry_run=dry_run)

    def close(self) -> None:
        """Release the byte store; closing twice is fine."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _ref(self, key: str | None) -> bytes | None:
        with store_errors(self.name):
            return None if key is None else self._backend.read_ref(key)

    def _current(self, before: bytes | None, tag: str | None, mode: Mode) -> str | None:
        if before is None or tag is None:
            return None
        try:
            return layout.decode_tag(before, tag)
        except FormatError:
            if mode == "replace":
                return None
            raise

    def _swap(self, key: str, before: bytes | None, value: bytes) -> bool:
        with store_errors(self.name):
            return self._backend.swap_ref(key, before, value)

    def _combined(
        self, bundle: Bundle, tag: str | None, current: str | None, mode: Mode, hints: Sequence[Hint]
    ) -> Bundle:
        if current is None or mode == "replace":
            return bundle
        if mode == "create":
            if layout.digest_of_manifest(current) == bundle.digest:
                return bundle
            raise MergeConflict(f"{self.name}: tag {tag} is set already; use mode='merge' or 'replace'", tag=tag)
        try:
            held = self._open(current, hints)
        except (NotFound, DigestMismatch) as error:
            with store_errors(self.name):
                if self._backend.exists([current]):
                    raise  # it came damaged, and may yet come whole
            # A tag without its manifest names nothing that could be merged; the push repairs it.
            _log.warning("%s: tag %s is dangling and is set anew: %s", self.name, tag, error)
            return bundle
        try:
            return merge([bundle, held])
        except (NotFound, *DAMAGED) as error:
            _log.warning("%s: tag %s: what is damaged gives way to what is pushed: %s", self.name, tag, error)
            return merge([bundle, _without(held, bundle)])

    def _send(self, bundle: Bundle, sent: _Sent, hints: Sequence[Hint]) -> tuple[str, tuple[Hint, ...]]:
        """Store dictionaries, units, then the manifest, each only when missing; returns its key, and what to hint at."""
        units = {unit.key: unit for unit in layout.units_of(bundle.content)}
        observed = bundle.observed.encode()
        manifest = layout.manifest_key(bundle.digest, observed)
        present = self._look(list(units.values()), [manifest, *map(_key_of, hints)], sent)
        lost = [hint for hint in hints if _key_of(hint) not in present]
        if lost:
            present -= self._without_dictionary(units.keys() & present, {digest for _, digest in lost})
        missing = [unit for key, unit in units.items() if key not in present]
        sent.present += len(units) - len(missing)
        packing = Packing(self._backend, self.name, [hint for hint in hints if hint not in lost])
        if missing and not self._backend.reads_are_cheap:
            new = packing.choose(missing, partial(_payload, bundle))
            if new:
                self._put(new)
                sent.bytes += _size(new)
        for values in self._sealed(bundle, missing, packing):
            self._put(values)
            sent.bytes += _size(values)
            sent.units += len(values)
        with store_errors(self.name):
            self._backend.flush()
        if manifest not in present:
            values = {manifest: layout.encode_manifest(bundle.content.encode(), observed)}
            self._put(values)
            with store_errors(self.name):
                self._backend.flush()
            sent.bytes += _size(values)
        return manifest, packing.hints({unit.family for unit in units.values()})

    def _look(self, units: list[layout.Unit], others: list[str], sent: _Sent) -> set[str]:
        """Return which of these objects are there, marked as in use; asked in batches."""
        if self._backend.reads_are_cheap:  # and are read, so that a batch is one of bytes
            asked = [others, *([unit.key for unit in batch] for batch in batches(units))]
        else:
            every = [*others, *(unit.key for unit in units)]
            asked = [every[start : start + layout.BATCH_KEYS] for start in range(0, len(every), layout.BATCH_KEYS)]
        return set().union(*(self._present(keys, sent) for keys in asked))

    def _without_dictionary(self, keys: Collection[str], lost: Collection[bytes]) -> set[str]:
        """Remove the units that need a dictionary which is gone, so that they can be sent again; returns them."""
        every, gone = sorted(keys), set()
        with store_errors(self.name):
            for start in range(0, len(every), READ_AT_ONCE):
                found = self._backend.get(every[start : start + READ_AT_ONCE])
                useless = [key for key, value in found.items() if layout.dictionary_of(value) in lost]
                gone.update(useless)
                self._backend.delete(useless)
        return gone

    def _sealed(self, bundle: Bundle, units: Iterable[layout.Unit], packing: Packing) -> Iterator[dict[str, bytes]]:
        """Yield what is to be stored for these units, in batches."""
        values: dict[str, bytes] = {}
        size = 0
        for unit in units:
            try:
                value = packing.seal(unit, _payload(bundle, unit))
            except NotFound as error:
                # Merged from a tag whose unit is gone: readers skip that kernel until somebody who has it pushes again.
                _log.warning("%s: %s is dangling: %s", self.name, unit.key, error)
                continue
            if values and (len(values) >= layout.BATCH_KEYS or size + len(value) > layout.BATCH_BYTES):
                yield values
                values, size = {}, 0
            values[unit.key] = value
            size += len(value)
        if values:
            yield values

    def _put(self, values: dict[str, bytes]) -> None:
        """Store objects, and where that is cheap read them back: no tag is to name what did not arrive whole."""
        with store_errors(self.name):
            self._backend.put(values)
        if self._backend.reads_are_cheap:
            lost = values.keys() - self._present(list(values), _Sent())
            if lost:
                raise StoreUnavailable(f"{self.name}: {min(lost)} did not arrive whole; push again", key=min(lost))

    def _present(self, keys: list[str], sent: _Sent) -> frozenset[str]:
        """Return which objects are there, marked as in use; damaged ones are removed where reading them back is cheap."""
        with store_errors(self.name):
            if not self._backend.reads_are_cheap:
                return self._backend.claim(keys)
            # Before we look: a prune that runs now removes nothing that we then find.
            self._backend.touch(keys)
            found = self._backend.get(keys)
        sound = set()
        for key, value in found.items():
            try:
                checked(self._backend, self.name, key, value, partial(layout.check_seal, key=key))
                sound.add(key)
            except DigestMismatch:
                sent.repaired += 1
        with store_errors(self.name):
            stuck = self._backend.exists(found.keys() - sound)
        if stuck:
            raise StoreUnavailable(
                f"{self.name}: {min(stuck)} is damaged and cannot be removed, so it cannot be sent again",
                key=min(stuck),
            )
        return frozenset(sound)

    def _manifest_of(self, tag_or_digest: str) -> tuple[str, Sequence[Hint]]:
        """Return the key of the manifest that a tag or digest names, and the dictionaries that a tag names with it."""
        with store_errors(self.name):
            if tag_or_digest.startswith("sha256:"):
                found = sorted(self._backend.list(layout.manifests_of(tag_or_digest)), key=lambda s: s.modified_s)
                if found:
                    return found[-1].key, ()
                raise NotFound(f"{self.name}: no bundle {tag_or_digest}", digest=tag_or_digest)
            value = self._backend.read_ref(layout.tag_key(tag_or_digest))
        if value is None:
            raise NotFound(
                f"{self.name}: no tag {tag_or_digest!r}; `triton-bundler tags` lists them", tag=tag_or_digest
            )
        return layout.decode_tag(value, tag_or_digest), layout.hints_of(value)

    def _open(self, manifest: str, hints: Sequence[Hint], *, read_only: bool = False) -> Bundle:
        with store_errors(self.name):
            value = self._backend.get([manifest]).get(manifest)
        if value is None:
            digest = layout.digest_of_manifest(manifest)
            raise NotFound(f"{self.name}: the manifest of {digest} is missing; push the bundle again", digest=digest)
        decode = partial(layout.decode_manifest, key=manifest, limits=self._limits)
        removable = () if read_only else (DigestMismatch,)
        content_bytes, observed_bytes = checked(self._backend, self.name, manifest, value, decode, removable)
        content = Content.decode(content_bytes, self._limits)
        observed = Observed.decode(observed_bytes, self._limits)
        blobs = StoreBlobs(self._backend, self.name, content, self._limits, hints=hints, read_only=read_only)
        if not read_only:
            self._keep_alive([manifest, *map(_key_of, hints), *blobs.keys])
        return Bundle(content, observed, blobs, content_bytes=content_bytes)

    def _keep_alive(self, keys: list[str]) -> None:
        """Mark what was pulled as in use, so that `prune` spares it; a store that we may only read stays as it is."""
        try:
            with store_errors(self.name):
                self._backend.touch(keys)
        except BundlerError as error:
            _log.info("%s: not marked as in use: %s", self.name, error)


def _size(values: dict[str, bytes]) -> int:
    return sum(map(len, values.values()))


def _key_of(hint: Hint) -> str:
    return layout.dictionary_key(hint[1])


def _payload(bundle: Bundle, unit: layout.Unit) -> bytes:
    return b"".join(bundle.blobs.read_blob(digest) for digest, _ in unit.blobs)


def _without(held: Bundle, bundle: Bundle) -> Bundle:
    """Return what a tag held but for the entries that a bundle brings."""
    brought = {entry_name(entry) for entry in bundle.content.entries}
    kept = [entry for entry in held.content.entries if entry_name(entry) not in brought]
    return Bundle(Content.of(kept, held.tuning_records), held.observed, held.blobs)
