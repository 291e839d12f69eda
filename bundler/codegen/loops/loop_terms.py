# SPDX-License-Identifier: Apache-2.0
"""`Term`: one operator of a loop's body, and `TermPool`, which makes each different term once.

A body is a directed graph of terms, so a term that is used twice is one object, and what is
computed of it is computed once::

    load           details (buffer, index, symbols): `buffer[index]`;
                   arguments are the terms that the symbols stand for
    index_expr     details (expression, symbols): the value of an index expression
    constant       details (value,)
    masked         arguments (mask, body), details (other,): the body where the mask holds,
                   with its loads masked; else the other value
    check_bounds   arguments (index,), details (("size", size),): the index,
                   asserted to be at least 0 and below the size
    scan           arguments: an element of the row for each operand, details (combination, place):
                   one result of combining all elements of the row up to this one
    sort           arguments (key,), details (first,): the keys of the row, which are integers that
                   differ, in their order; so many of the first are asked for
    argument       details (number,): an argument of a combination
    product        arguments: an element of each matrix, loaded or computed of loads, details
                   (precision,): the sum of their products along the reduced variable of the loop,
                   `ieee` or `tf32`; of 8-bit floats `fast` where the sum may be rounded more often
    attention      arguments: the loads of an element of a query, a key and a value, where there is
                   one, where a row's logarithm is stored, then a mask, if there is one; details
                   `AttentionDetails`: the sum of values along the keys of a row, weighted by the
                   softmax of their products with its query
    other names    an operator of `operation_text`; details are its options, (name, value) pairs

Lowerings make terms, `kernel_body` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, Union

import sympy

from bundler.codegen.loops.data_types import data_type
from bundler.errors import UnsupportedOperator

Argument = Union["Term", int, float, bool]
# Buffer, index, and the symbols of the index that stand for values.
Load = tuple[str, sympy.Expr, tuple[sympy.Symbol, ...]]
SCAN, SORT, PRODUCT, ATTENTION = "scan", "sort", "product", "attention"
#: Operators whose value at an element is made of other elements of its row.
ALONG_ROWS = frozenset({SCAN, SORT})
#: Operators that a kernel has one of at most, whose text is a template.
TEMPLATES = frozenset({PRODUCT, ATTENTION})
STRUCTURAL = frozenset(
    {"load", "index_expr", "constant", "masked", "check_bounds", "argument"}
    | TEMPLATES
    | ALONG_ROWS
)


@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """One operator with its arguments; equal terms of one pool are the same object.

    Attributes:
        operator: see the table of this module.
        arguments: terms and plain numbers.
        dtype: of the value.
        details: what the operator needs beside values.
        number: position in its pool, which orders terms as they were made.
    """

    operator: str
    arguments: tuple[Argument, ...]
    dtype: str
    details: tuple[Any, ...]
    number: int

    @property
    def terms(self) -> tuple[Term, ...]:
        """The arguments that are terms."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Term))


class AttentionDetails(NamedTuple):
    """What an attention's term says beside its operands.

    Attributes:
        causal: whether a row sees no key behind its own number.
        scale: of the scores, powers of 2.
        precision: of products of float32, `ieee` or `tf32`.
        splits: how many programs share the keys of a row; their results and the logarithms of
            their rows are parts of one buffer, whatever reads them.
        masked: whether there is a mask.
        logarithms: whether the logarithm of each row's sum is stored.
    """

    causal: bool
    scale: float
    precision: str
    splits: int
    masked: bool
    logarithms: bool


@dataclass(frozen=True)
class Combination:
    """How a scan combines what lies to the left of a place in a row with what lies to the right.

    Attributes:
        results: a term for each operand, over `argument`s: those of the left side, numbered from 0,
            then those of the right side. It is associative.
    """

    results: tuple[Term, ...]

    def __repr__(self) -> str:
        # Terms are told apart by their details' text: a number is as good as the whole tree.
        return f"Combination{[term.number for term in self.results]}"

    def applied(self, pool: TermPool, values: Sequence[Term]) -> list[Term]:
        """Return the results for values in the place of the arguments."""
        made: dict[Term, Term] = {}
        for term in in_order_of(self.results):
            if term.operator == "argument":
                made[term] = values[term.details[0]]
                continue
            arguments = tuple(made[a] if isinstance(a, Term) else a for a in term.arguments)
            made[term] = pool.make(term.operator, arguments, term.dtype, term.details)
        return [made[term] for term in self.results]


class TermPool:
    """Makes terms, each once; one program's loops share a pool."""

    def __init__(self) -> None:
        self._known: dict[Any, Term] = {}
        self._symbols: dict[tuple[int, Any], sympy.Symbol] = {}
        self._terms_of: dict[sympy.Symbol, Term] = {}

    def make(
        self,
        operator: str,
        arguments: tuple[Argument, ...],
        dtype: str,
        details: tuple[Any, ...] = (),
    ) -> Term:
        """Return the term with these parts."""
        # Type and spelling of each number: Python has 1, 1.0 and True as equal, and 0.0 and -0.0,
        # but they are different constants.
        parts = tuple(
            item.number if isinstance(item, Term) else (type(item), repr(item))
            for item in arguments
        )
        named = tuple(
            item if isinstance(item, sympy.Basic) else (type(item), repr(item)) for item in details
        )
        key = (operator, parts, dtype, named)
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = Term(operator, arguments, dtype, details, len(self._known))
        return term

    def operate(self, operator: str, *arguments: Argument, dtype: str, **options: Any) -> Term:
        """Return an operator over values."""
        return self.make(operator, arguments, dtype, tuple(sorted(options.items())))

    def constant(self, value: float | sympy.Expr, dtype: str) -> Term:
        """Return a number as a value of a dtype; it may be made of sizes."""
        if isinstance(value, sympy.Basic):
            return self._of_sizes(value, dtype)
        kind: type[bool | int | float] = float
        if dtype == "bool":
            kind = bool
        elif "int" in dtype:
            kind = int
        return self.make("constant", (), dtype, (kind(value),))

    def _of_sizes(self, value: sympy.Basic, dtype: str) -> Term:
        """Return an expression over sizes, and over numbers that the host computes of them, which
        are loaded.
        """
        if value in {sympy.true, sympy.false} or value.is_number:
            plain = bool(value) if value in {sympy.true, sympy.false} else None
            whole = value.is_Integer
            return self.constant(
                int(value) if whole else float(value) if plain is None else plain, dtype
            )
        if all(symbol.is_integer for symbol in value.free_symbols):
            return self.cast(self.index(value), dtype)
        if isinstance(value, sympy.Symbol):
            return self.cast(self.load(str(value), sympy.Integer(0), "float64"), dtype)
        if not isinstance(value, (sympy.Add, sympy.Mul)):
            raise UnsupportedOperator(
                f"{value} of numbers that the host computes: expected a sum or a product",
                operator=type(value).__name__,
            )
        operator = "add" if isinstance(value, sympy.Add) else "mul"
        parts = [self._of_sizes(part, "float64") for part in value.args]
        whole = reduce(lambda a, b: self.operate(operator, a, b, dtype="float64"), parts)
        return self.cast(whole, dtype)

    def cast(self, term: Term, dtype: str) -> Term:
        """Return a term converted to a dtype, or itself where it has it."""
        return term if term.dtype == dtype else self.operate("to_dtype", term, dtype=dtype)

    def rounded(self, term: Term) -> Term:
        """Return a 16-bit float rounded to the bits that torch has of it.

        Only comparisons, and what makes integers of it, need that. A kernel computes in float32, so
        a maximum that was stored in 16 bits would equal none of the numbers that it is compared
        with when they are computed again for a gradient.
        """
        half = data_type(term.dtype).is_half and term.operator != "constant"
        return self.operate("to_dtype", term, dtype=term.dtype, rounded=True) if half else term

    def index(self, expr: sympy.Expr, dtype: str = "int64") -> Term:
        """Return the value of an index expression."""
        if expr.is_Integer:
            return self.constant(int(expr), dtype)
        symbols = self.bound(expr)
        return self.make(
            "index_expr",
            tuple(term for _, term in symbols),
            dtype,
            (expr, tuple(s for s, _ in symbols)),
        )

    def load(self, buffer: str, index: sympy.Expr, dtype: str) -> Term:
        """Return what stands in a buffer at an index."""
        symbols = self.bound(index)
        details = (buffer, index, tuple(symbol for symbol, _ in symbols))
        return self.make("load", tuple(term for _, term in symbols), dtype, details)

    def masked(self, mask: Term, body: Term, other: float) -> Term:
        """Return a body where a mask holds, else the other value."""
        return self.make("masked", (mask, body), body.dtype, (other,))

    def indirect(
        self, term: Term, size: sympy.Expr, *, wrap: bool = True, check: bool = True
    ) -> sympy.Expr:
        """Return a symbol that stands for a value in index expressions.

        Args:
            term: an integer value.
            size: values are below it; below 0 they count from the end where `wrap` says so.
            wrap: add the size to negative values.
            check: assert the bounds in the kernel.
        """
        # Narrower and unsigned types would overflow, or compare wrongly, when the size is added.
        term = self.cast(term, "int64") if term.dtype not in {"int32", "int64"} else term
        if wrap:
            zero, length = self.constant(0, term.dtype), self.index(size, term.dtype)
            below = self.operate("lt", term, zero, dtype="bool")
            term = self.operate(
                "where",
                below,
                self.operate("add", term, length, dtype=term.dtype),
                term,
                dtype=term.dtype,
            )
        if check:
            term = self.operate("check_bounds", term, dtype=term.dtype, size=size)
        # The same value below the same size is the same symbol, so that equal addresses stay equal.
        key = (term.number, size)
        if key not in self._symbols:
            symbol = sympy.Symbol(f"indirect{len(self._symbols)}", integer=True, nonnegative=True)
            self._symbols[key] = symbol
            self._terms_of[symbol] = term
        return self._symbols[key]

    def bound(self, expr: sympy.Expr) -> list[tuple[sympy.Symbol, Term]]:
        """Return the symbols of an index that stand for terms, with these."""
        used = sorted(sympy.sympify(expr).free_symbols & self._terms_of.keys(), key=str)
        return [(symbol, self._terms_of[symbol]) for symbol in used]


def substituted(pool: TermPool, root: Term, change: Callable[[sympy.Expr], sympy.Expr]) -> Term:
    """Return a body whose index expressions were changed; symbols of indirect indices stay, their
    terms are changed, too.
    """
    done: dict[Term, Term] = {}
    for term in in_order(root):
        arguments = tuple(done[item] if isinstance(item, Term) else item for item in term.arguments)
        details = term.details
        if term.operator == "load":
            details = (details[0], change(details[1]), details[2])
        elif term.operator == "index_expr":
            details = (change(details[0]), details[1])
        done[term] = pool.make(term.operator, arguments, term.dtype, details)
    return done[root]


def in_order(root: Term, known: Container[Term] = ()) -> Iterator[Term]:
    """Yield the terms of a body, each once, behind those that it uses; of those below the root none
    that is known, nor what that alone uses.
    """
    seen: set[Term] = set()
    stack = [(root, iter(root.terms))]
    while stack:
        term, rest = stack[-1]
        following = next((item for item in rest if item not in seen and item not in known), None)
        if following is not None:
            stack.append((following, iter(following.terms)))
            continue
        stack.pop()
        if term not in seen:
            seen.add(term)
            yield term


def in_order_of(roots: Iterable[Term]) -> Iterator[Term]:
    """Yield the terms of several bodies as `in_order` does, each once."""
    seen: set[Term] = set()
    for root in roots:
        for term in in_order(root, seen) if root not in seen else ():
            seen.add(term)
            yield term


def loads_of(root: Term) -> Iterator[Load]:
    """Yield (buffer, index, indirect symbols) of each load of a body."""
    for term in in_order(root):
        if term.operator == "load":
            yield term.details


def expressions_of(root: Term) -> Iterator[sympy.Expr]:
    """Yield the index expressions of a body: of loads, and those whose value is used."""
    for term in in_order(root):
        if term.operator == "load":
            yield term.details[1]
        elif term.operator == "index_expr":
            yield term.details[0]


def symbols_of(term: Term) -> tuple[sympy.Symbol, ...]:
    """Return the symbols of a term's index expression that stand for its arguments, in
    their order.
    """
    if term.operator == "load":
        return tuple(term.details[2])
    return tuple(term.details[1]) if term.operator == "index_expr" else ()
