# SPDX-License-Identifier: Apache-2.0
"""Random numbers: `RANDOM` maps operators to functions (builder, call) -> `LazyTensor`, or one for
each result.

Each operator of a graph has a seed of its own, which every call of the program draws anew; an
element's number is Philox of that seed and of the element's place in its tensor, so it depends on
neither the grid nor who reads it.  Numbers are those of 32-bit floats: a float64 has no more
digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import contiguous_strides, numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.pointwise_lowerings import elementwise

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor | tuple[LazyTensor, ...]]
# Bits below the point of a uniform number in a 16-bit float: with one more it could round up to 1.
_UNIFORM_BITS = {"float16": 11, "bfloat16": 8}
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
# An element's place is the counter of Philox, of which 32 bits are used.
_MOST_ELEMENTS = 2**32
# Half of float32's epsilon, as in torch: no logarithm is nearer to 0, so that no draw is 0.
_HALF_STEP = 2.0**-24


def _drawn(
    builder: GraphBuilder, call: OperatorCall, operator: str, dtype: str, *limits: int
) -> Callable[..., Term]:
    """Return a function from indices to a random number."""
    count = numel(call.sizes)
    if count.is_Integer and count > _MOST_ELEMENTS:
        raise call.refusal(f"more than {_MOST_ELEMENTS} numbers of one seed")
    seed, strides = builder.seed(), contiguous_strides(call.sizes)
    bounds = [builder.pool.constant(limit, "int64") for limit in limits]

    def at(indices: Indices) -> Term:
        place = sympy.expand(
            sum((i * s for i, s in zip(indices, strides, strict=True)), sympy.Integer(0))
        )
        # In the width of the kernel's indices; Philox takes the lowest 32 bits.
        return builder.pool.operate(
            operator, seed, builder.pool.index(place, "int32"), *bounds, dtype=dtype
        )

    return at


def _uniform_number(builder: GraphBuilder, call: OperatorCall) -> Callable[..., Term]:
    """Return a function from indices to a number in [0, 1) that the result's dtype can hold."""
    pool, bits = builder.pool, _UNIFORM_BITS.get(call.dtype)
    at = _drawn(builder, call, "rand", "float32")

    def rounded_down(indices: Indices) -> Term:
        if bits is None:
            return at(indices)
        scaled = pool.operate(
            "mul", at(indices), pool.constant(2.0**bits, "float32"), dtype="float32"
        )
        whole = pool.operate("floor", scaled, dtype="float32")
        return pool.operate("mul", whole, pool.constant(2.0**-bits, "float32"), dtype="float32")

    return rounded_down


def _result(builder: GraphBuilder, call: OperatorCall, at: Callable[[Indices], Term]) -> LazyTensor:
    return builder.lazy(
        call.sizes,
        call.dtype,
        lambda indices: builder.pool.cast(at(indices), call.dtype),
        call.origins,
    )


def _rand(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _check(call)
    return _result(builder, call, _uniform_number(builder, call))


def _randn(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _check(call)
    return _result(builder, call, _drawn(builder, call, "randn", "float32"))


def _randint(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    low, high = call.arguments.get("low", 0), call.arguments["high"]
    if not (isinstance(low, int) and isinstance(high, int)):
        raise call.refusal("its range is known at run time only")
    return _result(builder, call, _drawn(builder, call, "randint64", "int64", low, high))


def _uniform(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Draw from [from, to); what rounding would put at the upper end is at the lower."""
    _check(call)
    low, high = float(call.arguments.get("from", 0.0)), float(call.arguments.get("to", 1.0))
    pool, number = builder.pool, _drawn(builder, call, "rand", "float32")

    def at(indices: Indices) -> Term:
        scaled = _scaled(builder, number(indices), high - low, low, "float32")
        scaled = pool.cast(
            pool.operate("to_dtype", scaled, dtype=call.dtype, rounded=True), "float32"
        )
        # Rounding may reach the upper end, which the interval excludes.
        above = pool.operate("ge", scaled, pool.constant(high, "float32"), dtype="bool")
        return pool.operate("where", above, pool.constant(low, "float32"), scaled, dtype="float32")

    return _result(builder, call, at)


def _normal(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    _check(call)
    mean, deviation = float(call.arguments.get("mean", 0.0)), float(call.arguments.get("std", 1.0))
    number = _drawn(builder, call, "randn", "float32")
    return _result(
        builder, call, lambda indices: _scaled(builder, number(indices), deviation, mean, "float32")
    )


def _exponential(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Draw from the exponential distribution, never 0."""
    _check(call)
    pool, number, rate = (
        builder.pool,
        _drawn(builder, call, "rand", "float32"),
        float(call.arguments.get("lambd", 1.0)),
    )

    def at(indices: Indices) -> Term:
        rest = pool.operate("sub", pool.constant(1.0, "float32"), number(indices), dtype="float32")
        log = pool.operate("log", rest, dtype="float32")
        log = pool.operate("minimum", log, pool.constant(-_HALF_STEP, "float32"), dtype="float32")
        return pool.operate("truediv", log, pool.constant(-rate, "float32"), dtype="float32")

    return _result(builder, call, at)


def _bernoulli(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Draw 1 with a probability, which is a number, another tensor, or the argument itself."""
    pool, number = builder.pool, _drawn(builder, call, "rand", "float32")
    given: Any = call.arguments.get("p", call.arguments["self"])
    chance = elementwise(builder, call, [given], "float32", lambda term: term)

    def at(indices: Indices) -> Term:
        return pool.operate("lt", number(indices), chance.at(indices), dtype="bool")

    return _result(builder, call, at)


def _dropout(builder: GraphBuilder, call: OperatorCall) -> tuple[LazyTensor, ...]:
    """Write `native_dropout`: the input with elements set to 0 and the others scaled, and the mask
    of those that were kept.
    """
    source, pool, dtype = call.arguments["input"], builder.pool, call.dtype
    chance, train = float(call.arguments["p"]), call.arguments.get("train", True)
    if train is False or chance == 0:
        mask = builder.lazy(call.sizes, "bool", lambda _: pool.constant(1, "bool"), call.origins)
        return elementwise(builder, call, [source], dtype, lambda term: term), mask
    number = _drawn(builder, call, "rand", "float32")
    # With a chance of 1 nothing is kept; the scale would be infinite, and infinity times 0 NaN.
    scale = 0.0 if chance == 1 else 1.0 / (1.0 - chance)

    def kept(indices: Indices) -> Term:
        return pool.operate("ge", number(indices), pool.constant(chance, "float32"), dtype="bool")

    def at(indices: Indices) -> Term:
        product = pool.operate(
            "mul", pool.cast(kept(indices), dtype), source.at(indices), dtype=dtype
        )
        return pool.operate("mul", product, pool.constant(scale, dtype), dtype=dtype)

    origins = call.origins | source.origins
    return builder.lazy(call.sizes, dtype, at, origins), builder.lazy(
        call.sizes, "bool", kept, call.origins
    )


def _scaled(builder: GraphBuilder, term: Term, factor: float, added: float, dtype: str) -> Term:
    """Return a term times a factor plus a number."""
    pool = builder.pool
    product = pool.operate("mul", term, pool.constant(factor, dtype), dtype=dtype)
    return pool.operate("add", product, pool.constant(added, dtype), dtype=dtype)


def _check(call: OperatorCall) -> None:
    if call.dtype not in _FLOATS:
        raise call.refusal(f"random numbers of {call.dtype}")


RANDOM: dict[str, Lowering] = {
    "rand": _rand,
    "rand_like": _rand,
    "randn": _randn,
    "randn_like": _randn,
    "randint": _randint,
    "randint_like": _randint,
    "bernoulli": _bernoulli,
    "uniform": _uniform,
    "normal_functional": _normal,
    "exponential": _exponential,
    "native_dropout": _dropout,
}
