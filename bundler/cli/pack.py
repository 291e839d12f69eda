# SPDX-License-Identifier: Apache-2.0
"""The command `pack`: cache directory -> bundle; and for all commands that write bundles, `save` and
`show_contents`.

What others share with it: the options about trees of servers' caches (`tree_options`), and lines
that show trees (`tree_lines`) and generated programs (`show_programs`).

`app.py` lists the command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

import bundler
from bundler.cli import wording
from bundler.cli.command import command, keep_option, option, output_option, repeated, strip_option
from bundler.cli.terminal import Column, Screen
from bundler.errors import AccessDenied, BundlerError, NotFound
from bundler.format.bundle import Bundle, Keep, require_content
from bundler.format.bundle_file import check_replaceable, os_errors
from bundler.format.container import ZSTD_LEVEL
from bundler.format.entries import entry_artifacts
from bundler.format.opaque_files import is_cache_path, is_program_path
from bundler.format.source_stripping import Strip
from bundler.format.writer import HIGHEST_LEVEL
from bundler.lifecycle.family import FAMILIES, Family, find_family
from bundler.lifecycle.lifecycle_reports import TreeOptions
from bundler.lifecycle.tree_plan import read_trees

if TYPE_CHECKING:
    from bundler.runtime.program.program_summary import ProgramSummary

F = TypeVar("F", bound=Callable[..., Any])
_TREES_SHOWN, _WORDS_SHOWN = 8, 12

family_file_option = repeated(
    "--family FILE",
    "family_files",
    "A TOML file that declares families beside the known ones; repeat for several.",
)
fact_option = repeated(
    "--fact NAME=VALUE",
    "facts",
    "Part of a fingerprint in place of what this machine says, such as ranks=8, or"
    " target=cuda:80 for kernels of that target alone; repeat for several.",
)


def declared_families(files: Sequence[str]) -> tuple[Family, ...]:
    """Return what the user's files declare; raises as `Family.load`."""
    return tuple(family for path in files for family in Family.load(path))


def tree_options(
    facts: Sequence[str], files: Sequence[str], roots: Sequence[str] = ()
) -> TreeOptions:
    """Return the user's choices as one value.

    Raises:
        click.UsageError: a fact or root is not of the form NAME=VALUE.
        ConfigError, NotFound, AccessDenied: as `Family.load`.
    """
    return TreeOptions(_pairs("--root", roots), _pairs("--fact", facts), declared_families(files))


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    wrong = [
        text for text, (name, _, value) in zip(texts, pairs, strict=True) if not name or not value
    ]
    if wrong:
        raise click.UsageError(f"{option} {wrong[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def named_family(name: str, files: Sequence[str]) -> Family | None:
    """Return the family that a word names, None for what can only be a directory."""
    if os.sep in name:
        return None
    declared = declared_families(files)
    try:
        return find_family(name, declared)
    except BundlerError:
        return None


def tree_lines(bundle: Bundle) -> list[str]:
    """Return a line for each tree of a bundle: its place, files, ranks, and what it was
    made for.
    """
    lines = []
    left_out: list[tuple[str, str]] = []
    trees = list(read_trees(bundle, left_out))
    for tree in trees[:_TREES_SHOWN]:
        size = wording.size(sum(file.size for file in tree.files))
        ranks = wording.some(len(tree.ranks), "rank")
        facts = (f"{name} {value}" for name, value in tree.fingerprint.items() if name != "ranks")
        lines.append(
            f"tree {tree.name}: {wording.count(len(tree.files), 'file')} ({size})"
            f"{ranks and f', {ranks}'}; made for {', '.join(facts) or 'nothing that is known'}"
        )
    if len(trees) > _TREES_SHOWN:
        lines.append(
            f"… and {wording.count(len(trees) - _TREES_SHOWN, 'more tree')}; --json lists all"
        )
    unread = [f"{name} cannot be read: {reason}" for name, reason in left_out]
    return [*map(wording.plain, lines), *unread]


def tree_facts(bundle: Bundle) -> dict[str, list[dict[str, Any]]]:
    """Return what `--json` says of the trees of a bundle, as `trees`; nothing for a bundle without
    any.
    """
    rows = [
        {
            "family": tree.family,
            "place": tree.place,
            "ranks": list(tree.ranks),
            "fingerprint": dict(tree.fingerprint),
            "files": len(tree.files),
            "size_bytes": sum(file.size for file in tree.files),
        }
        for tree in read_trees(bundle, [])
    ]
    return {"trees": rows} if rows else {}


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
    screen.finish({**written(bundle, output, size), "left_out": bundle.left_out})


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


def written(bundle: Bundle, output: str, size_bytes: int) -> dict[str, Any]:
    """Return what is in a bundle that was written, and where, for `--json`."""
    return {**contents(bundle), "path": output, "size_bytes": size_bytes}


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
    size = wording.size
    told = [(t, f"{n:,}", size(launch), size(rest)) for t, n, launch, rest in rows]
    screen.listing(CONTENTS, told)
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


def show_programs(screen: Screen, programs: Sequence[ProgramSummary]) -> None:
    """Print what each program is called with, what it needs, and where it runs."""
    for program in programs:
        screen.facts(_lines(program))
        screen.line()


def _lines(program: ProgramSummary) -> list[tuple[str, str]]:
    if program.problem is not None:
        return [("program", program.name), ("problem", program.problem)]
    kernels = wording.count(program.kernels, "kernel")
    launches = wording.count(program.launches, "launch")
    sizes = [f"{size} is {place}" for size, place in program.sizes.items()]
    return [
        ("program", f"{program.name}: {kernels} in {launches}"),
        ("inputs", _listed([str(one) for one in program.inputs])),
        ("sizes", _listed(sizes) if sizes else ""),
        ("weights", _weights(program)),
        ("constants", _listed(program.constants)),
        ("results", _listed([str(one) for one in program.results])),
        ("memory", memory_words(program)),
        ("needs torch", _listed(program.operators, "no")),
        (
            "code",
            "it calls operators of yours or of others: trust in code is needed"
            if program.code
            else "",
        ),
        ("random", "it draws random numbers" if program.random else ""),
        ("targets", _listed(program.targets, "any" if not program.kernels else "none yet")),
    ]


def _weights(program: ProgramSummary) -> str:
    words = [f"{name} {kind}" for name, kind in program.weights.items()]
    count = wording.count(len(words), "tensor")
    return f"{count} of {wording.size(program.weight_bytes)}: {_listed(words)}" if words else ""


def memory_words(program: ProgramSummary) -> str:
    """Return how much memory a program allocates."""
    beside = "beside inputs, weights and constants"
    if program.memory_bytes is None:
        return f"depends on sizes, {beside}"
    return f"{wording.size(program.memory_bytes)} at its peak, {beside}"


def _listed(words: Sequence[str], nothing: str = "none") -> str:
    return wording.listed(words, _WORDS_SHOWN) or nothing
