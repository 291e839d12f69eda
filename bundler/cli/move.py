# SPDX-License-Identifier: Apache-2.0
"""`pack` and `restore`: cache directory -> bundle -> cache directory."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

import bundler
from bundler.cli import words
from bundler.cli.command import FINE, PROBLEM, example, keep_option, output_option, reports
from bundler.cli.screen import Column, Screen
from bundler.errors import AccessDenied, NotFound
from bundler.format.bundle import Bundle, Keep
from bundler.format.file import os_errors, replacing
from bundler.lifecycle.report import RestoreReport
from bundler.lifecycle.restoring import Only, Trust

CONTENTS = (Column("target"), Column("kernels", True), Column("binaries", True), Column("IR", True))


@click.command(
    short_help="Make a bundle from a cache directory.", epilog=example("pack ~/.triton/cache -o model.tbundle")
)
@click.argument("directory")
@output_option
@keep_option
@reports
def pack(screen: Screen, directory: str, output: str, keep: Keep) -> int:
    """Make a bundle from a Triton or Inductor cache DIRECTORY.

    A cache directory does not hold argument types; record the compiles with `run` to have those too.
    """
    with screen.progress(f"reading {directory}"):
        bundle = bundler.pack(directory, keep=keep)
    size = save(screen, bundle, output)
    show_contents(screen, bundle)
    screen.reasons("left out", bundle.left_out)
    screen.done(f"wrote {output}: {words.size(size)}, {bundle.digest}")
    screen.finish({**contents(bundle), "path": output, "size_bytes": size, "left_out": bundle.left_out})
    return FINE


def save(screen: Screen, bundle: Bundle, output: str) -> int:
    """Write a bundle, with a progress bar, and return the file's size in bytes."""
    with screen.progress(f"writing {output}", len(bundle.content.blobs)) as bar:
        bar.watching(bundle).save(output)
    with os_errors(output, "read"):
        return os.stat(output).st_size


def check_output(output: str) -> None:
    """Raise now what writing `output` would raise after an hour's work."""
    with os_errors(output, "write"):
        folder = os.path.dirname(os.path.abspath(output))
        if not os.path.isdir(folder):
            raise NotFound(f"cannot write {output}: there is no directory {folder}; make it first", path=output)
        if os.path.isdir(output):
            with replacing(output):  # refuses a directory, in the words that saving would use
                pass
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AccessDenied(f"cannot write {output}: {folder} is not writable; choose another place", path=output)


def contents(bundle: Bundle) -> dict[str, Any]:
    """Return what is in a bundle, in numbers, for `--json`."""
    return {
        "digest": bundle.digest,
        "counts": counts(bundle),
        "targets": [
            {"target": target, "kernels": kernels, "launch_bytes": launch, "ir_bytes": rest}
            for target, kernels, launch, rest in _by_target(bundle)
        ],
    }


def counts(bundle: Bundle) -> dict[str, int]:
    """Return how many entries of each kind a bundle has."""
    return {
        "kernels": len(bundle.kernels),
        "tuning_files": len(bundle.tuning_files),
        "helpers": len(bundle.helpers),
        "opaque": len(bundle.opaque),
    }


def show_contents(screen: Screen, bundle: Bundle) -> None:
    """Print what is in a bundle: kernels by target, and what lies beside them."""
    rows = _by_target(bundle)
    if rows:
        screen.table(CONTENTS, [(t, f"{n:,}", words.size(launch), words.size(rest)) for t, n, launch, rest in rows])
        screen.line()
    beside = [
        f"{words.count(len(entries), noun)} ({words.size(sum(entry.artifact.size for entry in entries))})"
        for noun, entries in (
            ("tuning file", bundle.tuning_files), ("helper library", bundle.helpers), ("opaque file", bundle.opaque))
        if entries
    ]  # fmt: skip
    if beside:
        screen.line("beside them: " + ", ".join(beside))


def _by_target(bundle: Bundle) -> list[tuple[str, int, int, int]]:
    """Return (target, kernels, bytes of launch sets, bytes of the rest) for each target."""
    sums: dict[str, tuple[int, int, int]] = {}
    for kernel in bundle.kernels:
        number, launch, rest = sums.get(str(kernel.target), (0, 0, 0))
        own = sum(artifact.size for artifact in kernel.launch_set)
        sums[str(kernel.target)] = (number + 1, launch + own, rest + kernel.size - own)
    return [(target, *numbers) for target, numbers in sorted(sums.items())]


@click.command(
    short_help="Put a bundle's kernels where the next process looks.",
    epilog=example("restore model.tbundle", "restore model.tbundle --cache-dir /tmp/cache --only all"),
)
@click.argument("bundle")
@click.option("--cache-dir", metavar="DIR", help="Where to; without it, where Triton (or Inductor) looks here and now.")
@keep_option
@click.option(
    "--only",
    type=click.Choice(["usable", "all"]),
    default="usable",
    show_default=True,
    help="Leave out what this machine surely cannot use, or restore everything.",
)
@click.option(
    "--trust",
    type=click.Choice(["kernels", "code"]),
    default="kernels",
    show_default=True,
    help="With code, also what is executed or unpickled: shared libraries, files of torch.",
)
@click.option("--device", "devices", type=click.IntRange(0), multiple=True, metavar="N",
              help="For an Inductor bundle: the device to place kernels for; repeat for several.")  # fmt: skip
@reports
def restore(
    screen: Screen, bundle: str, cache_dir: str | None, keep: Keep, only: Only, trust: Trust, devices: tuple[int, ...]
) -> int:
    """Put the kernels of BUNDLE where Triton or Inductor will look for them.

    Every byte is verified before it becomes visible. Exit status 1 when nothing in the bundle can be used here.
    """
    with Bundle.load(bundle) as opened:
        with screen.progress(f"restoring {bundle}", len(opened.content.blobs)) as bar:
            report = bundler.restore(bar.watching(opened), cache_dir, keep, devices or None, only, trust)
        _show_report(screen, report, opened)
        screen.finish({"bundle": bundle, "digest": opened.digest, "counts": counts(opened),
                       "usable": report.usable, **asdict(report)})  # fmt: skip
        return PROBLEM if report.damaged or (opened.kernels and not report.usable) else FINE


def _show_report(screen: Screen, report: RestoreReport, bundle: Bundle) -> None:
    outcomes = (
        ("restored", report.restored, "written now"),
        ("present", report.present, "there already, complete"),
        ("repaired", report.repaired, "broken before, replaced as a whole"),
    )
    screen.facts([
        *((name, f"{words.count(len(keys), 'kernel')} ({why})") for name, keys, why in outcomes if keys),
        *(("beside", words.count(len(paths), "other file")) for paths in (report.companions,) if paths),
        *(("rewritten", f"{words.count(len(files), 'file')} with a path of this machine")
          for files in (report.rewritten,) if files),
        *(("into", directory) for directory in report.directories),
        *(("not checked", fact) for fact in report.unchecked),
    ])  # fmt: skip
    screen.reasons("skipped", report.skipped, words.kernel_names(bundle))
    screen.done(
        f"{report.usable:,} of {words.count(len(bundle.kernels), 'kernel')} in place; {words.count(report.files, 'file')}"
        f", {words.size(report.bytes)} written in {words.duration(report.seconds)}"
    )
