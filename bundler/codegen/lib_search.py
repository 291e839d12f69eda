# SPDX-License-Identifier: Apache-2.0
"""Sorting and searching of generated kernels: `sort` along the last axis of a block, `bucketize` in
sorted boundaries in memory.

`bundler.codegen.lib` shows them to kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function


@constexpr_function
def _log2(size):
    """Return the exponent of a power of two."""
    return size.bit_length() - 1


@constexpr_function
def _cube(numel):
    """Return the shape in which each bit of a lane's number is an axis of its own."""
    return [2] * _log2(numel)


@constexpr_function
def _bits_of(first, size):
    """Return the bits of the shortest run that holds the first lanes."""
    return min(max(first - 1, 1), size - 1).bit_length()


@triton.jit
def _bit(axes: tl.constexpr, number: tl.constexpr):
    """Return for each lane of a cube one bit of its number, counted from the lowest."""
    return tl.reshape(tl.arange(0, 2), [1] * (axes - number - 1) + [2] + [1] * number)


@triton.jit
def _exchange(cube, number: tl.constexpr, bits: tl.constexpr, alternating: tl.constexpr):
    """Return a cube whose lanes that differ in one bit of their number alone are in order: upwards,
    or where `alternating` the other way where the next bit behind `bits` is set.
    """
    axes: tl.constexpr = len(cube.shape)
    # The lane at the other end of the pair; sums of two of them wrap, and wrap back.
    other = tl.sum(cube, axes - 1 - number, keep_dims=True) - cube
    upper = _bit(axes, number)
    if alternating:
        upper = upper ^ _bit(axes, bits)
    return tl.where((cube > other) != (upper != 0), other, cube)


@triton.jit
def _merge(cube, bits: tl.constexpr, alternating: tl.constexpr):
    """Return a cube in which runs of so many bits, which rise and then fall, are sorted."""
    for step in tl.static_range(bits):
        cube = _exchange(cube, bits - 1 - step, bits, alternating)
    return cube


@triton.jit
def sort(keys, first: tl.constexpr):
    """Return integers of 32 or 64 bits sorted upwards along the last axis, whose size is a power of
    two; lanes from `first` on hold anything.

    The sort is bitonic. Runs of as many lanes as are wanted are sorted; then the smaller half of
    each pair of runs is kept, so that half of the lanes is left, until one run is.
    """
    size: tl.constexpr = keys.shape[len(keys.shape) - 1]
    bits: tl.constexpr = _log2(size)
    wanted: tl.constexpr = _bits_of(first, size)
    cube = tl.reshape(keys, _cube(keys.numel))
    for stage in tl.static_range(1, wanted + 1):
        cube = _merge(cube, stage, stage < bits)
    for stage in tl.static_range(wanted + 1, bits + 1):
        cube = tl.min(cube, len(cube.shape) - 1 - wanted)
        cube = _merge(cube, wanted, stage < bits)
    if wanted == bits:
        return tl.reshape(cube, keys.shape)
    rows: tl.constexpr = keys.numel // size
    run = tl.reshape(cube, [rows, 1, 2**wanted])
    return tl.reshape(tl.broadcast_to(run, [rows, size // 2**wanted, 2**wanted]), keys.shape)


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
