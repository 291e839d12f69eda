# SPDX-License-Identifier: Apache-2.0
"""Reductions: `REDUCTIONS_BY_NAME` maps operators to functions (builder, call) -> `LazyTensor`, or
one for each result.

A reduction is a loop of its own; what is done with its result is computed where it is read, and
fusion puts both into one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import sympy

from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import reshaped, with_new, without

Results = LazyTensor | tuple[LazyTensor, ...]
Lowering = Callable[[GraphBuilder, OperatorCall], Results]
_IDENTITIES = {"sum": 0, "prod": 1, "any": 0, "xor_sum": 0}
# Kind of a reduction -> the operator that takes one more element in.
_STEPS = {"sum": "add", "max": "maximum", "min": "minimum"}
# A tensor that reads more is stored where several read it (`lazy_tensors`), by a kernel then.
_SHORT_LIST = 4
_HALVES = frozenset({"float16", "bfloat16"})


def source_of(call: OperatorCall) -> LazyTensor:
    """Return what a call reduces."""
    found = call.arguments.get("self", call.arguments.get("inp", call.arguments.get("a")))
    assert isinstance(found, LazyTensor)
    return found


def dims_of(call: OperatorCall, rank: int) -> list[int]:
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
    elif kind in _STEPS and _is_short_list(source):
        result = _folded(builder, _STEPS[kind], source, dtype, call.origins)
    else:
        result = builder.reduce(kind, source, dims, dtype, call.origins)
    return with_new(result, dims) if _keeps(call) else result


def _is_short_list(source: LazyTensor) -> bool:
    """Whether a tensor is a few numbers that are not in memory, as the norms of some tensors."""
    short = len(source.sizes) == 1 and source.sizes[0].is_Integer
    return short and source.sizes[0] <= _SHORT_LIST and source.root.buffer is None


def _folded(
    builder: GraphBuilder, step: str, source: LazyTensor, dtype: str, origins: frozenset[str]
) -> LazyTensor:
    """Return a reduction of a few numbers as an expression, which has no kernel of its own: whoever
    reads the result computes it.
    """

    def total(_indices: Indices) -> Term:
        terms = [source.at([sympy.Integer(n)]) for n in range(int(source.sizes[0]))]
        return reduce(
            lambda one, other: builder.pool.operate(step, one, other, dtype=dtype),
            [builder.pool.cast(term, dtype) for term in terms],
        )

    return builder.lazy((), dtype, total, origins | source.origins)


def accumulated(dtype: str) -> str:
    """Return the dtype in which a result is computed that later steps still change: half types are
    rounded once, at the end.
    """
    return "float32" if dtype in _HALVES else dtype


def _plain(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> LazyTensor:
    # The greater of two bools is their or, the smaller their and.
    if call.dtype == "bool" and kind in {"max", "min"}:
        return _any(builder, call) if kind == "max" else _all(builder, call)
    source = cast(builder, source_of(call), call.dtype)
    return reduced(builder, call, kind, source, dims_of(call, len(source.sizes)), call.dtype)


def _mean(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    wide = accumulated(call.dtype)
    source = cast(builder, source_of(call), wide)
    dims = dims_of(call, len(source.sizes))
    total = reduced(builder, call, "sum", source, dims, wide)
    count = builder.pool.cast(builder.pool.index(numel([source.sizes[dim] for dim in dims])), wide)
    mean = mapped(
        builder, total, wide, lambda term: builder.pool.operate("truediv", term, count, dtype=wide)
    )
    return cast(builder, mean, call.dtype)


def _any(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    source = cast(builder, source_of(call), "bool")
    found = reduced(builder, call, "any", source, dims_of(call, len(source.sizes)), "bool")
    return cast(builder, found, call.dtype)


def _all(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    def negated(term: Term) -> Term:
        return builder.pool.operate("logical_not", term, dtype="bool")

    # All hold where none of the negations does, so one kind of reduction serves both.
    source = mapped(builder, cast(builder, source_of(call), "bool"), "bool", negated)
    found = reduced(builder, call, "any", source, dims_of(call, len(source.sizes)), "bool")
    return cast(builder, mapped(builder, found, "bool", negated), call.dtype)


def _extremal_index(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> LazyTensor:
    source, dim = source_of(call), call.arguments.get("dim")
    source = comparable(builder, source)
    if dim is None:
        flat = reshaped(source, (numel(source.sizes),))
        found = reduced(builder, call, kind, flat, [0], "int64")
        return (
            reshaped(found, call.sizes)
            if _keeps(call)
            else without(found, list(range(len(found.sizes))))
        )
    return reduced(builder, call, kind, source, dims_of(call, len(source.sizes)), "int64")


def _extremum_with_index(builder: GraphBuilder, call: OperatorCall, *, kind: str) -> Results:
    """Write `max.dim`, whose results are value and index, and `max` over all."""
    if len(call.results) == 1:
        return _plain(builder, call, kind=kind)
    source = comparable(builder, source_of(call))
    dims = dims_of(call, len(source.sizes))
    value = cast(builder, reduced(builder, call, kind, source, dims, source.dtype), call.dtype)
    return value, reduced(builder, call, f"arg{kind}", source, dims, "int64")


def comparable(builder: GraphBuilder, source: LazyTensor) -> LazyTensor:
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
    pool, wide, dims = builder.pool, accumulated(call.dtype), dims_of(call, len(source.sizes))
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
    _, variance = _moments(builder, call, source_of(call))
    return cast(builder, variance, call.dtype)


def _std(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _, variance = _moments(builder, call, source_of(call))
    root = mapped(
        builder,
        variance,
        variance.dtype,
        lambda t: builder.pool.operate("sqrt", t, dtype=variance.dtype),
    )
    return cast(builder, root, call.dtype)


def _var_mean(builder: GraphBuilder, call: OperatorCall) -> Results:
    mean, variance = _moments(builder, call, source_of(call))
    return cast(builder, variance, call.dtype), cast(builder, mean, call.dtype)


REDUCTIONS_BY_NAME: dict[str, Lowering] = {
    "sum": partial(_plain, kind="sum"),
    "prod": partial(_plain, kind="prod"),
    "amax": partial(_plain, kind="max"),
    "amin": partial(_plain, kind="min"),
    "max": partial(_extremum_with_index, kind="max"),
    "min": partial(_extremum_with_index, kind="min"),
    "xor_sum": partial(_plain, kind="xor_sum"),
    "mean": _mean,
    "any": _any,
    "all": _all,
    "argmax": partial(_extremal_index, kind="argmax"),
    "argmin": partial(_extremal_index, kind="argmin"),
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
}
