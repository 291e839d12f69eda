# SPDX-License-Identifier: Apache-2.0
"""`ROWS`: the table of operators: arity, dtypes, the rule for the result, and the function that
writes the text.

`operation_text` renders with it. To add an operator, add a row: the tests generate a case for each
dtype that the row takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bundler.codegen.kernels.literals import constant_text
from bundler.codegen.loops.data_types import DATA_TYPES, DataType, NumberKind, data_type
from bundler.errors import UnsupportedOperator

Scalar = int | float | bool
Result = Literal["same", "bool", "int32", "option"]
Writer = Callable[[Sequence[str], DataType, dict[str, Any]], str]
_DOUBLE = "float64"


@dataclass(frozen=True)
class TextValue:
    """An expression of a kernel, and the dtype of what it computes; the text has the compute type
    of that dtype.
    """

    text: str
    dtype: str


def _names(*kinds: NumberKind) -> frozenset[str]:
    return frozenset(name for name, row in DATA_TYPES.items() if row.kind in kinds)


FLOATS = _names(NumberKind.FLOAT)
INTEGERS = _names(NumberKind.SIGNED, NumberKind.UNSIGNED)
BOOL = _names(NumberKind.BOOL)
FLOAT8S = _names(NumberKind.FLOAT8)
FULL_FLOATS = FLOATS - {"float16", "bfloat16"}
NUMBERS = FLOATS | INTEGERS
ALL = NUMBERS | BOOL
ANYTHING = ALL | FLOAT8S


@dataclass(frozen=True)
class Operator:
    """What the generator knows of one operator.

    Attributes:
        name: as Inductor's loop bodies have it.
        arity: how many arguments it takes; None where any number.
        dtypes: what it takes, after promotion.
        result: the dtype of its result: that of the arguments, or a fixed one, or the option
            `dtype`.
        write: from operands, their dtype and the options to the text.
        conditions: how many of the first arguments are bool, whatever the others are.
        infix: whether the text is an operator sign, beside which a bare number takes the right
            type.
        as_float: whether integers and bools become float32 first, as torch does for its
            mathematical functions.
    """

    name: str
    arity: int | None
    dtypes: frozenset[str]
    result: Result
    write: Writer
    conditions: int = 0
    infix: bool = False
    as_float: bool = False

    def computed_dtype(self, dtype: str) -> str:
        """Return the dtype that arguments of a dtype are computed in."""
        integral = data_type(dtype).kind not in {NumberKind.FLOAT, NumberKind.FLOAT8}
        return "float32" if self.as_float and integral else dtype

    def result_dtype(self, dtype: str, options: Mapping[str, Any]) -> str:
        """Return the dtype of the result, for arguments that are computed in a dtype."""
        if self.result == "option":
            return str(options["dtype"])
        return dtype if self.result == "same" else self.result

    def check(self, dtype: str) -> None:
        """Raise `UnsupportedOperator` where the operator does not take the dtype."""
        if dtype not in self.dtypes:
            raise UnsupportedOperator(
                f"operator {self.name}: expected one of {', '.join(sorted(self.dtypes))}, got"
                f" {dtype}; call the ATen operator instead",
                operator=self.name,
                dtypes=(dtype,),
            )


def _sign(symbol: str) -> Writer:
    """Return the writer of a unary or binary operator sign."""

    def write(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
        return f"{texts[0]} {symbol} {texts[1]}" if len(texts) > 1 else f"{symbol}{texts[0]}"

    return write


def _call(function: str) -> Writer:
    def write(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
        return f"{function}({', '.join(texts)})"

    return write


def _form(text: str) -> Writer:
    """Return a writer that fills the operands in."""

    def write(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
        return text.format(*texts)

    return write


def _by_kind(**writers: Writer) -> Writer:
    """Return a writer that chooses by dtype: `bool`, `signed`, `unsigned`, `double`, `float`, else
    `other`.
    """

    def write(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
        names = ("double",) if row.name == _DOUBLE else ()
        chosen = next(
            (writers[name] for name in (*names, row.kind.value) if name in writers),
            writers.get("other"),
        )
        assert chosen is not None, f"no writer for {row.name}"
        return chosen(texts, row, options)

    return write


_SAME = _form("{0}")


def _quotient(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    # Triton's `/` of float32 is an approximation; that of float64 is rounded correctly.
    precise = options.get("precise", False) and row.computed == "tl.float32"
    return f"tl.div_rn({texts[0]}, {texts[1]})" if precise else f"{texts[0]} / {texts[1]}"


def _rounded_product(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    if options.get("backend", "cuda") != "cuda":
        raise UnsupportedOperator(
            "operator mul_rn: only CUDA's library has a product that is never fused with a sum;"
            " call the ATen operator instead",
            operator="mul_rn",
            dtypes=(row.name,),
        )
    return f"libdevice.mul_rn({texts[0]}, {texts[1]})"


def _positive_part(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    # A maximum would make +0.0 of -0.0, which torch's relu keeps.
    return f"tl.where({texts[0]} < 0, {constant_text(0, row.name)}, {texts[0]})"


def _all_bits_turned(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    # Triton's `~` is an exclusive or with -1, which its interpreter refuses for unsigned integers.
    return f"{constant_text(2**row.bits - 1, row.name)} - {texts[0]}"


def _sign_bit(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    bits = "tl.int64" if row.computed == "tl.float64" else "tl.int32"
    return f"{texts[0]}.to({bits}, bitcast=True) < 0"


def _assertion(texts: Sequence[str], row: DataType, options: dict[str, Any]) -> str:
    return f"lib.device_assert_then({texts[0]}, {options['message']!r}, {texts[1]})"


# The device library has these under the names that torch has, or under those beside them.
_LIBRARY = {
    **{
        name: name
        for name in (
            "exp",
            "exp2",
            "expm1",
            "log1p",
            "log2",
            "log10",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "asin",
            "acos",
            "atan",
            "asinh",
            "acosh",
            "atanh",
            "erf",
            "erfc",
            "erfinv",
            "erfcx",
            "lgamma",
            "rsqrt",
        )
    },
    "bessel_j0": "j0",
    "bessel_j1": "j1",
    "bessel_y0": "y0",
    "bessel_y1": "y1",
    "i0": "cyl_bessel_i0",
    "i1": "cyl_bessel_i1",
    "modified_bessel_i0": "cyl_bessel_i0",
    "modified_bessel_i1": "cyl_bessel_i1",
}
# Triton's own, which it lowers by the width of the argument.
_LANGUAGE = ("log", "sin", "cos")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}


def _rows() -> list[Operator]:
    rows = [
        Operator(n, 1, FLOATS, "same", _call(f"libdevice.{library}"), as_float=True)
        for n, library in _LIBRARY.items()
    ]
    rows += [
        Operator(n, 1, FLOATS, "same", _call(f"tl_math.{n}"), as_float=True) for n in _LANGUAGE
    ]
    rows += [
        Operator(n, 2, ALL, "bool", _sign(symbol), infix=True) for n, symbol in _COMPARISONS.items()
    ]
    for n, symbol in _BITWISE.items():
        operator = Operator(f"bitwise_{n}", 2, INTEGERS | BOOL, "same", _sign(symbol), infix=True)
        alias = n if n == "xor" else f"{n}_"
        rows += [operator, Operator(alias, 2, operator.dtypes, "same", operator.write, infix=True)]
        rows.append(Operator(f"logical_{n}", 2, BOOL, "bool", _sign(symbol), conditions=2))
    for n, function in (("left", "lib.shift_left"), ("right", "lib.shift_right")):
        rows.append(Operator(f"bitwise_{n}_shift", 2, INTEGERS, "same", _call(function)))
        rows.append(Operator(f"{n[0]}shift", 2, INTEGERS, "same", _call(function)))
    return [*rows, *_arithmetic(), *_rounding(), *_tests(), *_mathematics(), *_data()]


def _arithmetic() -> list[Operator]:
    largest = _by_kind(bool=_sign("|"), other=_call("lib.maximum"))
    smallest = _by_kind(bool=_sign("&"), other=_call("lib.minimum"))
    floor_quotient = _by_kind(
        float=_call("lib.floor_divide_floats"), other=_call("lib.floor_divide")
    )
    remainder = _by_kind(float=_call("lib.remainder_of_floats"), other=_call("lib.remainder"))
    truncated_rest = _by_kind(float=_call("libdevice.fmod"), other=_call("lib.truncated_remainder"))
    # Triton negates by subtracting from +0.0, which loses the sign of a zero.
    negated = _by_kind(float=_form("{0} * -1.0"), other=_sign("-"))
    return [
        Operator("add", 2, ALL, "same", _by_kind(bool=_sign("|"), other=_sign("+")), infix=True),
        Operator("sub", 2, NUMBERS, "same", _sign("-"), infix=True),
        Operator("mul", 2, ALL, "same", _by_kind(bool=_sign("&"), other=_sign("*")), infix=True),
        Operator("truediv", 2, FLOATS, "same", _quotient, as_float=True),
        Operator("int_truediv", 2, FLOATS, "same", _quotient, as_float=True),
        Operator(
            "div_rn",
            2,
            FLOATS,
            "same",
            _by_kind(double=_sign("/"), other=_call("tl.div_rn")),
            as_float=True,
        ),
        Operator("mul_rn", 2, FLOATS, "same", _rounded_product, as_float=True),
        Operator("neg", 1, NUMBERS, "same", negated),
        Operator("maximum", 2, ALL, "same", largest),
        Operator("minimum", 2, ALL, "same", smallest),
        Operator("floordiv", 2, NUMBERS, "same", floor_quotient),
        Operator("truncdiv", 2, INTEGERS, "same", _call("lib.truncated_divide")),
        Operator("remainder", 2, NUMBERS, "same", remainder),
        Operator("mod", 2, NUMBERS, "same", truncated_rest),
        Operator("fmod", 2, NUMBERS, "same", truncated_rest),
        Operator(
            "fma",
            3,
            NUMBERS,
            "same",
            _by_kind(float=_call("tl.fma"), other=_form("{0} * {1} + {2}")),
        ),
        Operator("square", 1, NUMBERS, "same", _form("{0} * {0}")),
        Operator("reciprocal", 1, FLOATS, "same", _form("1.0 / {0}"), as_float=True),
        Operator(
            "abs", 1, ALL, "same", _by_kind(bool=_SAME, unsigned=_SAME, other=_call("tl_math.abs"))
        ),
        Operator("relu", 1, NUMBERS, "same", _by_kind(unsigned=_SAME, other=_positive_part)),
        Operator("sign", 1, ALL, "same", _by_kind(bool=_SAME, other=_call("lib.sign"))),
        Operator(
            "bitwise_not",
            1,
            INTEGERS | BOOL,
            "same",
            _by_kind(bool=_form("{0} == 0"), unsigned=_all_bits_turned, other=_sign("~")),
        ),
    ]


def _rounding() -> list[Operator]:
    functions = {
        "floor": "tl_math.floor",
        "ceil": "tl_math.ceil",
        "trunc": "libdevice.trunc",
        "round": "libdevice.nearbyint",
    }
    return [
        Operator(n, 1, NUMBERS, "same", _by_kind(float=_call(f), other=_SAME))
        for n, f in functions.items()
    ]


def _tests() -> list[Operator]:
    never = _form("{0} != {0}")
    return [
        Operator("isnan", 1, ALL, "bool", never),
        Operator(
            "isinf",
            1,
            ALL,
            "bool",
            _by_kind(float=_form("tl_math.abs({0}) == float('inf')"), other=never),
        ),
        Operator(
            "signbit",
            1,
            ALL,
            "bool",
            _by_kind(float=_sign_bit, signed=_form("{0} < 0"), other=never),
        ),
        Operator("logical_not", 1, BOOL, "bool", _form("{0} == 0"), conditions=1),
    ]


def _mathematics() -> list[Operator]:
    root = _by_kind(double=_call("libdevice.sqrt"), other=_call("tl.sqrt_rn"))
    power = _by_kind(float=_call("libdevice.pow"), other=_call("lib.integer_power"))
    return [
        Operator("sqrt", 1, FLOATS, "same", root, as_float=True),
        Operator("sigmoid", 1, FLOATS, "same", _call("lib.sigmoid"), as_float=True),
        Operator("atan2", 2, FLOATS, "same", _call("libdevice.atan2"), as_float=True),
        Operator("hypot", 2, FLOATS, "same", _call("libdevice.hypot"), as_float=True),
        Operator("copysign", 2, FLOATS, "same", _call("libdevice.copysign"), as_float=True),
        # The step after a 16-bit float is not that after the float32 it is computed in.
        Operator("nextafter", 2, FULL_FLOATS, "same", _call("libdevice.nextafter"), as_float=True),
        Operator("pow", 2, NUMBERS, "same", power),
        Operator("frexp_mantissa", 1, FLOATS, "same", _call("lib.frexp_mantissa")),
        Operator("frexp_exponent", 1, FLOATS, "int32", _call("lib.frexp_exponent")),
    ]


def _data() -> list[Operator]:
    return [
        Operator("identity", 1, ANYTHING, "same", _SAME),
        Operator("where", 3, ANYTHING, "same", _call("tl.where"), conditions=1),
        Operator("masked", 3, ANYTHING, "same", _call("tl.where"), conditions=1),
        Operator("device_assert_then", 2, ANYTHING, "same", _assertion, conditions=1),
    ]


ROWS: dict[str, Operator] = {row.name: row for row in _rows()}
