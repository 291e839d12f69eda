# SPDX-License-Identifier: Apache-2.0
"""Operators that choose elements by position or by value: cat, pad, index, gather, embedding.

`INDEXING` maps their names to functions (builder, call) -> `LazyTensor`.  A place that a value
decides is an indirect index, whose bounds the kernel asserts; `index_places` and `inside` are for
`scatter_lowerings`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import broadcast

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]


def _tensor(call: OperatorCall, name: str) -> LazyTensor:
    found = call.arguments[name]
    assert isinstance(found, LazyTensor)
    return found


def inside(
    builder: GraphBuilder, index: sympy.Expr, low: sympy.Expr | None, high: sympy.Expr | None
) -> Term | None:
    """Return low <= index < high; None where nothing is asked.  Indices are compared in the width
    that the kernel has them in.
    """
    pool, conditions = builder.pool, []
    if low is not None:
        conditions.append(
            pool.operate("ge", pool.index(index, "int32"), pool.index(low, "int32"), dtype="bool")
        )
    if high is not None:
        conditions.append(
            pool.operate("lt", pool.index(index, "int32"), pool.index(high, "int32"), dtype="bool")
        )
    return both_of(builder, conditions)


def both_of(builder: GraphBuilder, conditions: Sequence[Term | None]) -> Term | None:
    """Return whether all conditions hold; None where there is none."""
    result: Term | None = None
    for condition in conditions:
        if condition is not None:
            result = (
                condition
                if result is None
                else builder.pool.operate("logical_and", result, condition, dtype="bool")
            )
    return result


def _concatenated(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, dtype = builder.pool, call.dtype
    # torch skips empty tensors of one dimension, whatever the rank of the others.
    tensors = [t for t in call.arguments["tensors"] if t.sizes != (0,)]
    if not tensors:
        return builder.lazy(call.sizes, dtype, lambda _: pool.constant(0, dtype), call.origins)
    dim = int(call.arguments.get("dim", 0)) % len(call.sizes)
    ends: list[sympy.Expr] = []
    for tensor in tensors:
        ends.append((ends[-1] if ends else sympy.Integer(0)) + tensor.sizes[dim])

    def element(number: int, indices: Indices) -> Term:
        start = ends[number - 1] if number else sympy.Integer(0)
        shifted = tuple(index - start if n == dim else index for n, index in enumerate(indices))
        return pool.cast(tensors[number].at(shifted), dtype)

    def part(number: int, indices: Indices) -> Term:
        mask = inside(
            builder,
            indices[dim],
            ends[number - 1] if number else None,
            None if number == len(tensors) - 1 else ends[number],
        )
        body = element(number, indices)
        return body if mask is None else pool.masked(mask, body, 0)

    def at(indices: Indices) -> Term:
        place = indices[dim]
        if place.is_Integer and all(end.is_Integer for end in ends):
            # A place beyond the end is behind a mask of who asks.
            number = next((n for n, end in enumerate(ends) if place < end), len(ends) - 1)
            return element(number, indices)
        # A chain of choices from the last tensor to the first: only the ends need comparing. Each
        # part has its mask as well, so that no lane loads outside of a tensor.
        result = part(len(tensors) - 1, indices)
        for number in reversed(range(len(tensors) - 1)):
            before = inside(builder, indices[dim], None, ends[number])
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
            # A side without padding needs no comparison; negative padding cuts off and needs one.
            low = sympy.Integer(0) if before != 0 else None
            conditions.append(inside(builder, index, low, size if after != 0 else None))
        mask, body = both_of(builder, conditions), tensor.at(moved)
        return body if mask is None else pool.masked(mask, body, value)

    return builder.lazy(call.sizes, call.dtype, at, call.origins | tensor.origins)


def _indexed(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    tensor, given = call.arguments["self"], call.arguments["indices"]
    places = index_places(builder, call, tensor.sizes, given)
    origins = call.origins.union(tensor.origins, *(i.origins for i in given if i is not None))
    return builder.lazy(call.sizes, call.dtype, lambda indices: tensor.at(places(indices)), origins)


def index_places(
    builder: GraphBuilder,
    call: OperatorCall,
    sizes: Sequence[sympy.Expr],
    given: Sequence[LazyTensor | None],
) -> Callable[[Indices], Indices]:
    """Return from which index of an indexed tensor each element of the result comes."""
    given = [*given, *[None] * (len(sizes) - len(given))]
    chosen = [number for number, index in enumerate(given) if index is not None]
    tensors = [index for index in given if index is not None]
    if any(tensor.dtype not in {"int32", "int64"} for tensor in tensors):
        raise call.refusal(
            "an index that is a mask, whose result has as many elements as the mask has true ones"
        )
    rank = max((len(tensor.sizes) for tensor in tensors), default=0)
    # As in numpy: dimensions of adjacent indices stand in their place, of others in front.
    together = chosen == list(range(chosen[0], chosen[0] + len(chosen))) if chosen else True
    first = chosen[0] if chosen and together else 0
    shape = broadcast_sizes([tensor.sizes for tensor in tensors])

    def places(indices: Indices) -> Indices:
        # The result has the index's dimensions in one place, and all others in order around them.
        spread, rest = (
            indices[first : first + rank],
            iter((*indices[:first], *indices[first + rank :])),
        )
        found: list[sympy.Expr] = []
        for size, index in zip(sizes, given, strict=True):
            if index is None:
                found.append(next(rest))
            else:
                found.append(builder.pool.indirect(broadcast(index, shape).at(spread), size))
        return tuple(found)

    return places


def broadcast_sizes(shapes: Sequence[tuple[sympy.Expr, ...]]) -> tuple[sympy.Expr, ...]:
    """Return the sizes that shapes have when they are broadcast to each other."""
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


INDEXING: dict[str, Lowering] = {
    "cat": _concatenated,
    "constant_pad_nd": _padded,
    "index": _indexed,
    "_unsafe_index": _indexed,
    "gather": _gathered,
    "index_select": _selected,
    "embedding": _embedded,
}
