# SPDX-License-Identifier: Apache-2.0
"""Tiny kernels for these tests; loaded by path, so that a test can have functions of its own."""

import triton
import triton.language as tl


@triton.jit
def double(x):
    return x + x


@triton.jit
def triple(x):
    return x + x + x


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr = 64):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def constant(out, VALUE: tl.constexpr):
    tl.store(out, 1.0)


@triton.jit
def apply(out, FN: tl.constexpr):
    tl.store(out, FN(2.0))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["out"])
def annotated(out: "*fp32", n: tl.int32, scale=2.5, BLOCK: tl.constexpr = 32):  # noqa: F722
    tl.store(out + tl.arange(0, BLOCK), scale * n)
