# SPDX-License-Identifier: Apache-2.0
"""Debug information of a device binary: `debug_sections` names what is there, `without_debug` takes
it out, `constant_texts` finds what asserts say.

A cubin holds the names of source files in `.debug_line` and all of its PTX in `.nv_debug_ptx_txt`;
an hsaco has DWARF.  A driver loads none of these sections: they are emptied, and everything else
stays where it is.  `leaks.py` and `source_stripping.py` call them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from bundler.errors import FormatError
from bundler.format.binaries.device_elf import (
    WITHOUT_BYTES,
    ElfSection,
    content_of,
    is_elf64,
    sections,
)

_PREFIXES = tuple(
    start + name
    for start in (b"", b".rel", b".rela")
    for name in (b".debug", b".nv_debug", b".zdebug")
)
_TEXTS = b".nv.global.init"
_LOADED = 2  # SHF_ALLOC: a driver puts it into memory
_TABLE_AT, _ROW_BYTES_AT = 40, 58  # e_shoff and e_shentsize
_SIZE_AT = 32  # sh_size in a row


def debug_sections(image: bytes) -> tuple[str, ...]:
    """Return the names of debug sections with something in them; none for what is no ELF file of 64
    bits.

    Raises:
        FormatError: the table of sections is not sound.
    """
    if not is_elf64(image):
        return ()
    return tuple(name.decode("ascii", "replace") for _, name, row in _debug_rows(image) if row.size)


def without_debug(image: bytes) -> bytes:
    """Return a device binary whose debug sections are empty; what a driver loads is the same, at
    the same places.

    Raises:
        FormatError: it is no ELF file of 64 bits, or its table of sections is not sound.
    """
    if not is_elf64(image):
        raise FormatError(
            "the device binary is no ELF file of 64 bits, so that its debug information cannot be"
            " found"
        )
    found = [(number, row) for number, _, row in _debug_rows(image) if row.size]
    if not found:
        return image
    (table,), (stride,) = (
        struct.unpack_from("<Q", image, _TABLE_AT),
        struct.unpack_from("<H", image, _ROW_BYTES_AT),
    )
    kept = [
        row
        for row in sections(image)[0]
        if row not in [gone for _, gone in found] and row.kind != WITHOUT_BYTES
    ]
    # Rows say where other sections lie: one that says the same of debug information would lose its
    # bytes.
    spans = [(row.start, row.start + row.size) for row in kept if row.size]
    spans += [(table, table + stride * len(sections(image)[0])), (0, 64)]
    out = bytearray(image)
    for number, row in found:
        end = row.start + row.size
        if end > len(image) or any(row.start < stop and start < end for start, stop in spans):
            raise FormatError(
                "the device binary has debug information in the place of something else"
            )
        out[row.start : end] = bytes(row.size)
        struct.pack_into("<Q", out, table + stride * number + _SIZE_AT, 0)
    return bytes(out)


def constant_texts(image: bytes) -> tuple[tuple[int, int], ...]:
    """Return where the sections begin and end in which a cubin keeps the texts of its asserts and
    prints; raises as `debug_sections`.
    """
    return tuple(
        (row.start, row.start + row.size) for _, name, row in _named_rows(image) if name == _TEXTS
    )


def _debug_rows(image: bytes) -> Iterator[tuple[int, bytes, ElfSection]]:
    """Yield number, name and row of each section that is debug information, or tells a linker how
    to move it.
    """
    for number, name, row in _named_rows(image):
        if name.startswith(_PREFIXES) and not row.flags & _LOADED:
            yield number, name, row


def _named_rows(image: bytes) -> Iterator[tuple[int, bytes, ElfSection]]:
    rows, names_row = sections(image)
    if names_row >= len(rows):
        raise FormatError("the device binary's sections have no names")
    names = content_of(image, rows[names_row])
    for number, row in enumerate(rows):
        yield number, names[row.name_at : max(names.find(b"\0", row.name_at), row.name_at)], row
