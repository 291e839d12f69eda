# SPDX-License-Identifier: Apache-2.0
"""`KernelShape`, `PlacedLoop`, `Scope`: what is decided of a kernel before its body is written, and what the writer keeps while it writes.

`kernel_plan` decides, `kernel_body` writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import sympy

from bundler.codegen.loop_nodes import Loop
from bundler.codegen.loop_terms import Term
from bundler.codegen.operation_text import Value
from bundler.codegen.range_trees import Dimension, IterationSpace

Masks = tuple[str, ...]


@dataclass
class Scope:
    """A run of lines, and the values that they computed."""

    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    values: dict[tuple[Term, Masks], Value] = field(default_factory=dict)
    parts: set[sympy.Symbol] = field(default_factory=set)


@dataclass(frozen=True)
class PlacedLoop:
    """A loop with its addresses in the kernel's space."""

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
    """

    space: IterationSpace
    persistent: bool
    constant_masks: frozenset[str]
    wide: bool
    removed: frozenset[str]

    @property
    def looped(self) -> bool:
        """Whether rows are run through block by block."""
        return self.space.reduced is not None and not self.persistent

    def masks(self, dimensions: Collection[Dimension]) -> list[str]:
        """Return the names of the masks of dimensions, without those that are always true."""
        return [
            f"{d.prefix}mask" for d in self.space.dimensions if d in dimensions and d.prefix not in self.constant_masks
        ]

    @property
    def block_shape(self) -> str:
        """The text of the shape of a block."""
        return self.shape_of(self.space.dimensions)

    def shape_of(self, dimensions: Collection[Dimension]) -> str:
        """Return the text of the shape of a value that differs along these dimensions alone."""
        return f"[{', '.join(block_name(d) if d in dimensions else '1' for d in self.space.dimensions)}]"


def block_name(dimension: Dimension) -> str:
    """Return the parameter that holds the block of a dimension."""
    return f"{dimension.prefix.upper()}BLOCK"
