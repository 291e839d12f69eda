# SPDX-License-Identifier: Apache-2.0
"""`explain_trees`: why a server finds no tree: what differs between a bundle and this machine, or
between two bundles or cache directories.

A server names a tree by a hash.  Where it leaves a file that says what the hash was made of, as
vLLM's `cache_key_factors.json`, the factors that differ are named.  Users and the command `explain`
call it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors
from bundler.format.limits import MIB, Limits
from bundler.format.opaque_files import TreeIndex
from bundler.format.summary import Summarized, count, printable
from bundler.lifecycle.family import (
    Family,
    declared_family,
    find_family,
    place_of,
    rank_of,
    says_factors,
    takes,
)
from bundler.lifecycle.kernel_directory import Rejected, read_file, walk_files
from bundler.lifecycle.lifecycle_reports import RestoreOptions, TreeOptions
from bundler.lifecycle.tree_plan import (
    TreePlan,
    check_choices,
    compare_fingerprints,
    fact_names,
    read_trees,
    shown,
)
from bundler.toolchain.identity import machine_facts

_FACTOR_BYTES = 1 * MIB
_VALUE_CHARACTERS = 80
_LISTED = 6

_Differing = tuple[tuple[str, str | None, str | None], ...]


@dataclass(frozen=True, repr=False)
class TreeExplanation(Summarized):
    """What differs between one tree and another, or this machine.

    Attributes:
        name: the tree: of the second source where there are two, else of the only one.
        nearest: the tree that it was compared with; None for this machine, or where there is none
            to compare with.
        fingerprint: (part, value there, value here) of what differs in the fingerprint.
        factors: (factor, value there, value here) of what differs in what the server made the
            tree's name of; None for a value that is not there.
        unknown: parts that are not known on one side, and what could not be compared.
        same: whether the tree would be found: it has the same name, and nothing that is known
            differs.
    """

    name: str
    nearest: str | None = None
    fingerprint: tuple[tuple[str, str | None, str | None], ...] = ()
    factors: tuple[tuple[str, str | None, str | None], ...] = ()
    unknown: tuple[str, ...] = ()
    same: bool = False

    @property
    def sentence(self) -> str:
        """What to tell a person, in one sentence."""
        beside = f"{self.nearest}" if self.nearest is not None else "this machine"
        parts = [
            f"{name} is {_text(name, here)} here, {_text(name, there)} there"
            for name, there, here in (*self.fingerprint, *self.factors)
        ]
        more = f", and {len(parts) - _LISTED} more" if len(parts) > _LISTED else ""
        if parts:
            return f"{self.name} differs from {beside}: {'; '.join(parts[:_LISTED])}{more}"
        if self.same:
            return f"{self.name} agrees with {beside} as far as is known"
        if self.nearest is None:
            return f"{self.name} has no counterpart"
        return f"{self.name} has another name than {beside}, and no factor that is known differs"


@dataclass(frozen=True)
class _Described:
    """A tree, and what its name was made of as far as the server says."""

    tree: TreeIndex
    factors: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def explain_trees(
    there: Bundle | str | os.PathLike[str],
    here: Bundle | str | os.PathLike[str] | None = None,
    *,
    trees: TreeOptions | None = None,
) -> tuple[TreeExplanation, ...]:
    """Say what differs between trees, so that one of them is not found in place of the other.

    Args:
        there: a bundle, the path of one, or a cache directory as `NAME=DIR` with the name of its
            family.
        here: another one, whose trees are looked for in `there`; None to compare each tree of
            `there` with this machine.
        trees: `facts` in place of what this machine says, and `families` beside those that we know.

    Returns:
        One explanation for each tree of `here`, or of `there` where that is all.

    Raises:
        NotFound: no such bundle, directory or family.
        ConfigError: a fact that no fingerprint has.
        FormatError, DigestMismatch: a bundle is damaged.
    """
    options = trees or TreeOptions()
    described = _describe(there, options)
    check_choices(options, [one.tree for one in described])
    if here is None:
        return tuple(_beside_machine(one, options) for one in described)
    return tuple(_beside(one, described) for one in _describe(here, options))


def _beside_machine(one: _Described, options: TreeOptions) -> TreeExplanation:
    family = declared_family(one.tree.family, options.families)
    names = fact_names(one.tree, family)
    differing, unknown = compare_fingerprints(
        one.tree.fingerprint, {**machine_facts(names), **options.facts}, names
    )
    return TreeExplanation(
        one.tree.name, None, (*differing,), (), (*unknown, *one.problems), same=not differing
    )


def _beside(one: _Described, others: Sequence[_Described]) -> TreeExplanation:
    """Compare a tree with the nearest of others: that of its name, else that with the fewest
    factors that differ.
    """
    alike = [other for other in others if _kind(other.tree) == _kind(one.tree)]
    if not alike:
        return TreeExplanation(one.tree.name, unknown=one.problems)
    named = [other for other in alike if other.tree.place == one.tree.place]
    nearest = min(named or alike, key=lambda other: (len(_differing(other, one)), other.tree.name))
    differing, unknown = compare_fingerprints(nearest.tree.fingerprint, one.tree.fingerprint)
    factors = _differing(nearest, one)
    unknown += [*one.problems, *nearest.problems]
    if not named and not (one.factors and nearest.factors):
        unknown.append("no file says what the names of both were made of")
    return TreeExplanation(
        one.tree.name,
        nearest.tree.name,
        tuple(differing),
        factors,
        tuple(unknown),
        same=bool(named) and not differing,
    )


def _kind(tree: TreeIndex) -> tuple[str, str]:
    return tree.family, tree.place.rpartition("/")[0]


def _differing(there: _Described, here: _Described) -> _Differing:
    names = sorted({*there.factors, *here.factors}) if there.factors and here.factors else []
    return tuple(
        (name, there.factors.get(name), here.factors.get(name))
        for name in names
        if there.factors.get(name) != here.factors.get(name)
    )


def _text(name: str, value: str | None) -> str:
    if value is None:
        return "not there"
    text = printable(shown(name, value))
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"


def _describe(source: Bundle | str | os.PathLike[str], options: TreeOptions) -> list[_Described]:
    if isinstance(source, Bundle):
        return list(_of_bundle(source, options))
    name, equals, directory = os.fspath(source).partition("=")
    if equals:
        return list(
            _of_directory(
                find_family(name, options.families),
                os.path.abspath(os.path.expanduser(directory)),
                options,
            )
        )
    with Bundle.load(source) as bundle:
        return list(_of_bundle(bundle, options))


def _of_bundle(bundle: Bundle, options: TreeOptions) -> Iterator[_Described]:
    plan = TreePlan(bundle, RestoreOptions(trees=options))
    for tree in read_trees(bundle):
        family = declared_family(tree.family, options.families)
        if family is None:
            yield _Described(
                tree,
                problems=(
                    f"no family {tree.family} is declared here, so its factors are not known",
                ),
            )
            continue
        files = {
            file.path: file
            for file in tree.files
            if says_factors(family, file.path) and file.size <= _FACTOR_BYTES
        }
        found, problems = _joined(
            [(path, b"".join(plan.chunks(tree, file))) for path, file in files.items()]
        )
        yield _Described(tree, _without_ranks(found, family), problems)


def _of_directory(family: Family, root: str, options: TreeOptions) -> Iterator[_Described]:
    contents: dict[str, dict[str, bytes | None]] = {}
    with os_errors(root, "read"):
        os.listdir(root)
        for path in walk_files(root, lambda path: not os.path.islink(f"{root}/{path}"), []):
            if takes(family, path):
                place = place_of(family, path)
                inner = path.removeprefix(f"{place}/") if place else path
                contents.setdefault(place, {})[inner] = (
                    _factor_bytes(root, path) if says_factors(family, path) else None
                )
    known = machine_facts(family.fingerprint) | dict(options.facts)
    for place, files in sorted(contents.items()):
        ranks = sorted({rank for path in files if (rank := rank_of(family, path)) is not None})
        fingerprint = {
            **known,
            **({"ranks": " ".join(ranks)} if ranks and "ranks" in family.fingerprint else {}),
        }
        tree = TreeIndex(family.name, place, fingerprint, tuple(ranks))
        found, problems = _joined(
            [(path, data) for path, data in files.items() if data is not None]
        )
        yield _Described(tree, _without_ranks(found, family), problems)


def _factor_bytes(root: str, path: str) -> bytes | None:
    folder, name = os.path.split(os.path.join(root, path))
    try:
        data = read_file(folder, name, Limits(file_bytes=_FACTOR_BYTES))
    except OSError:
        return None
    return None if isinstance(data, Rejected) else data


def _joined(
    files: Iterable[tuple[str, bytes]],
) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """Return the factors in each file, and what is wrong with others."""
    found: dict[str, dict[str, str]] = {}
    problems = []
    for path, data in files:
        try:
            found[path] = dict(_flat(json.loads(data)))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path} is no JSON: {error!s:.120}")
    return found, tuple(problems)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _without_ranks(found: Mapping[str, Mapping[str, str]], family: Family) -> dict[str, str]:
    """Return factors by name; of those that every rank has, one rank's, since the server gives all
    ranks one name.
    """
    merged: dict[str, str] = {}
    for path, factors in sorted(found.items()):
        rank = rank_of(family, path)
        inner = path.removeprefix(f"{rank}/") if rank is not None else path
        part = inner.rpartition("/")[0]
        for name, value in factors.items():
            merged.setdefault(f"{part} {name}" if part else name, value)
    return merged


def counted(explanations: Sequence[TreeExplanation]) -> str:
    """Return how many trees were explained, and how many of them differ."""
    differing = sum(not one.same for one in explanations)
    return f"{count(len(explanations), 'tree')}, of which {differing} would not be found"
