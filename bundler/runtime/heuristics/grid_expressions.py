# SPDX-License-Identifier: Apache-2.0
"""`GridExpressions`: a grid as three expressions over the sizes of a call, which programs in other
languages can work out, too.

`expressions_of` writes those of each kind in `launch_grids`, for the blocks of one config; a
`TextGrid` is written so by its user. `grid_sources` makes C++ of them, `launch_expressions`
evaluates them, and exports of tuned kernels carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics import launch_grids
from bundler.runtime.heuristics.block_limits import MAX_GRID, ceil_div
from bundler.runtime.heuristics.launch_expressions import bound, evaluate, names_in
from bundler.runtime.heuristics.launch_grids import (
    Blocks,
    ComboGrid,
    FixedGrid,
    Grid,
    LaunchGrid,
    PrecomputedGrid,
)

# A number that is known, or an expression.
Term = int | str
Terms = tuple[Term, Term, Term]


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
    if isinstance(grid, ComboGrid):
        return _of_terms(_combined(grid, {**grid.default_blocks, **blocks}))
    kind = next((terms for function, terms in _KINDS if function is grid), None)
    if kind is None:
        raise ConfigError(
            "grid: a function of the user's has no text; write the grid as text, such as"
            " TextGrid('-(-n // BLOCK)')"
        )
    return _of_terms(kind(blocks))


def _of_terms(terms: Terms) -> GridExpressions:
    x, y, z = map(str, terms)
    return GridExpressions(x, y, z, positive=True)


# -------------------------------------------------------- Each kind, as `launch_grids` works it out


def _covering(axes: Sequence[str], blocks: Blocks) -> Terms:
    x, y, z = (*(_cover(axis, blocks) for axis in axes), 1, 1, 1)[:3]
    return x, y, z


def _overflow(blocks: Blocks) -> Terms:
    return _cover("x", blocks), *_overflowing(_cover("y", blocks))


def _mix_order(blocks: Blocks) -> Terms:
    return _divided_up("xnumel", launch_grids.rows_of(blocks)), 1, 1


def _cooperative(blocks: Blocks) -> Terms:
    return launch_grids.block_of("RSPLIT", blocks), _cover("x", blocks), 1


def _split_scan(blocks: Blocks) -> Terms:
    launch_grids.check_split_scan(blocks)
    return _cover("r0_", blocks), "xnumel", 1


_KINDS: tuple[tuple[Grid, Callable[[Blocks], Terms]], ...] = (
    (launch_grids.grid_1d, partial(_covering, ("x",))),
    (launch_grids.grid_2d, partial(_covering, ("x", "y"))),
    (launch_grids.grid_3d, partial(_covering, ("x", "y", "z"))),
    (launch_grids.batch_matmul_grid, partial(_covering, ("z", "y", "x"))),
    (launch_grids.grid_2d_with_overflow, _overflow),
    (launch_grids.mix_order_reduction_grid, _mix_order),
    (launch_grids.cooperative_reduction_grid, _cooperative),
    (launch_grids.split_scan_grid, _split_scan),
)


def _combined(grid: ComboGrid, blocks: Blocks) -> Terms:
    """Return the blocks of all kernels of a combination."""
    sizes = [
        (_known(part.x, f"xnumel_{number}"), part.no_x_dim)
        for number, part in enumerate(grid.parts)
    ]
    heights = {
        number: _known(p.y, f"ynumel_{number}") for number, p in enumerate(grid.parts) if p.has_y
    }
    if grid.order == "flatten":
        flat = [
            _product(
                _pieces(size, None if whole else f"XBLOCK_{number}", blocks),
                _pieces(heights[number], f"YBLOCK_{number}", blocks) if number in heights else 1,
            )
            for number, (size, whole) in enumerate(sizes)
        ]
        return _largest([_sum(flat), grid.min_blocks]), 1, 1
    if grid.order == "sequential":
        x = _sum([_pieces(size, None if whole else "XBLOCK", blocks) for size, whole in sizes])
    else:
        longest, tunable = (
            [size for size, whole in sizes if whole],
            [size for size, whole in sizes if not whole],
        )
        if tunable:
            longest.append(_pieces(_largest(tunable), "XBLOCK", blocks))
        x = _product(_largest(longest), len(sizes))
    y, z = (
        _overflowing(_pieces(_largest(list(heights.values())), "YBLOCK", blocks))
        if heights
        else (1, 1)
    )
    return _largest([x, grid.min_blocks]), y, z


# ----------------- Terms: numbers are worked out here, and only what a call decides is left as text


def _known(size: int | None, name: str) -> Term:
    return name if size is None else size


def _cover(axis: str, blocks: Blocks) -> Term:
    return _pieces(f"{axis}numel", f"{axis.upper()}BLOCK", blocks)


def _pieces(size: Term, block: str | None, blocks: Blocks) -> Term:
    """Return how many blocks cover a size; without a block each element is one."""
    return (
        size
        if block is None or blocks.get(block) is None
        else _divided_up(size, launch_grids.block_of(block, blocks))
    )


def _divided_up(size: Term, divisor: Term) -> Term:
    if isinstance(size, int) and isinstance(divisor, int):
        return ceil_div(size, divisor)
    return size if divisor == 1 else f"-(-{_atom(size)} // {_atom(divisor)})"


def _overflowing(y: Term) -> tuple[Term, Term]:
    z = _divided_up(y, MAX_GRID[1])
    # Without a program along y, z is none either, and nothing is to be divided by it.
    return _divided_up(y, max(z, 1) if isinstance(z, int) else f"max({z}, 1)"), z


def _sum(terms: Sequence[Term]) -> Term:
    known, texts = _apart(terms)
    return (
        " + ".join([*map(_atom, texts), *([str(sum(known))] if sum(known) else [])])
        if texts
        else sum(known)
    )


def _product(first: Term, second: Term) -> Term:
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    terms = [_atom(term) for term in (first, second) if term != 1]
    return " * ".join(terms)


def _largest(terms: Sequence[Term]) -> Term:
    known, texts = _apart(terms)
    if not texts:
        return max(known)
    # No size is below zero, so that a bound of zero says nothing.
    bounds = [str(max(known))] if known and max(known) > 0 else []
    words = [*texts, *bounds]
    return words[0] if len(words) == 1 else f"max({', '.join(words)})"


def _apart(terms: Sequence[Term]) -> tuple[list[int], list[str]]:
    return [term for term in terms if isinstance(term, int)], [
        term for term in terms if isinstance(term, str)
    ]


def _atom(term: Term) -> str:
    text = str(term)
    return text if text.isidentifier() or text.isdecimal() else f"({text})"
