# SPDX-License-Identifier: Apache-2.0
"""Kernels that not every target can have."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

import bundler


@bundler.prebuild({"d": "tensordesc<fp16[16, 64]>", "out": "*fp16:16"})
@triton.jit
def descriptor(d, out):
    tile = d.load([0, 0])
    tl.store(out + tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :], tile)


@bundler.prebuild({"x": "*fp8e4nv:16", "out": "*fp32:16"})
@triton.jit
def narrow(x, out):
    i = tl.arange(0, 32)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


@bundler.prebuild({"x": "*fp32:16"})
@triton.jit
def library(x):
    i = tl.arange(0, 32)
    tl.store(x + i, libdevice.rsqrt(tl.load(x + i)))
