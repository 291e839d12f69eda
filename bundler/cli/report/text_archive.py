# SPDX-License-Identifier: Apache-2.0
"""`TextArchive`: the texts of thousands of kernels in little space, such that a browser can unpack
any of them.

Kernels share most of their lines.  Each line is kept once, and a text is a list of runs of lines
that followed one another before; both are deflated, since that is what every browser inflates.
`report_page.py` fills it, `page/report.js` reads it.
"""

from __future__ import annotations

import array
import base64
import sys
import zlib

from msgspec import Struct

_LEVEL = 9


class PackedTexts(Struct, frozen=True):
    """An archive as the page holds it.

    Attributes:
        lines: base64 of the deflated lines, each ended by a newline.
        runs: base64 of the deflated runs: little-endian 32-bit pairs of first line and number of
            lines.
    """

    lines: str
    runs: str


class TextArchive:
    """Texts, added one by one; those of one kernel after another's compress best."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._runs = array.array("I")

    def add(self, text: str) -> tuple[int, int]:
        """Add a text, and return where its runs begin and how many there are."""
        begin = len(self._runs) // 2
        first = last = -2
        for line in text.split("\n"):
            number = self._lines.setdefault(line, len(self._lines))
            if number == last + 1:
                last = number
                continue
            if last >= 0:
                self._runs.extend((first, last - first + 1))
            first = last = number
        self._runs.extend((first, last - first + 1))
        return begin, len(self._runs) // 2 - begin

    def pack(self) -> PackedTexts:
        """Return everything that was added."""
        runs = self._runs[:]
        if sys.byteorder == "big":
            runs.byteswap()
        lines = "".join(f"{line}\n" for line in self._lines)
        # A lone surrogate has no UTF-8; texts of kernels are decoded such that they hold none.
        return PackedTexts(_packed(lines.encode()), _packed(runs.tobytes()))


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode()
