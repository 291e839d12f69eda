# SPDX-License-Identifier: Apache-2.0
"""The commands `diff`, which compares two bundles, and `merge`, which makes one bundle of several.

`app.py` lists both.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

import bundler
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, example, output_option, reports, strip_option
from bundler.cli.pack import contents, counts, save, show_contents
from bundler.cli.terminal import Column, Screen
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import entry_name
from bundler.format.entries import Entry, Kernel, entry_artifacts, entry_kind
from bundler.format.source_stripping import Strip
from bundler.images.bundle_sources import open_bundle

CHANGES = (
    Column(""),
    Column("name", folds=True),
    Column("target"),
    Column("key", needs=100),
    Column("what changed", folds=True),
)


@click.command(
    short_help="Compare two bundles.",
    epilog=example("diff old.tbundle new.tbundle", "diff --exit-code old.tbundle new.tbundle"),
)
@click.argument("first")
@click.argument("second")
@click.option("--exit-code", is_flag=True, help="Exit with status 1 when the bundles differ.")
@reports
def diff(screen: Screen, first: str, second: str, exit_code: bool) -> int:
    """Say what the SECOND bundle has, lacks and has otherwise than the FIRST.

    Compares content: when and where the kernels were recorded does not count.
    """
    with open_bundle(first) as one, open_bundle(second) as two:
        difference = bundler.diff(one, two)
        ours = {entry_name(entry): entry for entry in one.content.entries}
        theirs = {entry_name(entry): entry for entry in two.content.entries}
    rows: list[tuple[str, Entry, list[str]]] = [("+", theirs[name], []) for name in difference.added]
    rows += [("-", ours[name], []) for name in difference.removed]
    rows += [("~", theirs[name], changes_of(ours[name], theirs[name])) for name in difference.changed]
    rows.sort(key=lambda row: ("+-~".index(row[0]), _cells(row[1])))
    if rows:
        screen.table(CHANGES, [(sign, *_cells(entry), ", ".join(changes)) for sign, entry, changes in rows])
        screen.line()
    same = len(ours) - len(difference.removed) - len(difference.changed)
    screen.done(
        f"{len(difference.added):,} added, {len(difference.removed):,} removed, {len(difference.changed):,} changed, "
        f"{same:,} the same"
    )
    listed = {
        word: [wording.entry_facts(entry) | ({"changes": changes} if changes else {})
               for mark, entry, changes in rows if mark == sign]
        for word, sign in (("added", "+"), ("removed", "-"), ("changed", "~"))
    }  # fmt: skip
    screen.finish({"same": same, **listed})
    return PROBLEM if exit_code and difference else FINE


def _cells(entry: Entry) -> tuple[str, str, str]:
    if isinstance(entry, Kernel):
        return entry.name, str(entry.target), wording.short_key(entry.key)
    return entry.path, entry_kind(entry), ""


def changes_of(one: Entry, two: Entry) -> list[str]:
    """Return the files that differ, and the facts."""
    if entry_kind(one) != entry_kind(two):
        return [f"{entry_kind(one)} before, {entry_kind(two)} now"]
    mine, theirs = ({artifact.filename: artifact for artifact in entry_artifacts(entry)} for entry in (one, two))
    changes: list[str] = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if isinstance(one, Kernel) and isinstance(two, Kernel):
        facts = (("name", one.name, two.name), ("target", one.target, two.target),
                 ("launch spec", one.spec, two.spec), ("argument types", one.facts_bytes, two.facts_bytes),
                 ("key parts", one.parts_bytes, two.parts_bytes), ("toolchain", one.toolchain, two.toolchain))  # fmt: skip
        changes += [what for what, before, now in facts if before != now]
    return changes or ["its platform"]


@click.command(
    short_help="Make one bundle of several.", epilog=example("merge rank0.tbundle rank1.tbundle -o model.tbundle")
)
@click.argument("bundles", nargs=-1, required=True)
@output_option
@strip_option
@reports
def merge(screen: Screen, bundles: tuple[str, ...], output: str, strip: Strip | None) -> int:
    """Write the union of BUNDLES, which may be one.

    Of several builds of one kernel, one is kept, the same in whatever order the bundles are given.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(open_bundle(path)) for path in bundles]
        merged = bundler.merge(opened)
        merged = bundler.strip_source(merged) if strip else merged
        size = save(screen, merged, output)
        sources = [_source(path, bundle) for path, bundle in zip(bundles, opened, strict=True)]
    show_contents(screen, merged)
    screen.reasons("left out", merged.left_out)
    screen.line(f"dropped {wording.count(merged.variants_dropped, 'variant')}"
                + (": other builds of a kernel that is kept once" if merged.variants_dropped else ""))  # fmt: skip
    screen.done(
        f"wrote {output}: {wording.count(len(merged.kernels), 'kernel')} of {wording.count(len(bundles), 'bundle')}, "
        f"{wording.size(size)}, {merged.digest}"
    )
    screen.finish({**contents(merged), "path": output, "size_bytes": size,
                   "variants_dropped": merged.variants_dropped, "sources": sources})  # fmt: skip
    return FINE


def _source(path: str, bundle: Bundle) -> dict[str, Any]:
    return {"path": path, "digest": bundle.digest, "counts": counts(bundle)}
