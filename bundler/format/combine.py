# SPDX-License-Identifier: Apache-2.0
"""Union and comparison of bundles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from bundler.errors import ConfigError, FormatError, MergeConflict
from bundler.format.bundle import Bundle, FirstBlobs
from bundler.format.entries import Entry, HelperLibrary, Kernel, Opaque, TuningFile
from bundler.format.manifest import Content, merge_observed


@dataclass(frozen=True)
class Diff:
    """Entries by kernel key or path: only in the second bundle, only in the first, in both but different."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def diff(first: Bundle, second: Bundle) -> Diff:
    """Compare two bundles by content; observations do not count."""
    ours = {entry_name(entry): entry for entry in first.content.entries}
    theirs = {entry_name(entry): entry for entry in second.content.entries}
    return Diff(
        tuple(sorted(theirs.keys() - ours.keys())),
        tuple(sorted(ours.keys() - theirs.keys())),
        tuple(sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])),
    )


def merge(bundles: Iterable[Bundle]) -> Bundle:
    """Return the union of bundles.

    Two compiles of one launch identity are variants: their bytes may differ, since debug information holds source
    paths.  The one with more files wins if it has all of the other's, else the one with the least digest; the result's
    `variants_dropped` counts the rest.  The order of the bundles does not matter.

    Raises:
        ConfigError: no bundle given.
        MergeConflict: one kernel key, but another target, entry point or metadata.
    """
    sources = tuple(bundles)
    if not sources:
        raise ConfigError("merge needs at least one bundle, got none")
    chosen: dict[str, Entry] = {}
    owner: dict[str, Bundle] = {}
    dropped: set[tuple[str, str]] = set()
    for bundle in sources:
        for entry in bundle.content.entries:
            name = entry_name(entry)
            other = chosen.get(name)
            if other is None:
                chosen[name], owner[name] = entry, bundle
            elif other != entry:
                winner = _choose(other, owner[name], entry, bundle, dropped)
                owner[name] = bundle if winner is entry else owner[name]
                chosen[name] = _with_facts(winner, entry if winner is other else other)
    return Bundle(
        Content.of(chosen.values(), {r for bundle in sources for r in bundle.tuning_records}),
        reduce(merge_observed, [bundle.observed for bundle in sources]),
        FirstBlobs(bundle.blobs for bundle in sources),
        variants_dropped=len(dropped),
    )


def entry_name(entry: Entry) -> str:
    """Return what an entry is addressed by: a kernel's key, any other's path."""
    return entry.key if isinstance(entry, Kernel) else entry.path


def metadata_identity(data: bytes) -> str:
    """Return metadata in a form that is equal for equal kernels: parsed, sorted, with sentinels for paths.

    Raises:
        FormatError: it is not a JSON object.
    """
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"metadata is not valid JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise FormatError(f"metadata: expected a JSON object, got {type(metadata).__name__}")
    return json.dumps(metadata, sort_keys=True)


def _choose(one: Entry, bundle_one: Bundle, two: Entry, bundle_two: Bundle, dropped: set[tuple[str, str]]) -> Entry:
    if type(one) is not type(two):
        raise MergeConflict(f"{entry_name(one)} is a {_kind(one)} in one bundle and a {_kind(two)} in another")
    if isinstance(one, Kernel) and isinstance(two, Kernel):
        _check_same_launch(one, bundle_one, two, bundle_two)
        files_one, files_two = set(one.artifacts), set(two.artifacts)
        if files_one >= files_two:
            return one
        if files_two > files_one:
            return two
    loser = max((one, two), key=_digest)
    dropped.add((entry_name(one), _digest(loser)))
    return two if loser is one else one


def _check_same_launch(one: Kernel, bundle_one: Bundle, two: Kernel, bundle_two: Bundle) -> None:
    for what, mine, theirs in (("target", one.target, two.target), ("entry point", one.name, two.name)):
        if mine != theirs:
            raise MergeConflict(f"{one.key}: {what} {mine} in one bundle, {theirs} in another", key=one.key)
    if one.metadata == two.metadata:
        return
    mine_json = metadata_identity(bundle_one.read(one.metadata))
    theirs_json = metadata_identity(bundle_two.read(two.metadata))
    if mine_json != theirs_json:
        raise MergeConflict(
            f"{one.key} ({one.name}): the metadata differs ({_first_difference(mine_json, theirs_json)}); "
            "one of the bundles was made by a changed compiler, leave it out",
            key=one.key,
        )


def _first_difference(one: str, two: str) -> str:
    mine, theirs = json.loads(one), json.loads(two)
    fields: Sequence[str] = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
    return ", ".join(f"{name}: {mine.get(name)!r} and {theirs.get(name)!r}" for name in fields[:3])


def _with_facts(winner: Entry, other: Entry) -> Entry:
    """Give a kernel that came by pack the facts that a recording of the same key knows."""
    if not isinstance(winner, Kernel) or not isinstance(other, Kernel):
        return winner
    toolchain = other.toolchain if winner.toolchain.binary is None else winner.toolchain
    return replace(
        winner,
        facts_bytes=other.facts_bytes if winner.facts_bytes is None else winner.facts_bytes,
        parts_bytes=other.parts_bytes if winner.parts_bytes is None else winner.parts_bytes,
        toolchain=toolchain,
    )


def _digest(entry: Entry) -> str:
    return entry.files_digest if isinstance(entry, Kernel) else entry.artifact.digest


def _kind(entry: Entry) -> str:
    names = {Kernel: "kernel", TuningFile: "tuning file", HelperLibrary: "helper library", Opaque: "opaque file"}
    return names[type(entry)]
