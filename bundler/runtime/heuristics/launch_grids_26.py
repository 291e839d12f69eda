# SPDX-License-Identifier: Apache-2.0
"""Grids as torch 2.6 made them: a function of the sizes returns one of the config's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics.block_limits import MAX_GRID, ceil_div
from bundler.runtime.heuristics.launch_grids import LaunchGrid

Numel = int | None
_MAX_AXES = 3


@dataclass(frozen=True)
class Grid26:
    """Blocks that cover up to three sizes, given from z to x; `str()` is what a profiler shows.

    Without z, y beyond 65,535 blocks goes on along z.
    """

    numels: tuple[Numel, ...]

    def __call__(self, blocks: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid for a config's blocks; raises `ConfigError` where y has too many and z is taken."""
        x, y, z = (*reversed(self.numels), None, None)[:_MAX_AXES]
        wide, high = _pieces(x, blocks.get("XBLOCK", 1)), _pieces(y, blocks.get("YBLOCK"))
        if z is None:
            deep = ceil_div(high, MAX_GRID[1])
            return wide, ceil_div(high, deep) if deep else 0, deep
        if high > MAX_GRID[1]:
            raise ConfigError(
                f"grid: {high} blocks along y, expected at most {MAX_GRID[1]}", got=high, limit=MAX_GRID[1]
            )
        return wide, high, _pieces(z, blocks.get("ZBLOCK"))

    def __str__(self) -> str:
        return f"grid{self.numels}"


def grid_26(*numels: Numel) -> Grid26:
    """Cover sizes given in the order z, y, x; raises `ConfigError` for more than three or none."""
    if not 0 < len(numels) <= _MAX_AXES:
        raise ConfigError(f"grid: expected one to three sizes, got {len(numels)}", got=len(numels))
    return Grid26(numels)


@dataclass(frozen=True)
class CooperativeGrid26:
    """`RSPLIT` programs for each block of x; where a config has none and `maybe`, a plain grid over x."""

    xnumel: int
    maybe: bool = False

    def __call__(self, blocks: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid for a config's blocks."""
        if "RSPLIT" in blocks:
            return blocks["RSPLIT"], ceil_div(self.xnumel, blocks.get("XBLOCK", 1)), 1
        if self.maybe:
            return grid_26(self.xnumel)(blocks)
        raise ConfigError("grid: a cooperative reduction needs RSPLIT")

    def __str__(self) -> str:
        return f"{'maybe_' if self.maybe else ''}cooperative_reduction_grid({self.xnumel})"


@dataclass(frozen=True)
class SplitScanGrid26:
    """Blocks along the row, one row for each y."""

    xnumel: int
    rnumel: int

    def __call__(self, blocks: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid for a config's blocks; raises `ConfigError` where a program would have two rows."""
        if blocks.get("XBLOCK", 1) != 1:
            raise ConfigError(f"grid: a split scan has XBLOCK=1, got {blocks['XBLOCK']}", got=blocks["XBLOCK"])
        return ceil_div(self.rnumel, blocks.get("RBLOCK", 1)), self.xnumel, 1

    def __str__(self) -> str:
        return f"split_scan_grid({self.xnumel}, {self.rnumel})"


@dataclass(frozen=True)
class ComboGrid26:
    """Several kernels in one launch; sizes are given from z to x.

    A list along an axis has a size for each kernel.  In the list along x, a number that is not positive stands for a kernel
    whose blocks are fixed, and is their count with the sign changed.

    Attributes:
        numels: sizes.
        num_kernels: how many kernels.
        sequential: their blocks follow one another, instead of taking turns.
        min_blocks: least blocks along x; None derives them from the list.
        default_blocks: hold instead of the config's.

    Raises:
        ConfigError: `min_blocks` contradicts the list, or neither is there; or a sequential grid has no list along x.
    """

    numels: tuple[Numel | Sequence[int], ...]
    num_kernels: int
    sequential: bool = False
    min_blocks: int | None = None
    default_blocks: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        widths = self.numels[-1]
        if self.sequential and not isinstance(widths, Sequence):
            raise ConfigError("grid: a sequential combination needs the size along x of each kernel", got=widths)
        if not self.sequential:
            derived = max(-min(widths), 0) * self.num_kernels if isinstance(widths, Sequence) else None
            if derived is None and self.min_blocks is None:
                raise ConfigError("grid: a combination needs the least blocks along x, or the size of each kernel")
            if derived is not None and self.min_blocks not in {None, derived}:
                raise ConfigError(
                    f"grid: the least blocks are {derived}, not {self.min_blocks}",
                    expected=derived,
                    got=self.min_blocks,
                )
            object.__setattr__(self, "min_blocks", self.min_blocks if derived is None else derived)

    def __call__(self, blocks: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid for a config's blocks."""
        blocks = self.default_blocks or blocks
        largest = [max(*numel, 0) if isinstance(numel, Sequence) else numel for numel in self.numels]
        x, y, z = grid_26(*largest)(blocks)
        widths = self.numels[-1]
        if self.sequential and isinstance(widths, Sequence):
            block = blocks.get("XBLOCK", 1)
            return sum(-width if width <= 0 else ceil_div(width, block) for width in widths), y, z
        return max(self.num_kernels * x, self.min_blocks or 0), y, z

    def __str__(self) -> str:
        order = "sequential" if self.sequential else "round robin"
        return f"grid_combo_kernels({', '.join(map(str, self.numels))}; {self.num_kernels} kernels, {order})"


def _pieces(numel: Numel, block: int | None) -> int:
    if numel is None:
        return 1
    return numel if block is None else ceil_div(numel, block)
