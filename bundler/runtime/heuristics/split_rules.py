# SPDX-License-Identifier: Apache-2.0
"""Candidates for kernels whose rows are shared by several programs.

`cooperative_reduction_configs` is for reductions whose programs wait for each other,
`split_scan_configs` for scans.

The decorators of the same names and Inductor's generated modules call them.
"""

from __future__ import annotations

from dataclasses import replace

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import MAX_RSPLIT, pow2_down
from bundler.runtime.heuristics.facts import ReductionHint, Setting, SizeHints
from bundler.runtime.heuristics.filters import (
    meet_descriptor_floors,
    one_for_determinism,
    raise_to_floors,
)
from bundler.runtime.heuristics.persistent_rules import persistent
from bundler.runtime.heuristics.reduction_rules import looped, reduction_hints


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
        persistent(parts, setting, hint) if is_persistent else looped(parts, _static(setting), hint)
    )
    configs = [config.with_kwargs(RSPLIT=split) for config in configs]
    configs = one_for_determinism(
        meet_descriptor_floors(configs, setting, persistent=is_persistent), setting
    )
    return unique(raise_to_floors(configs, hints, setting))


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
    configs = [_with_least_r(config, least) for config in looped(hints, _static(setting), hint)]
    return one_for_determinism(meet_descriptor_floors(configs, setting), setting)


def _with_least_r(config: Config, least: int) -> Config:
    return config.with_kwargs(
        **{name: max(size, least) for name, size in config.kwargs.items() if name[0] == "R"}
    )


def _two_axes(hints: SizeHints, setting: Setting, what: str) -> SizeHints:
    hints = reduction_hints(hints, setting)
    if len(hints) > 2:  # noqa: PLR2004  # x and one reduced axis
        raise ConfigError(
            f"{what}: expected sizes for x and one reduced axis, got {dict(hints)}", got=dict(hints)
        )
    return hints


def _static(setting: Setting) -> Setting:
    """Return the setting without dynamic sizes, which these kinds do not look at."""
    return replace(setting, facts=replace(setting.facts, num_dynamic=0))
