# SPDX-License-Identifier: Apache-2.0
"""`size_text`, `value_text`: numbers that are made of sizes, as texts that are evaluated when a
program runs.

`launch_expressions` evaluates sizes, `host_values` the rest: floats, comparisons, integers that are
rounded from floats.
"""

from __future__ import annotations

import sympy
from sympy.core.sorting import default_sort_key
from sympy.logic.boolalg import BooleanAtom

from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing, PythonMod
from bundler.errors import UnsupportedOperator
from bundler.runtime.heuristics.launch_expressions import MAX_TEXT

# Functions and operators by the names of torch's symbolic shapes and of sympy.
_FORMS = {
    "TruncToInt": "trunc({})",
    "FloorToInt": "floor({})",
    "CeilToInt": "ceil({})",
    "RoundToInt": "round({})",
    "floor": "floor({})",
    "ceiling": "ceil({})",
    "Abs": "abs({})",
    "ToFloat": "float({})",
    "TruncToFloat": "float(trunc({}))",
    "RoundDecimal": "round({}, {})",
    "Where": "where({}, {}, {})",
    "Pow": "({} ** {})",
    "Not": "(not {})",
    "Identity": "{}",
}
_INFIX = {
    "IntTrueDiv": "/",
    "FloatTrueDiv": "/",
    "FloatPow": "**",
    "PowByNatural": "**",
    "LShift": "<<",
    "RShift": ">>",
    "BitwiseFn_bitwise_and": "&",
    "BitwiseFn_bitwise_or": "|",
    "BitwiseFn_bitwise_xor": "^",
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "And": "and",
    "Or": "or",
}


# A longer text is factored, which takes seconds where there are more symbols than this.
_LONG, _MOST_SYMBOLS = 512, 12


def size_text(size: sympy.Expr) -> int | str:
    """Return a size as a plan holds it.

    Raises:
        UnsupportedOperator: a function that plans do not have, or a longer text.
    """
    size = sympy.sympify(size)
    if size.is_Integer:
        return int(size)
    text = _text(size)
    if len(text) > _LONG and len(size.free_symbols) <= _MOST_SYMBOLS:
        # Expanded, a product of three sizes of six terms each has some two hundred terms.
        text = min(text, _text(sympy.factor(size)), key=len)
    if len(text) > MAX_TEXT:
        raise UnsupportedOperator(
            f"a size {text:.80}...: expected a text of up to {MAX_TEXT} characters, got"
            f" {len(text)}",
            operator="a size that is made of many others",
        )
    return text


def value_text(value: sympy.Basic) -> str:
    """Return any number that is made of sizes, or a condition on them, as a plan holds it; raises
    as `size_text`.
    """
    return _value(sympy.sympify(value))


def _text(expr: sympy.Expr) -> str:
    found = _index(expr, _text)
    if found is None:
        raise _refusal(expr)
    return found


def _index(expr: sympy.Expr, text: object) -> str | None:
    """Return the text of what index expressions are made of, None for anything else."""
    assert callable(text)
    if expr.is_Integer or isinstance(expr, sympy.Symbol):
        return str(expr)
    # Sums and products in an order that no hash decides; quotients as they are written.
    parts = [text(part) for part in sorted(expr.args, key=default_sort_key)]
    ordered = [text(part) for part in expr.args]
    match expr:
        case sympy.Add():
            return f"({' + '.join(parts)})"
        case sympy.Mul():
            return f"({' * '.join(parts)})"
        case sympy.Pow() if expr.args[1].is_Integer and expr.args[1] > 0:
            return f"({' * '.join([ordered[0]] * int(expr.args[1]))})"
        case FloorDiv():
            return f"({ordered[0]} // {ordered[1]})"
        case PythonMod():
            return f"({ordered[0]} % {ordered[1]})"
        case ModularIndexing():
            return f"(({ordered[0]} // {ordered[1]}) % {ordered[2]})"
        case sympy.Max() | sympy.Min():
            return f"{type(expr).__name__.lower()}({', '.join(parts)})"
    return None


def _value(expr: sympy.Basic) -> str:
    number = _number(expr)
    if number is not None:
        return number
    if (found := _index(expr, _value)) is not None:
        return found
    name = type(expr).__name__
    parts = [_value(part) for part in expr.args]
    if name in _INFIX:
        return f"({f' {_INFIX[name]} '.join(parts)})"
    if name.startswith("OpaqueUnaryFn_"):
        return f"{name.removeprefix('OpaqueUnaryFn_')}({parts[0]})"
    if name in _FORMS:
        return _FORMS[name].format(*parts)
    raise _refusal(expr)


def _number(expr: sympy.Basic) -> str | None:
    """Return the text of a number, and of a choice, whose parts are no values; None for anything
    else.
    """
    if isinstance(expr, BooleanAtom):
        return str(bool(expr))
    if isinstance(expr, sympy.Float):
        text = repr(float(expr))
        return f"({text})" if text.startswith("-") else text
    if isinstance(expr, sympy.Rational) and not expr.is_Integer:
        return f"({expr.p} / {expr.q})"
    return _piecewise(expr) if isinstance(expr, sympy.Piecewise) else None


def _piecewise(expr: sympy.Basic) -> str:
    text = ""
    for case in reversed(expr.args):
        value, condition = (_value(part) for part in case.args)
        text = f"where({condition}, {value}, {text})" if text else value
    return text


def _refusal(expr: sympy.Basic) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"a size {expr}: there is no text for {type(expr).__name__}", operator=type(expr).__name__
    )
