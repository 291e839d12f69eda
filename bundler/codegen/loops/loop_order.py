# SPDX-License-Identifier: Apache-2.0
"""`normalized`: a loop with as few dimensions as its addresses allow, in the order in which memory
lies.

Dimensions of one element go, the others are ordered by the stride of what is written (of what is
read, for reduced ones), and neighbours that every address runs through as one become one.
`schedule` normalizes each loop before `fusion` looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.loop_nodes import Loop
from bundler.codegen.loops.loop_terms import TermPool, expressions_of, substituted

# Their result is a position in the row, so the dimensions of a row keep their order.
_POSITIONAL = frozenset({"argmax", "argmin"})
Variables = tuple[sympy.Symbol, ...]
Sizes = tuple[sympy.Expr, ...]


def normalized(pool: TermPool, loop: Loop) -> Loop:
    """Return an equal loop in its simplest form."""
    # In this order: a dimension of one element would stand between two that could be merged, and
    # only neighbours in memory's order are merged.
    loop = _without_single(pool, loop)
    loop = _ordered(loop)
    merged, change = merged_dimensions(loop.variables, loop.sizes, _expressions(loop))
    kept, reduced = merged, list(zip(loop.reduced, loop.reduced_sizes, strict=True))
    if reduced:
        reduced, more = merged_dimensions(loop.reduced, loop.reduced_sizes, _expressions(loop))
        change |= more
    loop = _changed(pool, loop, change)
    return replace(
        loop,
        variables=tuple(v for v, _ in kept),
        sizes=tuple(s for _, s in kept),
        reduced=tuple(v for v, _ in reduced),
        reduced_sizes=tuple(s for _, s in reduced),
    )


def merged_dimensions(
    variables: Variables, sizes: Sizes, expressions: Sequence[sympy.Expr]
) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], dict[sympy.Symbol, sympy.Expr]]:
    """Return dimensions of which no two neighbours could be one, and what each variable that went
    is now.

    Two are one where every expression has them as `outer * size of inner + inner` alone.
    """
    dimensions = list(zip(variables, sizes, strict=True))
    gone: dict[sympy.Symbol, sympy.Expr] = {}
    number = len(dimensions) - 2
    # From the innermost outwards, so that a merged dimension can be merged again.
    while number >= 0:
        (outer, outer_size), (inner, inner_size) = dimensions[number : number + 2]
        if all(_is_one(expr, outer, inner, inner_size) for expr in expressions):
            dimensions[number : number + 2] = [(inner, sympy.expand(outer_size * inner_size))]
            gone[outer] = sympy.Integer(0)
        number -= 1
    return dimensions, gone


def _is_one(
    expr: sympy.Expr, outer: sympy.Symbol, inner: sympy.Symbol, inner_size: sympy.Expr
) -> bool:
    if not expr.has(outer):
        return not expr.has(inner)
    # Running the inner variable on past its size must give what the outer one gives.
    together = expr.xreplace({outer: sympy.Integer(0), inner: inner + inner_size * outer})
    return bool(sympy.expand(together - expr) == 0)


def _expressions(loop: Loop) -> list[sympy.Expr]:
    return [loop.index, *(expr for root in loop.roots for expr in expressions_of(root))]


def _changed(pool: TermPool, loop: Loop, change: Mapping[sympy.Symbol, sympy.Expr]) -> Loop:
    if not change:
        return loop

    def changed(expr: sympy.Expr) -> sympy.Expr:
        return sympy.expand(expr.xreplace(dict(change)))

    return replace(
        loop,
        value=substituted(pool, loop.value, changed),
        index=changed(loop.index),
        index_terms=tuple(
            (symbol, substituted(pool, term, changed)) for symbol, term in loop.index_terms
        ),
    )


def _without_single(pool: TermPool, loop: Loop) -> Loop:
    kept = [(v, s) for v, s in zip(loop.variables, loop.sizes, strict=True) if s != 1]
    reduced = [(v, s) for v, s in zip(loop.reduced, loop.reduced_sizes, strict=True) if s != 1]
    single = {
        variable: sympy.Integer(0)
        for variables, sizes in ((loop.variables, loop.sizes), (loop.reduced, loop.reduced_sizes))
        for variable, size in zip(variables, sizes, strict=True)
        if size == 1
    }
    loop = replace(
        loop,
        variables=tuple(v for v, _ in kept),
        sizes=tuple(s for _, s in kept),
        reduced=tuple(v for v, _ in reduced),
        reduced_sizes=tuple(s for _, s in reduced),
    )
    return _changed(pool, loop, single)


def _ordered(loop: Loop) -> Loop:
    """Return a loop whose last dimensions are those that memory runs along."""
    # Stores decide the order of kept dimensions: neighbouring lanes should write neighbouring
    # elements. Rows are only read.
    kept = _by_stride(loop.variables, loop.sizes, [loop.index])
    reduced = list(zip(loop.reduced, loop.reduced_sizes, strict=True))
    if loop.kind not in _POSITIONAL:
        reads = [expr for root in loop.roots for expr in expressions_of(root)]
        reduced = _by_stride(loop.reduced, loop.reduced_sizes, reads)
    return replace(
        loop,
        variables=tuple(v for v, _ in kept),
        sizes=tuple(s for _, s in kept),
        reduced=tuple(v for v, _ in reduced),
        reduced_sizes=tuple(s for _, s in reduced),
    )


def _by_stride(
    variables: Variables, sizes: Sizes, expressions: Sequence[sympy.Expr]
) -> list[tuple[sympy.Symbol, sympy.Expr]]:
    dimensions = list(zip(variables, sizes, strict=True))
    for expr in expressions:
        strides = [
            expr.coeff(variable) if expr.has(variable) else sympy.Integer(0)
            for variable in variables
        ]
        # An expression that does not run through all of them says nothing of their order.
        if all(stride.is_Integer and stride > 0 for stride in strides):
            order = sorted((-stride, number) for number, stride in enumerate(strides))
            return [dimensions[number] for _, number in order]
    return dimensions
