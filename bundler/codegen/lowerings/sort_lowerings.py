# SPDX-License-Identifier: Apache-2.0
"""Sorts of short rows: `SORTS` maps operators to functions (builder, call) -> `LazyTensor`s.

An element's rank is how many of its row come before it, a sum over the row; the element at a place
of the sorted row is the one whose rank that is, another sum.  Both are reductions, which compile in
moments, where a network of exchanges takes a minute; rows are short enough that each element may be
compared with each.  Sorts are stable, and NaN is the largest number.  Which of equal elements
`topk` and `kthvalue` name is torch's choice: these are called.
"""

from __future__ import annotations

from functools import partial

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.reduction_lowerings import (
    Lowering,
    Results,
    cast,
    comparable,
    source_of,
)

# The longest row, and how many elements are compared in all: each with each of its row.
_LONGEST_ROW, _MOST_COMPARED = 128, 1 << 27
# torch on a GPU sorts rows up to this by a network that has another order of equal elements, unless
# it is asked for a stable sort.
_LONGEST_UNSTABLE = 32


def _sorted(
    builder: GraphBuilder, call: OperatorCall, dim: int, *, descending: bool
) -> tuple[LazyTensor, LazyTensor]:
    """Return rows along a dimension sorted, and the places that their elements had before."""
    source, pool = source_of(call), builder.pool
    sizes = source.sizes
    if sizes[dim] == 1 or numel(sizes) == 0:
        return _as_it_is(builder, call)
    # Each element is read once for each of its row.
    if builder.strided_view(source) is None:
        builder.realize(source)
    source = comparable(builder, source)
    ranks = _ranks(builder, call, source, dim, descending=descending)

    def found(indices: Indices) -> Term:
        """Return the place of an element in its row where its rank is asked for, else 0."""
        *here, place = indices
        rank = ranks.at((*here[:dim], place, *here[dim + 1 :]))
        is_it = pool.operate("eq", rank, pool.index(here[dim], "int32"), dtype="bool")
        other = pool.constant(0, "int32")
        return pool.operate("where", is_it, pool.index(place, "int32"), other, dtype="int32")

    rows = builder.lazy((*sizes, sizes[dim]), "int32", found, call.origins)
    places = builder.reduce("sum", rows, [len(sizes)], "int32", call.origins)

    def value(indices: Indices) -> Term:
        place = pool.indirect(places.at(indices), sizes[dim], wrap=False, check=False)
        return source.at((*indices[:dim], place, *indices[dim + 1 :]))

    values = builder.lazy(sizes, source.dtype, value, call.origins)
    return cast(builder, values, call.dtype), cast(builder, places, "int64")


def _ranks(
    builder: GraphBuilder, call: OperatorCall, source: LazyTensor, dim: int, *, descending: bool
) -> LazyTensor:
    """Return for each element how many of its row come before it."""
    pool = builder.pool

    def comes_before(indices: Indices) -> Term:
        *here, other = indices
        one = source.at((*here[:dim], other, *here[dim + 1 :]))
        earlier = pool.operate(
            "lt", pool.index(other, "int32"), pool.index(here[dim], "int32"), dtype="bool"
        )
        before = _is_before(builder, one, source.at(here), earlier, descending=descending)
        return pool.cast(before, "int32")

    pairs = builder.lazy(
        (*source.sizes, source.sizes[dim]), "int32", comes_before, call.origins | source.origins
    )
    return builder.reduce("sum", pairs, [len(source.sizes)], "int32", call.origins)


def _is_before(
    builder: GraphBuilder, one: Term, other: Term, earlier: Term, *, descending: bool
) -> Term:
    """Return whether one element of a row comes before another, which stood behind it where
    `earlier`.
    """
    both = partial(builder.pool.operate, "logical_and", dtype="bool")
    either = partial(builder.pool.operate, "logical_or", dtype="bool")

    def compared(operator: str, a: Term, b: Term) -> Term:
        return builder.pool.operate(operator, a, b, dtype="bool")

    least, most = (other, one) if descending else (one, other)
    before, equal = compared("lt", least, most), compared("eq", one, other)
    if data_type(one.dtype).is_float:
        number, nan = compared("eq", least, least), compared("ne", most, most)
        before = either(before, both(number, nan))
        equal = either(equal, both(compared("ne", least, least), nan))
    return either(before, both(equal, earlier))


def _row(builder: GraphBuilder, call: OperatorCall) -> int:
    """Return the dimension along which a call sorts; raises where rows are not short."""
    source = source_of(call)
    if data_type(source.dtype).kind is NumberKind.FLOAT8:
        raise call.refusal("a sort of 8-bit floats")
    dim = int(call.arguments.get("dim", -1)) % len(source.sizes)
    size = source.sizes[dim]
    if not size.is_Integer or size > _LONGEST_ROW:
        raise call.refusal(f"a sort of rows that may have more than {_LONGEST_ROW} elements")
    if 1 < size <= _LONGEST_UNSTABLE and not call.arguments.get("stable", False):
        raise call.refusal("equal elements of short rows have an order of torch's own")
    compared = (numel(source.sizes) * size).subs(builder.hints)
    if not compared.is_Integer or compared > _MOST_COMPARED:
        raise call.refusal("a sort of very many rows")
    return dim


def _as_it_is(builder: GraphBuilder, call: OperatorCall) -> tuple[LazyTensor, LazyTensor]:
    """Return rows of one element, and its place in each."""
    source = source_of(call)
    places = builder.lazy(
        source.sizes, "int64", lambda _: builder.pool.constant(0, "int64"), call.origins
    )
    return cast(builder, source, call.dtype), places


def _sort(builder: GraphBuilder, call: OperatorCall) -> Results:
    if not source_of(call).sizes:
        return _as_it_is(builder, call)
    descending = bool(call.arguments.get("descending", False))
    return _sorted(builder, call, _row(builder, call), descending=descending)


SORTS: dict[str, Lowering] = {"sort": _sort}
