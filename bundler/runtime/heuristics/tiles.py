# SPDX-License-Identifier: Apache-2.0
"""From a wanted tile to a candidate that fits the sizes: the builders that the rules for pointwise
kernels and reductions use, and the filters that they apply to a list of candidates.

`pointwise_tile`, `reduction_tile` and `tiled_reduction` each return one `Config`; `share_by_score`
divides a tile among axes.  Filters remove candidates, or change blocks: `one_for_determinism` keeps a
single candidate, so that every run takes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import (
    MAX_GRID,
    block_name,
    ceil_div,
    check_blocks,
    grow_for_grid,
    is_reduced,
    max_block,
    product,
    rows,
    warp_rule,
)
from bundler.runtime.heuristics.facts import ReductionHint, Setting, SizeHints

_ELEMENTS_PER_WARP = 256
_FOUR_WARPS_FROM = 128  # elements; two warps at such a size run into faults of ptxas
_SHRINK = 8  # a tile larger than the whole problem is cut to this part
_WARP_WORK = 128  # elements of a reduction for a warp
_TILED_WARP_WORK = 256
_MAX_WARPS, _MAX_WARPS_LONG, _LONG_ROW = 16, 32, 8192
_LEAST_R_SHARE = 4  # a reduced axis begins with so many elements when a tile is spread by scores


def pointwise_tile(
    hints: SizeHints,
    setting: Setting,
    *tile: int,
    per_warp: int = _ELEMENTS_PER_WARP,
    min_elem: int | None = None,
    warps: int | None = None,
    stages: int = 1,
    waves_per_eu: int | None = None,
) -> Config:
    """Return a candidate near a tile of one to three axes: x, y, z.

    Args:
        hints: sizes.
        setting: device, facts and policy.
        tile: wanted blocks.
        per_warp: elements that a warp should have.
        min_elem: least elements of a thread; None takes the kernel's.
        warps: None applies the rule.
        stages: of the pipeline.
        waves_per_eu: for AMD alone.
    """
    target = product(tile)
    if product(hints.values()) < target:
        target //= _SHRINK
    blocks = {axis: min(size, hints[axis]) for axis, size in zip("xyz", tile, strict=False)}
    for axis, limit in zip(blocks, MAX_GRID, strict=False):
        most = min(hints[axis], max_block(axis, setting))
        while blocks[axis] < most and (
            blocks[axis] * limit < hints[axis] or product(blocks.values()) < target
        ):
            blocks[axis] *= 2
    elements = product(blocks.values())
    if warps is None:
        warps = warp_rule(elements // per_warp, setting.device, least=1)
    if elements >= _FOUR_WARPS_FROM and not setting.device.is_hip:
        warps = max(warps, 4)
    least = (
        (setting.facts.min_elem_per_thread if min_elem is None else min_elem)
        * setting.device.warp_size
        * warps
    )
    x = blocks["x"] * ceil_div(max(elements, least), elements)
    blocks["x"] = min(grow_for_grid(x, hints["x"], warps, setting), hints["x"])
    return _config(
        blocks, hints, setting, warps, stages, waves_per_eu, f"pointwise {'x'.join(map(str, tile))}"
    )


def reduction_tile(
    hints: SizeHints,
    setting: Setting,
    x: int,
    r: int,
    *,
    warps: int | None = None,
    least_warps: int | None = None,
    registers: bool = False,
    hint: ReductionHint = ReductionHint.DEFAULT,
    dynamic_scale: bool = True,
    waves_per_eu: int | None = None,
) -> Config:
    """Return a candidate near a tile of `x` rows and `r` elements of each."""
    blocks = {"x": min(x, hints["x"]), **spread_row(hints, setting, r)}
    target = product(blocks.values())
    if warps is None:
        # Along a contiguous row each warp gets its elements, however many rows a program has.
        warps = (r if hint is ReductionHint.INNER else target) // _WARP_WORK
    bounds = {"most": _MAX_WARPS if r <= _LONG_ROW else _MAX_WARPS_LONG}
    if least_warps is not None:
        bounds["least"] = least_warps
    warps = warp_rule(warps, setting.device, registers=registers, **bounds)
    blocks["x"] = grow_for_grid(blocks["x"], hints["x"], warps, setting)
    for axis in sorted(axis for axis in blocks if is_reduced(axis)):
        while product(blocks.values()) > target and blocks[axis] > 1:
            blocks[axis] //= 2
    config = _config(blocks, hints, setting, warps, 1, waves_per_eu, f"reduction {x}x{r}")
    return replace(config, dynamic_scale=dynamic_scale)


def tiled_reduction(
    hints: SizeHints,
    setting: Setting,
    x: int,
    y: int,
    r: int,
    *,
    registers: bool = False,
    waves_per_eu: int | None = None,
) -> Config:
    """Return a candidate for a reduction with two axes that are not reduced."""
    blocks = {"x": min(x, hints["x"]), "y": min(y, hints["y"]), **spread_row(hints, setting, r)}
    warps = warp_rule(product(blocks.values()) // _TILED_WARP_WORK, setting.device, least=1)
    warps = warp_rule(warps, setting.device, most=_MAX_WARPS, registers=registers)
    return _config(blocks, hints, setting, warps, 1, waves_per_eu, f"tiled reduction {x}x{y}x{r}")


def spread_row(hints: SizeHints, setting: Setting, r: int) -> dict[str, int]:
    """Spread `r` elements over the reduced axes, the last (contiguous) one first; axes come out in
    that order.

    Raises:
        ConfigError: the axes together are too small a block for it.
    """
    left = min(r, rows(hints))
    blocks = {}
    for axis in sorted(filter(is_reduced, hints), reverse=True):
        blocks[axis] = min(left, hints[axis], max_block(axis, setting))
        left //= blocks[axis]
    if left > 1:
        raise ConfigError(
            f"a row of {min(r, rows(hints))} elements does not fit the largest blocks; loop over"
            " it, or split it",
            got=r,
        )
    return blocks


def share_by_score(
    hints: SizeHints, scores: Mapping[str, float], target: int, setting: Setting
) -> dict[str, int]:
    """Return blocks whose product reaches `target`, doubled one at a time where the score says that
    it pays most.

    Every axis begins with 1, a reduced one with 4.  An axis without a score is doubled only when no
    other can be.
    """
    if not sum(scores.values()):
        scores = dict.fromkeys(scores, 1.0)
    blocks = {axis: _LEAST_R_SHARE if is_reduced(axis) else 1 for axis in scores}
    total = sum(scores.values())
    worth = {axis: score / total for axis, score in scores.items()}
    while product(blocks.values()) < target and worth:
        axis = max(worth, key=worth.__getitem__)
        if blocks[axis] >= min(max_block(axis, setting), hints[axis]):
            del worth[axis]
            continue
        blocks[axis] *= 2
        worth[axis] /= 2
    return blocks


def scores_of(hints: SizeHints, setting: Setting) -> Mapping[str, float]:
    """Return the kernel's tiling scores, or even ones.

    Raises:
        ConfigError: an axis has none.
    """
    scores = setting.facts.tiling_scores or dict.fromkeys(hints, 1.0)
    missing = sorted(hints.keys() - scores.keys())
    if missing:
        raise ConfigError(
            f"tiling scores: none for {', '.join(missing)}; give every axis one", missing=missing
        )
    return scores


def _config(
    blocks: Mapping[str, int],
    hints: SizeHints,
    setting: Setting,
    warps: int,
    stages: int,
    waves_per_eu: int | None,
    origin: str,
) -> Config:
    kwargs = {block_name(axis): size for axis, size in blocks.items()}
    check_blocks(kwargs, hints, setting)
    options = (
        {} if waves_per_eu is None or not setting.device.is_hip else {"waves_per_eu": waves_per_eu}
    )
    return Config(kwargs, num_warps=warps, num_stages=stages, options=options, origin=origin)


_TOO_SMALL_R = 4
_TWO_AXES = {"XBLOCK", "R0_BLOCK"}


def meet_descriptor_floors(
    configs: Sequence[Config], setting: Setting, *, persistent: bool = False
) -> list[Config]:
    """Return the candidates that tensor descriptors allow, after a copy of the first that is raised
    to what they need.

    Args:
        configs: candidates.
        setting: with the floors.
        persistent: the kernel's row block is no parameter, so its floor does not count.

    Raises:
        ConfigError: a floor of a parameter that the candidates do not have.
    """
    floors = setting.facts.tma_min_blocks
    if persistent:
        floors = {name: floor for name, floor in floors.items() if not is_reduced(name.lower())}
    if not floors or not configs:
        return list(configs)
    unknown = sorted(floors.keys() - configs[0].kwargs.keys())
    if unknown:
        raise ConfigError(f"descriptor floors: the kernel has no {unknown[0]}", name=unknown[0])
    raised = {name: max(configs[0].kwargs[name], floor) for name, floor in floors.items()}
    first = replace(configs[0].with_kwargs(**raised), dynamic_scale=True)
    return [
        first,
        *(c for c in configs if all(c.kwargs[name] >= floor for name, floor in floors.items())),
    ]


def one_for_determinism(configs: Sequence[Config], setting: Setting) -> list[Config]:
    """Return the candidates, each once; under a deterministic policy the one that every run takes.

    That one has neither the largest nor a tiny R block: extremes are seldom good, and no
    measurement will find out.
    """
    left = unique(configs)
    if not setting.policy.deterministic or len(left) == 1:
        return left
    left = [c for c in left if c.kwargs.get("R0_BLOCK", _TOO_SMALL_R + 1) > _TOO_SMALL_R] or left
    if not setting.facts.contiguous_row:
        left = [c for c in left if c.kwargs["XBLOCK"] != 1] or left
    for measure in (_block("R0_BLOCK"), lambda config: config.num_warps, _block("XBLOCK")):
        if len(left) > 1:
            left = _second_largest(left, measure)
    return left[:1]


def _block(name: str) -> Callable[[Config], int]:
    def measure(config: Config) -> int:
        size: int = config.kwargs.get(name, -1)
        return size

    return measure


def _second_largest(configs: list[Config], measure: Callable[[Config], int]) -> list[Config]:
    """Return those with the second largest measure, or all of them, in order of it, when there is
    only one.
    """
    sizes = sorted({measure(config) for config in configs})
    wanted = sizes[-2:][0]
    return [config for config in configs if measure(config) == wanted]


def raise_to_floors(configs: Sequence[Config], hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates of a reduction with both blocks at their floors or above, and tiles no
    larger than before.

    Where a block was raised, the other one is halved until the tile is as large as it was, R first;
    never below a floor.

    Raises:
        ConfigError: a candidate has other axes than x and one reduced one, or a floor is over a
            limit.
    """
    facts = setting.facts
    if facts.min_xblock is None and facts.min_rblock is None:
        return list(configs)
    floors = {"R0_BLOCK": facts.min_rblock or 1, "XBLOCK": facts.min_xblock or 1}
    return [_raised(config, floors, hints, setting) for config in configs]


def _raised(
    config: Config, floors: Mapping[str, int], hints: SizeHints, setting: Setting
) -> Config:
    others = {name for name in config.kwargs if name.endswith("BLOCK")} - _TWO_AXES
    if others:
        raise ConfigError(
            f"block floors: {config} has {', '.join(sorted(others))}; floors are for x and r alone"
        )
    before = {name: config.kwargs[name] for name in floors if name in config.kwargs}
    after = {name: max(size, floors[name]) for name, size in before.items()}
    for name, floor in floors.items():
        while product(after.values()) > product(before.values()) and after.get(name, floor) > floor:
            after[name] //= 2
    check_blocks(after, hints, setting)
    return config.with_kwargs(**after)
