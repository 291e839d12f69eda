# SPDX-License-Identifier: Apache-2.0
"""Reads the ELF file that a device binary is: `why_unusable` says whether it is whole, `sections`,
`section_named` and `symbol_named` find what is in it, `attributes` reads those of a cubin, and
`amd_kernel` the metadata of an hsaco's kernel.

Everything is read as hostile input: what comes back is bounded, and what is wrong is a
`FormatError`.  `_elf.h` has `why_unusable` in C.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from bundler.errors import FormatError, LimitExceeded
from bundler.format.summary import count

INFO = b".nv.info"  # of all functions; that of one has its name behind a dot
_MAX_SECTIONS = 65536
_MAX_METADATA_BYTES = 1 << 20
_MAX_TEXT_BYTES = 4096

MAGIC = b"\x7fELF"
_CLASS, _CLASS_64 = 4, 2
WITHOUT_BYTES = 8  # SHT_NOBITS: shared memory and the like take no room in the file
# Where the tables of segments and sections begin, and size and number of the rows of each.
_TABLES = struct.Struct("<32xQQ6xHHHH2x")
_SEGMENT_BYTES = struct.Struct("<8xQ16xQ16x")  # offset and size
_SECTION_BYTES = struct.Struct("<4xI16xQQ24x")  # kind, offset and size
_ELF_HEADER = struct.Struct(
    "<40xQ10xHHH"
)  # section table: offset, size of a row, rows, the row that holds the names
_SECTION = struct.Struct("<IIQQQQI20x")
_SYMBOL = struct.Struct("<I2xHQQ")  # name, the section that it lies in, address, size
_SYMBOL_TABLE, _NOTE_SECTION = 2, 7
_NOTE = struct.Struct("<III")  # bytes of the name, bytes of the content, type
_AMD_METADATA = (b"AMDGPU\0", 32)
_ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, a value or the bytes that follow
_SIZED = 4


class ElfSection(NamedTuple):
    """A row of the section table; `name_at` is a place in the bytes that hold the names, `link` the
    row that belongs to this one.
    """

    name_at: int
    kind: int
    flags: int
    address: int
    start: int
    size: int
    link: int


def is_elf64(data: bytes | memoryview) -> bool:
    """Whether a device binary begins as an ELF file of 64 bits."""
    return data[: _CLASS + 1] == MAGIC + bytes([_CLASS_64])


def why_unusable(data: bytes | memoryview) -> str | None:
    """Return what is wrong with a device binary, None when nothing is.

    Only what a broken write does is looked for (empty, another file, the end missing), not whether
    a driver would load it.
    """
    if not data:
        return "empty"
    if data[: len(MAGIC)] != MAGIC:
        return "not an ELF file"
    if len(data) > _CLASS and not is_elf64(data):
        return None  # no vendor of ours makes these; nothing is known against it
    try:
        return "truncated" if len(data) < _end(data) else None
    except (struct.error, OverflowError):  # an offset that no file reaches does not fit the call
        return "truncated"


def _end(data: bytes | memoryview) -> int:
    """Return how many bytes the headers account for; raises `struct.error` when they are not all
    there.
    """
    segments, sections, segment_bytes, segment_count, section_bytes, section_count = (
        _TABLES.unpack_from(data)
    )
    ends = [segments + segment_bytes * segment_count, sections + section_bytes * section_count]
    for offset, size in _rows(_SEGMENT_BYTES, data, segments, segment_bytes, segment_count):
        ends.append(offset + size)
    for kind, offset, size in _rows(_SECTION_BYTES, data, sections, section_bytes, section_count):
        ends.append(offset if kind == WITHOUT_BYTES else offset + size)
    return int(max(ends))


def _rows(
    row: struct.Struct, data: bytes | memoryview, start: int, stride: int, count: int
) -> Iterable[tuple[Any, ...]]:
    # As every linker writes it; fewer rows than there should be show by their missing end.
    if stride == row.size:
        return row.iter_unpack(data[start : start + stride * count])
    return (row.unpack_from(data, start + index * stride) for index in range(count))


def sections(image: bytes) -> tuple[list[ElfSection], int]:
    """Return all sections, and the row of the one that holds their names."""
    table, row_bytes, rows, names_row = _unpacked(_ELF_HEADER, image, 0)
    if rows > _MAX_SECTIONS or row_bytes < _SECTION.size:
        raise FormatError(
            f"the device binary has {count(rows, 'section')} of {count(row_bytes, 'byte')}"
        )
    if table + rows * row_bytes > len(image):
        raise FormatError(
            f"the device binary has {len(image)} bytes, and its sections are said to end at"
            f" {table + rows * row_bytes}"
        )
    if row_bytes == _SECTION.size:  # as every linker writes it
        return [
            *map(ElfSection._make, _SECTION.iter_unpack(image[table : table + rows * row_bytes]))
        ], names_row
    return [
        ElfSection._make(_unpacked(_SECTION, image, table + row * row_bytes)) for row in range(rows)
    ], names_row


def _unpacked(layout: struct.Struct, data: bytes, at: int) -> tuple[Any, ...]:
    """Return what lies at a place, which may be any number of 64 bits; raises `FormatError` where
    it is not all there.
    """
    if at + layout.size > len(data):
        raise FormatError(f"the device binary ends within {layout.size} bytes at {at}")
    return layout.unpack_from(data, at)


def section_named(image: bytes, wanted: bytes) -> bytes | None:
    """Return the bytes of the last section of a name, None when there is none."""
    rows, names_row = sections(image)
    if names_row >= len(rows):
        return None
    names, wanted = content_of(image, rows[names_row]), wanted + b"\0"
    for row in reversed(rows):
        if names.startswith(wanted, row.name_at):
            return content_of(image, row)
    return None


def content_of(image: bytes, row: ElfSection) -> bytes:
    """Return the bytes of a section; fewer than its row says where the binary ends before."""
    return image[row.start : row.start + row.size]


def symbol_named(
    image: bytes, rows: list[ElfSection], wanted: bytes
) -> tuple[int, int, int] | None:
    """Return (number, section, address) of the first symbol of a name in the first table of
    symbols; None when there is none.
    """
    table = next((row for row in rows if row.kind == _SYMBOL_TABLE), None)
    if table is None or table.link >= len(rows):
        return None
    names, wanted = content_of(image, rows[table.link]), wanted + b"\0"
    symbols = content_of(image, table)
    for number, symbol in enumerate(
        _SYMBOL.iter_unpack(symbols[: len(symbols) // _SYMBOL.size * _SYMBOL.size])
    ):
        name_at, section, address, _ = symbol
        if names.startswith(wanted, name_at):
            return number, section, address
    return None


def attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (attribute, the value in its head, the bytes after it) of a section `.nv.info`."""
    _check_length(len(info), "attributes")
    at = 0
    while at < len(info):
        form, attribute, value = _unpacked(_ATTRIBUTE, info, at)
        at += _ATTRIBUTE.size
        size = value if form == _SIZED else 0
        yield attribute, value, info[at : at + size]
        at += size


def amd_kernel(image: bytes, entry: str) -> dict[Any, Any]:
    """Return what an hsaco's metadata say of a kernel; raises `FormatError` when they say
    nothing.
    """
    notes = [row for row in sections(image)[0] if row.kind == _NOTE_SECTION]
    # Together: any number of rows may name the same bytes.
    _check_length(sum(row.size for row in notes), f"metadata of {entry}")
    for row in notes:
        for content in _metadata_notes(content_of(image, row)):
            found = _find_kernel(_unpack(content, entry), entry)
            if found is not None:
                return found
    raise FormatError(f"{entry}: the device binary has no kernel of that name", kernel=entry)


def natural(said: dict[Any, Any], key: str, most: int, entry: str) -> int:
    """Return a figure of an hsaco's metadata; raises `FormatError` when it is no whole number from
    0 to `most`.
    """
    value = said.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise FormatError(f"{entry}: the hsaco has {value!r:.40} for {key}", kernel=entry, key=key)
    return value


def _check_length(size: int, what: str) -> None:
    if size > _MAX_METADATA_BYTES:
        raise LimitExceeded(
            f"the device binary has {count(size, 'byte')} of {what}; at most {_MAX_METADATA_BYTES}"
            " are read",
            limit=_MAX_METADATA_BYTES,
            got=size,
        )


def _metadata_notes(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _NOTE.size <= len(data):
        name_bytes, size, kind = _NOTE.unpack_from(data, at)
        name_at = at + _NOTE.size
        start = name_at + -(-name_bytes // 4) * 4
        if (data[name_at : name_at + name_bytes], kind) == _AMD_METADATA:
            yield data[start : start + size]
        at = start + -(-size // 4) * 4


def _unpack(content: bytes, entry: str) -> Any:
    import msgpack  # a restore, which asks whether binaries are whole, needs none of it

    try:
        return msgpack.unpackb(
            content,
            object_pairs_hook=_unique,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=_MAX_TEXT_BYTES,
            max_ext_len=0,
            # The decoder allocates what a container declares; each member takes a byte at least.
            max_array_len=len(content),
            max_map_len=len(content),
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise FormatError(
            f"{entry}: the metadata of the device binary cannot be read ({error})", kernel=entry
        ) from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _find_kernel(root: Any, entry: str) -> dict[Any, Any] | None:
    kernels = root.get("amdhsa.kernels") if isinstance(root, dict) else None
    for kernel in kernels if isinstance(kernels, list) else ():
        if isinstance(kernel, dict) and kernel.get(".name") == entry:
            return kernel
    return None
