# SPDX-License-Identifier: Apache-2.0
"""`to_bytes`, `to_seconds`, `to_grace`: sizes and durations as options: `500MB`, `2GiB`, `36h`,
`7d`.

The command `prune` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import click

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]*)", re.IGNORECASE | re.ASCII)

_Callback = Callable[[click.Context, click.Parameter, str | None], int | None]


def _quantity(what: str, units: Mapping[str, int], expected: str) -> _Callback:
    """Return an option's callback that makes a number of the smallest unit of its text; anything
    else is a usage error.
    """

    def convert(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
        if text is None:
            return None
        match = _QUANTITY.fullmatch(text)
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise click.BadParameter(f"{text!r} is not a {what}; write {expected}")
        return round(float(match[1]) * factor)

    return convert


to_bytes = _quantity("size", _BYTES, "500MB, 2GiB or a number of bytes")
to_seconds = _quantity("duration", _SECONDS, "90s, 30min, 36h, 7d or 2w")
# Where a plain number can only mean seconds.
to_grace = _quantity(
    "duration", {"": 1, **_SECONDS}, "a number of seconds, 90s, 30min, 36h, 7d or 2w"
)
