# SPDX-License-Identifier: Apache-2.0
"""`combined`: which kernels of a program are launched as one, each program of the grid working on
one of them.

Lists of tensors, as optimizers and gradient clipping have them, become a kernel for each tensor,
since their sizes differ.  What such kernels compute is small, and their launches cost more than
they do.  After fusion, kernels that do not wait for each other are put together: those of elements
along one dimension, and reductions.  `schedule` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby

import sympy

from bundler.codegen.loops.fusion import (
    ONE_ROW,
    Choose,
    LoopGroup,
    dependencies,
    in_order,
    is_extern,
)
from bundler.codegen.loops.loop_nodes import Buffer, numel
from bundler.codegen.loops.loop_terms import ALONG_ROWS, expressions_of, in_order_of

# Elements of all parts together. So many keep a large GPU busy for ten times as long as a launch
# takes, so a launch less does not pay for the registers of the largest part, which all parts have.
# It also bounds the memory that lives longer because its writers run side by side.
_MOST_ELEMENTS = 1 << 24
# Up to so many elements launches are all that counts, and parts of elements share a kernel with
# reductions, whose number of warps does not suit them.
_FEW_ELEMENTS = 1 << 20
# Drivers take 4 KiB of arguments, Inductor as many as this.
_MOST_ARGUMENTS = 250
# The time to compile a kernel grows with its text, which equal parts have once.
_MOST_KINDS = 32


def combined(
    groups: Sequence[LoopGroup],
    buffers: Mapping[str, Buffer],
    hints: Mapping[sympy.Symbol, int],
    has_one_axis: Callable[[LoopGroup], bool],
    alone: frozenset[str] = frozenset(),
    choose: Choose | None = None,
) -> list[LoopGroup]:
    """Return the groups with those that share a launch as one that has them as parts, in an order
    in which they can run.

    Args:
        groups: in an order in which they can run.
        buffers: of the program.
        hints: symbol of a size that changes from call to call -> its value in the example, by which
            limits go.
        has_one_axis: whether a kernel of elements has one dimension.
        alone: buffers whose kernels have a launch of their own.
        choose: asked for each launch that would be shared; None shares all.
    """
    waiting = waits_of(groups, buffers)
    limits, totals = _Limits(hints), _totals(groups)
    runs = []
    for _, alike in groupby(_levels(groups, waiting), key=lambda item: item[:2]):
        numbers = [
            number
            for *_, number in alike
            if limits.can_share(groups[number])
            and alone.isdisjoint(groups[number].written)
            and (number in totals if _has_rows(groups[number]) else has_one_axis(groups[number]))
        ]
        runs += [run for run in limits.runs(groups, numbers) if len(run) > 1]
    shared: dict[int, LoopGroup] = {}
    for run in runs:
        parts = [groups[number] for number in run]
        together = _unit(parts)
        found = together if choose is None else choose(parts, together)
        if found is not None:
            shared[run[0]] = found
    runs = [run for run in runs if run[0] in shared]
    if not runs:
        return list(groups)
    home = {number: run[0] for run in runs for number in run}
    units = {number: [number] for number in range(len(groups)) if number not in home}
    units |= {run[0]: run for run in runs}
    order = in_order(
        {
            first: {home.get(n, n) for number in unit for n in waiting[number]}
            for first, unit in units.items()
        }
    )
    return [shared.get(first, groups[first]) for first in order]


def waits_of(groups: Sequence[LoopGroup], buffers: Mapping[str, Buffer]) -> list[set[int]]:
    """Return for each group, by numbers, those that it waits for."""
    home = [number for number, group in enumerate(groups) for _ in group.nodes]
    found: list[set[int]] = [set() for _ in groups]
    edges = dependencies([node for group in groups for node in group.nodes], buffers)
    for number, before in zip(home, edges, strict=True):
        found[number] |= {home[node] for node in before} - {number}
    return found


def _levels(groups: Sequence[LoopGroup], waiting: Sequence[set[int]]) -> list[tuple[int, int, int]]:
    """Return the groups of kernels as (stretch, level, number), sorted.

    A stretch lies between two calls of operators: across a call nothing is combined, so that
    results do not wait in memory for it.  A level is the length of the longest chain of groups of
    the stretch that lead to one, so groups of one level do not wait for each other.
    """
    stretch = 0
    found: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        if is_extern(group):
            stretch += 1
            continue
        before = [found[n][1] for n in waiting[number] if n in found and found[n][0] == stretch]
        found[number] = (stretch, max(before, default=-1) + 1)
    return sorted((*place, number) for number, place in found.items())


def _totals(groups: Sequence[LoopGroup]) -> set[int]:
    """Return the groups that reduce to one number, and those that reduce pieces for them.

    Who reduces other rows has a kernel that is tuned for it.
    """
    single = [n for n, group in enumerate(groups) if group.dimensions[:1] == ONE_ROW]
    pieces = {
        name for n in single for loop in groups[n].loops if loop.has_rows for name in loop.reads
    }
    return {*single, *(n for n, group in enumerate(groups) if group.written <= pieces)}


class _Limits:
    """What one launch may have, for the sizes of the example."""

    def __init__(self, hints: Mapping[sympy.Symbol, int]) -> None:
        self._hints = hints

    def runs(self, groups: Sequence[LoopGroup], numbers: Sequence[int]) -> list[list[int]]:
        """Return which groups of one level share a kernel, as many as limits allow: those that may
        be equal but for their tensors beside each other, else in their order.
        """
        few = sum(self._elements(groups[number]) for number in numbers) <= _FEW_ELEMENTS
        alike: dict[object, list[int]] = {}
        for number in numbers:
            alike.setdefault(_likeness(groups[number]), []).append(number)
        kinds: dict[bool, list[list[int]]] = {}
        for number in chain.from_iterable(alike.values()):
            runs = kinds.setdefault(not few and _has_rows(groups[number]), [[]])
            if not self._fits([groups[n] for n in (*runs[-1], number)]):
                runs.append([])
            runs[-1].append(number)
        return [run for runs in kinds.values() for run in runs]

    def can_share(self, group: LoopGroup) -> bool:
        """Whether a group may be a part: not too large, without atomics, whose order is open,
        without scans, which bring functions along, and with a grid of a usual kind.
        """
        if group.product is not None or any(loop.rows_each for loop in group.loops):
            return False
        if not self._fits([group]):
            return False
        return not any(
            loop.mode not in {None, "store"}
            or any(term.operator in ALONG_ROWS for term in in_order_of(loop.roots))
            for loop in group.loops
        )

    def _fits(self, parts: Sequence[LoopGroup]) -> bool:
        kinds = len({_likeness(part) for part in parts})
        sizes = {symbol for part in parts for symbol in _symbols(part) if symbol in self._hints}
        # Of each kind a launch is told the length, and how many there are; of rows that change the
        # length, too.
        arguments = (3 if sizes else 2) * kinds + len(sizes)
        arguments += len(frozenset().union(*(part.touched for part in parts)))
        return (
            sum(map(self._elements, parts)) <= _MOST_ELEMENTS
            and arguments <= _MOST_ARGUMENTS
            and kinds <= _MOST_KINDS
        )

    def _elements(self, group: LoopGroup) -> int:
        found = numel([size for _, size in group.dimensions]).subs(self._hints)
        # Of a size without an example nothing is known, so it is left apart.
        return int(found) if found.is_Integer else _MOST_ELEMENTS + 1


def _symbols(group: LoopGroup) -> set[sympy.Symbol]:
    """Return the symbols of all sizes and indices of a group."""
    found: set[sympy.Symbol] = set()
    for loop in group.loops:
        sizes = (*loop.sizes, *loop.reduced_sizes, loop.index)
        terms = (one for root in loop.roots for one in expressions_of(root))
        found |= set().union(*(expression.free_symbols for expression in (*sizes, *terms)))
    return found


def _likeness(group: LoopGroup) -> object:
    """Return what groups whose kernels are equal have in common."""
    return group.dimensions, tuple(loop.origins for loop in group.loops)


def _has_rows(group: LoopGroup) -> bool:
    return any(loop.has_rows for loop in group.loops)


def _unit(parts: Sequence[LoopGroup]) -> LoopGroup:
    return LoopGroup(tuple(node for part in parts for node in part.nodes), (), tuple(parts))
