# SPDX-License-Identifier: Apache-2.0
"""Operators that choose elements by position or by value: cat, pad, index, gather, embedding, scatter, index_put.

`INDEXING` maps their names to functions (builder, call) -> `LazyTensor`.  A place that a value decides is an indirect index, whose bounds the kernel
asserts.  What writes to such places copies its first argument, then adds a loop that stores or adds there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from bundler.codegen.lazy_tensors import GraphBuilder, Indices, LazyTensor, variables
from bundler.codegen.loop_nodes import POINTWISE, Loop
from bundler.codegen.loop_terms import Term
from bundler.codegen.operator_calls import OperatorCall
from bundler.codegen.view_lowerings import broadcast

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]
_ADDABLE = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64"})


def _tensor(call: OperatorCall, name: str) -> LazyTensor:
    found = call.arguments[name]
    assert isinstance(found, LazyTensor)
    return found


def _inside(builder: GraphBuilder, index: sympy.Expr, low: sympy.Expr | None, high: sympy.Expr | None) -> Term | None:
    """Return low <= index < high; None where nothing is asked.  Indices are compared in the width that the kernel has them in."""
    pool, conditions = builder.pool, []
    if low is not None:
        conditions.append(pool.operate("ge", pool.index(index, "int32"), pool.index(low, "int32"), dtype="bool"))
    if high is not None:
        conditions.append(pool.operate("lt", pool.index(index, "int32"), pool.index(high, "int32"), dtype="bool"))
    return _both(builder, conditions)


def _both(builder: GraphBuilder, conditions: Sequence[Term | None]) -> Term | None:
    result: Term | None = None
    for condition in conditions:
        if condition is not None:
            result = (
                condition if result is None else builder.pool.operate("logical_and", result, condition, dtype="bool")
            )
    return result


def _concatenated(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, dtype = builder.pool, call.dtype
    tensors = [t for t in call.arguments["tensors"] if t.sizes != (0,)]
    if not tensors:
        return builder.lazy(call.sizes, dtype, lambda _: pool.constant(0, dtype), call.origins)
    dim = int(call.arguments.get("dim", 0)) % len(call.sizes)
    ends: list[sympy.Expr] = []
    for tensor in tensors:
        ends.append((ends[-1] if ends else sympy.Integer(0)) + tensor.sizes[dim])

    def part(number: int, indices: Indices) -> Term:
        start = ends[number - 1] if number else sympy.Integer(0)
        shifted = tuple(index - start if n == dim else index for n, index in enumerate(indices))
        last = number == len(tensors) - 1
        mask = _inside(builder, indices[dim], start if number else None, None if last else ends[number])
        body = pool.cast(tensors[number].at(shifted), dtype)
        return body if mask is None else pool.masked(mask, body, 0)

    def at(indices: Indices) -> Term:
        result = part(len(tensors) - 1, indices)
        for number in reversed(range(len(tensors) - 1)):
            before = _inside(builder, indices[dim], None, ends[number])
            assert before is not None
            result = pool.operate("where", before, part(number, indices), result, dtype=dtype)
        return result

    origins = call.origins.union(*(tensor.origins for tensor in tensors))
    return builder.lazy(call.sizes, dtype, at, origins)


def _padded(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, tensor = builder.pool, call.arguments["self"]
    pad, value = list(call.arguments["pad"]), call.arguments.get("value", 0)
    rank = len(tensor.sizes)
    lows = [sympy.Integer(0)] * rank
    edges: list[tuple[Any, Any]] = [(0, 0)] * rank
    for pair in range(len(pad) // 2):
        dim = rank - 1 - pair
        lows[dim], edges[dim] = sympy.sympify(pad[2 * pair]), (pad[2 * pair], pad[2 * pair + 1])

    def at(indices: Indices) -> Term:
        moved = tuple(index - low for index, low in zip(indices, lows, strict=True))
        conditions = []
        for index, size, (before, after) in zip(moved, tensor.sizes, edges, strict=True):
            low = sympy.Integer(0) if before != 0 else None
            conditions.append(_inside(builder, index, low, size if after != 0 else None))
        mask, body = _both(builder, conditions), tensor.at(moved)
        return body if mask is None else pool.masked(mask, body, value)

    return builder.lazy(call.sizes, call.dtype, at, call.origins | tensor.origins)


def _indexed(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    tensor, given = call.arguments["self"], call.arguments["indices"]
    places = _index_places(builder, call, tensor.sizes, given)
    origins = call.origins.union(tensor.origins, *(i.origins for i in given if i is not None))
    return builder.lazy(call.sizes, call.dtype, lambda indices: tensor.at(places(indices)), origins)


def _index_places(
    builder: GraphBuilder, call: OperatorCall, sizes: Sequence[sympy.Expr], given: Sequence[LazyTensor | None]
) -> Callable[[Indices], Indices]:
    """Return from which index of an indexed tensor each element of the result comes."""
    given = [*given, *[None] * (len(sizes) - len(given))]
    chosen = [number for number, index in enumerate(given) if index is not None]
    tensors = [index for index in given if index is not None]
    if any(tensor.dtype not in {"int32", "int64"} for tensor in tensors):
        raise call.refusal("an index that is a mask, whose result has as many elements as the mask has true ones")
    rank = max((len(tensor.sizes) for tensor in tensors), default=0)
    together = chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True
    first = chosen[0] if chosen and together else 0
    shape = _broadcast_sizes([tensor.sizes for tensor in tensors])

    def places(indices: Indices) -> Indices:
        spread, rest = indices[first : first + rank], iter((*indices[:first], *indices[first + rank :]))
        found: list[sympy.Expr] = []
        for size, index in zip(sizes, given, strict=True):
            if index is None:
                found.append(next(rest))
            else:
                found.append(builder.pool.indirect(broadcast(index, shape).at(spread), size))
        return tuple(found)

    return places


def _broadcast_sizes(shapes: Sequence[tuple[sympy.Expr, ...]]) -> tuple[sympy.Expr, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    result = [sympy.Integer(1)] * rank
    for shape in shapes:
        for number, size in enumerate(shape, rank - len(shape)):
            result[number] = size if size != 1 else result[number]
    return tuple(result)


def _gathered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    tensor, index = _tensor(call, "self"), _tensor(call, "index")
    if not tensor.sizes or not index.sizes:
        raise call.refusal("a tensor without dimensions")
    dim = int(call.arguments["dim"]) % len(tensor.sizes)

    def at(indices: Indices) -> Term:
        place = builder.pool.indirect(index.at(indices), tensor.sizes[dim])
        return tensor.at(tuple(place if n == dim else i for n, i in enumerate(indices)))

    return builder.lazy(call.sizes, call.dtype, at, call.origins | tensor.origins | index.origins)


def _selected(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    tensor, index = _tensor(call, "self"), _tensor(call, "index")
    if not tensor.sizes or len(index.sizes) != 1:
        raise call.refusal("a tensor or an index without dimensions")
    dim = int(call.arguments["dim"]) % len(tensor.sizes)

    def at(indices: Indices) -> Term:
        place = builder.pool.indirect(index.at((indices[dim],)), tensor.sizes[dim])
        return tensor.at(tuple(place if n == dim else i for n, i in enumerate(indices)))

    return builder.lazy(call.sizes, call.dtype, at, call.origins | tensor.origins | index.origins)


def _embedded(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    weight, index = _tensor(call, "weight"), _tensor(call, "indices")

    def at(indices: Indices) -> Term:
        rank = len(index.sizes)
        place = builder.pool.indirect(index.at(indices[:rank]), weight.sizes[0])
        return weight.at((place, *indices[rank:]))

    return builder.lazy(call.sizes, call.dtype, at, call.origins | weight.origins | index.origins)


# What writes to places that values decide -------------------------------------------------------------------------------


def _written(
    builder: GraphBuilder, call: OperatorCall, target: LazyTensor, sizes: Sequence[sympy.Expr], value: LazyTensor,
    places: Callable[[Indices], Indices], *, add: bool,
) -> LazyTensor:  # fmt: skip
    """Copy a tensor and write values to places of the copy.

    Args:
        builder, call: of the operator.
        target: what is copied.
        sizes: of the loop over the values.
        value: what is written, broadcast to `sizes`.
        places: from an index of the loop to one of the target.
        add: add to what is there, atomically, instead of replacing it.
    """
    if add and target.dtype not in _ADDABLE:
        raise call.refusal(f"adds {target.dtype} atomically")
    pool = builder.pool
    copy = builder.lazy(target.sizes, target.dtype, target.at, target.origins | call.origins)
    name = builder.realize(copy)
    layout = builder.buffers[name].layout
    names = variables("i", sizes)
    at = tuple(sympy.Integer(0) if size == 1 else v for v, size in zip(names, sizes, strict=True))
    index = sympy.expand(layout.index(places(at)))
    term = pool.cast(broadcast(value, sizes).at(at), target.dtype)
    terms = pool.bound(index)
    loop = Loop(
        name, names, tuple(sizes), (), (), term, POINTWISE, index, tuple(terms), "atomic_add" if add else "store",
        call.origins,
    )  # fmt: skip
    builder.scatter(name, loop)
    return copy


def _index_put(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given = call.arguments
    target, values, indices = given["self"], given["values"], list(given["indices"])
    add = bool(given.get("accumulate", False))
    places = _index_places(builder, call, target.sizes, indices)
    padded = [*indices, *[None] * (len(target.sizes) - len(indices))]
    chosen = [n for n, index in enumerate(padded) if index is not None]
    shape = _broadcast_sizes([index.sizes for index in padded if index is not None])
    kept = [size for n, size in enumerate(target.sizes) if padded[n] is None]
    together = chosen == list(range(chosen[0], chosen[0] + len(chosen)))
    first = chosen[0] if together else 0
    return _written(builder, call, target, (*kept[:first], *shape, *kept[first:]), values, places, add=add)


def _scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given = call.arguments
    target, index = given["self"], given["index"]
    if given.get("reduce") is not None or not target.sizes or not index.sizes:
        raise call.refusal("reduces other than by a sum, or has no dimensions")
    dim = int(given["dim"]) % len(target.sizes)
    source = given.get("src", given.get("value"))
    if not isinstance(source, LazyTensor):
        number = source
        source = builder.lazy((), target.dtype, lambda _: builder.pool.constant(number, target.dtype), call.origins)

    def places(indices: Indices) -> Indices:
        place = builder.pool.indirect(index.at(indices), target.sizes[dim], wrap=False)
        return tuple(place if n == dim else i for n, i in enumerate(indices))

    if call.operator == "scatter" and tuple(index.sizes) == tuple(_sizes_of_slice(target, dim, sympy.Integer(1))):
        return _one_of_each_row(builder, call, dim, source, places)

    # Values beyond the index are not written.
    spread = source
    if source.sizes:
        spread = builder.lazy(index.sizes, source.dtype, source.at, source.origins)
    return _written(builder, call, target, index.sizes, spread, places, add=call.operator == "scatter_add")


def _one_of_each_row(
    builder: GraphBuilder, call: OperatorCall, dim: int, source: LazyTensor, places: Callable[[Indices], Indices]
) -> LazyTensor:
    """Write one element of each row: every element is the source's where it is at the row's place, so nothing is written twice."""
    target, pool, dtype = call.arguments["self"], builder.pool, call.dtype

    def at(indices: Indices) -> Term:
        first = tuple(sympy.Integer(0) if n == dim else index for n, index in enumerate(indices))
        here = pool.operate("eq", pool.index(indices[dim]), pool.index(places(first)[dim]), dtype="bool")
        value = pool.cast(source.at(first if source.sizes else ()), dtype)
        return pool.operate("where", here, value, target.at(indices), dtype=dtype)

    origins = call.origins.union(target.origins, source.origins, call.arguments["index"].origins)
    return builder.lazy(call.sizes, dtype, at, origins)


def _slice_scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given, pool, dtype = call.arguments, builder.pool, call.dtype
    target, source = given["self"], given["src"]
    dim = int(given.get("dim", 0)) % len(target.sizes)
    length, step = target.sizes[dim], given.get("step", 1)
    start, end = sympy.sympify(given.get("start") or 0), given.get("end")
    if not (start.is_Integer and length.is_Integer and step == 1):
        raise call.refusal("a slice with a step, or of a size that changes")
    low = min(max(int(start) + (int(length) if start < 0 else 0), 0), int(length))
    high = low + source.sizes[dim]
    del end  # the sizes of the source tell where the slice ends

    def at(indices: Indices) -> Term:
        mask = _inside(builder, indices[dim], sympy.Integer(low) if low else None, None if high == length else high)
        moved = tuple(index - low if n == dim else index for n, index in enumerate(indices))
        body = pool.cast(broadcast(source, _sizes_of_slice(target, dim, high - low)).at(moved), dtype)
        if mask is None:
            return body
        return pool.operate("where", mask, pool.masked(mask, body, 0), target.at(indices), dtype=dtype)

    return builder.lazy(call.sizes, dtype, at, call.origins | target.origins | source.origins)


def _sizes_of_slice(target: LazyTensor, dim: int, size: sympy.Expr) -> list[sympy.Expr]:
    return [size if number == dim else old for number, old in enumerate(target.sizes)]


def _select_scattered(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    given, pool, dtype = call.arguments, builder.pool, call.dtype
    target, source = given["self"], given["src"]
    dim = int(given["dim"]) % len(target.sizes)
    place = sympy.sympify(given["index"])
    place = place + target.sizes[dim] if place.is_negative else place

    def at(indices: Indices) -> Term:
        mask = pool.operate("eq", pool.index(indices[dim]), pool.index(place), dtype="bool")
        rest = tuple(index for n, index in enumerate(indices) if n != dim)
        return pool.operate("where", mask, pool.cast(source.at(rest), dtype), target.at(indices), dtype=dtype)

    return builder.lazy(call.sizes, dtype, at, call.origins | target.origins | source.origins)


INDEXING: dict[str, Lowering] = {
    "cat": _concatenated,
    "constant_pad_nd": _padded,
    "index": _indexed,
    "_unsafe_index": _indexed,
    "gather": _gathered,
    "index_select": _selected,
    "embedding": _embedded,
    "index_put": _index_put,
    "_unsafe_index_put": _index_put,
    "scatter": _scattered,
    "scatter_add": _scattered,
    "slice_scatter": _slice_scattered,
    "select_scatter": _select_scattered,
}
