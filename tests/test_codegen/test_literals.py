# SPDX-License-Identifier: Apache-2.0
"""Texts of numbers, conversions and operands; `test_lib` tries in Triton's interpreter what the
numbers are worth.
"""

import pytest

from bundler.codegen.kernels.literals import constant_text, literal_text
from bundler.codegen.loops.data_types import (
    DATA_TYPES,
    cast_text,
    compute_type,
    data_type,
    elements_per_thread,
    loaded_text,
    store_type,
    stored_text,
)
from bundler.codegen.loops.text_forms import is_atom, operand
from bundler.errors import UnsupportedOperator


@pytest.mark.parametrize(
    ("number", "dtype", "constant", "literal"),
    [
        (1.5, "float32", "tl.full([], 1.5, tl.float32)", "1.5"),
        (0.1, "float32", "tl.full([], 0.10000000149011612, tl.float32)", "0.1"),
        (0.1, "float64", "tl.full([], 0.1, tl.float64)", "tl.full([], 0.1, tl.float64)"),
        (0.5, "float64", "tl.full([], 0.5, tl.float64)", "0.5"),
        (2, "float16", "tl.full([], 2.0, tl.float32)", "2.0"),
        (
            float("inf"),
            "bfloat16",
            "tl.full([], float('inf'), tl.float32)",
            "tl.full([], float('inf'), tl.float32)",
        ),
        (7, "int32", "tl.full([], 7, tl.int32)", "7"),
        (-7, "int64", "tl.full([], -7, tl.int64)", "tl.full([], -7, tl.int64)"),
        (300, "uint8", "tl.full([], 44, tl.uint8)", "44"),
        (2, "bool", "tl.full([], True, tl.int1)", "tl.full([], True, tl.int1)"),
    ],
)
def test_texts_of_numbers(number, dtype, constant, literal):
    """A constant has its type; beside a tensor a number is bare where Triton reads it as meant."""
    assert (constant_text(number, dtype), literal_text(number, dtype)) == (constant, literal)


def test_constants_have_the_shape_asked_for():
    """A kernel asks for a constant of as many axes as its blocks have."""
    assert constant_text(1.0, "float32", "[1, 1]") == "tl.full([1, 1], 1.0, tl.float32)"


@pytest.mark.parametrize("name", DATA_TYPES)
def test_every_dtype_is_torchs(name):
    """Each dtype has torch's width; what is loaded and stored again has the type that it had."""
    torch = pytest.importorskip("torch")
    assert data_type(name).bits == getattr(torch, name).itemsize * 8
    computed = loaded_text("x", name)
    assert stored_text("x", name) == (
        "x" if store_type(name) == compute_type(name) else f"x.to({store_type(name)})"
    )
    assert computed == (
        "(x != 0)"
        if name == "bool"
        else "x"
        if store_type(name) == compute_type(name)
        else f"x.to({compute_type(name)})"
    )


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("float32", "float32", "x"),
        ("float16", "float32", "x"),
        ("float32", "float16", "x"),
        ("float64", "float16", "x.to(tl.float32)"),
        ("int64", "bool", "(x != 0)"),
        ("bool", "float16", "x.to(tl.float32)"),
        ("float32", "uint8", "x.to(tl.int32).to(tl.uint8)"),
        ("float32", "int64", "x.to(tl.int64)"),
        ("int32", "uint8", "x.to(tl.uint8)"),
        ("int32", "float8_e5m2", "x.to(tl.float32).to(tl.float8e5)"),
        ("float8_e4m3fn", "float8_e5m2", "x.to(tl.float32).to(tl.float8e5)"),
        ("float8_e4m3fn", "int8", "x.to(tl.float32).to(tl.int32).to(tl.int8)"),
        ("float8_e4m3fn", "bool", "(x.to(tl.float32) != 0)"),
        ("float8_e5m2", "float16", "x.to(tl.float32)"),
        ("float64", "float8_e5m2", "x.to(tl.float32).to(tl.float8e5)"),
    ],
)
def test_texts_of_conversions(source, target, text):
    """A conversion goes through the types that make it mean what torch means."""
    assert cast_text("x", source, target) == text


def test_conversions_of_8_bit_floats_need_neighbours():
    """A thread holds as many elements as the instruction converts at once."""
    pairs = [
        ("float32", "float32"),
        ("float32", "float8_e4m3fn"),
        ("float8_e5m2", "float16"),
        ("float8_e5m2", "float8_e5m2"),
    ]
    assert [elements_per_thread(*pair) for pair in pairs] == [1, 2, 4, 1]


def test_a_dtype_that_is_not_known_is_named():
    """complex64 has no text."""
    with pytest.raises(UnsupportedOperator, match="dtype complex64") as caught:
        compute_type("complex64")
    assert caught.value.dtypes == ("complex64",)


@pytest.mark.parametrize(
    ("text", "atom"),
    [
        ("tmp0", True),
        ("12", True),
        ("1.5", True),
        ("1e-05", True),
        ("tl.load(a + (b), None)", True),
        ("(a + b)", True),
        ("(a + b).to(tl.int1)", True),
        ("x.to(tl.float32).to(tl.int8)", True),
        ("x[:, None]", True),
        ("(a) + (b)", False),
        ("a + b", False),
        ("-a", False),
        ("-1.5", False),
        ("f(a) * g(b)", False),
        ("not a", False),
    ],
)
def test_what_needs_parentheses_gets_them(text, atom):
    """A name, a number and a chain of calls bind tighter than any operator."""
    assert is_atom(text) is atom
    assert operand(text) == (text if atom else f"({text})")


def test_a_bracket_that_is_not_closed_is_a_mistake():
    """Half an expression is no operand."""
    with pytest.raises(ValueError, match="not closed"):
        operand("f(a")
