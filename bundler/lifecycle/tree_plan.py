# SPDX-License-Identifier: Apache-2.0
"""`TreePlan`: which trees of a bundle this machine can use, and where their files and kernels
belong.

`RestorePlan` makes one for a bundle that has trees; `read_trees` reads the indexes, also for
commands that show a bundle.  `compare_fingerprints` says which parts of a tree's fingerprint differ
from another, and which agree only as far as known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from bundler.errors import (
    ConfigError,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
)
from bundler.format.bundle import Bundle
from bundler.format.digest import digest_raw
from bundler.format.entries import Artifact
from bundler.format.opaque_files import TreeFile, TreeIndex, blob_path, is_index_path, is_tree_path
from bundler.format.summary import count
from bundler.lifecycle.bundle_builder import NOT_NEEDED
from bundler.lifecycle.family import (
    FAMILIES,
    PROGRAMS,
    Family,
    check_facts,
    check_names,
    declared_family,
    find_family,
    takes,
)
from bundler.lifecycle.kernel_placement import NEEDS_TRUST
from bundler.lifecycle.lifecycle_reports import RestoreOptions, TreeOptions
from bundler.toolchain.identity import machine_facts

_RANKS = "ranks"
_COUNTS = re.compile(r"(\d{1,4})(?:x(\d{1,4}))?")
_NUMBERS = re.compile(r"\d+")
_SHOWN = 4
# Ranks of one host, and of many, have equal files: so often what a bundle holds may be written.
REPEATS = 64
UNREPEATED_BYTES = 64 << 20


class PlacedTree(NamedTuple):
    """A tree and the directory that is its family's root here."""

    tree: TreeIndex
    root: str


class TreePlan:
    """Where the trees of one bundle go.  Reads their indexes, looks at this machine, and writes
    nothing.

    Raises `LimitExceeded` for trees that are far larger on disk than what the bundle holds of them.

    Attributes:
        unusable: (name, reason) of trees, and of files of trees, that are left out.
        damaged: names among them whose index is damaged.
        unchecked: facts that are not known on this machine, or not in the bundle, and excluded
            nothing.
        wanted: the trees to restore.
        kernel_roots: key of a kernel, or directory of a helper library -> the cache directories
            where trees have it.
    """

    def __init__(self, bundle: Bundle, options: RestoreOptions) -> None:
        self._bundle, self._options = bundle, options
        self.unusable: list[tuple[str, str]] = []
        self.damaged: list[str] = []
        self.unchecked: set[str] = set()
        self.wanted: list[PlacedTree] = []
        self.kernel_roots: dict[str, dict[str, None]] = {}
        self._facts: dict[tuple[str, ...], dict[str, str]] = {}
        self._artifacts = {
            entry.path: entry.artifact for entry in bundle.opaque if is_tree_path(entry.path)
        }
        trees = list(read_trees(bundle, self.unusable, self.damaged))
        check_choices(options.trees, trees)
        families = {tree.family for tree in trees} - {PROGRAMS}
        base = options.cache_dir
        if base is not None and len(families) > 1:
            raise ConfigError(
                f"{os.fspath(base)} is one directory, and the bundle has trees of"
                f" {', '.join(sorted(families))}: give the root of each, --root NAME=DIR or"
                " TreeOptions(roots)",
                got=base,
            )
        for tree in trees:
            self._plan(
                tree, [one for one in trees if (one.family, one.place) == (tree.family, tree.place)]
            )
        self._check_size()

    def files(self, placed: PlacedTree) -> Iterator[tuple[str, TreeFile]]:
        """Yield (path relative to the root, file) of what is to be restored; what is not is in
        `unusable` then.
        """
        family = declared_family(placed.tree.family, self._options.trees.families)
        for file in placed.tree.files:
            path = placed.tree.path_of(file.path)
            if family is not None and not takes(family, path):
                self.unusable.append(
                    (
                        f"{placed.tree.family}:{path}",
                        f"{family.name}, as declared here, has no such file",
                    )
                )
            elif escapes(placed.root, os.path.dirname(path)):
                self.unusable.append(
                    (f"{placed.tree.family}:{path}", "a symbolic link there leads out of the root")
                )
            else:
                yield path, file

    def chunks(self, tree: TreeIndex, file: TreeFile) -> Iterator[bytes]:
        """Yield the bytes of a file, of which one chunk is in memory at a time.

        Raises:
            NotFound: a chunk is not in the bundle.
            DigestMismatch, FormatError: it is damaged.
        """
        known = self._chunks_of(tree, file)
        if len(known) != len(file.chunks):
            raise NotFound(f"the bundle lacks part of {tree.path_of(file.path)}", name=file.path)
        if sum(artifact.size for artifact in known) != file.size or any(
            artifact.spans for artifact in known
        ):
            raise FormatError(
                f"the index of {tree.name} gives {file.path} another size", name=file.path
            )
        for artifact in known:
            yield self._bundle.read(artifact)

    def _chunks_of(self, tree: TreeIndex, file: TreeFile) -> list[Artifact]:
        found = (
            self._artifacts.get(blob_path(tree.family, digest_raw(chunk))) for chunk in file.chunks
        )
        return [artifact for artifact in found if artifact is not None]

    def _check_size(self) -> None:
        """Refuse trees, and copies of kernels in them, that are far larger on disk than what the
        bundle holds of them.
        """
        total, held = 0, dict[str, int]()
        for kernel in self._bundle.kernels if self.kernel_roots else ():
            sizes = {artifact.digest: artifact.size for artifact in kernel.artifacts}
            total += sum(sizes.values()) * len(self.kernel_roots.get(kernel.key, ()))
            held |= sizes
        for placed in self.wanted:
            for file in placed.tree.files:
                total += file.size
                held |= {
                    artifact.digest: artifact.size
                    for artifact in self._chunks_of(placed.tree, file)
                }
        limit = self._options.trees.max_bytes
        if limit is None:
            limit = max(UNREPEATED_BYTES, REPEATS * sum(held.values()))
        if total > limit:
            raise LimitExceeded(
                f"the trees of this bundle have {total} bytes on disk, made of {sum(held.values())}"
                f" that are in it, which is over the limit of {limit}; if you trust it, pass"
                f" TreeOptions(max_bytes={total})",
                limit=limit,
                got=total,
            )

    def _plan(self, tree: TreeIndex, same_place: list[TreeIndex]) -> None:
        family = declared_family(tree.family, self._options.trees.families)
        try:
            root = self._root_of(tree, family)
        except NotFound as error:
            self.unusable.append((tree.name, error.message))
            return
        for path, keys in tree.kernels.items():
            inside = tree.path_of(path)
            if escapes(root, inside):
                self.unusable.append(
                    (f"{tree.family}:{inside}", "a symbolic link there leads out of the root")
                )
                continue
            for key in keys:
                self.kernel_roots.setdefault(key, {})[os.path.join(root, inside)] = None
        reason = self._why_not(_with_ranks_of(tree, same_place), family)
        if not tree.files:
            return
        if reason is None:
            self.wanted.append(PlacedTree(tree, root))
        else:
            self.unusable.append((tree.name, reason))

    def _root_of(self, tree: TreeIndex, family: Family | None) -> str:
        # Where kernels are restored to says nothing of where the generator looks for programs.
        elsewhere = None if tree.family == PROGRAMS else self._options.cache_dir
        given = self._options.trees.roots.get(tree.family, elsewhere)
        if given is not None:
            return os.path.abspath(os.fspath(given))
        # Says which families are declared.
        return (family or find_family(tree.family, self._options.trees.families)).find_root()

    def _why_not(self, tree: TreeIndex, family: Family | None) -> str | None:
        if self._options.keep == "launch":
            return NOT_NEEDED
        # What a bundle says of itself decides nothing: a family that is not declared here is code.
        if self._options.trust != "code" and (family is None or family.trust == "code"):
            return NEEDS_TRUST
        if self._options.only == "all":
            return None
        names = fact_names(tree, family)
        if names not in self._facts:
            self._facts[names] = machine_facts(names)
        ours = {**self._facts[names], **self._options.trees.facts}
        differing, unknown = compare_fingerprints(tree.fingerprint, ours, names)
        self.unchecked |= {_unknown(tree, name) for name in unknown}
        if not differing:
            return None
        parts = (
            f"{name}: made for {shown(name, theirs)}, here {shown(name, value)}"
            for name, theirs, value in differing
        )
        return "; ".join(parts)


def check_choices(options: TreeOptions, trees: Iterable[TreeIndex] = ()) -> None:
    """Refuse a root or a fact under a name that nothing has: it would be ignored, and files go
    elsewhere.

    Args:
        options: what the user chose.
        trees: of the bundle, whose own families and facts are known too.

    Raises:
        ConfigError: no family, or no part of a fingerprint, is called so; the message has the
            nearest name.
    """
    if not (options.roots or options.facts):
        return
    there = list(trees)
    declared = {**FAMILIES, **{family.name: family for family in options.families}}
    families = {*declared, *(tree.family for tree in there)}
    facts = {name for family in declared.values() for name in family.fingerprint}
    facts.update(name for tree in there for name in tree.fingerprint)
    check_names(options.roots, families, "root", "family")
    check_facts(options.facts, facts)


def fact_names(tree: TreeIndex, family: Family | None) -> tuple[str, ...]:
    """Return the names of what a tree depends on, by itself and by the declaration of its
    family.
    """
    declared = set(family.fingerprint) if family is not None else set()
    return tuple(sorted({*tree.fingerprint, *declared} - (set() if tree.ranks else {_RANKS})))


def _unknown(tree: TreeIndex, name: str) -> str:
    if name not in tree.fingerprint:
        return f"{name} of {tree.family}: the bundle does not say"
    hint = "; say it with --fact ranks=N, or facts=" if name == _RANKS else ""
    return f"{name} of {tree.family}: not known here{hint}"


def _with_ranks_of(tree: TreeIndex, others: list[TreeIndex]) -> TreeIndex:
    """Return a tree with the ranks of all hosts that have one of its place: a bundle merged from
    several hosts has one of each.
    """
    if all(one.fingerprint.get(_RANKS) == tree.fingerprint.get(_RANKS) for one in others):
        return tree
    ranks = sorted({rank for one in others for rank in one.fingerprint.get(_RANKS, "").split()})
    return replace(tree, fingerprint={**tree.fingerprint, _RANKS: " ".join(ranks)})


def read_trees(
    bundle: Bundle, left_out: list[tuple[str, str]] | None = None, damaged: list[str] | None = None
) -> Iterator[TreeIndex]:
    """Yield the trees of a bundle, by family and place.

    Args:
        bundle: the bundle.
        left_out: gets (name, reason) of each index that cannot be read; without it that is an
            error.
        damaged: gets the names of those.

    Raises:
        FormatError, DigestMismatch, NotFound: an index cannot be read, and nobody asked for its
            name.
    """
    found = []
    for entry in bundle.opaque:
        if is_index_path(entry.path):
            try:
                tree = TreeIndex.decode(bundle.read(entry.artifact))
                if tree.entry_path != entry.path:
                    raise FormatError(
                        f"{entry.path} is not where the index of {tree.name} belongs",
                        name=entry.path,
                    )
                found.append(tree)
            except (FormatError, DigestMismatch, NotFound) as error:
                if left_out is None:
                    raise
                left_out.append((entry.path, error.message))
                if damaged is not None:
                    damaged.append(entry.path)
    yield from sorted(found, key=lambda tree: (tree.family, tree.place, tree.ranks))


def escapes(root: str, path: str) -> bool:
    """Whether a path below a root leads out of it, by a symbolic link in it; the root itself may be
    one.
    """
    return not f"{os.path.realpath(os.path.join(root, path))}/".startswith(
        f"{os.path.realpath(root).rstrip('/')}/"
    )


# ------------------------------------------------------------------------------------ Fingerprints


def compare_fingerprints(
    theirs: Mapping[str, str], ours: Mapping[str, str], names: Iterable[str] = ()
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Compare what a tree depends on with what is here.

    Args:
        theirs: the tree's fingerprint.
        ours: what is known here.
        names: parts to compare beside those that the tree names.

    Returns:
        (name, the tree's value, the value here) of the parts that differ; and the names of the
        parts that are not known on one side, which exclude nothing.
    """
    differing, unknown = [], []
    for name in dict.fromkeys([*theirs, *names]):
        if name not in theirs or name not in ours:
            unknown.append(name)
        elif not _agrees(name, theirs[name], ours[name]):
            differing.append((name, theirs[name], ours[name]))
    return differing, unknown


def shown(name: str, value: str) -> str:
    """Return a value as a message shows it: ranks by their number and names."""
    if name != "ranks":
        return value
    ranks = sorted(_ranks(value))
    names = " ".join(ranks) if len(ranks) <= _SHOWN else f"{' '.join(ranks[:_SHOWN])} …"
    return f"{count(len(ranks), 'rank')} ({names})"


def _agrees(name: str, theirs: str, ours: str) -> bool:
    if name == "driver":
        # A driver runs what was made for an older one.
        kinds = theirs.partition(" ")[0] == ours.partition(" ")[0]
        return kinds and _version(theirs) <= _version(ours)
    if name == "ranks":
        return _ranks(theirs) == _ranks(ours)
    return theirs == ours


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBERS.findall(text)))


def _ranks(text: str) -> frozenset[str]:
    """Return the names of ranks that a text lists, or counts: `4`, or `4x2` for four ranks of each
    of two data-parallel replicas.
    """
    counts = _COUNTS.fullmatch(text.strip())
    if counts is None:
        return frozenset(text.split())
    replicas = int(counts[2] or 1)
    return frozenset(
        f"rank_{rank}_{replica}" for replica in range(replicas) for rank in range(int(counts[1]))
    )
