# SPDX-License-Identifier: Apache-2.0
"""`bundle_html`, `fields_html`, `facts_html`: bundles, reports and recordings as short tables of HTML, which notebooks show.

`_repr_html_` of `Bundle`, `Summarized` and `Recording` calls them.  All text is escaped: names in a bundle were chosen by whoever made it.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bundler.format.summary import count, printable, short, shown_fields

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle
    from bundler.format.entries import Kernel

# A notebook's output is read at one glance.
KERNELS_SHOWN = 12
_ITEMS_SHOWN = 3
_ITEM_CHARACTERS = 100
_KEY_CHARACTERS = 12
# Kernel keys and digests, of which the beginning tells enough in a list.
_LONG_KEY = re.compile(r"\b(?:[A-Z2-7]{52}|[0-9a-f]{64})\b")
# Properties of reports that answer the question which the report was asked for.
_VERDICTS = ("sound", "complete", "usable", "sentence")
_US_OF_MS = 1000
_LEFT, _RIGHT = "text-align:left;white-space:nowrap", "text-align:right;white-space:nowrap"
_WIDE = "text-align:left;white-space:normal;overflow-wrap:anywhere"
_COLUMNS = ("kernel", "target", "warps", "shared memory", "binary", "compiled in", "key")
_NUMERIC = frozenset({2, 3, 4, 5})


def facts_html(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values, below a title."""
    rows = "".join(
        f'<tr><th scope="row" style="{_LEFT};vertical-align:top">{_text(name)}</th><td style="{_WIDE}">{_text(value)}</td></tr>'
        for name, value in facts
    )
    return f"<table>{_caption(title)}<tbody>{rows}</tbody></table>"


def fields_html(thing: Any) -> str:
    """Return a table of a report's fields; what is empty is left out, and of collections a few items are shown."""
    verdicts = [(name, getattr(thing, name)) for name in _VERDICTS if hasattr(type(thing), name)]
    fields = [(name, getattr(thing, name)) for name in shown_fields(thing)]
    told = [*verdicts, *((name, value) for name, value in fields if not _is_empty(value))]
    facts = [(name.removesuffix("_s").replace("_", " "), _value(name, value)) for name, value in told]
    return facts_html(type(thing).__name__, facts or [("", "nothing")])


def bundle_html(bundle: Bundle) -> str:
    """Return what is in a bundle: its digest, kernels by target, what is beside them, and a table of the first kernels."""
    targets = Counter(str(kernel.target) for kernel in bundle.kernels)
    beside = (
        ("tuning file", bundle.tuning_files),
        ("helper library", bundle.helpers),
        ("opaque file", bundle.opaque),
        ("tuning record", bundle.tuning_records),
    )
    facts = [
        ("digest", bundle.digest),
        ("kernels", ", ".join(f"{number:,} for {target}" for target, number in sorted(targets.items())) or "none"),
        ("files", count(sum(size for _, size in bundle.content.blobs), "byte")),
    ]
    others = [count(len(entries), noun) for noun, entries in beside if entries]
    facts += [("beside them", ", ".join(others))] if others else []
    table = facts_html("Bundle", facts)
    if not bundle.kernels:
        return table
    head = "".join(f'<th scope="col" style="{_align(n)}">{_text(title)}</th>' for n, title in enumerate(_COLUMNS))
    rows = "".join(_row(_cells(bundle, kernel)) for kernel in bundle.kernels[:KERNELS_SHOWN])
    left = len(bundle.kernels) - KERNELS_SHOWN
    more = f"<p>and {count(left, 'more kernel')}</p>" if left > 0 else ""
    return f"{table}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _cells(bundle: Bundle, kernel: Kernel) -> Sequence[str]:
    seen = bundle.observed.kernels.get(kernel.key)
    spent_us = sum(us for _, us in seen.times_us) if seen is not None else 0
    return (
        kernel.name,
        str(kernel.target),
        f"{kernel.spec.num_warps}",
        f"{kernel.spec.shared_bytes:,}",
        f"{kernel.binary.size:,}",
        f"{spent_us / _US_OF_MS:,.0f} ms" if spent_us else "-",
        f"{kernel.key[:_KEY_CHARACTERS]}…",
    )


def _row(cells: Iterable[str]) -> str:
    told = "".join(f'<td style="{_align(n)}">{_text(cell)}</td>' for n, cell in enumerate(cells))
    return f"<tr>{told}</tr>"


def _align(column: int) -> str:
    return _RIGHT if column in _NUMERIC else _WIDE if column == 0 else _LEFT


def _caption(title: str) -> str:
    return f'<caption style="{_LEFT};font-weight:bold">{_text(title)}</caption>'


def _text(text: str) -> str:
    return html.escape(printable(text))


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (not isinstance(value, bool) and hasattr(value, "__len__") and not value)


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
    if isinstance(value, (tuple, list, set, frozenset)):
        return _listed([": ".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value])
    return str(value)


def _listed(items: Sequence[str]) -> str:
    """Return the one that there is, or how many there are, and the first of them."""
    items = [_LONG_KEY.sub(lambda key: f"{key[0][:_KEY_CHARACTERS]}…", item) for item in items]
    first = ", ".join(item if len(item) <= _ITEM_CHARACTERS else short(item) for item in items[:_ITEMS_SHOWN])
    return first if len(items) == 1 else f"{len(items):,}: {first}{', …' if len(items) > _ITEMS_SHOWN else ''}"
