# SPDX-License-Identifier: Apache-2.0
"""`KernelShape`, `PlacedLoop`, `Scope`, `placed_loops`: what is decided of a kernel before its body
is written, and what the writer keeps while it writes.

`kernel_plan` decides, `kernel_body` writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.loops.loop_nodes import Buffer, Loop
from bundler.codegen.loops.loop_terms import Term, TermPool, substituted
from bundler.codegen.loops.range_trees import Dimension, IterationSpace

Masks = tuple[str, ...]


@dataclass
class Scope:
    """A run of lines, and what they computed.

    Attributes:
        lines, stores: in order; the stores follow all lines.
        values: (term, masks) -> its value.
        parts: symbols of index parts that have a line.
    """

    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    values: dict[tuple[Term, Masks], Value] = field(default_factory=dict)
    parts: set[sympy.Symbol] = field(default_factory=set)


@dataclass(frozen=True)
class PlacedLoop:
    """A loop with its addresses in the kernel's space.

    Attributes:
        loop: as it was scheduled.
        value, index, index_terms: of the loop, over the parts of the space's dimensions.
        inside: whether it runs over the reduced dimension too.
        level: which pass over the row it belongs to.
    """

    loop: Loop
    value: Term
    index: sympy.Expr
    index_terms: tuple[tuple[sympy.Symbol, Term], ...]
    inside: bool
    level: int


@dataclass(frozen=True)
class KernelShape:
    """What was decided of a kernel before its body is written.

    Attributes:
        space: its dimensions.
        persistent: whether a program holds whole rows; meaningless without a reduced dimension.
        constant_masks: prefixes of dimensions that every block fills.
        wide: whether indices have 64 bits.
        removed: buffers that no other kernel reads, so they are not stored.
        asserted: whether indices that are read are asserted to be in range, where nothing proves
            it.
        upcast: whether 16-bit floats have the precision of float32 until they are stored; else each
            operator's result is rounded.
        scalars: prefixes of dimensions of which a program has one element, so that no axis of its
            blocks lies along them.
        rows_each: how many rows each program takes, block by block, where it also reduces across
            them; else 0.
        descriptors: whether tensor descriptors address the tiles that they reach.
        shared: whether several programs share a row, and wait for each other.
        columns: whether it reduces across memory alone.
    """

    space: IterationSpace
    persistent: bool
    constant_masks: frozenset[str]
    wide: bool
    removed: frozenset[str]
    asserted: bool = True
    upcast: bool = True
    scalars: frozenset[str] = frozenset()
    rows_each: int = 0
    descriptors: bool = False
    shared: bool = False
    columns: bool = False

    @property
    def looped(self) -> bool:
        """Whether rows are run through block by block."""
        return self.space.reduced is not None and not self.persistent

    @property
    def loop(self) -> Dimension | None:
        """The dimension that a program runs through block by block; None where it does so along
        none.
        """
        if self.rows_each:
            return self.space.kept[0]
        return self.space.reduced if self.looped else None

    def masks(self, dimensions: Collection[Dimension]) -> list[str]:
        """Return the names of the masks of dimensions, without those that are always true."""
        return [
            f"{d.prefix}mask"
            for d in self.space.dimensions
            if d in dimensions and d.prefix not in self.constant_masks
        ]

    @property
    def block_shape(self) -> str:
        """The text of the shape of a block."""
        return self.shape_of(self.space.dimensions)

    def shape_of(self, dimensions: Collection[Dimension]) -> str:
        """Return the text of the shape of a value that differs along these dimensions alone."""
        along = [d for d in self.space.dimensions if d.prefix not in self.scalars]
        blocks = (block_name(d) if d in dimensions else "1" for d in along)
        return f"[{', '.join(blocks)}]"


def block_name(dimension: Dimension) -> str:
    """Return the parameter that holds the block of a dimension."""
    return f"{dimension.prefix.upper()}BLOCK"


def placed_loops(
    loops: Sequence[Loop], space: IterationSpace, pool: TermPool, buffers: Mapping[str, Buffer]
) -> list[PlacedLoop]:
    """Return the loops of a kernel with their addresses in its space, and in which pass over the
    row each comes.
    """
    found: list[PlacedLoop] = []
    written: dict[str, PlacedLoop] = {}
    for loop in loops:
        place, domain = space.place(loop), space.domain(loop)
        assert place is not None, "a loop was fused into a kernel that it does not fit"
        assert domain is not None
        inside = space.reduced is not None and space.reduced in domain
        # A loop that reads the result of a reduction has to wait for the end of its pass.
        before = [written[name] for name in loop.reads if name in written]
        level = max((item.level + item.loop.is_reduction for item in before), default=0)
        terms = tuple((symbol, substituted(pool, term, place)) for symbol, term in loop.index_terms)
        item = PlacedLoop(
            loop, substituted(pool, loop.value, place), place(loop.index), terms, inside, level
        )
        found.append(item)
        written[loop.buffer] = item
    # An input that the kernel reads and overwrites is stored in the last pass: an earlier store
    # would change what a later pass reads again.
    last = max(item.level for item in found)
    read = {name for loop in loops for name in loop.reads}
    return [
        (
            replace(item, level=last)
            if item.loop.buffer in read and buffers[item.loop.buffer].source != "node"
            else item
        )
        for item in found
    ]
