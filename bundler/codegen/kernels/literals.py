# SPDX-License-Identifier: Apache-2.0
"""`constant_text`, `literal_text`: a Python number as text of a kernel, with the type and every bit
that it should have.

`operation_text` and the kernel writer call them; the writer also for the identities of reductions.
"""

from __future__ import annotations

import math
import struct

from bundler.codegen.loops.data_types import DataType, NumberKind, data_type

# Triton gives a bare number the type of the tensor beside it, from the double that Python read;
# below these it would be a subnormal or zero.
_SMALLEST_LITERAL = 1e-30
_LARGEST_LITERAL = 1e30
_LARGEST_PLAIN_INTEGER = 2**31


def constant_text(value: float, name: str, shape: str = "[]") -> str:
    """Return the text of a number as a tensor of a dtype's compute type, that many elements
    of it.
    """
    row = data_type(name)
    if row.kind is NumberKind.BOOL:
        return f"tl.full({shape}, {bool(value)}, tl.int1)"
    if row.is_integer:
        return _integer_text(_wrapped(value, row), row, shape)
    if row.kind is NumberKind.FLOAT8:
        return f"{constant_text(value, 'float32', shape)}.to({row.computed})"
    return _float_text(float(value), row, shape)


def literal_text(value: float, name: str) -> str:
    """Return a number as it may stand beside a tensor of that dtype and an operator sign: bare
    where that means the same.
    """
    row = data_type(name)
    if row.is_integer:
        whole = _wrapped(value, row)
        if 0 <= whole < min(_LARGEST_PLAIN_INTEGER, 2 ** (row.bits - 1)):
            return str(whole)
    elif row.kind is NumberKind.FLOAT:
        number = float(value)
        plain = _SMALLEST_LITERAL < abs(number) < _LARGEST_LITERAL or (
            number == 0 and math.copysign(1.0, number) > 0
        )
        if plain and _is_exact(number, row):
            return repr(number)
    return constant_text(value, name)


def _is_exact(number: float, row: DataType) -> bool:
    """Whether the number has one reading: Triton rounds to float32 itself, and would make a float64
    of it by way of float32.
    """
    return row.computed == "tl.float32" or _single(number) == number


def _integer_text(whole: int, row: DataType, shape: str) -> str:
    # The smallest integer is written as the negation of a number that its own type cannot hold.
    if whole == -(2**63):
        return f"(tl.full({shape}, {whole + 1}, {row.computed}) - 1)"
    return f"tl.full({shape}, {whole}, {row.computed})"


def _wrapped(value: float, row: DataType) -> int:
    """Return the number modulo the dtype's range, as torch fills a tensor of it."""
    whole: int = int(value) % (1 << row.bits)
    return (
        whole - (1 << row.bits)
        if row.kind is NumberKind.SIGNED and whole >= 2 ** (row.bits - 1)
        else whole
    )


def _float_text(number: float, row: DataType, shape: str) -> str:
    if row.computed == "tl.float32":
        number = _single(number)
    if math.isnan(number) or math.isinf(number):
        return f"tl.full({shape}, float('{number}'), {row.computed})"
    if number == 0 and math.copysign(1.0, number) < 0:
        # Triton takes a constant that equals zero for +0.0.
        bits = "tl.int64" if row.computed == "tl.float64" else "tl.int32"
        least = 1 << (63 if row.computed == "tl.float64" else 31)
        return f"(tl.full({shape}, {least - 1}, {bits}) + 1).to({row.computed}, bitcast=True)"
    return f"tl.full({shape}, {number!r}, {row.computed})"


def _single(number: float) -> float:
    """Return the nearest number of float32, or an infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)
