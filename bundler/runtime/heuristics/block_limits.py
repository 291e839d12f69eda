# SPDX-License-Identifier: Apache-2.0
"""Limits of blocks and grids, the rules for warps and for long grids, and the checks that every
candidate passes.

Every module of rules uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from bundler.errors import ConfigError
from bundler.runtime.heuristics.facts import Device, Setting, SizeHints

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_RSPLIT = 64
MAX_TENSOR_ELEMENTS = 2**20
MIN_DOT_EDGE = 16
WAVE_64 = 64

_MAX_BLOCK = {"x": 4096, "y": 1024, "z": 1024, "r0_": 65536, "r1_": 32768}
_MAX_X_HIP = 8192
_MAX_WARPS, _MIN_WARPS = 8, 2


def pow2_up(n: int) -> int:
    """Return the least power of two that is at least `n`; 1 for nothing and less."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


def pow2_down(n: int) -> int:
    """Return the greatest power of two that is at most `n`, which is 1 or more."""
    return 1 << (n.bit_length() - 1)


def ceil_div(n: int, d: int) -> int:
    """Return how many pieces of `d` cover `n`."""
    return -(-n // d)


def product(sizes: Iterable[int | None]) -> int:
    """Return the product of the sizes that are there; None and 0 are not."""
    return math.prod(size for size in sizes if size)


def is_reduced(axis: str) -> bool:
    """Whether an axis is a reduced one: `r0_`, `r1_`."""
    return axis.startswith("r")


def rows(hints: SizeHints) -> int:
    """Return how many elements are reduced into one."""
    return product(size for axis, size in hints.items() if is_reduced(axis))


def block_name(axis: str) -> str:
    """Return the parameter that holds an axis' block: `XBLOCK`, `R0_BLOCK`."""
    return f"{axis.upper()}BLOCK"


def max_block(axis: str, setting: Setting) -> int:
    """Return the largest block of an axis."""
    most = _MAX_X_HIP if axis == "x" and setting.device.is_hip else _MAX_BLOCK[axis]
    most = min(most, setting.facts.max_blocks.get(axis, most))
    return min(most, setting.facts.max_xblock or most) if axis == "x" else most


def check_hints(hints: SizeHints) -> None:
    """Raise `ConfigError` unless the hints name known axes, and x among them, with powers
    of two.
    """
    if "x" not in hints or not hints.keys() <= _MAX_BLOCK.keys():
        raise ConfigError(
            f"size hints: expected sizes for x and any of y, z, r0_, r1_, got {dict(hints)!r:.80}",
            got=dict(hints),
        )
    for axis, size in hints.items():
        if type(size) is not int or size < 1 or size & (size - 1):
            raise ConfigError(
                f"size hints: {axis} is {size!r}, expected a power of two; round it up, as"
                f" {axis}={_rounded(size)}",
                axis=axis,
                got=size,
            )


def _rounded(size: object) -> int:
    return pow2_up(size) if isinstance(size, int) else 1


def warp_rule(
    wanted: int,
    device: Device,
    *,
    most: int = _MAX_WARPS,
    least: int = _MIN_WARPS,
    registers: bool = False,
) -> int:
    """Return the number of warps: `wanted` within bounds, as a power of two.

    Args:
        wanted: warps that the work would occupy.
        device: one with warps of 64 threads gets half as many.
        most, least: bounds.
        registers: the kernel needs many registers, so at most half of `most`.
    """
    if device.warp_size == WAVE_64:
        most, least = (most + 1) // 2, (least + 1) // 2
    if registers:
        most //= 2
    return pow2_up(min(max(wanted, least), most))


def grow_for_grid(x: int, hint: int, warps: int, setting: Setting) -> int:
    """Return `x`, doubled until the grid along it is one that the device can launch.

    Raises:
        ConfigError: no block is large enough.
    """
    # AMD's devices bound the threads of a grid and not its blocks.
    weight = warps * setting.device.warp_size if setting.device.is_hip else 1
    most = max_block("x", setting)
    blocks = ceil_div(hint, x)
    while blocks * weight > MAX_GRID[0] and x < min(hint, most):
        x, blocks = x * 2, blocks // 2
    if blocks > MAX_GRID[0]:
        raise ConfigError(
            f"size hint x={hint}: {blocks} blocks of {x} do not fit a grid of {MAX_GRID[0]}; split"
            " the problem",
            got=blocks,
            limit=MAX_GRID[0],
        )
    return x


def check_blocks(kwargs: Mapping[str, int], hints: SizeHints, setting: Setting) -> None:
    """Raise `ConfigError` for a block that is over the limit of its axis, does not divide it, or
    spans a single element.
    """
    for axis, hint in hints.items():
        block = kwargs.get(block_name(axis))
        if block is None:
            continue
        most = max_block(axis, setting)
        if block > most or most % block:
            raise ConfigError(
                f"{block_name(axis)}={block} does not divide {most}",
                name=block_name(axis),
                got=block,
            )
        if hint == 1 and block != 1 and not is_reduced(axis):
            raise ConfigError(
                f"{block_name(axis)}={block}, but {axis} has one element, so its block is 1",
                name=block_name(axis),
                got=block,
            )
