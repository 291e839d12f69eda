# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: the value of a size written as text: whole numbers, names and arithmetic; nothing is
ever executed.

Generated kernels give the sizes of their grids in this form, and `launch_grids` evaluates them.
`parsed` checks one without a value for each name, for `grid_sources`, which makes C++ of it;
`bound` puts numbers in place of names, and `names_in` lists what is left.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
_SIGNS: dict[type[ast.unaryop], Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min, "abs": abs}


def evaluate(expression: str | int, names: Mapping[str, int]) -> int:
    """Return the value of an expression over named sizes: `+ - * // %`, signs, parentheses, `max`,
    `min` and `abs`.

    Args:
        expression: text of at most `MAX_TEXT` characters, or a number.
        names: values of the names.

    Raises:
        ConfigError: anything else stands there, a name has no whole number, or something is divided
            by zero.
    """
    if type(expression) is int:
        return expression
    try:
        return _value(parsed(expression), names)
    except ZeroDivisionError as error:
        raise ConfigError(f"grid: {expression!r:.80} divides by zero") from error


def parsed(
    expression: object,
    operands: Callable[[ast.expr], Sequence[ast.expr]] | None = None,
    what: str = "grid",
) -> ast.expr:
    """Return an expression's tree.

    Args:
        expression: what should be one.
        operands: returns the operands of a node that is known, and raises `ValueError` for another;
            None for those that `evaluate` knows.
        what: the expression is of, for errors.

    Raises:
        ConfigError: it is no text, too long, nested too deeply, or has a node that is not known.
    """
    if not isinstance(expression, str) or len(expression) > MAX_TEXT:
        raise ConfigError(
            f"{what}: expected an expression of up to {MAX_TEXT} characters, got {expression!r:.80}"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        _check(tree, operands or _operands, _DEEPEST)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{what}: not an expression over sizes: {expression!r:.80} ({error})"
        ) from error
    return tree


def names_in(expression: str) -> tuple[str, ...]:
    """Return the names of an expression, each once, in order; raises as `parsed`."""
    return names_of(parsed(expression))


def names_of(tree: ast.expr) -> tuple[str, ...]:
    """Return the names in a tree, each once, in order; those of functions are none."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called
    ]
    return tuple(dict.fromkeys(node.id for node in sorted(found, key=lambda node: node.col_offset)))


def bound(expression: str, values: Mapping[str, Any]) -> str:
    """Return an expression with the whole numbers among `values` in place of their names; raises as
    `parsed`.
    """
    numbers = {name: value for name, value in values.items() if type(value) is int}
    return ast.unparse(_Binder(numbers).visit(parsed(expression)))


class _Binder(ast.NodeTransformer):
    """Puts numbers in place of names."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = numbers

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave the name of a function as it is."""
        node.args = [self.visit(arg) for arg in node.args]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Take the number, if there is one."""
        number = self._numbers.get(node.id)
        if number is None:
            return node
        constant = ast.Constant(abs(number))
        return ast.UnaryOp(ast.USub(), constant) if number < 0 else constant


def _check(node: ast.expr, operands: Callable[[ast.expr], Sequence[ast.expr]], depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deeply")
    for operand in operands(node):
        _check(operand, operands, depth - 1)


def _operands(node: ast.expr) -> Sequence[ast.expr]:
    """Return the operands of arithmetic on whole numbers; raises `ValueError` for anything else."""
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return ()
        case ast.Name():
            return ()
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return (left, right)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return (operand,)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if (
            name in _FUNCTIONS
        ):
            if name == "abs" and len(args) > 1:
                raise ValueError("abs takes one number")
            return args
    raise ValueError(f"{ast.unparse(node):.40} is not arithmetic on whole numbers")


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    """Return the value of a tree that `parsed` has seen."""
    match node:
        case ast.Name(id=name):
            return _named(name, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_value(left, names), _value(right, names))
        case ast.UnaryOp(op=sign, operand=operand):
            return _SIGNS[type(sign)](_value(operand, names))
        case ast.Call(func=ast.Name(id=name), args=args):
            values = [_value(arg, names) for arg in args]
            return _FUNCTIONS[name](*values) if len(values) > 1 or name == "abs" else values[0]
    assert isinstance(node, ast.Constant)
    number: Any = node.value
    return int(number)


def _named(name: str, names: Mapping[str, int]) -> int:
    value = names.get(name)
    if type(value) is not int:
        raise ConfigError(
            f"grid: needs the size {name!r} as a whole number, got {value!r:.40}", name=name
        )
    return value
