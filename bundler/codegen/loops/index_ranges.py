# SPDX-License-Identifier: Apache-2.0
"""`Ranges`: what is provable of an index expression from the sizes of its variables, and its
simplest form under them.

Lowerings and `range_trees` simplify with it; the kernel writer asks whether an expression is never
negative, or fits in 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sympy

from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing

_LARGEST_NARROW = 2**31 - 1


def exact_quotient(expr: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return expr / divisor where every term is a whole multiple of the divisor, else None."""
    if divisor == 0:
        return None
    # A divisor that is a sum, such as the size of a strided slice, (n - 1) // 2 + 1, divides no
    # single term of a multiple of it, so the whole is divided at once.
    if divisor.is_Add:
        whole = sympy.cancel(expr / divisor)
        return sympy.expand(whole) if whole.as_numer_denom()[1] == 1 and whole.is_integer else None
    terms = []
    for term in sympy.Add.make_args(expr):
        quotient = term / divisor if divisor.is_Integer else sympy.cancel(term / divisor)
        if quotient.as_numer_denom()[1] != 1 or not quotient.is_integer:
            return None
        terms.append(quotient)
    return sympy.Add(*terms)


def _rejoined(expr: sympy.Expr) -> sympy.Expr:
    """Return a sum in which a quotient and the remainder beside it are one quotient again: `8 * (i
    // 8) + i % 8` is `i`.
    """
    terms = sympy.Add.make_args(expr)
    for term in terms:
        coefficient, factor = term.as_coeff_Mul()
        if isinstance(factor, ModularIndexing):
            base, divisor, modulus = factor.args
            # The digit above, which together with this one is a longer part of the index.
            rest = coefficient * modulus * FloorDiv(base, divisor * modulus)
            if rest in terms:
                return _rejoined(
                    sympy.expand(expr - term - rest + coefficient * FloorDiv(base, divisor))
                )
    return expr


def _product(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    corners = [a * b for a in one for b in other]
    return min(corners), max(corners)


class Ranges:
    """What is known of the symbols of a kernel: a variable runs from 0 to its size - 1; other
    symbols are sizes of the program.

    Args:
        sizes: variable -> number of its values.
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
        """Return an upper bound, None where none is known."""
        if expr.is_Integer:
            return expr
        if isinstance(expr, sympy.Symbol):
            return self._sizes[expr] - 1 if expr in self._sizes else expr
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            return self._largest_of(expr)
        if (
            isinstance(expr, FloorDiv)
            and expr.args[1].is_positive
            and self.nonnegative(expr.args[0])
        ):
            inside = self.largest(expr.args[0])
            return None if inside is None else FloorDiv(inside, expr.args[1])
        return expr.args[2] - 1 if isinstance(expr, ModularIndexing) else None

    def _largest_of(self, expr: sympy.Expr) -> sympy.Expr | None:
        bounds: list[sympy.Expr] = []
        for argument in expr.args:
            bound = self.largest(argument)
            if bound is None or not (
                self.nonnegative(argument) or (argument.is_Integer and isinstance(expr, sympy.Add))
            ):
                return None
            bounds.append(bound)
        return sympy.expand(expr.func(*bounds))

    def interval(self, expr: sympy.Expr) -> tuple[int, int] | None:
        """Return the least and the greatest number that an expression can be, both in reach or
        beyond it; None where sizes that change decide.
        """
        if expr.is_Integer:
            return int(expr), int(expr)
        if isinstance(expr, sympy.Symbol):
            size = self._sizes.get(expr)
            return (0, int(size) - 1) if size is not None and size.is_Integer else None
        if not isinstance(expr, (sympy.Add, sympy.Mul, FloorDiv, ModularIndexing)):
            return None
        parts = [self.interval(argument) for argument in expr.args]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        if isinstance(expr, sympy.Add):
            return sum(low for low, _ in found), sum(high for _, high in found)
        if isinstance(expr, sympy.Mul):
            return functools.reduce(_product, found)
        if not (expr.args[1].is_Integer and expr.args[1] > 0):
            return None
        low, high = (number // int(expr.args[1]) for number in found[0])
        if isinstance(expr, FloorDiv):
            return low, high
        within = low >= 0 and high < found[2][0]
        return (low, high) if within else (0, found[2][1] - 1) if found[2][0] > 0 else None

    def below(self, expr: sympy.Expr, limit: sympy.Expr) -> bool:
        """Whether an expression is provably less than a limit."""
        bound = self.largest(expr)
        return bound is not None and bool(sympy.expand(limit - bound).is_positive)

    def fits(self, expr: sympy.Expr) -> bool:
        """Whether an expression, and every term of it, provably has at most 31 bits and a sign."""
        # Each term by itself, since partial sums have to fit as well, in whatever order they are
        # added.
        reach = sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(expr)):
            coefficient, factor = term.as_coeff_Mul()
            bound = self.largest(factor) if self.nonnegative(factor) else None
            if bound is None:
                return False
            reach += abs(coefficient) * bound
        # A size alone is below 2**31 in a kernel with 32-bit indices, which checks that; a product
        # of such sizes need not be.
        alone = isinstance(expr, sympy.Symbol)
        return bool(alone or (reach.is_Integer and reach <= _LARGEST_NARROW))

    def simplified(self, expr: Any) -> sympy.Expr:
        """Return an equal expression without the divisions and remainders that the ranges
        decide.
        """
        expr = sympy.sympify(expr)
        if not expr.has(FloorDiv, ModularIndexing):
            return sympy.expand(expr)
        arguments = [self.simplified(argument) for argument in expr.args]
        made = expr.func(*arguments)
        if isinstance(made, FloorDiv):
            return self._quotient(made.args[0], made.args[1])
        if isinstance(made, ModularIndexing):
            return self._remainder(*made.args)
        if isinstance(expr, (FloorDiv, ModularIndexing)):
            return self.simplified(made)
        return _rejoined(sympy.expand(made))

    def _quotient(self, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        whole, rest = self._multiples(base, divisor)
        if self.nonnegative(rest) and self.below(rest, divisor):
            return sympy.expand(whole)
        shorter = self._without_carry(rest, divisor)
        return sympy.expand(
            whole
            + (FloorDiv(rest, divisor) if shorter is None else self.simplified(FloorDiv(*shorter)))
        )

    def _remainder(self, base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> sympy.Expr:
        _, rest = self._multiples(base, divisor * modulus)
        if self.nonnegative(rest) and self.below(rest, divisor * modulus):
            return self._quotient(rest, divisor)
        shorter = self._without_carry(rest, divisor)
        if shorter is not None:
            return self.simplified(ModularIndexing(shorter[0], shorter[1], modulus))
        return ModularIndexing(rest, divisor, modulus)

    def _multiples(self, base: sympy.Expr, divisor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """Return a sum as divisor * quotient + rest."""
        whole, rest = [], []
        for term in sympy.Add.make_args(sympy.expand(base)):
            quotient = exact_quotient(term, divisor)
            if quotient is None:
                rest.append(term)
            else:
                whole.append(quotient)
        return sympy.Add(*whole), sympy.Add(*rest)

    def _without_carry(
        self, base: sympy.Expr, divisor: sympy.Expr
    ) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Return base and divisor over a factor of the divisor that the smaller terms of the base
        never reach together.
        """
        terms = sympy.Add.make_args(base)
        # `(8 * i + j) // 24` with j < 8 is `i // 3`: j never carries into the next multiple of 8.
        factors = {term.as_coeff_Mul()[0] for term in terms} if divisor.is_Integer else set()
        for factor in sorted(
            factor
            for factor in factors
            if factor.is_Integer and factor > 1 and divisor % factor == 0
        ):
            whole, rest = self._multiples(base, factor)
            if whole != 0 and self.nonnegative(rest) and self.below(rest, factor):
                return whole, divisor / factor
        return None
