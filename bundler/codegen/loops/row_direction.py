# SPDX-License-Identifier: Apache-2.0
"""`runs_along`: whether memory runs along the rows that a reduction reads, or across them.

It decides how rows are cut, whether they are held whole, and which candidates a heuristic has.
`split_reductions` and `kernel_plan` ask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import sympy

from bundler.codegen.loops.loop_nodes import Loop
from bundler.codegen.loops.loop_terms import loads_of

# A distance that changes from call to call: farther than any that is a number.
_CHANGING = sys.maxsize


def runs_along(loop: Loop) -> bool | None:
    """Return whether most addresses that move with the row run along it rather than across it; None
    where none moves with it.

    What is read once for all rows, or once for each element of one, is little beside what every row
    reads of its own, so it has no vote where that is read too.
    """
    # A set: an address that is read twice is fetched once.
    indices = {index for root in loop.roots for _, index, _ in loads_of(root)}
    moving = [index for index in indices if any(index.has(variable) for variable in loop.reduced)]
    # Where some addresses move with every variable, they are nearly all of the traffic.
    whole = [index for index in moving if all(index.has(variable) for variable in loop.variables)]
    along = []
    for index in whole or moving:
        inner, outer = _least_stride(index, loop.reduced), _least_stride(index, loop.variables)
        if inner is not None and inner != _CHANGING:
            # The smaller stride is the direction in which elements lie beside each other.
            along.append(outer is None or inner < outer)
        elif inner is not None and outer is not None and outer != _CHANGING:
            along.append(False)
    return None if not along else 2 * sum(along) > len(along)


def _least_stride(index: sympy.Expr, variables: Sequence[sympy.Symbol]) -> int | None:
    """Return the least distance in memory that one of some variables moves an address, `_CHANGING`
    where that is a size that changes; None where none does so by one distance.
    """
    strides = [abs(index.coeff(variable)) for variable in variables if index.has(variable)]
    moving = [stride for stride in strides if stride != 0]
    return min((int(s) if s.is_Integer else _CHANGING for s in moving), default=None)
