# SPDX-License-Identifier: Apache-2.0
"""`SizeValues`: torch's symbolic numbers as ours: sizes, and values that the host computes of sizes
once in each call.

An index expression holds sums, products, quotients and remainders of sizes.  What goes beyond that
(a float, a comparison, an integer that was rounded from a float) gets a name of its own, and the
plan holds the expression behind it as text: Python computes it as it does in the user's function,
and a kernel is given a number.  `lower` makes one for each graph.  Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing, PythonMod, owned
from bundler.codegen.loops.size_text import value_text
from bundler.errors import ConfigError, UnsupportedOperator
from bundler.runtime.program.host_values import host_value

#: From an expression over torch's symbols to its least and largest value in every call; None where
#: unbounded.
Bounds = Callable[[sympy.Expr], tuple[int | None, int | None]]
_INDEX_FUNCTIONS = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Max,
    sympy.Min,
    FloorDiv,
    PythonMod,
    ModularIndexing,
)


@dataclass(frozen=True)
class HostValue:
    """A number that the host computes.

    Attributes:
        dtype: `int64`, `float64` or `bool`.
        text: of the expression over sizes, as plans have it.
    """

    dtype: str
    text: str


class SizeValues:
    """The sizes and values of one graph.

    Args:
        example: value that a symbol of torch's has in the example; None where there is none.
        bounds: of an expression of torch's.

    Attributes:
        hints: symbol -> its value in the example.
        values: name -> what the host computes.
    """

    def __init__(
        self, example: Callable[[sympy.Symbol], int | float | None], bounds: Bounds
    ) -> None:
        self._example, self._bounds = example, bounds
        self._sizes: dict[sympy.Symbol, sympy.Symbol] = {}
        self._named: dict[tuple[str, sympy.Basic], sympy.Symbol] = {}
        self._theirs: dict[sympy.Symbol, sympy.Basic] = {}
        self.hints: dict[sympy.Symbol, Any] = {}
        self.values: dict[str, HostValue] = {}

    def integer(self, expr: sympy.Expr) -> sympy.Expr:
        """Return a SymInt's expression as an index expression."""
        return self._indexed(self._owned(expr))

    def number(self, expr: sympy.Basic, dtype: str) -> sympy.Basic:
        """Return the value of a SymFloat or SymBool: a number, or the symbol of what the host
        computes.
        """
        if expr.is_number or expr in {sympy.true, sympy.false}:
            return expr
        return self._value(self._owned(expr), dtype)

    def given(self, expr: sympy.Basic, dtype: str) -> sympy.Symbol:
        """Return the symbol of a float that a call of the program is given."""
        ours = self._owned(expr)
        symbol = self._named[dtype, ours] = self._new("fs")
        self._theirs[symbol] = expr
        return symbol

    def theirs(self, expr: sympy.Expr) -> sympy.Expr:
        """Return an expression with torch's symbols in the place of ours."""
        return expr.xreplace({**self._theirs, **{b: a for a, b in self._sizes.items()}})

    def condition(self, expr: sympy.Basic) -> str:
        """Return the text of a condition of torch's."""
        return value_text(self._owned(expr))

    @property
    def sizes(self) -> Mapping[sympy.Symbol, sympy.Symbol]:
        """Symbol of torch's -> size, as far as any was asked for."""
        return self._sizes

    def _owned(self, expr: sympy.Basic) -> sympy.Basic:
        for symbol in sorted(expr.free_symbols - self._sizes.keys(), key=str):
            hint, (least, _) = self._example(symbol), self._bounds(symbol)
            if hint is None:
                raise UnsupportedOperator(
                    f"the size {symbol} is known only once values are: expected sizes that follow"
                    " from those of the inputs",
                    operator="a size that values decide",
                )
            ours = self._sizes[symbol] = self._size(least)
            self.hints[ours] = hint
        return owned(expr.xreplace(self._sizes))

    def _size(self, least: int | None) -> sympy.Symbol:
        """Return a new symbol of an integer, with what is known of its sign."""
        # The sign decides which simplifications are allowed, and which division a kernel writes.
        known = {"positive": True} if least is not None and least > 0 else {}
        known = {"nonnegative": True} if not known and least == 0 else known
        return self._new("ks", integer=True, **known)

    def _new(self, prefix: str, **known: bool) -> sympy.Symbol:
        count = len(self._sizes) + len(self._named)
        return sympy.Symbol(f"{prefix}{count}", **(known or {"real": True}))

    def _indexed(self, expr: sympy.Basic) -> sympy.Expr:
        """Return an expression in which every part that is no index expression is a symbol."""
        if isinstance(expr, (sympy.Integer, sympy.Symbol)):
            return expr
        parts = expr.args
        power = not isinstance(expr, sympy.Pow) or (parts[1].is_Integer and parts[1] > 0)
        if isinstance(expr, _INDEX_FUNCTIONS) and power and all(p.is_integer for p in parts):
            return expr.func(*(self._indexed(part) for part in parts))
        return self._value(expr, "int64")

    def _value(self, expr: sympy.Basic, dtype: str) -> sympy.Symbol:
        known = self._named.get((dtype, expr))
        if known is not None:
            return known
        text = value_text(expr)
        if dtype == "int64":
            # An integer can stand in index expressions, so its sign matters; other values cannot.
            least, _ = self._bounds(self.theirs(expr))
            symbol = self._size(least)
        else:
            symbol = self._new("fs")
        self._named[dtype, expr] = symbol
        self._theirs[symbol] = self.theirs(expr)
        self.values[str(symbol)] = HostValue(dtype, text)
        try:
            self.hints[symbol] = host_value(text, {str(s): v for s, v in self.hints.items()})
        except ConfigError as error:
            raise UnsupportedOperator(
                f"a value of sizes: {error.message}", operator="a value of sizes"
            ) from error
        return symbol


def guards_of(environment: Any, sizes: SizeValues, *, ranges: bool) -> list[str]:
    """Return the conditions under which torch traced a graph, on those sizes that the graph has.

    Args:
        environment: torch's, of the graph's sizes.
        sizes: of the graph.
        ranges: also those on each size alone, as that it is neither 0 nor 1; an exported graph
            holds for these.
    """
    known = set(sizes.sizes)
    conditions = [guard.expr for guard in environment.guards if guard.expr.free_symbols <= known]
    for symbol in sorted(known if ranges else (), key=str):
        bounds = environment.var_to_range[symbol]
        conditions += [sympy.Ge(symbol, bounds.lower)] if bounds.lower.is_Integer else []
        conditions += [sympy.Le(symbol, bounds.upper)] if bounds.upper.is_Integer else []
    texts = (sizes.condition(condition) for condition in conditions)
    return list(dict.fromkeys(text for text in texts if text != "True"))
