# SPDX-License-Identifier: Apache-2.0
"""Decorators that give a JIT function the candidates and the grid of a heuristic, and return a
`HeuristicKernel`.

`bundler.runtime.heuristics` shows them under its own name, which is where programs and
`docs/heuristics.md` use them:

    @heuristics.pointwise({"x": 2**20}, Setting(H200))
    @triton.jit
    def scale(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr): ...

    scale.run(x, out, x.numel())

A decorator chooses when the function is defined, from its arguments alone: a machine without a GPU
gets the candidates that the declared device gets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bundler.runtime.configs import (
    fixed_configs,
    foreach_configs,
    template_configs,
    user_configs,
)
from bundler.runtime.heuristics.attention_rules import attention_configs
from bundler.runtime.heuristics.block_limits import pow2_up
from bundler.runtime.heuristics.combo_rules import SubKernel, combo_plan
from bundler.runtime.heuristics.facts import (
    HeuristicKind,
    ReductionHint,
    Setting,
    SizeHints,
    TileHint,
)
from bundler.runtime.heuristics.launch_grids import Grid, open_grid
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.product_rules import (
    LARGEST_BLOCKS,
    Operands,
    product_configs,
)
from bundler.runtime.heuristics.reduction_rules import (
    choose_rsplit_size,
    cooperative_reduction_configs,
    persistent_reduction_configs,
    reduction_configs,
    split_scan_configs,
)
from bundler.runtime.tuning.heuristic_kernel import Candidates, HeuristicKernel

Decorator = Callable[[Any], HeuristicKernel]
GridLike = str | Grid
_POINTWISE_GRIDS = {1: "Grid1D", 2: "Grid2DWithYZOverflow", 3: "Grid3D"}


def pointwise(
    hints: SizeHints,
    setting: Setting,
    *,
    tile_hint: TileHint = TileHint.DEFAULT,
    grid: GridLike | None = None,
    **launch: Any,
) -> Decorator:
    """Give a kernel over one to three axes its candidates.

    Args:
        hints: elements along `x`, `x` and `y`, or all three; powers of two.
        setting: device, facts and policy.
        tile_hint: of a kernel over two axes.
        grid: a kind by name, or a function of blocks and sizes; None takes that of the number of
            axes.
        launch: `mutated`, `zeroed`, `constants`, `extra_arguments`, `compile_options`, `options`
            and `clock` of `HeuristicKernel`; the same for every decorator here.

    Raises:
        ConfigError: sizes, grid or setting that cannot be.
    """
    configs = pointwise_configs(hints, setting, tile_hint=tile_hint)
    return _decorator(
        "pointwise", configs, setting, hints, grid or _POINTWISE_GRIDS[len(hints)], launch
    )


def reduction(
    hints: SizeHints,
    setting: Setting,
    *,
    hint: ReductionHint = ReductionHint.DEFAULT,
    grid: GridLike | None = None,
    **launch: Any,
) -> Decorator:
    """Give a reduction that loops over its rows its candidates; arguments as `reduction_configs`
    and `pointwise` have them.
    """
    configs = reduction_configs(hints, setting, hint=hint)
    return _decorator("reduction", configs, setting, hints, grid or _reduction_grid(hints), launch)


def persistent_reduction(
    hints: SizeHints,
    setting: Setting,
    *,
    hint: ReductionHint = ReductionHint.DEFAULT,
    grid: GridLike | None = None,
    **launch: Any,
) -> Decorator:
    """Give a reduction that holds its rows whole its candidates; arguments as `reduction`
    has them.
    """
    configs = persistent_reduction_configs(hints, setting, hint=hint)
    return _decorator(
        "persistent_reduction", configs, setting, hints, grid or _reduction_grid(hints), launch
    )


def product(
    hints: SizeHints, setting: Setting, *, operands: Operands, grid: GridLike, **launch: Any
) -> Decorator:
    """Give a product of matrices its candidates; arguments as `product_configs` and `pointwise`
    have them. Its hints are the sizes themselves, no powers of two.
    """
    facts = replace(setting.facts, native_matmul=True, max_blocks=LARGEST_BLOCKS)
    setting = replace(setting, facts=facts)
    configs = product_configs(hints, setting, operands=operands)
    rounded = {axis: pow2_up(size) for axis, size in hints.items()}
    return _decorator("product", configs, setting, rounded, grid, launch)


def attention(
    hints: SizeHints, setting: Setting, *, operands: Operands, grid: GridLike, **launch: Any
) -> Decorator:
    """Give attention its candidates; arguments as `attention_configs` and `pointwise` have them."""
    configs = attention_configs(hints, setting, operands=operands)
    return _decorator("attention", configs, setting, hints, grid, launch)


def mix_order_reduction(
    hints: SizeHints, setting: Setting, *, hint: ReductionHint = ReductionHint.INNER, **launch: Any
) -> Decorator:
    """Give a kernel that reduces rows and columns in one pass its candidates.

    Each program takes `rsplit_size` rows, of the facts or, where those have none, as many as keep
    the device busy.
    """
    size = setting.facts.rsplit_size or choose_rsplit_size(hints.get("x", 1), setting.device)
    setting = replace(setting, facts=replace(setting.facts, rsplit_size=size))
    return persistent_reduction(hints, setting, hint=hint, grid="MixOrderReductionGrid", **launch)


def cooperative_reduction(
    hints: SizeHints,
    setting: Setting,
    *,
    hint: ReductionHint = ReductionHint.DEFAULT,
    is_persistent: bool = False,
    **launch: Any,
) -> Decorator:
    """Give a reduction whose programs share rows, and wait for each other, its candidates; launched
    so that all run at once.
    """
    if setting.device.type == "cuda":
        launch["compile_options"] = {
            "launch_cooperative_grid": True,
            **launch.get("compile_options", {}),
        }
    configs = cooperative_reduction_configs(hints, setting, hint=hint, is_persistent=is_persistent)
    return _decorator("reduction", configs, setting, hints, "CooperativeReductionGrid", launch)


def split_scan(
    hints: SizeHints,
    setting: Setting,
    *,
    hint: ReductionHint = ReductionHint.DEFAULT,
    **launch: Any,
) -> Decorator:
    """Give a scan whose rows are split over programs its candidates."""
    return _decorator(
        "split_scan",
        split_scan_configs(hints, setting, hint=hint),
        setting,
        hints,
        "SplitScanGrid",
        launch,
    )


def template(
    num_stages: int,
    num_warps: int,
    setting: Setting,
    *,
    grid: GridLike,
    options: Mapping[str, Any] | None = None,
    **launch: Any,
) -> Decorator:
    """Give a kernel whose blocks stand in its source its one config."""
    configs = template_configs(num_stages, num_warps, **(options or {}))
    return _decorator("template", configs, setting, {}, grid, launch)


def fixed_config(
    config: Mapping[str, Any], setting: Setting, *, grid: GridLike, **launch: Any
) -> Decorator:
    """Give a kernel the one config that a flat dictionary describes."""
    return _decorator("fixed", fixed_configs(config), setting, {}, grid, launch)


def user_autotune(
    configs: Sequence[Mapping[str, Any]], setting: Setting, *, grid: GridLike, **launch: Any
) -> Decorator:
    """Give a kernel the configs that its user wrote; without any the compiler's defaults."""
    return _decorator("user_autotune", user_configs(configs), setting, {}, grid, launch)


def foreach(setting: Setting, *, grid: GridLike, **launch: Any) -> Decorator:
    """Give a kernel over a list of tensors its configs, which differ in their warps."""
    return _decorator(
        "template",
        foreach_configs(max_autotune=setting.policy.max_autotune),
        setting,
        {},
        grid,
        launch,
    )


def combo(
    kind: HeuristicKind,
    kernels: Sequence[SubKernel],
    setting: Setting,
    *,
    grid: GridLike,
    parameters: Collection[str] | None = None,
    grouping: bool = False,
    **launch: Any,
) -> Decorator:
    """Give several kernels in one launch, each with blocks of its own, the config to begin with,
    and the plan to go on from it.

    Args:
        kind: of the kernel around them.
        kernels: what is known of each.
        setting: device and policy.
        grid: a combination's.
        parameters, grouping: as `combo_plan` has them.
        launch: as in `pointwise`.
    """
    plan = combo_plan(kernels, setting, parameters=parameters, grouping=grouping)
    return _bound(Candidates(kind, (plan.base,), setting, combo=plan), grid, launch)


def _reduction_grid(hints: SizeHints) -> str:
    if "z" in hints:
        return "BatchMatmulGrid3D"
    return "Grid2D" if "y" in hints else "Grid1D"


def _decorator(
    kind: HeuristicKind,
    configs: Sequence[Any],
    setting: Setting,
    hints: SizeHints,
    grid: GridLike,
    launch: Mapping[str, Any],
) -> Decorator:
    return _bound(Candidates(kind, tuple(configs), setting, dict(hints)), grid, launch)


def _bound(candidates: Candidates, grid: GridLike, launch: Mapping[str, Any]) -> Decorator:
    opened = open_grid(grid, {}) if isinstance(grid, str) else grid

    def decorate(fn: Any) -> HeuristicKernel:
        return HeuristicKernel(fn, candidates, opened, **launch)

    return decorate
