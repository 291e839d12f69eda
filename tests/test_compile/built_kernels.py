# SPDX-License-Identifier: Apache-2.0
"""Tiny kernels whose calls are specialized in every way there is; what is built of them stands
above each.
"""

import triton
import triton.language as tl

import bundler

SCALE = tl.constexpr(3)
ON_AMD = triton.runtime.driver.active.get_current_target().backend == "hip"


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def plain(x):
    return x + x


@bundler.prebuild(
    {
        "x": "*fp16:16",
        "y": "*fp32",
        "n": "i32:16",
        "one": "i32:1",
        "nothing": "none",
        "eps": "fp32",
        "flag": "i1",
    },
    constants={"BLOCK": [32, 64]},
)
@bundler.prebuild(
    {
        "x": "*fp16:16:large",
        "y": "*fp32:16",
        "n": "i64",
        "one": "i32",
        "nothing": "*i8",
        "eps": "fp32",
        "flag": "i1",
    },
    constants={"BLOCK": 32},
    configs=[{"num_warps": 2, "num_stages": 1}],
)
@triton.jit
def classes(x, y, n, one, nothing, eps, flag, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n).to(tl.float32) * eps + one
    if nothing is not None:
        value += tl.load(nothing + i).to(tl.float32)
    tl.store(y + i, value, mask=flag)


@bundler.prebuild(
    {"x": "*fp32:16"}, constants={"ACT": plain, "TYPE": tl.float16, "SIZES": (16, None)}
)
@triton.jit
def constants(x, ACT: tl.constexpr, TYPE: tl.constexpr, SIZES: tl.constexpr):
    i = tl.arange(0, SIZES[0])
    tl.store(x + i, ACT(tl.load(x + i).to(TYPE)).to(tl.float32))


@bundler.prebuild({"pair": ("*fp32:16", "i32:16")})
@triton.jit
def tuples(pair):
    tl.store(pair[0], pair[1].to(tl.float32))


@bundler.prebuild({"x": "*fp32:16", "n": "i32"})
@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 16 if ON_AMD else 32}, num_warps=1),
        triton.Config({"BLOCK": 64}, num_stages=1),
    ],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x + i, 1.0)
    else:
        tl.store(x + i, 1.0, mask=i < n)


@bundler.prebuild({"x": "*fp32:16"}, targets=["cuda:90"])
@triton.jit
def with_helper(x):
    tl.store(x, scaled(tl.load(x)))


@triton.jit
def same_helper(x):
    tl.store(x, scaled(tl.load(x)) + 1)


PREBUILD = [{"kernel": same_helper, "signature": {"x": "*fp32:16"}, "targets": ["cuda:90"]}]
