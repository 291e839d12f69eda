# SPDX-License-Identifier: Apache-2.0
"""`IterationSpace`: the dimensions of a kernel, x, y, z and the reduced r0_, and the addresses of
its loops over them.

A loop's variables are laid over the dimensions (`place`), splitting a variable where a dimension
ends inside it.  Each address then uses parts of a dimension's index, `(index // divisor) % length`;
an equal part is one symbol, so two addresses of a kernel are equal exactly if their expressions
are.  `fusion` compares addresses with it, the kernel writer writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy

from bundler.codegen.loops.index_ranges import Ranges, exact_quotient
from bundler.codegen.loops.loop_nodes import Loop, numel
from bundler.codegen.loops.loop_order import merged_dimensions

Change = Callable[[sympy.Expr], sympy.Expr]
Piece = tuple[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True)
class Part:
    """A part of a dimension's index: `(index // divisor) % length`."""

    symbol: sympy.Symbol
    divisor: sympy.Expr
    length: sympy.Expr


@dataclass(eq=False)
class Dimension:
    """One dimension of a kernel.

    Attributes:
        prefix: `x`, `y`, `z` or `r0_`.
        numel: elements along it.
        parts: of its index, in the order in which addresses first used them.
    """

    prefix: str
    numel: sympy.Expr
    parts: dict[tuple[sympy.Expr, sympy.Expr], Part] = field(default_factory=dict)

    @property
    def is_reduced(self) -> bool:
        """Whether it is summed over."""
        return self.prefix.startswith("r")

    @property
    def whole(self) -> list[Part]:
        """The part that runs over all elements, if some address used it."""
        return [
            part
            for part in self.parts.values()
            if part.divisor == 1 and sympy.expand(part.length - self.numel) == 0
        ]

    def part(self, divisor: sympy.Expr, length: sympy.Expr) -> sympy.Symbol:
        """Return the symbol of a part."""
        key = (divisor, length)
        if key not in self.parts:
            # Numbered as they are first used, so that equal kernels have equal text.
            name = f"{self.prefix}{len(self.parts)}"
            self.parts[key] = Part(
                sympy.Symbol(name, integer=True, nonnegative=True), divisor, length
            )
        return self.parts[key].symbol


class IterationSpace:
    """The dimensions of a kernel, the outermost first, and the symbols of their parts."""

    def __init__(self, dimensions: Sequence[tuple[str, sympy.Expr]]) -> None:
        self.dimensions = tuple(Dimension(prefix, size) for prefix, size in dimensions)

    @property
    def kept(self) -> tuple[Dimension, ...]:
        """The dimensions that are not reduced."""
        return tuple(dimension for dimension in self.dimensions if not dimension.is_reduced)

    @property
    def reduced(self) -> Dimension | None:
        """The reduced dimension, None in a pointwise kernel."""
        return next((dimension for dimension in self.dimensions if dimension.is_reduced), None)

    def domain(self, loop: Loop) -> tuple[Dimension, ...] | None:
        """Return the dimensions that a loop runs over: all, or those that are kept; None where it
        fits neither.
        """
        if loop.has_rows:
            fits = self.reduced is not None and numel(loop.reduced_sizes) == self.reduced.numel
            return self.dimensions if fits and numel(loop.sizes) == self._numel(self.kept) else None
        # A pointwise loop beside a reduction runs over all elements, or once for each row.
        for dimensions in (self.dimensions, self.kept):
            if numel(loop.sizes) == self._numel(dimensions):
                return dimensions
        return None

    def _numel(self, dimensions: Sequence[Dimension]) -> sympy.Expr:
        return numel([dimension.numel for dimension in dimensions])

    def place(self, loop: Loop) -> Change | None:
        """Return what turns a loop's index expressions into those of this space; None where the
        loop does not fit.
        """
        domain = self.domain(loop)
        if domain is None:
            return None
        if loop.has_rows:
            assert self.reduced is not None
            kept, inner = (
                _laid(loop.variables, loop.sizes, self.kept),
                _laid(loop.reduced, loop.reduced_sizes, [self.reduced]),
            )
            if kept is None or inner is None:
                return None
            pieces, expressions = {**kept[0], **inner[0]}, {**kept[1], **inner[1]}
        else:
            laid = _laid(loop.variables, loop.sizes, domain)
            if laid is None:
                return None
            pieces, expressions = laid
        return lambda expr: self._placed(expr, pieces, expressions)

    def _placed(
        self,
        expr: sympy.Expr,
        pieces: dict[Dimension, list[Piece]],
        expressions: dict[sympy.Symbol, sympy.Expr],
    ) -> sympy.Expr:
        # Pieces are made for each loop; expressed by parts, which the space shares, addresses of
        # two loops can be compared. Pieces that stand together in an address become one part first,
        # so that two ways of cutting a dimension give equal addresses.
        expr = sympy.expand(expr.xreplace(expressions))
        sizes = {symbol: size for found in pieces.values() for symbol, size in found}
        expr = Ranges(sizes).simplified(expr)
        for dimension, found in pieces.items():
            if not any(expr.has(symbol) for symbol, _ in found):
                continue
            merged, gone = merged_dimensions(
                tuple(s for s, _ in found), tuple(n for _, n in found), [expr]
            )
            # The innermost piece has divisor 1; each further one is divided by all sizes behind it.
            divisor, names = sympy.Integer(1), {}
            for symbol, size in reversed(merged):
                if expr.has(symbol) and symbol not in gone:
                    names[symbol] = dimension.part(divisor, size)
                divisor = sympy.expand(divisor * size)
            expr = sympy.expand(expr.xreplace(gone).xreplace(names))
        return expr

    def ranges(self) -> Ranges:
        """Return what is known of the symbols of all parts."""
        return Ranges(
            {
                part.symbol: part.length
                for dimension in self.dimensions
                for part in dimension.parts.values()
            }
        )

    def part_of(self, symbol: sympy.Symbol) -> tuple[Dimension, Part] | None:
        """Return the part that a symbol stands for; None for another symbol."""
        for dimension in self.dimensions:
            for part in dimension.parts.values():
                if part.symbol == symbol:
                    return dimension, part
        return None

    def elements(self, expr: sympy.Expr) -> sympy.Expr:
        """Return how many values an expression takes, as the lengths of its parts say."""
        parts = (part for d in self.dimensions for part in d.parts.values())
        return numel([part.length for part in parts if part.symbol in expr.free_symbols])

    def dimensions_of(self, expr: sympy.Expr) -> set[Dimension]:
        """Return the dimensions whose index an expression uses."""
        symbols = expr.free_symbols
        return {
            d for d in self.dimensions if any(part.symbol in symbols for part in d.parts.values())
        }


def _laid(
    variables: Sequence[sympy.Symbol], sizes: Sequence[sympy.Expr], dimensions: Sequence[Dimension]
) -> tuple[dict[Dimension, list[Piece]], dict[sympy.Symbol, sympy.Expr]] | None:
    """Lay variables over dimensions, the outermost first; returns the pieces of each, and each
    variable as an expression of pieces.
    """
    pieces: dict[Dimension, list[Piece]] = {dimension: [] for dimension in dimensions}
    left = [dimension.numel for dimension in dimensions]
    expressions: dict[sympy.Symbol, sympy.Expr] = {}
    place = 0
    for variable, size in zip(variables, sizes, strict=True):
        expressions[variable], rest = sympy.Integer(0), size
        while rest != 1:
            while place < len(left) and left[place] == 1:
                place += 1
            if place == len(left):
                return None
            # Either what is left of the variable fits into what is left of the dimension, or fills
            # it and goes on in the next; where neither divides the other, no part has a fixed
            # length.
            whole, part = exact_quotient(left[place], rest), exact_quotient(rest, left[place])
            taken = rest if whole is not None else left[place]
            if whole is None and part is None:
                return None
            symbol = sympy.Symbol(
                f"{variable}_{len(pieces[dimensions[place]])}_{place}",
                integer=True,
                nonnegative=True,
            )
            pieces[dimensions[place]].append((symbol, taken))
            rest = sympy.Integer(1) if whole is not None else part
            left[place] = whole if whole is not None else sympy.Integer(1)
            expressions[variable] = expressions[variable] * taken + symbol
    return (pieces, expressions) if all(size == 1 for size in left) else None
