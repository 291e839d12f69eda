# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: the value of a size written as text: whole numbers, names and arithmetic; nothing is ever executed.

Generated kernels give the sizes of their grids in this form, and `launch_grids` evaluates them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from bundler.errors import ConfigError

MAX_TEXT = 4096
_DEEPEST = 100  # nested operations
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[int], int]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min, "abs": abs}


def evaluate(expression: str | int, names: Mapping[str, int]) -> int:
    """Return the value of an expression over named sizes: `+ - * // %`, signs, parentheses, `max`, `min` and `abs`.

    Args:
        expression: text of at most `MAX_TEXT` characters, or a number.
        names: values of the names.

    Raises:
        ConfigError: anything else stands there, a name has no whole number, or something is divided by zero.
    """
    if type(expression) is int:
        return expression
    if not isinstance(expression, str) or len(expression) > MAX_TEXT:
        raise ConfigError(f"grid: expected an expression of up to {MAX_TEXT} characters, got {expression!r:.80}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names, _DEEPEST)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"grid: not an expression over sizes: {expression!r:.80} ({error})") from error
    except ZeroDivisionError as error:
        raise ConfigError(f"grid: {expression!r:.80} divides by zero") from error


def _value(node: ast.expr, names: Mapping[str, int], depth: int) -> int:
    if depth == 0:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case ast.Name(id=name):
            return _named(name, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, names, depth - 1), _value(right, names, depth - 1))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand, names, depth - 1))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg, names, depth - 1) for arg in args]
            if name == "abs" and len(values) > 1:
                raise ValueError("abs takes one number")
            return _FUNCTIONS[name](*values) if len(values) > 1 or name == "abs" else values[0]
        case _:
            raise ValueError(f"{ast.unparse(node):.40} is not arithmetic on whole numbers")


def _named(name: str, names: Mapping[str, int]) -> int:
    value = names.get(name)
    if type(value) is not int:
        raise ConfigError(f"grid: needs the size {name!r} as a whole number, got {value!r:.40}", name=name)
    return value
