# SPDX-License-Identifier: Apache-2.0
"""`render`, `Value`, `OPERATORS`: the text of each operator of a kernel's body, for arguments of
any dtype.

Operators have the names that Inductor's loop bodies use. A `Value` is an expression and its dtype;
the expression has the compute type of that dtype (`data_types.compute_type`), so a float16 value is
a float32 expression that is rounded where it is stored. Texts use four names, which a kernel's
module imports: `tl`, `tl_math` (`triton.language.math`), `libdevice`
(`triton.language.extra.libdevice`) and `lib` (`bundler.codegen.lib`).

Arguments of different dtypes are promoted as torch promotes tensors of one dimension (`promoted`),
and Python numbers take the dtype of the values beside them. Those of `_CONVERSIONS` (casts,
bitcasts, constants, ldexp, random numbers, assembly) stay as they are. An operator that torch does
not have for a dtype, or that Triton cannot compute exactly enough, raises `UnsupportedOperator`:
the caller then calls the ATen operator. Loads, stores, reductions and scans are the kernel
writer's.

The kernel writer calls `render`; `operator_rows` holds the rows of the table, `literals` the text
of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.codegen.kernels.literals import constant_text, literal_text
from bundler.codegen.kernels.operator_rows import (
    ANYTHING,
    FLOATS,
    INTEGERS,
    ROWS,
    Operator,
    Scalar,
    TextValue,
)
from bundler.codegen.loops.data_types import (
    DataType,
    NumberKind,
    cast_text,
    data_type,
    loaded_text,
    stored_text,
)
from bundler.codegen.loops.text_forms import operand
from bundler.errors import UnsupportedOperator

Arguments = tuple[TextValue | Scalar, ...]
_Writer = Callable[[Arguments, Mapping[str, Any]], TextValue]
_WIDEST = 64


@dataclass(frozen=True)
class Conversion:
    """An operator that looks at the dtype of each argument by itself; its row in the table, and
    what writes it.
    """

    operator: Operator
    write: _Writer


def _value(argument: TextValue | Scalar) -> TextValue:
    """Return an argument as a value; Python's numbers have the dtypes that torch gives them."""
    if isinstance(argument, TextValue):
        return argument
    dtype = (
        "bool"
        if isinstance(argument, bool)
        else "int64"
        if isinstance(argument, int)
        else "float32"
    )
    return TextValue(constant_text(argument, dtype), dtype)


def _constant(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    (number,) = arguments
    if isinstance(number, TextValue):
        raise TypeError(f"operator constant takes a number; got {number}")
    return TextValue(
        constant_text(number, options["dtype"], options.get("shape", "[]")), options["dtype"]
    )


def _to_dtype(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    value, target = _value(arguments[0]), options["dtype"]
    return TextValue(
        cast_text(value.text, value.dtype, target, rounded=options.get("rounded", False)), target
    )


def _to_dtype_bitcast(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    value = _value(arguments[0])
    old, new = data_type(value.dtype), data_type(options["dtype"])
    if old.bits != new.bits:
        raise UnsupportedOperator(
            f"operator to_dtype_bitcast: expected dtypes of one width, got {old.name} and"
            f" {new.name}; call the ATen operator instead",
            operator="to_dtype_bitcast",
            dtypes=(old.name, new.name),
        )
    # Bits are those in memory: a float16 value is a float32 in a register.
    bits = operand(stored_text(value.text, old.name))
    same = old.stored == new.stored
    return TextValue(
        loaded_text(bits if same else f"{bits}.to({new.stored}, bitcast=True)", new.name), new.name
    )


def _to_integer(function: str) -> _Writer:
    """Return the writer of a conversion from a float to integers after it was rounded."""

    def write(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
        value, target = _value(arguments[0]), options["dtype"]
        if data_type(value.dtype).kind is NumberKind.FLOAT8:
            value = TextValue(cast_text(value.text, value.dtype, "float32"), "float32")
        text = (
            f"{function}({value.text})"
            if function and data_type(value.dtype).kind is NumberKind.FLOAT
            else value.text
        )
        return TextValue(cast_text(text, value.dtype, target), target)

    return write


def _ldexp(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    value, exponent = _value(arguments[0]), _value(arguments[1])
    dtype = value.dtype if data_type(value.dtype).kind is NumberKind.FLOAT else "float32"
    text = cast_text(value.text, value.dtype, dtype)
    return TextValue(
        f"lib.ldexp({text}, {cast_text(exponent.text, exponent.dtype, 'int64')})", dtype
    )


def _random(function: str, dtype: str) -> _Writer:
    def write(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
        texts = [_value(argument).text for argument in arguments]
        return TextValue(f"lib.{function}({', '.join(texts)})", dtype)

    return write


def _assembly(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    """Write assembly; each value is in a register as it lies in memory, so that a half has
    16 bits.
    """
    values = [_value(argument) for argument in arguments]
    # Registers hold what memory would, so that a half has 16 bits.
    texts = [stored_text(value.text, value.dtype) for value in values]
    constraints = options.get("constraints") or ", ".join(["=r", *("r" for _ in texts)])
    result = data_type(options["dtype"])
    text = (
        f"tl.inline_asm_elementwise({options['asm']!r}, {constraints!r}, [{', '.join(texts)}],"
        f" dtype={result.stored}, is_pure={options.get('is_pure', True)},"
        f" pack={options.get('pack', 1)})"
    )
    # Brackets inside of the assembly's string would mislead `operand`, which counts them.
    return TextValue(
        text if result.stored == result.computed else loaded_text(f"({text})", result.name),
        result.name,
    )


def _conversion_rows() -> dict[str, Conversion]:
    rows = [
        Conversion(Operator("constant", 1, ANYTHING, "option", _unused), _constant),
        Conversion(Operator("to_dtype", 1, ANYTHING, "option", _unused), _to_dtype),
        Conversion(Operator("to_dtype_bitcast", 1, ANYTHING, "option", _unused), _to_dtype_bitcast),
        Conversion(
            Operator("inline_asm_elementwise", None, ANYTHING, "option", _unused), _assembly
        ),
        Conversion(Operator("ldexp", 2, FLOATS, "same", _unused), _ldexp),
        Conversion(Operator("rand", 2, INTEGERS, "option", _unused), _random("rand", "float32")),
        Conversion(Operator("randn", 2, INTEGERS, "option", _unused), _random("randn", "float32")),
        Conversion(
            Operator("randint64", 4, INTEGERS, "option", _unused), _random("randint64", "int64")
        ),
    ]
    functions = {
        "trunc": "",
        "floor": "tl_math.floor",
        "ceil": "tl_math.ceil",
        "round": "libdevice.nearbyint",
    }
    for name, function in functions.items():
        rows.append(
            Conversion(
                Operator(f"{name}_to_int", 1, ANYTHING, "option", _unused), _to_integer(function)
            )
        )
    return {row.operator.name: row for row in rows}


def _unused(*_: Any) -> str:
    raise AssertionError("a conversion is written by its own function")


_CONVERSIONS: dict[str, Conversion] = _conversion_rows()
__all__ = ["OPERATORS", "Operator", "Scalar", "Value", "render"]

Value = TextValue
#: Every operator by name: its arity, the dtypes it takes and the rule for the dtype of its result.
OPERATORS: dict[str, Operator] = {
    **ROWS,
    **{name: row.operator for name, row in _CONVERSIONS.items()},
}


def render(operator: str, arguments: Sequence[Value | Scalar], **options: Any) -> Value:
    """Return the text of one operator, which has no parentheses around it, and the dtype of its
    result.

    Args:
        operator: a name of `OPERATORS`.
        arguments: values and Python numbers.
        **options: `dtype` (for conversions and constants: the dtype of the result), `rounded`
            (`to_dtype`: round to a 16-bit float as torch does), `shape` (`constant`: text of the
            shape, `[]` without), `precise` (`truediv`: round the quotient of float32 correctly),
            `backend` (`cuda` or `hip`, for what only one has), `asm`, `constraints`, `is_pure` and
            `pack` (`inline_asm_elementwise`), `message` (`device_assert_then`).

    Raises:
        UnsupportedOperator: there is no such operator, or not for these dtypes.
    """
    row = OPERATORS.get(operator)
    if row is None:
        raise UnsupportedOperator(
            f"operator {operator}: the generator has no text for it; call the ATen operator"
            " instead",
            operator=operator,
            dtypes=tuple(
                argument.dtype for argument in arguments if isinstance(argument, TextValue)
            ),
        )
    if row.arity is not None and len(arguments) != row.arity:
        raise TypeError(f"operator {operator} takes {row.arity} arguments; got {len(arguments)}")
    if operator in _CONVERSIONS:
        return _CONVERSIONS[operator].write(tuple(arguments), options)
    return _pointwise(row, tuple(arguments), options)


def _pointwise(
    row: Operator, arguments: tuple[Value | Scalar, ...], options: dict[str, Any]
) -> Value:
    """Return the text of an operator whose arguments are all brought to one dtype first."""
    free, rest = arguments[: row.conditions], arguments[row.conditions :]
    dtype = row.computed_dtype(promoted(row.name, rest))
    row.check(dtype)
    texts = [_argument_text(argument, "bool", row) for argument in free]
    texts += [_argument_text(argument, dtype, row) for argument in rest]
    if all(not isinstance(argument, TextValue) for argument in rest):
        # Python itself would compute a text of bare numbers, with its own types and rounding.
        numbers = [constant_text(argument, dtype) for argument in rest]  # type: ignore[arg-type]
        texts[row.conditions :] = numbers
    return TextValue(
        row.write([operand(text) for text in texts], data_type(dtype), options),
        row.result_dtype(dtype, options),
    )


def _argument_text(argument: Value | Scalar, dtype: str, row: Operator) -> str:
    """Return the text of one argument in the dtype that the operator is computed in."""
    if isinstance(argument, TextValue):
        return cast_text(argument.text, argument.dtype, dtype)
    return literal_text(argument, dtype) if row.infix else constant_text(argument, dtype)


def promoted(operator: str, arguments: Sequence[TextValue | Scalar]) -> str:
    """Return the dtype of an operator's arguments together.

    A Python number changes the dtype only where its kind is higher: a float beside integers makes
    float32, an integer beside bools int64.

    Raises:
        UnsupportedOperator: torch promotes no such pair, as an 8-bit float beside any other, or
            int64 beside uint64.
    """
    names = list(
        dict.fromkeys(argument.dtype for argument in arguments if isinstance(argument, TextValue))
    )
    numbers = [argument for argument in arguments if not isinstance(argument, TextValue)]
    result = data_type(names[0]) if names else data_type("bool")
    for name in names[1:]:
        result = _together(operator, result, data_type(name))
    if any(isinstance(number, float) for number in numbers) and result.kind not in {
        NumberKind.FLOAT,
        NumberKind.FLOAT8,
    }:
        return "float32"
    if any(not isinstance(number, bool) for number in numbers) and result.kind is NumberKind.BOOL:
        return "int64"
    return result.name


def _together(operator: str, one: DataType, other: DataType) -> DataType:
    if one == other:
        return one
    low, high = sorted((one, other), key=_rank)
    if NumberKind.FLOAT8 in {low.kind, high.kind}:
        raise _refusal(operator, one, other)
    # Neither holds the other: one has more digits, the other a wider range.
    if {low.name, high.name} == {"float16", "bfloat16"}:
        return data_type("float32")
    # The next wider signed type holds both; there is none above 64 bits.
    if low.kind is NumberKind.UNSIGNED and high.kind is NumberKind.SIGNED and low.bits >= high.bits:
        if low.bits == _WIDEST:
            raise _refusal(operator, one, other)
        return data_type(f"int{2 * low.bits}")
    return high


def _rank(row: DataType) -> tuple[int, int]:
    order = [
        NumberKind.BOOL,
        NumberKind.UNSIGNED,
        NumberKind.SIGNED,
        NumberKind.FLOAT8,
        NumberKind.FLOAT,
    ]
    return order.index(row.kind), row.bits


def _refusal(operator: str, one: DataType, other: DataType) -> UnsupportedOperator:
    return UnsupportedOperator(
        f"operator {operator}: {one.name} and {other.name} have no common dtype; convert one of"
        " them first",
        operator=operator,
        dtypes=(one.name, other.name),
    )
