# SPDX-License-Identifier: Apache-2.0
"""`compare_fingerprints`: which parts of a tree's fingerprint differ from another, which agree only
as far as known, and how to say it.

`tree_plan.py` compares a tree with this machine, `tree_comparison.py` two trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bundler.format.summary import count

_COUNTS = re.compile(r"(\d{1,4})(?:x(\d{1,4}))?")
_NUMBERS = re.compile(r"\d+")
_SHOWN = 4


class Comparison(NamedTuple):
    """Two fingerprints side by side.

    Attributes:
        differing: (name, the tree's value, the value here) of the parts that differ.
        unknown: names of the parts that are not known on one side; they exclude nothing.
    """

    differing: tuple[tuple[str, str, str], ...]
    unknown: tuple[str, ...]


def compare_fingerprints(
    theirs: Mapping[str, str], ours: Mapping[str, str], names: Iterable[str] = ()
) -> Comparison:
    """Compare what a tree depends on with what is here.

    Args:
        theirs: the tree's fingerprint.
        ours: what is known here.
        names: parts to compare beside those that the tree names.
    """
    differing, unknown = [], []
    for name in dict.fromkeys([*theirs, *names]):
        if name not in theirs or name not in ours:
            unknown.append(name)
        elif not _agrees(name, theirs[name], ours[name]):
            differing.append((name, theirs[name], ours[name]))
    return Comparison(tuple(differing), tuple(unknown))


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
