# SPDX-License-Identifier: Apache-2.0
"""Tiny kernels that are specialized in every way that Triton knows; loaded by path, so that a test
can have functions of its own.
"""

from typing import NamedTuple

import triton
import triton.language as tl

SCALE = tl.constexpr(3)


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr = 64):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def constant(out, VALUE: tl.constexpr):
    tl.store(out, 1.0)


@triton.jit
def optional(out, x):
    if x is None:
        tl.store(out, 1.0)


@triton.jit
def apply(out, FN: tl.constexpr):
    tl.store(out, FN(2.0))


@triton.jit
def calling(out, n):
    tl.store(out + n, scaled(2.0))


@triton.jit
def calling_too(out, n):
    tl.store(out + n, scaled(4.0))


@triton.jit
def pair(out, values):
    tl.store(out, values[0] + values[1][0])


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["out"])
def annotated(out: "*fp32", n: tl.int32, scale=2.5, BLOCK: tl.constexpr = 32):  # noqa: F722
    tl.store(out + tl.arange(0, BLOCK), scale * n)


class Point(NamedTuple):
    x: float
    y: float


@triton.jit
def named(out, point):
    tl.store(out, point.x + point.y)
