# SPDX-License-Identifier: Apache-2.0
"""A kernel that says of its pointer what descriptor the host makes of it."""

import triton
import triton.language as tl


@triton.jit
def corner(
    source,
    out,
    TURNS: tl.constexpr,
    SIZE: tl.constexpr,
    DESCRIPTORS: tl.constexpr = ("TURNS", ("source", (64, 48), (48, 1), ("SIZE", 16))),
):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, 16)[None, :]
    tile = source.load([0, 0]) if TURNS else tl.load(source + rows * 48 + columns)
    tl.store(out + rows * 16 + columns, tile)
