# SPDX-License-Identifier: Apache-2.0
"""Looks after a store: what is in it, whether it is sound, what may go."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from bundler.backends.base import Backend, Stat
from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.store import layout
from bundler.store.errors_map import store_errors
from bundler.store.reports import PruneReport, StoreStats, VerifyReport
from bundler.store.source import quarantine

# Another process may have found an object present and be about to name it in a manifest.
SPARED_S = 24 * 3600.0
READ_AT_ONCE = 64
_log = logging.getLogger("bundler.store")


class Maintenance:
    """Operations over a whole store; see `Store` for what they promise."""

    def __init__(self, backend: Backend, name: str, limits: Limits) -> None:
        self._backend, self._name, self._limits = backend, name, limits

    def stats(self) -> StoreStats:
        """Count and add up."""
        with store_errors(self._name):
            units = list(self._backend.list(layout.UNITS))
            manifests = list(self._backend.list(layout.MANIFESTS))
            tags = len(list(self._backend.list_refs(layout.TAGS)))
        reached, _ = self._reached()
        return StoreStats(
            len(units), _bytes(units), len(manifests), _bytes(manifests), tags,
            sum(stat.size_bytes for stat in (*units, *manifests) if stat.key in reached),
        )  # fmt: skip

    def verify(self, *, repair: bool) -> VerifyReport:
        """Read every object, and check that manifests and tags lack nothing."""
        damaged: list[tuple[str, str]] = []
        sound: set[str] = set()
        known: dict[str, layout.Unit] = {}
        for key, value in self._everything():
            try:
                self._check(key, value, known)
                sound.add(key)
            except BundlerError as error:
                damaged.append((key, error.message))
        removed = []
        if repair:
            for key, _ in damaged:
                quarantine(self._backend, self._name, key)
                removed.append(key)
        return VerifyReport(
            len(sound) + len(damaged), tuple(sorted(damaged)), tuple(sorted(self._dangling(sound))), tuple(removed)
        )

    def prune(self, max_bytes: int | None, older_than_s: float | None, *, dry_run: bool) -> PruneReport:
        """Remove what no tag reaches, oldest first, within the bounds of `Store.prune`."""
        with store_errors(self._name):
            now_s = self._backend.now_s()
            everything = [*self._backend.list(layout.UNITS), *self._backend.list(layout.MANIFESTS)]
        reached, complete = self._reached()
        loose = sorted((s for s in everything if s.key not in reached), key=lambda s: (s.modified_s, s.key))
        # Without its manifest a tag does not say what it reaches: then nothing is known to be loose.
        old = [s for s in loose if complete and now_s - s.modified_s > SPARED_S]
        kept_bytes = _bytes(everything)
        removed: list[Stat] = []
        for stat in old:
            if (older_than_s is not None and now_s - stat.modified_s <= older_than_s) or (
                max_bytes is not None and kept_bytes <= max_bytes
            ):
                break
            if not dry_run and not self._remove(stat):
                continue
            removed.append(stat)
            kept_bytes -= stat.size_bytes
        return PruneReport(
            tuple(stat.key for stat in removed), _bytes(removed), kept_bytes,
            _bytes([s for s in everything if s.key in reached]), len(loose) - len(old),
            0 if max_bytes is None else max(0, kept_bytes - max_bytes),
        )  # fmt: skip

    def _remove(self, stat: Stat) -> bool:
        """Remove an object unless it was touched since it was listed."""
        with store_errors(self._name):
            now = next(iter(self._backend.list(stat.key)), None)
            return now == stat and bool(self._backend.delete([stat.key]))

    def _reached(self) -> tuple[set[str], bool]:
        """Return every key that a tag reaches, and whether all tags could be followed."""
        reached: set[str] = set()
        complete = True
        for _, manifest in self._tagged():
            with store_errors(self._name):
                value = self._backend.get([manifest]).get(manifest)
            reached.add(manifest)
            try:
                reached |= set() if value is None else {unit.key for unit in self._units(manifest, value)}
            except BundlerError as error:
                complete = False
                _log.warning("%s: %s cannot be followed, nothing is pruned: %s", self._name, manifest, error)
        return reached, complete

    def _tagged(self) -> Iterator[tuple[str, str]]:
        """Yield each tag and the key of its manifest."""
        with store_errors(self._name):
            refs = {key: self._backend.read_ref(key) for key in sorted(self._backend.list_refs(layout.TAGS))}
        for key, value in refs.items():
            if value is not None:
                tag = key.removeprefix(f"{layout.TAGS}/")
                yield tag, layout.decode_tag(value, tag)

    def _everything(self) -> Iterator[tuple[str, bytes]]:
        with store_errors(self._name):
            keys = [stat.key for prefix in (layout.MANIFESTS, layout.UNITS) for stat in self._backend.list(prefix)]
            for start in range(0, len(keys), READ_AT_ONCE):
                yield from self._backend.get(keys[start : start + READ_AT_ONCE]).items()

    def _check(self, key: str, value: bytes, known: dict[str, layout.Unit]) -> None:
        """Check one object; manifests come first and say what is in the units, so that those are checked blob by blob."""
        if key.startswith(f"{layout.MANIFESTS}/"):
            known.update({unit.key: unit for unit in self._units(key, value)})
        elif key in known:
            layout.split_unit(layout.unseal(value, key, known[key].size, self._limits), known[key])
        else:
            layout.check_seal(value, key)

    def _units(self, manifest: str, value: bytes) -> list[layout.Unit]:
        content_bytes, _ = layout.decode_manifest(value, manifest, self._limits)
        return list(layout.units_of(Content.decode(content_bytes, self._limits)))

    def _dangling(self, sound: set[str]) -> Iterator[tuple[str, str]]:
        for tag, manifest in self._tagged():
            if manifest not in sound:
                yield tag, f"its manifest {manifest} is missing or damaged"
        for manifest in sorted(key for key in sound if key.startswith(f"{layout.MANIFESTS}/")):
            with store_errors(self._name):
                value = self._backend.get([manifest]).get(manifest)
            if value is None:
                continue  # removed since
            try:
                missing = [unit.key for unit in self._units(manifest, value) if unit.key not in sound]
            except (DigestMismatch, FormatError) as error:
                yield layout.digest_of_manifest(manifest), str(error)
                continue
            if missing:
                yield layout.digest_of_manifest(manifest), f"{len(missing)} units are missing or damaged: {missing[0]}"


def _bytes(stats: list[Stat]) -> int:
    return sum(stat.size_bytes for stat in stats)
