# SPDX-License-Identifier: Apache-2.0
"""Integer functions of index expressions, and what is provable of an expression from the ranges of its variables.

`FloorDiv(a, b)` is a // b rounded down; `ModularIndexing(x, d, m)` is (x // d) % m.  Lowerings build index expressions of them, `Ranges`
simplifies them, and the kernel writer asks `Ranges` whether an expression is nonnegative or fits in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy


class FloorDiv(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """a // b, rounded down."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
        """Return the value where it is known, None where the call stays."""
        if divisor == 1 or base == 0:
            return base
        if base.is_Integer and divisor.is_Integer and divisor != 0:
            return sympy.Integer(int(base) // int(divisor))
        if isinstance(base, FloorDiv):
            return FloorDiv(base.args[0], base.args[1] * divisor)
        quotient = _exact_quotient(base, divisor)
        return quotient if quotient is not None else _without_whole_terms(base, divisor)


class ModularIndexing(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """(x // d) % m for x of 0 or more."""

    nargs = (3,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> sympy.Expr | None:
        """Return the value where it is known, None where the call stays."""
        if base == 0 or modulus == 1:
            return sympy.Integer(0)
        if all(argument.is_Integer for argument in (base, divisor, modulus)) and divisor != 0 and modulus != 0:
            return sympy.Integer(int(base) // int(divisor) % int(modulus))
        if isinstance(base, FloorDiv):
            return ModularIndexing(base.args[0], base.args[1] * divisor, modulus)
        kept = [term for term in sympy.Add.make_args(base) if _exact_quotient(term, divisor * modulus) is None]
        if len(kept) < len(sympy.Add.make_args(base)):
            return ModularIndexing(sympy.Add(*kept), divisor, modulus)
        return None


def _exact_quotient(expr: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return expr / divisor where every term is a whole multiple of the divisor, else None."""
    if divisor == 0:
        return None
    terms = []
    for term in sympy.Add.make_args(expr):
        quotient = sympy.cancel(term / divisor) if not divisor.is_Integer else term / divisor
        if quotient.as_numer_denom()[1] != 1:
            return None
        terms.append(quotient)
    return sympy.Add(*terms)


def _without_whole_terms(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Take multiples of the divisor out of a sum: (a*d + b) // d = a + b // d, whatever the signs."""
    quotients, rest = [], []
    for term in sympy.Add.make_args(base):
        quotient = _exact_quotient(term, divisor)
        if quotient is None:
            rest.append(term)
        else:
            quotients.append(quotient)
    return sympy.Add(*quotients) + FloorDiv(sympy.Add(*rest), divisor) if quotients else None


class Ranges:
    """What is known of the symbols of a kernel: a variable runs from 0 to its size - 1; a size is 1 or more.

    Args:
        sizes: variable -> number of its values; other symbols are sizes of the program, of which only `is_nonnegative` is known.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self._sizes = dict(sizes)

    def nonnegative(self, expr: sympy.Expr) -> bool:
        """Whether an expression is provably 0 or more."""
        if expr.is_nonnegative:
            return True
        if isinstance(expr, (sympy.Add, sympy.Mul, FloorDiv, ModularIndexing)):
            return all(self.nonnegative(argument) for argument in expr.args)
        return isinstance(expr, sympy.Symbol) and expr in self._sizes

    def largest(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return an upper bound, None where none is known; the expression has to be a sum of products of nonnegative parts."""
        if expr.is_Integer:
            return expr
        if isinstance(expr, sympy.Symbol):
            return self._sizes[expr] - 1 if expr in self._sizes else expr
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            return self._largest_of(expr)
        if isinstance(expr, FloorDiv) and expr.args[1].is_positive and self.nonnegative(expr.args[0]):
            inside = self.largest(expr.args[0])
            return None if inside is None else FloorDiv(inside, expr.args[1])
        return expr.args[2] - 1 if isinstance(expr, ModularIndexing) else None

    def _largest_of(self, expr: sympy.Expr) -> sympy.Expr | None:
        bounds: list[sympy.Expr] = []
        for argument in expr.args:
            bound = self.largest(argument)
            if bound is None or not (self.nonnegative(argument) or argument.is_Integer):
                return None
            if isinstance(expr, sympy.Mul) and not self.nonnegative(argument):
                return None
            bounds.append(bound)
        return sympy.expand(expr.func(*bounds))

    def below(self, expr: sympy.Expr, limit: sympy.Expr) -> bool:
        """Whether an expression is provably less than a limit."""
        bound = self.largest(expr)
        return bound is not None and bool((limit - bound).is_positive)

    def simplified(self, expr: Any) -> sympy.Expr:
        """Return an equal expression with the divisions and remainders that the ranges decide taken out."""
        expr = sympy.sympify(expr)
        if not expr.has(FloorDiv, ModularIndexing):
            return sympy.expand(expr)
        if isinstance(expr, (FloorDiv, ModularIndexing)):
            arguments = [self.simplified(argument) for argument in expr.args]
            made = expr.func(*arguments)
            return self._decided(made) if isinstance(made, (FloorDiv, ModularIndexing)) else self.simplified(made)
        return sympy.expand(expr.func(*(self.simplified(argument) for argument in expr.args)))

    def _decided(self, expr: sympy.Expr) -> sympy.Expr:
        base, divisor = expr.args[0], expr.args[1]
        if not self.nonnegative(base):
            return expr
        if isinstance(expr, FloorDiv):
            return sympy.Integer(0) if self.below(base, divisor) else expr
        modulus = expr.args[2]
        if self.below(base, divisor * modulus):
            return self.simplified(FloorDiv(base, divisor))
        # What is smaller than the divisor, beside multiples of it, never carries.
        return expr
