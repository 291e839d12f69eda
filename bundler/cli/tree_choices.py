# SPDX-License-Identifier: Apache-2.0
"""`tree_choices`: the options that say where trees of servers' caches go, and what they are
compared with; and lines that show trees.

The commands `restore`, `pack` and `explain` use them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from bundler.cli import wording
from bundler.cli.command import repeated
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.lifecycle.family import Family, find_family
from bundler.lifecycle.lifecycle_reports import TreeOptions
from bundler.lifecycle.tree_plan import read_trees

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 8

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
    for tree in trees[:_SHOWN]:
        size = wording.size(sum(file.size for file in tree.files))
        ranks = wording.some(len(tree.ranks), "rank")
        facts = (f"{name} {value}" for name, value in tree.fingerprint.items() if name != "ranks")
        lines.append(
            f"tree {tree.name}: {wording.count(len(tree.files), 'file')} ({size})"
            f"{ranks and f', {ranks}'}; made for {', '.join(facts) or 'nothing that is known'}"
        )
    if len(trees) > _SHOWN:
        lines.append(f"… and {wording.count(len(trees) - _SHOWN, 'more tree')}; --json lists all")
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
