# SPDX-License-Identifier: Apache-2.0
"""`product_configs`: candidates for products of matrices: rows along y, columns along x, a batch
along z, and r0_, which is summed up.

A table has tiles with how fast each is on a device that it fills. The rule orders them by that, by
how many waves of programs the sizes make, and by how much of the last wave is idle; what does not
fit the device's shared memory has fewer stages. The decorator `product` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import (
    MIN_DOT_EDGE,
    ceil_div,
    check_hints,
    pow2_down,
)
from bundler.runtime.heuristics.facts import Device, Setting, SizeHints

Operands = Literal["fp32", "tf32", "fp16", "bf16"]
#: No candidate has larger blocks, nor larger ones than a size rounded up; masks count on it.
LARGEST_BLOCKS = {"x": 256, "y": 256, "r0_": 128}
#: No block is smaller: the least edge that a matrix unit has.
LEAST_BLOCK = MIN_DOT_EDGE
# So many rows of blocks are run through column by column.
_GROUP = 8
_MOST = 8
_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
# Shared memory of a program, in bytes, by the major number of the compute capability: the least
# that a device of it has.
_SHARED = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10, 12: 99 << 10}
_SHARED_HIP, _SHARED_UNKNOWN = 64 << 10, 48 << 10


class _Tile(NamedTuple):
    """A tile: rows, columns, summed up; warps, stages; and its speed beside that of the fastest
    one, where programs fill the device.
    """

    y: int
    x: int
    r: int
    warps: int
    stages: int
    speed: float


# Of matrix units, for operands of two bytes; of four bytes each tile is half as long.
_UNITS = (
    _Tile(128, 256, 64, 8, 3, 1.0),
    _Tile(256, 128, 64, 8, 3, 0.98),
    _Tile(128, 128, 64, 8, 3, 0.9),
    _Tile(128, 128, 64, 4, 3, 0.88),
    _Tile(128, 128, 32, 4, 4, 0.8),
    _Tile(64, 256, 64, 4, 3, 0.78),
    _Tile(128, 64, 64, 4, 4, 0.7),
    _Tile(64, 128, 64, 4, 4, 0.7),
    _Tile(64, 64, 64, 4, 4, 0.5),
    _Tile(64, 64, 128, 4, 3, 0.5),
    _Tile(64, 32, 64, 4, 5, 0.3),
    _Tile(32, 64, 128, 4, 4, 0.3),
    _Tile(32, 32, 128, 4, 4, 0.18),
    _Tile(16, 128, 128, 4, 4, 0.25),
    _Tile(16, 64, 128, 4, 5, 0.16),
    _Tile(16, 32, 128, 2, 6, 0.09),
    _Tile(64, 16, 128, 4, 5, 0.16),
    _Tile(16, 16, 128, 2, 6, 0.05),
)
# Of float32 without matrix units: what is summed up lies in registers.
_PLAIN = (
    _Tile(128, 128, 16, 8, 3, 1.0),
    _Tile(128, 64, 16, 8, 3, 0.9),
    _Tile(64, 128, 16, 8, 3, 0.9),
    _Tile(64, 64, 32, 8, 3, 0.8),
    _Tile(64, 64, 16, 4, 3, 0.8),
    _Tile(32, 64, 32, 4, 3, 0.5),
    _Tile(64, 32, 32, 4, 3, 0.5),
    _Tile(32, 32, 32, 4, 3, 0.35),
    _Tile(16, 64, 32, 4, 3, 0.3),
    _Tile(16, 32, 64, 4, 3, 0.18),
    _Tile(16, 16, 64, 2, 3, 0.1),
)


def product_configs(hints: SizeHints, setting: Setting, *, operands: Operands) -> list[Config]:
    """Return the candidates of a product, the one that a device without a measurement takes first.

    Pure: the same arguments give the same list in every process and on every machine.

    Args:
        hints: elements along `z`, `y`, `x` and `r0_`, powers of two.
        setting: device, facts and policy.
        operands: what is multiplied: float32 as it is or as tf32, float16, bfloat16.

    Raises:
        ConfigError: sizes of other axes or that are no powers of two, or other operands.
    """
    check_hints(hints)
    if set(hints) != {"z", "y", "x", "r0_"} or operands not in _BYTES:
        raise ConfigError(
            "product: expected sizes for z, y, x and r0_, and operands of"
            f" {', '.join(_BYTES)}; got {dict(hints)} and {operands!r}",
            got=(dict(hints), operands),
        )
    tiles = _PLAIN if operands == "fp32" else _UNITS
    found = sorted(tiles, key=lambda tile: _cost(tile, hints, setting.device))
    configs = unique(
        [one for tile in found for one in _fitted(tile, hints, setting.device, operands)]
    )
    if setting.policy.deterministic:  # another block adds up in another order
        return configs[:1]
    return configs if setting.policy.max_autotune else configs[:_MOST]


def _cost(tile: _Tile, hints: SizeHints, device: Device) -> float:
    """Return how long a tile takes, in an unknown unit: waves of programs, each as long as a
    tile.
    """
    blocks = hints["z"] * ceil_div(hints["y"], tile.y) * ceil_div(hints["x"], tile.x)
    return ceil_div(blocks, device.multiprocessors) * tile.y * tile.x / tile.speed


def _fitted(tile: _Tile, hints: SizeHints, device: Device, operands: Operands) -> Iterator[Config]:
    """Yield a tile as a candidate, no longer than the sizes, with as many stages as fit."""
    size = _BYTES[operands]
    y, x = _edge(tile.y, hints["y"]), _edge(tile.x, hints["x"])
    r = _edge(tile.r // 2 if operands == "tf32" else tile.r, hints["r0_"])
    room = shared_bytes(device) // ((y + x) * r * size)
    if not room:
        return
    warps = tile.warps
    if device.is_hip:
        # A warp has 64 lanes; of two stages one lies in registers.
        warps, room = min(warps, 4), 2
    yield Config(
        {"YBLOCK": y, "XBLOCK": x, "R0_BLOCK": r, "GROUP": _GROUP},
        num_warps=warps,
        num_stages=min(tile.stages, room),
        origin=f"product {tile.y}x{tile.x}x{tile.r}",
    )


def _edge(wanted: int, size: int) -> int:
    return max(min(wanted, pow2_down(size)), LEAST_BLOCK)


def shared_bytes(device: Device) -> int:
    """Return how much shared memory a program has at least."""
    if device.is_hip:
        return _SHARED_HIP
    return _SHARED.get(device.major or 0, _SHARED_UNKNOWN)
