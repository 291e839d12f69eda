# SPDX-License-Identifier: Apache-2.0
"""Scans: `SCANS` maps operators to functions (builder, call) -> `LazyTensor`s, `scanned` scans with
any function that combines two elements.

A scan is a loop of its own over rows, as a reduction is; what it reads is computed in it, and
fusion puts who reads it into the same kernel.  Few long rows are cut into pieces: one loop scans
the pieces, one their ends, and whoever reads an element combines it with the end before its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import sympy

from bundler.codegen.loops.data_types import DATA_TYPES
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides, numel
from bundler.codegen.loops.loop_terms import (
    SCAN,
    STRUCTURAL,
    Combination,
    Term,
    TermPool,
    in_order_of,
)
from bundler.codegen.loops.split_reductions import pieces_along
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.reduction_lowerings import (
    Lowering,
    Results,
    accumulated,
    cast,
    comparable,
    dims_of,
    mapped,
    source_of,
)

# What combines the left values, one for each operand, with the right ones.
Combine = Callable[[Sequence[Term], Sequence[Term]], Sequence[Term]]
# Narrow integers are scanned in a type that holds them, and wrap when they are narrowed again.
_SCANNED_BITS = 32
# What a function of two elements may have beside operators.
_OF_FUNCTIONS = frozenset({"argument", "constant"})


def scanned(
    builder: GraphBuilder,
    call: OperatorCall,
    sources: Sequence[LazyTensor],
    dim: int,
    combine: Combine,
    layouts: Sequence[TensorLayout] | None = None,
) -> tuple[LazyTensor, ...]:
    """Return for each source, at each element along a dimension, what all elements up to it combine
    to.

    Args:
        builder: of the program.
        call: that is lowered.
        sources: of equal sizes.
        dim: along which elements are combined.
        combine: an associative function of values that have the sources' dtypes.
        layouts: of the results; None for those of the call.
    """
    sizes = sources[0].sizes
    if sizes[dim] == 1 or numel(sizes) == 0:
        return tuple(sources)
    carried = [_carried(source.dtype) for source in sources]
    function = _combination(builder.pool, [source.dtype for source in sources], carried, combine)
    wide = [cast(builder, source, dtype) for source, dtype in zip(sources, carried, strict=True)]
    layouts = layouts or [layout for layout in call.results if layout is not None]
    pieces = _pieces(builder, call, sizes, dim)
    if pieces == 1:
        made = partial(_scans, builder.pool, function)
        return builder.along_rows(SCAN, wide, dim, made, layouts[: len(wide)], call.origins)
    return _in_pieces(builder, call, wide, dim, function, pieces)


def _scans(pool: TermPool, function: Combination, operands: tuple[Term, ...]) -> list[Term]:
    """Return the results of a scan of elements of several rows."""
    return [
        pool.make(SCAN, operands, term.dtype, (function, number))
        for number, term in enumerate(operands)
    ]


def _carried(dtype: str) -> str:
    """Return the dtype in which elements are combined."""
    row = DATA_TYPES.get(dtype)
    if row is None or row.bits >= _SCANNED_BITS:
        return dtype
    return "float32" if row.is_half else "int32"


def _combination(
    pool: TermPool, dtypes: Sequence[str], carried: Sequence[str], combine: Combine
) -> Combination:
    """Return a function of values of some dtypes as one of the dtypes that are carried."""
    arguments = [
        pool.cast(pool.make("argument", (), kept, (number,)), dtype)
        for number, (dtype, kept) in enumerate(zip([*dtypes] * 2, [*carried] * 2, strict=True))
    ]
    count = len(dtypes)
    results = combine(arguments[:count], arguments[count:])
    return Combination(
        tuple(pool.cast(term, dtype) for term, dtype in zip(results, carried, strict=True))
    )


# ------------------------------------------------------------------------------------ Few long rows


def _pieces(
    builder: GraphBuilder, call: OperatorCall, sizes: Sequence[sympy.Expr], dim: int
) -> int:
    """Return into how many pieces rows are cut, so that they keep a device busy."""
    row, rows = sizes[dim], numel([size for number, size in enumerate(sizes) if number != dim])
    known = [size.subs(builder.hints) for size in (rows, row)]
    if not all(size.is_Integer for size in known):
        raise call.refusal("a scan of rows whose number or length has no example")
    return pieces_along(*map(int, known))


def _in_pieces(
    builder: GraphBuilder,
    call: OperatorCall,
    sources: Sequence[LazyTensor],
    dim: int,
    function: Combination,
    pieces: int,
) -> tuple[LazyTensor, ...]:
    pool, sizes = builder.pool, sources[0].sizes
    length = FloorDiv(sizes[dim] + pieces - 1, sympy.Integer(pieces))
    # As many pieces in every call: where a row is shorter than the example's, the last are empty.
    count = FloorDiv(sizes[dim] + length - 1, length) if sizes[dim].is_Integer else pieces
    count = sympy.Integer(count)
    dtypes = [source.dtype for source in sources]

    def scan(rows: Sequence[LazyTensor], dim: int) -> tuple[LazyTensor, ...]:
        cut = rows[0].sizes
        layouts = [TensorLayout(kind, cut, contiguous_strides(cut)) for kind in dtypes]
        made = partial(_scans, pool, function)
        return builder.along_rows(SCAN, rows, dim, made, layouts, call.origins)

    parts = scan([_cut(builder, source, dim, count, length) for source in sources], dim + 1)
    ends = scan([_at_end(builder, part, dim + 1) for part in parts], dim)

    def whole(indices: Indices, place: int) -> Term:
        piece = FloorDiv(indices[dim], length)
        here = (
            *indices[:dim],
            piece,
            ModularIndexing(indices[dim], 1, length),
            *indices[dim + 1 :],
        )
        before = (*indices[:dim], piece - 1, *indices[dim + 1 :])
        first = pool.operate("lt", pool.index(indices[dim]), pool.index(length), dtype="bool")
        later = pool.operate("logical_not", first, dtype="bool")
        left = [pool.masked(later, end.at(before), 0) for end in ends]
        right = [part.at(here) for part in parts]
        together = function.applied(pool, [*left, *right])[place]
        return pool.operate("where", first, right[place], together, dtype=right[place].dtype)

    return tuple(
        builder.lazy(sizes, kind, partial(whole, place=place), call.origins)
        for place, kind in enumerate(dtypes)
    )


def _cut(
    builder: GraphBuilder, source: LazyTensor, dim: int, count: sympy.Expr, length: sympy.Expr
) -> LazyTensor:
    """Return a tensor with a dimension as pieces of a length; what lies beyond its end is 0."""
    pool, size = builder.pool, source.sizes[dim]

    def read(indices: Indices) -> Term:
        flat = indices[dim] * length + indices[dim + 1]
        value = source.at((*indices[:dim], flat, *indices[dim + 2 :]))
        if count * length == size:
            return value
        inside = pool.operate("lt", pool.index(flat), pool.index(size), dtype="bool")
        return pool.masked(inside, value, 0)

    sizes = (*source.sizes[:dim], count, length, *source.sizes[dim + 1 :])
    return builder.lazy(sizes, source.dtype, read, source.origins)


def _at_end(builder: GraphBuilder, source: LazyTensor, dim: int) -> LazyTensor:
    """Return the last elements along a dimension, which goes."""
    last = source.sizes[dim] - 1
    sizes = (*source.sizes[:dim], *source.sizes[dim + 1 :])
    return builder.lazy(
        sizes,
        source.dtype,
        lambda indices: source.at((*indices[:dim], last, *indices[dim:])),
        source.origins,
    )


# ------------------------------------------------------------------------------------ The operators


def _running(builder: GraphBuilder, call: OperatorCall, *, operator: str) -> LazyTensor:
    """Write a running sum or product."""
    source = cast(builder, source_of(call), call.dtype)
    if not source.sizes:
        return source
    wide = cast(builder, source, accumulated(call.dtype))
    (dim,) = dims_of(call, len(wide.sizes))

    def combine(left: Sequence[Term], right: Sequence[Term]) -> Sequence[Term]:
        return (builder.pool.operate(operator, left[0], right[0], dtype=wide.dtype),)

    (found,) = scanned(builder, call, [wide], dim, combine)
    return cast(builder, found, call.dtype)


def _running_log(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Write `logcumsumexp`."""
    pool, wide = builder.pool, accumulated(call.dtype)
    source = cast(builder, source_of(call), wide)
    if not source.sizes:
        return cast(builder, source, call.dtype)
    (dim,) = dims_of(call, len(source.sizes))

    def combine(left: Sequence[Term], right: Sequence[Term]) -> Sequence[Term]:
        """Return the logarithm of the sum of both powers of e; of two infinite numbers of one sign
        that number.
        """
        low = pool.operate("minimum", left[0], right[0], dtype=wide)
        high = pool.operate("maximum", left[0], right[0], dtype=wide)
        below = pool.operate("exp", pool.operate("sub", low, high, dtype=wide), dtype=wide)
        both = pool.operate("add", pool.operate("log1p", below, dtype=wide), high, dtype=wide)
        equal = pool.operate("eq", low, high, dtype="bool")
        infinite = pool.operate("isinf", low, dtype="bool")
        same = pool.operate("logical_and", equal, infinite, dtype="bool")
        return (pool.operate("where", same, low, both, dtype=wide),)

    (found,) = scanned(builder, call, [source], dim, combine)
    return cast(builder, found, call.dtype)


def _running_extremum(builder: GraphBuilder, call: OperatorCall, *, better: str) -> Results:
    """Write `cummax` and `cummin`: the extreme of a row up to each element, and where it was last
    seen; NaN is more extreme than any number.
    """
    source, pool = comparable(builder, source_of(call)), builder.pool
    if not source.sizes:
        zero = mapped(builder, source, "int64", lambda _: pool.constant(0, "int64"))
        return cast(builder, source, call.dtype), zero
    (dim,) = dims_of(call, len(source.sizes))
    places = builder.lazy(
        source.sizes, "int64", lambda indices: pool.index(indices[dim]), call.origins
    )

    def combine(left: Sequence[Term], right: Sequence[Term]) -> Sequence[Term]:
        taken = pool.operate(better, right[0], left[0], dtype="bool")
        if DATA_TYPES[source.dtype].is_float:
            is_number = pool.operate("eq", left[0], left[0], dtype="bool")
            nan = pool.operate("ne", right[0], right[0], dtype="bool")
            taken = pool.operate("logical_and", taken, is_number, dtype="bool")
            taken = pool.operate("logical_or", taken, nan, dtype="bool")
        return [
            pool.operate("where", taken, one, other, dtype=one.dtype)
            for one, other in zip(right, left, strict=True)
        ]

    value, place = scanned(builder, call, [source, places], dim, combine)
    return cast(builder, value, call.dtype), place


def _with_function(builder: GraphBuilder, call: OperatorCall) -> Results:
    """Write `associative_scan`, along dimension 0 with a function of the user's."""
    sources = call.positional

    def combine(left: Sequence[Term], right: Sequence[Term]) -> Sequence[Term]:
        results: Sequence[Term] = call.arguments["combine"](left, right)
        if any(term.operator in STRUCTURAL - _OF_FUNCTIONS for term in in_order_of(results)):
            raise call.refusal("its function needs more than two elements")
        return results

    if any("complex" in source.dtype for source in sources):
        raise call.refusal("complex numbers")
    return scanned(builder, call, sources, 0, combine)


SCANS: dict[str, Lowering] = {
    "cumsum": partial(_running, operator="add"),
    "cumprod": partial(_running, operator="mul"),
    "cummax": partial(_running_extremum, better="ge"),
    "cummin": partial(_running_extremum, better="le"),
    "logcumsumexp": _running_log,
    "associative_scan": _with_function,
}
