# SPDX-License-Identifier: Apache-2.0
"""`tiled`: the dimensions of a pointwise kernel: x alone, or y and x where memory runs along different ones in different buffers.

A transposition reads along one dimension and writes along another.  With a block for each, both go along memory.  `kernel_plan` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from bundler.codegen.fusion import LoopGroup
from bundler.codegen.loop_nodes import Loop, numel
from bundler.codegen.loop_terms import loads_of
from bundler.codegen.range_trees import IterationSpace

Dimensions = tuple[tuple[str, sympy.Expr], ...]
# Fewer elements than a warp has threads along a dimension gain nothing by a block of their own.
_LEAST_LENGTH = 2


def tiled(group: LoopGroup) -> Dimensions:
    """Return the dimensions of a pointwise kernel that suit most of its addresses."""
    votes: dict[Dimensions, int] = {}
    for loop in group.loops:
        for split in _splits(loop):
            votes[split] = votes.get(split, 0) + 1
    for split in sorted(votes, key=lambda found: (-votes[found], str(found))):
        space = IterationSpace(split)
        if all(space.place(loop) is not None for loop in group.loops):
            return split
    return group.dimensions


def _splits(loop: Loop) -> Iterator[Dimensions]:
    """Yield a split for each address that memory runs along in another than the last variable, behind that variable."""
    indices = [loop.index, *(index for root in loop.roots for _, index, _ in loads_of(root))]
    for index in indices:
        for place, variable in enumerate(loop.variables[:-1]):
            if index.coeff(variable) != 1 or not any(index.has(later) for later in loop.variables[place + 1 :]):
                continue  # what later variables do not move is read once for all of them
            outer, inner = numel(loop.sizes[: place + 1]), numel(loop.sizes[place + 1 :])
            if _is_long(outer) and _is_long(inner):
                yield (("y", outer), ("x", inner))


def _is_long(size: sympy.Expr) -> bool:
    return not size.is_Integer or bool(size >= _LEAST_LENGTH)
