# SPDX-License-Identifier: Apache-2.0
"""Values that a kernel was specialized on, as data that any reader can take apart and none
executes.

A value is `(tag, payload)`:

===========  =============================================================
tag          payload
===========  =============================================================
none         None
bool         bool
int          int, or its decimal text when it does not fit 64 bits
float        8 bytes, IEEE 754 big-endian (keeps infinities, NaNs and -0)
str          str
tuple, list  tuple of values
dict         tuple of (key text, value), in the original order
dtype        name of a Triton type, such as `fp16`
constexpr    the wrapped value
jit          (module:qualified name, cache key) of a JIT function
other        name of a type that has no encoding: not portable
===========  =============================================================

`encode` makes a `Value` of a Python object.  `bundler/toolchain` calls it when a compile is
recorded; the launcher and the build service read values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bundler.errors import FormatError
from bundler.format import wire

INT_MIN, INT_MAX = -(2**63), 2**64 - 1
_DOUBLE_BYTES = 8
_MAX_DECIMALS = 400  # more than any constant a kernel was specialized on
_MAX_BITS = 1300  # of an integer with fewer decimals than that
_NESTED = {"tuple", "list"}
# Tags whose payload is valid as soon as its type is.
_PLAIN = {"none": type(None), "bool": bool, "int": int, "str": str, "dtype": str, "other": str}
_TAGS = (
    "none",
    "bool",
    "int",
    "float",
    "str",
    "tuple",
    "list",
    "dict",
    "dtype",
    "constexpr",
    "jit",
    "other",
)


@dataclass(frozen=True, slots=True)
class Value:
    """One tagged value; `tag` and `payload` as in the table of this module."""

    tag: str
    payload: Any = None

    @property
    def portable(self) -> bool:
        """Whether another process can build the value again from this encoding alone."""
        return all(value.tag != "other" for value in self.walk())

    def walk(self) -> Iterator[Value]:
        """Yield this value and every value inside it."""
        yield self
        if self.tag in _NESTED:
            for item in self.payload:
                yield from item.walk()
        elif self.tag == "dict":
            for _, item in self.payload:
                yield from item.walk()
        elif self.tag == "constexpr":
            yield from self.payload.walk()

    def plain(self) -> Any:
        """Return the value as plain Python data; a type, JIT function or unknown object becomes its
        name.
        """
        if self.tag == "int":
            return int(self.payload)
        if self.tag == "float":
            return struct.unpack(">d", self.payload)[0]
        if self.tag == "tuple":
            return tuple(item.plain() for item in self.payload)
        if self.tag == "list":
            return [item.plain() for item in self.payload]
        if self.tag == "dict":
            return {key: item.plain() for key, item in self.payload}
        if self.tag == "constexpr":
            return self.payload.plain()
        if self.tag == "jit":
            return self.payload[0]
        return self.payload

    def to_wire(self) -> list[Any]:
        """Return the positional form that goes into msgpack."""
        if self.tag in _NESTED:
            return [self.tag, [item.to_wire() for item in self.payload]]
        if self.tag == "dict":
            return [self.tag, [[key, item.to_wire()] for key, item in self.payload]]
        if self.tag == "constexpr":
            return [self.tag, self.payload.to_wire()]
        return [self.tag, list(self.payload) if self.tag == "jit" else self.payload]

    @staticmethod
    def from_wire(data: Any) -> Value:
        """Build a value from its positional form; raises `FormatError` for anything else."""
        tag, payload = wire.pair(data, "value")
        if _PLAIN.get(tag) is type(payload):
            return Value(tag, payload)  # the common case, quickly
        if tag not in _TAGS:
            raise FormatError(f"value: unknown tag {tag!r}", got=tag)
        if tag in _NESTED:
            return Value(
                tag, tuple(Value.from_wire(item) for item in wire.expect(payload, list, "value"))
            )
        if tag == "dict":
            pairs = [
                wire.fields(pair, "dict value", str, object)
                for pair in wire.expect(payload, list, "value")
            ]
            return Value(tag, tuple((key, Value.from_wire(item)) for key, item in pairs))
        if tag == "constexpr":
            return Value(tag, Value.from_wire(payload))
        return Value(tag, _scalar(tag, payload))


def is_plain(tag: str, payload: Any) -> bool:
    """Tell whether these are tag and payload of a value that holds no other."""
    return _PLAIN.get(tag) is type(payload)


def value_of_pair(tag: str, payload: Any) -> Value:
    """Build a value from the members of its positional form; raises `FormatError` for anything
    else.
    """
    return (
        Value(tag, payload) if _PLAIN.get(tag) is type(payload) else Value.from_wire([tag, payload])
    )


def _scalar(tag: str, payload: Any) -> Any:
    if tag == "jit":
        return tuple(wire.fields(payload, "jit value", str, str))
    if tag == "int" and isinstance(payload, str):
        if not payload.removeprefix("-").isdecimal() or len(payload) > _MAX_DECIMALS:
            raise FormatError(f"value: not a decimal number: {payload!r}", got=payload)
        return payload
    expected = {"none": type(None), "bool": bool, "int": int, "float": bytes}.get(tag, str)
    if type(payload) is not expected or (
        isinstance(payload, bytes) and len(payload) != _DOUBLE_BYTES
    ):
        raise FormatError(
            f"value: tag {tag!r} with a payload of type {type(payload).__name__}", got=tag
        )
    return payload


def encode(obj: Any) -> Value:
    """Encode plain Python data; any other object becomes `other` with the name of its type.

    The types of Triton (dtype, constexpr, JIT function) are encoded by `toolchain.encoding`, which
    knows them.
    """
    if obj is None:
        return Value("none")
    if type(obj) is bool:
        return Value("bool", obj)
    if type(obj) is int and obj.bit_length() <= _MAX_BITS:
        return Value("int", obj if INT_MIN <= obj <= INT_MAX else str(obj))
    if type(obj) is float:
        return Value("float", struct.pack(">d", obj))
    if type(obj) is str:
        return Value("str", obj)
    return encode_container(obj, encode)


def encode_container(obj: Any, encode_item: Any) -> Value:
    """Encode a tuple, list or dict with text keys, members by `encode_item`; `other` for anything
    else.
    """
    if isinstance(obj, tuple):
        return Value("tuple", tuple(encode_item(item) for item in obj))
    if type(obj) is list:
        return Value("list", tuple(encode_item(item) for item in obj))
    if type(obj) is dict and all(type(key) is str for key in obj):
        return Value("dict", tuple((key, encode_item(item)) for key, item in obj.items()))
    return Value("other", f"{type(obj).__module__}.{type(obj).__qualname__}")
