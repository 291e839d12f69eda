# SPDX-License-Identifier: Apache-2.0
"""`render`, `Value`, `OPERATORS`: the text of each operator of a kernel's body, for arguments of any dtype.

Operators have the names that Inductor's loop bodies use. A `Value` is an expression and its dtype; the expression has the compute type of that dtype
(`data_types.compute_type`), so a float16 value is a float32 expression that is rounded where it is stored. Texts use four names, which a kernel's
module imports: `tl`, `tl_math` (`triton.language.math`), `libdevice` (`triton.language.extra.libdevice`) and `lib` (`bundler.codegen.lib`).

Arguments of different dtypes are promoted as torch promotes tensors of one dimension, and Python numbers take the dtype of the values beside them. An
operator that torch does not have for a dtype, or that Triton cannot compute exactly enough, raises `UnsupportedOperator`: the caller then
calls the ATen operator. Loads, stores, reductions, scans, sorts and bucketize are the kernel writer's.

The kernel writer calls `render`; `operator_rows` holds the rows of the table, `literals` the text of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bundler.codegen.conversions import CONVERSIONS
from bundler.codegen.data_types import cast_text, data_type
from bundler.codegen.literals import constant_text, literal_text
from bundler.codegen.operator_rows import ROWS, Operator, Scalar, TextValue
from bundler.codegen.promotion import promoted
from bundler.codegen.text_forms import operand
from bundler.errors import UnsupportedOperator

__all__ = ["OPERATORS", "Operator", "Scalar", "Value", "render"]

Value = TextValue
#: Every operator by name: its arity, the dtypes it takes and the rule for the dtype of its result.
OPERATORS: dict[str, Operator] = {
    **ROWS,
    **{name: row.operator for name, row in CONVERSIONS.items()},
}


def render(operator: str, arguments: Sequence[Value | Scalar], **options: Any) -> Value:
    """Return the text of one operator, which has no parentheses around it, and the dtype of its result.

    Args:
        operator: a name of `OPERATORS`.
        arguments: values and Python numbers.
        **options: `dtype` (for conversions and constants: the dtype of the result), `rounded` (`to_dtype`: round to a 16-bit float as torch does),
            `shape` (`constant`: text of the shape, `[]` without), `precise` (`truediv`: round the quotient of float32 correctly), `backend` (`cuda` or
            `hip`, for what only one has), `asm`, `constraints`, `is_pure` and `pack` (`inline_asm_elementwise`), `message` (`device_assert_then`).

    Raises:
        UnsupportedOperator: there is no such operator, or not for these dtypes.
    """
    row = OPERATORS.get(operator)
    if row is None:
        raise UnsupportedOperator(
            f"operator {operator}: the generator has no text for it; call the ATen operator instead",
            operator=operator,
            dtypes=tuple(
                argument.dtype for argument in arguments if isinstance(argument, TextValue)
            ),
        )
    if row.arity is not None and len(arguments) != row.arity:
        raise TypeError(f"operator {operator} takes {row.arity} arguments; got {len(arguments)}")
    if operator in CONVERSIONS:
        return CONVERSIONS[operator].write(tuple(arguments), options)
    return _pointwise(row, tuple(arguments), options)


def _pointwise(
    row: Operator, arguments: tuple[Value | Scalar, ...], options: dict[str, Any]
) -> Value:
    """Return the text of an operator whose arguments are all brought to one dtype first."""
    free, rest = arguments[: row.conditions], arguments[row.conditions :]
    dtype = row.computed_dtype(promoted(row.name, rest))
    row.check(dtype)
    texts = [_as_dtype(argument, "bool", row) for argument in free]
    texts += [_as_dtype(argument, dtype, row) for argument in rest]
    if all(not isinstance(argument, TextValue) for argument in rest):
        # Python would compute a text of bare numbers, in its own types.
        texts[row.conditions :] = [constant_text(argument, dtype) for argument in rest]  # type: ignore[arg-type]
    return TextValue(
        row.write([operand(text) for text in texts], data_type(dtype), options),
        row.result_dtype(dtype, options),
    )


def _as_dtype(argument: Value | Scalar, dtype: str, row: Operator) -> str:
    """Return the text of one argument in the dtype that the operator is computed in."""
    if isinstance(argument, TextValue):
        return cast_text(argument.text, argument.dtype, dtype)
    return literal_text(argument, dtype) if row.infix else constant_text(argument, dtype)
