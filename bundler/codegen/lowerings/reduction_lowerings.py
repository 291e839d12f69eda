# SPDX-License-Identifier: Apache-2.0
"""Reductions: `REDUCTIONS_BY_NAME` maps operators to functions (builder, call) -> `LazyTensor`, or
one for each result.

A reduction is a loop of its own; what is done with its result is computed where it is read, and
fusion puts both into one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bundler.codegen.loops.data_types import least_and_most
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import reshaped, with_new, without

Results = LazyTensor | tuple[LazyTensor, ...]
Lowering = Callable[[GraphBuilder, OperatorCall], Results]
_IDENTITIES = {"sum": 0, "prod": 1, "any": 0, "xor_sum": 0}
_HALVES = frozenset({"float16", "bfloat16"})
# Longest row of a running sum, and how many elements its kernel reads in all, where that is known:
# it reads a row once for each of its elements. A row of the other length is short for any number.
_LONGEST_RUN, _MOST_READS, _SHORT_RUN = 1024, 1 << 23, 128


def _source(call: OperatorCall) -> LazyTensor:
    found = call.arguments.get("self", call.arguments.get("inp", call.arguments.get("a")))
    assert isinstance(found, LazyTensor)
    return found


def _dims(call: OperatorCall, rank: int) -> list[int]:
    """Return the dimensions that are reduced; all where the call names none."""
    asked: Any = call.arguments.get("dim", call.arguments.get("dims"))
    if asked is None or asked in ([], ()):
        return list(range(rank))
    return sorted(
        {int(dim) % rank for dim in (asked if isinstance(asked, (list, tuple)) else [asked])}
        if rank
        else set()
    )


def _keeps(call: OperatorCall) -> bool:
    return bool(call.arguments.get("keepdim", False))


def mapped(
    builder: GraphBuilder, tensor: LazyTensor, dtype: str, compute: Callable[[Term], Term]
) -> LazyTensor:
    """Return a tensor whose elements are computed of another's."""
    return builder.lazy(
        tensor.sizes, dtype, lambda indices: compute(tensor.at(indices)), tensor.origins
    )


def cast(builder: GraphBuilder, tensor: LazyTensor, dtype: str) -> LazyTensor:
    """Return a tensor converted to a dtype."""
    if tensor.dtype == dtype:
        return tensor
    return mapped(builder, tensor, dtype, lambda term: builder.pool.cast(term, dtype))


def reduced(
    builder: GraphBuilder,
    call: OperatorCall,
    kind: str,
    source: LazyTensor,
    dims: Sequence[int],
    dtype: str,
) -> LazyTensor:
    """Return a reduction of a call's source, with dimensions of size 1 in the place of the reduced
    ones where the call keeps them.
    """
    if not dims:
        # Nothing is reduced: each element is its own row, and its own extreme at place 0.
        if kind in {"argmax", "argmin"}:
            return builder.lazy(
                source.sizes, dtype, lambda _: builder.pool.constant(0, dtype), call.origins
            )
        return cast(builder, source, dtype)
    if numel([source.sizes[dim] for dim in dims]) == 0:
        if kind not in _IDENTITIES:
            raise call.refusal("reduces no element, and has no value for that")
        kept = [size for number, size in enumerate(source.sizes) if number not in dims]
        result = builder.lazy(
            kept, dtype, lambda _: builder.pool.constant(_IDENTITIES[kind], dtype), call.origins
        )
    else:
        result = builder.reduce(kind, source, dims, dtype, call.origins)
    return with_new(result, dims) if _keeps(call) else result


def _accumulated(dtype: str) -> str:
    """Return the dtype in which a result is computed that later steps still change: half types are
    rounded once, at the end.
    """
    return "float32" if dtype in _HALVES else dtype


def _plain(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> LazyTensor:
    # The greater of two bools is their or, the smaller their and.
    if call.dtype == "bool" and kind in {"max", "min"}:
        return _any(builder, call) if kind == "max" else _all(builder, call)
    source = cast(builder, _source(call), call.dtype)
    return reduced(builder, call, kind, source, _dims(call, len(source.sizes)), call.dtype)


def _mean(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    wide = _accumulated(call.dtype)
    source = cast(builder, _source(call), wide)
    dims = _dims(call, len(source.sizes))
    total = reduced(builder, call, "sum", source, dims, wide)
    count = builder.pool.cast(builder.pool.index(numel([source.sizes[dim] for dim in dims])), wide)
    mean = mapped(
        builder, total, wide, lambda term: builder.pool.operate("truediv", term, count, dtype=wide)
    )
    return cast(builder, mean, call.dtype)


def _any(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    source = cast(builder, _source(call), "bool")
    found = reduced(builder, call, "any", source, _dims(call, len(source.sizes)), "bool")
    return cast(builder, found, call.dtype)


def _all(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    def negated(term: Term) -> Term:
        return builder.pool.operate("logical_not", term, dtype="bool")

    # All hold where none of the negations does, so one kind of reduction serves both.
    source = mapped(builder, cast(builder, _source(call), "bool"), "bool", negated)
    found = reduced(builder, call, "any", source, _dims(call, len(source.sizes)), "bool")
    return cast(builder, mapped(builder, found, "bool", negated), call.dtype)


def _extremal_index(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> LazyTensor:
    source, dim = _source(call), call.arguments.get("dim")
    source = _comparable(builder, source)
    if dim is None:
        flat = reshaped(source, (numel(source.sizes),))
        found = reduced(builder, call, kind, flat, [0], "int64")
        return (
            reshaped(found, call.sizes)
            if _keeps(call)
            else without(found, list(range(len(found.sizes))))
        )
    return reduced(builder, call, kind, source, _dims(call, len(source.sizes)), "int64")


def _extremum_with_index(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> Results:
    """Write `max.dim`, whose results are value and index, and `max` over all."""
    if len(call.results) == 1:
        return _plain(builder, call, kind=kind)
    source = _comparable(builder, _source(call))
    dims = _dims(call, len(source.sizes))
    value = cast(builder, reduced(builder, call, kind, source, dims, source.dtype), call.dtype)
    return value, reduced(builder, call, f"arg{kind}", source, dims, "int64")


def _comparable(builder: GraphBuilder, source: LazyTensor) -> LazyTensor:
    """Return what has an order: of bools the bytes 0 and 1, and 16-bit floats with the bits that
    torch has, which decide of equals.
    """
    if source.dtype == "bool":
        return cast(builder, source, "int8")
    if source.dtype in _HALVES:
        return mapped(builder, source, source.dtype, builder.pool.rounded)
    return source


def _moments(
    builder: GraphBuilder, call: OperatorCall, source: LazyTensor
) -> tuple[LazyTensor, LazyTensor]:
    """Return mean and variance, in the dtype that they are accumulated in."""
    pool, wide, dims = builder.pool, _accumulated(call.dtype), _dims(call, len(source.sizes))
    if "complex" in source.dtype:
        raise call.refusal("complex numbers")
    source = cast(builder, source, wide)
    count = numel([source.sizes[dim] for dim in dims])
    correction = call.arguments.get("correction")
    if correction is None:
        correction = 1 if call.arguments.get("unbiased", True) else 0
    if count == 0:
        mean = squares = mapped(
            builder,
            reduced(builder, call, "sum", source, dims, wide),
            wide,
            lambda _: pool.constant(math.nan, wide),
        )
    elif not dims:
        mean, squares = (
            source,
            mapped(builder, source, wide, lambda term: pool.operate("sub", term, term, dtype=wide)),
        )
    else:
        # Two loops over one value, which fusion puts together: Welford computes both in one pass.
        mean = reduced(builder, call, "welford_mean", source, dims, wide)
        squares = reduced(builder, call, "welford_m2", source, dims, wide)

    def divided(term: Term) -> Term:
        number = pool.cast(pool.index(count), wide)
        # torch divides by the number of elements less the correction, never by less than 0.
        if correction:
            number = pool.operate("sub", number, pool.constant(float(correction), wide), dtype=wide)
            number = pool.operate("maximum", number, pool.constant(0.0, wide), dtype=wide)
        return pool.operate("truediv", term, number, dtype=wide)

    return mean, mapped(builder, squares, wide, divided)


def _var(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _, variance = _moments(builder, call, _source(call))
    return cast(builder, variance, call.dtype)


def _std(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _, variance = _moments(builder, call, _source(call))
    root = mapped(
        builder,
        variance,
        variance.dtype,
        lambda t: builder.pool.operate("sqrt", t, dtype=variance.dtype),
    )
    return cast(builder, root, call.dtype)


def _var_mean(builder: GraphBuilder, call: OperatorCall) -> Results:
    mean, variance = _moments(builder, call, _source(call))
    return cast(builder, variance, call.dtype), cast(builder, mean, call.dtype)


def _running(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> LazyTensor:
    """Write a running sum or product: each element is the reduction of those of its row up to
    it.
    """
    wide = _accumulated(call.dtype)
    source = cast(builder, _source(call), wide)
    if not source.sizes:
        return cast(builder, source, call.dtype)
    dim = _scanned(builder, call, source)
    rows = _up_to(builder, source, dim, _IDENTITIES[kind])
    return cast(builder, _last_reduced(builder, call, kind, rows), call.dtype)


def _running_extremum(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> Results:
    """Write `cummax` and `cummin`: the extreme of a row up to each element, and where it was last
    seen.
    """
    source = _comparable(builder, _source(call))
    if not source.sizes:
        zero = mapped(builder, source, "int64", lambda _: builder.pool.constant(0, "int64"))
        return cast(builder, source, call.dtype), zero
    dim, pool = _scanned(builder, call, source), builder.pool
    least, most = least_and_most(source.dtype)
    worst = least if kind == "max" else most
    # Of equals the reduction takes the first, and torch the last: rows are read from their end.
    rows = _up_to(builder, source, dim, worst, backwards=True)
    value = _last_reduced(builder, call, kind, rows)
    place = _last_reduced(builder, call, f"arg{kind}", rows, "int64")
    last = source.sizes[dim] - 1

    def seen(indices: Indices) -> Term:
        found = pool.operate("sub", pool.index(last), place.at(indices), dtype="int64")
        # Where all are as bad as what stands for the elements behind, it is the element itself.
        return pool.operate("minimum", found, pool.index(indices[dim]), dtype="int64")

    index = builder.lazy(source.sizes, "int64", seen, place.origins)
    return cast(builder, value, call.dtype), index


def _running_log(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Write `logcumsumexp`, as torch does: a sum of powers of e beside the greatest one so far."""
    pool, wide = builder.pool, _accumulated(call.dtype)
    source = cast(builder, _source(call), wide)
    if not source.sizes:
        return cast(builder, source, call.dtype)
    dim = _scanned(builder, call, source)
    greatest = _last_reduced(builder, call, "max", _up_to(builder, source, dim, -math.inf))
    builder.mark_reuse(greatest, users=2)

    def finite(indices: Indices) -> Term:
        """Return what powers stand beside: of an infinite one the sum is that, whatever is beside
        it.
        """
        top, zero = greatest.at(indices), pool.constant(0.0, wide)
        return pool.operate(
            "where", pool.operate("isinf", top, dtype="bool"), zero, top, dtype=wide
        )

    def power(term: Term, here: Indices) -> Term:
        return pool.operate("exp", pool.operate("sub", term, finite(here), dtype=wide), dtype=wide)

    total = _last_reduced(builder, call, "sum", _up_to(builder, source, dim, 0.0, power))

    def log(indices: Indices) -> Term:
        found = pool.operate("log", total.at(indices), dtype=wide)
        return pool.operate("add", found, finite(indices), dtype=wide)

    made = builder.lazy(source.sizes, wide, log, total.origins)
    return cast(builder, made, call.dtype)


def _scanned(builder: GraphBuilder, call: OperatorCall, source: LazyTensor) -> int:
    """Return the dimension of a scan of short rows, which is generated; raises for any other."""
    (dim,) = _dims(call, len(source.sizes))
    size, elements = source.sizes[dim], numel(source.sizes)
    reads = elements * size if elements.is_Integer else None
    if (
        call.dtype == "bool"
        or not size.is_Integer
        or size > _LONGEST_RUN
        or (size > _SHORT_RUN if reads is None else reads > _MOST_READS)
    ):
        raise call.refusal("a scan of long rows")
    builder.mark_reuse(source, users=2)  # or each element would be computed for all behind it
    return dim


def _up_to(
    builder: GraphBuilder,
    source: LazyTensor,
    dim: int,
    nothing: float,
    element: Callable[[Term, Indices], Term] = lambda term, _: term,
    *,
    backwards: bool = False,
) -> LazyTensor:
    """Return rows for each element: what is made of those of its row up to it, and `nothing` in the
    place of those behind it; from the row's end where `backwards`.
    """
    pool, size = builder.pool, source.sizes[dim]

    def read(indices: Indices) -> Term:
        *here, number = indices
        place = [*here]
        place[dim] = size - 1 - number if backwards else number
        within = pool.operate(
            "le", pool.index(place[dim], "int32"), pool.index(here[dim], "int32"), dtype="bool"
        )
        made = element(source.at(tuple(place)), tuple(here))
        other = pool.constant(nothing, source.dtype)
        return pool.operate("where", within, made, other, dtype=source.dtype)

    return builder.lazy((*source.sizes, size), source.dtype, read, source.origins)


def _last_reduced(
    builder: GraphBuilder, call: OperatorCall, kind: str, rows: LazyTensor, dtype: str = ""
) -> LazyTensor:
    return reduced(builder, call, kind, rows, [len(rows.sizes) - 1], dtype or rows.dtype)


REDUCTIONS_BY_NAME: dict[str, Lowering] = {
    "sum": partial(_plain, kind="sum"),
    "prod": partial(_plain, kind="prod"),
    "amax": partial(_plain, kind="max"),
    "amin": partial(_plain, kind="min"),
    "max": partial(_extremum_with_index, kind="max"),
    "min": partial(_extremum_with_index, kind="min"),
    "xor_sum": partial(_plain, kind="xor_sum"),
    "cumsum": partial(_running, kind="sum"),
    "cumprod": partial(_running, kind="prod"),
    "cummax": partial(_running_extremum, kind="max"),
    "cummin": partial(_running_extremum, kind="min"),
    "logcumsumexp": _running_log,
    "mean": _mean,
    "any": _any,
    "all": _all,
    "argmax": partial(_extremal_index, kind="argmax"),
    "argmin": partial(_extremal_index, kind="argmin"),
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
}
