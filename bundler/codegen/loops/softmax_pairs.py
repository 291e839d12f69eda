# SPDX-License-Identifier: Apache-2.0
"""`with_softmax_pairs`: the maximum and the sum of a softmax over long rows as two reductions of
one pass, `softmax_max` and `softmax_sum`, of the same values.

An online softmax computes both in one pass over the row, where the sum alone would have to wait for
the whole maximum and read the row once more.  `schedule` calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.loop_nodes import Loop, Node, numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.loops.split_reductions import is_split

# Shorter rows may be held whole, where two passes cost nothing.
_LEAST_ROW = 1025
_FLOATS = frozenset({"float32", "float64"})


def with_softmax_pairs(
    nodes: Sequence[Node],
    hints: Mapping[sympy.Symbol, int],
    *,
    least: int = _LEAST_ROW,
    shared: Collection[str] = (),
) -> tuple[Node, ...]:
    """Return the nodes with the maximum and the sum of each long softmax as a pair.

    Args:
        nodes: of a program, or of a kernel.
        hints: symbol of a size -> its value in the example.
        least: elements of a row that is long.
        shared: buffers whose rows several programs share, so that they are not cut into pieces.
    """
    maxima = {
        n.buffer: n
        for n in nodes
        if isinstance(n, Loop)
        and n.kind == "max"
        and n.value.dtype in _FLOATS
        and _is_long(numel(n.reduced_sizes).subs(dict(hints)), least)
        and (n.buffer in shared or not is_split(n, hints))
    }
    changed: dict[str, Loop] = {}
    for node in nodes if maxima else ():
        if not isinstance(node, Loop) or node.kind != "sum":
            continue
        top = _softmax_maximum(node, maxima)
        if top is not None:
            changed[top.buffer] = replace(top, kind="softmax_max")
            changed[node.buffer] = replace(node, kind="softmax_sum", value=top.value)
    return tuple(changed.get(n.buffer, n) if isinstance(n, Loop) else n for n in nodes)


def _is_long(row: sympy.Expr, least: int) -> bool:
    return not (row.is_Integer and row < least)


def _softmax_maximum(loop: Loop, maxima: Mapping[str, Loop]) -> Loop | None:
    """Return the maximum of the values whose exponentials, relative to it, a loop sums up; None
    where it sums up something else.
    """
    exponential = loop.value
    if exponential.operator != "exp":
        return None
    difference = exponential.arguments[0]
    if not isinstance(difference, Term) or difference.operator != "sub":
        return None
    value, top = difference.arguments
    if not isinstance(top, Term) or top.operator != "load" or top.details[0] not in maxima:
        return None
    found = maxima[top.details[0]]
    # Terms are shared in the pool, so equal values are the same object.
    same_rows = (found.variables, found.sizes, found.reduced, found.reduced_sizes) == (
        loop.variables,
        loop.sizes,
        loop.reduced,
        loop.reduced_sizes,
    )
    return found if same_rows and value is found.value and top.details[1] == found.index else None
