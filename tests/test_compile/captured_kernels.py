# SPDX-License-Identifier: Apache-2.0
"""Kernels that tests capture: plain, with heuristics, autotuned, with a helper, and one that does
not compile.
"""

import triton
import triton.language as tl


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (1, 2)
    ],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda call: call["n"] % call["BLOCK"] == 0})
@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (16, 32)], key=["n"])
@triton.heuristics(
    {"ADDS": lambda call: call["bias"] is not None, "TAKES": lambda call: call["less"] is not None}
)
@triton.jit
def one_of_two(x, bias, less, n, BLOCK: tl.constexpr, ADDS: tl.constexpr, TAKES: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if ADDS:
        value += tl.load(bias + i, mask=i < n)
    if TAKES:
        value -= tl.load(less + i, mask=i < n)
    tl.store(x + i, value, mask=i < n)


def only_small(configs, named_args, **_):
    """Keep the configurations with a block below the number of elements."""
    return [config for config in configs if config.kwargs["BLOCK"] <= named_args["n"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (16, 32, 512)],
    key=["n"],
    prune_configs_by={"early_config_prune": only_small},
    reset_to_zero=["x"],
    cache_results=True,
)
@triton.jit
def pruned(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(x + i, 1.0, mask=i < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 8, "a block this large is refused")
    tl.store(x, BLOCK)


@triton.jit
def with_tuple(pair, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(pair[1] + i, tl.load(pair[0] + i, mask=i < n), mask=i < n)


@triton.jit
def with_descriptor(source, out, BLOCK: tl.constexpr):
    block = source.load([0, 0])
    tl.store(out + tl.arange(0, BLOCK), tl.sum(block, axis=1))
