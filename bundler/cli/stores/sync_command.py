# SPDX-License-Identifier: Apache-2.0
"""The command `sync`: brings one store to what another one has.

`app.py` lists it.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, repeated
from bundler.cli.stores.store_options import as_url, existing_store, open_stores
from bundler.cli.terminal import Screen
from bundler.store.store_reports import SyncReport

SHOWN = 20


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
        _show(screen, report, dry_run=dry_run)
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


def _show(screen: Screen, report: SyncReport, *, dry_run: bool) -> None:
    size = "" if dry_run else f", {wording.size(report.bytes_moved)}"
    units = wording.count(report.units_moved, "unit")
    moved = f"nothing, all of it {'is' if dry_run else 'was'} there"
    if report.moved:
        moved = f"{_listed(report.moved)}: {units}{size}"
    screen.facts(
        [
            ("would move" if dry_run else "moved", moved),
            ("would keep" if dry_run else "kept", _listed(report.kept)),
            ("would delete" if dry_run else "deleted", _listed(report.deleted)),
            ("present", wording.some(report.units_present, "unit") if report.moved else ""),
        ]
    )


def _listed(tags: tuple[str, ...]) -> str:
    """Return tags in a line; of many the first."""
    more = f" and {len(tags) - SHOWN} more" if len(tags) > SHOWN else ""
    return ", ".join(tags[:SHOWN]) + more
