# SPDX-License-Identifier: Apache-2.0
"""Each operator, for each dtype, computes what torch computes, or is refused where the list below
says so.
"""

import json

import pytest

from bundler.codegen.kernels.operation_text import OPERATORS, Value, render
from bundler.codegen.loops.data_types import DATA_TYPES
from bundler.errors import UnsupportedOperator

pytest.importorskip("triton")
pytest.importorskip("torch")

HALVES = {"float16", "bfloat16"}
FLOATS = {"float32", "float64", *HALVES}
EIGHTS = {"float8_e4m3fn", "float8_e5m2"}
INTEGERS = {name for name in DATA_TYPES if "int" in name}
NOT_INTERPRETED = {"float8_e4m3fnuz", "float8_e5m2fnuz"}
# What torch refuses too, and the next floats of 16 bits, which are not those of the float32 they
# are computed in. 8-bit floats have no arithmetic.
INTEGERS_ONLY = {"bitwise_left_shift", "lshift", "bitwise_right_shift", "rshift", "truncdiv"}
INTEGERS_AND_BOOLS = {
    "bitwise_and",
    "and_",
    "bitwise_or",
    "or_",
    "bitwise_xor",
    "xor",
    "bitwise_not",
}
NO_BOOLS = {
    "sub",
    "neg",
    "floordiv",
    "remainder",
    "mod",
    "fmod",
    "fma",
    "square",
    "relu",
    "floor",
    "ceil",
    "trunc",
    "round",
    "pow",
}
ANY_DTYPE = {
    "identity",
    "where",
    "masked",
    "device_assert_then",
    "to_dtype",
    "to_dtype_bitcast",
    "trunc_to_int",
    "floor_to_int",
    "ceil_to_int",
    "round_to_int",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "ldexp",
}


def refused(name):
    """Return the dtypes that an operator should refuse."""
    if name in ANY_DTYPE:
        return set()
    if name in INTEGERS_ONLY:
        return FLOATS | EIGHTS | {"bool"}
    if name in INTEGERS_AND_BOOLS:
        return FLOATS | EIGHTS
    if name.startswith("frexp_"):
        return INTEGERS | EIGHTS | {"bool"}
    return (
        EIGHTS
        | ({"bool"} if name in NO_BOOLS else set())
        | (HALVES if name == "nextafter" else set())
    )


def test_every_operator_computes_what_torch_computes_for_every_dtype(interpreted, tmp_path):
    """Every cell of the table has a case, which agrees with torch, zeros' signs, infinities and NaN
    included, or is refused as it should be.
    """
    interpreted("operator_worker.py", tmp_path / "verdicts.json")
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    elsewhere = {"constant", "inline_asm_elementwise", "rand", "randn", "randint64"}
    cells = {
        f"{name}/{dtype}" for name in OPERATORS if name not in elsewhere for dtype in DATA_TYPES
    }
    assert cells - set(verdicts) == {
        f"{n}/{d}" for n in OPERATORS if n not in elsewhere for d in NOT_INTERPRETED
    }
    assert {
        cell: verdict for cell, verdict in verdicts.items() if verdict not in {"", "refused"}
    } == {}
    wanted = {
        f"{name}/{dtype}" for name in OPERATORS if name not in elsewhere for dtype in refused(name)
    }
    assert {cell for cell, verdict in verdicts.items() if verdict == "refused"} == wanted


def test_what_has_no_text_is_named():
    """An operator that is unknown, or not for a dtype, is refused with its name and dtypes; a wrong
    number of arguments is the caller's mistake.
    """
    with pytest.raises(UnsupportedOperator, match="operator digamma") as caught:
        render("digamma", [Value("tmp0", "float32")])
    assert (caught.value.operator, caught.value.dtypes) == ("digamma", ("float32",))
    with pytest.raises(
        UnsupportedOperator, match=r"operator sub: expected one of .*, got bool"
    ) as caught:
        render("sub", [Value("tmp0", "bool"), Value("tmp1", "bool")])
    assert caught.value.dtypes == ("bool",)
    with pytest.raises(UnsupportedOperator, match="dtype complex64"):
        render("add", [Value("tmp0", "complex64"), 1])
    with pytest.raises(TypeError, match="operator add takes 2 arguments; got 1"):
        render("add", [Value("tmp0", "float32")])
    with pytest.raises(UnsupportedOperator, match="never fused"):
        render("mul_rn", [Value("tmp0", "float32"), Value("tmp1", "float32")], backend="hip")
    with pytest.raises(UnsupportedOperator, match="one width"):
        render("to_dtype_bitcast", [Value("tmp0", "float32")], dtype="int16")


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("bool", "int8", "int8"),
        ("int8", "uint8", "int16"),
        ("int16", "uint8", "int16"),
        ("int32", "int64", "int64"),
        ("int64", "float16", "float16"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float64", "float64"),
    ],
)
def test_arguments_are_promoted_as_torch_promotes_tensors(one, other, together):
    """Two dtypes have the common dtype that `torch.promote_types` says, whichever is first."""
    import torch

    from bundler.codegen.kernels.operation_text import promoted

    assert torch.promote_types(getattr(torch, one), getattr(torch, other)) == getattr(
        torch, together
    )
    pair = [Value("a", one), Value("b", other)]
    assert (promoted("add", pair), promoted("add", pair[::-1])) == (together, together)


@pytest.mark.parametrize(
    ("dtype", "number", "together"),
    [
        ("int8", 3, "int8"),
        ("int8", 3.0, "float32"),
        ("bool", 3, "int64"),
        ("bool", True, "bool"),
        ("bool", 0.5, "float32"),
        ("float16", 3, "float16"),
        ("float16", 0.5, "float16"),
        ("bfloat16", True, "bfloat16"),
    ],
)
def test_a_number_changes_the_dtype_only_by_its_kind(dtype, number, together):
    """A Python number beside a tensor does what it does in torch."""
    import torch

    from bundler.codegen.kernels.operation_text import promoted

    assert torch.result_type(torch.ones(1, dtype=getattr(torch, dtype)), number) == getattr(
        torch, together
    )
    assert promoted("add", [Value("a", dtype), number]) == together


@pytest.mark.parametrize(
    ("one", "other"),
    [("int64", "uint64"), ("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "bool")],
)
def test_dtypes_that_torch_does_not_promote_are_refused(one, other):
    """torch has no common dtype for some pairs, and the generator has none either."""
    import torch

    with pytest.raises(RuntimeError):
        torch.promote_types(getattr(torch, one), getattr(torch, other))
    with pytest.raises(UnsupportedOperator, match=f"{one} and {other} have no common dtype"):
        render("add", [Value("a", one), Value("b", other)])


def test_texts_are_put_together_with_the_parentheses_they_need():
    """An argument that is an expression stands in parentheses; a name or a call does not."""
    f32 = [Value("tmp0 + tmp1", "float32"), Value("tmp2", "float32")]
    assert render("mul", f32).text == "(tmp0 + tmp1) * tmp2"
    assert render("exp", f32[:1]).text == "libdevice.exp((tmp0 + tmp1))"
    assert (
        render("mul", [Value("tl.load(in0 + (x0), None)", "float32"), 2]).text
        == "tl.load(in0 + (x0), None) * 2.0"
    )
    assert render("sub", [Value("tmp0", "int32"), -3]).text == "tmp0 - tl.full([], -3, tl.int32)"
    assert (
        render("to_dtype", [Value("-tmp0", "float32")], dtype="int64").text
        == "(-tmp0).to(tl.int64)"
    )


def test_halves_are_rounded_where_torch_is_asked_to():
    """A value converted to a half keeps the precision of float32, unless it is to be rounded."""
    value = Value("tmp0", "float32")
    assert render("to_dtype", [value], dtype="float16") == Value("tmp0", "float16")
    assert (
        render("to_dtype", [value], dtype="float16", rounded=True).text
        == "tmp0.to(tl.float16).to(tl.float32)"
    )
