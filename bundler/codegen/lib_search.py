# SPDX-License-Identifier: Apache-2.0
"""Sorting and searching of generated kernels: `sort` along the last axis of a block, `bucketize` in
sorted boundaries in memory.

`bundler.codegen.lib` shows them to kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from bundler.codegen.lib_reductions import integer_of_width


@constexpr_function
def _log2(size):
    """Return the exponent of a power of two."""
    return size.bit_length() - 1


@constexpr_function
def _pairs(shape, stride):
    """Return a shape in which the lanes of the last axis whose numbers differ by `stride` alone
    stand along the second axis.
    """
    count = 1
    for size in shape:
        count *= size
    return [count // (2 * stride), 2, stride]


@triton.jit
def _partner(x, stride: tl.constexpr):
    """Return for each lane the value of the lane at the other end of its pair: their exclusive or,
    without its own.
    """
    shape: tl.constexpr = _pairs(x.shape, stride)
    pairs = tl.reshape(x, shape)
    return tl.reshape(tl.xor_sum(pairs, 1, keep_dims=True) ^ pairs, x.shape)


@triton.jit
def _before(value, index, other, other_index, count, descending: tl.constexpr):
    """Return whether the first of two lanes belongs before the second: by value, NaN being largest,
    then by index, and padding last.
    """
    nan = value != value
    other_nan = other != other
    if descending:
        first = (value > other) | (nan & (other_nan == 0))
    else:
        first = (value < other) | (other_nan & (nan == 0))
    equal = (value == other) | (nan & other_nan)
    first = first | (equal & (index < other_index))
    padding = index >= count
    other_padding = other_index >= count
    return tl.where(
        padding | other_padding, other_padding & ((padding == 0) | (index < other_index)), first
    )


@triton.jit
def _exchange(
    bits, indices, dtype: tl.constexpr, count, flip, stride: tl.constexpr, descending: tl.constexpr
):
    """Return the block after lanes `stride` apart were put in order, or in reverse order where
    `flip` is 1.
    """
    other_bits = _partner(bits, stride)
    other_indices = _partner(indices, stride)
    upper = tl.broadcast_to(tl.arange(0, 2)[None, :, None], _pairs(bits.shape, stride))
    upper = tl.reshape(upper, bits.shape)
    value = bits.to(dtype, bitcast=True)
    other = other_bits.to(dtype, bitcast=True)
    # The order is total, since indices differ: both lanes of a pair come to the same decision.
    swap = _before(other, other_indices, value, indices, count, descending) != ((upper ^ flip) != 0)
    return tl.where(swap, other_bits, bits), tl.where(swap, other_indices, indices)


@triton.jit
def sort(values, indices, count, descending: tl.constexpr):
    """Return values and indices sorted along the last axis, whose size is a power of two.

    The sort is stable and bitonic: equal values keep the order of their indices, which have to
    differ along the axis and be integers. NaN is the largest value: last, or first where
    `descending`. Lanes whose index is `count` or more come last. Bools are passed as int8.
    """
    size: tl.constexpr = values.shape[len(values.shape) - 1]
    dtype: tl.constexpr = values.dtype
    bits = values.to(integer_of_width(dtype), bitcast=True)
    indices = tl.broadcast_to(indices, values.shape)
    for stage in tl.static_range(1, _log2(size) + 1):
        if stage < _log2(size):
            flip = tl.broadcast_to(tl.arange(0, 2)[None, :, None], _pairs(values.shape, 2**stage))
            flip = tl.reshape(flip, values.shape)
        else:
            flip = tl.zeros(values.shape, tl.int32)
        for step in tl.static_range(stage):
            bits, indices = _exchange(
                bits, indices, dtype, count, flip, 2 ** (stage - 1 - step), descending
            )
    return bits.to(dtype, bitcast=True), indices


@triton.jit
def bucketize(
    values,
    boundaries,
    size,
    stride,
    start,
    index_type: tl.constexpr,
    right: tl.constexpr,
    sorter=None,
    sorter_stride=0,
    sorter_start=0,
):
    """Return for each value its place among sorted boundaries: how many are below it, or where
    `right`, not above it.

    Args:
        values: any block; NaN is above every boundary.
        boundaries: pointer to boundaries of the values' dtype.
        size: how many there are.
        stride: between one and the next, in elements.
        start: the offset of the first, a number or a block of offsets.
        index_type: of the result, `tl.int32` or `tl.int64`.
        right: whether equal boundaries count.
        sorter: None, or a pointer to the order in which the boundaries are sorted, which
            `sorter_stride` and `sorter_start` describe.
        sorter_stride: as `stride`.
        sorter_start: as `start`.
    """
    low = tl.zeros(values.shape, index_type)
    high = tl.full(values.shape, size, index_type)
    left = size
    # A search among n boundaries takes as many steps as n has bits.
    while left > 0:
        middle = low + (high - low) // 2
        within = low < high
        place = middle
        if sorter is not None:
            place = tl.load(
                sorter + sorter_start + middle * sorter_stride, mask=within, other=0
            ).to(index_type)
        bound = tl.load(boundaries + start + place * stride, mask=within, other=0)
        # Written so that a comparison with NaN counts as above.
        if right:
            above = (bound > values) == 0
        else:
            above = (bound >= values) == 0
        low = tl.where(within & above, middle + 1, low)
        high = tl.where(within & (above == 0), middle, high)
        left = left // 2
    return low
