# SPDX-License-Identifier: Apache-2.0
"""`CONVERSIONS`: operators whose arguments are not brought to one dtype: casts, bitcasts, constants, ldexp and random numbers.

`operation_text` adds them to its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bundler.codegen.data_types import NumberKind, cast_text, data_type, loaded_text, stored_text
from bundler.codegen.literals import constant_text
from bundler.codegen.operator_rows import ANYTHING, FLOATS, INTEGERS, Operator, Scalar, TextValue
from bundler.codegen.text_forms import operand
from bundler.errors import UnsupportedOperator

Arguments = tuple[TextValue | Scalar, ...]
Writer = Callable[[Arguments, Mapping[str, Any]], TextValue]


@dataclass(frozen=True)
class Conversion:
    """An operator that looks at the dtype of each argument by itself; its row in the table, and what writes it."""

    operator: Operator
    write: Writer


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
            f"operator to_dtype_bitcast: expected dtypes of one width, got {old.name} and {new.name}; call the ATen operator instead",
            operator="to_dtype_bitcast",
            dtypes=(old.name, new.name),
        )
    bits = operand(stored_text(value.text, old.name))
    same = old.stored == new.stored
    return TextValue(
        loaded_text(bits if same else f"{bits}.to({new.stored}, bitcast=True)", new.name), new.name
    )


def _to_integer(function: str) -> Writer:
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


def _random(function: str, dtype: str) -> Writer:
    def write(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
        texts = [_value(argument).text for argument in arguments]
        return TextValue(f"lib.{function}({', '.join(texts)})", dtype)

    return write


def _assembly(arguments: Arguments, options: Mapping[str, Any]) -> TextValue:
    """Write assembly; each value is in a register as it lies in memory, so that a half has 16 bits."""
    values = [_value(argument) for argument in arguments]
    texts = [stored_text(value.text, value.dtype) for value in values]
    constraints = options.get("constraints") or ", ".join(["=r", *("r" for _ in texts)])
    result = data_type(options["dtype"])
    text = (
        f"tl.inline_asm_elementwise({options['asm']!r}, {constraints!r}, [{', '.join(texts)}], "
        f"dtype={result.stored}, is_pure={options.get('is_pure', True)}, pack={options.get('pack', 1)})"
    )
    # Assembly may hold any brackets, so the text is no operand by itself.
    return TextValue(
        text if result.stored == result.computed else loaded_text(f"({text})", result.name),
        result.name,
    )


def _rows() -> dict[str, Conversion]:
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


CONVERSIONS: dict[str, Conversion] = _rows()
