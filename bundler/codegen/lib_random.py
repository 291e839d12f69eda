# SPDX-License-Identifier: Apache-2.0
"""Random numbers of generated kernels, from a seed and the element's offset by Philox-4x32-10, so
that they depend on neither grid nor block size.

`bundler.codegen.lib` shows them to kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rand(seed, offset):
    """Return float32 numbers, uniform in [0, 1); those of `tl.rand` for the offset as uint32."""
    return tl.rand(seed, offset.to(tl.uint32))


@triton.jit
def randn(seed, offset):
    """Return float32 numbers, normal with mean 0 and deviation 1; those of `tl.randn` for the
    offset as uint32.
    """
    return tl.randn(seed, offset.to(tl.uint32))


@triton.jit
def randint64(seed, offset, low, high):
    """Return int64 numbers from `low` to `high` without it; from all of int64 where the two are
    equal.

    They are 64 random bits modulo the size of the range, so numbers of the lower part are more
    probable by the size over 2**64.
    """
    first, second, _, _ = tl.randint4x(seed, offset.to(tl.uint32))
    bits = first.to(tl.uint32).to(tl.uint64) | (second.to(tl.uint32).to(tl.uint64) << 32)
    size = high.to(tl.uint64) - low.to(tl.uint64)
    within = tl.where(size == 0, bits, bits % tl.where(size == 0, 1, size))
    return (low.to(tl.uint64) + within).to(tl.int64)
