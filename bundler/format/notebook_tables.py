# SPDX-License-Identifier: Apache-2.0
"""`bundle_html`: what is in a bundle as short tables of HTML, which notebooks show; `Bundle` calls
it.

All text is escaped by `html_text`: names in a bundle were chosen by whoever made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bundler.format.entries import Kernel
from bundler.format.manifest import Content, Observed
from bundler.format.summary import HTML_LEFT, HTML_WIDE, count, facts_html, html_text

# A notebook's output is read at one glance.
KERNELS_SHOWN = 12
_KEY_CHARACTERS = 12
_US_OF_MS = 1000
_RIGHT = "text-align:right;white-space:nowrap"
_COLUMNS = ("kernel", "target", "warps", "shared memory", "binary", "compiled in", "key")
_NUMERIC = frozenset({2, 3, 4, 5})


def bundle_html(
    digest: str, content: Content, observed: Observed, beside: Sequence[tuple[str, int]]
) -> str:
    """Return what is in a bundle: its digest, kernels by target, what is beside them, and a table
    of the first kernels.

    Args:
        digest, content, observed: of the bundle.
        beside: what else it holds, each kind with how many of it.
    """
    targets = Counter(str(kernel.target) for kernel in content.kernels)
    facts = [
        ("digest", digest),
        (
            "kernels",
            ", ".join(f"{number:,} for {target}" for target, number in sorted(targets.items()))
            or "none",
        ),
        ("files", count(sum(size for _, size in content.blobs), "byte")),
    ]
    others = [count(number, noun) for noun, number in beside if number]
    facts += [("beside them", ", ".join(others))] if others else []
    table = facts_html("Bundle", facts)
    if not content.kernels:
        return table
    head = "".join(
        f'<th scope="col" style="{_align(n)}">{html_text(title)}</th>'
        for n, title in enumerate(_COLUMNS)
    )
    rows = "".join(_row(_cells(observed, kernel)) for kernel in content.kernels[:KERNELS_SHOWN])
    left = len(content.kernels) - KERNELS_SHOWN
    more = f"<p>and {count(left, 'more kernel')}</p>" if left > 0 else ""
    return f"{table}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _cells(observed: Observed, kernel: Kernel) -> Sequence[str]:
    seen = observed.kernels.get(kernel.key)
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
    told = "".join(
        f'<td style="{_align(n)}">{html_text(cell)}</td>' for n, cell in enumerate(cells)
    )
    return f"<tr>{told}</tr>"


def _align(column: int) -> str:
    return _RIGHT if column in _NUMERIC else HTML_WIDE if column == 0 else HTML_LEFT
