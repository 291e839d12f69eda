# SPDX-License-Identifier: Apache-2.0
"""Grids of generated kernels: from a config's blocks and a call's sizes to three numbers, by plain
functions.

==============================  ==========================================================================
kind                            grid
==============================  ==========================================================================
Grid1D, Grid2D, Grid3D          so many blocks as cover x, y, z
Grid2DWithYZOverflow            y beyond 65,535 blocks goes on along z
BatchMatmulGrid3D               axes reversed, so that the batch lies along the axis without a limit
MixOrderReductionGrid           x in groups of `RSPLIT_SIZE` rows
CooperativeReductionGrid        `RSPLIT` programs for each block of x
SplitScanGrid                   blocks along the row, one row for each y
FixedGrid                       three expressions over the arguments
PrecomputedGrid                 three expressions for each config
SequentialComboKernelGrid       the blocks of several kernels one after another
SequentialFlattenComboKernelGrid  the same, each with blocks of its own, along x alone
RoundRobinComboKernelGrid       the blocks of several kernels in turn
==============================  ==========================================================================

The decorators and Inductor's generated modules get a grid from `open_grid`; `HeuristicKernel` asks
`launch_grid` for each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.errors import ConfigError
from bundler.format.summary import count
from bundler.runtime.grids import checked
from bundler.runtime.heuristics.block_limits import MAX_GRID, ceil_div
from bundler.runtime.heuristics.launch_expressions import evaluate

LaunchGrid = tuple[int, int, int]
Blocks = Mapping[str, Any]
Sizes = Mapping[str, int]
Grid = Callable[[Blocks, Sizes], LaunchGrid]
EXTRA_ARGUMENTS = ("_grid_0", "_grid_1", "_grid_2")
_BACKENDS_WITH_LIMITS = {"cuda", "hip"}


def launch_grid(
    grid: Grid, blocks: Blocks, sizes: Sizes, *, kernel: str = "kernel", backend: str = "cuda"
) -> LaunchGrid:
    """Return the grid of a launch, checked; a zero anywhere means that nothing is to be launched.

    Args:
        grid: its kind.
        blocks: parameters of the config.
        sizes: arguments of the call that are sizes, by name.
        kernel: name, for errors.
        backend: whose limits hold; `cpu` has none.

    Raises:
        ConfigError: a size or block is missing.
        CannotLaunchStatically: the device cannot launch so many.
    """
    found = grid(blocks, sizes)
    return checked(found, kernel, backend) if backend in _BACKENDS_WITH_LIMITS else found


def grid_1d(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover x."""
    return _cover("x", blocks, sizes), 1, 1


def grid_2d(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover x and y; y must not need more than 65,535 blocks."""
    return _cover("x", blocks, sizes), _cover("y", blocks, sizes), 1


def grid_3d(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover x, y and z."""
    return _cover("x", blocks, sizes), _cover("y", blocks, sizes), _cover("z", blocks, sizes)


def grid_2d_with_overflow(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover x and y; where y needs too many blocks, z multiplies them, and the kernel
    counts both.
    """
    return _cover("x", blocks, sizes), *_overflowing(_cover("y", blocks, sizes))


def batch_matmul_grid(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover z, y and x, in this order."""
    return _cover("z", blocks, sizes), _cover("y", blocks, sizes), _cover("x", blocks, sizes)


def mix_order_reduction_grid(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover x by groups of rows, each of which is a whole number of blocks."""
    return ceil_div(size_of("xnumel", sizes), rows_of(blocks)), 1, 1


def cooperative_reduction_grid(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Give each block of x `RSPLIT` programs."""
    return block_of("RSPLIT", blocks), _cover("x", blocks, sizes), 1


def split_scan_grid(blocks: Blocks, sizes: Sizes) -> LaunchGrid:
    """Cover each row by itself; a program never has two rows."""
    check_split_scan(blocks)
    return _cover("r0_", blocks, sizes), size_of("xnumel", sizes), 1


@dataclass(frozen=True)
class FixedGrid:
    """Three expressions over the arguments; as torch sets it up, over three additional ones."""

    expressions: tuple[str | int, str | int, str | int] = EXTRA_ARGUMENTS

    def __call__(self, blocks: Blocks, sizes: Sizes) -> LaunchGrid:
        """Evaluate the three."""
        x, y, z = (evaluate(expression, sizes) for expression in self.expressions)
        return x, y, z


@dataclass(frozen=True)
class PrecomputedGrid:
    """Three expressions for each config: the first whose entries the config has counts."""

    candidates: tuple[tuple[Mapping[str, Any], FixedGrid], ...]

    def __call__(self, blocks: Blocks, sizes: Sizes) -> LaunchGrid:
        """Find the config's expressions and evaluate them."""
        return self.chosen(blocks)(blocks, sizes)

    def chosen(self, blocks: Blocks) -> FixedGrid:
        """Return the expressions of a config; raises `ConfigError` when there are none for it."""
        for wanted, grid in self.candidates:
            if all(name in blocks and blocks[name] == value for name, value in wanted.items()):
                return grid
        raise ConfigError(
            f"grid: none was computed for {dict(blocks)}; known:"
            f" {count(len(self.candidates), 'other')}"
        )


@dataclass(frozen=True)
class ComboPart:
    """Sizes of one kernel in a combination.

    Attributes:
        x, y: fixed sizes; None where a call gives them, as `xnumel_0` and `ynumel_0` for the first
            kernel.
        has_y: whether the kernel has a second axis at all.
        no_x_dim: its blocks along x are single elements, whatever the config says.
    """

    x: int | None
    y: int | None = None
    has_y: bool = False
    no_x_dim: bool = False

    def x_size(self, number: int, sizes: Sizes) -> int:
        """Return the size along x of the kernel with this number."""
        return size_of(f"xnumel_{number}", sizes) if self.x is None else self.x

    def y_size(self, number: int, sizes: Sizes) -> int:
        """Return the size along y of the kernel with this number."""
        return size_of(f"ynumel_{number}", sizes) if self.y is None else self.y


@dataclass(frozen=True)
class ComboGrid:
    """Several kernels in one launch.

    Attributes:
        order: `sequential`, `flatten` or `round_robin`.
        parts: the kernels.
        min_blocks: least blocks along x; 0 for none.
        default_blocks: what holds where the config names no block.
    """

    order: str
    parts: tuple[ComboPart, ...]
    min_blocks: int = 0
    default_blocks: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, blocks: Blocks, sizes: Sizes) -> LaunchGrid:
        """Count the blocks of all kernels."""
        blocks = {**self.default_blocks, **blocks}
        if self.order == "flatten":
            return max(self._flattened(blocks, sizes), self.min_blocks), 1, 1
        x = (
            self._sequential(blocks, sizes)
            if self.order == "sequential"
            else self._in_turn(blocks, sizes)
        )
        heights = [
            part.y_size(number, sizes) for number, part in enumerate(self.parts) if part.has_y
        ]
        y, z = _overflowing(_pieces(max(heights), "YBLOCK", blocks)) if heights else (1, 1)
        return max(x, self.min_blocks), y, z

    def _sequential(self, blocks: Blocks, sizes: Sizes) -> int:
        return sum(
            _pieces(part.x_size(number, sizes), None if part.no_x_dim else "XBLOCK", blocks)
            for number, part in enumerate(self.parts)
        )

    def _in_turn(self, blocks: Blocks, sizes: Sizes) -> int:
        widths = [
            (part.no_x_dim, part.x_size(number, sizes)) for number, part in enumerate(self.parts)
        ]
        longest = [width for whole, width in widths if whole]
        tunable = [width for whole, width in widths if not whole]
        if tunable:
            longest.append(_pieces(max(tunable), "XBLOCK", blocks))
        return max(longest) * len(self.parts)

    def _flattened(self, blocks: Blocks, sizes: Sizes) -> int:
        total = 0
        for number, part in enumerate(self.parts):
            x = _pieces(
                part.x_size(number, sizes), None if part.no_x_dim else f"XBLOCK_{number}", blocks
            )
            y = _pieces(part.y_size(number, sizes), f"YBLOCK_{number}", blocks) if part.has_y else 1
            total += x * y
        return total


_PLAIN: dict[str, Grid] = {
    "Grid1D": grid_1d,
    "Grid2D": grid_2d,
    "Grid3D": grid_3d,
    "BatchMatmulGrid3D": batch_matmul_grid,
    "Grid2DWithYZOverflow": grid_2d_with_overflow,
    "MixOrderReductionGrid": mix_order_reduction_grid,
    "CooperativeReductionGrid": cooperative_reduction_grid,
    "SplitScanGrid": split_scan_grid,
}
_COMBINED = {
    "SequentialComboKernelGrid": "sequential",
    "SequentialFlattenComboKernelGrid": "flatten",
    "RoundRobinComboKernelGrid": "round_robin",
}


def open_grid(kind: str, metadata: Mapping[str, Any]) -> Grid:
    """Return the grid of a kind that a generated kernel names, from the kernel's metadata.

    Args:
        kind: as in the table of this module.
        metadata: with `fixed_grid`, `precomputed_grids` or `combo_grid_meta` for the kinds that
            need it.

    Raises:
        ConfigError: there is no such kind, or the metadata is not of its shape.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    try:
        if kind == "FixedGrid":
            return FixedGrid(_three(metadata["fixed_grid"]))
        if kind == "PrecomputedGrid":
            return PrecomputedGrid(
                tuple(
                    (dict(c["config"]), FixedGrid(_three(c["python"])))
                    for c in metadata["precomputed_grids"]
                )
            )
        if kind in _COMBINED:
            return _combo(_COMBINED[kind], metadata["combo_grid_meta"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"grid: the metadata of a {kind} is incomplete or odd: {error!r}", kind=kind
        ) from error
    known = ", ".join([*_PLAIN, "FixedGrid", "PrecomputedGrid", *_COMBINED])
    raise ConfigError(f"grid: there is no kind {kind!r}; expected one of {known}", kind=kind)


def _three(expressions: Any) -> tuple[str | int, str | int, str | int]:
    if not isinstance(expressions, list | tuple):
        raise TypeError(f"expected three expressions, got {expressions!r:.40}")
    x, y, z = expressions
    return x, y, z


def _combo(order: str, metadata: Mapping[str, Any]) -> ComboGrid:
    count, default = metadata["num_kernels"], metadata.get("default_config")
    if type(count) is not int or count < 1:
        raise ValueError(f"{count!r:.40} kernels")
    parts = []
    for number in range(count):
        x, y = (
            _fixed_size(metadata[f"xnumel_{number}"]),
            _fixed_size(metadata.get(f"ynumel_{number}")),
        )
        parts.append(
            ComboPart(x, y, f"ynumel_{number}" in metadata, bool(metadata[f"no_x_dim_{number}"]))
        )
    blocks = {} if default is None else dict(default)
    return ComboGrid(order, tuple(parts), _fixed_size(metadata.get("min_blocks"), 0) or 0, blocks)


def _fixed_size(size: Any, least: int = 1) -> int | None:
    """Return a size that stands in the metadata; None where a call gives it."""
    if size is not None and (type(size) is not int or size < least):
        raise ValueError(f"a size of {size!r:.40}, expected at least {least}")
    return size


def _overflowing(y: int) -> tuple[int, int]:
    z = ceil_div(y, MAX_GRID[1])
    return (ceil_div(y, z) if z else 0), z


def _cover(axis: str, blocks: Blocks, sizes: Sizes) -> int:
    return _pieces(size_of(f"{axis}numel", sizes), f"{axis.upper()}BLOCK", blocks)


def _pieces(size: int, block: str | None, blocks: Blocks) -> int:
    """Return how many blocks cover a size; without a block each element is one."""
    return (
        size
        if block is None or blocks.get(block) is None
        else ceil_div(size, block_of(block, blocks))
    )


def size_of(name: str, sizes: Sizes) -> int:
    """Return a call's size by name; raises `ConfigError` where it is no number of at least 0."""
    size = sizes.get(name)
    if type(size) is not int or size < 0:
        raise ConfigError(
            f"grid: needs the size {name!r} as a number of at least 0, got {size!r:.40}", name=name
        )
    return size


def block_of(name: str, blocks: Blocks) -> int:
    """Return a config's block by name; raises `ConfigError` where it is no number of at least 1."""
    block = blocks.get(name)
    if type(block) is not int or block < 1:
        raise ConfigError(
            f"grid: needs the block {name!r} as a number of at least 1, got {block!r:.40}",
            name=name,
        )
    return block


def rows_of(blocks: Blocks) -> int:
    """Return how many rows a group of a mix-order reduction has; raises `ConfigError` where that is
    not a whole number of blocks.
    """
    split, x = block_of("RSPLIT_SIZE", blocks), block_of("XBLOCK", blocks)
    if split % x:
        raise ConfigError(
            f"grid: RSPLIT_SIZE={split} is no multiple of XBLOCK={x}", expected=x, got=split
        )
    return split


def check_split_scan(blocks: Blocks) -> None:
    """Raise `ConfigError` where a program of a split scan would have more than one row."""
    if blocks.get("XBLOCK", 1) != 1:
        raise ConfigError(
            f"grid: a split scan has XBLOCK=1, got {blocks['XBLOCK']}", got=blocks["XBLOCK"]
        )
