# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PLR2004  # the numbers of a formula are its subject
"""Candidates for reductions: `reduction_configs` for those that loop over a row, block by block;
`persistent_reduction_configs` for those that hold a whole row at once, among them those of mixed
order, which reduce rows and columns in one pass; `cooperative_reduction_configs` and
`split_scan_configs` for reductions and scans whose rows are shared by several programs.

Kernels that call themselves native matrix products, reductions over two axes, and a third for
batches, have candidates of their own.  The decorators of the same names, combined kernels and
Inductor's generated modules call these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import (
    MAX_RSPLIT,
    MAX_TENSOR_ELEMENTS,
    MIN_DOT_EDGE,
    check_hints,
    is_reduced,
    pow2_down,
    pow2_up,
    product,
    rows,
)
from bundler.runtime.heuristics.facts import Device, ReductionHint, Setting, SizeHints
from bundler.runtime.heuristics.row_product_rules import row_product_configs
from bundler.runtime.heuristics.tiles import (
    meet_descriptor_floors,
    one_for_determinism,
    raise_to_floors,
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
    hints = _reduction_hints(hints, setting)
    configs = meet_descriptor_floors(_looped(hints, setting, hint), setting)
    return _settled(configs, hints, setting)


def _settled(configs: list[Config], hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates that a deterministic policy leaves, none below its floors."""
    return unique(raise_to_floors(one_for_determinism(configs, setting), hints, setting))


def _reduction_hints(hints: SizeHints, setting: Setting) -> SizeHints:
    """Return checked size hints of a reduction; x is 1 where the kernel has no block for it."""
    check_hints(hints)
    reduced = {axis for axis in hints if axis.startswith("r")}
    if not reduced or ("z" in hints and not setting.facts.native_matmul):
        raise ConfigError(
            f"reduction: expected sizes for x, maybe y, and r0_ or r0_ and r1_; got {dict(hints)}",
            got=dict(hints),
        )
    return {**hints, "x": 1} if setting.facts.no_x_dim else dict(hints)


def _looped(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    """Return the candidates of a looped reduction before any filter; the hints were checked."""
    if setting.facts.native_matmul:
        return _matmul_configs(hints)
    if setting.facts.row_products:
        return row_product_configs(hints, setting)
    return _looped_by_hint(hints, setting, hint)


def _weigh(hints: SizeHints, setting: Setting) -> tuple[int, bool]:
    """Return how heavy a kernel is: the largest R block it should have, and whether it needs many
    registers.
    """
    facts, major = setting.facts, setting.device.major
    if hints["x"] >= _HEAVY_X and facts.num_load + facts.num_reduction >= _HEAVY_WORK:
        return _MAX_R_HEAVY, True
    small = major is not None and major >= _SMALL_REGISTERS_MAJOR
    return _MAX_R_HEAVY if small else _MAX_R, False


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


def _looped_by_hint(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    facts, device = setting.facts, setting.device
    max_r, registers = _weigh(hints, setting)
    tile, row = _tiler(hints, setting, hint), rows(hints)
    contiguous = tile(2 if row <= _TWO_ROWS_UP_TO else 1, min(row, max_r), registers=registers)
    tiny = tile(_tiny_x(row), min(row, max_r), registers=registers)
    wider = []
    if device.is_hip:
        outer = tile(64, 8, registers=registers)
    elif facts.column_tiles and device.type == _MEASURED:
        x, r = _column_tile(hints["x"], row)
        outer = tile(x, r, warps=_COLUMN_WARPS)
        if row >= _LONG_COLUMN and hints["x"] > _FEW_COLUMNS:
            x, r, many = _LONG_COLUMN_TILE
            wider = [tile(x, r, warps=many)]
    else:
        x, r, warps = _outer_tile(hints["x"], row, facts.num_dynamic, facts.num_load)
        outer = tile(x, r, warps=warps, registers=registers)
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
        return [*leading, chosen[hint], *(wider if hint is ReductionHint.OUTER else [])]
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


def _tiny_x(row: int) -> int:
    """Return how many rows make a tile of about 512 elements; 1 for rows over 256."""
    return 2 * (_TINY_ROW // row) if row <= _TINY_ROW else 1


def _outer_tile(x: int, row: int, dynamic: int, loads: int) -> tuple[int, int, int | None]:
    """Return the tile of a reduction over an outer dimension, and its warps (None for the rule's): x
    is contiguous, so programs are spread along it.

    Args:
        x: elements along x.
        row: elements that are reduced into one.
        dynamic: size arguments that change from call to call, which cost registers in each turn of
            the loop.
        loads: of the kernel.
    """
    if x <= 1024:
        return max(min(x // 128, 8), 2), min(row, 64), None
    if x // 4096 <= 8:
        return 16, 32, None
    if dynamic > 1:
        return 64, max(min(row // 64, 64), 8), None
    if dynamic == 1:
        return 64, 1 if loads >= 3 else min(pow2_up(max(row, 128) // 128), 8), None
    block = max(min(256, pow2_up(x // 4096)), 64)
    if loads < 4 or row <= 128:
        return block, 512 // block, None
    return min(block, 32), 64 if row >= 2048 else 32, 4


# Of devices of this type.
_MEASURED = "cuda"
_COLUMN_WARPS = 4
# Rows that lie beside each other are taken so many at once where one warp holds them whole: few
# results of pieces by several programs, others in runs of 128 bytes.  Up to so long, no register is
# spilled.
_HELD_COLUMNS_OF_FEW, _HELD_COLUMNS, _HELD_ROW = 8, 32, 64
# How many rows are few, and how many keep a device busy with longer runs.
_FEW_COLUMNS, _MANY_COLUMNS = 1024, 8192
# Columns of so many elements that are not cut into pieces, as those of a convolution's result, are
# few beside their length, and want more warps each.
_LONG_COLUMN, _LONG_COLUMN_TILE = 512, (16, 128, 16)


def _column_tile(x: int, row: int) -> tuple[int, int]:
    """Return the tile of a reduction across memory.

    Of 20 such kernels on an H200 it takes 1.06 times as long as the best of about 50 tiles, 1.31
    times at most.
    """
    if x > _FEW_COLUMNS:
        return (32 if x > _MANY_COLUMNS else 16), 64
    return (8, 64) if row <= 128 else (4, 256)


# x, y, r, warps, stages
_TILES = (
    (32, 32, 16, 2, 1),
    (32, 32, 128, 4, 2),
    (32, 64, 32, 8, 5),
    (64, 32, 32, 8, 5),
    (64, 32, 128, 4, 5),
    (64, 64, 16, 4, 2),
    (64, 64, 32, 4, 2),
    (64, 64, 64, 8, 3),
    (64, 64, 128, 4, 5),
    (64, 128, 32, 4, 3),
    (64, 128, 32, 8, 4),
    (64, 128, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (128, 64, 32, 4, 3),
    (128, 64, 32, 8, 4),
    (128, 128, 32, 8, 2),
    (128, 128, 32, 4, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 5),
)
_PLAIN, _BATCHED = 3, 4


def _matmul_configs(hints: SizeHints) -> list[Config]:
    """Return the candidates of a product that loops over its inner dimension."""
    return [
        _tile(hints, x, y, warps, stages).with_kwargs(R0_BLOCK=r)
        for x, y, r, warps, stages in _TILES
    ]


def _persistent_matmul_configs(hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates of a product that holds its whole inner dimension, cut to what one
    tensor may have.
    """
    given = setting.facts.native_matmul_rblock
    r = max(rows(hints), MIN_DOT_EDGE) if given is None else given
    tiles = unique(_tile(hints, x, y, warps, stages) for x, y, _, warps, stages in _TILES)
    cut = [_cut(config, r) for config in tiles]
    return unique(config for config in cut if _elements(config, r) <= MAX_TENSOR_ELEMENTS)


def _tile(hints: SizeHints, x: int, y: int, warps: int, stages: int) -> Config:
    if len(hints) not in {_PLAIN, _BATCHED}:
        raise ConfigError(
            "matrix product: expected sizes for x, y and r0_, and z for batches; got"
            f" {dict(hints)}",
            got=dict(hints),
        )
    batch = {"ZBLOCK": 1} if len(hints) == _BATCHED else {}
    return Config(
        {"XBLOCK": x, "YBLOCK": y, **batch},
        num_warps=warps,
        num_stages=stages,
        origin=f"matrix product {x}x{y}",
    )


def _elements(config: Config, r: int) -> int:
    return product(config.kwargs.values()) * r


def _cut(config: Config, r: int) -> Config:
    while _elements(config, r) > MAX_TENSOR_ELEMENTS:
        long = max(("XBLOCK", "YBLOCK"), key=lambda name: int(config.kwargs[name]))
        if config.kwargs[long] <= MIN_DOT_EDGE:
            break
        config = replace(config, kwargs={**config.kwargs, long: config.kwargs[long] // 2})
    return config


_X_BLOCKS, _X_BLOCKS_HIP = (1, 8, 32, 128), (1, 4, 8, 16, 32, 64, 128, 256)
_MAX_ELEMENTS = 4096
_BATCH_X = 4096
_LONG_ROW, _SHORT_ROW = 1024, 256
_FEW_PROGRAMS, _ENOUGH_PROGRAMS, _ROWS_EACH = 128, 256, 8
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
    hints = _reduction_hints(hints, setting)
    configs = _persistent(hints, setting, hint)
    configs = meet_descriptor_floors(configs, setting, persistent=True)
    if setting.facts.rsplit_size:
        configs = _mix_order(configs, hints, setting)
    if not configs:
        raise ConfigError(
            f"persistent reduction: no tile holds a row of {rows(hints)} elements; loop over it"
            " instead"
        )
    return _settled(configs, hints, setting)


def _persistent(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    """Return the candidates of a persistent reduction before any filter; the hints were checked."""
    if setting.facts.native_matmul:
        return _persistent_matmul_configs(hints, setting)
    if setting.facts.row_products and not setting.facts.rsplit_size:
        whole = row_product_configs(hints, setting, persistent=True)
        return [config.without_kwargs("R0_BLOCK") for config in whole]
    if setting.policy.batch_invariant:
        hints = {**hints, "x": max(hints["x"], _BATCH_X)}
    configs = _persistent_by_hint(hints, setting, hint)
    names = [f"{axis.upper()}BLOCK" for axis in hints if is_reduced(axis)]
    return [config.without_kwargs(*names) for config in configs]


def _persistent_by_hint(hints: SizeHints, setting: Setting, hint: ReductionHint) -> list[Config]:
    if "y" in hints:
        return _by_scores(hints, setting)
    row, x, policy = rows(hints), hints["x"], setting.policy
    configs = _every_block(hints, setting, hint)
    columns = _held_columns(hints, setting) if hint is ReductionHint.OUTER else []
    if policy.max_autotune:
        more = [_tiny(hints, setting)] if setting.device.is_hip else columns
        return unique([*configs, *more])
    if hint is ReductionHint.OUTER:
        return columns or configs[-1:]
    if hint is ReductionHint.OUTER_TINY:
        return [_tiny(hints, setting)]
    if hint is ReductionHint.INNER and row >= _SHORT_ROW:
        if row > _LONG_ROW or x // _ROWS_EACH < _FEW_PROGRAMS or setting.facts.rsplit_size:
            return configs[:1]
        return [_short_row(hints, setting)]
    if setting.device.type != _MEASURED or policy.batch_invariant:
        return configs
    # First, for who cannot measure, is the largest small tile that leaves programs enough: on an
    # H200 65,536 rows of two parts of an attention took 44 us row by row, and 6 in tiles of 128.
    most = min(_LONG_ROW // row, x // _ENOUGH_PROGRAMS)
    small = [config for config in configs if config.kwargs["XBLOCK"] <= most]
    return unique([*small[-1:], *configs])


def _held_columns(hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the tile of whole rows that lie beside each other, where it was measured: one warp has
    each row in a few of its threads, so none waits for another warp.
    """
    row = rows(hints)
    measured = setting.facts.column_tiles and setting.device.type == _MEASURED
    if not measured or row > _HELD_ROW:
        return []
    x = _HELD_COLUMNS_OF_FEW if hints["x"] <= _FEW_COLUMNS else _HELD_COLUMNS
    return [reduction_tile(hints, setting, x, row, warps=1, least_warps=1)]


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
    return reduction_tile(hints, setting, _tiny_x(row), row)


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


def rows_at_once(rsplit_size: int, row: int) -> int:
    """Return how many of its rows a program of a mix-order reduction takes in one step."""
    return min(max(rsplit_size // 32, 4 if row <= 512 else 1), 16)


def _mix_order(configs: list[Config], hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates as those of a kernel that reduces rows and columns in one pass over
    `rsplit_size` rows.
    """
    facts, row, more = setting.facts, hints["r0_"], setting.policy.max_autotune
    split = facts.rsplit_size
    x = min(max(rows_at_once(split, row), facts.tma_min_blocks.get("XBLOCK", 1)), 16)
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


def cooperative_reduction_configs(
    hints: SizeHints,
    setting: Setting,
    *,
    hint: ReductionHint = ReductionHint.DEFAULT,
    is_persistent: bool = False,
) -> list[Config]:
    """Return the candidates of a reduction whose programs wait for each other, `RSPLIT` of them for
    each row.

    There are never more programs than multiprocessors: one that did not run would keep the others
    waiting for ever.  Pure.

    Args:
        hints: elements along `x` and one reduced axis; powers of two.
        setting: device, facts and policy.
        hint: how the reduced dimension lies in memory.
        is_persistent: each program holds its part of the row at once.

    Raises:
        ConfigError: as `reduction_configs`.
    """
    hints = _two_axes(hints, setting, "cooperative reduction")
    x, r = hints["x"], hints["r0_"]
    split = max(1, min(r, pow2_down(setting.device.multiprocessors) // x, MAX_RSPLIT))
    parts = {"x": x, "r0_": r // split}
    configs = (
        _persistent(parts, setting, hint)
        if is_persistent
        else _looped(parts, _static(setting), hint)
    )
    configs = [config.with_kwargs(RSPLIT=split) for config in configs]
    configs = meet_descriptor_floors(configs, setting, persistent=is_persistent)
    return _settled(configs, hints, setting)


def split_scan_configs(
    hints: SizeHints, setting: Setting, *, hint: ReductionHint = ReductionHint.DEFAULT
) -> list[Config]:
    """Return the candidates of a scan whose rows are split over programs: those of a reduction,
    with blocks not too small.

    The warps are those of the smaller block.  Pure.

    Raises:
        ConfigError: as `reduction_configs`.
    """
    hints = _two_axes(hints, setting, "split scan")
    least = setting.facts.min_split_scan_rblock
    configs = [_with_least_r(config, least) for config in _looped(hints, _static(setting), hint)]
    return one_for_determinism(meet_descriptor_floors(configs, setting), setting)


def _with_least_r(config: Config, least: int) -> Config:
    return config.with_kwargs(
        **{name: max(size, least) for name, size in config.kwargs.items() if name[0] == "R"}
    )


def _two_axes(hints: SizeHints, setting: Setting, what: str) -> SizeHints:
    hints = _reduction_hints(hints, setting)
    if len(hints) > 2:  # x and one reduced axis
        raise ConfigError(
            f"{what}: expected sizes for x and one reduced axis, got {dict(hints)}", got=dict(hints)
        )
    return hints


def _static(setting: Setting) -> Setting:
    """Return the setting without dynamic sizes, which these kinds do not look at."""
    return replace(setting, facts=replace(setting.facts, num_dynamic=0))
