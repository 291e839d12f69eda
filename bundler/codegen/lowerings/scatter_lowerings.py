# SPDX-License-Identifier: Apache-2.0
"""Operators that write to some places of a tensor: scatter, scatter_reduce, index_put,
slice_scatter, select_scatter, as_strided_scatter.

`SCATTERING` maps their names to functions (builder, call) -> `LazyTensor`.  Where values decide the
places, the first argument is copied, then a loop stores, adds or compares there; Triton's atomics
are what decides which dtypes that is for.  Other places are a choice of each element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type, least_and_most
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor, variables
from bundler.codegen.loops.loop_nodes import POINTWISE, Loop, contiguous_strides, numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.indexing_lowerings import (
    both_of,
    broadcast_sizes,
    index_places,
    inside,
)
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import (
    beginning,
    broadcast,
    from_end,
    reaches_end,
    unravelled,
)

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]
# Only integers have atomic extremes here: those of floats lose NaN. Narrow integers have no
# atomics.
_ATOMICS = {
    "atomic_add": frozenset(
        {"float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "uint64"}
    ),
    "atomic_max": frozenset({"int32", "int64", "uint32", "uint64"}),
    "atomic_min": frozenset({"int32", "int64", "uint32", "uint64"}),
}
_REDUCTIONS = {"sum": "atomic_add", "add": "atomic_add", "amax": "atomic_max", "amin": "atomic_min"}


def _written(
    builder: GraphBuilder,
    call: OperatorCall,
    target: LazyTensor,
    sizes: Sequence[sympy.Expr],
    value: LazyTensor,
    places: Callable[[Indices], Indices],
    *,
    mode: str,
) -> LazyTensor:
    """Copy a tensor and write values to places of the copy.

    Args:
        builder, call: of the operator.
        target: what is copied.
        sizes: of the loop over the values.
        value: what is written, broadcast to `sizes`.
        places: from an index of the loop to one of the target.
        mode: `store`, or an atomic operation on what is there.
    """
    _check_atomic(call, mode, target.dtype)
    _check_order(builder, call, mode, target.dtype, value)
    # torch's operator is functional: the target stays as it is, a copy with its strides is changed.
    copy = builder.lazy(target.sizes, target.dtype, target.at, target.origins | call.origins)
    copy.strides = call.result.strides
    builder.realize(copy)
    _write_to(builder, call, copy, sizes, value, places, mode)
    return copy


def _check_order(
    builder: GraphBuilder, call: OperatorCall, mode: str, dtype: str, value: LazyTensor
) -> None:
    """Refuse what gives other numbers from call to call, where these were asked to be the same:
    torch has an operator that is in order.
    """
    adds = mode == "atomic_add" and data_type(dtype).kind is NumberKind.FLOAT
    stores = mode == "store" and numel(value.sizes) != 1
    if builder.deterministic and (adds or stores):
        raise call.refusal(
            "deterministic algorithms are asked for, and a kernel writes to one place in any order"
        )


def _check_atomic(call: OperatorCall, mode: str, dtype: str) -> None:
    if mode != "store" and dtype not in _ATOMICS[mode]:
        raise call.refusal(f"{mode} of {dtype}, which Triton lacks, or which loses NaN")


def _write_to(
    builder: GraphBuilder,
    call: OperatorCall,
    copy: LazyTensor,
    sizes: Sequence[sympy.Expr],
    value: LazyTensor,
    places: Callable[[Indices], Indices],
    mode: str,
) -> None:
    """Add the loop that writes values to places of a buffer."""
    assert copy.buffer is not None
    pool, layout = builder.pool, builder.buffers[copy.buffer].layout
    names = variables("i", sizes)
    at = tuple(sympy.Integer(0) if size == 1 else v for v, size in zip(names, sizes, strict=True))
    index = sympy.expand(layout.index(places(at)))
    term = pool.cast(broadcast(value, sizes).at(at), copy.dtype)
    terms = pool.bound(index)
    loop = Loop(
        copy.buffer,
        names,
        tuple(sizes),
        (),
        (),
        term,
        POINTWISE,
        index,
        tuple(terms),
        mode,
        call.origins,
    )
    builder.scatter(copy.buffer, loop)


def _index_put(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given = call.arguments
    target, values, indices = given["self"], given["values"], list(given["indices"])
    mode = "atomic_add" if given.get("accumulate", False) else "store"
    if (
        mode == "store"
        and len(indices) == 1
        and indices[0].dtype == "bool"
        and numel(values.sizes) == 1
    ):
        return _put_where(builder, call, indices[0])
    places = index_places(builder, call, target.sizes, indices)
    padded = [*indices, *[None] * (len(target.sizes) - len(indices))]
    chosen = [n for n, index in enumerate(padded) if index is not None]
    shape = broadcast_sizes([index.sizes for index in padded if index is not None])
    kept = [size for n, size in enumerate(target.sizes) if padded[n] is None]
    # As in numpy: dimensions of adjacent indices stand in their place, of others in front.
    together = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    first = chosen[0] if together else 0
    return _written(
        builder, call, target, (*kept[:first], *shape, *kept[first:]), values, places, mode=mode
    )


def _put_where(builder: GraphBuilder, call: OperatorCall, mask: LazyTensor) -> LazyTensor:
    """Put one number wherever a mask holds, which is a choice of each element."""
    target, values, pool = call.arguments["self"], call.arguments["values"], builder.pool
    rank = len(mask.sizes)

    def at(indices: Indices) -> Term:
        value = pool.cast(broadcast(values, target.sizes).at(indices), call.dtype)
        return pool.operate(
            "where", mask.at(indices[:rank]), value, target.at(indices), dtype=call.dtype
        )

    return builder.lazy(
        call.sizes, call.dtype, at, call.origins.union(target.origins, mask.origins, values.origins)
    )


def _scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given = call.arguments
    target, index = given["self"], given["index"]
    asked = "sum" if call.operator == "scatter_add" else given.get("reduce")
    mode = "store" if asked is None else _REDUCTIONS.get(asked)
    if mode is None or not target.sizes or not index.sizes:
        raise call.refusal("reduces by a product or a mean, or has no dimensions")
    dim = int(given["dim"]) % len(target.sizes)
    source = given.get("src", given.get("value"))
    if not isinstance(source, LazyTensor):
        number = source
        source = builder.lazy(
            (), target.dtype, lambda _: builder.pool.constant(number, target.dtype), call.origins
        )

    def places(indices: Indices) -> Indices:
        place = builder.pool.indirect(index.at(indices), target.sizes[dim], wrap=False)
        return tuple(place if n == dim else i for n, i in enumerate(indices))

    if mode == "store" and tuple(index.sizes) == tuple(
        _sizes_of_slice(target, dim, sympy.Integer(1))
    ):
        return _one_of_each_row(builder, call, dim, source, places)

    # The index may have fewer elements than the source; those beyond it are not written.
    spread = source
    if source.sizes:
        spread = builder.lazy(index.sizes, source.dtype, source.at, source.origins)
    if asked is not None and not given.get("include_self", True):
        return _written_over(builder, call, index.sizes, spread, places, mode)
    return _written(builder, call, target, index.sizes, spread, places, mode=mode)


def _written_over(
    builder: GraphBuilder,
    call: OperatorCall,
    sizes: Sequence[sympy.Expr],
    value: LazyTensor,
    places: Callable[[Indices], Indices],
    mode: str,
) -> LazyTensor:
    """Reduce without what stood there: it is replaced by what changes nothing first."""
    dtype = call.dtype
    _check_atomic(call, mode, dtype)
    _check_order(builder, call, mode, dtype, value)
    least, most = least_and_most(dtype)
    neutral = {"atomic_add": 0, "atomic_max": least, "atomic_min": most}[mode]
    empty = builder.lazy((), dtype, lambda _: builder.pool.constant(neutral, dtype), call.origins)
    # Two kernels: every place has to hold the neutral value before the first one is added.
    copy = _written(builder, call, call.arguments["self"], sizes, empty, places, mode="store")
    _write_to(builder, call, copy, sizes, value, places, mode)
    return copy


def _one_of_each_row(
    builder: GraphBuilder,
    call: OperatorCall,
    dim: int,
    source: LazyTensor,
    places: Callable[[Indices], Indices],
) -> LazyTensor:
    """Write one element of each row: every element is the source's where it is at the row's place,
    so nothing is written twice.
    """
    target, pool, dtype = call.arguments["self"], builder.pool, call.dtype

    def at(indices: Indices) -> Term:
        first = tuple(sympy.Integer(0) if n == dim else index for n, index in enumerate(indices))
        here = pool.operate(
            "eq", pool.index(indices[dim]), pool.index(places(first)[dim]), dtype="bool"
        )
        value = pool.cast(source.at(first if source.sizes else ()), dtype)
        return pool.operate("where", here, value, target.at(indices), dtype=dtype)

    origins = call.origins.union(target.origins, source.origins, call.arguments["index"].origins)
    return builder.lazy(call.sizes, dtype, at, origins)


def _slice_scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given, pool, dtype = call.arguments, builder.pool, call.dtype
    target, source = given["self"], given["src"]
    dim = int(given.get("dim", 0)) % len(target.sizes)
    length, step = target.sizes[dim], given.get("step", 1)
    if not isinstance(step, int):
        raise call.refusal("a step that changes")
    count = source.sizes[dim]
    low = beginning(given, length, count)
    # Another end is not read from the call, where it may be negative or beyond the length.
    high = length if reaches_end(given, length) else sympy.Min(low + count * step, length)
    # Added so that it is never negative: Triton's remainder then is Python's. Elements in front of
    # the slice get some remainder; the first condition excludes them.
    shift = -low % step if low.is_Integer else (step - 1) * low

    def at(indices: Indices) -> Term:
        index = indices[dim]
        conditions = [
            inside(
                builder,
                index,
                low if low != 0 else None,
                None if high == length else high,
            )
        ]
        if step != 1:
            rest = ModularIndexing(index + shift, sympy.Integer(1), sympy.Integer(step))
            zero = pool.index(sympy.Integer(0), "int32")
            conditions.append(pool.operate("eq", pool.index(rest, "int32"), zero, dtype="bool"))
        mask = both_of(builder, conditions)
        place = (
            index - low
            if step == 1
            else FloorDiv(index + shift, sympy.Integer(step)) - sympy.expand((low + shift) / step)
        )
        moved = tuple(place if n == dim else i for n, i in enumerate(indices))
        body = pool.cast(broadcast(source, _sizes_of_slice(target, dim, count)).at(moved), dtype)
        if mask is None:
            return body
        return pool.operate(
            "where", mask, pool.masked(mask, body, 0), target.at(indices), dtype=dtype
        )

    return builder.lazy(call.sizes, dtype, at, call.origins | target.origins | source.origins)


def _sizes_of_slice(target: LazyTensor, dim: int, size: sympy.Expr) -> list[sympy.Expr]:
    return [size if number == dim else old for number, old in enumerate(target.sizes)]


def _as_strided_scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given, target, source = call.arguments, call.arguments["self"], call.arguments["src"]
    offset = given.get("storage_offset")
    start = sympy.Integer(0) if offset is None else sympy.sympify(offset) - target.storage_offset
    strides = [sympy.sympify(stride) for stride in given["stride"]]
    dims = [dim for dim in zip(source.sizes, strides, strict=True) if dim[0] != 1]
    if not _is_dense(target.sizes, call.result.strides):
        raise call.refusal("into a tensor that is not contiguous")
    if start.is_nonnegative is not True or not _are_distinct(dims, numel(target.sizes) - start):
        raise call.refusal("places that may be written twice, or lie outside")

    def places(indices: Indices) -> Indices:
        flat = sum((i * stride for i, stride in zip(indices, strides, strict=True)), start)
        return tuple(unravelled(flat, target.sizes))

    return _written(builder, call, target, source.sizes, source, places, mode="store")


def _is_dense(sizes: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> bool:
    expected = contiguous_strides(sizes)
    return all(
        size == 1 or mine == other
        for size, mine, other in zip(sizes, strides, expected, strict=True)
    )


def _are_distinct(dims: Sequence[tuple[sympy.Expr, sympy.Expr]], room: sympy.Expr) -> bool:
    """Whether it is known that sizes and strides name no element twice, and none beyond the
    room.
    """
    reach = sympy.Integer(1)
    for size, stride in sorted(
        dims, key=lambda dim: int(dim[1]) if dim[1].is_Integer else math.inf
    ):
        if sympy.expand(stride - reach).is_nonnegative is not True:
            return False
        reach += (size - 1) * stride
    return sympy.expand(room - reach).is_nonnegative is True


def _select_scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given, pool, dtype = call.arguments, builder.pool, call.dtype
    target, source = given["self"], given["src"]
    dim = int(given["dim"]) % len(target.sizes)
    place = from_end(sympy.sympify(given["index"]), target.sizes[dim])

    def at(indices: Indices) -> Term:
        mask = pool.operate("eq", pool.index(indices[dim]), pool.index(place), dtype="bool")
        rest = tuple(index for n, index in enumerate(indices) if n != dim)
        return pool.operate(
            "where", mask, pool.cast(source.at(rest), dtype), target.at(indices), dtype=dtype
        )

    return builder.lazy(call.sizes, dtype, at, call.origins | target.origins | source.origins)


SCATTERING: dict[str, Lowering] = {
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "scatter": _scattered,
    "scatter_add": _scattered,
    "scatter_reduce": _scattered,
    "as_strided_scatter": _as_strided_scattered,
    "slice_scatter": _slice_scattered,
    "select_scatter": _select_scattered,
}
