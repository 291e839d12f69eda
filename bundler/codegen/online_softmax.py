# SPDX-License-Identifier: Apache-2.0
"""`paired`: a maximum, and the sum of exponentials relative to it, of long rows become two reductions that one pass over the row computes.

A row that is held whole is read once anyway.  `schedule` calls it after loops are normalized, before long rows of few are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bundler.codegen.loop_nodes import Loop, Node, numel
from bundler.codegen.loop_terms import Term
from bundler.codegen.split_reductions import is_split

# Shorter rows may be held whole.
_LEAST_ROW = 1025
_FLOATS = frozenset({"float32", "float64"})


def paired(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with each such pair under kinds of its own, `softmax_max` and `softmax_sum`, of the same values."""
    maxima = {n.buffer: n for n in nodes if isinstance(n, Loop) and n.kind == "max" and _is_long(n)}
    changed: dict[str, Loop] = {}
    for node in nodes:
        top = _maximum_of(node, maxima) if isinstance(node, Loop) and node.kind == "sum" else None
        if top is not None:
            assert isinstance(node, Loop)
            changed[top.buffer] = replace(top, kind="softmax_max")
            changed[node.buffer] = replace(node, kind="softmax_sum", value=top.value)
    return [changed.get(node.buffer, node) if isinstance(node, Loop) else node for node in nodes]


def _is_long(loop: Loop) -> bool:
    row = numel(loop.reduced_sizes)
    return (
        loop.value.dtype in _FLOATS
        and not is_split(loop)
        and not (row.is_Integer and row < _LEAST_ROW)
    )


def _maximum_of(loop: Loop, maxima: dict[str, Loop]) -> Loop | None:
    """Return the maximum of the values whose exponentials, relative to it, a loop sums up; None where it sums up something else."""
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
    same_rows = (found.variables, found.sizes, found.reduced, found.reduced_sizes) == (
        loop.variables, loop.sizes, loop.reduced, loop.reduced_sizes,
    )  # fmt: skip
    return found if same_rows and value is found.value and top.details[1] == found.index else None
