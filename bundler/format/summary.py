# SPDX-License-Identifier: Apache-2.0
"""Things in one short line: numbers with their noun, and reprs that count what they hold.

`count`, `plural`, `short` and `printable` make texts for the errors and reports of every room; reports and entries derive from `Summarized`
for their repr.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from msgspec import Struct

# With the quotes of a debugger around it, a line of a terminal.
REPR_CHARACTERS = 110
_TEXT_CHARACTERS = 40
_DIGEST = "sha256:"
_DIGEST_CHARACTERS = len(_DIGEST) + 12
_PLURALS = {
    "directory": "directories",
    "helper library": "helper libraries",
    "device binary": "device binaries",
    "is": "are",
    "was": "were",
    "launch": "launches",
    "process": "processes",
    "incomplete bundle, tag or record": "incomplete bundles, tags or records",
}


def plural(number: int, noun: str) -> str:
    """Return a noun or verb in the form that goes with a number."""
    return noun if number == 1 else _PLURALS.get(noun, noun + "s")


def count(number: int, noun: str) -> str:
    """Return `1 kernel`, `22 kernels`."""
    return f"{number:,} {plural(number, noun)}"


def short(text: str) -> str:
    """Return the beginning of a text, or enough of a digest to recognise it."""
    most = _DIGEST_CHARACTERS if text.startswith(_DIGEST) else _TEXT_CHARACTERS
    return text if len(text) <= most else f"{text[:most]}…"


def printable(text: str) -> str:
    """Return text that cannot command a terminal: names in a bundle were chosen by whoever made it."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class Summarized:
    """A dataclass with `repr=False`, or a `Struct`, whose repr is one short line: collections are counted, what is empty is left out."""

    __slots__ = ()

    def __repr__(self) -> str:
        text = f"<{type(self).__name__}"
        for name in shown_fields(self):
            value = getattr(self, name)
            if value is None or value is False or (isinstance(value, (Sized, int, float)) and not value):
                continue
            pair = f" {name}={_brief(value)}"
            if len(text) + len(pair) > REPR_CHARACTERS:
                return f"{text} …>"
            text += pair
        return f"{text}>"

    def _repr_html_(self) -> str:
        from bundler.format.notebook_tables import fields_html  # only notebooks ask

        return fields_html(self)


def shown_fields(thing: Any) -> Iterable[str]:
    """Return the names of the fields that a repr shows."""
    if isinstance(thing, Struct):
        return thing.__struct_fields__
    return [field.name for field in dataclasses.fields(thing) if field.repr]


def _brief(value: Any) -> str:
    if isinstance(value, str):
        return short(printable(value))
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (tuple, list, set, frozenset, bytes, Mapping)):
        return str(len(value))
    return str(value)
