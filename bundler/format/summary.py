# SPDX-License-Identifier: Apache-2.0
"""Things in one short line, or in a notebook as one short table: numbers with their noun, and reprs
that count what they hold.

`count`, `plural`, `short` and `printable` make texts for the errors and reports of every room;
reports and entries derive from `Summarized` for their repr.  `facts_html` and `html_text` make the
tables of notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from msgspec import Struct

# With the quotes of a debugger around it, a line of a terminal.
REPR_CHARACTERS = 110
_TEXT_CHARACTERS = 40
_DIGEST = "sha256:"
_DIGEST_CHARACTERS = len(_DIGEST) + 12
_ITEMS_SHOWN = 3
# Fields of (name, reason), of which the reasons matter most.
_WITH_REASONS = frozenset(
    {"skipped", "missing", "left_out", "failed", "damaged", "dangling", "unfollowed"}
)
_PAIR = 2
_REASONS_SHOWN = 6
_ITEM_CHARACTERS = 100
# Kernel keys and digests, of which the beginning tells enough in a list.
_LONG_KEY = r"\b(?:[A-Z2-7]{52}|[0-9a-f]{64})\b"
_KEY_CHARACTERS = 12
# Properties of reports that answer the question which the report was asked for.
_VERDICTS = ("sound", "complete", "usable", "sentence")
# How cells of a notebook's table are set, whatever the notebook does with others.
HTML_LEFT = "text-align:left;white-space:nowrap"
HTML_WIDE = "text-align:left;white-space:normal;overflow-wrap:anywhere"
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


def listed(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return words in a line; of many the first, and how many more there are."""
    more = len(words) - most
    return separator.join(words[:most]) + (f" and {more:,} more" if more > 0 else "")


def short(text: str) -> str:
    """Return the beginning of a text, or enough of a digest to recognise it."""
    most = _DIGEST_CHARACTERS if text.startswith(_DIGEST) else _TEXT_CHARACTERS
    return text if len(text) <= most else f"{text[:most]}…"


def printable(text: str) -> str:
    """Return text that cannot command a terminal: names in a bundle were chosen by whoever
    made it.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


class Summarized:
    """A dataclass with `repr=False`, or a `Struct`, whose repr is one short line: collections are
    counted, what is empty is left out.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        text = f"<{type(self).__name__}"
        for name in shown_fields(self):
            value = getattr(self, name)
            if (
                value is None
                or value is False
                or (isinstance(value, (Sized, int, float)) and not value)
            ):
                continue
            pair = f" {name}={_brief(value)}"
            if len(text) + len(pair) > REPR_CHARACTERS:
                return f"{text} …>"
            text += pair
        return f"{text}>"

    def _repr_html_(self) -> str:
        return fields_html(self)


class Reported(Summarized):
    """A report: printed it is a short table of what was done, what was not, and why; its repr stays
    one line.
    """

    __slots__ = ()

    def __str__(self) -> str:
        facts = _facts_of(self) or [("", "nothing")]
        wide = max(len(name) for name, _ in facts)
        rows = [
            f"  {label:{wide}}  {printable(line)}"
            for name, value in facts
            for label, line in zip(
                [name, *[""] * value.count("\n")], value.split("\n"), strict=True
            )
        ]
        return "\n".join([type(self).__name__, *rows])


def shown_fields(thing: Any) -> Iterable[str]:
    """Return the names of the fields that a repr shows."""
    if isinstance(thing, Struct):
        return thing.__struct_fields__
    return [name for name, field in thing.__dataclass_fields__.items() if field.repr]


def _brief(value: Any) -> str:
    if isinstance(value, str):
        return short(printable(value))
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (tuple, list, set, frozenset, bytes, Mapping)):
        return str(len(value))
    return str(value)


# ----------------------------------------------------------------------------- Tables for notebooks


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, below a title."""
    rows = "".join(
        f'<tr><th scope="row" style="{HTML_LEFT};vertical-align:top">{html_text(name)}</th><td'
        f' style="{HTML_WIDE}">{_html_lines(value)}</td></tr>'
        for name, value in facts
    )
    return f"<table>{_caption(title)}<tbody>{rows}</tbody></table>"


def _html_lines(text: str) -> str:
    return "<br>".join(map(html_text, text.split("\n")))


def fields_html(thing: Any) -> str:
    """Return a table of a report's fields; what is empty is left out, and of collections a few
    items are shown.
    """
    return facts_html(type(thing).__name__, _facts_of(thing) or [("", "nothing")])


def _facts_of(thing: Any) -> list[tuple[str, str]]:
    """Return names and texts of what a report says: its verdict, then its fields; what is empty is
    left out.
    """
    verdicts = [(name, getattr(thing, name)) for name in _VERDICTS if hasattr(type(thing), name)]
    fields = [(name, getattr(thing, name)) for name in shown_fields(thing)]
    told = [*verdicts, *((name, value) for name, value in fields if not _is_empty(value))]
    return [
        (name.removesuffix("_s").replace("_", " "), _value(name, value)) for name, value in told
    ]


def _caption(title: str) -> str:
    return f'<caption style="{HTML_LEFT};font-weight:bold">{html_text(title)}</caption>'


def html_text(text: str) -> str:
    """Return text that is no HTML, and that cannot command a terminal either."""
    import html  # only notebooks ask, and every process of a job imports this module

    return html.escape(printable(text))


def _is_empty(value: Any) -> bool:
    return (
        value is None
        or value is False
        or (not isinstance(value, bool) and hasattr(value, "__len__") and not value)
    )


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        figure = f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
        return f"{figure} s" if name.endswith(("seconds", "_s")) else figure
    if isinstance(value, bytes):
        return count(len(value), "byte")
    if isinstance(value, Mapping):
        return _listed([f"{key}: {item}" for key, item in value.items()])
    if name in _WITH_REASONS and all(
        isinstance(item, tuple) and len(item) == _PAIR for item in value
    ):
        return _by_reason(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return _listed(
            [": ".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value]
        )
    return str(value)


def _by_reason(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a line for each reason, the most frequent first: how many things have it, and which,
    as far as there is room.
    """
    named: dict[str, list[str]] = {}
    for name, reason in pairs:
        named.setdefault(reason, []).append(name)
    ordered = sorted(named.items(), key=lambda item: -len(item[1]))
    lines = [
        (
            f"{_listed(names)}: {reason}"
            if len(names) == 1
            else f"{len(names):,}: {reason} ({_listed(names).partition(': ')[2]})"
        )
        for reason, names in ordered[:_REASONS_SHOWN]
    ]
    left = sum(len(names) for _, names in ordered[_REASONS_SHOWN:])
    return "\n".join([*lines, *([f"{left:,} for other reasons"] if left else [])])


def _listed(items: Sequence[str]) -> str:
    """Return the one that there is, or how many there are, and the first of them."""
    items = [re.sub(_LONG_KEY, lambda key: f"{key[0][:_KEY_CHARACTERS]}…", item) for item in items]
    first = ", ".join(
        item if len(item) <= _ITEM_CHARACTERS else short(item) for item in items[:_ITEMS_SHOWN]
    )
    return (
        first
        if len(items) == 1
        else f"{len(items):,}: {first}{', …' if len(items) > _ITEMS_SHOWN else ''}"
    )
