# SPDX-License-Identifier: Apache-2.0
"""Kernels that call each function of `bundler.codegen.lib`: the cases run them in Triton's
interpreter, the compile tests build them.
"""

import triton
import triton.language as tl

from bundler.codegen import lib


@triton.jit
def extremes(values, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    place = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    block = tl.load(values + place)
    tl.store(out + rows, lib.largest(block, 1))
    tl.store(out + ROWS + rows, lib.smallest(block, 1))
    tl.store(out + 2 * ROWS + rows, lib.product(block, 1))


@triton.jit
def arguments_of_extremes(values, out, indices, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], [ROWS, COLUMNS])
    block = tl.load(values + rows[:, None] * COLUMNS + columns)
    top, top_index = lib.argmax(block, columns, 1)
    bottom, bottom_index = lib.argmin(block, columns, 1)
    tl.store(out + rows, top)
    tl.store(out + ROWS + rows, bottom)
    tl.store(indices + rows, top_index)
    tl.store(indices + ROWS + rows, bottom_index)


@triton.jit
def of_bits(values, flags, out, out_flags, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    place = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + rows, lib.xor_sum(tl.load(values + place), 1))
    tl.store(out_flags + rows, lib.any_of(tl.load(flags + place) != 0, 1).to(tl.int8))


@triton.jit
def moments(values, out, count, LOOP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    if LOOP:
        mean = tl.zeros([ROWS, COLUMNS], values.dtype.element_ty)
        m2 = tl.zeros([ROWS, COLUMNS], values.dtype.element_ty)
        weight = tl.zeros([ROWS, COLUMNS], values.dtype.element_ty)
        for start in range(0, count, COLUMNS):
            mask = start + columns < count
            block = tl.load(values + rows[:, None] * count + start + columns, mask, other=0.0)
            new_mean, new_m2, new_weight = lib.welford_next(block, mean, m2, weight, start == 0)
            mean = tl.where(mask, new_mean, mean)
            m2 = tl.where(mask, new_m2, m2)
            weight = tl.where(mask, new_weight, weight)
        mean, m2, weight = lib.welford(mean, m2, weight, 1)
    else:
        mask = columns < count
        block = tl.load(values + rows[:, None] * count + columns, mask, other=0.0)
        mean, m2, weight = lib.welford_two_pass(block, mask, count.to(block.dtype), 1)
    tl.store(out + rows, mean)
    tl.store(out + ROWS + rows, m2)
    tl.store(out + 2 * ROWS + rows, weight)


@triton.jit
def online_softmax(values, out, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    top = tl.full([ROWS, COLUMNS], float("-inf"), values.dtype.element_ty)
    total = tl.zeros([ROWS, COLUMNS], values.dtype.element_ty)
    for start in range(0, count, COLUMNS):
        mask = start + columns < count
        block = tl.load(values + rows[:, None] * count + start + columns, mask, other=float("-inf"))
        new_top, new_total = lib.softmax_combine(
            top, total, block, tl.where(mask & (block != float("-inf")), 1.0, 0.0).to(block.dtype)
        )
        top = tl.where(mask, new_top, top)
        total = tl.where(mask, new_total, total)
    top, total = lib.softmax_reduce(top, total, 1)
    tl.store(out + rows, top)
    tl.store(out + ROWS + rows, total)


@triton.jit
def sort_rows(keys, out, FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + places, lib.sort(tl.load(keys + places), FIRST))


@triton.jit
def search(
    values,
    boundaries,
    sorter,
    out,
    count,
    size,
    stride,
    RIGHT: tl.constexpr,
    SORTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.arange(0, BLOCK)
    mask = index < count
    block = tl.load(values + index, mask, other=0)
    kind: tl.constexpr = tl.int64 if WIDE else tl.int32
    if SORTED:
        found = lib.bucketize(block, boundaries, size, stride, 0, kind, RIGHT)
    else:
        found = lib.bucketize(block, boundaries, size, stride, 0, kind, RIGHT, sorter, 1, 0)
    tl.store(out + index, found, mask)


@triton.jit
def divide(a, b, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    one = tl.load(a + index)
    other = tl.load(b + index)
    tl.store(out + index, lib.floor_divide(one, other))
    tl.store(out + COUNT + index, lib.remainder(one, other))
    tl.store(out + 2 * COUNT + index, lib.truncated_divide(one, other))
    tl.store(out + 3 * COUNT + index, lib.truncated_remainder(one, other))
    tl.store(out + 4 * COUNT + index, lib.integer_power(one, other))


@triton.jit
def of_indices(out, size, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT) - COUNT // 2
    tl.store(out + index + COUNT // 2, lib.index_floor_divide(index, 3))
    tl.store(out + COUNT + index + COUNT // 2, lib.index_remainder(index, size))
    wrapped = lib.index_wrapped(index + COUNT // 2, COUNT // 2)
    tl.store(out + 4 * COUNT + index + COUNT // 2, wrapped)
    tl.store(out + 2 * COUNT + index + COUNT // 2, lib.index_floor_divide(100, index))
    tl.store(out + 3 * COUNT + index + COUNT // 2, lib.index_power(index, 3))


@triton.jit
def draw(seed, offsets, low, high, uniform, normal, integers, theirs, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    offset = tl.load(offsets + index)
    seed = tl.load(seed)
    tl.store(uniform + index, lib.rand(seed, offset))
    tl.store(normal + index, lib.randn(seed, offset))
    tl.store(integers + index, lib.randint64(seed, offset, tl.load(low), tl.load(high)))
    tl.store(theirs + index, tl.rand(seed, offset.to(tl.uint32)))
    tl.store(theirs + COUNT + index, tl.randn(seed, offset.to(tl.uint32)))


@triton.jit
def philox(out, key, counter):
    a, b, c, d = tl.philox(
        tl.load(key),
        tl.load(counter),
        tl.load(counter + 1),
        tl.load(counter + 2),
        tl.load(counter + 3),
    )
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)


@triton.jit
def error_function(values, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out + index, lib.one_plus_erf(tl.load(values + index)))
