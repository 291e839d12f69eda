# SPDX-License-Identifier: Apache-2.0
"""`product_configs`: candidates for products of matrices: rows along y, columns along x, a batch
along z, and r0_, which is summed up.

A table has tiles with how fast each multiplies beside the fastest one. The rule orders them by how
long a device would take: to multiply, in as many rounds as its processors need for the programs; to
bring operands from memory, from the cache, and into each processor; and to wait for them, of which
several stages do less. So few rows, which are bound by the memory that the other operand comes
from, get short tiles and many programs, and many rows large tiles. What does not fit the device's
shared memory has fewer stages. The decorator `product` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import MIN_DOT_EDGE, ceil_div, pow2_up
from bundler.runtime.heuristics.facts import Device, Setting, SizeHints
from bundler.runtime.heuristics.launch_grids import PROGRAMS

Operands = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
#: No candidate has larger blocks, nor larger ones than a size rounded up; masks count on it.
LARGEST_BLOCKS = {"x": 256, "y": 256, "r0_": 128}
# So many rows of blocks are run through column by column.
_GROUP = 8
_MOST = 8
_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# How fast each is multiplied, beside operands of two bytes.
_PACE = {"fp32": 1 / 16, "tf32": 0.5, "fp16": 1.0, "bf16": 1.0, "fp8": 2.0}
# Of 8-bit operands, matrix units take so many along what is summed up.
_LEAST_SUMMED = {"fp8": 32}
_MOST_FLOAT8 = 128 * 128
# That costs a program which takes turns so much of a second round: nothing else is in registers.
_CROWDED_TURN = 0.2
# Shared memory of a program, in bytes, by the major number of the compute capability: the least
# that a device of it has.
_SHARED = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10, 12: 99 << 10}
_SHARED_HIP, _SHARED_UNKNOWN = 64 << 10, 48 << 10
# So many threads, and sums that they hold, has a processor at once.
_THREADS, _SUMS = 2048, 128 * 256


# Where a single row is multiplied by more warps, each load takes so much longer.
_ROW_WARPS, _ROW_WAITS = 2, 2.5


class _Tile(NamedTuple):
    """A tile: rows, columns, summed up; warps, stages; and how fast it multiplies beside the
    fastest one; how many programs of each processor take all tiles in turn, 0 where each tile has
    its own.
    """

    y: int
    x: int
    r: int
    warps: int
    stages: int
    speed: float
    turns: int = 0


class _Pace(NamedTuple):
    """How fast a kind of device is, in nanoseconds.

    Attributes:
        multiplied: products of two bytes that a processor adds up, by the fastest tile.
        memory, cache: bytes that come from each.
        taken: bytes that one processor takes from the cache.
        wait: how long one load takes.
        finished: sums that a processor computes the rest of.
    """

    multiplied: float
    memory: float
    cache: float
    taken: float
    wait: float
    finished: float = 10


# By the major number of the compute capability: some two thirds of what makers promise. Those of 9
# and the tiles' speeds were fitted to times of `tools.codegen products` on an H200.
_PACES = {
    8: _Pace(950, 1700, 3500, 45, 650),
    9: _Pace(4878, 4944, 11579, 89, 996, 8.7),
    10: _Pace(4900, 7000, 9000, 100, 750),
    12: _Pace(900, 1700, 4500, 50, 700),
}
_PACE_HIP, _PACE_UNKNOWN = _Pace(1300, 4500, 9000, 50, 900), _Pace(400, 800, 2000, 30, 700)


# Of matrix units, for operands of two bytes; of four bytes each tile is half as long, of one byte
# twice as long.
_UNITS = (
    _Tile(128, 256, 64, 8, 3, 0.74),
    _Tile(256, 128, 64, 8, 3, 0.73),
    _Tile(128, 128, 64, 8, 3, 0.95),
    _Tile(128, 128, 64, 4, 3, 0.60),
    _Tile(128, 128, 32, 4, 4, 0.60),
    _Tile(64, 256, 64, 4, 3, 0.45),
    _Tile(128, 64, 64, 4, 4, 0.52),
    _Tile(64, 128, 64, 4, 4, 0.33),
    _Tile(64, 64, 64, 4, 4, 0.54),
    _Tile(64, 64, 128, 4, 3, 0.40),
    _Tile(64, 32, 128, 4, 4, 0.38),
    _Tile(128, 128, 64, 8, 6, 0.66),
    _Tile(128, 64, 64, 4, 8, 0.28),
    _Tile(64, 128, 64, 4, 8, 0.32),
    _Tile(64, 64, 128, 4, 6, 0.39),
    _Tile(64, 32, 128, 4, 8, 0.34),
    _Tile(32, 32, 128, 4, 8, 0.10),
    _Tile(32, 128, 64, 4, 4, 0.81),
    _Tile(32, 64, 128, 4, 4, 0.15),
    _Tile(32, 32, 128, 4, 5, 0.24),
    _Tile(16, 128, 128, 4, 4, 0.21),
    _Tile(16, 64, 128, 4, 5, 0.25),
    _Tile(16, 32, 128, 4, 6, 0.16),
    _Tile(16, 32, 128, 2, 6, 0.14),
    _Tile(64, 16, 128, 4, 5, 0.15),
    _Tile(16, 16, 128, 2, 6, 0.07),
)
# Major numbers of the compute capability with an engine for bulk copies, and what it brings
# operands of. With more stages there is no room for what follows the sum. The smaller tile was up
# to 8 percent faster than with pointers where each processor has one, in long sums, so it is
# measured.
_WITH_ENGINE = frozenset({9, 10})
_TURNS = (_Tile(128, 256, 64, 8, 3, 1.00, 1), _Tile(128, 128, 64, 8, 5, 0.82, 1))
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
        hints: elements along `z`, `y`, `x` and `r0_`.
        setting: device, facts and policy.
        operands: what is multiplied: float32 as it is or as tf32, float16, bfloat16, or floats of
            8 bits.

    Raises:
        ConfigError: sizes of other axes, or below 1, or other operands.
    """
    sizes = {axis: size for axis, size in hints.items() if type(size) is int and size > 0}
    if sizes.keys() != {"z", "y", "x", "r0_"} or sizes != hints or operands not in _BYTES:
        raise ConfigError(
            "product: expected sizes of at least 1 for z, y, x and r0_, and operands of"
            f" {', '.join(_BYTES)}; got {dict(hints)} and {operands!r}",
            got=(dict(hints), operands),
        )
    device = setting.device
    tiles = _PLAIN if operands == "fp32" else _UNITS
    # Whether the kernel has the form with descriptors, and the device an engine for them.
    has_turns = bool(setting.facts.tma_min_blocks)
    if has_turns and not device.is_hip and (device.major or 0) in _WITH_ENGINE:
        tiles = (*tiles, *_TURNS)
    fitting = [found for tile in tiles for found in _fitted(tile, sizes, device, operands)]
    fitting.sort(key=lambda tile: _cost(tile, sizes, device, operands))
    configs = unique([_config(tile, device, has_turns=has_turns) for tile in fitting])
    if setting.policy.deterministic:  # another block adds up in another order
        return configs[:1]
    if setting.policy.max_autotune:
        return configs
    return configs[: 1 if setting.facts.unmeasured else _MOST]


def largest_block(axis: str, size: int, operands: str) -> int:
    """Return the largest block that a candidate has along an axis of this size; masks count on
    it.
    """
    return max(min(LARGEST_BLOCKS[axis], pow2_up(size)), _least(axis, operands))


def _least(axis: str, operands: str) -> int:
    return _LEAST_SUMMED.get(operands, MIN_DOT_EDGE) if axis == "r0_" else MIN_DOT_EDGE


def _cost(tile: _Tile, sizes: Mapping[str, int], device: Device, operands: Operands) -> float:
    """Return how many nanoseconds a product would take, more or less: what takes longest, and a
    part of all else.
    """
    pace, size, r = _pace(device), _BYTES[operands], sizes["r0_"]
    z, y, x = sizes["z"], sizes["y"], sizes["x"]
    programs = z * ceil_div(y, tile.y) * ceil_div(x, tile.x)
    steps = ceil_div(r, tile.r)
    held = min(
        shared_bytes(device) // (tile.stages * (tile.y + tile.x) * tile.r * size),
        _THREADS // (tile.warps * device.warp_size),
        _SUMS // (tile.y * tile.x),
    )
    rounds = ceil_div(programs, device.multiprocessors)
    waits = ceil_div(programs, device.multiprocessors * max(held, 1))
    each = tile.y * tile.x * tile.r * steps
    brought = (min(tile.y, y) + min(tile.x, x)) * r * size
    # Loads of a single row are not spread over more than two warps.
    crossed = y == 1 and tile.warps > _ROW_WARPS
    wait = pace.wait * (_ROW_WAITS if crossed else 1.0)
    multiplied = rounds * each / (pace.multiplied * _PACE[operands] * tile.speed)
    finished = rounds * tile.y * tile.x / pace.finished
    parts = (
        # Another program of a processor multiplies meanwhile.
        multiplied + finished if held <= 1 else max(multiplied, finished),
        z * ((y + x) * r * size + 2 * y * x) / pace.memory,
        programs * brought / pace.cache,
        rounds * brought / pace.taken,
        waits * wait * (1 + steps / max(tile.stages - 1, 1)),
    )
    return max(parts) + sum(parts) / 8


def _fitted(
    tile: _Tile, sizes: Mapping[str, int], device: Device, operands: Operands
) -> Iterator[_Tile]:
    """Yield a tile, no longer than the sizes, with as many stages as fit."""
    size = _BYTES[operands]
    # Matrix units' tiles are as long in bytes, whatever the operands.
    r = tile.r if operands == "fp32" else tile.r * 2 // size
    y, x, r = (
        min(wanted, largest_block(axis, sizes[axis], operands))
        for axis, wanted in (("y", tile.y), ("x", tile.x), ("r0_", r))
    )
    room = shared_bytes(device) // ((y + x) * r * size)
    if not room:
        return
    warps, stages = tile.warps, min(tile.stages, room)
    # What is left of a larger tile is as slow as a small one, and waits where stages are missing.
    left = y * x / (tile.y * tile.x)
    if device.is_hip:
        # A warp has 64 lanes; of two stages one lies in registers.
        warps, stages = min(warps, 4), 2
    else:
        left *= stages / tile.stages
    # Sums of 8-bit floats are kept twice, and have no room beside those of the largest tiles.
    crowded = operands == "fp8" and y * x > _MOST_FLOAT8
    speed = tile.speed * math.sqrt(left) / (1 + crowded * (_CROWDED_TURN if tile.turns else 1))
    yield _Tile(y, x, r, warps, stages, speed, tile.turns)


def _config(tile: _Tile, device: Device, *, has_turns: bool) -> Config:
    turns = {PROGRAMS: tile.turns * device.multiprocessors} if has_turns else {}
    return Config(
        {"YBLOCK": tile.y, "XBLOCK": tile.x, "R0_BLOCK": tile.r, "GROUP": _GROUP, **turns},
        num_warps=tile.warps,
        num_stages=tile.stages,
        origin=f"product {tile.y}x{tile.x}x{tile.r}",
    )


def _pace(device: Device) -> _Pace:
    return _PACE_HIP if device.is_hip else _PACES.get(device.major or 0, _PACE_UNKNOWN)


def shared_bytes(device: Device) -> int:
    """Return how much shared memory a program has at least."""
    if device.is_hip:
        return _SHARED_HIP
    return _SHARED.get(device.major or 0, _SHARED_UNKNOWN)
