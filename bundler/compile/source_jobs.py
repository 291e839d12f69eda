# SPDX-License-Identifier: Apache-2.0
"""`source_job`: a kernel's source text and what is known of it, as a `Job`; nothing is imported here, only in the worker.

`CompileService.source` makes one of what its caller gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bundler.compile.compile_job import Job, SourceRef
from bundler.errors import ConfigError
from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.format.launch_spec import Named
from bundler.toolchain.encoding import encode_value

_NEEDED = frozenset({"signature", "target"})
_KNOWN = _NEEDED | {"constants", "attributes", "options", "function"}
_ALIGNED = "tt.divisibility"


def source_job(name: str, text: Any, meta: Any) -> Job:
    """Return the job of compiling one kernel of a module's text.

    Args:
        name: the kernel's, and of its function unless `meta` names another.
        text: a Python module.
        meta: see `CompileService.source`.

    Raises:
        ConfigError: something is missing, unknown or of the wrong type; or a value cannot be sent to a worker.
    """
    if not isinstance(meta, Mapping) or not _NEEDED <= meta.keys() <= _KNOWN:
        given = sorted(meta) if isinstance(meta, Mapping) else repr(meta)[:80]
        raise ConfigError(
            f"{name}: meta has {given}; expected {', '.join(sorted(_NEEDED))}, and perhaps "
            f"{', '.join(sorted(_KNOWN - _NEEDED))}",
            name=name,
        )
    parts = {
        part: meta.get(part) or {} for part in ("signature", "constants", "attributes", "options")
    }
    odd = [part for part, value in parts.items() if not _is_named(value)]
    if odd or not isinstance(text, str):
        raise ConfigError(
            f"{name}: {odd[0] if odd else 'the source'} is not of its type; names map to values",
            name=name,
        )
    places = {argument: number for number, argument in enumerate(parts["signature"])}
    return Job(
        name,
        SourceRef("text", str(meta.get("function", name)), data=text.encode()),
        tuple((argument, _type(kind, name)) for argument, kind in parts["signature"].items()),
        tuple(
            ((_place(places, argument, name),), _value(value, argument, name))
            for argument, value in parts["constants"].items()
        ),
        tuple(
            ((_place(places, argument, name),), _attribute(value, argument, name))
            for argument, value in parts["attributes"].items()
        ),
        _named(parts["options"], name),
        _target(meta["target"], name),
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _place(places: Mapping[str, int], argument: str, name: str) -> int:
    if argument not in places:
        raise ConfigError(
            f"{name}: {argument!r} is not in the signature, which lists every parameter of the function in order; a constant's "
            "type there is 'constexpr'",
            name=argument,
        )
    return places[argument]


def _type(kind: Any, name: str) -> Value:
    if isinstance(kind, tuple):
        return Value("tuple", tuple(_type(item, name) for item in kind))
    if not isinstance(kind, str):
        raise ConfigError(
            f"{name}: a type is a text such as '*fp16', or a tuple of types, got {kind!r:.80}",
            got=repr(kind),
        )
    return Value("str", kind)


def _attribute(value: Any, argument: str, name: str) -> Value:
    # A number is what users know: by how many bytes an address, or by which number a size, can be divided.
    return _value([[_ALIGNED, value]] if type(value) is int else value, argument, name)


def _named(values: Mapping[str, Any], name: str) -> Named:
    return tuple((option, _value(value, option, name)) for option, value in values.items())


def _value(value: Any, what: str, name: str) -> Value:
    found = encode_value(value)
    if not found.portable:
        raise ConfigError(
            f"{name}: the value of {what!r} cannot be sent to a worker: {found.payload}", name=what
        )
    return found


def _target(target: Any, name: str) -> Target:
    try:
        return target if isinstance(target, Target) else Target.parse(str(target))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", got=str(target)) from error
