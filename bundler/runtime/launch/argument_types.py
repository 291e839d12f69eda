# SPDX-License-Identifier: Apache-2.0
"""`specialize`: what Triton's JIT would compile for a call, which is each argument's type and what
of its value it looks at.

The choice of a specialization builds on it.  Tensors, descriptors and JIT functions are known by
the attributes they have, since neither torch nor Triton is imported here.  A test compares these
rules with those of each supported Triton release.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.format.constant_values import Value
from bundler.format.launch_spec import Argument

CONSTEXPR = "constexpr"
ALIGNMENT = 16
_MAX_POINTER_RANGE = 2**31 - 1
_CANONICAL = {
    "bool": "u1",
    "int1": "u1",
    "uint1": "u1",
    "i1": "u1",
    "float8e4nv": "fp8e4nv",
    "float8e5": "fp8e5",
    "float8e4b15": "fp8e4b15",
    "float8_e4m3fn": "fp8e4nv",
    "float8e4b8": "fp8e4b8",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
    "float8e5b16": "fp8e5b16",
    "float8_e5m2fnuz": "fp8e5b16",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int": "i32",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "void": "void",
}
TYPE_NAMES = _CANONICAL | {name: name for name in _CANONICAL.values()}


@dataclass(frozen=True)
class ArgumentType:
    """What Triton makes of one argument of a call.

    `type` is a type's name or a nested tuple of names; `key` has the same shape: the constant where
    the type is `constexpr`, else letters, `D` for divisible by 16 and `S` for a tensor whose memory
    is smaller than 2 GiB, or None where Triton looks at nothing.
    """

    type: Any
    key: Any


def specialize(value: Any, argument: Argument, backend: str) -> ArgumentType:
    """Return what Triton would make of `value` for a parameter declared like `argument`.

    Raises:
        CannotLaunchStatically: a value of a type that no kernel takes.
    """
    if argument.constexpr:
        return ArgumentType(CONSTEXPR, value)
    declared = _declared_type(argument.annotation)
    if declared == "u1" or declared[:2] in {"fp", "bf"}:
        return ArgumentType(declared, None)
    annotation = argument.annotation
    constant_pointer = "const" in annotation or annotation.startswith("*k")
    rules = _Rules(
        argument.name,
        backend,
        constant_pointer,
        not argument.do_not_specialize,
        not argument.do_not_specialize_on_alignment,
    )
    seen = rules.apply(value)
    return (
        ArgumentType(declared, None if seen.type == CONSTEXPR else seen.key) if declared else seen
    )


def _declared_type(annotation: str) -> str:
    element = (
        annotation.removeprefix("*k")
        if annotation.startswith("*k")
        else annotation.removeprefix("*")
    )
    return annotation if element in _TYPES else ""


_TYPES = frozenset(_CANONICAL.values())


@dataclass(frozen=True)
class _Rules:
    name: str
    backend: str
    constant_pointer: bool
    by_value: bool
    by_alignment: bool

    def apply(self, value: Any) -> ArgumentType:
        kind = type(value)
        if value is None:
            return ArgumentType(CONSTEXPR, None)
        if kind is bool:
            return ArgumentType("u1", None)
        if isinstance(value, int):
            return self._integer(value)
        if isinstance(value, float):
            return ArgumentType("fp32", None)
        if isinstance(value, tuple):
            # What was declared of the parameter does not hold for the members of a tuple.
            inside = replace(self, constant_pointer=False, by_value=True, by_alignment=True)
            seen = [inside.apply(item) for item in value]
            return ArgumentType(tuple(item.type for item in seen), tuple(item.key for item in seen))
        return self._object(value)

    def _integer(self, value: int) -> ArgumentType:
        if value == 1 and self.by_value:
            return ArgumentType(CONSTEXPR, 1)
        name = integer_type(value)
        if name is None:
            raise CannotLaunchStatically(
                f"argument {self.name!r}: {value} does not fit 64 bits",
                argument=self.name,
                got=value,
            )
        return ArgumentType(name, self._divisible(value) if self.by_value else None)

    def _divisible(self, number: int) -> str:
        return "D" if self.by_alignment and number % ALIGNMENT == 0 else ""

    def _object(self, value: Any) -> ArgumentType:
        if is_tensor(value):
            name = f"{'*k' if self.constant_pointer else '*'}{element_type(value.dtype, self.name)}"
            if not self.by_value:
                return ArgumentType(name, None)
            return ArgumentType(
                name, self._divisible(value.data_ptr()) + ("S" if self._small(value) else "")
            )
        if is_descriptor(value):
            return ArgumentType(
                f"tensordesc<{element_type(value.base.dtype, self.name)}{list(value.block_shape)}>",
                None,
            )
        if is_constant(value):
            return ArgumentType(CONSTEXPR, value)
        raise CannotLaunchStatically(
            f"argument {self.name!r}: expected a tensor, number, None, tuple or constant, got"
            f" {type(value).__name__}",
            argument=self.name,
            got=type(value).__name__,
        )

    def _small(self, tensor: Any) -> bool:
        return self.backend == "hip" and has_small_range(tensor)


def integer_type(value: int) -> str | None:
    """Return the type that an integer is passed as, None when no type holds it."""
    if -(2**31) <= value < 2**31:
        return "i32"
    if -(2**63) <= value < 2**63:
        return "i64"
    return "u64" if 0 <= value < 2**64 else None


def element_type(dtype: Any, name: str) -> str:
    """Return Triton's name of an element type, which is given as torch gives it.

    Raises:
        CannotLaunchStatically: Triton has no such type; `name` is the argument's.
    """
    found = TYPE_NAMES.get(str(dtype).rpartition(".")[2])
    if found is None:
        raise CannotLaunchStatically(
            f"argument {name!r}: no kernel takes elements of type {dtype}", argument=name
        )
    return found


def is_tensor(value: Any) -> bool:
    """Whether a value is passed by its address."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Whether a value is a tensor descriptor made on the host."""
    return all(hasattr(value, name) for name in ("base", "shape", "strides", "block_shape"))


def is_constant(value: Any) -> bool:
    """Whether a value is one of Triton's that is compiled in: a wrapped constant or a JIT
    function.
    """
    return hasattr(value, "cache_key") or type(value).__name__ == CONSTEXPR


def has_small_range(tensor: Any) -> bool:
    """Whether a tensor's memory is smaller than 2 GiB, as AMD's backend asks."""
    if hasattr(tensor, "ptr_range"):
        return bool(tensor.ptr_range() <= _MAX_POINTER_RANGE)
    storage = getattr(tensor, "untyped_storage", None)
    return storage is not None and bool(storage().size() <= _MAX_POINTER_RANGE)


# ---------------------------------------------------------------------------------------- Constants


def same_constant(recorded: Value, value: Any) -> bool:
    """Whether a value of a call is the constant that a kernel was compiled for; 1, 1.0 and True are
    three constants.

    A Triton type may be given by its name, a JIT function by `module:name`, where Triton itself is
    not there.
    """
    match recorded.tag:
        case "none":
            return value is None
        case "bool" | "str":
            return type(value) is type(recorded.payload) and value == recorded.payload
        case "int":
            return (
                isinstance(value, int)
                and type(value) is not bool
                and value == int(recorded.payload)
            )
        case "float":
            return isinstance(value, float) and struct.pack(">d", value) == recorded.payload
        case "tuple" | "list":
            kind = tuple if recorded.tag == "tuple" else list
            return isinstance(value, kind) and _same_items(recorded.payload, value)
        case "dict":
            return (
                isinstance(value, dict)
                and list(value) == [key for key, _ in recorded.payload]
                and _same_items(tuple(item for _, item in recorded.payload), list(value.values()))
            )
        case _:
            return _same_object(recorded, value)


def _same_items(recorded: tuple[Value, ...], values: Any) -> bool:
    return len(recorded) == len(values) and all(map(same_constant, recorded, values))


def _same_object(recorded: Value, value: Any) -> bool:
    if recorded.tag == "dtype":
        return (isinstance(value, str) or type(value).__name__ == "dtype") and str(
            value
        ) == recorded.payload
    if recorded.tag == "constexpr":
        return type(value).__name__ == CONSTEXPR and same_constant(recorded.payload, value.value)
    if recorded.tag == "jit":
        name, key = recorded.payload
        return bool(
            value == name if isinstance(value, str) else getattr(value, "cache_key", None) == key
        )
    return False  # a value without an encoding: nobody can say whether it is the same
