# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PLR2004  # the numbers of a formula are its subject
"""`persistent_reduction_configs`: candidates for reductions that hold a whole row at once.

Among them are those of mixed order, which reduce rows and columns in one pass.

The decorator `persistent_reduction`, combined kernels, split kernels and Inductor's generated
modules call it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import is_reduced, pow2_down, rows
from bundler.runtime.heuristics.facts import Device, ReductionHint, Setting, SizeHints
from bundler.runtime.heuristics.filters import (
    meet_descriptor_floors,
    one_for_determinism,
    raise_to_floors,
)
from bundler.runtime.heuristics.matmul_rules import persistent_matmul_configs
from bundler.runtime.heuristics.reduction_rules import reduction_hints, tiny_x
from bundler.runtime.heuristics.tiles import (
    reduction_tile,
    scores_of,
    share_by_score,
    tiled_reduction,
)

_X_BLOCKS, _X_BLOCKS_HIP = (1, 8, 32, 128), (1, 4, 8, 16, 32, 64, 128, 256)
_MAX_ELEMENTS = 4096
_BATCH_X = 4096
_LONG_ROW, _SHORT_ROW = 1024, 256
_FEW_PROGRAMS, _ROWS_EACH = 128, 8
_MANY_ACCESSES = 5
_RULE_OF_ONE_WARP = {"cuda", "hip"}

_LEAST_SPLIT, _MOST_SPLIT, _PROGRAMS_PER_SM = 16, 128, 8
_MAX_STAGES, _MAX_STAGES_LONG, _STAGES_LONG_ROW = 3, 2, 8192


def persistent_reduction_configs(
    hints: SizeHints, setting: Setting, *, hint: ReductionHint = ReductionHint.DEFAULT
) -> list[Config]:
    """Return the candidates of a reduction whose R block is the whole row, and so no parameter.

    With `rsplit_size` among the facts they are those of a mix-order reduction.  Pure, as
    `reduction_configs` is: where torch asks whether this process sees a GPU, this asks what the
    device is.

    Raises:
        ConfigError: as `reduction_configs`, and where a row is longer than any block.
    """
    hints = reduction_hints(hints, setting)
    configs = persistent(hints, setting, hint)
    configs = meet_descriptor_floors(configs, setting, persistent=True)
    if setting.facts.rsplit_size:
        configs = _mix_order(configs, hints, setting)
    if not configs:
        raise ConfigError(
            f"persistent reduction: no tile holds a row of {rows(hints)} elements; loop over it"
            " instead"
        )
    configs = one_for_determinism(configs, setting)
    return unique(raise_to_floors(configs, hints, setting))


def persistent(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    """Return the candidates of a persistent reduction before any filter; the hints were checked."""
    if setting.facts.native_matmul:
        return persistent_matmul_configs(hints, setting)
    if setting.policy.batch_invariant:
        hints = {**hints, "x": max(hints["x"], _BATCH_X)}
    configs = _by_hint(hints, setting, hint)
    names = [f"{axis.upper()}BLOCK" for axis in hints if is_reduced(axis)]
    return [config.without_kwargs(*names) for config in configs]


def _by_hint(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    if "y" in hints:
        return _by_scores(hints, setting)
    row, x, policy = rows(hints), hints["x"], setting.policy
    configs = _every_block(hints, setting, hint)
    if policy.max_autotune:
        return unique([*configs, _tiny(hints, setting)]) if setting.device.is_hip else configs
    if hint is ReductionHint.OUTER:
        return configs[-1:]
    if hint is ReductionHint.OUTER_TINY:
        return [_tiny(hints, setting)]
    if hint is ReductionHint.INNER and row >= _SHORT_ROW:
        if row > _LONG_ROW or x // _ROWS_EACH < _FEW_PROGRAMS or setting.facts.rsplit_size:
            return configs[:1]
        return [_short_row(hints, setting)]
    return configs


def _every_block(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    row = rows(hints)
    blocks = _X_BLOCKS_HIP if setting.device.is_hip else _X_BLOCKS
    return [
        reduction_tile(hints, setting, x, row, registers=True, hint=hint)
        for x in blocks
        if x == 1 or (row * x <= _MAX_ELEMENTS and x <= hints["x"])
    ]


def _short_row(hints: SizeHints, setting: Setting) -> Config:
    """Return the one tile for many short contiguous rows."""
    row, facts = rows(hints), setting.facts
    tile = partial(reduction_tile, hints, setting, registers=True)
    if setting.device.type in _RULE_OF_ONE_WARP:
        # A row in one warp needs no shared memory to be reduced.
        return tile(
            min(_LONG_ROW // row, _ROWS_EACH), row, warps=1, least_warps=1, hint=ReductionHint.INNER
        )
    few = (
        hints["x"] // _ROWS_EACH < _FEW_PROGRAMS
        or facts.num_load + facts.num_store >= _MANY_ACCESSES
    )
    return tile(1 if few else _ROWS_EACH, row)


def _tiny(hints: SizeHints, setting: Setting) -> Config:
    row = rows(hints)
    return reduction_tile(hints, setting, tiny_x(row), row)


def _by_scores(hints: SizeHints, setting: Setting) -> list[Config]:
    row, scores = rows(hints), scores_of(hints, setting)
    outer = {axis: scores[axis] for axis in ("x", "y")}
    configs = []
    for target in _X_BLOCKS_HIP if setting.device.is_hip else _X_BLOCKS:
        if target * row <= _MAX_ELEMENTS:
            blocks = share_by_score(hints, outer, target, setting)
            configs.append(tiled_reduction(hints, setting, blocks["x"], blocks["y"], row))
    return configs


def choose_rsplit_size(x: int, device: Device) -> int:
    """Return how many rows a program of a mix-order reduction should take, so that each
    multiprocessor has several.
    """
    programs = _PROGRAMS_PER_SM * device.multiprocessors
    return min(max(pow2_down(max(x // programs, 1)), _LEAST_SPLIT), _MOST_SPLIT)


def _mix_order(configs: list[Config], hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates as those of a kernel that reduces rows and columns in one pass over
    `rsplit_size` rows.
    """
    facts, row, more = setting.facts, hints["r0_"], setting.policy.max_autotune
    split = facts.rsplit_size
    x = min(max(split // 32, 4 if row <= 512 else 1, facts.tma_min_blocks.get("XBLOCK", 1)), 16)
    most_stages = _MAX_STAGES_LONG if row > _STAGES_LONG_ROW else _MAX_STAGES
    stages = min(max(split // x // 4, 1), most_stages if facts.allow_multi_stages else 1)
    result = []
    for config in configs:
        changed = config.with_kwargs(RSPLIT_SIZE=split, XBLOCK=x, NUM_STAGES=stages)
        if row <= _LONG_ROW:
            # Fewer warps leave room for more programs, and each handles its rows one after another.
            result.append(replace(changed, num_warps=max(changed.num_warps // 2, 1)))
            if more:
                result.append(replace(changed, num_warps=2))
        else:
            result.append(changed)
            if more and changed.num_warps < (16 if setting.device.is_hip else 32):
                result.append(replace(changed, num_warps=changed.num_warps * 2))
    return unique(result)
