# SPDX-License-Identifier: Apache-2.0
"""`specialization_of`, `told`: what each kernel was specialized for, and which of these facts tell
kernels of one name apart.

The command `inspect` fills its table with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.constant_values import Value
from bundler.format.entries import Kernel
from bundler.format.launch_spec import LaunchFacts, Path
from bundler.format.metadata import parse_metadata

UNKNOWN = "-"
# Limits of a table cell; --json has everything.
_ITEMS, _VALUE_CHARACTERS, _DIGEST_CHARACTERS = 8, 32, 8
_CONSTEXPR, _DIVISIBILITY = "constexpr", "tt.divisibility"
# Options that have columns of their own.
_COUNTED = frozenset({"num_warps", "num_stages"})
# Entries of Triton's metadata that are no options of the compile.
_NO_OPTIONS = frozenset(
    {
        "hash",
        "target",
        "name",
        "shared",
        "tmem_size",
        "global_scratch_size",
        "global_scratch_align",
        "profile_scratch_size",
        "profile_scratch_align",
        "triton_version",
        "tensordesc_meta",
    }
)
_PARTS = {
    "source.text": "source",
    "source.line": "line",
    "source.hash": "dependencies",
    "backend.hash": "ptxas",
}


@dataclass(frozen=True)
class KernelSpecialization:
    """What one kernel was compiled for, as plain data.

    Attributes:
        stages: pipeline stages; None where neither the record nor the metadata says.
        constants: argument -> value; None where the kernel came by pack, since a cache directory
            does not hold them.
        signature: argument -> Triton type, of those that are passed at a launch; None as for
            constants.
        attributes: argument -> what the compiler knew of its value, such as `{"tt.divisibility":
            16}`; None as for constants.
        options: of the compile; None where neither the record nor the metadata says.
    """

    stages: int | None = None
    constants: Mapping[str, Any] | None = None
    signature: Mapping[str, Any] | None = None
    attributes: Mapping[str, Mapping[str, Any]] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SpecializationRow:
    """A specialization in the cells of a table; of kernels that share a name, what differs among
    them.
    """

    stages: str
    constants: str
    signature: str
    other: str


def specialization_of(
    bundle: Bundle, kernel: Kernel
) -> tuple[KernelSpecialization, BundlerError | None]:
    """Return what a kernel was compiled for, and why its metadata, asked for when there is no
    record, cannot be read.
    """
    facts = kernel.launch.facts
    if facts is not None:
        return _recorded(facts), None
    try:
        metadata = parse_metadata(bundle.read(kernel.metadata))
    except BundlerError as error:
        return KernelSpecialization(), error
    options = {name: value for name, value in metadata.items() if name not in _NO_OPTIONS}
    return KernelSpecialization(stages=_stages(options), options=options), None


def told(
    kernels: Sequence[Kernel], specializations: Sequence[KernelSpecialization]
) -> list[SpecializationRow]:
    """Return the cells of each kernel's row."""
    rows: dict[str, SpecializationRow] = {}
    pairs = sorted(zip(kernels, specializations, strict=True), key=lambda pair: _shared(pair[0]))
    for _, same in groupby(pairs, key=lambda pair: _shared(pair[0])):
        group = list(same)
        rows.update(zip((kernel.key for kernel, _ in group), _group(group), strict=True))
    return [rows[kernel.key] for kernel in kernels]


def _recorded(facts: LaunchFacts) -> KernelSpecialization:
    names = [argument.name for argument in facts.arguments] or [name for name, _ in facts.signature]
    options = {name: _plain(value) for name, value in facts.options}
    return KernelSpecialization(
        stages=_stages(options),
        constants={_argument(names, path): _plain(value) for path, value in facts.constants},
        signature={
            name: _plain(kind) for name, kind in facts.signature if kind.plain() != _CONSTEXPR
        },
        attributes={_argument(names, path): _attributes(value) for path, value in facts.attributes},
        options=options or None,
    )


def _stages(options: Mapping[str, Any]) -> int | None:
    stages = options.get("num_stages")
    return stages if type(stages) is int else None


def _argument(names: Sequence[str], path: Path) -> str:
    first, *rest = path or (0,)
    return (names[first] if first < len(names) else str(first)) + "".join(
        f"[{index}]" for index in rest
    )


def _plain(value: Value) -> Any:
    """Return plain data that JSON has too: it knows neither infinities nor NaN."""
    plain = value.plain()
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


def _attributes(value: Value) -> dict[str, Any]:
    plain = value.plain()
    pairs = plain if isinstance(plain, (list, tuple)) else []
    return {
        str(pair[0]): pair[1]
        for pair in pairs
        if isinstance(pair, (list, tuple)) and len(pair) == 2  # noqa: PLR2004
    }


# ------------------------------------------------------------------------- What tells kernels apart

_Pair = tuple[Kernel, KernelSpecialization]


def _shared(kernel: Kernel) -> tuple[str, str]:
    return kernel.name, str(kernel.target)


def _group(group: Sequence[_Pair]) -> list[SpecializationRow]:
    constants = _differing([_constants(one) for _, one in group])
    kinds = _differing([types(one) for _, one in group])
    cells = [
        (
            UNKNOWN if one.stages is None else str(one.stages),
            _items(values, "=") or UNKNOWN,
            (_items(named, ": ") if differ else _runs(named.values())) or UNKNOWN,
        )
        for (_, one), (values, _), (named, differ) in zip(group, constants, kinds, strict=True)
    ]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, ((kernel, _), cell) in enumerate(zip(group, cells, strict=True)):
        alike.setdefault((kernel.spec.num_warps, *cell), []).append(place)
    others = [""] * len(group)
    for places in alike.values():
        for place, (items, differ) in zip(
            places, _differing([_rest(*group[p]) for p in places]), strict=True
        ):
            others[place] = _items(items, "=") if differ else ""
    return [SpecializationRow(*cell, other) for cell, other in zip(cells, others, strict=True)]


def _differing(many: Sequence[Mapping[str, str]]) -> list[tuple[dict[str, str], bool]]:
    """Return of each mapping what is not the same in all, and whether anything differs; if nothing
    does, all of it.
    """
    names = dict.fromkeys(name for one in many for name in one)
    apart = [name for name in names if len({one.get(name) for one in many}) > 1]
    if not apart:
        return [(dict(one), False) for one in many]
    return [({name: one[name] for name in apart if name in one}, True) for one in many]


def _constants(one: KernelSpecialization) -> dict[str, str]:
    return {name: _text(value) for name, value in (one.constants or {}).items()}


def types(one: KernelSpecialization) -> dict[str, str]:
    """Return argument -> `*fp32:16`: its type, and a power of two that divides every value that was
    passed.
    """
    hints = one.attributes or {}
    return {name: _kind(kind, hints.get(name, {})) for name, kind in (one.signature or {}).items()}


def _kind(kind: Any, hints: Mapping[str, Any]) -> str:
    text = kind if isinstance(kind, str) else json.dumps(kind).replace('"', "")
    return f"{text}:{hints[_DIVISIBILITY]}" if _DIVISIBILITY in hints else text


def _rest(kernel: Kernel, one: KernelSpecialization) -> dict[str, str]:
    """Return what else two kernels can differ in: options, other hints, and the parts of their
    keys.
    """
    items = {
        name: _text(value) for name, value in (one.options or {}).items() if name not in _COUNTED
    }
    for argument, hints in (one.attributes or {}).items():
        for name, value in hints.items():
            if name != _DIVISIBILITY:
                items[f"{argument} {name}"] = _text(value)
    if kernel.parts is not None:
        for name, text in kernel.parts.parts:
            if not name.startswith(("option.", "source.constants")):
                items[_PARTS.get(name, name)] = _digest(text)
    return items


def _digest(text: str) -> str:
    plain = text.removeprefix("sha256:")
    hexadecimal = len(plain) == 64 and set(plain) <= set("0123456789abcdef")  # noqa: PLR2004
    return f"{plain[:_DIGEST_CHARACTERS]}…" if hexadecimal else _cut(text)


def _text(value: Any) -> str:
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def _items(items: Mapping[str, str], sign: str) -> str:
    return _first([f"{name}{sign}{text}" for name, text in items.items()])


def _runs(kinds: Iterable[str]) -> str:
    """Return `*fp32:16 x3, i32`: equal neighbors once, with how many they are."""
    runs = [(kind, sum(1 for _ in same)) for kind, same in groupby(kinds)]
    return _first([kind if number == 1 else f"{kind} x{number}" for kind, number in runs])


def _first(texts: list[str]) -> str:
    more = len(texts) - _ITEMS
    return ", ".join(texts if more <= 0 else [*texts[:_ITEMS], f"… {more} more"])
