# SPDX-License-Identifier: Apache-2.0
"""The commands `push`, `pull`, `tags` and `sync`: bundles to a store, from it, what they are called
there, and from one store to another.

`app.py` lists them.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from bundler.cli import wording
from bundler.cli.command import (
    FINE,
    PROBLEM,
    command,
    flag,
    option,
    output_option,
    repeated,
    signing_key_option,
)
from bundler.cli.pack import check_output, contents, count_bytes, save, show_contents
from bundler.cli.stores.store_options import as_url, existing_store, open_stores, store_option
from bundler.cli.terminal import Column, Screen
from bundler.images.bundle_sources import open_bundle
from bundler.store.bundle_store import MODES, PushMode
from bundler.store.store_reports import PushReport, SyncReport, TagInfo
from bundler.store.stored_manifests import unknown_tag

TAGS_SHOWN = 20
TAGS = (
    Column("tag", shrinks=True),
    Column("kernels", True),
    Column("targets", shrinks=True),
    Column("size", True),
    Column("digest", shrinks=True),
)


@command(
    "Send a bundle to a store.",
    "push model.tbundle --store file:///var/cache/kernels --tag llama3/h200",
    "push model.tbundle --store file:///var/cache/kernels --store redis://host:6379 --tag"
    " llama3/h200",
)
@click.argument("bundle")
@store_option
@option("--tag T", "What to call it there, such as llama3/h200.", required=True)
@option(
    "--mode",
    "If the tag is set: add to what it names, name this instead, or refuse.",
    type=click.Choice(MODES),
    default="merge",
)
@flag("--allow-empty", "Also push a bundle with nothing in it.")
@signing_key_option
def push(
    screen: Screen,
    bundle: str,
    urls: tuple[str, ...],
    tag: str,
    mode: PushMode,
    *,
    allow_empty: bool,
    key: str | None,
) -> None:
    """Send BUNDLE to a store, and call it by a tag.

    Only what the store lacks is sent. Of several pushes to one tag at once, the tag holds all.
    """
    with open_bundle(bundle) as opened, open_stores(*urls) as store:
        with screen.transfer(f"pushing {bundle}", count_bytes(opened)) as bar:
            report = store.push(bar.watching(opened), tag, mode, allow_empty=allow_empty, key=key)
        _show_push(screen, report, mode)
        screen.done(
            f"{tag} in {store.name} is {report.digest} ({wording.duration(report.seconds)})"
        )
        screen.finish({"bundle": bundle, "store": store.name, "tag": tag, **asdict(report)})


def _show_push(screen: Screen, report: PushReport, mode: PushMode) -> None:
    units = wording.count(report.blobs_sent, "unit")
    sent = f"{units}, {wording.size(report.bytes_sent)}"
    present = wording.some(report.blobs_present, "unit")
    others = ": other builds of what is kept once"
    screen.facts(
        [
            ("sent", sent if report.bytes_sent else "nothing, all of it was there"),
            ("present", present if report.bytes_sent else ""),
            ("repaired", wording.some(report.repaired, "unit", " that the store held damaged")),
            ("dropped", wording.some(report.variants_dropped, "variant", others)),
            ("before", _before(report, mode)),
        ]
    )


def _before(report: PushReport, mode: PushMode) -> str:
    if report.tag_before is None:
        return (
            "" if mode == "replace" else "the tag was not set"
        )  # replace does not mind what it cannot read
    return "the same" if report.tag_before == report.tag_after else report.tag_before


@command(
    "Fetch a bundle from a store.",
    "pull llama3/h200 -o model.tbundle --store file:///var/cache/kernels",
)
@click.argument("tag")
@output_option
@store_option
def pull(screen: Screen, tag: str, output: str, urls: tuple[str, ...]) -> None:
    """Write a bundle of a store to a file: the one that TAG names, or the one whose digest is TAG,
    or begins so.
    """
    check_output(output)
    with existing_store(*urls) as store, store.pull(tag) as bundle:
        size = save(screen, bundle, output)
        show_contents(screen, bundle)
        screen.done(f"wrote {output}: {wording.size(size)}, {bundle.digest}")
        written = {"path": output, "size_bytes": size}
        screen.finish({"store": store.name, "tag": tag, **contents(bundle), **written})


@command(
    "List the tags of a store, or remove one.",
    "tags --store file:///var/cache/kernels",
    "tags --store file:///var/cache/kernels --delete llama3/h200",
)
@store_option
@option("--delete T", "Remove this tag; what it named stays until prune.")
def tags(screen: Screen, urls: tuple[str, ...], delete: str | None) -> int:
    """List the tags of a store, and what they name.

    Exit status 1 when a tag leads nowhere.
    """
    with existing_store(*urls) as store:
        if delete is not None:
            if not store.delete_tag(delete):
                raise unknown_tag(store.name, delete, store.near_tags(delete))
            screen.done(f"deleted tag {delete}; what it named stays until prune")
            screen.finish({"store": store.name, "deleted": delete})
            return FINE
        found = store.tags()
        screen.listing(TAGS, list(map(_row, found)))
        problems = [(tag.name, tag.problem) for tag in found if tag.problem is not None]
        for name, problem in problems:
            screen.complain(f"tag {name}: {problem}")
        screen.done(wording.count(len(found), "tag"))
        screen.finish({"store": store.name, "tags": found})
    return PROBLEM if problems else FINE


def _row(tag: TagInfo) -> tuple[str, ...]:
    if tag.problem is not None:
        return tag.name, "-", "-", "-", tag.digest or "-"
    return (
        tag.name,
        f"{tag.kernels:,}",
        ", ".join(tag.targets) or "-",
        wording.size(tag.size_bytes),
        tag.digest or "-",
    )


@command(
    "Bring one store to what another one has.",
    "sync redis://host:6379 file:///var/cache/kernels --dry-run",
    "sync s3://kernels/team file:///mnt/shared/kernels --tags 'llama3/*' --tags 'qwen/*'",
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@repeated("--tags GLOB", "globs", "Only tags that match; repeat it for more. Without it, all.")
@flag(
    "--delete-tags", "Remove tags of DST that SRC does not have; what they named stays until prune."
)
@flag("--dry-run", "Change nothing, only say what would be.")
def sync(
    screen: Screen,
    source: str,
    target: str,
    globs: tuple[str, ...],
    *,
    delete_tags: bool,
    dry_run: bool,
) -> int:
    """Bring the store DST to what the tags of the store SRC name; only what is missing there is
    moved, with what is signed of it.

    A run that was interrupted goes on where it ended. Exit status 1 when a tag could not be
    mirrored: it stays in DST as it was.
    """
    with (
        existing_store(as_url(source), read_only=True) as held,
        open_stores(as_url(target)) as mirrored,
    ):
        with screen.progress(f"mirroring {held.name}", counted=True) as bar:
            report = held.sync_to(
                mirrored, globs, dry_run=dry_run, delete_tags=delete_tags, watch=bar.reach
            )
        _show_sync(screen, report, dry_run=dry_run)
        for tag, reason in report.failed:
            screen.complain(f"tag {tag}: {reason}")
        done = len(report.moved) + len(report.kept)
        verb = "would be" if dry_run else wording.plural(done, "is")
        screen.done(
            f"{wording.count(done, 'tag')} of {mirrored.name} {verb} as in {held.name}"
            f" ({wording.duration(report.seconds)})"
        )
        names = {"source": held.name, "target": mirrored.name}
        told = {"dry_run": dry_run, "ok": not report.failed, **asdict(report)}
        screen.finish(names | told)
    return PROBLEM if report.failed else FINE


def _show_sync(screen: Screen, report: SyncReport, *, dry_run: bool) -> None:
    size = "" if dry_run else f", {wording.size(report.bytes_moved)}"
    units = wording.count(report.units_moved, "unit")
    moved = f"nothing, all of it {'is' if dry_run else 'was'} there"
    if report.moved:
        moved = f"{wording.listed(report.moved, TAGS_SHOWN)}: {units}{size}"
    screen.facts(
        [
            ("would move" if dry_run else "moved", moved),
            ("would keep" if dry_run else "kept", wording.listed(report.kept, TAGS_SHOWN)),
            ("would delete" if dry_run else "deleted", wording.listed(report.deleted, TAGS_SHOWN)),
            ("present", wording.some(report.units_present, "unit") if report.moved else ""),
        ]
    )
