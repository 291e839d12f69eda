# SPDX-License-Identifier: Apache-2.0
"""`index_text`: an integer expression over loop variables and sizes as text of a kernel.

Triton's `//` and `%` round towards zero, so they are written only where both sides are known not to
be negative; elsewhere a function of `bundler.codegen.lib` rounds as Python does. Numbers that leave
the integers are computed in float64. The text uses the names `tl`, `tl_math`, `libdevice` and
`lib`. The order of terms depends on the expression alone, not on hashes.

The kernel writer calls it for addresses, bounds, and index expressions as values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy.core.sorting import default_sort_key
from sympy.logic.boolalg import BooleanAtom

from bundler.codegen.loops.index_functions import FloorDiv
from bundler.codegen.loops.text_forms import operand
from bundler.errors import UnsupportedOperator

Nonnegative = Callable[[sympy.Expr], bool]
Below = Callable[[sympy.Expr, sympy.Expr], bool]
_RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}
_BITWISE = {
    "BitwiseFn_bitwise_and": "&",
    "BitwiseFn_bitwise_or": "|",
    "BitwiseFn_bitwise_xor": "^",
    "LShift": "<<",
    "RShift": ">>",
}
# Powers up to this are written as products; those of sizes are no higher.
_HIGHEST_PRODUCT = 16


def index_text(
    expr: sympy.Expr,
    *,
    nonnegative: Nonnegative,
    below: Below = lambda _expr, _limit: False,
    index_type: str = "tl.int32",
) -> str:
    """Return the text of an expression.

    Args:
        expr: of symbols, whose names are the names of the kernel's variables, and functions of
            `index_functions`.
        nonnegative: whether an expression is known never to be below zero.
        below: whether an expression is known to be less than a limit.
        index_type: Triton's name of the integer type that floats are rounded to.

    Raises:
        UnsupportedOperator: a function that has no text, or an integer rounded to tens.
    """
    return _Printer(nonnegative, below, index_type).text(sympy.sympify(expr))


@dataclass(frozen=True)
class _Printer:
    nonnegative: Nonnegative
    below: Below
    index_type: str

    def text(self, expr: sympy.Basic) -> str:
        """Return the text of an expression, without parentheses around it."""
        name = type(expr).__name__
        if isinstance(expr, (sympy.Integer, sympy.Symbol, BooleanAtom)):
            return str(expr)
        if isinstance(expr, sympy.Float):
            return repr(float(expr))
        if name in _RELATIONS:
            return f" {_RELATIONS[name]} ".join(self.operand(part) for part in expr.args)
        if name in _BITWISE:
            return f" {_BITWISE[name]} ".join(self.operand(part) for part in expr.args)
        writer = getattr(self, f"_{name.lower()}", None)
        if writer is None and name.startswith("OpaqueUnaryFn_"):
            return f"libdevice.{name.removeprefix('OpaqueUnaryFn_')}({self.float(expr.args[0])})"
        if writer is None:
            raise UnsupportedOperator(
                f"index expression {expr}: there is no text for {name}; call the ATen operator"
                " instead",
                operator=name,
                dtypes=(),
            )
        return str(writer(*expr.args))

    def operand(self, expr: sympy.Basic) -> str:
        """Return the text of an expression as it may stand beside an operator."""
        return operand(self.text(expr))

    def term(self, expr: sympy.Expr) -> str:
        """Return the text of an expression as it may stand in a sum."""
        coefficient, _ = expr.as_coeff_Mul()
        product = (
            isinstance(expr, sympy.Mul)
            and isinstance(coefficient, sympy.Integer)
            and int(coefficient) > 0
        )
        return self.text(expr) if product else self.operand(expr)

    def float(self, expr: sympy.Basic) -> str:
        """Return the text of an expression as a float64."""
        if isinstance(expr, (sympy.Integer, sympy.Float)):
            return repr(float(expr))
        return (
            self.text(expr)
            if expr.is_integer is not True and _is_float(expr)
            else self._tofloat(expr)
        )

    def both_nonnegative(self, *parts: sympy.Expr) -> bool:
        """Whether none of the expressions is ever below zero."""
        return all(self.nonnegative(part) for part in parts)

    # ---------------------------------------------------------------------------- sums and products

    def _add(self, *terms: sympy.Expr) -> str:
        ordered = sorted(
            terms, key=lambda term: (_is_taken_off(term), term.is_number, default_sort_key(term))
        )
        text = self.term(ordered[0])
        for term in ordered[1:]:
            text += f" - {self.term(-term)}" if _is_taken_off(term) else f" + {self.term(term)}"
        return text

    def _mul(self, *factors: sympy.Expr) -> str:
        below = [
            factor
            for factor in factors
            if isinstance(factor, (sympy.Rational, sympy.Pow)) and not factor.is_integer
        ]
        if below:
            # A quotient that need not be whole is no index any more: it is computed in floats.
            numerator, denominator = sympy.fraction(sympy.Mul(*factors))
            return f"{operand(self.float(numerator))} / {operand(self.float(denominator))}"
        if factors[0] == -1:
            return f"-{self.operand(sympy.Mul(*factors[1:]))}"
        ordered = sorted(
            factors, key=lambda factor: (not factor.is_number, default_sort_key(factor))
        )
        return " * ".join(self.operand(factor) for factor in ordered)

    def _pow(self, base: sympy.Expr, exponent: sympy.Expr) -> str:
        if isinstance(exponent, sympy.Integer) and 0 < int(exponent) <= _HIGHEST_PRODUCT:
            return " * ".join([self.operand(base)] * int(exponent))
        return f"libdevice.pow({self.float(base)}, {self.float(exponent)})"

    def _powbynatural(self, base: sympy.Expr, exponent: sympy.Expr) -> str:
        if isinstance(exponent, sympy.Integer) and 0 <= int(exponent) <= _HIGHEST_PRODUCT:
            return self.text(base**exponent)
        return f"lib.index_power({self.text(base)}, {self.text(exponent)})"

    # ------------------------------------------------------------------------ quotients, remainders

    def _floordiv(self, base: sympy.Expr, divisor: sympy.Expr) -> str:
        # Triton rounds towards zero, Python down; below zero these differ.
        if self.both_nonnegative(base, divisor):
            return f"{self.operand(base)} // {self.operand(divisor)}"
        return f"lib.index_floor_divide({self.text(base)}, {self.text(divisor)})"

    def _pythonmod(self, base: sympy.Expr, modulus: sympy.Expr) -> str:
        # The same for remainders, which have the sign of the dividend in Triton.
        if self.both_nonnegative(base, modulus):
            return self._remainder(base, modulus)
        return f"lib.index_remainder({self.text(base)}, {self.text(modulus)})"

    def _remainder(self, base: sympy.Expr, modulus: sympy.Expr) -> str:
        """Return the text of a remainder where nothing is negative."""
        # What goes round once at most, such as rolled rows, needs no division.
        if self.below(base, 2 * modulus):
            return f"lib.index_wrapped({self.text(base)}, {self.text(modulus)})"
        return f"{self.operand(base)} % {self.operand(modulus)}"

    _mod = _pythonmod

    def _modularindexing(self, base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> str:
        if self.both_nonnegative(base, divisor, modulus):
            return self._remainder(FloorDiv(base, divisor), modulus)
        quotient = self.text(base) if divisor == 1 else self._floordiv(base, divisor)
        return f"lib.index_remainder({quotient}, {self.text(modulus)})"

    def _floor(self, quotient: sympy.Expr) -> str:
        numerator, denominator = sympy.fraction(sympy.together(quotient))
        return self.text(FloorDiv(numerator, denominator))

    def _ceiling(self, quotient: sympy.Expr) -> str:
        numerator, denominator = sympy.fraction(sympy.together(quotient))
        return self.text(-FloorDiv(-numerator, denominator))

    # -------------------------------------------------------------------------------------- choices

    def _min(self, *parts: sympy.Expr) -> str:
        return self._extreme(list(parts), "<=", "<")

    def _max(self, *parts: sympy.Expr) -> str:
        return self._extreme(list(parts), ">=", ">")

    def _extreme(self, parts: list[sympy.Expr], first: str, second: str) -> str:
        """Return the extreme of the parts, in arithmetic that stays constant where they are.

        `a * (a <= b) + b * (b < a)`: of constants Triton computes it at compile time, where
        `tl.minimum` would make a tensor.
        """
        if len(parts) == 1:
            return self.text(parts[0])
        ordered = sorted(parts, key=default_sort_key)
        half = len(ordered) // 2
        one = operand(self._extreme(ordered[:half], first, second))
        other = operand(self._extreme(ordered[half:], first, second))
        return f"{one} * ({one} {first} {other}) + {other} * ({other} {second} {one})"

    def _where(self, condition: sympy.Basic, one: sympy.Expr, other: sympy.Expr) -> str:
        return f"tl.where({self.text(condition)}, {self.text(one)}, {self.text(other)})"

    def _piecewise(self, *cases: sympy.Basic) -> str:
        value, condition = cases[0].args
        if len(cases) == 1 or condition == sympy.true:
            return self.text(value)
        return (
            f"tl.where({self.text(condition)}, {self.text(value)}, {self._piecewise(*cases[1:])})"
        )

    def _and(self, *parts: sympy.Basic) -> str:
        return " & ".join(f"({self.text(part)})" for part in sorted(parts, key=default_sort_key))

    def _or(self, *parts: sympy.Basic) -> str:
        return " | ".join(f"({self.text(part)})" for part in sorted(parts, key=default_sort_key))

    def _not(self, part: sympy.Basic) -> str:
        return f"({self.text(part)}) == 0"

    def _identity(self, part: sympy.Expr) -> str:
        return self.text(part)

    def _abs(self, part: sympy.Expr) -> str:
        return f"tl_math.abs({self.text(part)})"

    # --------------------------------------------------------------------------------------- floats

    def _tofloat(self, part: sympy.Basic) -> str:
        return f"tl.cast({self.text(part)}, tl.float64)"

    def _inttruediv(self, base: sympy.Expr, divisor: sympy.Expr) -> str:
        return f"{operand(self.float(base))} / {operand(self.float(divisor))}"

    _floattruediv = _inttruediv

    def _floatpow(self, base: sympy.Expr, exponent: sympy.Expr) -> str:
        return f"libdevice.pow({self.float(base)}, {self.float(exponent)})"

    def _trunctoint(self, part: sympy.Expr) -> str:
        return f"tl.cast({self.float(part)}, {self.index_type})"

    def _floortoint(self, part: sympy.Expr) -> str:
        return f"tl.cast(tl_math.floor({self.float(part)}), {self.index_type})"

    def _ceiltoint(self, part: sympy.Expr) -> str:
        return f"tl.cast(tl_math.ceil({self.float(part)}), {self.index_type})"

    def _roundtoint(self, part: sympy.Expr) -> str:
        return f"tl.cast(libdevice.nearbyint({self.float(part)}), {self.index_type})"

    def _trunctofloat(self, part: sympy.Expr) -> str:
        return f"libdevice.trunc({self.float(part)})"

    def _rounddecimal(self, part: sympy.Expr, digits: sympy.Expr) -> str:
        if not isinstance(digits, sympy.Integer) or (part.is_integer and digits < 0):
            raise UnsupportedOperator(
                f"index expression: {part} rounded to {digits} digits; expected a known number of"
                " digits, not below zero for an integer",
                operator="RoundDecimal",
                dtypes=(),
            )
        scale = float(10 ** abs(int(digits)))
        up, down = ("*", "/") if digits >= 0 else ("/", "*")
        return f"libdevice.nearbyint({operand(self.float(part))} {up} {scale!r}) {down} {scale!r}"


def _is_taken_off(term: sympy.Expr) -> bool:
    """Whether a term of a sum is written behind a minus sign."""
    coefficient, _ = term.as_coeff_Mul()
    return isinstance(coefficient, sympy.Integer) and int(coefficient) < 0


def _is_float(expr: sympy.Basic) -> bool:
    """Whether the text of an expression is a float already."""
    if isinstance(expr, sympy.Symbol):
        return False
    name = type(expr).__name__
    if name in {
        "ToFloat",
        "IntTrueDiv",
        "FloatTrueDiv",
        "FloatPow",
        "TruncToFloat",
        "RoundDecimal",
    }:
        return True
    if name.startswith("OpaqueUnaryFn_") or isinstance(expr, sympy.Float):
        return True
    return any(_is_float(part) for part in expr.args)
