# SPDX-License-Identifier: Apache-2.0
"""Functions of integer expressions that sympy lacks: `FloorDiv`, `ModularIndexing`, `PythonMod`,
and those of sizes that depend on shapes.

They have the names, arguments and meaning of the functions in torch's symbolic shapes, so `owned`
can take an expression of torch's over without importing torch. Divisors are positive where index
expressions are made, but nothing here relies on that, nor on a dividend that is not negative: every
quotient is rounded towards minus infinity, and every remainder has the sign of its divisor, as in
Python.

`index_text` writes them; the loop representation simplifies with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import sympy


def _is_positive_integer(expr: sympy.Expr) -> bool:
    return isinstance(expr, sympy.Integer) and int(expr) > 0


def _split(expr: sympy.Expr, divisor: sympy.Integer) -> tuple[sympy.Expr, sympy.Expr]:
    """Return an expression as `divisor * quotient + rest`, by terms whose coefficient the divisor
    divides.
    """
    quotient, rest = [], []
    for term in sympy.Add.make_args(sympy.expand(expr)):
        coefficient, factor = term.as_coeff_Mul()
        whole = isinstance(coefficient, sympy.Integer) and factor.is_integer is True
        if whole and int(coefficient) % int(divisor) == 0:
            quotient.append(sympy.Integer(int(coefficient) // int(divisor)) * factor)
        else:
            rest.append(term)
    return sympy.Add(*quotient), sympy.Add(*rest)


class FloorDiv(sympy.Function):
    """`base // divisor`, rounded towards minus infinity."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
        """Simplify what holds for every value of the symbols, the divisor being other than zero."""
        if isinstance(base, sympy.Integer) and isinstance(divisor, sympy.Integer) and divisor != 0:
            return sympy.Integer(int(base) // int(divisor))
        if base == 0 or divisor == 1:
            return base
        if divisor == -1:
            return -base
        if base == divisor:
            return sympy.Integer(1)
        if _is_positive_integer(divisor):
            return cls._by_number(base, divisor)
        return None

    @classmethod
    def _by_number(cls, base: sympy.Expr, divisor: sympy.Integer) -> sympy.Expr | None:
        # (a // b) // c is a // (b * c), also below zero, since both round down.
        if isinstance(base, FloorDiv) and _is_positive_integer(base.args[1]):
            return FloorDiv(base.args[0], base.args[1] * divisor)
        quotient, rest = _split(base, divisor)
        if quotient != 0:
            return quotient + FloorDiv(rest, divisor)
        common = math.gcd(int(divisor), _common_factor(base))
        return (
            FloorDiv(_divided(base, common), sympy.Integer(int(divisor) // common))
            if common > 1
            else None
        )

    def _eval_is_nonnegative(self) -> bool | None:
        base, divisor = self.args
        return True if base.is_nonnegative and divisor.is_positive else None


class ModularIndexing(sympy.Function):
    """`(base // divisor) % modulus`: one digit of a flat index."""

    nargs = (3,)
    is_integer = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> sympy.Expr | None:
        """Simplify what holds for every value of the symbols."""
        if modulus == 1 or base == 0:
            return sympy.Integer(0)
        numbers = all(isinstance(part, sympy.Integer) for part in (base, divisor, modulus))
        if numbers and divisor != 0 and modulus != 0:
            return sympy.Integer(int(base) // int(divisor) % int(modulus))
        if not (_is_positive_integer(divisor) and _is_positive_integer(modulus)):
            return None
        if isinstance(base, FloorDiv) and _is_positive_integer(base.args[1]):
            return ModularIndexing(base.args[0], base.args[1] * divisor, modulus)
        return cls._by_numbers(base, divisor, modulus)

    @classmethod
    def _by_numbers(
        cls, base: sympy.Expr, divisor: sympy.Integer, modulus: sympy.Integer
    ) -> sympy.Expr | None:
        # Whole turns of the digit change nothing.
        turns, rest = _split(base, divisor * modulus)
        if turns != 0:
            return ModularIndexing(rest, divisor, modulus)
        common = math.gcd(int(divisor), _common_factor(base))
        if common > 1:
            return ModularIndexing(
                _divided(base, common), sympy.Integer(int(divisor) // common), modulus
            )
        return None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[2].is_positive else None


def _common_factor(expr: sympy.Expr) -> int:
    """Return a number that divides every term whatever the symbols are."""
    factors = []
    for term in sympy.Add.make_args(sympy.expand(expr)):
        coefficient, factor = term.as_coeff_Mul()
        factors.append(
            int(coefficient) if isinstance(coefficient, sympy.Integer) and factor.is_integer else 1
        )
    return functools.reduce(math.gcd, factors, 0) or 1


def _divided(expr: sympy.Expr, number: int) -> sympy.Expr:
    return sympy.Add(*[term / number for term in sympy.Add.make_args(sympy.expand(expr))])


class PythonMod(sympy.Function):
    """`base % modulus`, with the sign of the modulus."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, base: sympy.Expr, modulus: sympy.Expr) -> sympy.Expr | None:
        """Simplify what holds for every value of the symbols, the modulus being other than zero."""
        if isinstance(base, sympy.Integer) and isinstance(modulus, sympy.Integer) and modulus != 0:
            return sympy.Integer(int(base) % int(modulus))
        if base == 0 or modulus in {1, -1} or base == modulus:
            return sympy.Integer(0)
        if _is_positive_integer(modulus):
            turns, rest = _split(base, modulus)
            return PythonMod(rest, modulus) if turns != 0 else None
        return None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[1].is_positive else None


class CeilDiv(sympy.Function):
    """The quotient rounded towards plus infinity; made of `FloorDiv`."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        """Return minus the floor of minus the base over the divisor."""
        return -FloorDiv(-base, divisor)


def _plain(name: str, arity: int | None, *, integer: bool) -> type[sympy.Function]:
    """Return a class of functions that simplify nothing."""
    members = {
        "is_integer": integer or None,
        "is_real": True,
        "nargs": arity,
        "__module__": __name__,
    }
    kept = {key: value for key, value in members.items() if value is not None}
    return type(name, (sympy.Function,), kept)


#: Functions that are written as they stand, by name: how many arguments they take, and whether
#: their value is an integer.
_PLAIN = {
    **dict.fromkeys(("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"), (1, True)),
    **dict.fromkeys(("ToFloat", "TruncToFloat"), (1, False)),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv", "FloatPow", "RoundDecimal"), (2, False)),
    **dict.fromkeys(("PowByNatural", "LShift", "RShift"), (2, True)),
    **dict.fromkeys(
        ("BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or", "BitwiseFn_bitwise_xor"), (2, True)
    ),
    "Where": (3, True),
    "Identity": (1, True),
}
#: The mathematical functions of sizes, which torch names `OpaqueUnaryFn_sqrt` and so on.
MATHEMATICS = (
    "sqrt",
    "cos",
    "cosh",
    "sin",
    "sinh",
    "tan",
    "tanh",
    "asin",
    "acos",
    "atan",
    "asinh",
    "exp",
    "log",
    "log2",
)
#: Each function of ours by name, which is also the name that torch's symbolic shapes have for it.
FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "FloorDiv": FloorDiv,
    "CleanDiv": FloorDiv,
    "CeilDiv": CeilDiv,
    "ModularIndexing": ModularIndexing,
    "PythonMod": PythonMod,
    "Mod": PythonMod,
    "Max": sympy.Max,
    "Min": sympy.Min,
    **{name: _plain(name, arity, integer=integer) for name, (arity, integer) in _PLAIN.items()},
    **{
        f"OpaqueUnaryFn_{name}": _plain(f"OpaqueUnaryFn_{name}", 1, integer=False)
        for name in MATHEMATICS
    },
}


def owned(expr: sympy.Basic) -> sympy.Basic:
    """Return an expression in which torch's own functions are replaced by those of the same name
    here.
    """
    if not expr.args:
        return expr
    arguments = [owned(argument) for argument in expr.args]
    name = type(expr).__name__
    if name in FUNCTIONS:
        return FUNCTIONS[name](*arguments)
    return expr.func(*arguments)
