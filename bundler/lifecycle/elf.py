# SPDX-License-Identifier: Apache-2.0
"""Tells whether a device binary has lost its end: its ELF header says how long it has to be.
Called before a kernel is written, read or loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from operator import add
from typing import Any

MAGIC = b"\x7fELF"
_CLASS, _CLASS_64 = 4, 2
_SECTION_WITHOUT_BYTES = 8  # SHT_NOBITS: shared memory and the like take no room in the file
_HEADER = struct.Struct("<32xQQ6xHHHH2x")
_SEGMENT = struct.Struct("<8xQ16xQ16x")
_SECTION = struct.Struct("<4xI16xQQ24x")
# Tables of so many rows are looked at as a whole; a cubin has two dozen sections.
_ROWS_AT_ONCE = 256


def why_unusable(data: bytes | memoryview) -> str | None:
    """Return what is wrong with a device binary, None when nothing is.

    Only what a broken write does is looked for (empty, another file, the end missing), not whether
    a driver would load it.
    """
    if not data:
        return "empty"
    if data[: len(MAGIC)] != MAGIC:
        return "not an ELF file"
    if len(data) > _CLASS and data[_CLASS] != _CLASS_64:
        return None  # no vendor of ours makes these; nothing is known against it
    try:
        end = _bound(data)
        if end > len(data):
            end = _end(data)
    except (
        struct.error,
        OverflowError,
    ):  # an offset that no file reaches does not even fit the call
        return "truncated"
    return "truncated" if len(data) < end else None


def _bound(data: bytes | memoryview) -> int:
    """Return what `_end` does, or more: also sections that take no room in the file count, which is
    found out quicker.
    """
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = (
        _HEADER.unpack_from(data)
    )
    odd = segment_bytes != _SEGMENT.size or section_bytes != _SECTION.size
    if odd or max(segment_count, section_count) > _ROWS_AT_ONCE:
        return len(data) + 1
    rows = _segment_rows(segment_count).unpack_from(data, segments)
    rows += _section_rows(section_count).unpack_from(data, sections)
    tables = (segments + segment_bytes * segment_count, sections + section_bytes * section_count)
    return int(max(*tables, *map(add, rows[::2], rows[1::2])))


@lru_cache(_ROWS_AT_ONCE)
def _segment_rows(count: int) -> struct.Struct:
    """Offset and size of each segment."""
    return struct.Struct("<" + "8xQ16xQ16x" * count)


@lru_cache(_ROWS_AT_ONCE)
def _section_rows(count: int) -> struct.Struct:
    """Offset and size of each section."""
    return struct.Struct("<" + "24xQQ24x" * count)


def _end(data: bytes | memoryview) -> int:
    """Return how many bytes the headers account for; raises `struct.error` when they are not all
    there.
    """
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = (
        _HEADER.unpack_from(data)
    )
    segment_ends = [
        offset + size
        for offset, size in _rows(_SEGMENT, data, segments, segment_bytes, segment_count)
    ]
    section_ends = [
        offset if kind == _SECTION_WITHOUT_BYTES else offset + size
        for kind, offset, size in _rows(_SECTION, data, sections, section_bytes, section_count)
    ]
    tables = (segments + segment_bytes * segment_count, sections + section_bytes * section_count)
    return int(max(*tables, *segment_ends, *section_ends))


def _rows(
    row: struct.Struct, data: bytes | memoryview, start: int, stride: int, count: int
) -> Iterable[tuple[Any, ...]]:
    if (
        stride == row.size
    ):  # as every linker writes it; fewer rows than there should be show by their missing end
        return row.iter_unpack(data[start : start + stride * count])
    return (row.unpack_from(data, start + index * stride) for index in range(count))
