# SPDX-License-Identifier: Apache-2.0
"""`GridExpressions`: a grid as three expressions over the sizes of a call, which programs in other
languages can work out, too.

`expressions_of` writes those of each kind in `launch_grids`, for the blocks of one config; a
`TextGrid` is written so by its user. `grid_sources` makes C++ of them, `launch_expressions`
evaluates them, and exports of tuned kernels carry them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics import launch_grids
from bundler.runtime.heuristics.launch_expressions import bound, evaluate, names_in
from bundler.runtime.heuristics.launch_grids import (
    Blocks,
    FixedGrid,
    FormulaGrid,
    Grid,
    LaunchGrid,
    PrecomputedGrid,
)


@dataclass(frozen=True)
class GridExpressions:
    """Three expressions, in the form that `launch_expressions.evaluate` takes.

    Attributes:
        x, y, z: how many programs there are along each axis.
        positive: whether a size below zero is refused, as every kind of grid but those of given
            expressions does.
    """

    x: str
    y: str = "1"
    z: str = "1"
    positive: bool = False

    @property
    def axes(self) -> tuple[str, str, str]:
        """The three expressions."""
        return self.x, self.y, self.z

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names in them, in the order in which they are met."""
        return tuple(dict.fromkeys(name for axis in self.axes for name in names_in(axis)))

    def bind(self, values: Mapping[str, Any]) -> GridExpressions:
        """Return the same grid with whole numbers in place of names; raises `ConfigError` for what
        is no expression.
        """
        x, y, z = (bound(axis, values) for axis in self.axes)
        return replace(self, x=x, y=y, z=z)

    def grid(self, sizes: Mapping[str, int]) -> LaunchGrid:
        """Return the three numbers for these sizes; raises `ConfigError` for a size that is missing
        or too small.
        """
        if self.positive:
            for name in self.sizes:
                launch_grids.size_of(name, sizes)
        x, y, z = (evaluate(axis, sizes) for axis in self.axes)
        return x, y, z


@dataclass(frozen=True)
class TextGrid:
    """A grid that its user writes as text, such as `TextGrid("-(-n // BLOCK)")`: a function of the
    arguments, which an export can tell.

    `kernel[TextGrid("-(-n // BLOCK)")](x, n)` launches as with a function; the names are arguments
    and parameters of the config.
    """

    x: str
    y: str = "1"
    z: str = "1"

    def __call__(self, meta: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid of a call; raises `ConfigError` for a name that has no whole number, and
        for what is no expression.
        """
        x, y, z = (evaluate(axis, meta) for axis in (self.x, self.y, self.z))
        return x, y, z

    def expressions(self, blocks: Blocks) -> GridExpressions:
        """Return the grid with a config's values in place of their names."""
        return GridExpressions(self.x, self.y, self.z).bind(blocks)


def expressions_of(grid: Grid, blocks: Blocks) -> GridExpressions:
    """Return a grid's expressions for the blocks of a config.

    Args:
        grid: of one of the kinds in `launch_grids`.
        blocks: parameters of the config, and constants.

    Raises:
        ConfigError: a block is missing, or the grid is a function of the user's, of which only its
            numbers are known.
    """
    if isinstance(grid, FixedGrid):
        x, y, z = (str(axis) for axis in grid.expressions)
        return GridExpressions(x, y, z).bind(blocks)
    if isinstance(grid, PrecomputedGrid):
        return expressions_of(grid.chosen(blocks), blocks)
    if isinstance(grid, FormulaGrid):
        x, y, z = map(str, grid.formula(blocks, str))
        return GridExpressions(x, y, z, positive=True)
    raise ConfigError(
        "grid: a function of the user's has no text; write the grid as text, such as"
        " TextGrid('-(-n // BLOCK)')"
    )
