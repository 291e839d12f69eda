# SPDX-License-Identifier: Apache-2.0
"""Draws lines over logarithmic axes as an SVG picture, in as little code as that needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN, HEAD = 330, 300, 52, 40
COLORS = ("#1f5fa8", "#c2571a", "#3a7d34", "#7a4a9c")
_HEADER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" font-family="sans-serif" '
    'font-size="11">\n<rect width="{w}" height="{h}" fill="white"/>\n'
)


@dataclass(frozen=True)
class Line:
    """A name and points with x and y above zero; `dashed` for one that was not measured."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A diagram: its title, what the axis below it counts, and its lines."""

    title: str
    below: str
    lines: Sequence[Line]


def draw(panels: Sequence[Panel]) -> str:
    """Return a picture of panels side by side."""
    parts = [_HEADER.format(w=WIDTH * len(panels), h=HEIGHT)]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * number},0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    across = _Axis([x for x, _ in points], MARGIN, WIDTH - 24)
    up = _Axis([y for _, y in points], HEIGHT - MARGIN, HEAD + 16 * len(panel.lines))
    parts = [
        _text(MARGIN, 18, panel.title, "start", "bold"),
        _text((MARGIN + WIDTH) / 2, HEIGHT - 12, panel.below),
    ]
    for value in across.decades:
        x = across.place(value)
        parts += [_stroke(x, up.first, x, up.last, "#ddd"), _text(x, up.first + 16, f"{value:,g}")]
    for value in up.decades:
        y = up.place(value)
        parts += [
            _stroke(across.first, y, across.last, y, "#ddd"),
            _text(MARGIN - 6, y + 4, f"{value:,g}", "end"),
        ]
    for number, line in enumerate(panel.lines):
        color, dash = COLORS[number % len(COLORS)], ' stroke-dasharray="5 4"' if line.dashed else ""
        places = [(across.place(x), up.place(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        if not line.dashed:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places
            ]
        y = HEAD - 4 + 15 * number
        parts += [
            _stroke(MARGIN, y, MARGIN + 18, y, color, dash),
            _text(MARGIN + 24, y + 4, line.name, "start"),
        ]
    return parts


class _Axis:
    """Maps values to places, by whole decades."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.first, self.last = first, last
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self.decades = [10.0**power for power in range(self._low, self._high + 1)]

    def place(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self.first + share * (self.last - self.first)


def _stroke(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
