# SPDX-License-Identifier: Apache-2.0
"""The command `pack`: cache directory -> bundle; and `save` and `show_contents`, for all commands
that write bundles.

`app.py` lists the command.
"""

from __future__ import annotations

import os
from typing import Any

import click

import bundler
from bundler.cli import wording
from bundler.cli.command import command, keep_option, option, output_option, strip_option
from bundler.cli.terminal import Column, Screen
from bundler.cli.tree_choices import (
    fact_option,
    family_file_option,
    named_family,
    tree_facts,
    tree_lines,
    tree_options,
)
from bundler.errors import AccessDenied, NotFound
from bundler.format.bundle import Bundle, Keep, require_content
from bundler.format.bundle_file import check_replaceable, os_errors
from bundler.format.container import ZSTD_LEVEL
from bundler.format.entries import entry_artifacts
from bundler.format.opaque_files import is_cache_path, is_program_path
from bundler.format.source_stripping import Strip
from bundler.format.writer import HIGHEST_LEVEL
from bundler.lifecycle.family import FAMILIES

CONTENTS = (Column("target"), Column("kernels", True), Column("binaries", True), Column("IR", True))


@command(
    "Make a bundle from a cache directory.",
    "pack ~/.triton/cache -o model.tbundle",
    "pack vllm -o server.tbundle",
    "pack sglang --root /cache -o server.tbundle",
)
@click.argument("directory", metavar="DIRECTORY|FAMILY")
@output_option
@keep_option
@strip_option
@option(
    "--root DIR", "Where the cache of FAMILY is; without it, where the server looks here and now."
)
@fact_option
@family_file_option
@option(
    "--level",
    "How hard to compress, as zstd counts; 3 takes half of the time for 15 % more bytes.",
    type=click.IntRange(1, HIGHEST_LEVEL),
    default=ZSTD_LEVEL,
)
def pack(
    screen: Screen,
    directory: str,
    output: str,
    keep: Keep,
    strip: Strip | None,
    level: int,
    root: str | None,
    facts: tuple[str, ...],
    family_files: tuple[str, ...],
) -> None:
    """Make a bundle from a Triton or Inductor cache DIRECTORY, or from the cache of a server or
    compiler: of the FAMILY vllm, sglang, deep_gemm, tilelang, cute_dsl or flashinfer, or of one
    that a file declares.  A directory of such a name is written ./vllm.

    A cache directory does not hold argument types; record the compiles with `run` to have those
    too.
    """
    family = named_family(directory, family_files)
    if family is None and (root is not None or facts):
        raise click.UsageError(
            f"--root and --fact are for families; {directory} is none: {', '.join(FAMILIES)}"
        )
    options = tree_options(facts, family_files)
    with screen.progress(f"reading {directory}", counted=family is None) as bar:
        if family is None:
            bundle = bundler.pack(directory, keep=keep, watch=bar.reach)
        else:
            bundle = bundler.pack_family(family, root, keep=keep, facts=options.facts)
        bundle = bundler.strip_source(bundle) if strip else bundle
    if bundle.is_empty:
        screen.reasons("left out", bundle.left_out)
    size = save(screen, bundle, output, level)
    show_contents(screen, bundle)
    screen.reasons("left out", bundle.left_out)
    screen.done(f"wrote {output}: {wording.size(size)}, {bundle.digest}")
    screen.finish(
        {**contents(bundle), "path": output, "size_bytes": size, "left_out": bundle.left_out}
    )


def save(screen: Screen, bundle: Bundle, output: str, level: int = ZSTD_LEVEL) -> int:
    """Write a bundle, with a progress bar, and return the file's size in bytes.

    Raises `EmptyBundle` for one with nothing in it: a file that is there already is better than
    that.
    """
    require_content(bundle, f"{output} was not written")
    with screen.transfer(f"writing {output}", sum(size for _, size in bundle.content.blobs)) as bar:
        bar.watching(bundle).save(output, level=level)
    with os_errors(output, "read"):
        return os.stat(output).st_size


def check_output(output: str) -> None:
    """Raise now what writing `output` would raise after an hour's work."""
    with os_errors(output, "write"):
        folder = os.path.dirname(os.path.abspath(output))
        if not os.path.isdir(folder):
            raise NotFound(
                f"cannot write {output}: there is no directory {folder}; make it first", path=output
            )
        check_replaceable(output)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AccessDenied(
                f"cannot write {output}: {folder} is not writable; choose another place",
                path=output,
            )


def contents(bundle: Bundle) -> dict[str, Any]:
    """Return what is in a bundle, in numbers, for `--json`."""
    return {
        "digest": bundle.digest,
        "counts": counts(bundle),
        **tree_facts(bundle),
        "targets": [
            {"target": target, "kernels": kernels, "launch_bytes": launch, "ir_bytes": rest}
            for target, kernels, launch, rest in _by_target(bundle)
        ],
    }


def counts(bundle: Bundle) -> dict[str, int]:
    """Return how many entries of each kind a bundle has."""
    kinds = ("kernels", "tuning_files", "helpers", "opaque", "tuning_records")
    return {kind: len(getattr(bundle, kind)) for kind in kinds}


def count_files(bundle: Bundle) -> int:
    """Return how many files a bundle has in all; equal ones are stored once, and read each time."""
    return sum(1 for entry in bundle.content.entries for _ in entry_artifacts(entry))


def count_bytes(bundle: Bundle) -> int:
    """Return the size of all files of a bundle; equal ones are stored once, and read each time."""
    return sum(
        artifact.size for entry in bundle.content.entries for artifact in entry_artifacts(entry)
    )


def show_contents(screen: Screen, bundle: Bundle) -> None:
    """Print what is in a bundle: kernels by target, and what lies beside them."""
    rows = _by_target(bundle)
    if rows:
        size = wording.size
        told = [(t, f"{n:,}", size(launch), size(rest)) for t, n, launch, rest in rows]
        screen.table(CONTENTS, told)
        screen.line()
    programs = [entry for entry in bundle.opaque if is_program_path(entry.path)]
    opaque = [entry for entry in bundle.opaque if is_cache_path(entry.path)]
    beside = [
        f"{wording.count(len(entries), noun)}"
        f" ({wording.size(sum(entry.artifact.size for entry in entries))})"
        for noun, entries in (
            ("tuning file", bundle.tuning_files),
            ("helper library", bundle.helpers),
            ("opaque file", opaque),
            ("program", programs),
        )
        if entries
    ]
    beside += filter(None, [wording.some(len(bundle.tuning_records), "tuning record")])
    if beside:
        screen.line("beside them: " + ", ".join(beside))
    for line in tree_lines(bundle):
        screen.line(line)


def _by_target(bundle: Bundle) -> list[tuple[str, int, int, int]]:
    """Return (target, kernels, bytes of launch sets, bytes of the rest) for each target."""
    sums: dict[str, tuple[int, int, int]] = {}
    for kernel in bundle.kernels:
        number, launch, rest = sums.get(str(kernel.target), (0, 0, 0))
        own = sum(artifact.size for artifact in kernel.launch_set)
        sums[str(kernel.target)] = (number + 1, launch + own, rest + kernel.size - own)
    return [(target, *numbers) for target, numbers in sorted(sums.items())]
