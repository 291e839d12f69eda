# SPDX-License-Identifier: Apache-2.0
"""`tiled`: the dimensions of a pointwise kernel: x alone, y and x, or z, y and x, where memory runs along different ones in different buffers.

A transposition reads along one dimension and writes along another.  With a block for each, both go along memory.  `kernel_plan` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from bundler.codegen.fusion import LoopGroup
from bundler.codegen.loop_nodes import Loop, numel
from bundler.codegen.loop_terms import loads_of
from bundler.codegen.range_trees import IterationSpace

Dimensions = tuple[tuple[str, sympy.Expr], ...]
# Fewer elements than a warp has threads along a dimension gain nothing by a block of their own.
_LEAST_LENGTH = 2
# Three blocks are small; each has to be as long as what memory brings at once.
_LEAST_OF_THREE = 16
_UNKNOWN_SIZE = 8192


def tiled(group: LoopGroup, hints: Mapping[sympy.Symbol, int]) -> Dimensions:
    """Return the dimensions of a pointwise kernel that suit the addresses through which most elements go.

    Args:
        group: of the kernel.
        hints: symbol of a size -> its value in the example.
    """
    votes: dict[Dimensions, int] = {}
    for loop in group.loops:
        for split, elements in _splits(loop, hints).items():
            votes[split] = votes.get(split, 0) + elements
    order = sorted(votes, key=lambda found: (-votes[found], str(found)))
    fitting = [split for split in order if _fits(group, split)]
    # A second split that asks for another dimension is content with a block of its own.
    for split in fitting[1:]:
        together = _together(fitting[0], split)
        if together is not None and _fits(group, together):
            return together
    return fitting[0] if fitting else group.dimensions


def _fits(group: LoopGroup, dimensions: Dimensions) -> bool:
    space = IterationSpace(dimensions)
    return all(space.place(loop) is not None for loop in group.loops)


def _splits(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> dict[Dimensions, int]:
    """Return a split for each address that memory runs along in another than the last variable, behind that variable, and how many elements go through it."""
    found: dict[Dimensions, int] = {}
    for index in {loop.index, *(index for root in loop.roots for _, index, _ in loads_of(root))}:
        for place, variable in enumerate(loop.variables[:-1]):
            if index.coeff(variable) != 1 or not any(
                index.has(later) for later in loop.variables[place + 1 :]
            ):
                continue  # what later variables do not move is read once for all of them
            outer, inner = numel(loop.sizes[: place + 1]), numel(loop.sizes[place + 1 :])
            if _is_long(outer, _LEAST_LENGTH) and _is_long(inner, _LEAST_LENGTH):
                touched = numel(
                    [s for v, s in zip(loop.variables, loop.sizes, strict=True) if index.has(v)]
                )
                known = touched.subs(dict(hints))
                split = (("y", outer), ("x", inner))
                found[split] = found.get(split, 0) + (
                    int(known) if known.is_Integer else _UNKNOWN_SIZE
                )
    return found


def _together(one: Dimensions, other: Dimensions) -> Dimensions | None:
    """Return three dimensions that have the ends of both splits; None where one of them would be short."""
    (_, near), (_, far) = sorted((one[0], other[0]), key=lambda found: str(found[1]))
    for first, second in ((near, far), (far, near)):
        middle = sympy.cancel(second / first)
        if middle.is_integer and middle.as_numer_denom()[1] == 1 and middle != 1:
            inner = (one if one[0][1] == second else other)[1][1]
            parts = (first, middle, inner)
            if all(_is_long(size, _LEAST_OF_THREE) for size in parts):
                return (("z", first), ("y", middle), ("x", inner))
    return None


def _is_long(size: sympy.Expr, least: int) -> bool:
    return not size.is_Integer or bool(size >= least)
