# SPDX-License-Identifier: Apache-2.0
"""`host_value`: the value of an expression over sizes that is no plain size: a float, a comparison,
an integer that is rounded from a float.

A plan names such expressions in `values` and `guards`.  They are evaluated once in each call, by
Python's own arithmetic, so that a float has 64 bits as it has in the user's function.  Nothing is
executed: the text is parsed, and only the nodes and functions below are known.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics.launch_expressions import names_of, parsed

Number = int | float | bool
_MOST_BITS = 128  # of a whole number on the way to a result


def _power(base: Any, exponent: Any) -> Any:
    """Return a power; one of whole numbers is a whole number of bounded size, since a plan may come
    from anybody.
    """
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base not in {-1, 0, 1} and exponent * base.bit_length() > _MOST_BITS:
            raise OverflowError(f"{base} ** {exponent} has too many bits")
        return base ** (exponent % 2 if base == -1 else min(exponent, _MOST_BITS))
    return math.pow(base, exponent)


def _shift(amount: Any) -> Any:
    if not 0 <= amount < _MOST_BITS:
        raise OverflowError(f"a shift by {amount}")
    return amount


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: lambda number, amount: number << _shift(amount),
    ast.RShift: lambda number, amount: number >> _shift(amount),
    ast.Pow: _power,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_RELATIONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_MATHEMATICS = "sqrt cos cosh sin sinh tan tanh asin acos atan asinh exp log log2 floor ceil trunc"
#: Functions by name: how many arguments each takes at least and at most, and what computes it.
FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    **{name: (1, 1, getattr(math, name)) for name in _MATHEMATICS.split()},
    "float": (1, 1, float),
    "round": (1, 2, round),
    "abs": (1, 1, abs),
    "max": (2, 1000, max),
    "min": (2, 1000, min),
    "where": (3, 3, lambda condition, one, other: one if condition else other),
}


def host_value(expression: str, names: Mapping[str, Any]) -> Number:
    """Return the value of an expression.

    Args:
        expression: text of at most `launch_expressions.MAX_TEXT` characters.
        names: values of the names.

    Raises:
        ConfigError: anything else stands there, a name has no value, or Python has no result, as
            for a division by zero.
    """
    try:
        found: Number = _value(_parsed(expression), names)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ConfigError(f"a value of the program: {expression!r:.80}: {error}") from error
    if type(found) not in {int, float, bool}:
        raise ConfigError(f"a value of the program: {expression!r:.80} is {found!r:.40}, no number")
    return found


def value_names(expression: str) -> frozenset[str]:
    """Return the names of an expression; raises `ConfigError` where `host_value` does not know all
    of it.
    """
    return frozenset(names_of(_parsed(expression)))


def _parsed(expression: str) -> ast.expr:
    return parsed(expression, _operands, "a value of the program")


def _operands(node: ast.expr) -> tuple[ast.expr, ...]:
    match node:
        case ast.Constant(value=bool() | int() | float()) | ast.Name():
            return ()
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return (left, right)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return (operand,)
        case ast.BoolOp(values=values):
            return tuple(values)
        case ast.Compare(left=left, ops=[relation], comparators=[right]) if (
            type(relation) in _RELATIONS
        ):
            return (left, right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            name in FUNCTIONS and FUNCTIONS[name][0] <= len(args) <= FUNCTIONS[name][1]
        ):
            return tuple(args)
    raise ValueError(f"{ast.unparse(node):.40} is not arithmetic on numbers")


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a tree that `_parsed` has seen."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise ConfigError(f"a value of the program: needs the size {name!r}", name=name)
            return names[name]
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(bool(_value(part, names)) for part in parts)
        case ast.BoolOp(values=parts):
            return any(bool(_value(part, names)) for part in parts)
        case ast.Compare(left=left, ops=[relation], comparators=[right]):
            return _RELATIONS[type(relation)](_value(left, names), _value(right, names))
    return _computed(node, [_value(part, names) for part in _operands(node)])


def _computed(node: ast.expr, values: list[Any]) -> Any:
    """Return the value of an operation or a function of values."""
    match node:
        case ast.BinOp(op=op):
            return _bounded(_OPERATIONS[type(op)](*values))
        case ast.UnaryOp(op=sign):
            return _SIGNS[type(sign)](*values)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id][2](*values)


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 2 * _MOST_BITS:
        raise OverflowError("a whole number has too many bits")
    return value
