# SPDX-License-Identifier: Apache-2.0
"""The commands `diff`, which compares two bundles, and `merge`, which makes one bundle of several.

`app.py` lists both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import click

import bundler
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, output_option, strip_option
from bundler.cli.pack import counts, save, show_contents, written
from bundler.cli.stores.store_options import TIERS_HELP, from_environment, open_named, stores_option
from bundler.cli.terminal import Column, Screen
from bundler.errors import MergeConflict
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import entry_name
from bundler.format.entries import Entry, Kernel, entry_artifacts, entry_kind
from bundler.format.source_stripping import Strip
from bundler.images.bundle_sources import open_bundle
from bundler.integrations.key_comparison import Difference, keyed_all, nearest, shown_sides

CHANGES = (
    Column(""),
    Column("name", folds=True),
    Column("target"),
    Column("key", needs=100),
    Column("what changed", folds=True),
)


# What a recording knows of a kernel, and a cache directory does not hold.
_FACTS = ("launch spec", "argument types", "key parts", "toolchain")


@command(
    "Compare two bundles.",
    "diff old.tbundle new.tbundle",
    "diff --exit-code old.tbundle new.tbundle",
    "diff model.tbundle ~/.triton/cache",
)
@click.argument("first")
@click.argument("second")
@flag("--exit-code", "Exit with status 1 when the bundles differ.")
@stores_option("Where FIRST or SECOND may be a tag. " + TIERS_HELP, from_environment)
def diff(screen: Screen, first: str, second: str, urls: tuple[str, ...], *, exit_code: bool) -> int:
    """Say what the SECOND bundle has, lacks and has otherwise than the FIRST.

    Either may be a bundle, a Triton cache directory, or with --store a tag. Compares content: when
    and where the kernels were recorded does not count. Of a kernel that only the SECOND has it says
    in which parts of its key it differs from the nearest of the same name in the FIRST.
    """
    with open_named(first, urls) as one, open_named(second, urls) as two:
        found = changed_entries(one, two)
        same = count_entries(one) - sum(sign != "+" for sign, _, _ in found)
        nearest_of = _nearest_of(one, two, {entry_name(e) for sign, e, _ in found if sign == "+"})
    rows: list[tuple[str, Entry, list[str]]] = []
    # A directory does not hold what only a recording knows.
    untold = _FACTS if os.path.isdir(first) or os.path.isdir(second) else ()
    for sign, entry, changes in found:
        told = [change for change in changes if change not in untold]
        if sign == "+":
            told = list(map(_said, nearest_of.get(entry_name(entry), ("", ()))[1]))
        if sign == "~" and not told:
            same += 1
        else:
            rows.append((sign, entry, told))
    rows.sort(key=lambda row: ("+-~".index(row[0]), _cells(row[1])))
    screen.listing(
        CHANGES, [(sign, *_cells(entry), ", ".join(changes)) for sign, entry, changes in rows]
    )
    listed: dict[str, list[dict[str, Any]]] = {"added": [], "removed": [], "changed": []}
    words = dict(zip("+-~", listed, strict=True))
    for sign, entry, changes in rows:
        facts = wording.entry_facts(entry) | ({"changes": changes} if changes else {})
        if sign == "+" and entry_name(entry) in nearest_of:
            key, differences = nearest_of[entry_name(entry)]
            facts |= {
                "nearest": key,
                "differences": [asdict(one) | {"part": one.part} for one in differences],
            }
        listed[words[sign]].append(facts)
    counts = ", ".join(f"{len(entries):,} {word}" for word, entries in listed.items())
    screen.done(f"{counts}, {same:,} the same")
    screen.finish({"same": same, **listed})
    return PROBLEM if exit_code and rows else FINE


def changed_entries(one: Bundle, two: Bundle) -> list[tuple[str, Entry, list[str]]]:
    """Return what the second bundle has (`+`), lacks (`-`) and has otherwise (`~`) than the first,
    and of the last what changed.
    """
    difference = bundler.diff(one, two)
    ours = {entry_name(entry): entry for entry in one.content.entries}
    theirs = {entry_name(entry): entry for entry in two.content.entries}
    return [
        *(("+", theirs[name], []) for name in difference.added),
        *(("-", ours[name], []) for name in difference.removed),
        *(("~", theirs[name], _changes(ours[name], theirs[name])) for name in difference.changed),
    ]


def count_entries(bundle: Bundle) -> int:
    """Return how many entries a bundle has."""
    return sum(1 for _ in bundle.content.entries)


def _nearest_of(
    one: Bundle, two: Bundle, added: Collection[str]
) -> dict[str, tuple[str, tuple[Difference, ...]]]:
    """Return, of kernels that were added, the nearest of the first bundle and in what they differ
    from it.
    """
    there = list(keyed_all(one)) if added else []
    found = {}
    for kernel in keyed_all(two) if there else ():
        if kernel.key in added and (best := nearest(kernel, there)) is not None:
            found[kernel.key] = best[0].key, best[1]
    return found


def _said(difference: Difference) -> str:
    there, here = shown_sides(difference)
    return f"{difference.part}: {there} there, {here} here"


def _cells(entry: Entry) -> tuple[str, str, str]:
    if isinstance(entry, Kernel):
        return entry.name, str(entry.target), wording.short_key(entry.key)
    return entry.path, entry_kind(entry), ""


def _changes(one: Entry, two: Entry) -> list[str]:
    """Return the files that differ, and the facts."""
    if entry_kind(one) != entry_kind(two):
        return [f"{entry_kind(one)} before, {entry_kind(two)} now"]
    mine, theirs = (
        {artifact.filename: artifact for artifact in entry_artifacts(entry)} for entry in (one, two)
    )
    changes: list[str] = [
        name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)
    ]
    if isinstance(one, Kernel) and isinstance(two, Kernel):
        facts = (
            ("name", one.name, two.name),
            ("target", one.target, two.target),
            (_FACTS[0], one.spec, two.spec),
            (_FACTS[1], one.facts_bytes, two.facts_bytes),
            (_FACTS[2], one.parts_bytes, two.parts_bytes),
            (_FACTS[3], one.toolchain, two.toolchain),
        )
        changes += [what for what, before, now in facts if before != now]
    return changes or ["its platform"]


@command("Make one bundle of several.", "merge rank0.tbundle rank1.tbundle -o model.tbundle")
@click.argument("bundles", nargs=-1, required=True)
@output_option
@strip_option
def merge(screen: Screen, bundles: tuple[str, ...], output: str, strip: Strip | None) -> None:
    """Write the union of BUNDLES, which may be one.

    Of several builds of one kernel, one is kept, the same in whatever order the bundles are given.
    Two programs of one name are refused.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open_bundle(path)) for path in bundles]
        merged = _merged(opened, bundles)
        merged = bundler.strip_source(merged) if strip else merged
        size = save(screen, merged, output)
        sources = [
            {"path": path, "digest": bundle.digest, "counts": counts(bundle)}
            for path, bundle in zip(bundles, opened, strict=True)
        ]
    show_contents(screen, merged)
    screen.reasons("left out", merged.left_out)
    screen.line(
        f"dropped {wording.count(merged.variants_dropped, 'variant')}"
        + (": other builds of what is kept once" if merged.variants_dropped else "")
    )
    screen.done(
        f"wrote {output}: {wording.count(len(merged.kernels), 'kernel')} of"
        f" {wording.count(len(bundles), 'bundle')}, {wording.size(size)}, {merged.digest}"
    )
    screen.finish(
        {
            **written(merged, output, size),
            "variants_dropped": merged.variants_dropped,
            "sources": sources,
        }
    )


def _merged(opened: Sequence[Bundle], paths: Sequence[str]) -> Bundle:
    try:
        return bundler.merge(opened)
    except MergeConflict as error:
        digests = getattr(error, "bundles", ())
        clash = [path for path, one in zip(paths, opened, strict=True) if one.digest in digests]
        if not clash:
            raise
        raise MergeConflict(f"{' and '.join(clash)}: {error.message}", bundles=digests) from error
