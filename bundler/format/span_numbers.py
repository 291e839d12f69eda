# SPDX-License-Identifier: Apache-2.0
"""`check_spans`, `spans_by_position`: the path sentinels of a kernel's files, as the numbers that content of schema 2 holds.

`content_tables` calls both: the first for every kernel of a bundle that is opened, the second for kernels whose files are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise

from bundler.errors import FormatError
from bundler.format.entry_rows import NUMBERS_PER_SPAN
from bundler.format.lazy_kernel import spans_of
from bundler.format.sentinel import Span
from bundler.format.summary import count

# A file of a kernel that has path sentinels: its position, and then what a span has.
_NUMBERS_PER_FILE_SPAN = NUMBERS_PER_SPAN + 1
# Metadata of one kind of kernel has its path at one of few offsets.
_SPANS_REMEMBERED = 1024


def check_spans(flat: Sequence[int], files: int, key: str) -> None:
    """Check the span numbers of a kernel with so many files; raises `FormatError`."""
    if len(flat) == _NUMBERS_PER_FILE_SPAN and 0 <= flat[0] < files:  # nearly every kernel has one
        return
    positions = flat[::_NUMBERS_PER_FILE_SPAN]
    in_order = all(one <= two for one, two in pairwise(positions))
    if len(flat) % _NUMBERS_PER_FILE_SPAN or positions[0] < 0 or positions[-1] >= files or not in_order:
        raise FormatError(
            f"{key}: {len(flat)} span numbers for {count(files, 'file')}, of files {positions!r:.80}", key=key
        )


@functools.lru_cache(_SPANS_REMEMBERED)
def spans_by_position(flat: tuple[int, ...]) -> Mapping[int, tuple[Span, ...]]:
    """Return the spans of each file that has any, by its position; the numbers were checked."""
    grouped: dict[int, list[int]] = {}
    for start in range(0, len(flat), _NUMBERS_PER_FILE_SPAN):
        position, *numbers = flat[start : start + _NUMBERS_PER_FILE_SPAN]
        grouped.setdefault(position, []).extend(numbers)
    return {position: spans_of(tuple(numbers)) for position, numbers in grouped.items()}
