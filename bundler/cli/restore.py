# SPDX-License-Identifier: Apache-2.0
"""The command `restore`: from a bundle or a store to where the next process looks; or, with
`--check`, only what is missing there.

`app.py` lists it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import click

import bundler
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, keep_option, option, repeated
from bundler.cli.pack import count_bytes, counts, fact_option, family_file_option, tree_options
from bundler.cli.stores.store_options import (
    STORE_VARIABLE,
    TIERS_HELP,
    existing_store,
    given_or_set,
    stores_option,
)
from bundler.cli.terminal import Screen
from bundler.format.bundle import Bundle
from bundler.format.opaque_files import has_trees
from bundler.images.bundle_sources import open_bundle
from bundler.lifecycle.lifecycle_reports import RestoreReport
from bundler.lifecycle.restore_check import CheckReport


@command(
    "Put a bundle's kernels where the next process looks.",
    "restore model.tbundle",
    "restore model.tbundle --cache-dir /tmp/cache --only all",
    "restore oci://registry.example/team/kernels:llama3",
    "restore --tag llama3/h200 --store file:///var/cache/kernels",
    "restore --tag llama3/h200 --store file:///var/cache/kernels --check",
)
@click.argument("bundle", required=False)
@option(
    "--tag T",
    "Instead of BUNDLE: a tag in a store, or the digest of a bundle there, or how it begins.",
)
@stores_option(TIERS_HELP, callback=None)
@flag("--check", "Write nothing; exit status 1 when something usable is missing.")
@option("--cache-dir DIR", "Where to; without it, where Triton (or Inductor) looks here and now.")
@keep_option
@option(
    "--only",
    "Leave out what this machine surely cannot use, or restore everything.",
    type=click.Choice(["usable", "all"]),
    default="usable",
)
@option(
    "--trust",
    "With code, also what is executed or unpickled: shared libraries, files of torch; with"
    " signed, where a trusted key vouches for it.",
    type=click.Choice(["kernels", "code", "signed"]),
    default="kernels",
)
@repeated(
    "--device N",
    "devices",
    "For an Inductor bundle: the device to place kernels for; repeat for several.",
    type=click.IntRange(0),
)
@repeated(
    "--root NAME=DIR",
    "roots",
    "Where the cache of the server NAME is; without it, where the server looks here and now.",
)
@fact_option
@family_file_option
@flag(
    "--rekey",
    "Also use kernels of another build of the same Triton release, under this machine's keys.",
)
@flag("--allow-empty", "A bundle with nothing in it is fine.")
def restore(
    screen: Screen,
    bundle: str | None,
    tag: str | None,
    urls: tuple[str, ...],
    check: bool,
    rekey: bool,
    devices: tuple[int, ...],
    roots: tuple[str, ...],
    facts: tuple[str, ...],
    family_files: tuple[str, ...],
    **choices: Any,
) -> int:
    """Put the kernels of BUNDLE, or of a bundle in a store, where Triton or Inductor will look for
    them, and with --trust code what servers keep beside them, where it was made for what is here:
    versions, GPU, driver, ranks.

    Every byte is verified before it becomes visible. Exit status 1 when something of it is damaged
    and was skipped, or when nothing in the bundle can be used here.
    """
    choices["devices"] = devices or None
    choices["trees"] = tree_options(facts, family_files, roots)
    if check and rekey:
        raise click.UsageError(
            "--rekey writes kernels of its own; --check writes nothing: give one of them"
        )
    with _source(bundle, tag, urls, read_only=check) as source:
        if check:
            return _check(screen, source, choices)
        return _restore(screen, source, choices | {"rekey": rekey})


class _Source(NamedTuple):
    bundle: Bundle
    name: str
    facts: dict[str, Any]

    def told(self) -> dict[str, Any]:
        """Return what `--json` says of it."""
        return {**self.facts, "digest": self.bundle.digest, "counts": counts(self.bundle)}


@contextmanager
def _source(
    path: str | None, tag: str | None, urls: tuple[str, ...], *, read_only: bool
) -> Iterator[_Source]:
    if (path is None) == (tag is None):
        raise click.UsageError(
            "give a BUNDLE or --tag" + (", not both" if path is not None else "")
        )
    stores = given_or_set(urls) if tag is not None else urls
    if (tag is None) != (not stores):
        raise click.UsageError(f"--tag and --store, or {STORE_VARIABLE}, belong together")
    with ExitStack() as stack:
        if path is not None:
            yield _Source(stack.enter_context(open_bundle(path)), path, {"bundle": path})
        elif tag is not None:
            store = stack.enter_context(existing_store(*stores, read_only=read_only))
            pulled = stack.enter_context(store.pull(tag, read_only=read_only))
            yield _Source(pulled, tag, {"store": store.name, "tag": tag})


def _restore(screen: Screen, source: _Source, choices: dict[str, Any]) -> int:
    opened = source.bundle
    with screen.transfer(f"restoring {source.name}", count_bytes(opened)) as bar:
        report = bundler.restore(bar.watching(opened), **choices)
    _show_report(screen, report, opened)
    screen.finish({**source.told(), "usable": report.usable, **asdict(report)})
    trees = has_trees(entry.path for entry in opened.opaque) and not report.companions
    nothing = not report.usable and (opened.kernels or trees)
    return PROBLEM if report.damaged or nothing else FINE


def _show_report(screen: Screen, report: RestoreReport, bundle: Bundle) -> None:
    rekeyed = " (of another build of this Triton, under this machine's keys)"
    repaired = " (broken before, replaced as a whole)"
    rewritten = " with a path of this machine"
    screen.facts(
        [
            ("restored", wording.some(len(report.restored), "kernel", " (written now)")),
            ("present", wording.some(len(report.present), "kernel", " (there already, complete)")),
            ("repaired", wording.some(len(report.repaired), "kernel", repaired)),
            ("rekeyed", wording.some(len(report.rekeyed), "kernel", rekeyed)),
            ("beside", wording.some(len(report.companions), "other file")),
            ("tuned", wording.some(report.tuned, "tuning record")),
            ("rewritten", wording.some(len(report.rewritten), "file", rewritten)),
            *(("into", directory) for directory in report.directories),
            *(("not checked", fact) for fact in report.unchecked),
            ("signatures", report.signatures),
        ]
    )
    screen.reasons("skipped", report.skipped, wording.kernel_names(bundle))
    screen.done(
        f"{report.usable:,} of {wording.count(len(bundle.kernels), 'kernel')} in place;"
        f" {wording.count(report.files, 'file')}, {wording.size(report.bytes)} written in"
        f" {wording.duration(report.seconds)}"
    )


def _check(screen: Screen, source: _Source, choices: dict[str, Any]) -> int:
    with screen.progress(f"checking {source.name}"):
        report = bundler.check(source.bundle, **choices)
    keys = {kernel.key for kernel in source.bundle.kernels}
    present = keys & {*report.present}
    _show_check(screen, report, source.bundle, len(present), len(keys))
    screen.finish({**source.told(), "ok": report.complete, **asdict(report)})
    nothing_usable = keys <= {name for name, _ in report.skipped}
    return PROBLEM if report.missing or (keys and nothing_usable) else FINE


def _show_check(
    screen: Screen, report: CheckReport, bundle: Bundle, present: int, total: int
) -> None:
    names, missing = wording.kernel_names(bundle), len({name for name, _ in report.missing})
    screen.facts(
        [
            *(("looked in", directory) for directory in report.directories),
            *(("not checked", fact) for fact in report.unchecked),
            ("signatures", report.signatures),
        ]
    )
    screen.reasons("would be skipped", report.skipped, names)
    screen.reasons("missing", report.missing, names)
    place = f"{present:,} of {wording.count(total, 'kernel')} in place"
    screen.done(f"{place}; {f'{missing:,}' if missing else 'nothing'} to restore")
