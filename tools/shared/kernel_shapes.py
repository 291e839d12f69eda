# SPDX-License-Identifier: Apache-2.0
# Kernels are written in Triton's language, which neither knows:
# ruff: noqa: ANN001, D403, N803
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Three shapes of kernels with a constant that tells variants apart; `kernel_variants` compiles
them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_gelu(x, y, out, n, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """out = gelu(x * SCALE + y), element by element."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask) * SCALE + tl.load(y + offsets, mask=mask)
    tl.store(out + offsets, 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476)), mask=mask)


@triton.jit
def scaled_softmax(x, out, stride, n, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """out = softmax(x * SCALE) along each row; one program holds one row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    value = tl.load(x + row * stride + columns, mask=mask, other=-float("inf")) * SCALE
    numerator = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + row * stride + columns, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def scaled_matmul(
    a, b, out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr
):
    """out = a @ b * SCALE for row-major half-precision matrices, one tile a program, summed in single precision."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        depth = start + tl.arange(0, K)
        left = tl.load(
            a + rows[:, None] * k + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < k),
            other=0,
        )
        right = tl.load(
            b + depth[:, None] * n + columns[None, :],
            mask=(depth[:, None] < k) & (columns[None, :] < n),
            other=0,
        )
        total = tl.dot(left, right, total)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out + rows[:, None] * n + columns[None, :], (total * SCALE).to(tl.float16), mask=mask)
