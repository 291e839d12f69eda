# SPDX-License-Identifier: Apache-2.0
"""`read_layout`: reads out of a device binary where its kernel expects each parameter, for `plan_builder`.

A cubin says it in the section `.nv.info.ENTRY`, a list of attributes; an hsaco in a note, a msgpack map.  Both are read
as hostile input: what comes back is a layout or a `FormatError`.  `tuning/occupancy.py` reads registers from the same places.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from bundler.errors import FormatError, LimitExceeded
from bundler.format.summary import count
from bundler.lifecycle.elf import why_unusable

MAX_PARAMETERS = 4096  # a parameter has a byte at least, and a kernel takes 4 KiB of them, 32 KiB on the newest chips
MAX_BUFFER_BYTES = 32764
_MAX_SECTIONS = 65536
_MAX_METADATA_BYTES = 1 << 20
_MAX_TEXT_BYTES = 4096
# What a kernel declares is some hundred bytes; more is not kept in memory to be compared with.
_MAX_KNOWN_BYTES = 2048

_ELF_HEADER = struct.Struct("<40xQ10xHHH")  # section table: offset, size of a row, rows, the row that holds the names
_SECTION = struct.Struct("<II16xQQ24x")  # name, type, offset, size
_NOTE_SECTION = 7
_NOTE = struct.Struct("<III")  # bytes of the name, bytes of the content, type
_AMD_METADATA = (b"AMDGPU\0", 32)
_ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, a value or the bytes that follow
_SIZED = 4
_KPARAM_INFO, _KPARAM_INFO_2, _CBANK_PARAM_SIZE, _REQUIRED_THREADS = 0x17, 0x45, 0x19, 0x10
_KPARAM = struct.Struct("<IHHI")  # index, ordinal, offset, packed; the size is the packed word's upper 14 bits
_SIZE_SHIFT = 18
_THREADS = struct.Struct("<III")


def _extension_function() -> Callable[[bytes, bytes], Any] | None:
    try:
        from bundler.runtime.launch import _launch  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    # Of a build that is older than this module.
    return getattr(_launch, "find_section", None)


_find_section = _extension_function()


class Slot(NamedTuple):
    """Where one parameter lies: bytes from the start of the parameter buffer, and how many."""

    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """What a binary says about one kernel; `block_threads` is None where it does not fix the size of a block."""

    slots: tuple[Slot, ...]
    buffer_bytes: int
    block_threads: int | None


def read_layout(image: bytes, entry: str) -> Layout:
    """Return the parameter layout of the kernel `entry` in a cubin or hsaco.

    Raises:
        FormatError: no such binary, no such kernel in it, or parameters that overlap, leave their buffer or have gaps in
            their numbering.
        LimitExceeded: more of anything than a kernel can have.
    """
    try:
        wanted = b".nv.info." + entry.encode()
        # The extension answers for a whole binary that is written as linkers do; whatever is wrong with another, is found out here.
        info = NotImplemented if _find_section is None else _find_section(image, wanted)
        if info is NotImplemented:
            why = why_unusable(image)
            if why is not None:
                raise FormatError(f"{entry}: the device binary is {why}", kernel=entry)
            info = _section_named(image, wanted)
        if info is None:
            return _checked(_hsaco_layout(image, entry), entry)
        # Kernels that differ in their constants alone often declare the same, byte for byte.
        return (_known_cubin_layout if len(info) <= _MAX_KNOWN_BYTES else _cubin_layout)(info, entry)
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise FormatError(f"{entry}: the device binary is damaged ({error})", kernel=entry) from error


def _section_named(image: bytes, wanted: bytes) -> bytes | None:
    """Return the bytes of the last section of a name, None when there is none."""
    rows, names_row = _sections(image)
    if names_row >= len(rows):
        return None
    _, _, names_start, names_bytes = rows[names_row]
    names, wanted = image[names_start : names_start + names_bytes], wanted + b"\0"
    for name, _, start, size in reversed(rows):
        if names.startswith(wanted, name):
            return image[start : start + size]
    return None


def cubin_attributes(image: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (attribute, the value in its head, the bytes after it) of what a cubin says about all its functions."""
    yield from _attributes(_section_named(image, b".nv.info") or b"")


def amd_kernel(image: bytes, entry: str) -> dict[Any, Any]:
    """Return what an hsaco's metadata say of a kernel; raises `FormatError` when they say nothing."""
    for _, kind, start, size in _sections(image)[0]:
        for content in _metadata_notes(image[start : start + size]) if kind == _NOTE_SECTION else ():
            found = _find_kernel(_unpack(content, entry), entry)
            if found is not None:
                return found
    raise FormatError(f"{entry}: the device binary has no kernel of that name", kernel=entry)


def _sections(image: bytes) -> tuple[list[tuple[int, int, int, int]], int]:
    """Return (place of the name, type, offset, size) of each section, and the row of the one that holds the names."""
    table, row_bytes, rows, names_row = _ELF_HEADER.unpack_from(image)
    if rows > _MAX_SECTIONS or row_bytes < _SECTION.size:
        raise FormatError(f"the device binary has {count(rows, 'section')} of {count(row_bytes, 'byte')}")
    if row_bytes == _SECTION.size:  # as every linker writes it
        found = [*_SECTION.iter_unpack(image[table : table + rows * row_bytes])]
        return found, names_row
    return [_SECTION.unpack_from(image, table + row * row_bytes) for row in range(rows)], names_row


# NVIDIA ---------------------------------------------------------------------------------------------------------------


def _cubin_layout(info: bytes, entry: str) -> Layout:
    slots: dict[int, Slot] = {}
    buffer_bytes, threads = 0, None
    for attribute, value, payload in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = _KPARAM.unpack_from(payload)
            if ordinal in slots:
                raise FormatError(f"{entry}: the device binary describes parameter {ordinal} twice", kernel=entry)
            slots[ordinal] = Slot(offset, packed >> _SIZE_SHIFT)
        elif attribute == _KPARAM_INFO_2:
            raise FormatError(f"{entry}: the cubin describes its parameters in a form that is not known", kernel=entry)
        elif attribute == _CBANK_PARAM_SIZE:
            buffer_bytes = value
        elif attribute == _REQUIRED_THREADS:
            x, y, z = _THREADS.unpack_from(payload)
            threads = x * y * z
    if sorted(slots) != list(range(len(slots))):
        raise FormatError(f"{entry}: the cubin numbers its parameters {sorted(slots)[:20]}", kernel=entry)
    return _checked(Layout(tuple(slots[ordinal] for ordinal in sorted(slots)), buffer_bytes, threads), entry)


_known_cubin_layout = functools.lru_cache(maxsize=1024)(_cubin_layout)


def _attributes(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield (attribute, the value in its head, the bytes after it)."""
    at = 0
    while at < len(info):
        form, attribute, value = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        size = value if form == _SIZED else 0
        yield attribute, value, info[at : at + size]
        at += size


# AMD ------------------------------------------------------------------------------------------------------------------


def _hsaco_layout(image: bytes, entry: str) -> Layout:
    return _layout_of(amd_kernel(image, entry), entry)


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
    if len(content) > _MAX_METADATA_BYTES:
        raise LimitExceeded(
            f"{entry}: {len(content)} bytes of metadata in the device binary", limit=_MAX_METADATA_BYTES
        )
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


def _layout_of(kernel: dict[Any, Any], entry: str) -> Layout:
    arguments = kernel.get(".args", [])
    if not isinstance(arguments, list) or not all(isinstance(argument, dict) for argument in arguments):
        raise FormatError(f"{entry}: the hsaco does not describe its arguments", kernel=entry)
    # What is called hidden is filled by the runtime library, not by who launches.
    hidden = [str(argument.get(".value_kind")).startswith("hidden_") for argument in arguments]
    shown = [argument for argument, is_hidden in zip(arguments, hidden, strict=True) if not is_hidden]
    slots = tuple(Slot(_natural(argument, ".offset", entry), _natural(argument, ".size", entry)) for argument in shown)
    whole = _natural(kernel, ".kernarg_segment_size", entry)
    end = max((slot.offset + slot.size for slot in slots), default=0)
    threads = kernel.get(".max_flat_workgroup_size")
    return Layout(slots, end if any(hidden) else whole, threads if type(threads) is int else None)


def _natural(found: dict[Any, Any], key: str, entry: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value <= MAX_BUFFER_BYTES:
        raise FormatError(f"{entry}: the hsaco has {value!r:.40} for {key}", kernel=entry)
    return value


# Both -----------------------------------------------------------------------------------------------------------------


def _checked(layout: Layout, entry: str) -> Layout:
    if len(layout.slots) > MAX_PARAMETERS or layout.buffer_bytes > MAX_BUFFER_BYTES:
        raise LimitExceeded(
            f"{entry}: {count(len(layout.slots), 'parameter')} in {count(layout.buffer_bytes, 'byte')}",
            kernel=entry,
            limit=MAX_PARAMETERS,
        )
    end = 0
    for number, slot in enumerate(layout.slots):
        if slot.size == 0 or slot.offset < end or slot.offset + slot.size > layout.buffer_bytes:
            raise FormatError(
                f"{entry}: the device binary puts parameter {number} at {slot.offset}, {count(slot.size, 'byte')}, in a buffer of "
                f"{count(layout.buffer_bytes, 'byte')} that is filled up to {end}",
                kernel=entry,
            )
        end = slot.offset + slot.size
    return layout
