# SPDX-License-Identifier: Apache-2.0
"""Grids of generated kernels: from a config's blocks and a call's sizes to three numbers, by plain
functions.

==============================  ==========================================================================
kind                            grid
==============================  ==========================================================================
Grid1D, Grid2D, Grid3D          so many blocks as cover x, y, z
Grid2DWithYZOverflow            y beyond 65,535 blocks goes on along z
ProductGrid                     blocks of y and x, for each z, along one axis, which the kernel groups;
                                at most `PROGRAMS`, where the config has that
BatchMatmulGrid3D               axes reversed, so that the batch lies along the axis without a limit
MixOrderReductionGrid           x in groups of `RSPLIT_SIZE` rows
CooperativeReductionGrid        `RSPLIT` programs for each block of x
SplitScanGrid                   blocks along the row, one row for each y
FixedGrid                       three expressions over the arguments
PrecomputedGrid                 three expressions for each config
SequentialComboKernelGrid       the blocks of several kernels one after another
SequentialFlattenComboKernelGrid  the same, each with blocks of its own, along x alone
RoundRobinComboKernelGrid       the blocks of several kernels in turn
RoundRobinFlattenComboKernelGrid  the same, each with blocks of its own, along x alone
==============================  ==========================================================================

The decorators and Inductor's generated modules get a grid from `open_grid`; `HeuristicKernel` asks
`launch_grid` for each launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
# A number that is known, or an expression.
Term = int | str
Terms = tuple[Term, Term, Term]
# Returns the size of a name: a number of a call, or the name itself.
SizeOf = Callable[[str], Term]
PRODUCT_GRID = "ProductGrid"
COOPERATIVE_GRID = "CooperativeReductionGrid"
#: How many programs take the blocks of a product in turn; 0 where each block has its own.
PROGRAMS = "PROGRAMS"
EXTRA_ARGUMENTS = ("_grid_0", "_grid_1", "_grid_2")
_PART = re.compile(r"[xy]numel_[0-9]+")
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


@dataclass(frozen=True)
class FormulaGrid:
    """A grid by one formula, which a launch works out with the sizes of a call, and an export with
    their names: what is known is a number, and what a call decides is left as text.
    """

    formula: Callable[[Blocks, SizeOf], Terms]

    def __call__(self, blocks: Blocks, sizes: Sizes) -> LaunchGrid:
        """Work the formula out with the sizes of a call."""
        x, y, z = self.formula(blocks, lambda name: size_of(name, sizes))
        return int(x), int(y), int(z)


def _covering(*axes: str) -> FormulaGrid:
    """Return the grid of so many blocks as cover some axes, in this order."""

    def formula(blocks: Blocks, size: SizeOf) -> Terms:
        x, y, z = (*(_cover(axis, blocks, size) for axis in axes), 1, 1)[:3]
        return x, y, z

    return FormulaGrid(formula)


def _with_overflow(blocks: Blocks, size: SizeOf) -> Terms:
    """Cover x and y; where y needs too many blocks, z multiplies them, and the kernel
    counts both.
    """
    return _cover("x", blocks, size), *_overflowing(_cover("y", blocks, size))


def _of_product(blocks: Blocks, size: SizeOf) -> Terms:
    """Cover rows and columns, and a batch where the launch has one; by no more than `PROGRAMS`
    programs, where the config says so.
    """
    tiles = _product(_cover("y", blocks, size), _cover("x", blocks, size))
    found, most = _product(tiles, size("znumel")), blocks.get(PROGRAMS, 0)
    if not most:
        return found, 1, 1
    # Programs count blocks with 32 bits: more of them than that are refused, as programs would be.
    beyond = MAX_GRID[0] + 1
    if isinstance(found, int):
        return min(found, most) + found // beyond * beyond, 1, 1
    return f"min({found}, {most}) + ({found}) // {beyond} * {beyond}", 1, 1


def _mix_order_reduction(blocks: Blocks, size: SizeOf) -> Terms:
    """Cover x by groups of rows, each of which is a whole number of blocks."""
    split, x = block_of("RSPLIT_SIZE", blocks), block_of("XBLOCK", blocks)
    if split % x:
        raise ConfigError(
            f"grid: RSPLIT_SIZE={split} is no multiple of XBLOCK={x}", expected=x, got=split
        )
    return _divided_up(size("xnumel"), split), 1, 1


def _cooperative_reduction(blocks: Blocks, size: SizeOf) -> Terms:
    """Give each block of x `RSPLIT` programs."""
    return block_of("RSPLIT", blocks), _cover("x", blocks, size), 1


def _split_scan(blocks: Blocks, size: SizeOf) -> Terms:
    """Cover each row by itself; a program never has two rows."""
    if blocks.get("XBLOCK", 1) != 1:
        raise ConfigError(
            f"grid: a split scan has XBLOCK=1, got {blocks['XBLOCK']}", got=blocks["XBLOCK"]
        )
    return _cover("r0_", blocks, size), size("xnumel"), 1


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


def _combined(
    order: str,
    every: Sequence[ComboPart],
    min_blocks: int,
    default_blocks: Mapping[str, int],
    blocks: Blocks,
    size: SizeOf,
) -> Terms:
    """Count the blocks of several kernels in one launch.

    Args:
        order: `sequential` or `round_robin`; each kernel has blocks of its own in `flatten` and
            `flatten_in_turn`.
        every: the kernels.
        min_blocks: least blocks along x; 0 for none.
        default_blocks: what holds where the config names no block.
        blocks, size: as for any formula.
    """
    blocks = {**default_blocks, **blocks}
    parts = list(enumerate(every))
    widths = [size(f"xnumel_{n}") if part.x is None else part.x for n, part in parts]
    heights = {
        n: size(f"ynumel_{n}") if part.y is None else part.y for n, part in parts if part.has_y
    }
    if order.startswith("flatten"):
        flat = [
            _product(
                _pieces(widths[n], None if part.no_x_dim else f"XBLOCK_{n}", blocks),
                _pieces(heights[n], f"YBLOCK_{n}", blocks) if part.has_y else 1,
            )
            for n, part in parts
        ]
        longest = _product(_largest(flat), len(parts))
        return _largest([_sum(flat) if order == "flatten" else longest, min_blocks]), 1, 1
    if order == "sequential":
        x = _sum([_pieces(widths[n], None if p.no_x_dim else "XBLOCK", blocks) for n, p in parts])
    else:
        most = [widths[n] for n, part in parts if part.no_x_dim]
        tunable = [widths[n] for n, part in parts if not part.no_x_dim]
        if tunable:
            most.append(_pieces(_largest(tunable), "XBLOCK", blocks))
        x = _product(_largest(most), len(parts))
    highest = _largest(list(heights.values())) if heights else None
    y, z = (1, 1) if highest is None else _overflowing(_pieces(highest, "YBLOCK", blocks))
    return _largest([x, min_blocks]), y, z


_PLAIN: dict[str, Grid] = {
    "Grid1D": _covering("x"),
    "Grid2D": _covering("x", "y"),
    "Grid3D": _covering("x", "y", "z"),
    "BatchMatmulGrid3D": _covering("z", "y", "x"),
    "Grid2DWithYZOverflow": FormulaGrid(_with_overflow),
    PRODUCT_GRID: FormulaGrid(_of_product),
    "MixOrderReductionGrid": FormulaGrid(_mix_order_reduction),
    COOPERATIVE_GRID: FormulaGrid(_cooperative_reduction),
    "SplitScanGrid": FormulaGrid(_split_scan),
}
_COMBINED = {
    "SequentialComboKernelGrid": "sequential",
    "SequentialFlattenComboKernelGrid": "flatten",
    "RoundRobinComboKernelGrid": "round_robin",
    "RoundRobinFlattenComboKernelGrid": "flatten_in_turn",
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


def combined_parts(parameters: Iterable[str]) -> dict[str, Any]:
    """Return the metadata of a combination whose launches give the sizes of its parts, `xnumel_0`,
    `xnumel_1`, and so on, and how many tensors each works on, `ynumel_0`, which are among its
    parameters; for another kernel nothing.
    """
    sizes = [name for name in parameters if _PART.fullmatch(name)]
    if not sizes:
        return {}
    count = sum(name.startswith("x") for name in sizes)
    parts = {f"no_x_dim_{number}": False for number in range(count)}
    return {"combo_grid_meta": {"num_kernels": count, **dict.fromkeys(sizes), **parts}}


def _three(expressions: Any) -> tuple[str | int, str | int, str | int]:
    if not isinstance(expressions, list | tuple):
        raise TypeError(f"expected three expressions, got {expressions!r:.40}")
    x, y, z = expressions
    return x, y, z


def _combo(order: str, metadata: Mapping[str, Any]) -> FormulaGrid:
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
    least = _fixed_size(metadata.get("min_blocks"), 0) or 0
    return FormulaGrid(partial(_combined, order, parts, least, blocks))


def _fixed_size(size: Any, least: int = 1) -> int | None:
    """Return a size that stands in the metadata; None where a call gives it."""
    if size is not None and (type(size) is not int or size < least):
        raise ValueError(f"a size of {size!r:.40}, expected at least {least}")
    return size


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


# ------------------------------------- Terms: numbers are worked out, and names stay as text


def _cover(axis: str, blocks: Blocks, size: SizeOf) -> Term:
    return _pieces(size(f"{axis}numel"), f"{axis.upper()}BLOCK", blocks)


def _pieces(size: Term, block: str | None, blocks: Blocks) -> Term:
    """Return how many blocks cover a size; without a block each element is one."""
    if block is None or blocks.get(block) is None:
        return size
    return _divided_up(size, block_of(block, blocks))


def _divided_up(size: Term, divisor: Term) -> Term:
    """Return how many pieces of a size cover another one."""
    if isinstance(size, int) and isinstance(divisor, int):
        return ceil_div(size, divisor)
    return size if divisor == 1 else f"-(-{_atom(size)} // {_atom(divisor)})"


def _overflowing(y: Term) -> tuple[Term, Term]:
    z = _divided_up(y, MAX_GRID[1])
    # Without a program along y, z is none either, and nothing is to be divided by it.
    return _divided_up(y, max(z, 1) if isinstance(z, int) else f"max({z}, 1)"), z


def _sum(terms: Sequence[Term]) -> Term:
    known, texts = _apart(terms)
    if not texts:
        return sum(known)
    return " + ".join([*map(_atom, texts), *([str(sum(known))] if sum(known) else [])])


def _product(first: Term, second: Term) -> Term:
    if isinstance(first, int) and isinstance(second, int):
        return first * second
    return " * ".join(_atom(term) for term in (first, second) if term != 1)


def _largest(terms: Sequence[Term]) -> Term:
    known, texts = _apart(terms)
    if not texts:
        return max(known)
    # No size is below zero, so that a bound of zero says nothing.
    words = [*texts, *([str(max(known))] if known and max(known) > 0 else [])]
    return words[0] if len(words) == 1 else f"max({', '.join(words)})"


def _apart(terms: Sequence[Term]) -> tuple[list[int], list[str]]:
    numbers = [term for term in terms if isinstance(term, int)]
    return numbers, [term for term in terms if isinstance(term, str)]


def _atom(term: Term) -> str:
    text = str(term)
    return text if text.isidentifier() or text.isdecimal() else f"({text})"
