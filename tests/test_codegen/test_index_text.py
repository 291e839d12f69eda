# SPDX-License-Identifier: Apache-2.0
"""The text of an index expression, computed as a kernel computes it, is what sympy computes,
whatever the signs; simplifications keep the value.
"""

import math
import operator
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sympy = pytest.importorskip("sympy")

from bundler.codegen.kernels.index_text import index_text  # noqa: E402
from bundler.codegen.loops.index_functions import (  # noqa: E402
    FUNCTIONS,
    FloorDiv,
    ModularIndexing,
    PythonMod,
    owned,
)
from bundler.codegen.loops.index_ranges import Ranges  # noqa: E402
from bundler.errors import UnsupportedOperator  # noqa: E402

NAMES = ("x0", "x1", "r0", "ks0", "ks1")
SYMBOLS = {name: sympy.Symbol(name, integer=True) for name in NAMES}
NATURAL = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in NAMES}


class Lane(int):
    """An integer of a kernel: `//` and `%` of a negative number are an error here, since Triton
    rounds them towards zero.
    """

    def __floordiv__(self, other):
        assert self >= 0, f"{int(self)} // {other}"
        assert other > 0, f"{self} // {other}"
        return Lane(int(self) // int(other))

    def __mod__(self, other):
        assert self >= 0, f"{int(self)} % {other}"
        assert other > 0, f"{self} % {other}"
        return Lane(int(self) % int(other))

    def __truediv__(self, other):
        raise AssertionError("integers are divided in float32")

    def __neg__(self):
        return Lane(-int(self))

    __add__ = __radd__ = lambda self, other: Lane(int(self) + int(other))
    __mul__ = __rmul__ = lambda self, other: Lane(int(self) * int(other))

    def __sub__(self, other):
        return Lane(int(self) - int(other))

    def __rsub__(self, other):
        return Lane(int(other) - int(self))


LIBRARY = types.SimpleNamespace(
    index_floor_divide=lambda a, b: Lane(int(a) // int(b)),
    index_remainder=lambda a, b: Lane(int(a) % int(b)),
    index_power=lambda a, b: Lane(int(a) ** int(b)),
    index_wrapped=lambda a, b: Lane(int(a) - (int(a) >= int(b)) * int(b)),
)
NAMESPACE = {
    "lib": LIBRARY,
    "tl": types.SimpleNamespace(
        where=lambda condition, one, other: one if condition else other,
        cast=lambda number, kind: kind(number),
        float64=float,
        int32=lambda number: Lane(int(number)),
        int64=lambda number: Lane(int(number)),
    ),
    "tl_math": types.SimpleNamespace(
        abs=lambda number: Lane(abs(number)), floor=math.floor, ceil=math.ceil
    ),
    "libdevice": types.SimpleNamespace(
        nearbyint=round,
        sqrt=math.sqrt,
        pow=math.pow,
        trunc=lambda number: float(math.trunc(number)),
        log=math.log,
    ),
}


def computed(text, values):
    return eval(text, {**NAMESPACE, **{name: Lane(value) for name, value in values.items()}})


def known_nonnegative(expr):
    return expr.is_nonnegative is True


def value_of(expr, values):
    """Return what an expression is worth in Python's integers, by walking it: nothing of sympy or
    of ours simplifies.
    """
    if isinstance(expr, sympy.Symbol):
        return values[expr.name]
    if isinstance(expr, sympy.Integer):
        return int(expr)
    parts = [value_of(part, values) for part in expr.args]
    name = type(expr).__name__
    compute = {
        "Add": sum,
        "Mul": math.prod,
        "Pow": lambda p: p[0] ** p[1],
        "FloorDiv": lambda p: p[0] // p[1],
        "PythonMod": lambda p: p[0] % p[1],
        "ModularIndexing": lambda p: p[0] // p[1] % p[2],
        "Max": max,
        "Min": min,
    }[name]
    return compute(parts)


# A tree of (function, parts) is built twice: as an expression, which may simplify, and as an
# integer, which does not.
LEAVES = st.sampled_from(NAMES) | st.integers(-40, 40)
DIVISORS = st.integers(1, 20)


def branches(children):
    return (
        st.tuples(st.just("+"), children, children)
        | st.tuples(st.just("*"), children, children)
        | st.tuples(st.just("-"), children, children)
        | st.tuples(st.just("FloorDiv"), children, DIVISORS)
        | st.tuples(st.just("PythonMod"), children, DIVISORS)
        | st.tuples(st.just("ModularIndexing"), children, DIVISORS, DIVISORS)
        | st.tuples(st.just("FloorDiv"), children, st.sampled_from(("ks0", "ks1")))
        | st.tuples(st.just("Max"), children, children, children)
        | st.tuples(st.just("Min"), children, children)
    )


TREES = st.recursive(LEAVES, branches, max_leaves=8)
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def built(tree, symbols):
    if isinstance(tree, str):
        return symbols[tree]
    if isinstance(tree, int):
        return sympy.Integer(tree)
    parts = [built(part, symbols) for part in tree[1:]]
    return SIGNS[tree[0]](*parts) if tree[0] in SIGNS else FUNCTIONS[tree[0]](*parts)


def worth(tree, values):
    if not isinstance(tree, tuple):
        return values.get(tree, tree) if isinstance(tree, str) else tree
    parts = [worth(part, values) for part in tree[1:]]
    if tree[0] in SIGNS:
        return SIGNS[tree[0]](*parts)
    return {
        "FloorDiv": lambda a, b: a // b,
        "PythonMod": lambda a, b: a % b,
        "ModularIndexing": lambda a, b, c: a // b % c,
        "Max": max,
        "Min": min,
    }[tree[0]](*parts)


@settings(max_examples=120, deadline=None)
@given(TREES, st.data())
def test_text_is_worth_what_the_tree_is_worth_whatever_the_signs(tree, data):
    """Building an expression, simplifying it and writing it keeps its value, for loop variables and
    sizes of any sign.
    """
    values = {name: data.draw(st.integers(-50, 50), label=name) for name in NAMES[:3]}
    values |= {name: data.draw(st.integers(1, 30), label=name) for name in NAMES[3:]}
    expr = built(tree, SYMBOLS)
    assert computed(index_text(expr, nonnegative=known_nonnegative), values) == worth(tree, values)
    assert value_of(expr, values) == worth(tree, values)


@settings(max_examples=80, deadline=None)
@given(TREES, st.data())
def test_plain_quotients_are_written_only_where_nothing_is_negative(tree, data):
    """Where symbols are known not to be negative, quotients are plain where both sides are, and the
    value is the same.
    """
    values = {name: data.draw(st.integers(0, 50), label=name) for name in NAMES[:3]}
    values |= {name: data.draw(st.integers(1, 30), label=name) for name in NAMES[3:]}
    text = index_text(built(tree, NATURAL), nonnegative=known_nonnegative)
    assert computed(text, values) == worth(tree, values)


@settings(max_examples=60, deadline=None)
@given(st.integers(-(2**40), 2**40), st.integers(1, 2**35), st.integers(1, 2**33))
def test_sizes_beyond_32_bits_are_written_whole(base, divisor, modulus):
    """Numbers of 64 bits stand in the text as they are."""
    x = SYMBOLS["x0"]
    expr = (
        ModularIndexing(x * 3 + 1, sympy.Integer(divisor), sympy.Integer(modulus))
        + FloorDiv(x, sympy.Integer(divisor)) * modulus
    )
    expected = (base * 3 + 1) // divisor % modulus + base // divisor * modulus
    assert computed(index_text(expr, nonnegative=known_nonnegative), {"x0": base}) == expected


@settings(max_examples=100, deadline=None)
@given(*(st.integers(1, 60) for _ in range(3)), st.integers(0, 60), st.data())
def test_what_goes_round_once_is_written_without_a_division(size, divisor, modulus, moved, data):
    """The remainder of what is less than twice the modulus, and no other, is a choice."""
    x = NATURAL["x0"]
    value = data.draw(st.integers(0, size - 1))
    ranges = Ranges({x: sympy.Integer(size)})
    expr = ModularIndexing(x + moved, sympy.Integer(divisor), sympy.Integer(modulus))
    text = index_text(expr, nonnegative=ranges.nonnegative, below=ranges.below)
    assert computed(text, {"x0": value}) == (value + moved) // divisor % modulus
    if isinstance(expr, ModularIndexing):
        # What moves by whole rounds was simplified.
        base, by, around = expr.args
        once = base.subs(x, size - 1) // by < 2 * around
        assert ("index_wrapped" in text, "%" in text) == (once, not once)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        ("x0 + 128*x1", "x0 + 128 * x1"),
        ("x0 - 3*x1 - 7", "x0 - 3 * x1 - 7"),
        ("-x0", "-x0"),
        ("FloorDiv(x0, 7)", "x0 // 7"),
        ("FloorDiv(x0 + x1, ks0)", "(x0 + x1) // ks0"),
        ("FloorDiv(x0 - 1, 7)", "lib.index_floor_divide(x0 - 1, 7)"),
        ("PythonMod(x0, 7)", "x0 % 7"),
        ("ModularIndexing(x0, 1, 7)", "x0 % 7"),
        ("ModularIndexing(x0, 4, 7)", "(x0 // 4) % 7"),
        (
            "ModularIndexing(x0 - 1, 4, 7)",
            "lib.index_remainder(lib.index_floor_divide(x0 - 1, 4), 7)",
        ),
        ("3*x1*ks0 + x0", "x0 + 3 * ks0 * x1"),
        ("Max(x0, ks0)", "ks0 * (ks0 >= x0) + x0 * (x0 > ks0)"),
        ("Where(x0 < ks0, x0, x1)", "tl.where(x0 < ks0, x0, x1)"),
        ("Identity(x0 + 1) * 2", "2 * (x0 + 1)"),
        ("IntTrueDiv(x0, 4)", "tl.cast(x0, tl.float64) / 4.0"),
        ("TruncToInt(IntTrueDiv(x0, 4))", "tl.cast(tl.cast(x0, tl.float64) / 4.0, tl.int32)"),
        (
            "FloorToInt(OpaqueUnaryFn_sqrt(x0))",
            "tl.cast(tl_math.floor(libdevice.sqrt(tl.cast(x0, tl.float64))), tl.int32)",
        ),
        (
            "RoundDecimal(ToFloat(x0), 2)",
            "libdevice.nearbyint(tl.cast(x0, tl.float64) * 100.0) / 100.0",
        ),
        ("PowByNatural(x0, 2)", "x0 * x0"),
        ("PowByNatural(2, x0)", "lib.index_power(2, x0)"),
        ("LShift(x0, 2)", "x0 << 2"),
        ("floor(x0 / 4)", "x0 // 4"),
        ("ceiling(x0 / 4)", "-lib.index_floor_divide(-x0, 4)"),
        ("CeilDiv(x0, 4)", "-lib.index_floor_divide(-x0, 4)"),
        ("Abs(x0 - x1)", "tl_math.abs(x0 - x1)"),
        ("(x0 < 3) & (x1 >= ks0)", "(x1 >= ks0) & (x0 < 3)"),
    ],
)
def test_texts_a_reader_can_follow(expr, text):
    """Each kind of expression has one text, in an order that hashes do not change."""
    parsed = sympy.sympify(expr, locals={**FUNCTIONS, **NATURAL})
    assert index_text(parsed, nonnegative=known_nonnegative) == text


def test_values_that_leave_the_integers_are_exact_to_float64():
    """Divisions, roundings and roots are computed in float64."""
    names = {**FUNCTIONS, **NATURAL}
    for text, expected in [
        ("TruncToInt(IntTrueDiv(x0, ks0))", 2**40 // 3),
        ("RoundToInt(IntTrueDiv(x0, 2))", 2**39),
        ("CeilToInt(IntTrueDiv(x0, 3))", -(-(2**40) // 3)),
        ("FloorToInt(OpaqueUnaryFn_sqrt(x0))", 2**20),
        ("TruncToInt(FloatPow(x0, 0.5))", 2**20),
        ("TruncToInt(TruncToFloat(IntTrueDiv(x0, 3)))", 2**40 // 3),
    ]:
        written = index_text(
            sympy.sympify(text, locals=names), nonnegative=known_nonnegative, index_type="tl.int64"
        )
        assert computed(written, {"x0": 2**40, "ks0": 3}) == expected


def test_what_has_no_text_is_refused():
    """A function without a text, and an integer rounded to tens, are refused by name."""
    x = NATURAL["x0"]
    with pytest.raises(UnsupportedOperator, match="there is no text for gamma"):
        index_text(sympy.gamma(x), nonnegative=known_nonnegative)
    with pytest.raises(UnsupportedOperator, match="rounded to -1 digits"):
        index_text(FUNCTIONS["RoundDecimal"](x, sympy.Integer(-1)), nonnegative=known_nonnegative)


def test_simplifications_that_kernels_live_from():
    """What the order of loops leaves of flat indices disappears."""
    x, y, size = NATURAL["x0"], NATURAL["x1"], NATURAL["ks0"]
    assert FloorDiv(x + 128 * y, sympy.Integer(128)) == y + FloorDiv(x, sympy.Integer(128))
    assert ModularIndexing(x + 128 * y, sympy.Integer(1), sympy.Integer(128)) == ModularIndexing(
        x, sympy.Integer(1), sympy.Integer(128)
    )
    assert FloorDiv(FloorDiv(x, sympy.Integer(4)), sympy.Integer(8)) == FloorDiv(
        x, sympy.Integer(32)
    )
    assert FloorDiv(4 * x, sympy.Integer(8)) == FloorDiv(x, sympy.Integer(2))
    assert PythonMod(8 * x + y, sympy.Integer(4)) == PythonMod(y, sympy.Integer(4))
    assert FloorDiv(x, size).is_nonnegative is None
    assert FloorDiv(x, size + 1).is_nonnegative is True


def test_expressions_of_torch_are_taken_over():
    """torch's own functions become ours of the same name, at any depth, and mean the same."""
    pytest.importorskip("torch")
    from torch.utils._sympy import functions as theirs

    x, size = SYMBOLS["x0"], SYMBOLS["ks0"]
    expr = (
        theirs.FloorDiv(theirs.ModularIndexing(x, 3, size) + theirs.PythonMod(x, size), 2)
        + theirs.CeilDiv(x, 4)
        + theirs.Max(x, size)
    )
    taken = owned(expr)
    assert {
        type(part).__module__
        for part in sympy.preorder_traversal(taken)
        if "torch" in type(part).__module__
    } == set()
    for value in range(-12, 13):
        expected = (value // 3 % 5 + value % 5) // 2 + -(-value // 4) + max(value, 5)
        assert taken.subs({x: value, size: 5}) == expected
        assert (
            computed(index_text(taken, nonnegative=known_nonnegative), {"x0": value, "ks0": 5})
            == expected
        )


def test_a_product_of_sums_is_divided_by_one_of_them():
    """A quotient is exact where the divisor, a sum, divides the whole expression and none of its
    terms.
    """
    from bundler.codegen.loops.index_functions import FloorDiv
    from bundler.codegen.loops.index_ranges import exact_quotient

    n, m = sympy.symbols("n m", integer=True, positive=True)
    half, third = FloorDiv(n - 1, sympy.Integer(2)) + 1, FloorDiv(m, sympy.Integer(3)) + 2
    product = sympy.expand(half * third * n)
    assert sympy.expand(exact_quotient(product, half) - third * n) == 0
    assert exact_quotient(product + 1, half) is None
    assert exact_quotient(sympy.expand(half * n) / 2, half) is None
