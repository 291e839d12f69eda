# SPDX-License-Identifier: Apache-2.0
"""`IndexValues`: what is provable of values that are used as indices, from the sizes of a loop.

An index that a program computes, as `(i + 3) % 56`, is a value like any other: it is made negative
numbers positive, asserted, and computed in 64 bits.  Where it is made of a loop's own variables it
becomes part of the address instead, also by way of floats that hold it exactly, as in `int(i *
0.5)`; where only its bounds are known, as of an index that floats round, nothing is asserted any
more.

Bounds hold for every element that is computed, in whatever order numbers are added: those of floats
are widened at each operator by more than it rounds.  Only sizes that are numbers have bounds.
`GraphBuilder` simplifies each body with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type, least_and_most
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.index_ranges import Ranges
from bundler.codegen.loops.loop_terms import (
    Argument,
    Term,
    TermPool,
    in_order,
    substituted,
    symbols_of,
)

Bounds = tuple[float, float]

# More than an operator rounds by, relative to its result, and the largest number looked at.
_ROUNDING = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-9, "bfloat16": 2.0**-6}
_LARGEST_FLOAT = 60_000.0
# Whole numbers up to these are exact, and so is what a power of two divides them by.
_EXACT_UP_TO = {"float64": 1 << 53, "float32": 1 << 24}
_COMPARISONS: dict[str, Callable[[Bounds, Bounds], bool | None]] = {
    "lt": lambda a, b: True if a[1] < b[0] else False if a[0] >= b[1] else None,
    "le": lambda a, b: True if a[1] <= b[0] else False if a[0] > b[1] else None,
    "gt": lambda a, b: True if a[0] > b[1] else False if a[1] <= b[0] else None,
    "ge": lambda a, b: True if a[0] >= b[1] else False if a[1] < b[0] else None,
}
_INTEGERS = frozenset({NumberKind.SIGNED, NumberKind.UNSIGNED})
# Of these the result in 32 bits is that in 64, where it and the arguments fit.
_RESTS = frozenset({"remainder", "mod", "fmod"})
_NARROWED = frozenset({"add", "sub", "mul", "minimum", "maximum", "to_dtype"}) | _RESTS


def simplified(pool: TermPool, root: Term, ranges: Ranges) -> Term:
    """Return a body whose index expressions are as simple as the sizes of its variables allow, and
    whose values that serve as indices are part of them where they can.
    """
    if any(symbols_of(term) or term.operator == "check_bounds" for term in in_order(root)):
        return IndexValues(pool, ranges).simplified(root)
    return substituted(pool, root, ranges.simplified)


class IndexValues:
    """Simplifies one body.

    Args:
        pool: makes terms.
        ranges: of the body's variables.
    """

    def __init__(self, pool: TermPool, ranges: Ranges) -> None:
        self._pool, self._ranges = pool, ranges
        self._bounds: dict[Term, Bounds] = {}
        # Terms that are index expressions of the loop's variables alone.
        self._expressions: dict[Term, sympy.Expr] = {}
        # Floats that are exactly such an expression, never negative, divided by a power of two.
        self._quotients: dict[Term, tuple[sympy.Expr, int]] = {}
        # Of 64 bits -> the same value in 32.
        self._narrow: dict[Term, Term] = {}

    def simplified(self, root: Term) -> Term:
        """Return the body, simplified."""
        done: dict[Term, Term] = {}
        for term in in_order(root):
            arguments = tuple(done[a] if isinstance(a, Term) else a for a in term.arguments)
            made = self._decided(self._made(term, arguments))
            if made not in self._bounds:
                self._learn(made)
            done[term] = self._narrowed(made)
        return done[root]

    def _made(self, term: Term, arguments: tuple[Argument, ...]) -> Term:
        if term.operator == "to_dtype" and arguments[0] in self._narrow:
            narrow = self._narrow[arguments[0]]
            return self._pool.make("to_dtype", (narrow,), term.dtype, term.details)
        if term.operator not in {"load", "index_expr"}:
            return self._pool.make(term.operator, arguments, term.dtype, term.details)
        *front, index, symbols = term.details
        known: dict[sympy.Symbol, sympy.Expr] = {}
        left: list[tuple[sympy.Symbol, Argument]] = []
        for symbol, argument in zip(symbols, arguments, strict=True):
            assert isinstance(argument, Term)
            if argument in self._expressions:
                known[symbol] = self._expressions[argument]
            else:
                left.append((symbol, self._narrow.get(argument, argument)))
        index = self._ranges.simplified(index.xreplace(known))
        if term.operator == "index_expr" and index.is_Integer:
            return self._pool.constant(int(index), term.dtype)
        if term.operator == "index_expr" and left and index == left[0][0]:
            return self._pool.cast(arguments[symbols.index(index)], term.dtype)
        details = (*front, index, tuple(symbol for symbol, _ in left))
        return self._pool.make(term.operator, tuple(a for _, a in left), term.dtype, details)

    # ------------------------------------------------------------------------------------- Deciding

    def _decided(self, term: Term) -> Term:
        """Return a simpler term that always has the value of this one, else this one."""
        match term.operator, term.arguments:
            case "where", (Term("constant") as condition, Term() as one, Term() as other):
                return self._pool.cast(one if condition.details[0] else other, term.dtype)
            case "check_bounds", (Term() as index,):
                return index if self._is_below(index, dict(term.details)["size"]) else term
            case (("lt" | "le" | "gt" | "ge"), _):
                return self._compared(term)
            case (("minimum" | "maximum"), (Term() as one, Term() as other)):
                return self._extreme(term, one, other)
        return term

    def _is_below(self, index: Term, size: sympy.Expr) -> bool:
        """Whether a value is at least 0 and below a size, which may change."""
        bounds, expression = self._bounds.get(index), self._expressions.get(index)
        if bounds is not None and size.is_Integer:
            return bounds[0] >= 0 and bounds[1] < size
        return (
            expression is not None
            and self._ranges.nonnegative(expression)
            and self._ranges.below(expression, size)
        )

    def _compared(self, term: Term) -> Term:
        # Of other dtypes a kernel may compare rounded numbers.
        dtypes = {a.dtype if isinstance(a, Term) else type(a).__name__ for a in term.arguments}
        if len(dtypes - {"int"}) != 1 or not min(dtypes - {"int"}).startswith(("int", "uint")):
            return term
        found = self._bounds_of(term.arguments)
        answer = None if found is None else _COMPARISONS[term.operator](*found)
        if answer is None and term.operator == "lt":
            # An index is never below 0, whatever its sizes are.
            one, zero = term.arguments
            index = self._expressions.get(one) if isinstance(one, Term) else None
            positive = index is not None and self._ranges.nonnegative(index)
            answer = False if positive and self._part(zero) == 0 else None
        return term if answer is None else self._pool.constant(answer, "bool")

    def _extreme(self, term: Term, one: Term, other: Term) -> Term:
        found = self._bounds_of(term.arguments)
        # Of equals of another dtype, or of zeros of both signs, it matters which one is taken.
        if found is None or not one.dtype == other.dtype == term.dtype or "int" not in term.dtype:
            return term
        low, high = (one, other) if found[0][1] <= found[1][0] else (other, one)
        if self._bounds[low][1] > self._bounds[high][0]:
            return term
        return low if term.operator == "minimum" else high

    def _narrowed(self, term: Term) -> Term:
        """Return an integer of 64 bits as one of 32 that is widened, where nothing that it is made
        of needs more: who reads an index then has the narrow one.
        """
        if term.dtype != "int64" or term in self._narrow or not self._is_narrow(term):
            return term
        arguments = [self._narrow.get(a, a) if isinstance(a, Term) else a for a in term.arguments]
        wide = [a for a in arguments if not (isinstance(a, Term) or _fits_in(a, "int32"))]
        if term.operator == "constant":
            narrow = self._pool.constant(term.details[0], "int32")
        elif term.operator == "index_expr" and not term.arguments:
            narrow = self._pool.index(term.details[0], "int32")
        elif (
            term.operator in _NARROWED
            and not wide
            and not any(isinstance(a, Term) and a.dtype == "int64" for a in arguments)
        ):
            narrow = self._pool.make(term.operator, tuple(arguments), "int32", term.details)
        else:
            return term
        for known in (self._bounds, self._expressions):
            if term in known:
                known[narrow] = known[term]
        self._narrow[term] = narrow
        return term

    def _is_narrow(self, term: Term) -> bool:
        bounds = self._bounds.get(term)
        return bounds is not None and all(_fits_in(bound, "int32") for bound in bounds)

    def _bounds_of(self, arguments: Sequence[Argument]) -> list[Bounds] | None:
        found: list[Bounds] = []
        for value in arguments:
            if isinstance(value, Term):
                bounds = self._bounds.get(value)
            else:
                bounds = (value, value) if math.isfinite(value) else None
            if bounds is None:
                return None
            found.append(bounds)
        return found

    # ------------------------------------------------------------------------------------- Learning

    def _learn(self, term: Term) -> None:
        """Note what is known of a term whose arguments were looked at."""
        kind = data_type(term.dtype).kind if term.dtype != "bool" else None
        if kind in _INTEGERS:
            self._learn_integer(term)
        elif kind is NumberKind.FLOAT:
            self._learn_float(term)

    def _learn_integer(self, term: Term) -> None:
        expression = self._expression_of(term)
        bounds: Bounds | None = None
        if expression is not None:
            bounds = self._ranges.interval(expression)
        elif term.operator == "where":
            bounds = _hull(self._bounds_of(term.arguments[1:]))
        elif term.operator in _RESTS:
            bounds = _rest(self._bounds_of(term.arguments))
        else:
            bounds = self._bounds_by_operator(term)
        if bounds is not None:
            bounds = math.trunc(bounds[0]), math.trunc(bounds[1])
        # A number that does not fit may be any other.
        fits = bounds is not None and all(_fits_in(bound, term.dtype) for bound in bounds)
        if fits and bounds is not None:
            self._bounds[term] = bounds
        # An index expression is what it says, whether its sizes are numbers or change.
        if expression is not None and (fits or term.operator == "index_expr"):
            self._expressions[term] = expression

    def _expression_of(self, term: Term) -> sympy.Expr | None:
        """Return an integer as an expression over the loop's variables, None where it is none."""
        if term.operator == "constant":
            return sympy.Integer(int(term.details[0]))
        if term.operator == "index_expr":
            return None if term.arguments else term.details[0]
        if term.details and term.operator != "to_dtype":
            return None
        if term.operator == "to_dtype" and term.arguments[0] in self._quotients:
            base, divisor = self._quotients[term.arguments[0]]
            return FloorDiv(base, sympy.Integer(divisor))
        parts = [self._part(argument) for argument in term.arguments]
        if None in parts or term.operator not in _EXPRESSIONS:
            return None
        made = _EXPRESSIONS[term.operator](self._ranges, *parts)
        return None if made is None else self._ranges.simplified(made)

    def _part(self, value: Argument) -> sympy.Expr | None:
        if isinstance(value, Term):
            # Only what has bounds can be computed with: the others may overflow.
            return self._expressions.get(value) if value in self._bounds else None
        return sympy.Integer(value) if type(value) is int else None

    def _bounds_by_operator(self, term: Term) -> Bounds | None:
        if term.operator not in _BOUNDED or (term.details and term.operator not in _WITH_DETAILS):
            return None
        given = self._bounds_of(term.arguments)
        return None if given is None else _BOUNDED[term.operator](given)

    def _learn_float(self, term: Term) -> None:
        quotient = self._quotient_of(term)
        if quotient is not None:
            self._quotients[term] = quotient
        if term.operator == "constant" and math.isfinite(term.details[0]):
            found: Bounds | None = (term.details[0], term.details[0])
        else:
            found = self._bounds_by_operator(term)
        if found is None or max(map(abs, found)) > _LARGEST_FLOAT:
            return
        slack = max(map(abs, found)) * _ROUNDING[term.dtype]
        self._bounds[term] = (
            found if term.operator in _EXACT else (found[0] - slack, found[1] + slack)
        )

    def _quotient_of(self, term: Term) -> tuple[sympy.Expr, int] | None:
        """Return what a float is exactly: an expression that is never negative, and the power of
        two that it is divided by; None where it may be rounded.
        """
        most, given = _EXACT_UP_TO.get(term.dtype), term.arguments
        if most is None or not given or not isinstance(given[0], Term):
            return None
        whole = self._part(given[0]) if term.operator == "to_dtype" else None
        base, divisor = (
            (whole, 1) if whole is not None else self._quotients.get(given[0], (None, 1))
        )
        if base is None or (whole is None and given[0].dtype != term.dtype):
            return None
        if term.operator in {"add", "sub", "mul"}:
            number = _number(given[1])
            if number is None:
                return None
            up, down = number.as_integer_ratio()
            if term.operator == "mul":
                base = base * up
            else:
                base = base * down + up * divisor * (1 if term.operator == "add" else -1)
            divisor *= down
        elif term.operator in {"floor", "trunc"}:
            base, divisor = FloorDiv(base, sympy.Integer(divisor)), 1
        elif term.operator != "to_dtype":
            return None
        bounds = self._ranges.interval(base)
        exact = bounds is not None and bounds[0] >= 0 and max(bounds[1], divisor) <= most
        return (base, divisor) if exact else None


def _number(value: Argument) -> float | None:
    """Return the finite number that an argument is, None where it is none."""
    if isinstance(value, Term):
        value = value.details[0] if value.operator == "constant" else math.nan
    return float(value) if math.isfinite(value) else None


def _fits_in(number: float, dtype: str) -> bool:
    least, most = least_and_most(dtype)
    return least <= number <= most


def _hull(given: list[Bounds] | None) -> Bounds | None:
    if given is None:
        return None
    return min(low for low, _ in given), max(high for _, high in given)


def _rest(given: list[Bounds] | None) -> Bounds | None:
    """Return the bounds of a rest of whole numbers, where torch's ways of dividing are one."""
    if given is None or given[0][0] < 0 or given[1][0] < 1:
        return None
    return 0, min(given[0][1], given[1][1] - 1)


def _corners(operate: Callable[[Any, Any], Any]) -> Callable[[list[Bounds]], Bounds | None]:
    """Return what bounds an operator that is monotonous in each argument, by its corners."""

    def bounds(given: list[Bounds]) -> Bounds | None:
        found = [operate(a, b) for a in given[0] for b in given[1]]
        return min(found), max(found)

    return bounds


def _each(operate: Callable[[Any], Any]) -> Callable[[list[Bounds]], Bounds | None]:
    return lambda given: (operate(given[0][0]), operate(given[0][1]))


# A conversion to integers truncates, and is monotonous.
_BOUNDED: dict[str, Callable[[list[Bounds]], Bounds | None]] = {
    "add": _corners(lambda a, b: a + b),
    "sub": _corners(lambda a, b: a - b),
    "mul": _corners(lambda a, b: a * b),
    "minimum": _corners(min),
    "maximum": _corners(max),
    "to_dtype": _each(lambda a: a),
    "floor": _each(math.floor),
    "ceil": _each(math.ceil),
    "trunc": _each(math.trunc),
    "relu": _each(lambda a: max(a, 0)),
    "neg": lambda given: (-given[0][1], -given[0][0]),
    "abs": lambda given: (max(given[0][0], -given[0][1], 0), max(map(abs, given[0]))),
    "check_bounds": _each(lambda a: a),
}
# Of all other operators details would change the result.
_WITH_DETAILS = frozenset({"to_dtype", "check_bounds"})
# These give one of their arguments, or a whole number; a constant is rounded to its dtype.
_EXACT = frozenset({"minimum", "maximum", "floor", "ceil", "trunc", "relu", "neg", "abs"})


def _digit(ranges: Ranges, base: Any, modulus: Any) -> sympy.Expr | None:
    plain = modulus.is_Integer and modulus > 0 and ranges.nonnegative(base)
    return ModularIndexing(base, sympy.Integer(1), modulus) if plain else None


def _quotient(ranges: Ranges, base: Any, divisor: Any) -> sympy.Expr | None:
    plain = divisor.is_Integer and divisor > 0 and ranges.nonnegative(base)
    return FloorDiv(base, divisor) if plain else None


# Where nothing is negative torch's ways of dividing are one.
_EXPRESSIONS: dict[str, Callable[..., sympy.Expr | None]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": lambda _, a, b: a * b if a.is_Integer or b.is_Integer else None,
    "to_dtype": lambda _, a: a,
    "neg": lambda _, a: -a,
    **dict.fromkeys(("remainder", "mod", "fmod"), _digit),
    **dict.fromkeys(("floordiv", "truncdiv"), _quotient),
}
