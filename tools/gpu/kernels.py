# SPDX-License-Identifier: Apache-2.0
"""Kernels that need everything a launch can need; cases.py says how each is called."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, D402, N803

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """Out = x + y."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(
        out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask
    )


@triton.jit
def softmax(x, out, stride, columns, BLOCK: tl.constexpr):
    """Out = softmax(x) along each row."""
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    mask = offsets < columns
    value = tl.load(x + row * stride + offsets, mask=mask, other=-float("inf"))
    numerator = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * stride + offsets, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def matmul(a, b, out, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Out = a @ b."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        left = tl.load(a + rows[:, None] * k + start + inner[None, :])
        right = tl.load(b + (start + inner)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(tl.float16))


@triton.jit
def layer_norm(x, weight, out, stride, columns, epsilon, BLOCK: tl.constexpr):
    """Out = (x - mean) / sqrt(variance + epsilon) * weight along each row."""
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    mask = offsets < columns
    value = tl.load(x + row * stride + offsets, mask=mask, other=0.0)
    centered = tl.where(mask, value - tl.sum(value, axis=0) / columns, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=0) / columns + epsilon)
    tl.store(
        out + row * stride + offsets,
        centered * scale * tl.load(weight + offsets, mask=mask),
        mask=mask,
    )


@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr):
    """out[v] += how often v occurs, with atomic additions."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.atomic_add(out + tl.load(x + offsets, mask=mask, other=0), 1, mask=mask)


@triton.jit
def row_sum(x, out, stride, columns, BLOCK: tl.constexpr):
    """Out = the sum of each row."""
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + offsets, mask=offsets < columns, other=0.0)
    tl.store(out + row, tl.sum(value, axis=0))


@triton.jit
def integers(
    out,
    a: tl.int8,
    b: tl.int16,
    c: tl.int32,
    d: tl.int64,
    e: tl.uint8,
    f: tl.uint16,
    g: tl.uint32,
    h: tl.uint64,
):
    """Out = each integer, in its own width."""
    tl.store(out, a.to(tl.int64))
    tl.store(out + 1, b.to(tl.int64))
    tl.store(out + 2, c.to(tl.int64))
    tl.store(out + 3, d)
    tl.store(out + 4, e.to(tl.int64))
    tl.store(out + 5, f.to(tl.int64))
    tl.store(out + 6, g.to(tl.int64))
    tl.store(out + 7, h.to(tl.int64))


@triton.jit
def floats(out, a: tl.float16, b: tl.bfloat16, c: tl.float32, d: tl.float64, flag):
    """Out = each float, in its own width, and a bool."""
    tl.store(out, a.to(tl.float64))
    tl.store(out + 1, b.to(tl.float64))
    tl.store(out + 2, c.to(tl.float64))
    tl.store(out + 3, d)
    tl.store(out + 4, tl.where(flag, 1.0, 2.0).to(tl.float64))


@triton.jit
def eighths(x, out, n, BLOCK: tl.constexpr):
    """Out = x, from eight-bit floats."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n).to(tl.float32), mask=offsets < n)


@triton.jit
def optional(x, bias, out, step, BLOCK: tl.constexpr):
    """Out = x + bias, where there is one; `step` is 1, and so compiled in."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets * step)
    if bias is not None:
        value += tl.load(bias + offsets)
    tl.store(out + offsets, value)


@triton.jit
def places(out, width, depth):
    """Out = which program wrote it."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out + (z * depth + y) * width + x, x + 100 * y + 10000 * z)


@triton.jit
def device_descriptor(x, out, rows, columns, SIZE: tl.constexpr):
    """Out = 2 x, through descriptors made on the device, which need global scratch."""
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [SIZE, SIZE])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [SIZE, SIZE])
    row, column = tl.program_id(0) * SIZE, tl.program_id(1) * SIZE
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def host_descriptor(source, target, SIZE: tl.constexpr):
    """Target = 3 source, through descriptors made on the host."""
    row, column = tl.program_id(0) * SIZE, tl.program_id(1) * SIZE
    target.store([row, column], source.load([row, column]) * 3)


@triton.jit
def numbered(x, out, n, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """Out = x + NUMBER: as many kernels as there are numbers."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + NUMBER, mask=mask)
