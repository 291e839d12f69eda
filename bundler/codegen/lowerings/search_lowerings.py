# SPDX-License-Identifier: Apache-2.0
"""Searches in sorted rows: `SEARCHES` maps operators to functions (builder, call) -> `LazyTensor`.

A search takes as many steps as the number of boundaries has bits, each written out: half of what is
left of the row is dropped by one boundary.  The steps are those of torch, so that rows which are
not sorted, or hold NaN, give what torch gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.reduction_lowerings import Lowering, comparable, mapped

# Places of more boundaries than this do not fit in 32 bits, nor do sums of two of them.
_MOST_NARROW = 1 << 30


def searched(
    builder: GraphBuilder,
    call: OperatorCall,
    boundaries: LazyTensor,
    values: LazyTensor,
    result: str,
    *,
    right: bool,
) -> LazyTensor:
    """Return for each value its place among the boundaries of its row: how many are below it, or
    where `right`, not above it; the result has the dtype `result`.
    """
    pool, order = builder.pool, call.arguments.get("sorter")
    count = boundaries.sizes[-1]
    if data_type(boundaries.dtype).kind is NumberKind.FLOAT8 or boundaries.dtype != values.dtype:
        raise call.refusal(f"boundaries of {boundaries.dtype} for values of {values.dtype}")
    if not count.is_Integer:
        raise call.refusal("a search among a number of boundaries that changes")
    for several in (boundaries, order):  # each step reads one of them
        if several is not None and builder.strided_view(several) is None:
            builder.realize(several)
    bounds, sought = comparable(builder, boundaries), comparable(builder, values)
    dtype = "int32" if count < _MOST_NARROW else "int64"

    def place(indices: Indices) -> Term:
        row, value = indices[:-1] if len(bounds.sizes) > 1 else (), sought.at(indices)
        low, high = pool.constant(0, dtype), pool.constant(int(count), dtype)
        for _ in range(int(count).bit_length()):
            low, high = step(row, value, low, high)
        return pool.cast(low, result)

    def step(row: Sequence[sympy.Expr], value: Term, low: Term, high: Term) -> tuple[Term, Term]:
        one, last = pool.constant(1, dtype), pool.constant(int(count) - 1, dtype)
        both = pool.operate("add", low, high, dtype=dtype)
        middle = pool.operate("rshift", both, one, dtype=dtype)
        # Where the search has ended both are the same place, which may be behind the row.
        inside = pool.operate("minimum", middle, last, dtype=dtype)
        at = (*row, pool.indirect(inside, count, wrap=False, check=False))
        bound = bounds.at(at if order is None else (*row, pool.indirect(order.at(at), count)))
        # Written so that a comparison with NaN counts as above.
        reached = pool.operate("gt" if right else "ge", bound, value, dtype="bool")
        left = pool.operate("lt", low, high, dtype="bool")
        above = pool.operate(
            "logical_and", left, pool.operate("logical_not", reached, dtype="bool"), dtype="bool"
        )
        behind = pool.operate("add", middle, one, dtype=dtype)
        return (
            pool.operate("where", above, behind, low, dtype=dtype),
            pool.operate("where", above, high, middle, dtype=dtype),
        )

    if count == 0:
        return mapped(builder, values, result, lambda _: pool.constant(0, result))
    return builder.lazy(values.sizes, result, place, call.origins | values.origins)


def _search(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Return the places of `bucketize`, whose boundaries are one row, and of `searchsorted`, where
    each row of values may have its own.
    """
    arguments = call.arguments
    boundaries = arguments.get("boundaries", arguments.get("sorted_sequence"))
    values = arguments["self"]
    if not (isinstance(values, LazyTensor) and isinstance(boundaries, LazyTensor)):
        raise call.refusal("a value that is no tensor")
    right = bool(arguments.get("right", False)) or arguments.get("side") == "right"
    return searched(builder, call, boundaries, values, call.dtype, right=right)


SEARCHES: dict[str, Lowering] = {"bucketize": _search, "searchsorted": _search}
