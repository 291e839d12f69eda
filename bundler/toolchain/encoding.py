# SPDX-License-Identifier: Apache-2.0
"""`encode_value`, `render`: values of Triton's own types as tagged data, and as the text that
stands in a key part.

Whatever records a compile or a config encodes its values here; `portable_value` replaces Triton's
install directory in them.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from typing import Any

from bundler.format.constant_values import Value, encode
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.sentinel import PLACEHOLDERS, TRITON_DIR
from bundler.toolchain.identity import triton_dir

TRITON_DIR_TEXT = PLACEHOLDERS[TRITON_DIR].decode()
# Launch facts hold a value inside three arrays, and the content of its innermost array counts as a
# level too.
_VALUE_DEPTH = DEFAULT_LIMITS.depth - 4
# The text of an object without an encoding may hold a memory address, which differs in each
# process.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def encode_value(obj: Any) -> Value:
    """Encode plain data and Triton's types (dtype, constexpr, JIT function); anything else becomes
    `other`.

    What cannot be decoded again, because it is nested or long beyond the format's limits, becomes
    `other` too.  No code of `obj` runs, except a JIT function's own cache key, which Triton
    computes for the same compile.
    """
    value = _encode(obj)
    return (
        value
        if _fits(value.to_wire(), _VALUE_DEPTH)
        else Value("other", f"{_type_name(obj)}, too large")
    )


def encode_type(kind: Any) -> Value:
    """Encode the type of an argument: a text, or a tuple of types.

    The type of a named tuple argument is a named tuple of types; a launch needs the types alone.
    """
    if isinstance(kind, tuple):
        return Value("tuple", tuple(map(encode_type, kind)))
    return encode_value(str(kind))


def as_tuples(value: Any) -> Any:
    """Undo what JSON did to tuples, which options and tuning keys are made of."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def _encode(obj: Any) -> Value:
    special = _encode_triton(obj)
    if special is not None:
        return special
    if type(obj) in {tuple, list}:
        return Value(type(obj).__name__, tuple(_encode(item) for item in obj))
    if type(obj) is dict and all(type(key) is str for key in obj):
        return Value("dict", tuple((key, _encode(item)) for key, item in obj.items()))
    if isinstance(obj, (tuple, dict)):
        # A named tuple is not the plain tuple with the same members: kernels use its names, and
        # Triton's key has them.
        return Value("other", _type_name(obj))
    return encode(obj)


def _encode_triton(obj: Any) -> Value | None:
    core: Any = sys.modules.get("triton.language.core")
    if core is not None and isinstance(obj, core.constexpr):
        return Value("constexpr", _encode(obj.value))
    if core is not None and type(obj) is core.dtype:
        return Value("dtype", str(obj))
    callables: Any = getattr(sys.modules.get("triton.runtime.jit"), "JITCallable", None)
    if callables is not None and isinstance(obj, callables):
        return Value("jit", (f"{obj.__module__}:{obj.__qualname__}", obj.cache_key))
    return None


def _type_name(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _fits(wire: Any, depth: int) -> bool:
    if isinstance(wire, list):
        return depth >= 0 and all(_fits(item, depth - 1) for item in wire)
    if isinstance(wire, str):
        return _encodable_bytes(wire) <= DEFAULT_LIMITS.string_bytes
    return True


def _encodable_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # a path with bytes that are not UTF-8
        return sys.maxsize


def portable_text(text: str) -> str:
    """Return `text` with Triton's install directory replaced by its placeholder."""
    directory = triton_dir()
    return text if directory is None else text.replace(directory + "/", TRITON_DIR_TEXT + "/")


def portable_value(obj: Any) -> Any:
    """Return plain data with Triton's install directory replaced in each text of it."""
    if type(obj) is str:
        return portable_text(obj)
    if type(obj) in {tuple, list}:
        return type(obj)(portable_value(item) for item in obj)
    if type(obj) is dict:
        return {key: portable_value(item) for key, item in obj.items()}
    return obj


def render(value: Value, obj: Any = None) -> str:
    """Return a value as the text of a key part: the same in every process, and another for another
    value.

    Args:
        value: the encoded value.
        obj: the object that it encodes; tells objects without an encoding apart where their own
            text is stable.
    """
    match value.tag:
        case "jit":
            name, key = value.payload
            # without the module: the same file is `__main__` when run and has its name when
            # imported
            return f"{name.partition(':')[2]}#{key}"
        case "float":
            return repr(struct.unpack(">d", value.payload)[0])
        case "tuple" | "list" | "dict" | "constexpr":
            return _render_nested(value, obj)
        case "other":
            return _render_other(value, obj)
        case "dtype":
            return str(value.payload)
        case _:
            return repr(value.plain())


def _render_nested(value: Value, obj: Any) -> str:
    if value.tag == "constexpr":
        return f"constexpr[{render(value.payload, getattr(obj, 'value', None))}]"
    if value.tag == "dict":
        inner = ", ".join(
            f"{key}: {render(item, (obj or {}).get(key))}" for key, item in value.payload
        )
        return f"{{{inner}}}"
    objects = obj if obj is not None else [None] * len(value.payload)
    inner = ", ".join(
        render(item, member) for item, member in zip(value.payload, objects, strict=True)
    )
    return f"[{inner}]" if value.tag == "list" else f"({inner})"


def _render_other(value: Value, obj: Any) -> str:
    text = "" if obj is None else str(obj)
    if not text or _ADDRESS.search(text):
        return f"<{value.payload}>"
    return f"<{value.payload} {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}>"
