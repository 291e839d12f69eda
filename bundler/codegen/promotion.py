# SPDX-License-Identifier: Apache-2.0
"""`promoted`: the one dtype that values of several dtypes are computed in, by torch's rules for tensors.

`operation_text` asks it before it writes an operator; graphs that torch has lowered already have arguments of one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundler.codegen.data_types import DataType, NumberKind, data_type
from bundler.codegen.operator_rows import Scalar, TextValue
from bundler.errors import UnsupportedOperator

_WIDEST = 64


def promoted(operator: str, arguments: Sequence[TextValue | Scalar]) -> str:
    """Return the dtype of an operator's arguments together.

    A Python number changes the dtype only where its kind is higher: a float beside integers makes float32, an integer beside bools int64.

    Raises:
        UnsupportedOperator: torch promotes no such pair, as an 8-bit float beside any other, or int64 beside uint64.
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
    if {low.name, high.name} == {"float16", "bfloat16"}:
        return data_type("float32")
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
        f"operator {operator}: {one.name} and {other.name} have no common dtype; convert one of them first",
        operator=operator,
        dtypes=(one.name, other.name),
    )
