# SPDX-License-Identifier: Apache-2.0
"""`compute_type`, `store_type`, `cast_text`: how each dtype of torch is computed, stored and
converted in a kernel's text.

A dtype is a string without `torch.`, so that nothing here imports torch. A value of a kernel has a
dtype, and its text has the compute type of that dtype: float16 and bfloat16 are computed in
float32, and bool is `tl.int1`. The other types are computed as they are stored. The 8-bit floats
are only moved and converted: they have no arithmetic.

`operation_text` writes operators with it; the kernel writer writes loads (`loaded_text`) and stores
(`stored_text`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from bundler.codegen.loops.text_forms import operand
from bundler.errors import UnsupportedOperator


class NumberKind(Enum):
    """What sort of number a dtype holds."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    FLOAT8 = "float8"


@dataclass(frozen=True)
class DataType:
    """A dtype: its name in torch, what Triton calls the stored and the computed form, and its width
    in memory.
    """

    name: str
    stored: str
    computed: str
    bits: int
    kind: NumberKind

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers; bool does not."""
        return self.kind in {NumberKind.SIGNED, NumberKind.UNSIGNED}

    @property
    def is_float(self) -> bool:
        """Whether it has infinities and NaN, and arithmetic."""
        return self.kind is NumberKind.FLOAT

    @property
    def is_half(self) -> bool:
        """Whether it is computed in float32 and rounded where it is stored."""
        return self.kind is NumberKind.FLOAT and self.stored != self.computed


def _rows() -> tuple[DataType, ...]:
    floats = [
        DataType("float64", "tl.float64", "tl.float64", 64, NumberKind.FLOAT),
        DataType("float32", "tl.float32", "tl.float32", 32, NumberKind.FLOAT),
        DataType("float16", "tl.float16", "tl.float32", 16, NumberKind.FLOAT),
        DataType("bfloat16", "tl.bfloat16", "tl.float32", 16, NumberKind.FLOAT),
    ]
    eights = {
        "float8_e4m3fn": "tl.float8e4nv",
        "float8_e5m2": "tl.float8e5",
        "float8_e4m3fnuz": "tl.float8e4b8",
        "float8_e5m2fnuz": "tl.float8e5b16",
    }
    floats += [DataType(name, text, text, 8, NumberKind.FLOAT8) for name, text in eights.items()]
    integers = [
        DataType(f"{prefix}int{bits}", f"tl.{prefix}int{bits}", f"tl.{prefix}int{bits}", bits, kind)
        for prefix, kind in (("", NumberKind.SIGNED), ("u", NumberKind.UNSIGNED))
        for bits in (8, 16, 32, 64)
    ]
    return (*floats, *integers, DataType("bool", "tl.int8", "tl.int1", 8, NumberKind.BOOL))


#: Every dtype that the generator knows, by name.
DATA_TYPES = {row.name: row for row in _rows()}
#: What signatures call the 8-bit floats, which not every target has.
FLOAT8_TYPES = {
    row.name: row.stored.replace("tl.float", "fp")
    for row in DATA_TYPES.values()
    if row.kind is NumberKind.FLOAT8
}
# A float that is converted to a narrow or unsigned integer goes through a signed one that holds
# every value of it: what is below zero then wraps, as in torch, where a direct conversion would be
# undefined.
_BY_WAY_OF = {
    "uint8": "tl.int32",
    "uint16": "tl.int32",
    "int8": "tl.int32",
    "int16": "tl.int32",
    "uint32": "tl.int64",
    "uint64": "tl.int64",
}
# A conversion between 8-bit and 16-bit floats packs neighbours into one register, so a thread has
# to hold that many of them.
_ELEMENTS_PER_THREAD = {
    "float8_e4m3fn": 2,
    "float8_e4m3fnuz": 2,
    "float8_e5m2": 4,
    "float8_e5m2fnuz": 4,
}


def least_and_most(name: str) -> tuple[float, float]:
    """Return the least and the greatest number of a dtype: of floats the infinities."""
    row = data_type(name)
    if row.kind is NumberKind.FLOAT:
        return -math.inf, math.inf
    signed = row.kind is NumberKind.SIGNED
    span = 2 ** (row.bits - signed)
    return -span if signed else 0, span - 1


def data_type(name: str) -> DataType:
    """Return what is known of a dtype.

    Raises:
        UnsupportedOperator: the generator does not know it, as complex64.
    """
    try:
        return DATA_TYPES[name]
    except KeyError:
        raise UnsupportedOperator(
            f"dtype {name}: expected one of {', '.join(DATA_TYPES)}; call the ATen operator"
            " instead",
            operator="dtype",
            dtypes=(name,),
        ) from None


def compute_type(name: str) -> str:
    """Return Triton's name of the type that values of a dtype are computed in."""
    return data_type(name).computed


def store_type(name: str) -> str:
    """Return Triton's name of the type that a dtype has in memory; a bool is a byte there."""
    return data_type(name).stored


def identity_of(kind: str, dtype: str) -> float:
    """Return the value that changes nothing: the least for a maximum, and so on."""
    row = DATA_TYPES[dtype]
    if kind in {"sum", "xor_sum", "any", "prod"}:
        return int(kind == "prod")
    if row.kind in {NumberKind.FLOAT, NumberKind.FLOAT8}:
        return float("-inf") if kind == "max" else float("inf")
    if row.kind is NumberKind.BOOL:
        return int(kind != "max")
    low, high = (
        (0, 2**row.bits - 1)
        if row.kind is NumberKind.UNSIGNED
        else (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
    )
    return low if kind == "max" else high


def cast_text(text: str, source: str, target: str, *, rounded: bool = False) -> str:
    """Return the text that converts a value between dtypes; both texts have the compute types.

    A number beyond the range of an 8-bit float becomes the largest one where the GPU's instruction
    saturates, as NVIDIA's does; torch makes NaN or infinity of it. A float that is no number of the
    integers it is converted to becomes any of them, as in C.

    Args:
        text: an expression of type `compute_type(source)`.
        source: the dtype it has.
        target: the dtype it gets.
        rounded: round to a 16-bit float, as torch does; without it the value keeps the precision of
            float32 until it is stored.
    """
    old, new = data_type(source), data_type(target)
    # To 16 bits and back: the text stays a float32 with the bits of the narrower type. Every 8-bit
    # float is exact in either.
    if new.is_half and rounded and old.kind is not NumberKind.FLOAT8:
        return _converted(
            _converted(text, old.computed, old, new.stored, new), new.stored, new, new.computed, new
        )
    return _converted(text, old.computed, old, new.computed, new)


def loaded_text(text: str, name: str) -> str:
    """Return the text that brings a value as it lies in memory into the compute type of its
    dtype.
    """
    row = data_type(name)
    # Any byte that is not 0 is true.
    if row.kind is NumberKind.BOOL:
        return f"({operand(text)} != 0)"
    return text if row.stored == row.computed else f"{operand(text)}.to({row.computed})"


def stored_text(text: str, name: str) -> str:
    """Return the text that brings a computed value into the type that its dtype has in memory."""
    row = data_type(name)
    return text if row.stored == row.computed else f"{operand(text)}.to({row.stored})"


def elements_per_thread(source: str, target: str) -> int:
    """Return how many neighbouring elements a thread has to hold for a conversion; 1 where it does
    not matter.
    """
    if source == target:
        return 1
    return max(_ELEMENTS_PER_THREAD.get(name, 1) for name in (source, target))


def _converted(text: str, before: str, old: DataType, after: str, new: DataType) -> str:
    """Return the text of one conversion from Triton's type `before` of dtype `old` to `after` of
    `new`.
    """
    if before == after:
        return text
    # A comparison, not a conversion, which would keep the lowest bit alone.
    if new.kind is NumberKind.BOOL:
        text = f"{operand(text)}.to(tl.float32)" if old.kind is NumberKind.FLOAT8 else text
        return f"({operand(text)} != 0)"
    steps = [*_between(old, new, after), after]
    return operand(text) + "".join(f".to({step})" for step in steps)


def _between(old: DataType, new: DataType, after: str) -> list[str]:
    """Return the types that a conversion goes through, since Triton has no direct one or one that
    means something else.
    """
    steps = []
    if (
        after != "tl.float32"
        and NumberKind.FLOAT8 in {old.kind, new.kind}
        and old.computed != "tl.float32"
    ):
        steps.append("tl.float32")
    if (
        new.is_integer
        and old.kind in {NumberKind.FLOAT, NumberKind.FLOAT8}
        and (between := _BY_WAY_OF.get(new.name))
    ):
        steps.append(between)
    return steps
