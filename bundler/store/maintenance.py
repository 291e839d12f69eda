# SPDX-License-Identifier: Apache-2.0
"""Looks after a store: what is in it, whether it is sound, what may go."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

from bundler.backends.base import Backend, Stat
from bundler.errors import FormatError
from bundler.format.limits import Limits
from bundler.format.manifest import Content
from bundler.store import layout
from bundler.store.errors_map import store_errors
from bundler.store.reports import PruneReport, StoreStats, TagInfo, VerifyReport
from bundler.store.source import DAMAGED, checked

# Another process may have found an object present and be about to name it in a manifest.
SPARED_S = 24 * 3600.0
READ_AT_ONCE = 64


class Maintenance:
    """Operations over a whole store; see `Store` for what they promise."""

    def __init__(self, backend: Backend, name: str, limits: Limits) -> None:
        self._backend, self._name, self._limits = backend, name, limits

    def tags(self) -> Iterator[TagInfo]:
        """Yield every tag with what is in its bundle."""
        tagged = list(self._tagged())
        manifests = sorted({manifest for _, manifest, _ in tagged if manifest is not None})
        values: dict[str, bytes] = {}
        with store_errors(self._name):
            for start in range(0, len(manifests), READ_AT_ONCE):
                values |= self._backend.get(manifests[start : start + READ_AT_ONCE])
        for tag, manifest, why in tagged:
            if manifest is None:
                yield TagInfo(tag, None, problem=why)
            else:
                yield self._tag_info(tag, manifest, values.get(manifest))

    def _tag_info(self, tag: str, manifest: str, value: bytes | None) -> TagInfo:
        digest = layout.digest_of_manifest(manifest)
        if value is None:
            return TagInfo(tag, digest, problem=f"the manifest of {digest} is missing; push the bundle again")
        try:
            content = checked(self._backend, self._name, manifest, value, partial(self._content, manifest), ())
        except DAMAGED as error:
            return TagInfo(tag, digest, problem=error.message)
        targets = sorted({str(kernel.target) for kernel in content.kernels})
        return TagInfo(tag, digest, len(content.kernels), tuple(targets), sum(size for _, size in content.blobs))

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
        # Before the objects: what is pushed meanwhile is complete, and none of our business.
        tagged = list(self._tagged())
        damaged: dict[str, str] = {}
        sound: set[str] = set()
        known: dict[str, layout.Unit] = {}
        needed: dict[str, list[str]] = {}
        for key, value in self._everything():
            try:
                check = partial(self._check, key, known, needed)
                checked(self._backend, self._name, key, value, check, DAMAGED if repair else ())
                sound.add(key)
            except DAMAGED as error:
                damaged[key] = error.message
        with store_errors(self._name):
            removed = damaged.keys() - self._backend.exists(damaged.keys()) if repair else set()
        return VerifyReport(
            len(sound) + len(damaged), tuple(sorted(damaged.items())),
            tuple(sorted({*self._without_manifest(tagged, sound, damaged), *self._without_units(needed, sound, damaged)})),
            tuple(sorted(removed)),
        )  # fmt: skip

    def prune(self, max_bytes: int | None, older_than_s: float | None, *, dry_run: bool) -> PruneReport:
        """Remove what no tag reaches, oldest first, within the bounds of `Store.prune`."""
        with store_errors(self._name):
            now_s = self._backend.now_s()
            everything = [*self._backend.list(layout.UNITS), *self._backend.list(layout.MANIFESTS)]
        reached, unfollowed = self._reached()
        loose = [s for s in everything if s.key not in reached]
        needed = self._needed_by([s.key for s in loose if _is_manifest(s.key)])
        used_s = _last_used_s(loose, needed)
        loose.sort(key=lambda s: (used_s[s.key], not _is_manifest(s.key), s.key))
        # A tag that cannot be read does not say what it reaches: then nothing is known to be loose.
        old = [s for s in loose if not unfollowed and now_s - used_s[s.key] > SPARED_S]
        kept_bytes = _bytes(everything)
        removed: list[Stat] = []
        for stat in old:
            if (older_than_s is not None and now_s - used_s[stat.key] <= older_than_s) or (
                max_bytes is not None and kept_bytes <= max_bytes
            ):
                break
            removed.append(stat)
            kept_bytes -= stat.size_bytes
        if not dry_run:
            gone = self._remove([stat.key for stat in removed], needed, now_s - SPARED_S)
            removed = [stat for stat in removed if stat.key in gone]
            kept_bytes = _bytes(everything) - _bytes(removed)
        return PruneReport(
            tuple(stat.key for stat in removed), _bytes(removed), kept_bytes,
            _bytes([s for s in everything if s.key in reached]), len(loose) - len(old),
            0 if max_bytes is None else max(0, kept_bytes - max_bytes), unfollowed,
        )  # fmt: skip

    def _remove(self, keys: list[str], needed: dict[str, list[str]], before_s: float) -> set[str]:
        """Remove what was not touched meanwhile, manifests before what they name; returns what was removed."""
        manifests = [key for key in keys if _is_manifest(key)]
        gone = self._delete(manifests, before_s)
        still_needed = {unit for manifest in manifests if manifest not in gone for unit in needed.get(manifest, ())}
        return gone | self._delete([k for k in keys if not _is_manifest(k) and k not in still_needed], before_s)

    def _delete(self, keys: list[str], before_s: float) -> set[str]:
        gone: set[str] = set()
        with store_errors(self._name):
            for start in range(0, len(keys), layout.BATCH_KEYS):
                gone |= self._backend.delete(keys[start : start + layout.BATCH_KEYS], unmodified_since_s=before_s)
        return gone

    def _needed_by(self, manifests: list[str]) -> dict[str, list[str]]:
        """Return the units that each of these manifests names; one that cannot be read needs none."""
        needed = {}
        for start in range(0, len(manifests), READ_AT_ONCE):
            with store_errors(self._name):
                values = self._backend.get(manifests[start : start + READ_AT_ONCE])
            for key, value in values.items():
                with contextlib.suppress(*DAMAGED):
                    needed[key] = [unit.key for unit in self._units(key, value)]
        return needed

    def _reached(self) -> tuple[set[str], tuple[tuple[str, str], ...]]:
        """Return every key that a tag reaches, and of which tags that is not known, and why."""
        reached: set[str] = set()
        unfollowed: list[tuple[str, str]] = []
        for tag, manifest, why in self._tagged():
            if manifest is None:
                unfollowed.append((tag, why))
                continue
            with store_errors(self._name):
                value = self._backend.get([manifest]).get(manifest)
            reached.add(manifest)
            if value is None:
                unfollowed.append((tag, f"its manifest {manifest} is missing"))
                continue
            try:
                units = checked(self._backend, self._name, manifest, value, partial(self._units, manifest), ())
                reached |= {unit.key for unit in units}
            except DAMAGED as error:
                unfollowed.append((tag, error.message))
        return reached, tuple(unfollowed)

    def _tagged(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield each tag, the key of its manifest, and where that cannot be told, why."""
        with store_errors(self._name):
            refs = {key: self._backend.read_ref(key) for key in sorted(self._backend.list_refs(layout.TAGS))}
        for key, value in refs.items():
            if value is not None:
                tag = key.removeprefix(f"{layout.TAGS}/")
                try:
                    yield tag, layout.decode_tag(value, tag), ""
                except FormatError as error:
                    yield tag, None, error.message.removeprefix(f"tag {tag} ")

    def _everything(self) -> Iterator[tuple[str, bytes]]:
        with store_errors(self._name):
            keys = [stat.key for prefix in (layout.MANIFESTS, layout.UNITS) for stat in self._backend.list(prefix)]
            for start in range(0, len(keys), READ_AT_ONCE):
                yield from self._backend.get(keys[start : start + READ_AT_ONCE]).items()

    def _check(self, key: str, known: dict[str, layout.Unit], needed: dict[str, list[str]], value: bytes) -> None:
        """Check one object; manifests come first and say what is in the units, so that those are checked blob by blob."""
        if _is_manifest(key):
            units = {unit.key: unit for unit in self._units(key, value)}
            known.update(units)
            needed[key] = list(units)
        elif key in known:
            layout.split_unit(layout.unseal(value, key, known[key].size, self._limits), known[key])
        else:
            layout.check_seal(value, key)

    def _units(self, manifest: str, value: bytes) -> list[layout.Unit]:
        return list(layout.units_of(self._content(manifest, value)))

    def _content(self, manifest: str, value: bytes) -> Content:
        content_bytes, _ = layout.decode_manifest(value, manifest, self._limits)
        return Content.decode(content_bytes, self._limits)

    def _without_manifest(
        self, tagged: list[tuple[str, str | None, str]], sound: set[str], damaged: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        bad = self._still_bad({manifest for _, manifest, _ in tagged if manifest is not None} - sound, damaged)
        unsound = [entry for entry in tagged if entry[1] is None or entry[1] in bad]
        # A tag may have moved on since, and what it named before been pruned.
        still = set(self._tagged()) if unsound else set()
        for tag, manifest, why in unsound:
            if (tag, manifest, why) in still:
                yield tag, why if manifest is None else f"its manifest {manifest} is missing or damaged"

    def _without_units(
        self, needed: dict[str, list[str]], sound: set[str], damaged: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        bad = self._still_bad({unit for units in needed.values() for unit in units} - sound, damaged)
        lacking = {manifest: [unit for unit in units if unit in bad] for manifest, units in needed.items()}
        with store_errors(self._name):
            # A prune may have removed a manifest, and then its units, since we listed them.
            there = self._backend.exists([manifest for manifest, missing in lacking.items() if missing])
        for manifest in there:
            missing, of = lacking[manifest], len(needed[manifest])
            lacks = f"{len(missing)} of {of} units missing or damaged, such as {missing[0]}"
            yield layout.digest_of_manifest(manifest), lacks

    def _still_bad(self, keys: set[str], damaged: Collection[str]) -> set[str]:
        """Return which of these are damaged or missing; one that we did not find may have been pushed since."""
        with store_errors(self._name):
            return keys.intersection(damaged) | (keys - self._backend.exists(keys) if keys else set())


def _last_used_s(stats: list[Stat], needed: dict[str, list[str]]) -> dict[str, float]:
    """Return when each object was used last: a unit as late as any manifest that names it, so that it goes after that."""
    used_s = {stat.key: stat.modified_s for stat in stats}
    for manifest, units in needed.items():
        for unit in units:
            if unit in used_s:
                used_s[unit] = max(used_s[unit], used_s[manifest])
    return used_s


def _is_manifest(key: str) -> bool:
    return key.startswith(f"{layout.MANIFESTS}/")


def _bytes(stats: list[Stat]) -> int:
    return sum(stat.size_bytes for stat in stats)
