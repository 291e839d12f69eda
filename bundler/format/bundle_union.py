# SPDX-License-Identifier: Apache-2.0
"""Union and comparison of bundles.

Users call `merge` and `diff`; stores, bundle builders and the build service merge what they
gathered, and the command line compares entries by `entry_name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from bundler.errors import ConfigError, MergeConflict
from bundler.format.bundle import Bundle, FirstBlobs
from bundler.format.entries import Artifact, Entry, Kernel, Opaque, entry_artifacts, entry_kind
from bundler.format.manifest import Content, merge_observed
from bundler.format.metadata import parse_metadata
from bundler.format.opaque_files import program_name
from bundler.format.summary import Summarized

# Torch's and Triton's names of what they made: 32 characters and more of base32 or hexadecimal
# digits.
_KEYED = re.compile(
    r"(?<![A-Za-z0-9])(?:[a-z]?[a-z2-7]{32,64}|[A-Z2-7]{32,64}|[0-9a-f]{32,64})(?![A-Za-z0-9])"
)


@dataclass(frozen=True, repr=False)
class Diff(Summarized):
    """Entries by kernel key or path: only in the second bundle, only in the first, in both but
    different.
    """

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

    Two compiles of one launch identity are variants: their bytes may differ, since debug
    information holds source paths.  One whose files another has too, and more, counts for nothing;
    of the others the one with the least digest wins, and the result's `variants_dropped` counts the
    rest, those that the given bundles had dropped included.  The same holds for tuning results,
    helper libraries and files of Inductor that stand under the hash of what they are for.  What has
    a name that somebody chose, as a program has, is never dropped.  The order of the bundles does
    not matter.

    Raises:
        ConfigError: no bundle given.
        MergeConflict: one kernel key, but another target, entry point or metadata; or one name for
            two programs or other files.
    """
    sources = tuple(bundles)
    if not sources:
        raise ConfigError("merge needs at least one bundle, got none")
    found: dict[str, list[tuple[Entry, Bundle]]] = {}
    for bundle in sources:
        for entry in bundle.content.entries:
            found.setdefault(entry_name(entry), []).append((entry, bundle))
    chosen: list[Entry] = []
    dropped = sum(bundle.variants_dropped for bundle in sources)
    for builds in found.values():
        if all(
            _equal(builds[0][0], entry) for entry, _ in builds[1:]
        ):  # as most are that a store has too
            chosen.append(builds[0][0])
            continue
        for other in builds[1:]:
            _check_same_identity(*builds[0], *other)
        winner, variants = _choose([entry for entry, _ in builds])
        chosen.append(winner)
        dropped += variants - 1
    return Bundle(
        Content.of(
            chosen,
            {r for bundle in sources for r in bundle.tuning_records},
        ),
        reduce(merge_observed, [bundle.observed for bundle in sources]),
        FirstBlobs(bundle.blobs for bundle in sources),
        writable=all(bundle.writable for bundle in sources),
        variants_dropped=dropped,
    )


def entry_name(entry: Entry) -> str:
    """Return what an entry is addressed by: a kernel's key, any other's path."""
    return entry.key if isinstance(entry, Kernel) else entry.path


def metadata_identity(data: bytes) -> str:
    """Return metadata in a form that is equal for equal kernels: parsed, sorted, with sentinels for
    paths.

    Raises:
        FormatError: it is not a JSON object.
    """
    return json.dumps(parse_metadata(data), sort_keys=True)


def _choose(builds: list[Entry]) -> tuple[Entry, int]:
    """Return the build to keep, whatever the order of `builds`, and how many variants there are."""
    if len(builds) == 1:
        return builds[0], 1
    ordered = sorted(builds, key=_rank)
    complete = [one for one in ordered if not any(_files(one) < _files(other) for other in builds)]
    return _with_facts(complete, ordered), len({_files(entry) for entry in complete})


def _equal(one: Entry, two: Entry) -> bool:
    """Tell whether two entries of one name are equal; of lazy kernels nothing is kept for it."""
    if not isinstance(one, Kernel) or not isinstance(two, Kernel):
        return one == two
    return (
        (one.name, one.target, one.toolchain) == (two.name, two.target, two.toolchain)
        and one.target.warp_size == two.target.warp_size
        and [*one.files()] == [*two.files()]
        and (one.facts_bytes, one.parts_bytes) == (two.facts_bytes, two.parts_bytes)
        and one.spec == two.spec
    )


def _check_same_identity(one: Entry, bundle_one: Bundle, two: Entry, bundle_two: Bundle) -> None:
    if entry_kind(one) != entry_kind(two):
        raise MergeConflict(
            f"{entry_name(one)} is a {entry_kind(one)} in one bundle and a {entry_kind(two)} in"
            " another"
        )
    if isinstance(one, Kernel) and isinstance(two, Kernel):
        _check_same_launch(one, bundle_one, two, bundle_two)
    elif isinstance(one, Opaque) and isinstance(two, Opaque) and one != two:
        _check_keyed(one, bundle_one, two, bundle_two)


def _check_keyed(one: Opaque, bundle_one: Bundle, two: Opaque, bundle_two: Bundle) -> None:
    """Refuse two files of one name, unless their path has the hash of what both are for."""
    program = program_name(one.path)
    if program is None and _KEYED.search(one.path):
        return
    what = f"program {program!r}" if program is not None else one.path
    fix = (
        "generate one of them again with another --name, or for all targets at once; a push with"
        " mode='replace' keeps the one that is pushed"
        if program is not None
        else "leave one of the bundles out"
    )
    raise MergeConflict(
        f"{what} is {one.artifact.digest[:19]} in bundle {bundle_one.digest[:19]}, and"
        f" {two.artifact.digest[:19]} in bundle {bundle_two.digest[:19]}: two things under one"
        f" name, of which none may be lost; {fix}",
        name=program or one.path,
        bundles=(bundle_one.digest, bundle_two.digest),
    )


def _check_same_launch(one: Kernel, bundle_one: Bundle, two: Kernel, bundle_two: Bundle) -> None:
    for what, mine, theirs in (
        ("target", one.target, two.target),
        ("entry point", one.name, two.name),
    ):
        if mine != theirs:
            raise MergeConflict(
                f"{one.key}: {what} {mine} in one bundle, {theirs} in another", key=one.key
            )
    if one.metadata == two.metadata:
        return
    mine_json = metadata_identity(bundle_one.read(one.metadata))
    theirs_json = metadata_identity(bundle_two.read(two.metadata))
    if mine_json != theirs_json:
        raise MergeConflict(
            f"{one.key} ({one.name}): the metadata differs"
            f" ({_first_difference(mine_json, theirs_json)}); one of the bundles was made by a"
            " changed compiler, leave it out",
            key=one.key,
        )


def _first_difference(one: str, two: str) -> str:
    mine, theirs = json.loads(one), json.loads(two)
    fields: Sequence[str] = sorted(
        k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)
    )
    return ", ".join(
        f"{ascii(name)[1:-1]:.80}: {mine.get(name)!a:.200} and {theirs.get(name)!a:.200}"
        for name in fields[:3]
    )


def _with_facts(complete: list[Entry], builds: list[Entry]) -> Entry:
    """Return the first build; a kernel that came by pack gets the facts that a recording of the
    same key knows.
    """
    winner = complete[0]
    if not isinstance(winner, Kernel):
        return winner
    twins = [e for e in (*complete, *builds) if isinstance(e, Kernel)]
    return replace(
        winner,
        facts_bytes=next((k.facts_bytes for k in twins if k.facts_bytes is not None), None),
        parts_bytes=next((k.parts_bytes for k in twins if k.parts_bytes is not None), None),
        toolchain=next(
            (k.toolchain for k in twins if k.toolchain.binary is not None), winner.toolchain
        ),
    )


def _files(entry: Entry) -> frozenset[Artifact]:
    return frozenset(entry_artifacts(entry))


def _rank(entry: Entry) -> tuple[str, bytes]:
    digest = entry.files_digest if isinstance(entry, Kernel) else entry.artifact.digest
    # What stands in a manifest breaks ties between equal files with different facts.
    return digest, Content.of([entry]).encode()
