# SPDX-License-Identifier: Apache-2.0
"""Operators on the representation of numbers: frexp, rounding to decimals, bitcasts between widths,
assembly.

`SPECIAL` maps their names to functions (builder, call) -> `LazyTensor`, or one for each result;
`lowerings` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy

from bundler.codegen.loops.data_types import data_type
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.pointwise_lowerings import elementwise
from bundler.codegen.lowerings.view_lowerings import broadcast

Results = LazyTensor | tuple[LazyTensor, ...]
Lowering = Callable[[GraphBuilder, OperatorCall], Results]


def _frexp(builder: GraphBuilder, call: OperatorCall) -> Results:
    source, pool = call.arguments["self"], builder.pool
    mantissa = elementwise(
        builder,
        call,
        [source],
        call.dtype,
        lambda t: pool.operate("frexp_mantissa", t, dtype=call.dtype),
    )

    # Each result is computed by itself, from the same element.
    def at(indices: Indices) -> Term:
        return pool.operate("frexp_exponent", source.at(indices), dtype="int32")

    return mantissa, builder.lazy(call.sizes, "int32", at, call.origins | source.origins)


def _rounded(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Round to decimals as torch does: scale, round half to even, unscale."""
    decimals, dtype, pool = int(call.arguments.get("decimals", 0)), call.dtype, builder.pool
    source = call.arguments["self"]
    if decimals == 0 or data_type(dtype).is_integer:
        if decimals != 0:
            raise call.refusal("rounds integers to decimals")
        return elementwise(
            builder, call, [source], dtype, lambda t: pool.operate("round", t, dtype=dtype)
        )
    scale = pool.constant(10.0 ** abs(decimals), dtype)
    before, after = ("mul", "truediv") if decimals > 0 else ("truediv", "mul")

    def compute(term: Term) -> Term:
        whole = pool.operate("round", _quotient(builder, before, term, scale), dtype=dtype)
        return _quotient(builder, after, whole, scale)

    return elementwise(builder, call, [source], dtype, compute)


def _quotient(builder: GraphBuilder, operator: str, one: Term, other: Term) -> Term:
    options = {"precise": True} if operator == "truediv" else {}
    return builder.pool.operate(operator, one, other, dtype=one.dtype, **options)


def _next_after(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Step to the next float in the direction of another; one of 16 bits is an integer step of its
    bits, whose order is that of the numbers.
    """
    dtype, pool = call.dtype, builder.pool
    given = [call.arguments["self"], call.arguments["other"]]
    if not data_type(dtype).is_half:
        return elementwise(
            builder, call, given, dtype, lambda a, b: pool.operate("nextafter", a, b, dtype=dtype)
        )

    def both(operator: str, one: Term, other: Term) -> Term:
        return pool.operate(operator, one, other, dtype="bool")

    def chosen(condition: Term, one: Term, other: Term) -> Term:
        return pool.operate("where", condition, one, other, dtype="int16")

    def compute(one: Term, other: Term) -> Term:
        # The step starts from the 16-bit number that torch has, not from the float32 of a register.
        one, other = (
            pool.operate("to_dtype", term, dtype=dtype, rounded=True) for term in (one, other)
        )
        zero, up, down = (
            pool.constant(0.0, dtype),
            pool.constant(1, "int16"),
            pool.constant(-1, "int16"),
        )
        bits = _bits(builder, one, "int16")
        away = pool.operate("eq", both("lt", one, other), both("gt", one, zero), dtype="bool")
        stepped = pool.operate("add", bits, chosen(away, up, down), dtype="int16")
        # From either zero the step leads to the smallest number of the other argument's sign.
        least = chosen(both("lt", other, zero), pool.constant(-(2**15) + 1, "int16"), up)
        stepped = chosen(both("eq", one, zero), least, stepped)
        stepped = chosen(both("eq", one, other), _bits(builder, other, "int16"), stepped)
        number = _bits(builder, stepped, dtype)
        odd = pool.operate(
            "logical_or",
            *(pool.operate("isnan", t, dtype="bool") for t in (one, other)),
            dtype="bool",
        )
        return pool.operate("where", odd, pool.constant(math.nan, dtype), number, dtype=dtype)

    return elementwise(builder, call, given, dtype, compute)


# --------------------------------------------------------------------------------------------- Bits


def _reinterpreted(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """See memory in another dtype: of wider elements each becomes several, and of narrower ones
    several become one.
    """
    source, dtype, pool = call.arguments["self"], call.dtype, builder.pool
    old, new = data_type(source.dtype), data_type(dtype)
    if old.name == new.name:
        return elementwise(builder, call, [source], dtype, lambda term: term)
    if old.bits == new.bits:
        return elementwise(
            builder, call, [source], "", lambda t: pool.operate("to_dtype_bitcast", t, dtype=dtype)
        )
    if "bool" in {old.name, new.name}:
        raise call.refusal("bools as parts of wider numbers")
    return _parts(builder, call, source) if old.bits > new.bits else _joined(builder, call, source)


def _bits(builder: GraphBuilder, term: Term, dtype: str) -> Term:
    return (
        term if term.dtype == dtype else builder.pool.operate("to_dtype_bitcast", term, dtype=dtype)
    )


def _parts(builder: GraphBuilder, call: OperatorCall, source: LazyTensor) -> LazyTensor:
    pool, wide, narrow = builder.pool, data_type(source.dtype).bits, data_type(call.dtype).bits
    count = sympy.Integer(wide // narrow)
    whole, part = f"uint{wide}", f"uint{narrow}"

    def at(indices: Indices) -> Term:
        *outer, last = indices
        bits = _bits(builder, source.at((*outer, FloorDiv(last, count))), whole)
        place = pool.index(ModularIndexing(last, sympy.Integer(1), count) * narrow, "int32")
        shifted = pool.operate("rshift", bits, pool.cast(place, whole), dtype=whole)
        return _bits(builder, pool.cast(shifted, part), call.dtype)

    return builder.lazy(call.sizes, call.dtype, at, call.origins | source.origins)


def _joined(builder: GraphBuilder, call: OperatorCall, source: LazyTensor) -> LazyTensor:
    pool, narrow, wide = builder.pool, data_type(source.dtype).bits, data_type(call.dtype).bits
    whole, part, count = f"uint{wide}", f"uint{narrow}", wide // narrow

    def at(indices: Indices) -> Term:
        *outer, last = indices
        pieces = []
        for number in range(count):
            bits = _bits(builder, source.at((*outer, last * count + number)), part)
            amount = pool.constant(number * narrow, whole)
            pieces.append(pool.operate("lshift", pool.cast(bits, whole), amount, dtype=whole))
        together = reduce(lambda a, b: pool.operate("bitwise_or", a, b, dtype=whole), pieces)
        return _bits(builder, together, call.dtype)

    return builder.lazy(call.sizes, call.dtype, at, call.origins | source.origins)


# ----------------------------------------------------------------------------------------- Assembly


def _assembly(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Write torch's higher-order operator; a build for a target that has another instruction set
    refuses the program.
    """
    given: dict[str, Any] = dict(call.keywords)
    options = {
        "asm": given["asm_str"],
        "constraints": given["constraints"],
        "is_pure": bool(given.get("is_pure", True)),
        "pack": int(given.get("pack", 1)),
    }
    tensors = [broadcast(tensor, call.sizes) for tensor in call.positional]
    origins = call.origins.union(*(tensor.origins for tensor in tensors))

    def at(indices: Indices) -> Term:
        terms = [tensor.at(indices) for tensor in tensors]
        return builder.pool.operate("inline_asm_elementwise", *terms, dtype=call.dtype, **options)

    return builder.lazy(call.sizes, call.dtype, at, origins)


SPECIAL: dict[str, Lowering] = {
    "frexp": _frexp,
    "nextafter": _next_after,
    "round": _rounded,
    "view_dtype": _reinterpreted,
    "inline_asm_elementwise": _assembly,
}
