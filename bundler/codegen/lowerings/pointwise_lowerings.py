# SPDX-License-Identifier: Apache-2.0
"""Operators that compute each element by itself: `POINTWISE` maps their names to functions
(builder, call) -> `LazyTensor`.

Arguments are broadcast to the sizes of the result and converted to one dtype: that of the result
(`_in_result_dtype`), or that which torch promotes the operands to (`_in_operand_dtype`, for
comparisons).  `lowerings` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sympy

from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import broadcast

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]
Compute = Callable[..., Term]
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def elementwise(
    builder: GraphBuilder,
    call: OperatorCall,
    values: list[Any],
    dtype: str,
    compute: Callable[..., Term],
) -> LazyTensor:
    """Return a tensor whose elements are computed of the elements of others.

    Args:
        builder: of the program.
        call: says sizes and origins of the result.
        values: tensors and numbers; each is broadcast and converted.
        dtype: what they are converted to; empty for what each has.
        compute: from terms to a term.
    """
    spread = [
        broadcast(value, call.sizes) if isinstance(value, LazyTensor) else value for value in values
    ]
    origins = frozenset().union(
        call.origins, *(v.origins for v in spread if isinstance(v, LazyTensor))
    )

    def at(indices: Indices) -> Term:
        return compute(
            *(
                _value(builder, value, indices, dtype or call.dtype, keep=not dtype)
                for value in spread
            )
        )

    return builder.lazy(call.sizes, call.dtype, at, origins)


def _value(builder: GraphBuilder, value: Any, indices: Indices, dtype: str, *, keep: bool) -> Term:
    if isinstance(value, LazyTensor):
        term = value.at(indices)
        return term if keep else builder.pool.cast(term, dtype)
    return builder.pool.constant(
        complex(value).real if isinstance(value, complex) else value, dtype
    )


def operands(call: OperatorCall) -> list[Any]:
    """Return the tensors and numbers of a call that are operands, in order."""
    kinds = (LazyTensor, int, float, bool, sympy.Expr)
    return [
        v for name, v in call.arguments.items() if isinstance(v, kinds) and name not in _NO_OPERANDS
    ]


_NO_OPERANDS = frozenset(
    {"alpha", "rounding_mode", "dtype", "approximate", "value", "non_blocking", "copy", "decimals"}
)


def _result(builder: GraphBuilder, call: OperatorCall, term: Term) -> Term:
    return builder.pool.cast(term, call.dtype)


def _in_result_dtype(builder: GraphBuilder, call: OperatorCall, *, operator: str) -> LazyTensor:
    """Compute in the dtype of the result."""
    dtype = call.dtype
    return elementwise(
        builder,
        call,
        operands(call),
        dtype,
        lambda *terms: builder.pool.operate(operator, *terms, dtype=dtype),
    )


def _in_operand_dtype(
    builder: GraphBuilder, call: OperatorCall, *, operator: str, dtype: str = "bool"
) -> LazyTensor:
    """Compute in the dtype of the operands; the result has another one."""
    # Comparisons look at the 16 bits that torch has, not at the float32 of a register.
    pool = builder.pool
    return elementwise(
        builder,
        call,
        operands(call),
        call.operand_dtype or call.dtype,
        lambda *terms: _result(
            builder, call, pool.operate(operator, *map(pool.rounded, terms), dtype=dtype)
        ),
    )


def _in_bool(builder: GraphBuilder, call: OperatorCall, *, operator: str) -> LazyTensor:
    return elementwise(
        builder,
        call,
        operands(call),
        "bool",
        lambda *terms: _result(builder, call, builder.pool.operate(operator, *terms, dtype="bool")),
    )


def _scaled(builder: GraphBuilder, call: OperatorCall, *, operator: str) -> LazyTensor:
    """Write a sum or difference whose second operand is multiplied by `alpha`; of floats the
    product is not rounded, as in torch's kernels.
    """
    alpha, dtype = call.arguments.get("alpha", 1), call.dtype
    pool = builder.pool

    def compute(left: Term, right: Term) -> Term:
        # One rounding in place of two, as in torch's kernels.
        if alpha != 1 and dtype in _FLOATS:
            factor = pool.constant(-alpha if operator == "sub" else alpha, dtype)
            return pool.operate("fma", right, factor, left, dtype=dtype)
        if alpha != 1:
            right = pool.operate("mul", right, pool.constant(alpha, dtype), dtype=dtype)
        return pool.operate(operator, left, right, dtype=dtype)

    values = operands(call)
    return elementwise(
        builder, call, values[::-1] if call.operator == "rsub" else values, dtype, compute
    )


def _divided(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    mode, dtype, pool = call.arguments.get("rounding_mode"), call.dtype, builder.pool
    floating = dtype in _FLOATS
    # prims.div truncates integers, aten.div makes floats of them.
    if call.namespace == "prims" and not floating:
        mode = "trunc"
    if mode is None:
        # No rounding mode: a true quotient, which torch has in floats.
        return _in_result_dtype(builder, call, operator="truediv")
    if mode == "floor":
        return _in_result_dtype(builder, call, operator="floordiv")
    if not floating:
        return _in_result_dtype(builder, call, operator="truncdiv")
    return elementwise(
        builder,
        call,
        operands(call),
        dtype,
        lambda a, b: pool.operate("trunc", pool.operate("truediv", a, b, dtype=dtype), dtype=dtype),
    )


def _power(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    values, pool, dtype = operands(call), builder.pool, call.dtype
    exponent = values[1]
    if (
        isinstance(exponent, (int, float))
        and exponent in {0, 1, 2, 3, 0.5, -1, -0.5}
        and dtype in _FLOATS
    ):
        return elementwise(
            builder,
            call,
            values[:1],
            dtype,
            lambda term: _known_power(builder, term, float(exponent)),
        )
    if isinstance(exponent, int) and exponent in {1, 2, 3}:
        return elementwise(
            builder,
            call,
            values[:1],
            dtype,
            lambda term: _known_power(builder, term, float(exponent)),
        )
    return elementwise(
        builder, call, values, dtype, lambda *terms: pool.operate("pow", *terms, dtype=dtype)
    )


def _known_power(builder: GraphBuilder, term: Term, exponent: float) -> Term:
    pool, dtype = builder.pool, term.dtype
    if exponent == 0:
        return pool.constant(1, dtype)
    if exponent in {1.0, 2.0, 3.0}:
        result = term
        for _ in range(int(exponent) - 1):
            result = pool.operate("mul", result, term, dtype=dtype)
        return result
    root = term if exponent == -1 else pool.operate("sqrt", term, dtype=dtype)
    # An exponent of a half is the root itself; the others are its, or the number's, reciprocal.
    return (
        root
        if exponent == 0.5  # noqa: PLR2004
        else pool.operate("reciprocal", root, dtype=dtype)
    )


def _where(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, dtype = builder.pool, call.dtype
    condition, left, right = (call.arguments.get(n) for n in ("condition", "self", "other"))
    if call.namespace == "prims":
        condition, left, right = (call.arguments.get(n) for n in ("pred", "a", "b"))

    def compute(chosen: Term, one: Term, two: Term) -> Term:
        return pool.operate(
            "where",
            pool.cast(chosen, "bool"),
            pool.cast(one, dtype),
            pool.cast(two, dtype),
            dtype=dtype,
        )

    return elementwise(builder, call, [condition, left, right], "", compute)


def _clamped(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, dtype, given = builder.pool, call.dtype, call.arguments
    bounds = [
        (op, given[name])
        for op, name in (("maximum", "min"), ("minimum", "max"))
        if given.get(name) is not None
    ]

    def compute(term: Term, *limits: Term) -> Term:
        # First the lower bound, then the upper one, which wins where they cross, as in torch.
        for (operator, _), limit in zip(bounds, limits, strict=True):
            term = pool.operate(operator, term, limit, dtype=dtype)
        return term

    return elementwise(
        builder, call, [given["self"], *(bound for _, bound in bounds)], dtype, compute
    )


def _converted(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Convert, or copy where the dtype stays; `copy` takes what it is to be like first, then what
    is copied.
    """
    source = call.arguments.get("src", call.arguments.get("self", call.arguments.get("a")))
    if call.dtype in _FLOATS:
        return elementwise(builder, call, [source], call.dtype, lambda term: term)
    # To integers and bools a 16-bit float is rounded first: 0.9999 may be 1.0 in 16 bits.
    pool = builder.pool
    return elementwise(
        builder, call, [source], "", lambda term: pool.cast(pool.rounded(term), call.dtype)
    )


def _filled(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    name = call.operator
    value: Any = call.arguments.get(
        "fill_value", call.arguments.get("value", call.arguments.get("s", call.arguments.get("a")))
    )
    if value is None:
        value = 1 if "ones" in name else 0
    if isinstance(value, LazyTensor):
        raise call.refusal("the value to fill with is a tensor")
    if call.dtype == "complex64":
        raise call.refusal("complex numbers")
    return elementwise(builder, call, [value], call.dtype, lambda term: term)


def _counted(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Count from a start by a step: `prims.iota` and `aten.arange`."""
    given, pool, dtype = call.arguments, builder.pool, call.dtype
    start, step = given.get("start", 0), given.get("step", 1)
    if dtype in _FLOATS or any(_is_float(value) for value in (start, step)):
        return _counted_in_floats(builder, call, start, step)

    def at(indices: Indices) -> Term:
        return pool.cast(pool.index(sympy.expand(indices[0] * step + start)), dtype)

    return builder.lazy(call.sizes, dtype, at, call.origins)


def _counted_in_floats(
    builder: GraphBuilder, call: OperatorCall, start: Any, step: Any
) -> LazyTensor:
    """Count in the dtype of the result, halves in float32; integers that count by a fraction are
    those of float64.
    """
    pool = builder.pool
    wide = (
        call.dtype
        if call.dtype in {"float32", "float64"}
        else "float32"
        if call.dtype in _FLOATS
        else "float64"
    )

    def at(indices: Indices) -> Term:
        # From the index, not from the number before: no rounding error is carried along.
        number = pool.cast(pool.index(indices[0], "int64"), wide)
        if step != 1:
            number = pool.operate("mul", number, pool.constant(step, wide), dtype=wide)
        if start != 0:
            number = pool.operate("add", number, pool.constant(start, wide), dtype=wide)
        return pool.cast(number, call.dtype)

    return builder.lazy(call.sizes, call.dtype, at, call.origins)


def _is_float(value: Any) -> bool:
    """Whether a number is a float, or the symbol of one that the host computes."""
    return isinstance(value, float) or (isinstance(value, sympy.Expr) and not value.is_integer)


def _finite(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool = builder.pool

    def compute(term: Term) -> Term:
        exact = pool.rounded(term)
        odd = (pool.operate(name, exact, dtype="bool") for name in ("isnan", "isinf"))
        return pool.operate(
            "logical_not", pool.operate("logical_or", *odd, dtype="bool"), dtype="bool"
        )

    return elementwise(builder, call, operands(call), call.operand_dtype or "float32", compute)


def _times_power_of_two(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Multiply by two to the power of the second operand: a whole one changes the exponent alone,
    so nothing between overflows.
    """
    pool, dtype = builder.pool, call.dtype

    def compute(term: Term, exponent: Term) -> Term:
        scaled = pool.cast(term, dtype)
        if exponent.dtype not in _FLOATS:
            return pool.operate("ldexp", scaled, exponent, dtype=dtype)
        power = pool.operate("exp2", exponent, dtype=exponent.dtype)
        return pool.operate("mul", scaled, pool.cast(power, dtype), dtype=dtype)

    return elementwise(builder, call, operands(call), "", compute)


def _numbers_first(builder: GraphBuilder, call: OperatorCall, *, operator: str) -> LazyTensor:
    """Choose the greater or the smaller operand, and of a number and NaN the number."""
    pool, dtype = builder.pool, call.dtype

    def compute(a: Term, b: Term) -> Term:
        # The operator propagates NaN, which here loses against a number.
        chosen = pool.operate(operator, a, b, dtype=dtype)
        chosen = pool.operate(
            "where", pool.operate("isnan", b, dtype="bool"), a, chosen, dtype=dtype
        )
        return pool.operate("where", pool.operate("isnan", a, dtype="bool"), b, chosen, dtype=dtype)

    return elementwise(builder, call, operands(call), dtype, compute)


def _masked_fill(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    pool, dtype = builder.pool, call.dtype
    given = call.arguments

    def compute(term: Term, mask: Term, value: Term) -> Term:
        return pool.operate(
            "where", pool.cast(mask, "bool"), pool.cast(value, dtype), term, dtype=dtype
        )

    return elementwise(builder, call, [given["self"], given["mask"], given["value"]], "", compute)


# Computed in the dtype of the result; our operator has the same name.
_PLAIN = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan asinh acosh"
    " atanh erf erfc erfinv lgamma rsqrt sqrt sigmoid reciprocal relu abs neg sign floor ceil trunc"
    " square bitwise_not bitwise_and bitwise_or bitwise_xor maximum minimum atan2 hypot copysign"
    " fmod remainder mul fma"
)
_RENAMED = {
    "mul": "mul",
    "bitwise_left_shift": "bitwise_left_shift",
    "bitwise_right_shift": "bitwise_right_shift",
    "__lshift__": "lshift",
    "__rshift__": "rshift",
    "floor_divide": "floordiv",
    "special_i0": "i0",
    "special_i1": "i1",
    "special_erfcx": "erfcx",
    "special_bessel_j0": "bessel_j0",
    "special_bessel_j1": "bessel_j1",
    "special_bessel_y0": "bessel_y0",
    "special_bessel_y1": "bessel_y1",
    "i0": "i0",
    "special_modified_bessel_i0": "modified_bessel_i0",
    "special_modified_bessel_i1": "modified_bessel_i1",
    "bessel_i0": "i0",
    "bessel_i1": "i1",
    "bessel_j0": "bessel_j0",
    "bessel_j1": "bessel_j1",
    "multiply": "mul",
    "erf_inv": "erfinv",
    "erfcx": "erfcx",
    "shift_left": "lshift",
    "shift_right_arithmetic": "rshift",
}
_SOURCES = (
    "full full_like zeros zeros_like ones ones_like empty empty_like new_full new_zeros new_ones"
    " new_empty empty_strided new_empty_strided empty_permuted scalar_tensor"
)
_COPIES = (
    "positive _to_copy convert_element_type clone alias detach contiguous lift_fresh_copy copy to"
    " device_put lift_fresh"
)

POINTWISE: dict[str, Lowering] = {
    **{name: partial(_in_result_dtype, operator=name) for name in _PLAIN.split()},
    **{name: partial(_in_result_dtype, operator=ours) for name, ours in _RENAMED.items()},
    **{
        name: partial(_in_operand_dtype, operator=name)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit")
    },
    **{
        name: partial(_in_bool, operator=name)
        for name in ("logical_not", "logical_and", "logical_or", "logical_xor")
    },
    "add": partial(_scaled, operator="add"),
    "sub": partial(_scaled, operator="sub"),
    "subtract": partial(_scaled, operator="sub"),
    "rsub": partial(_scaled, operator="sub"),
    **dict.fromkeys(("div", "divide", "true_divide"), _divided),
    "pow": _power,
    "where": _where,
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": _clamped,
    "isfinite": _finite,
    "ldexp": _times_power_of_two,
    "fmax": partial(_numbers_first, operator="maximum"),
    "fmin": partial(_numbers_first, operator="minimum"),
    "masked_fill": _masked_fill,
    "iota": _counted,
    "arange": _counted,
    **dict.fromkeys(_SOURCES.split(), _filled),
    **dict.fromkeys(_COPIES.split(), _converted),
}
