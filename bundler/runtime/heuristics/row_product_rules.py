# SPDX-License-Identifier: Apache-2.0
"""`row_product_configs`: candidates for reductions that are products of one row with a matrix: x
counts rows that the matrix has in memory, r0_ elements of each.

They are bound by the memory that the matrix comes from, so each thread has several loads of 16
bytes on their way, and few warps share a row. `reduction_rules` calls it.
"""

from __future__ import annotations

from typing import NamedTuple

from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import (
    ceil_div,
    grow_for_grid,
    max_block,
    pow2_down,
)
from bundler.runtime.heuristics.facts import DEFAULT_WARP_SIZE, Setting, SizeHints


class _RowTile(NamedTuple):
    """Rows of a program, elements of each in one step, and warps."""

    x: int
    r: int
    warps: int


# By their times on an H200, with weights of 8 and of 16 bits: the first took at most 1.1 times as
# long as the fastest for each of nine shapes of models.
_TILES = (
    _RowTile(2, 2048, 4),
    _RowTile(1, 2048, 4),
    _RowTile(1, 4096, 4),
    _RowTile(2, 1024, 4),
    _RowTile(4, 2048, 8),
    _RowTile(4, 1024, 4),
    _RowTile(1, 2048, 2),
    _RowTile(1, 8192, 8),
)
# So many elements a thread has of all matrices in one step: of fewer, loads are short or alone, and
# more do not fit into its registers.
_LEAST_EACH, _MOST_EACH = 16, 32
# A device is busy with so many programs for each multiprocessor.
_PROGRAMS = 2


def row_product_configs(
    hints: SizeHints, setting: Setting, *, persistent: bool = False
) -> list[Config]:
    """Return the candidates, the one that a device without a measurement takes first.

    Pure: the same arguments give the same list in every process and on every machine.

    Args:
        hints: elements along `x` and `r0_`, powers of two.
        setting: device, facts and policy.
        persistent: whether a program holds whole rows.
    """
    tiles = unique(_config(tile, hints, setting, persistent=persistent) for tile in _TILES)
    wanted = _PROGRAMS * setting.device.multiprocessors

    def is_idle(config: Config) -> bool:
        return ceil_div(hints["x"], int(config.kwargs["XBLOCK"])) < wanted

    # In the order of the table, but where too few programs would run, those with more first.
    found = sorted(tiles, key=lambda c: int(c.kwargs["XBLOCK"]) if is_idle(c) else 0)
    return found[:1] if setting.policy.deterministic else found


def _config(tile: _RowTile, hints: SizeHints, setting: Setting, *, persistent: bool) -> Config:
    """Return a tile, no longer than the sizes, with no more warps than have enough to do."""
    lanes, row = setting.device.warp_size, hints["r0_"]
    warps = max(tile.warps * DEFAULT_WARP_SIZE // lanes, 1)
    # Several products share the registers of a program.
    several = max(setting.facts.num_reduction, 1)
    room = pow2_down(max(warps * lanes * _MOST_EACH // several, 1))
    r = row if persistent else min(tile.r, row, room, max_block("r0_", setting))
    # Short rows leave room for more of them, where there are enough.
    enough = pow2_down(max(hints["x"] // (_PROGRAMS * setting.device.multiprocessors), 1))
    x = max(tile.x, min(tile.x * tile.r // r, enough))
    x = min(x, hints["x"], max(room // r, 1))
    warps = pow2_down(max(min(warps, x * r * several // (lanes * _LEAST_EACH)), 1))
    x = grow_for_grid(x, hints["x"], warps, setting)
    return Config(
        {"XBLOCK": x, "R0_BLOCK": r},
        num_warps=warps,
        num_stages=1,
        origin=f"row product {tile.x}x{tile.r}",
    )
