# SPDX-License-Identifier: Apache-2.0
"""Values that serve as indices are simplified to what they are for every element of the loop, and
what is not proven stays asserted.
"""

import itertools
import math

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.index_ranges import Ranges
from bundler.codegen.loops.index_values import simplified
from bundler.codegen.loops.loop_terms import Term, TermPool, in_order, symbols_of

VARIABLES = sympy.symbols("i0 i1", integer=True, nonnegative=True)
TYPES = {"float64": np.float64, "float32": np.float32, "int32": int, "int64": int}
OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "where": lambda c, a, b: a if c else b,
    "remainder": lambda a, b: a % b,
    "fmod": lambda a, b: int(math.fmod(a, b)),
    "floordiv": lambda a, b: a // b,
    "truncdiv": lambda a, b: int(a / b),
    "floor": math.floor,
    "neg": lambda a: -a,
    "abs": abs,
}


def value_of(root, point):
    """Return what a body is at an element; a load is its address, so that equal values mean equal
    addresses.
    """
    found = {}
    for term in in_order(root):
        given = [found[a] if isinstance(a, Term) else a for a in term.arguments]
        if term.operator in {"load", "index_expr"}:
            index = term.details[-2].subs(point)
            found[term] = int(index.subs(dict(zip(symbols_of(term), given, strict=True))))
        elif term.operator == "constant":
            found[term] = TYPES.get(term.dtype, bool)(term.details[0])
        elif term.operator == "check_bounds":
            assert 0 <= given[0] < dict(term.details)["size"], "asserted"
            found[term] = given[0]
        elif term.operator == "to_dtype":
            found[term] = TYPES[term.dtype](given[0])
        else:
            made = OPERATORS[term.operator](*given)
            found[term] = TYPES.get(term.dtype, bool)(made)
            if term.dtype == "int32":
                assert -(2**31) <= found[term] < 2**31, "narrowed too far"
    return found[root]


class Drawing:
    """Draws integers that a program may compute of its indices."""

    def __init__(self, data):
        self.data, self.pool = data, TermPool()
        self.sizes = dict(
            zip(VARIABLES, data.draw(st.tuples(*[st.integers(1, 7)] * 2)), strict=True)
        )

    def number(self, least=-6, most=6):
        return self.data.draw(st.integers(least, most))

    def integer(self, depth):
        """Return a term of int64."""
        kind = self.data.draw(st.integers(0, 7 if depth else 1))
        pool, below = self.pool, lambda: self.integer(depth - 1)
        if kind == 0:
            return pool.constant(self.number(), "int64")
        if kind == 1:
            return pool.index(self.data.draw(st.sampled_from([*VARIABLES, VARIABLES[0] * 5 + 2])))
        if kind == 2:
            name = self.data.draw(st.sampled_from(["add", "sub", "minimum", "maximum"]))
            return pool.operate(name, below(), below(), dtype="int64")
        if kind == 3:
            return pool.operate("mul", below(), self.number(), dtype="int64")
        if kind == 4:
            name = self.data.draw(st.sampled_from(["remainder", "fmod", "floordiv", "truncdiv"]))
            divisor = pool.constant(self.number(1, 5), "int64")
            return pool.operate(name, below(), divisor, dtype="int64")
        if kind == 5:
            name = self.data.draw(st.sampled_from(["lt", "le", "gt", "ge"]))
            condition = pool.operate(name, below(), below(), dtype="bool")
            return pool.operate("where", condition, below(), below(), dtype="int64")
        if kind == 6:
            name = self.data.draw(st.sampled_from(["neg", "abs"]))
            made = pool.operate(name, pool.cast(below(), "int32"), dtype="int32")
            return pool.cast(made, "int64")
        return pool.cast(self.float(depth - 1), "int64")

    def float(self, depth):
        """Return a term of float32, as an upsampling computes its places."""
        pool = self.pool
        made = pool.cast(self.integer(depth), "float32")
        factor = self.data.draw(st.sampled_from([0.5, 1 / 3, 0.1, 2.0]))
        made = pool.operate("mul", made, factor, dtype="float32")
        made = pool.operate("sub", made, 0.5, dtype="float32")
        zero = pool.constant(0.0, "float32")
        return pool.operate("maximum", made, zero, dtype="float32")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_simplified_indices_are_the_same_everywhere(data):
    """At each element the address is the one before, or both are out of bounds and say so."""
    drawing = Drawing(data)
    pool, sizes = drawing.pool, drawing.sizes
    size = sympy.Integer(drawing.number(1, 12))
    symbol = pool.indirect(drawing.integer(3), size)
    load = pool.load("x", symbol * 7 + VARIABLES[1], "int64")
    ranges = Ranges({variable: sympy.Integer(number) for variable, number in sizes.items()})
    made = simplified(pool, load, ranges)
    for values in itertools.product(*(range(number) for number in sizes.values())):
        point = dict(zip(VARIABLES, values, strict=True))
        assert outcome(made, point) == outcome(load, point)


def outcome(root, point):
    try:
        return value_of(root, point)
    except AssertionError as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - {"where", "floor"}))
def test_each_operator_of_two_small_ranges(name):
    """Of every pair of ranges around zero, as of an index that is moved and one that is turned."""
    sizes = dict.fromkeys(VARIABLES, sympy.Integer(4))
    points = [dict(zip(VARIABLES, p, strict=True)) for p in itertools.product(range(4), repeat=2)]
    divides = name in {"remainder", "fmod", "floordiv", "truncdiv"}
    for low, other, size in itertools.product((-5, 0, 2), (-2, 0, 2), (3, 8)):
        pool = TermPool()
        one = pool.operate("add", pool.index(VARIABLES[0]), low, dtype="int64")
        two = pool.operate("add", pool.index(VARIABLES[1]), other, dtype="int64")
        if divides:
            made = pool.operate(name, one, pool.constant(abs(other) + 1, "int64"), dtype="int64")
        elif name in {"lt", "le", "gt", "ge"}:
            condition = pool.operate(name, one, two, dtype="bool")
            made = pool.operate("where", condition, pool.index(VARIABLES[0]), two, dtype="int64")
        else:
            arguments = (one,) if name in {"neg", "abs"} else (one, two)
            made = pool.operate(name, *arguments, dtype="int64")
        load = pool.load("x", pool.indirect(made, sympy.Integer(size)), "int64")
        simple = simplified(pool, load, Ranges(sizes))
        for point in points:
            assert outcome(simple, point) == outcome(load, point)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_bounds_of_index_expressions_hold(data):
    """Whatever they are made of."""
    sizes = {variable: data.draw(st.integers(1, 9)) for variable in VARIABLES}

    def drawn(depth):
        kind = data.draw(st.integers(0, 4 if depth else 1))
        number = sympy.Integer(data.draw(st.integers(-5, 5) if kind == 0 else st.integers(1, 6)))
        if kind == 0:
            return number
        if kind == 1:
            return data.draw(st.sampled_from(VARIABLES))
        if kind == 2:
            return drawn(depth - 1) * number - drawn(depth - 1)
        if kind == 3:
            return FloorDiv(drawn(depth - 1), number)
        return ModularIndexing(
            drawn(depth - 1), number, sympy.Integer(data.draw(st.integers(1, 6)))
        )

    expression = sympy.sympify(drawn(3))
    found = Ranges({v: sympy.Integer(n) for v, n in sizes.items()}).interval(expression)
    for values in itertools.product(*(range(number) for number in sizes.values())):
        value = expression.subs(dict(zip(VARIABLES, values, strict=True)))
        assert found[0] <= value <= found[1]


def test_what_a_size_decides_has_no_bounds():
    """A size that changes may be any number."""
    size = sympy.Symbol("s0", integer=True, positive=True)
    ranges = Ranges({VARIABLES[0]: size})
    assert ranges.interval(VARIABLES[0]) is None
    assert ranges.interval(VARIABLES[0] * 0 + 3) == (3, 3)
    pool = TermPool()
    load = pool.load("x", pool.indirect(pool.index(VARIABLES[0]), size), "float32")
    # It is below its own size, whatever that is, and never below 0.
    assert simplified(pool, load, ranges) is pool.load("x", VARIABLES[0], "float32")
    other = pool.load("x", pool.indirect(pool.index(VARIABLES[0] + 1), size), "float32")
    assert any(
        term.operator == "check_bounds" for term in in_order(simplified(pool, other, ranges))
    )


@pytest.mark.parametrize(
    ("offset", "size", "asserted"), [(3, 56, False), (-3, 56, False), (3, 55, True)]
)
def test_a_shifted_window_needs_no_value(offset, size, asserted):
    """`roll` and windows are parts of the address; what may be out of bounds is asserted."""
    pool, ranges = TermPool(), Ranges({VARIABLES[0]: sympy.Integer(56)})
    moved = pool.operate("add", pool.index(VARIABLES[0]), offset % 56, dtype="int64")
    turned = pool.operate("remainder", moved, pool.constant(56, "int64"), dtype="int64")
    load = pool.load("x", pool.indirect(turned, sympy.Integer(size)), "float32")
    made = simplified(pool, load, ranges)
    assert bool(made.arguments) == asserted
    if not asserted:
        assert made.details[1] == ModularIndexing(VARIABLES[0] + offset % 56, 1, 56)


HALF = [("add", 0.0), ("mul", 0.5)]
FLOATS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "floor": np.floor}


@pytest.mark.parametrize(
    ("dtype", "size", "steps", "exact"),
    [
        ("float32", 112, HALF, True),
        ("float32", 1 << 24, HALF, True),
        ("float32", 1 << 25, HALF, False),
        ("float64", 1 << 25, HALF, True),
        ("float32", 112, [("add", 0.5), ("mul", 0.25), ("floor",)], True),
        ("float32", 1 << 24, [("add", 0.5), ("mul", 0.25), ("floor",)], False),
        ("float32", 112, [("mul", 3.0), ("sub", 0.0), ("mul", 0.125)], True),
        ("float32", 112, [("mul", 2 / 3)], False),
        ("float32", 112, [("sub", 0.5)], False),
    ],
)
def test_an_index_that_floats_hold_exactly_is_part_of_the_address(dtype, size, steps, exact):
    """Enlarging an image by a power of two reads `int(i * 0.5)`; what is rounded, or may be
    negative, stays a value.
    """
    pool, ranges = TermPool(), Ranges({VARIABLES[0]: sympy.Integer(size)})
    term, places = pool.cast(pool.index(VARIABLES[0]), dtype), np.arange(0, size, 1 + size // 3001)
    numbers = places.astype(dtype)
    for name, *given_numbers in steps:
        term = pool.operate(name, term, *given_numbers, dtype=dtype)
        numbers = FLOATS[name](numbers, *map(np.dtype(dtype).type, given_numbers))
    index = pool.indirect(pool.cast(term, "int64"), sympy.Integer(size))
    made = simplified(pool, pool.load("x", index, dtype), ranges)
    assert bool(made.arguments) != exact
    if exact:
        found = [int(made.details[1].subs(VARIABLES[0], int(place))) for place in places[::30]]
        assert found == numbers[::30].astype(np.int64).tolist()


def test_what_another_dtype_rounds_is_not_decided():
    """A float constant is rounded up, a number of 64 bits stays one, a comparison with a float is
    left alone, and the chosen side of a `where` has its dtype.
    """
    pool, ranges = TermPool(), Ranges({VARIABLES[0]: sympy.Integer(1 << 25)})
    place = pool.index(VARIABLES[0])

    def read(index, size, **how):
        load = pool.load("x", pool.indirect(index, sympy.Integer(size), **how), "float32")
        return list(in_order(simplified(pool, load, ranges)))

    almost = pool.constant(28 - 1e-9, "float32")  # which is 28 in float32
    small = pool.operate("minimum", pool.cast(place, "float32"), almost, dtype="float32")
    assert any(term.operator == "check_bounds" for term in read(pool.cast(small, "int64"), 28))
    far = pool.operate("minimum", pool.cast(small, "int64"), 1 << 40, dtype="int64")
    assert {t.dtype for t in read(far, 99) if t.operator == "minimum"} == {"float32", "int64"}
    compared = pool.operate("lt", place, pool.constant(float(1 << 25), "float32"), dtype="bool")
    narrow = pool.index(VARIABLES[0], "int32")
    chosen = pool.operate("where", compared, narrow, place, dtype="int64")
    assert any(term.operator == "lt" for term in read(chosen, 1 << 25, wrap=False))
    always = pool.operate("where", pool.constant(True, "bool"), narrow, place, dtype="int64")
    load = pool.load("x", pool.indirect(place, sympy.Integer(1 << 25)), "int64")
    made = simplified(pool, pool.operate("add", always, load, dtype="int64"), ranges)
    assert made.terms[0].dtype == "int64"
