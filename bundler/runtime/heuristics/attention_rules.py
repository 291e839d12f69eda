# SPDX-License-Identifier: Apache-2.0
"""`attention_configs`: candidates for attention: queries along y, columns of the result along x,
heads and batch along z, keys along r0_, and elements of a query along r1_.

Tables have tiles of queries and keys with how fast each is on a device that it fills, by what is
multiplied and by the size of a head. The rule orders them by that and by how many waves of programs
the sizes make; what does not fit the device's shared memory has fewer stages. The decorator
`attention` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import (
    MIN_DOT_EDGE,
    ceil_div,
    check_hints,
)
from bundler.runtime.heuristics.facts import Device, Setting, SizeHints
from bundler.runtime.heuristics.product_rules import Operands, shared_bytes

#: No candidate has larger blocks, nor larger ones than a size rounded up; masks count on it.
LARGEST_BLOCKS = {"y": 128, "r0_": 128}
#: No block is smaller: the least edge that a matrix unit has.
LEAST_BLOCK = MIN_DOT_EDGE
#: The most elements that a query and a column of the result may have.
LARGEST_HEAD = 256
_MOST = 6
_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


class _AttentionTile(NamedTuple):
    """A tile: queries, keys; warps, stages; and its speed beside that of the fastest one, where
    programs fill the device.
    """

    y: int
    r: int
    warps: int
    stages: int
    speed: float


# Of few queries, whatever the head: decoding.
_FEW = (
    _AttentionTile(16, 64, 4, 3, 0.2),
    _AttentionTile(16, 128, 4, 2, 0.19),
    _AttentionTile(16, 32, 2, 4, 0.15),
)
# The largest head -> tiles, for operands of two bytes.
_UNITS = {
    64: (
        _AttentionTile(64, 64, 4, 3, 1.0),
        _AttentionTile(128, 128, 4, 3, 0.97),
        _AttentionTile(128, 64, 4, 3, 0.96),
        _AttentionTile(128, 128, 8, 3, 0.8),
        _AttentionTile(32, 64, 4, 3, 0.4),
        *_FEW,
    ),
    128: (
        _AttentionTile(128, 64, 8, 3, 1.0),
        _AttentionTile(64, 64, 4, 3, 0.98),
        _AttentionTile(128, 64, 4, 2, 0.97),
        _AttentionTile(128, 128, 8, 2, 0.93),
        _AttentionTile(32, 64, 4, 3, 0.4),
        *_FEW,
    ),
    256: (
        _AttentionTile(128, 64, 8, 2, 1.0),
        _AttentionTile(64, 64, 8, 2, 0.75),
        _AttentionTile(64, 32, 4, 3, 0.7),
        _AttentionTile(32, 64, 4, 2, 0.4),
        *_FEW,
    ),
}
# For operands of four bytes, which take twice the room.
_WIDE = {
    64: (
        _AttentionTile(128, 32, 4, 3, 1.0),
        _AttentionTile(64, 64, 4, 2, 0.9),
        _AttentionTile(64, 32, 4, 3, 0.8),
        _AttentionTile(32, 32, 4, 3, 0.5),
        *_FEW,
    ),
    128: (
        _AttentionTile(128, 32, 8, 2, 1.0),
        _AttentionTile(64, 32, 4, 2, 0.9),
        _AttentionTile(32, 32, 4, 2, 0.5),
        *_FEW,
    ),
    256: (
        _AttentionTile(64, 32, 8, 1, 1.0),
        _AttentionTile(32, 32, 4, 2, 0.7),
        _AttentionTile(32, 16, 4, 2, 0.6),
        _AttentionTile(16, 32, 4, 2, 0.3),
        _AttentionTile(16, 16, 4, 2, 0.2),
    ),
}
# Of float32 without matrix units, each thread multiplies by itself: larger tiles are long texts.
_PLAIN = {
    64: (
        _AttentionTile(64, 32, 8, 2, 1.0),
        _AttentionTile(32, 32, 4, 2, 0.8),
        _AttentionTile(16, 32, 4, 2, 0.5),
    ),
    128: (
        _AttentionTile(32, 32, 8, 2, 1.0),
        _AttentionTile(32, 16, 4, 2, 0.9),
        _AttentionTile(16, 32, 4, 2, 0.7),
    ),
    256: (_AttentionTile(32, 16, 8, 2, 1.0), _AttentionTile(16, 16, 4, 2, 0.8)),
}
_TABLES = {"fp16": _UNITS, "bf16": _UNITS, "tf32": _WIDE, "fp32": _PLAIN}


def attention_configs(hints: SizeHints, setting: Setting, *, operands: Operands) -> list[Config]:
    """Return the candidates of attention, the one that a device without a measurement takes first.

    Pure: the same arguments give the same list in every process and on every machine.

    Args:
        hints: elements along `z`, `y`, `x`, `r0_` and `r1_`, powers of two.
        setting: device, facts and policy.
        operands: what is multiplied: float32 as it is or as tf32, float16, bfloat16.

    Raises:
        ConfigError: sizes of other axes, or that are no powers of two, larger heads, or other
            operands.
    """
    check_hints(hints)
    known = set(hints) == {"z", "y", "x", "r0_", "r1_"} and operands in _BYTES
    if not known or max(hints["x"], hints["r1_"]) > LARGEST_HEAD:
        raise ConfigError(
            f"attention: expected sizes for z, y, x, r0_ and r1_, heads of at most {LARGEST_HEAD},"
            f" and operands of {', '.join(_BYTES)}; got {dict(hints)} and {operands!r}",
            got=(dict(hints), operands),
        )
    largest = max(hints["x"], hints["r1_"])
    tiles = next(tiles for most, tiles in _TABLES[operands].items() if largest <= most)
    found = sorted(tiles, key=lambda tile: _cost(tile, hints, setting.device))
    configs = unique([one for tile in found for one in _fitted(tile, hints, setting, operands)])
    if setting.policy.deterministic:  # another block adds up in another order
        return configs[:1]
    return configs if setting.policy.max_autotune else configs[:_MOST]


def _cost(tile: _AttentionTile, hints: SizeHints, device: Device) -> float:
    """Return how long a tile takes, in an unknown unit: waves of programs, each as long as its
    queries.
    """
    blocks = hints["z"] * ceil_div(hints["y"], tile.y)
    return ceil_div(blocks, device.multiprocessors) * tile.y / tile.speed


def _fitted(
    tile: _AttentionTile, hints: SizeHints, setting: Setting, operands: Operands
) -> Iterator[Config]:
    """Yield a tile as a candidate, no longer than the sizes, with as many stages as fit."""
    device, size = setting.device, _BYTES[operands]
    y, r = (
        max(min(wanted, most), LEAST_BLOCK)
        for wanted, most in ((tile.y, hints["y"]), (tile.r, hints["r0_"]))
    )
    x, head = (max(hints[axis], LEAST_BLOCK) for axis in ("x", "r1_"))
    room = (shared_bytes(device) - y * head * size) // (r * (x + head) * size)
    if room < 1:
        return
    warps = tile.warps
    if device.is_hip:
        # A warp has 64 lanes; of two stages one lies in registers.
        warps, room = min(warps, 4), 2
    yield Config(
        {"YBLOCK": y, "XBLOCK": x, "R0_BLOCK": r},
        num_warps=warps,
        num_stages=min(tile.stages, room),
        origin=f"attention {tile.y}x{tile.r}",
    )
