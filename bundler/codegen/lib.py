# SPDX-License-Identifier: Apache-2.0
"""Functions that generated kernels call, as `lib.maximum`: what Triton's language lacks, or
computes in another way than torch.

A kernel's module imports this one, so it is imported where kernels are compiled or interpreted, and
by nothing else of this package: it is the one module outside the toolchain that imports Triton.
Where Triton interprets, it gives it the functions of `libdevice`.

Element by element: integers (`floor_divide`, `remainder`, `shift_left`, `integer_power`), floats
(`maximum`, `sigmoid`, `one_plus_erf`, `frexp_mantissa`, `ldexp`) and `device_assert_then`.
Reductions, sorts, random numbers and the barrier of programs that share rows come from the modules
beside it, under their names.

Arguments of one call are tensors of one dtype unless a function says otherwise; a number is passed
as a tensor without dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.jit import constexpr_function

from bundler.codegen.lib_barriers import grid_barrier
from bundler.codegen.lib_random import rand, randint64, randn
from bundler.codegen.lib_reductions import (
    any_of,
    argmax,
    argmax_combine,
    argmin,
    argmin_combine,
    largest,
    last_of,
    maximum,
    minimum,
    product,
    smallest,
    softmax_combine,
    softmax_reduce,
    welford,
    welford_combine,
    welford_next,
    welford_two_pass,
    xor_sum,
)
from bundler.codegen.lib_search import bucketize, sort
from bundler.toolchain import tuner_toolchain

__all__ = [
    "any_of",
    "argmax",
    "argmax_combine",
    "argmin",
    "argmin_combine",
    "bucketize",
    "device_assert_then",
    "floor_divide",
    "floor_divide_floats",
    "frexp_exponent",
    "frexp_mantissa",
    "grid_barrier",
    "index_floor_divide",
    "index_power",
    "index_remainder",
    "integer_power",
    "largest",
    "last_of",
    "ldexp",
    "maximum",
    "minimum",
    "one_plus_erf",
    "product",
    "rand",
    "randint64",
    "randn",
    "remainder",
    "remainder_of_floats",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "smallest",
    "softmax_combine",
    "softmax_reduce",
    "sort",
    "truncated_divide",
    "truncated_remainder",
    "welford",
    "welford_combine",
    "welford_next",
    "welford_two_pass",
    "xor_sum",
]


@constexpr_function
def _unsigned(dtype):
    """Return the unsigned type of the same width."""
    return getattr(tl, f"uint{dtype.primitive_bitwidth}")


# ----------------------------------------------------------------------------------------- integers


@triton.jit
def _magnitude(a):
    """Return the absolute value as an unsigned integer, which holds that of the smallest signed one
    too.
    """
    return tl.where(a < 0, 0 - a, a).to(_unsigned(a.dtype))


@triton.jit
def truncated_divide(a, b):
    """Return the quotient of integers rounded towards zero, and 0 where `b` is 0.

    The smallest integer divided by -1 is itself: it wraps. Signed numbers are divided as unsigned
    ones: the compiler takes the quotients of consecutive numbers for equal in groups, which is
    wrong for truncated quotients around zero.
    """
    if a.dtype.is_int_unsigned():
        quotient = a // tl.where(b == 0, 1, b)
    else:
        magnitude = _magnitude(a) // _magnitude(tl.where(b == 0, 1, b))
        signed = magnitude.to(a.dtype)
        quotient = tl.where((a < 0) != (b < 0), 0 - signed, signed)
    return tl.where(b == 0, 0, quotient).to(a.dtype)


@triton.jit
def floor_divide(a, b):
    """Return the quotient of integers rounded towards minus infinity, as Python's `//`, and 0 where
    `b` is 0.
    """
    if a.dtype.is_int_unsigned():
        quotient = a // tl.where(b == 0, 1, b)
    else:
        negative = ((a < 0) != (b < 0)) & (a != 0)
        # floor(-m / n) is -1 - (m - 1) / n, which needs one division and no larger type.
        magnitude = _magnitude(a)
        magnitude = tl.where(negative, magnitude - 1, magnitude)
        signed = (magnitude // _magnitude(tl.where(b == 0, 1, b))).to(a.dtype)
        quotient = tl.where(negative, -1 - signed, signed)
    return tl.where(b == 0, 0, quotient).to(a.dtype)


@triton.jit
def truncated_remainder(a, b):
    """Return what `truncated_divide` leaves: it has the sign of `a`, as C's `%`; `a` itself where
    `b` is 0.
    """
    return a - truncated_divide(a, b) * b


@triton.jit
def remainder(a, b):
    """Return what `floor_divide` leaves: it has the sign of `b`, as Python's `%`; `a` itself where
    `b` is 0.
    """
    return a - floor_divide(a, b) * b


@triton.jit
def shift_left(a, count):
    """Return `a` shifted to the left; 0 where the count is negative or not below the width, as
    torch on a CPU.
    """
    inside = (count >= 0) & (count < a.dtype.primitive_bitwidth)
    return tl.where(inside, a << tl.where(inside, count, 0).to(a.dtype), 0).to(a.dtype)


@triton.jit
def shift_right(a, count):
    """Return `a` shifted to the right, signed numbers with their sign; where the count is negative
    or not below the width, all bits are shifted out.
    """
    width: tl.constexpr = a.dtype.primitive_bitwidth
    inside = (count >= 0) & (count < width)
    shifted = a >> tl.where(inside, count, width - 1).to(a.dtype)
    if a.dtype.is_int_unsigned():
        shifted = tl.where(inside, shifted, 0).to(a.dtype)
    return shifted


@triton.jit
def integer_power(base, exponent):
    """Return the power of integers by repeated squaring, modulo the width, as torch.

    Below an exponent of 0 there is a power of 1 and -1 only, and 0 for every other base.
    """
    width: tl.constexpr = exponent.dtype.primitive_bitwidth
    bits = exponent.to(_unsigned(exponent.dtype))
    result = tl.full(exponent.shape, 1, base.dtype)
    factor = base
    for _ in tl.static_range(width):
        result = tl.where((bits & 1) != 0, result * factor, result)
        bits = bits >> 1
        factor = factor * factor
    if exponent.dtype.is_int_signed():
        odd = (exponent & 1) != 0
        inverse = tl.where(base == 1, 1, tl.where(base == -1, tl.where(odd, -1, 1), 0))
        result = tl.where(exponent < 0, inverse.to(base.dtype), result)
    return result


@triton.jit
def index_floor_divide(a, b):
    """Return `floor_divide` of index expressions, of which one may be a number and their types may
    differ.
    """
    return floor_divide(a + b * 0, b + a * 0)


@triton.jit
def index_remainder(a, b):
    """Return `remainder` of index expressions, of which one may be a number and their types may
    differ.
    """
    return remainder(a + b * 0, b + a * 0)


@triton.jit
def index_wrapped(a, b):
    """Return `a % b` of index expressions, where 0 <= a < 2 * b."""
    return tl.where(a < b, a, a - b)


@triton.jit
def index_power(base, exponent):
    """Return `integer_power` of index expressions, of which one may be a number and their types may
    differ.
    """
    return integer_power(base + exponent * 0, exponent + base * 0)


@triton.jit
def sign(x):
    """Return -1, 0 or 1 in the dtype of `x`; 0 for NaN, as torch."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


# ------------------------------------------------------------------------------------------- floats


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) with the library's exponential, in the width of `x`."""
    return 1.0 / (1.0 + libdevice.exp(0.0 - x))


@triton.jit
def one_plus_erf(x):
    """Return 1 + erf(x) of float32, by half the instructions and registers of the library's erf.

    The complement of |x| is a power of 2, whose exponent is |x| times a polynomial: the minimax of
    log2(erfc(x)) / x up to 4.2, by errors of 1 + erf(x). It is off by 2.8e-7 at most, and below by
    1.5e-4 of itself, where a sum of 1 and erf(x) has no digits left.
    """
    far = tl.abs(x)
    power = far * -1.1564699889277108e-05 + 0.00014514972281176597
    power = far * power - 0.0004493938176892698
    power = far * power - 0.00255734845995903
    power = far * power + 0.029850579798221588
    power = far * power - 0.14920677244663239
    power = far * power - 0.9182688593864441
    power = far * power - 1.6279181241989136
    beyond = tl.exp2(far * power)
    return tl.where(x < 0, beyond, 2.0 - beyond)


@triton.jit
def remainder_of_floats(a, b):
    """Return the remainder with the sign of `b`, as Python's `%`; NaN where `b` is 0."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide_floats(a, b):
    """Return the floor of the exact quotient, as Python's `//`; where `b` is 0, `a / b`.

    The quotient is computed from what is left once the remainder is taken off, so that it is whole
    but for rounding: the floor of `a / b` can be one too large.
    """
    rest = libdevice.fmod(a, b)
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1.0, quotient)
    below = tl.floor(quotient)
    whole = tl.where(quotient - below > 0.5, below + 1.0, below)
    zero = libdevice.copysign(tl.zeros_like(quotient), a / b)
    return tl.where(b == 0, a / b, tl.where(quotient == 0, zero, whole))


@triton.jit
def _exponent_field(x):
    """Return the biased exponent of a float as int32, after subnormal numbers were made normal, and
    how much that added.
    """
    if x.dtype.primitive_bitwidth == 64:
        small = tl.abs(x) < 2.2250738585072014e-308
        bits = tl.where(small, x * 18014398509481984.0, x).to(tl.int64, bitcast=True)
        field = ((bits >> 52) & 0x7FF).to(tl.int32)
        added = tl.where(small, 54, 0)
    else:
        small = tl.abs(x) < 1.1754943508222875e-38
        bits = tl.where(small, x * 33554432.0, x).to(tl.int32, bitcast=True)
        field = (bits >> 23) & 0xFF
        added = tl.where(small, 25, 0)
    return bits, field, added


@triton.jit
def frexp_exponent(x):
    """Return the int32 exponent of which `frexp_mantissa` is the mantissa; 0 for zero, infinities
    and NaN.
    """
    _, field, added = _exponent_field(x)
    special: tl.constexpr = 0x7FF if x.dtype.primitive_bitwidth == 64 else 0xFF
    bias: tl.constexpr = 1022 if x.dtype.primitive_bitwidth == 64 else 126
    return tl.where((x == 0) | (field == special), 0, field - bias - added)


@triton.jit
def frexp_mantissa(x):
    """Return the number of magnitude 0.5 to 1 that times a power of two is `x`; zero, infinities
    and NaN are their own.
    """
    bits, field, _ = _exponent_field(x)
    if x.dtype.primitive_bitwidth == 64:
        half = ((bits & -0x7FF0000000000001) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
        whole = (x == 0) | (field == 0x7FF)
    else:
        half = ((bits & -0x7F800001) | 0x3F000000).to(tl.float32, bitcast=True)
        whole = (x == 0) | (field == 0xFF)
    return tl.where(whole, x, half)


@triton.jit
def ldexp(x, exponent):
    """Return `x` times two to the power of an int64 `exponent`, rounded once."""
    # Beyond these every float is 0 or infinite already, and they fit into the library's int32.
    near = tl.minimum(tl.maximum(exponent, -5000), 5000)
    return libdevice.ldexp(x, near.to(tl.int32))


# ------------------------------------------------------------------------------------------- checks


@triton.jit
def device_assert_then(condition, message: tl.constexpr, value):
    """Return `value` after the condition was asserted for each element, where the kernel was
    compiled with assertions.
    """
    tl.device_assert(condition, message)
    return value


# Here, because every generated module imports this one before its kernel can run.
tuner_toolchain.prepare_interpreter(sign)
