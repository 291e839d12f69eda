# SPDX-License-Identifier: Apache-2.0
"""`read_layout`: reads out of a device binary where its kernel expects each parameter, for
`plan_builder`.

A cubin says it in the section `.nv.info.ENTRY`, a list of attributes; an hsaco in a note, a msgpack
map.  Both are read as hostile input, by `format/device_elf.py`: what comes back is a layout or a
`FormatError`.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from bundler.errors import FormatError, LimitExceeded
from bundler.format.device_elf import (
    INFO,
    amd_kernel,
    attributes,
    section_named,
    why_unusable,
)
from bundler.format.summary import count
from bundler.runtime.launch.extension import EXTENSION

# a parameter has a byte at least, and a kernel takes 4 KiB of them, 32 KiB on the newest chips
MAX_PARAMETERS = 4096
MAX_BUFFER_BYTES = 32764
# What a kernel declares is some hundred bytes; more is not kept in memory to be compared with.
_MAX_KNOWN_BYTES = 2048

_KPARAM_INFO, _KPARAM_INFO_2, _CBANK_PARAM_SIZE, _REQUIRED_THREADS = 0x17, 0x45, 0x19, 0x10
_KPARAM = struct.Struct(
    "<IHHI"
)  # index, ordinal, offset, packed; the size is the packed word's upper 14 bits
_SIZE_SHIFT = 18
_THREADS = struct.Struct("<III")


class Slot(NamedTuple):
    """Where one parameter lies: bytes from the start of the parameter buffer, and how many."""

    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """What a binary says about one kernel; `block_threads` is None where it does not fix the size
    of a block.
    """

    slots: tuple[Slot, ...]
    buffer_bytes: int
    block_threads: int | None


def read_layout(image: bytes, entry: str) -> Layout:
    """Return the parameter layout of the kernel `entry` in a cubin or hsaco.

    Raises:
        FormatError: no such binary, no such kernel in it, or parameters that overlap, leave their
            buffer or have gaps in their numbering.
        LimitExceeded: more of anything than a kernel can have.
    """
    try:
        wanted = INFO + b"." + entry.encode()
        # The extension answers for a whole binary that is written as linkers do; whatever is wrong
        # with another, is found out here.
        info = NotImplemented if EXTENSION is None else EXTENSION.find_section(image, wanted)
        if info is NotImplemented:
            why = why_unusable(image)
            if why is not None:
                raise FormatError(f"{entry}: the device binary is {why}", kernel=entry)
            info = section_named(image, wanted)
        if info is None:
            return _checked(_hsaco_layout(image, entry), entry)
        # Kernels that differ in their constants alone often declare the same, byte for byte.
        return (_known_cubin_layout if len(info) <= _MAX_KNOWN_BYTES else _cubin_layout)(
            info, entry
        )
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise FormatError(
            f"{entry}: the device binary is damaged ({error})", kernel=entry
        ) from error


# ------------------------------------------------------------------------------------------- NVIDIA


def _cubin_layout(info: bytes, entry: str) -> Layout:
    slots: dict[int, Slot] = {}
    buffer_bytes, threads = 0, None
    for attribute, value, payload in attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = _KPARAM.unpack_from(payload)
            if ordinal in slots:
                raise FormatError(
                    f"{entry}: the device binary describes parameter {ordinal} twice", kernel=entry
                )
            slots[ordinal] = Slot(offset, packed >> _SIZE_SHIFT)
        elif attribute == _KPARAM_INFO_2:
            raise FormatError(
                f"{entry}: the cubin describes its parameters in a form that is not known",
                kernel=entry,
            )
        elif attribute == _CBANK_PARAM_SIZE:
            buffer_bytes = value
        elif attribute == _REQUIRED_THREADS:
            x, y, z = _THREADS.unpack_from(payload)
            threads = x * y * z
    if sorted(slots) != list(range(len(slots))):
        raise FormatError(
            f"{entry}: the cubin numbers its parameters {sorted(slots)[:20]}", kernel=entry
        )
    return _checked(
        Layout(tuple(slots[ordinal] for ordinal in sorted(slots)), buffer_bytes, threads), entry
    )


_known_cubin_layout = functools.lru_cache(maxsize=1024)(_cubin_layout)


# ---------------------------------------------------------------------------------------------- AMD


def _hsaco_layout(image: bytes, entry: str) -> Layout:
    return _layout_of(amd_kernel(image, entry), entry)


def _layout_of(kernel: dict[Any, Any], entry: str) -> Layout:
    arguments = kernel.get(".args", [])
    if not isinstance(arguments, list) or not all(
        isinstance(argument, dict) for argument in arguments
    ):
        raise FormatError(f"{entry}: the hsaco does not describe its arguments", kernel=entry)
    # What is called hidden is filled by the runtime library, not by who launches.
    hidden = [str(argument.get(".value_kind")).startswith("hidden_") for argument in arguments]
    shown = [
        argument for argument, is_hidden in zip(arguments, hidden, strict=True) if not is_hidden
    ]
    slots = tuple(
        Slot(_natural(argument, ".offset", entry), _natural(argument, ".size", entry))
        for argument in shown
    )
    whole = _natural(kernel, ".kernarg_segment_size", entry)
    end = max((slot.offset + slot.size for slot in slots), default=0)
    threads = kernel.get(".max_flat_workgroup_size")
    return Layout(slots, end if any(hidden) else whole, threads if type(threads) is int else None)


def _natural(found: dict[Any, Any], key: str, entry: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value <= MAX_BUFFER_BYTES:
        raise FormatError(f"{entry}: the hsaco has {value!r:.40} for {key}", kernel=entry)
    return value


# --------------------------------------------------------------------------------------------- Both


def _checked(layout: Layout, entry: str) -> Layout:
    if len(layout.slots) > MAX_PARAMETERS or layout.buffer_bytes > MAX_BUFFER_BYTES:
        raise LimitExceeded(
            f"{entry}: {count(len(layout.slots), 'parameter')} in"
            f" {count(layout.buffer_bytes, 'byte')}",
            kernel=entry,
            limit=MAX_PARAMETERS,
        )
    end = 0
    for number, slot in enumerate(layout.slots):
        if slot.size == 0 or slot.offset < end or slot.offset + slot.size > layout.buffer_bytes:
            raise FormatError(
                f"{entry}: the device binary puts parameter {number} at {slot.offset},"
                f" {count(slot.size, 'byte')}, in a buffer of {count(layout.buffer_bytes, 'byte')}"
                f" that is filled up to {end}",
                kernel=entry,
            )
        end = slot.offset + slot.size
    return layout
