# SPDX-License-Identifier: Apache-2.0
"""`squarified`: rectangles whose areas are amounts, as square as can be.

Source of the rule: M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps" (2000): a row takes the next amount as long as that makes the
worst side ratio in the row no worse.  `report_page.py` draws sizes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle: left, top, width and height, in the units of the area that was given."""

    x: float
    y: float
    width: float
    height: float


def squarified(amounts: Sequence[float], area: Box) -> list[Box]:
    """Return a rectangle for each amount, in the order given.

    Args:
        amounts: more than 0, the largest first.
        area: what they fill together.
    """
    boxes: list[Box] = []
    left = area
    rest = [amount * area.width * area.height / sum(amounts) for amount in amounts]
    while rest:
        side = min(left.width, left.height)
        number = 1
        while number < len(rest) and _worst(rest[: number + 1], side) <= _worst(
            rest[:number], side
        ):
            number += 1
        row, rest = rest[:number], rest[number:]
        boxes += _row(row, left)
        left = _without(sum(row), left)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    if side <= 0:
        return 0.0
    total = sum(row)
    return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))


def _row(row: Sequence[float], left: Box) -> list[Box]:
    """Lay a row along the shorter side of what is left."""
    total, boxes, at = sum(row), [], 0.0
    if left.width >= left.height:
        width = total / left.height
        for amount in row:
            boxes.append(Box(left.x, left.y + at, width, amount / width))
            at += amount / width
    else:
        height = total / left.width
        for amount in row:
            boxes.append(Box(left.x + at, left.y, amount / height, height))
            at += amount / height
    return boxes


def _without(total: float, left: Box) -> Box:
    if left.width >= left.height:
        width = total / left.height
        return Box(left.x + width, left.y, max(0.0, left.width - width), left.height)
    height = total / left.width
    return Box(left.x, left.y + height, left.width, max(0.0, left.height - height))
