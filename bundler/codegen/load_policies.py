# SPDX-License-Identifier: Apache-2.0
"""`LoadPolicies`: whether the elements that a reduction loads stay in the cache: they do where the kernel loads from the same buffer again.

What comes later is not known when a line is written, so each line gets a mark, and the whole body is decided at the end.  It also says how much less
memory a program would read that held its rows whole.  `kernel_body` asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MARK = re.compile(r"LOAD_(\d+)_AGAIN")


class LoadPolicies:
    """The loads of one kernel, in the order in which they are written."""

    def __init__(self) -> None:
        self._buffers: list[str] = []
        self._read: dict[tuple[str, str], list[int]] = {}

    def load(self, buffer: str) -> str:
        """Count a load; returns the mark that stands for its policy."""
        self._buffers.append(buffer)
        return f"LOAD_{len(self._buffers) - 1}_AGAIN"

    def along_row(self, buffer: str, address: str, size: int) -> None:
        """Count a load of so many bytes for each element of the row."""
        self._read.setdefault((buffer, address), []).append(size)

    def repeated(self, stored: int) -> float:
        """Return how many times as much memory the kernel moves as one that held its rows whole, where it stores so many bytes for each element."""
        every = sum(map(sum, self._read.values())) + stored
        return every / max(1, sum(sizes[0] for sizes in self._read.values()) + stored)

    def decided(self, lines: Sequence[str]) -> list[str]:
        """Return lines with policies in the place of marks."""
        return [_MARK.sub(self._policy, line) for line in lines]

    def _policy(self, mark: re.Match[str]) -> str:
        number = int(mark[1])
        return (
            "evict_last" if self._buffers[number] in self._buffers[number + 1 :] else "evict_first"
        )
