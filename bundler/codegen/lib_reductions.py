# SPDX-License-Identifier: Apache-2.0
"""Reductions of generated kernels: extremes that propagate NaN, arguments of extremes, products,
variances and softmax.

Each has a function that combines two partial results, which a looped reduction applies to its
accumulators, and one that reduces an axis. `bundler.codegen.lib` shows them to kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.jit import constexpr_function


@constexpr_function
def integer_of_width(dtype):
    """Return the signed integer type of the same width."""
    return getattr(tl, f"int{max(8, dtype.primitive_bitwidth)}")


@triton.jit
def maximum(a, b):
    """Return the larger, and NaN where either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """Return the smaller, and NaN where either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(values, axis: tl.constexpr):
    """Return the maximum along an axis, NaN where any value is NaN."""
    return tl.reduce(values, axis, maximum)


@triton.jit
def smallest(values, axis: tl.constexpr):
    """Return the minimum along an axis, NaN where any value is NaN."""
    return tl.reduce(values, axis, minimum)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def product(values, axis: tl.constexpr):
    """Return the product along an axis, in the dtype of the values."""
    return tl.reduce(values, axis, _times)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def any_of(values, axis: tl.constexpr):
    """Return whether any bool along an axis is true."""
    return tl.reduce(values, axis, _or)


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def xor_sum(values, axis: tl.constexpr):
    """Return the exclusive or of integers along an axis."""
    return tl.reduce(values, axis, _xor)


@triton.jit
def last_of(values, last, axis: tl.constexpr):
    """Return along an axis the value of the one lane for which `last` holds, bit for bit; the axis
    keeps a size of 1.
    """
    bits = values.to(integer_of_width(values.dtype), bitcast=True)
    found = tl.reduce(tl.where(last, bits, 0), axis, _or, keep_dims=True)
    return found.to(values.dtype, bitcast=True)


# ---------------------------------------------------------------------------- arguments of extremes


@triton.jit
def argmax_combine(value, index, other_value, other_index):
    """Return the larger of two (value, index); NaN is larger than any number, and of equal values
    the lower index counts.
    """
    # A value differs from itself only where it is NaN; of integers the compiler drops the
    # comparison.
    nan = value != value
    other_nan = other_value != other_value
    first = (value > other_value) | (nan & (other_nan == 0))
    equal = (value == other_value) | (nan & other_nan)
    first = first | (equal & (index < other_index))
    return tl.where(first, value, other_value), tl.where(first, index, other_index)


@triton.jit
def argmin_combine(value, index, other_value, other_index):
    """Return the smaller of two (value, index); NaN is smaller than any number, and of equal values
    the lower index counts.
    """
    nan = value != value
    other_nan = other_value != other_value
    first = (value < other_value) | (nan & (other_nan == 0))
    equal = (value == other_value) | (nan & other_nan)
    first = first | (equal & (index < other_index))
    return tl.where(first, value, other_value), tl.where(first, index, other_index)


@triton.jit
def argmax(values, indices, axis: tl.constexpr):
    """Return the maximum along an axis and its lowest index, those of the first NaN where there is
    one.
    """
    return tl.reduce((values, indices), axis, argmax_combine)


@triton.jit
def argmin(values, indices, axis: tl.constexpr):
    """Return the minimum along an axis and its lowest index, those of the first NaN where there is
    one.
    """
    return tl.reduce((values, indices), axis, argmin_combine)


# ----------------------------------------------------------------------------- means and deviations


@triton.jit
def welford_next(value, mean, m2, weight, first):
    """Return mean, sum of squared deviations and weight after one more value; where `first`, what
    was there before does not count.
    """
    if first:
        new_mean = value
        new_m2 = tl.zeros_like(m2)
        new_weight = tl.full(weight.shape, 1, weight.dtype)
    else:
        new_weight = weight + 1
        delta = value - mean
        new_mean = mean + delta / new_weight
        new_m2 = m2 + delta * (value - new_mean)
    return new_mean, new_m2, new_weight


@triton.jit
def welford_combine(mean, m2, weight, other_mean, other_m2, other_weight):
    """Return mean, sum of squared deviations and weight of two groups together (Chan, Golub and
    LeVeque).

    Two groups without weight make one without weight. Equal means differ by nothing, also where
    both are infinite.
    """
    total = weight + other_weight
    share = tl.where(total == 0, 0.0, other_weight / tl.where(total == 0, 1.0, total))
    delta = tl.where(mean == other_mean, 0.0, other_mean - mean)
    return mean + delta * share, m2 + other_m2 + delta * delta * weight * share, total


@triton.jit
def welford(mean, m2, weight, axis: tl.constexpr):
    """Return mean, sum of squared deviations and weight of the groups along an axis, combined in
    pairs.
    """
    return tl.reduce((mean, m2, weight), axis, welford_combine)


@triton.jit
def welford_two_pass(values, mask, count, axis: tl.constexpr):
    """Return mean, sum of squared deviations and weight of the values along an axis, from two sums.

    Lanes whose mask is false do not count; `mask` may be None. `count` is how many lanes count, in
    the values' dtype.
    """
    if mask is None:
        present = values
    else:
        present = tl.where(mask, values, 0.0)
    total = tl.sum(present, axis)
    mean = total / count
    deviation = values - tl.expand_dims(mean, axis)
    if mask is not None:
        deviation = tl.where(mask, deviation, 0.0)
    m2 = tl.sum(deviation * deviation, axis)
    return mean, m2, tl.zeros_like(mean) + count


# ------------------------------------------------------------------------------------------ softmax


@triton.jit
def softmax_combine(top, total, other_top, other_total):
    """Return maximum and sum of exponentials of two groups together; each sum is relative to its
    group's maximum.

    A group whose maximum is minus infinity has no weight: its sum is taken as it is, which is 0.
    """
    new_top = maximum(top, other_top)
    nothing = new_top == float("-inf")
    scale = tl.where(nothing, 1.0, libdevice.exp(top - new_top))
    other_scale = tl.where(nothing, 1.0, libdevice.exp(other_top - new_top))
    return new_top, total * scale + other_total * other_scale


@triton.jit
def softmax_reduce(top, total, axis: tl.constexpr):
    """Return maximum and sum of exponentials of the groups along an axis together."""
    new_top = largest(top, axis)
    above = tl.expand_dims(new_top, axis)
    scale = tl.where(above == float("-inf"), 1.0, libdevice.exp(top - above))
    return new_top, tl.sum(total * scale, axis)
