# SPDX-License-Identifier: Apache-2.0
"""`size_text`: a size as a number, or as text that `launch_expressions` evaluates when a program runs."""

from __future__ import annotations

import sympy
from sympy.core.sorting import default_sort_key

from bundler.codegen.index_functions import FloorDiv, ModularIndexing, PythonMod
from bundler.errors import UnsupportedOperator


def size_text(size: sympy.Expr) -> int | str:
    """Return a size as a plan holds it.

    Raises:
        UnsupportedOperator: a function that plans do not have.
    """
    size = sympy.sympify(size)
    return int(size) if size.is_Integer else _text(size)


def _text(expr: sympy.Expr) -> str:
    if expr.is_Integer or isinstance(expr, sympy.Symbol):
        return str(expr)
    parts = [_text(part) for part in sorted(expr.args, key=default_sort_key)]
    ordered = [_text(part) for part in expr.args]
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
    raise UnsupportedOperator(
        f"a size {expr}: there is no text for {type(expr).__name__}", operator=type(expr).__name__
    )
