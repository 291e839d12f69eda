# SPDX-License-Identifier: Apache-2.0
"""`combo_plan`: candidates for several kernels in one launch, each with blocks of its own or all
with the same.

The decorator `combo` and Inductor's combo kernels begin with its plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bundler.errors import ConfigError
from bundler.runtime.configs import Config
from bundler.runtime.heuristics.block_limits import ceil_div, is_reduced, max_block, product
from bundler.runtime.heuristics.facts import Facts, ReductionHint, Setting, SizeHints, TileHint
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    persistent_reduction_configs,
    reduction_configs,
)

_SHARED_X, _SHARED_SQUARE = 1024, 32


@dataclass(frozen=True)
class SubKernel:
    """One kernel of a combination.

    Attributes:
        kind: its heuristic.
        hints: its sizes.
        facts: what is known of it.
        reduction_hint, tile_hint: where its kind has one.
        members: of how many tensors it is, where the blocks of all are balanced, so that each needs
            about as many programs; else None.
    """

    kind: Literal["pointwise", "reduction", "persistent_reduction"]
    hints: SizeHints
    facts: Facts = field(default_factory=Facts)
    reduction_hint: ReductionHint = ReductionHint.DEFAULT
    tile_hint: TileHint = TileHint.DEFAULT
    members: int | None = None

    def fingerprint(self) -> tuple[object, ...]:
        """Return what decides its candidates: equal fingerprints, equal candidates."""
        return (
            self.kind,
            tuple(sorted(self.hints.items())),
            repr(self.facts),
            self.reduction_hint,
            self.tile_hint,
        )


@dataclass(frozen=True)
class ComboGroup:
    """Kernels that are tuned together.

    Attributes:
        members: positions of the kernels.
        fields: parameters of the combined kernel that they own.
        elements: of one of them; groups are tuned largest first.
        changes: one for each candidate: the fields of every member, and options, that it sets.
    """

    members: tuple[int, ...]
    fields: tuple[str, ...]
    elements: int
    changes: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class ComboPlan:
    """How a combined kernel begins, and how it may be tuned from there.

    Attributes:
        base: the first candidate of every kernel, with the most warps and stages among them.
        groups: largest first.
        field_limits: parameter -> largest block.
        warp_stages: warps and stages that any kernel's candidates have; tried when the blocks are
            found.
    """

    base: Config
    groups: tuple[ComboGroup, ...]
    field_limits: Mapping[str, int]
    warp_stages: tuple[tuple[int, int], ...] = ()

    @property
    def steps(self) -> tuple[tuple[Mapping[str, object], ...], ...]:
        """What a tuner tries, step by step, each change on top of the best so far: each group's
        candidates, then warps and stages.
        """
        pairs = tuple(
            {"num_warps": warps, "num_stages": stages} for warps, stages in self.warp_stages
        )
        # A single candidate is what the base has already.
        blocks = tuple(group.changes for group in self.groups if len(group.changes) > 1)
        return (*blocks, pairs)


def combo_plan(
    kernels: Sequence[SubKernel],
    setting: Setting,
    *,
    parameters: Collection[str] | None = None,
    grouping: bool = False,
) -> ComboPlan:
    """Return the plan of a combined kernel in which every kernel has blocks of its own: `XBLOCK_0`,
    `XBLOCK_1`, …

    Args:
        kernels: in their order.
        setting: device and policy; its facts are not looked at.
        parameters: of the combined kernel: a name gets its kernel's number only if that is one;
            None takes all for it.
        grouping: whether kernels with equal fingerprints are tuned as one.

    Raises:
        ConfigError: no kernel, one of an unknown kind, or what its own heuristic raises.
    """
    if not kernels:
        raise ConfigError("combination: expected at least one kernel")
    lists = [_candidates(kernel, setting) for kernel in kernels]
    if all(kernel.members is not None for kernel in kernels):
        lists = _balanced(kernels, lists, setting.device.warp_size)
    kwargs: dict[str, object] = {}
    limits: dict[str, int] = {}
    owners = []
    for number, (kernel, configs) in enumerate(zip(kernels, lists, strict=True)):
        blocks = _own_fields(kernel, configs[0])
        kwargs |= _numbered(blocks, number, parameters)
        owned = [name for name in blocks if name.endswith("BLOCK")]
        owners.append(tuple(f"{name}_{number}" for name in owned))
        for name in owned:
            axis = name.removesuffix("BLOCK").lower()
            if axis in kernel.hints:
                limits[f"{name}_{number}"] = min(max_block(axis, setting), kernel.hints[axis])
    firsts = [configs[0] for configs in lists]
    most = max(c.num_warps for c in firsts), max(c.num_stages for c in firsts)
    base = Config(
        kwargs,
        num_warps=most[0],
        num_stages=most[1],
        options={name: value for config in firsts for name, value in config.options.items()},
        origin="combination",
    )
    changes = [
        [
            {**_numbered(_own_fields(kernel, config), number, parameters), **config.options}
            for config in configs
        ]
        for number, (kernel, configs) in enumerate(zip(kernels, lists, strict=True))
    ]
    groups = _groups(kernels, owners, changes, grouping=grouping)
    pairs = [(config.num_warps, config.num_stages) for configs in lists for config in configs]
    return ComboPlan(base, groups, limits, tuple(dict.fromkeys([*pairs, most])))


def _numbered(
    fields: Mapping[str, object], number: int, parameters: Collection[str] | None
) -> dict[str, object]:
    """Return a kernel's fields under the names that they have in the combination."""
    names = {name: f"{name}_{number}" for name in fields}
    return {
        names[name] if parameters is None or names[name] in parameters else name: value
        for name, value in fields.items()
    }


def _candidates(kernel: SubKernel, setting: Setting) -> list[Config]:
    own = replace(setting, facts=kernel.facts)
    match kernel.kind:
        case "pointwise":
            return pointwise_configs(kernel.hints, own, tile_hint=kernel.tile_hint)
        case "reduction":
            return reduction_configs(kernel.hints, own, hint=kernel.reduction_hint)
        case "persistent_reduction":
            return persistent_reduction_configs(kernel.hints, own, hint=kernel.reduction_hint)
        case _:
            raise ConfigError(
                f"combination: {kernel.kind!r} kernels cannot be combined; expected pointwise or"
                " reductions",
                got=kernel.kind,
            )


def _balanced(
    kernels: Sequence[SubKernel], lists: Sequence[list[Config]], lanes: int
) -> list[list[Config]]:
    """Return the candidates with smaller blocks in front for kernels of elements that would need
    fewer programs than another one.
    """
    needed = [_programs(kernel, configs[0]) for kernel, configs in zip(kernels, lists, strict=True)]
    least = lanes * max(configs[0].num_warps for configs in lists)
    found = []
    for kernel, configs, number in zip(kernels, lists, needed, strict=True):
        block, programs = int(configs[0].kwargs.get("XBLOCK", 1)), number
        # Half of a block takes twice the programs; with fewer elements, threads would have none.
        while kernel.kind == "pointwise" and block // 2 >= least and programs * 2 <= max(needed):
            block, programs = block // 2, programs * 2
        changed = programs != number
        found.append([configs[0].with_kwargs(XBLOCK=block), *configs] if changed else configs)
    return found


def _programs(kernel: SubKernel, config: Config) -> int:
    return ceil_div(kernel.hints["x"], config.kwargs.get("XBLOCK", 1)) * (kernel.members or 1)


def _own_fields(kernel: SubKernel, config: Config) -> dict[str, object]:
    """Return the parameters that a kernel brings along; the row of a persistent one stands in its
    source.
    """
    skip = kernel.kind == "persistent_reduction"
    return {
        name: value
        for name, value in config.kwargs.items()
        if not (skip and is_reduced(name.lower()) and "BLOCK" in name)
    }


def _groups(
    kernels: Sequence[SubKernel],
    fields: Sequence[tuple[str, ...]],
    changes: Sequence[Sequence[Mapping[str, object]]],
    *,
    grouping: bool,
) -> tuple[ComboGroup, ...]:
    members: dict[object, list[int]] = {}
    for number, kernel in enumerate(kernels):
        members.setdefault(kernel.fingerprint() if grouping else number, []).append(number)
    groups = [
        ComboGroup(
            tuple(numbers),
            fields[numbers[0]],
            product(kernels[numbers[0]].hints.values()),
            # Kernels with equal fingerprints have equal candidates, and get the same one.
            tuple(
                _merged(several)
                for several in zip(*(changes[number] for number in numbers), strict=True)
            ),
        )
        for numbers in members.values()
    ]
    return tuple(sorted(groups, key=lambda group: -group.elements))


def _merged(changes: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {name: value for change in changes for name, value in change.items()}


def shared_blocks(hints: SizeHints) -> dict[str, int]:
    """Return the blocks of a combined kernel that is not tuned and in which all kernels
    share them.
    """
    if "y" in hints:
        return {"XBLOCK": _SHARED_SQUARE, "YBLOCK": _SHARED_SQUARE}
    return {"XBLOCK": _SHARED_X}
