# SPDX-License-Identifier: Apache-2.0
"""Pools over small windows, and their gradients: `POOLS` maps operators to functions (builder,
call) -> `LazyTensor`, or one for each result.

A window's elements are read one by one, so a pool is computed where it is read; larger windows are
called as they are. So are gradients of elements that many windows overlap at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type, least_and_most
from bundler.codegen.loops.index_functions import FloorDiv
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor | tuple[LazyTensor, ...]]
# A window of 5 x 5 still fits into registers as one expression.
_MOST_ELEMENTS = 25


@dataclass(frozen=True)
class _Window:
    """The windows of a pool over the last dimensions of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def steps(self) -> list[tuple[int, ...]]:
        """The elements of a window, in the order in which torch reads them."""
        return list(itertools.product(*(range(size) for size in self.size)))

    def places(self, spatial: Indices, step: tuple[int, ...]) -> list[sympy.Expr]:
        """Return where an element of the window of a result is; it may be outside of the tensor."""
        return [
            index * stride - padding + number * dilation
            for index, stride, padding, number, dilation in zip(
                spatial, self.stride, self.padding, step, self.dilation, strict=True
            )
        ]

    @property
    def reach(self) -> tuple[int, ...]:
        """How many windows an element may be in, along each dimension."""
        return tuple(
            -(-((size - 1) * dilation + 1) // stride)
            for size, stride, dilation in zip(self.size, self.stride, self.dilation, strict=True)
        )

    def around(self, spatial: Indices) -> list[list[sympy.Expr]]:
        """Return the windows that an element may be in, in the order in which torch adds them; some
        may not exist, or end before the element.
        """
        backwards = itertools.product(*(range(count - 1, -1, -1) for count in self.reach))
        return [
            [
                FloorDiv(index + padding, sympy.Integer(stride)) - number
                for index, padding, stride, number in zip(
                    spatial, self.padding, self.stride, back, strict=True
                )
            ]
            for back in backwards
        ]


def _window(call: OperatorCall, rank: int) -> _Window:
    def numbers(name: str, default: Any) -> tuple[int, ...]:
        given = call.arguments.get(name)
        given = default if given is None or given in ([], ()) else given
        given = list(given) if isinstance(given, (list, tuple)) else [given]
        return tuple(int(part) for part in (given * rank if len(given) == 1 else given))

    size = numbers("kernel_size", None)
    window = _Window(size, numbers("stride", size), numbers("padding", 0), numbers("dilation", 1))
    backward = "grad_output" in call.arguments
    if math.prod(window.reach if backward else size) > _MOST_ELEMENTS:
        what = "windows around an element" if backward else "elements in a window"
        raise call.refusal(f"more than {_MOST_ELEMENTS} {what}")
    return window


def _wide(dtype: str) -> str:
    """Return the dtype of a sum, which is rounded once."""
    return "float32" if data_type(dtype).is_half else dtype


def _flat(places: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return torch's index of an element, which counts through the spatial dimensions alone."""
    flat: sympy.Expr = sympy.Integer(0)
    for place, size in zip(places, sizes, strict=True):
        flat = flat * size + place
    return sympy.expand(flat)


def _within(builder: GraphBuilder, places: list[sympy.Expr], sizes: list[sympy.Expr]) -> Term:
    """Return whether an element lies in the tensor."""
    pool = builder.pool
    found = []
    for place, size in zip(places, sizes, strict=True):
        at = pool.index(place, "int32")
        found.append(pool.operate("ge", at, pool.index(sympy.Integer(0), "int32"), dtype="bool"))
        found.append(pool.operate("lt", at, pool.index(size, "int32"), dtype="bool"))
    return _all(builder, found)


def _all(builder: GraphBuilder, conditions: list[Term]) -> Term:
    return reduce(lambda a, b: builder.pool.operate("logical_and", a, b, dtype="bool"), conditions)


def _averaged(builder: GraphBuilder, call: OperatorCall, *, rank: int) -> LazyTensor:
    source, pool = call.arguments["self"], builder.pool
    window, sizes = _window(call, rank), list(source.sizes[-rank:])
    padded = bool(call.arguments.get("count_include_pad", True))
    divisor, over = (
        call.arguments.get("divisor_override"),
        bool(call.arguments.get("ceil_mode", False)),
    )
    wide = _wide(call.dtype)
    if data_type(call.dtype).kind is not NumberKind.FLOAT:
        raise call.refusal("averages of integers")
    whole = not over and not any(window.padding)
    # The padding may count as elements; what a window of `ceil_mode` has beyond it never does.
    ends = (
        [size + padding for size, padding in zip(sizes, window.padding, strict=True)]
        if padded
        else sizes
    )

    def at(indices: Indices) -> Term:
        outer, spatial = indices[:-rank], indices[-rank:]
        parts, counts = [], []
        for step in window.steps:
            places = window.places(spatial, step)
            inside = None if whole else _within(builder, places, sizes)
            found = pool.cast(source.at((*outer, *places)), wide)
            parts.append(found if inside is None else pool.masked(inside, found, 0.0))
            counted = inside
            if padded and inside is not None:
                shifted = [
                    place + padding for place, padding in zip(places, window.padding, strict=True)
                ]
                limits = [end + padding for end, padding in zip(ends, window.padding, strict=True)]
                counted = _within(builder, shifted, limits)
            counts.append(pool.constant(1.0, wide) if counted is None else pool.cast(counted, wide))
        total = reduce(lambda a, b: pool.operate("add", a, b, dtype=wide), parts)
        if divisor is not None or whole or (padded and not over):
            count = pool.constant(float(divisor if divisor is not None else len(parts)), wide)
        else:
            count = reduce(lambda a, b: pool.operate("add", a, b, dtype=wide), counts)
        return pool.cast(pool.operate("truediv", total, count, dtype=wide), call.dtype)

    return builder.lazy(call.sizes, call.dtype, at, call.origins | source.origins)


def _largest(builder: GraphBuilder, call: OperatorCall, *, rank: int) -> tuple[LazyTensor, ...]:
    """Write a pool of maxima with the index of each: the first of equal ones, and the last NaN."""
    source, pool, dtype = call.arguments["self"], builder.pool, call.dtype
    window, sizes = _window(call, rank), list(source.sizes[-rank:])
    least, _ = least_and_most(dtype)
    whole = not call.arguments.get("ceil_mode", False) and not any(window.padding)

    def both(indices: Indices) -> tuple[Term, Term]:
        outer, spatial = indices[:-rank], indices[-rank:]
        value: Term | None = None
        index = seen = pool.constant(0, "int64")
        for step in window.steps:
            places = window.places(spatial, step)
            inside = None if whole else _within(builder, places, sizes)
            found = source.at((*outer, *places))
            found = found if inside is None else pool.masked(inside, found, least)
            number = pool.index(_flat(places, sizes), "int64")
            if value is None:
                value, index = found, number
                seen = pool.constant(1, "bool") if inside is None else inside
                continue
            # Only a greater element wins, so the first of equal ones stays; a later NaN always
            # wins.
            better = pool.operate("gt", found, value, dtype="bool")
            better = pool.operate(
                "logical_or", better, pool.operate("isnan", found, dtype="bool"), dtype="bool"
            )
            if inside is not None:
                # The first element inside of the tensor wins against a value of the padding, even
                # if equal.
                first = pool.operate(
                    "logical_and",
                    inside,
                    pool.operate("logical_not", seen, dtype="bool"),
                    dtype="bool",
                )
                better = pool.operate("logical_or", better, first, dtype="bool")
                seen = pool.operate("logical_or", seen, inside, dtype="bool")
            value = pool.operate("where", better, found, value, dtype=dtype)
            index = pool.operate("where", better, number, index, dtype="int64")
        assert value is not None
        return value, index

    origins = call.origins | source.origins
    return (
        builder.lazy(call.sizes, dtype, lambda indices: both(indices)[0], origins),
        builder.lazy(call.sizes, "int64", lambda indices: both(indices)[1], origins),
    )


def _spread(builder: GraphBuilder, call: OperatorCall, *, rank: int) -> LazyTensor:
    """Write the gradient of an average: each element gets a share of every window that it is in."""
    gradient, pool = call.arguments["grad_output"], builder.pool
    window, sizes = _window(call, rank), list(call.sizes[-rank:])
    counts, wide = list(gradient.sizes[-rank:]), _wide(call.dtype)
    divisor = call.arguments.get("divisor_override")

    def at(indices: Indices) -> Term:
        outer, spatial = indices[:-rank], indices[-rank:]
        shifted = [index + padding for index, padding in zip(spatial, window.padding, strict=True)]
        parts = []
        for places in window.around(spatial):
            inside = _within(builder, places, counts)
            for index, place, stride, size in zip(
                shifted, places, window.stride, window.size, strict=True
            ):
                step = pool.index(sympy.expand(index - place * stride), "int32")
                near = pool.operate(
                    "lt", step, pool.index(sympy.Integer(size), "int32"), dtype="bool"
                )
                inside = pool.operate("logical_and", inside, near, dtype="bool")
            share = (
                pool.constant(float(divisor), wide)
                if divisor is not None
                else _held(builder, call, window, places, sizes, wide)
            )
            term = pool.cast(gradient.at((*outer, *places)), wide)
            parts.append(pool.masked(inside, pool.operate("truediv", term, share, dtype=wide), 0.0))
        return pool.cast(
            reduce(lambda a, b: pool.operate("add", a, b, dtype=wide), parts), call.dtype
        )

    return builder.lazy(call.sizes, call.dtype, at, call.origins | gradient.origins)


def _returned(builder: GraphBuilder, call: OperatorCall, *, rank: int) -> LazyTensor:
    """Write the gradient of a pool of maxima: each element gets that of every window whose index
    is the element's own.
    """
    gradient, numbers = call.arguments["grad_output"], call.arguments["indices"]
    window, pool, wide = _window(call, rank), builder.pool, _wide(call.dtype)
    counts, sizes = list(gradient.sizes[-rank:]), call.sizes[-rank:]
    # Each is read once for every window.
    for tensor in (gradient, numbers):
        builder.mark_reuse(tensor, math.prod(window.reach))

    def at(indices: Indices) -> Term:
        outer, spatial = indices[:-rank], indices[-rank:]
        own, zero = pool.index(_flat(spatial, sizes), "int64"), pool.constant(0.0, wide)
        parts = []
        for places in window.around(spatial):
            # The index decides whether a window holds the element, so only its own bounds are
            # asked for.
            inside = _within(builder, places, counts)
            number = pool.masked(inside, numbers.at((*outer, *places)), -1)
            term = pool.masked(inside, pool.cast(gradient.at((*outer, *places)), wide), 0.0)
            chosen = pool.operate("eq", number, own, dtype="bool")
            parts.append(pool.operate("where", chosen, term, zero, dtype=wide))
        return pool.cast(
            reduce(lambda a, b: pool.operate("add", a, b, dtype=wide), parts), call.dtype
        )

    origins = call.origins | gradient.origins | numbers.origins
    return builder.lazy(call.sizes, call.dtype, at, origins)


def _held(
    builder: GraphBuilder,
    call: OperatorCall,
    window: _Window,
    places: list[sympy.Expr],
    sizes: list[sympy.Expr],
    wide: str,
) -> Term:
    """Return by how many elements a window's average was divided."""
    pool, padded = builder.pool, bool(call.arguments.get("count_include_pad", True))
    over = bool(call.arguments.get("ceil_mode", False))
    if not over and (padded or not any(window.padding)):
        return pool.constant(float(math.prod(window.size)), wide)
    counts = []
    for place, size, stride, padding, length in zip(
        places, window.size, window.stride, window.padding, sizes, strict=True
    ):
        start = place * stride - padding
        end = sympy.Min(start + size, length + padding)
        held = end - start if padded else sympy.Min(end, length) - sympy.Max(start, 0)
        counts.append(pool.cast(pool.index(held, "int32"), wide))
    return reduce(lambda a, b: pool.operate("mul", a, b, dtype=wide), counts)


def _summed_copies(builder: GraphBuilder, call: OperatorCall, *, rank: int) -> LazyTensor:
    """Write the gradient of an enlargement by whole factors: the sum over the copies of each
    element.
    """
    gradient, pool = call.arguments["grad_output"], builder.pool
    pairs = list(zip(gradient.sizes[-rank:], call.sizes[-rank:], strict=True))
    if not all(
        large.is_Integer and small.is_Integer and large % small == 0 for large, small in pairs
    ):
        raise call.refusal("an enlargement by a factor that is not whole")
    factors = [int(large // small) for large, small in pairs]
    given = [
        value
        for name, value in call.arguments.items()
        if name.startswith("scales") and value is not None
    ]
    if math.prod(factors) > _MOST_ELEMENTS or any(value not in factors for value in given):
        raise call.refusal(f"more than {_MOST_ELEMENTS} copies, or a factor of its own")
    wide = _wide(call.dtype)

    def at(indices: Indices) -> Term:
        outer, spatial = indices[:-rank], indices[-rank:]
        parts = [
            pool.cast(
                gradient.at(
                    (*outer, *(i * f + n for i, f, n in zip(spatial, factors, step, strict=True)))
                ),
                wide,
            )
            for step in itertools.product(*map(range, factors))
        ]
        return pool.cast(
            reduce(lambda a, b: pool.operate("add", a, b, dtype=wide), parts), call.dtype
        )

    return builder.lazy(call.sizes, call.dtype, at, call.origins | gradient.origins)


POOLS: dict[str, Lowering] = {
    "avg_pool2d_backward": lambda builder, call: _spread(builder, call, rank=2),
    "avg_pool3d_backward": lambda builder, call: _spread(builder, call, rank=3),
    "upsample_nearest1d_backward": lambda builder, call: _summed_copies(builder, call, rank=1),
    "upsample_nearest2d_backward": lambda builder, call: _summed_copies(builder, call, rank=2),
    "avg_pool2d": lambda builder, call: _averaged(builder, call, rank=2),
    "avg_pool3d": lambda builder, call: _averaged(builder, call, rank=3),
    "max_pool2d_with_indices": lambda builder, call: _largest(builder, call, rank=2),
    "max_pool2d_with_indices_backward": lambda builder, call: _returned(builder, call, rank=2),
    "max_pool3d_with_indices": lambda builder, call: _largest(builder, call, rank=3),
}
