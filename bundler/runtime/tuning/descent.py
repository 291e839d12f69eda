# SPDX-License-Identifier: Apache-2.0
"""`Descent`: coordinate descent from a good config to a better one, one field at a time, which
measures each config once.

`Space` says which configs it may try.  `Search` descends after it measured the list, when
`TunerOptions` ask for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.configs import COUNTS, Config

BLOCKS = ("XBLOCK", "YBLOCK", "ZBLOCK", "R0_BLOCK", "R1_BLOCK")
FIELDS = (*BLOCKS, "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps")
# Kinds that are not refined: their configs are what a user or a template asked for.
SKIPPED = frozenset({"template", "user_autotune", "fixed", "attention"})
# Other blocks add in another order, which gives other numbers.
SKIPPED_DETERMINISTIC = frozenset(
    {"reduction", "persistent_reduction", "split_scan", "product", "attention"}
)
# In deterministic mode no measurement chooses among these configs at all; a user's kernel may be a
# reduction.
UNMEASURED_DETERMINISTIC = SKIPPED_DETERMINISTIC | {"user_autotune"}
# A smaller gain is within what a repeated measurement varies.
THRESHOLD = 0.001
MAX_WAVES, WAVES_OF_A_BLOCK = 8, 8
MIN_MATMUL_BLOCK, MAX_MATMUL_TILE = 16, 1 << 20
_AXIS = {"XBLOCK": "x", "YBLOCK": "y", "ZBLOCK": "z", "R0_BLOCK": "r0_", "R1_BLOCK": "r1_"}
_STAGES = frozenset({"num_stages", "NUM_STAGES"})


@dataclass(frozen=True)
class Space:
    """The configs that descent may try.

    Attributes:
        size_hints: axis (`x`, `y`, `z`, `r0_`, `r1_`) -> size; a block never grows beyond it.
        max_blocks: the same axes -> largest block.
        min_blocks: the same axes -> smallest block.
        max_warps: warps that fit a block of threads; None for no limit.
        matmul: a matrix product: `num_stages` is a field too.
        native_matmul: Inductor's own matrix product: as `matmul`, without ZBLOCK, and its tile is
            bounded.
        mix_order: its XBLOCK is at most RSPLIT_SIZE, and `NUM_STAGES` is a field too.
        hip: `waves_per_eu` is a field too.
        first: fields that are tried first.
        frozen: fields that stay as they are.
        fields: the fields, in order, in place of all of the above; blocks double, and have no
            largest size but a hint by their name.
    """

    size_hints: Mapping[str, int] = field(default_factory=dict)
    max_blocks: Mapping[str, int] = field(default_factory=dict)
    min_blocks: Mapping[str, int] = field(default_factory=dict)
    max_warps: int | None = None
    matmul: bool = False
    native_matmul: bool = False
    mix_order: bool = False
    hip: bool = False
    first: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    fields: tuple[str, ...] | None = None

    def fields_of(self, config: Config) -> list[str]:
        """Return the fields of a config that are tried, in order."""
        names = list(self.fields) if self.fields is not None else [*self.first, *FIELDS]
        if self.fields is None:
            names += ["num_stages"] if self.matmul or self.native_matmul else []
            names += ["waves_per_eu"] if self.hip else []
            names += ["NUM_STAGES"] if self.mix_order else []
        # A batched product has one block along z by construction.
        skipped = self.frozen | ({"ZBLOCK"} if self.native_matmul else set())
        known = [name for name in dict.fromkeys(names) if name not in skipped]
        return [name for name in known if get(config, name, hip=self.hip) is not None]

    def neighbors(self, config: Config, name: str, radius: int = 1) -> list[int]:
        """Return the values to try for a field: upward steps first; a direction ends at its first
        illegal value.
        """
        value = get(config, name, hip=self.hip)
        assert value is not None
        steps = max(radius, 2) if name == "NUM_STAGES" else radius
        found = []
        # Larger values first, as Inductor has it: of two equally fast configs the first one found
        # stays.
        for up in (True, False):
            current = value
            for _ in range(steps):
                current = _step(name, current, up=up)
                if not self.legal(name, current):
                    break
                found.append(current)
        return list(dict.fromkeys(v for v in found if v != value))

    def legal(self, name: str, value: int) -> bool:
        """Whether a field may have a value."""
        axis = _AXIS.get(name)
        if value < 1 or (axis is not None and value < self.min_blocks.get(axis, 1)):
            return False
        if self.native_matmul and name in _AXIS and value < MIN_MATMUL_BLOCK:
            return False
        if axis is not None:
            return value <= min(self.max_blocks.get(axis, value), self.size_hints.get(axis, value))
        if name == "num_warps":
            return self.max_warps is None or value <= self.max_warps
        if name == "waves_per_eu":
            return value <= MAX_WAVES
        return value <= self.size_hints.get(name, value)

    def valid(self, config: Config) -> bool:
        """Whether the fields of a config go together."""
        blocks = config.kwargs
        if (
            self.mix_order
            and "RSPLIT_SIZE" in blocks
            and blocks.get("XBLOCK", 1) > blocks["RSPLIT_SIZE"]
        ):
            return False
        tile = math.prod(blocks.get(name, 1) for name in BLOCKS)
        return not self.native_matmul or tile <= MAX_MATMUL_TILE


@dataclass(frozen=True)
class Descent:
    """How coordinate descent searches.

    Attributes:
        radius: steps in each direction, for one field.
        all_directions: when no single field helps, try all fields together.
        threshold: by which part a time has to be less to count as better.
        most: how many configs are measured at most.
    """

    radius: int = 1
    all_directions: bool = False
    threshold: float = THRESHOLD
    most: int = 10_000

    def __post_init__(self) -> None:
        if self.radius < 1 or not 0 <= self.threshold < 1 or self.most < 1:
            raise ConfigError(
                f"coordinate descent: radius={self.radius}, threshold={self.threshold},"
                f" most={self.most}; expected at least 1, from 0 to less than 1, and at least 1"
            )

    def better(self, time: float, best: float) -> bool:
        """Whether a time is enough less than another."""
        return time < best * (1 - self.threshold)

    def run(
        self, start: Config, space: Space, measure: Callable[[Config], float]
    ) -> tuple[Config, float]:
        """Return the best config found and its time.

        Args:
            start: where to begin.
            space: what may be tried.
            measure: returns a config's time, infinite when it cannot run; called once a config, for
                the start too.
        """
        # Rounds go on until a whole one finds nothing: after a step in one field another field may
        # be worth a step again.
        walk = _Walk(self, space, measure)
        best = (start, walk.time_of(start))
        while True:
            better = walk.sweep(best)
            if better == best and self.all_directions:
                better = walk.all_together(best)
            if better == best or walk.spent:
                return better
            best = better


class _Walk:
    """One descent, with the time of each config that it has measured."""

    def __init__(self, how: Descent, space: Space, measure: Callable[[Config], float]) -> None:
        self._how, self._space, self._measure = how, space, measure
        self._known: dict[Config, float] = {}

    @property
    def spent(self) -> bool:
        return len(self._known) >= self._how.most

    def time_of(self, config: Config) -> float:
        if config not in self._known:
            # Out of budget, every further config loses, so the descent ends where it is.
            self._known[config] = math.inf if self.spent else self._measure(config)
        return self._known[config]

    def sweep(self, best: tuple[Config, float]) -> tuple[Config, float]:
        """Try each field's neighbors, of the best config so far."""
        for name in self._space.fields_of(best[0]):
            for value in self._space.neighbors(best[0], name, self._how.radius):
                best = self._try(put(best[0], name, value), best)
        return best

    def all_together(self, best: tuple[Config, float]) -> tuple[Config, float]:
        start = best[0]
        names = self._space.fields_of(start)
        # Each field also keeps its value, since two fields together may help where all of them do
        # not.
        choices: list[Sequence[Any]] = [
            [*self._space.neighbors(start, n, self._how.radius), get(start, n, hip=self._space.hip)]
            for n in names
        ]
        for values in itertools.product(*choices):
            config = start
            for name, value in zip(names, values, strict=True):
                config = put(config, name, value)
            best = self._try(config, best)
        return best

    def _try(self, config: Config, best: tuple[Config, float]) -> tuple[Config, float]:
        if not self._space.valid(config):
            return best
        time = self.time_of(config)
        return (config, time) if self._how.better(time, best[1]) else best


def get(config: Config, name: str, *, hip: bool = False) -> int | None:
    """Return a field of a config, None when it has no such field."""
    if name in COUNTS:
        found: int | None = getattr(config, name)
        return found
    if name in config.kwargs:
        value = config.kwargs[name]
        return value if type(value) is int else None
    if name == "waves_per_eu" and hip:
        # Without the option, the field begins at eight waves, shared by the warps of a block, as
        # Inductor assumes.
        option = config.options.get(name)
        return option if type(option) is int else max(1, WAVES_OF_A_BLOCK // config.num_warps)
    return None


def put(config: Config, name: str, value: int) -> Config:
    """Return a config with a field changed."""
    if name in COUNTS:
        counts: dict[str, Any] = {name: value}
        return replace(config, **counts)
    if name in config.kwargs:
        return config.with_kwargs(**{name: value})
    return replace(config, options={**config.options, name: value})


def _step(name: str, value: int, *, up: bool) -> int:
    if name in _STAGES:
        return value + 1 if up else value - 1
    return value * 2 if up else value // 2
