# SPDX-License-Identifier: Apache-2.0
"""The commands `stats` and `prune`, and `verify --store`: looking after a store.

`app.py` lists the first two; `inspection.py` calls `verify_store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, option, to_bytes, to_grace, to_seconds
from bundler.cli.stores.store_options import existing_store, one_store_option
from bundler.cli.terminal import Screen
from bundler.lifecycle.machine_store import Store
from bundler.store import store_reports
from bundler.store.store_reports import Held, PruneReport, VerifyReport

PROBLEMS_SHOWN = 10
DAY_S = 24 * 3600
_REASONS = {
    store_reports.TAGS: "tags reach",
    store_reports.UNREAD_TAGS: "tags that cannot be read may reach",
    store_reports.AGE: "--older-than spares",
    store_reports.ROOM: "--max-bytes leaves room for",
    store_reports.USE: "others used meanwhile",
}
_FIXES = {
    store_reports.TAGS: "delete tags",
    store_reports.GRACE: "prune again later or with a shorter --grace",
    store_reports.AGE: "prune with a shorter --older-than",
    store_reports.USE: "prune again",
}


@command("Say what a store holds.", "stats --store file:///var/cache/kernels")
@one_store_option
def stats(screen: Screen, url: str) -> None:
    """Say how much a store holds, and how much of it tags reach."""
    with existing_store(url) as store:
        found = store.stats()
        size = wording.size
        shared = f"{found.dictionaries:,} ({size(found.dictionary_bytes)}), which units share"
        alone = f"{found.records:,} ({size(found.record_bytes)}), published one by one"
        by_key = f"found by key ({size(found.index_bytes)} say in which bundle)"
        untagged = size(found.size_bytes - found.tagged_bytes)
        screen.facts(
            [
                ("store", store.name),
                ("tags", f"{found.tags:,}"),
                ("bundles", f"{found.manifests:,} ({size(found.manifest_bytes)} of manifests)"),
                ("units", f"{found.units:,} ({size(found.unit_bytes)})"),
                ("dictionaries", shared if found.dictionaries else ""),
                ("kernels", f"{found.kernels:,} {by_key}"),
                ("records", alone if found.records else ""),
                ("failures", wording.some(found.failures, "compile", " that failed")),
                ("tagged", size(found.tagged_bytes)),
                (
                    "untagged",
                    f"{untagged}, which prune removes once unused for a day, or --grace",
                ),
            ]
        )
        screen.finish({"store": store.name, **asdict(found)})


@command(
    "Remove what no tag reaches.",
    "prune --store file:///var/cache/kernels --older-than 7d --dry-run",
    "prune --store file:///var/cache/kernels --max-bytes 20GB",
    "prune --store file:///var/cache/kernels --grace 10min",
)
@one_store_option
@option(
    "--max-bytes SIZE",
    "Stop when the store holds no more than this: 500MB, 2GiB.",
    callback=to_bytes,
)
@option(
    "--older-than DURATION", "Only what was not used for so long: 36h, 7d.", callback=to_seconds
)
@option(
    "--grace DURATION",
    "Spare what was used within this time: a number of seconds, 10min, 24h. A push that takes"
    " longer may lose units, and its kernels are compiled again; 0 is for a store that nobody"
    " writes to at the moment.",
    callback=to_grace,
    default="24h",
)
@option("--keep-days N", "The same as --older-than Nd.", type=click.FloatRange(0, 36_500))
@flag("--dry-run", "Remove nothing, only say what would be.")
def prune(
    screen: Screen,
    url: str,
    max_bytes: int | None,
    older_than: int | None,
    grace: int,
    keep_days: float | None,
    dry_run: bool,
) -> int:
    """Remove what no tag reaches, oldest first.

    What was used within --grace stays, since a push may be about to name it. Exit status 1 when
    what tags reach is already more than --max-bytes.
    """
    if keep_days is not None:
        if older_than is not None:
            raise click.UsageError("--keep-days and --older-than say the same: give one of them")
        older_than = round(keep_days * DAY_S)
    with (
        existing_store(url) as store,
        screen.progress(f"pruning {store.name}", counted=True) as bar,
    ):
        report = store.prune(max_bytes, older_than, dry_run, grace_s=grace, watch=bar.reach)
    number, size = wording.count(len(report.removed), "object"), wording.size(report.removed_bytes)
    what = f"{number}, {size}" if report.removed else "nothing"
    screen.line(f"{'would keep' if dry_run else 'kept'} {wording.size(report.kept_bytes)}")
    for held in report.held:
        screen.line(f"  {_why(held.by, report.grace_s)} {_amount(held)}")
    screen.done(f"would remove {what}" if dry_run else f"removed {what}")
    status = _limit(screen, report, max_bytes)
    for tag, reason in report.unfollowed:
        screen.complain(
            f"nothing may be removed, since it is not known what tag {tag} reaches: {reason}"
        )
    screen.finish({"store": store.name, "dry_run": dry_run, **asdict(report)})
    return PROBLEM if report.unfollowed else status


def _limit(screen: Screen, report: PruneReport, max_bytes: int | None) -> int:
    """Say why the store holds more than it should; returns the exit status."""
    if max_bytes is None or not report.over_limit_bytes or report.unfollowed:
        return FINE
    over = (
        f"{wording.size(report.over_limit_bytes)} more than --max-bytes {wording.size(max_bytes)}"
    )
    what_holds = " and ".join(
        f"{_why(held.by, report.grace_s)} {_amount(held)}" for held in report.held
    )
    stay = f"{wording.size(report.kept_bytes)} stay, {over}, because {what_holds}"
    tagged = report.tagged_bytes > max_bytes
    fixes = [
        _FIXES[held.by]
        for held in report.held
        if held.by in _FIXES and (tagged or held.by != store_reports.TAGS)
    ]
    if tagged:
        screen.complain(f"{stay}; {', '.join([*fixes, 'or allow more'])}")
        return PROBLEM
    screen.warn(f"{stay}; {', or '.join(fixes)}")
    return FINE


def _amount(held: Held) -> str:
    return f"{wording.size(held.size_bytes)} in {wording.count(held.objects, 'object')}"


def _why(by: str, grace_s: float) -> str:
    """Return what holds something, in words that its amount follows."""
    return (
        f"--grace of {wording.span(grace_s)} spares" if by == store_reports.GRACE else _REASONS[by]
    )


def verify_store(screen: Screen, url: str, *, repair: bool) -> int:
    """Check everything in a store; returns the exit status."""
    with existing_store(url) as store:
        with screen.progress(f"verifying {store.name}", counted=True) as bar:
            report = store.verify(repair, watch=bar.reach)
        if report.sound:
            screen.line(
                f"checked {wording.count(report.checked, 'object')}, and that bundles and tags lack"
                " nothing"
            )
            screen.done(f"{store.name} is sound")
        else:
            _show_problems(screen, store, report, repair=repair)
        if report.indexed:
            number = wording.count(report.indexed, "kernel")
            screen.line(f"indexed {number}: found by key again")
        screen.finish({"store": store.name, "ok": report.sound, **asdict(report)})
    return FINE if report.sound else PROBLEM


def _show_problems(screen: Screen, store: Store, report: VerifyReport, *, repair: bool) -> None:
    damaged = wording.some(len(report.damaged), "damaged object")
    dangling = wording.some(len(report.dangling), "incomplete bundle, tag or record")
    found = filter(None, [damaged, dangling])
    again = "push these bundles again"
    fix = again if repair or not report.damaged else f"verify --repair, then {again}"
    screen.complain(f"{store.name}: {', '.join(found)}; {fix}")
    tagged: dict[str, list[str]] = {}
    for tag in store.tags():
        tagged.setdefault(tag.digest or "", []).append(tag.name)
    show_problems(
        screen,
        [
            (
                name + (f" ({', '.join(tagged[name])})" if name in tagged else ""),
                reason.removeprefix(f"{name}: "),
            )
            for name, reason in (*report.damaged, *report.dangling)
        ],
    )
    if repair and report.removed:
        screen.done(
            f"removed {wording.count(len(report.removed), 'damaged object')}; the next push sends"
            " what was in them"
        )


def show_problems(screen: Screen, problems: Sequence[tuple[str, str]]) -> None:
    """Print what is wrong, of much the first."""
    screen.lines([f"  {name}: {reason}" for name, reason in problems], PROBLEMS_SHOWN)
