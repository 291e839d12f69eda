# SPDX-License-Identifier: Apache-2.0
"""Filters that the rules apply to a list of candidates after it was built: they remove some, or
change blocks.

For example `one_for_determinism` keeps a single candidate, so that every run takes the same.  The
rules for pointwise kernels, reductions, persistent reductions and split kernels call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import check_blocks, is_reduced, product
from bundler.runtime.heuristics.facts import Setting, SizeHints

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
