# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PLR2004  # the numbers of a formula are its subject
"""`reduction_configs`: candidates for reductions that loop over a row, block by block.

The decorator `reduction`, combined kernels and Inductor's generated modules call it; persistent and
split rules use its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import check_hints, pow2_up, rows
from bundler.runtime.heuristics.facts import ReductionHint, Setting, SizeHints
from bundler.runtime.heuristics.filters import (
    meet_descriptor_floors,
    one_for_determinism,
    raise_to_floors,
)
from bundler.runtime.heuristics.matmul_rules import matmul_configs
from bundler.runtime.heuristics.tiles import (
    reduction_tile,
    scores_of,
    share_by_score,
    tiled_reduction,
)

_HEAVY_X, _HEAVY_WORK = 1024, 10
_MAX_R, _MAX_R_HEAVY = 2048, 1024
_SMALL_REGISTERS_MAJOR = 10  # from this compute capability on long blocks were seen to lose
_PERSISTENT_ELEMENTS, _PERSISTENT_ROW, _PERSISTENT_WORK = 4096, 32768, 8
_TINY_ROW = 256
_TWO_ROWS_UP_TO = 2048

Tile = Callable[..., Config]


def reduction_configs(
    hints: SizeHints, setting: Setting, *, hint: ReductionHint = ReductionHint.DEFAULT
) -> list[Config]:
    """Return the candidates of a looped reduction, the default first.

    Pure: the same arguments give the same list in every process and on every machine.

    Args:
        hints: elements along `x`, maybe `y`, and the reduced axes `r0_`, `r1_`; powers of two.
        setting: device, facts and policy.
        hint: how the reduced dimension lies in memory.

    Raises:
        ConfigError: other axes, sizes that are no powers of two, or a problem that no grid can
            cover.
    """
    hints = reduction_hints(hints, setting)
    configs = looped(hints, setting, hint)
    configs = one_for_determinism(meet_descriptor_floors(configs, setting), setting)
    return unique(raise_to_floors(configs, hints, setting))


def reduction_hints(hints: SizeHints, setting: Setting) -> SizeHints:
    """Return checked size hints of a reduction; x is 1 where the kernel has no block for it."""
    check_hints(hints)
    reduced = {axis for axis in hints if axis.startswith("r")}
    if not reduced or "z" in hints.keys() - _batched(setting):
        raise ConfigError(
            f"reduction: expected sizes for x, maybe y, and r0_ or r0_ and r1_; got {dict(hints)}",
            got=dict(hints),
        )
    return {**hints, "x": 1} if setting.facts.no_x_dim else dict(hints)


def _batched(setting: Setting) -> set[str]:
    return {"z"} if setting.facts.native_matmul else set()


def looped(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    """Return the candidates of a looped reduction before any filter; the hints were checked."""
    if setting.facts.native_matmul:
        return matmul_configs(hints)
    return _by_hint(hints, setting, hint)


class _Weight(NamedTuple):
    """How heavy a kernel is: the largest R block it should have, and whether it needs many
    registers.
    """

    max_r: int
    registers: bool


def _weigh(hints: SizeHints, setting: Setting) -> _Weight:
    facts, major = setting.facts, setting.device.major
    if hints["x"] >= _HEAVY_X and facts.num_load + facts.num_reduction >= _HEAVY_WORK:
        return _Weight(_MAX_R_HEAVY, registers=True)
    small = major is not None and major >= _SMALL_REGISTERS_MAJOR
    return _Weight(_MAX_R_HEAVY if small else _MAX_R, registers=False)


def _tiler(hints: SizeHints, setting: Setting, hint: ReductionHint) -> Tile:
    """Return the builder for these sizes: by scores where there are two axes beside the reduced
    ones.
    """
    if "y" not in hints:
        return partial(reduction_tile, hints, setting, hint=hint)
    scores = scores_of(hints, setting)

    def tile(
        x: int,
        r: int,
        *,
        warps: int | None = None,
        registers: bool = False,
        dynamic_scale: bool = True,
        waves_per_eu: int | None = None,
    ) -> Config:
        # A tile spread by scores is no longer the one that these warps, or the wish not to scale
        # it, were meant for.
        del warps, dynamic_scale
        blocks = share_by_score(hints, scores, x * r, setting)
        return tiled_reduction(
            hints,
            setting,
            blocks["x"],
            blocks["y"],
            blocks["r0_"],
            registers=registers,
            waves_per_eu=waves_per_eu,
        )

    return tile


def _by_hint(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    facts, device = setting.facts, setting.device
    max_r, registers = _weigh(hints, setting)
    tile, row = _tiler(hints, setting, hint), rows(hints)
    contiguous = tile(2 if row <= _TWO_ROWS_UP_TO else 1, min(row, max_r), registers=registers)
    tiny = tile(tiny_x(row), min(row, max_r), registers=registers)
    if device.is_hip:
        outer = tile(64, 8, registers=registers)
    else:
        wanted = _outer_tile(hints["x"], row, facts.num_dynamic, facts.num_load)
        outer = tile(wanted.x, wanted.r, warps=wanted.warps, registers=registers)
    leading = []
    if facts.add_persistent_rblock and facts.num_load + facts.num_reduction <= _PERSISTENT_WORK:
        x, r = max(_PERSISTENT_ELEMENTS // row, 1), min(row, _PERSISTENT_ROW)
        leading = [tile(x, r, registers=registers, dynamic_scale=False)]
    chosen = {
        ReductionHint.INNER: contiguous,
        ReductionHint.OUTER: outer,
        ReductionHint.OUTER_TINY: tiny,
    }
    if hint in chosen and "y" not in hints and not setting.policy.max_autotune:
        return [*leading, chosen[hint]]
    configs = [*leading, contiguous, outer, tiny, tile(64, 64), tile(8, 512), tile(64, 4, warps=8)]
    return _with_hip_extras(configs, tile, setting) if device.is_hip else configs


def _with_hip_extras(configs: list[Config], tile: Tile, setting: Setting) -> list[Config]:
    configs = [
        *configs,
        tile(1024, 8, warps=4, waves_per_eu=2),
        tile(512, 8, warps=4, waves_per_eu=1),
    ]
    beside = setting.facts.max_persistent_rblock
    if not beside:
        return configs
    # Large tiles of a persistent kernel in the same source take the compiler for AMD an hour.
    return [
        config for config in configs if config.kwargs["XBLOCK"] * beside <= _PERSISTENT_ELEMENTS
    ]


def tiny_x(row: int) -> int:
    """Return how many rows make a tile of about 512 elements; 1 for rows over 256."""
    return 2 * (_TINY_ROW // row) if row <= _TINY_ROW else 1


class _OuterTile(NamedTuple):
    x: int
    r: int
    warps: int | None = None


def _outer_tile(x: int, row: int, dynamic: int, loads: int) -> _OuterTile:
    """Return the tile of a reduction over an outer dimension: x is contiguous, so programs are
    spread along it.

    Args:
        x: elements along x.
        row: elements that are reduced into one.
        dynamic: size arguments that change from call to call, which cost registers in each turn of
            the loop.
        loads: of the kernel.
    """
    if x <= 1024:
        return _OuterTile(max(min(x // 128, 8), 2), min(row, 64))
    if x // 4096 <= 8:
        return _OuterTile(16, 32)
    if dynamic > 1:
        return _OuterTile(64, max(min(row // 64, 64), 8))
    if dynamic == 1:
        return _OuterTile(64, 1 if loads >= 3 else min(pow2_up(max(row, 128) // 128), 8))
    block = max(min(256, pow2_up(x // 4096)), 64)
    if loads < 4 or row <= 128:
        return _OuterTile(block, 512 // block)
    return _OuterTile(min(block, 32), 64 if row >= 2048 else 32, 4)
