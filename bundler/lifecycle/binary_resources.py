# SPDX-License-Identifier: Apache-2.0
"""`read_resources`: what a kernel takes of a GPU, `BinaryResources`, read from its cubin or hsaco.

`triton-bundler inspect --resources` calls it.  Nothing is executed and no vendor's tool is asked;
the bytes are hostile input.

Where the figures stand:

* cubin.  NVIDIA documents neither sections nor attributes; their names are those that `cuobjdump
  -elf` prints, and the figures are held to `cuobjdump --dump-resource-usage` by tests.  `.nv.info`
  has by the number of a function's symbol EIATTR_REGCOUNT (REG) and EIATTR_MIN_STACK_SIZE (STACK);
  `.nv.info.ENTRY` the size of a block and, since ABI version 8, EIATTR_NUM_BARRIERS, which before
  stood in the flags of `.text.ENTRY`; SHARED, LOCAL and CONSTANT[n] are the sizes of
  `.nv.shared.ENTRY`, `.nv.local.ENTRY` and `.nv.constantN.ENTRY`.  How much was spilled is not in a
  cubin, only the stack that holds it.
* hsaco.  LLVM's User Guide for AMDGPU Backend, "Code Object V3 and Above Metadata" (a note,
  msgpack) and "Kernel Descriptor" (64 bytes at the symbol ENTRY.kd).  Both say how much memory a
  kernel takes, and on gfx9 how many registers: what they say has to fit.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from msgspec import Struct

from bundler.errors import FormatError, LimitExceeded
from bundler.format.device_elf import (
    INFO,
    ElfSection,
    amd_kernel,
    attributes,
    content_of,
    natural,
    sections,
    symbol_named,
    why_unusable,
)

_MACHINE = struct.Struct("<18xH28xI")  # machine, flags
_CUDA, _AMD = 190, 224
_MOST = (1 << 32) - 1  # no figure of a descriptor or attribute has more bits

_REQUIRED_THREADS, _MAX_THREADS, _REGCOUNT, _MIN_STACK_SIZE, _NUM_BARRIERS = (
    0x10,
    0x05,
    0x2F,
    0x12,
    0x4C,
)
_BY_SYMBOL = struct.Struct("<II")  # number of the function's symbol, a figure
_THREADS = struct.Struct("<III")
_BARRIERS_SHIFT, _BARRIERS_MASK = 20, 0x7F
_CONSTANT = b".nv.constant"
_BANK = re.compile(rb"\.nv\.constant(\d{1,2})\.")

# LDS, stack and arguments in bytes; then the words COMPUTE_PGM_RSRC3 and RSRC1.
_DESCRIPTOR = struct.Struct("<III32xII12x")
_DESCRIBED = (".group_segment_fixed_size", ".private_segment_fixed_size", ".kernarg_segment_size")
_ARCHITECTURE = 0xFF  # of the flags
# gfx90a, gfx940, gfx941, gfx942, gfx950 and gfx9-4-generic have one file for vector and
# accumulation registers.
_UNIFIED = frozenset({0x3F, 0x40, 0x4B, 0x4C, 0x4F, 0x5F})
# gfx900, gfx902, gfx904, gfx906, gfx908, gfx909, gfx90c and gfx9-generic.
_APART = frozenset({0x2C, 0x2D, 0x2E, 0x2F, 0x30, 0x31, 0x32, 0x51})
_SCALAR_GRANULE = 8
_VECTOR_BITS, _SCALAR_SHIFT, _SCALAR_BITS = 0x3F, 6, 0xF
_OFFSET_GRANULE = 4


class BinaryResources(Struct, frozen=True):
    """What a kernel takes, as its binary says; None where the binary does not tell.

    Attributes:
        registers: vector registers of 32 bits a thread; AMD's accumulation registers are among them
            where they share a file.
        allocated_registers: vector registers that gfx9 sets aside for a thread, in whole granules;
            `waves_per_eu` raises it.
        accumulation_registers, scalar_registers: AMD's; the second are those of a wavefront.
        stack_bytes: local memory of a thread that the compiler laid out as a stack, spilled
            registers included.
        local_bytes: other local memory of a thread, in NVIDIA's section of that name.
        spilled_registers, spilled_scalars: stores from registers to places that the register
            allocator made; AMD's alone tell.
        shared_bytes: static shared memory or LDS a block; from sm_90 on with the 1024 bytes that
            NVIDIA reserves where there is any.
        constant_bytes: (bank, bytes) of NVIDIA's constant banks, the kernel's arguments among them.
        argument_bytes: AMD's memory for arguments.
        max_threads: threads a block may have.
        barriers: named barriers in use.
    """

    registers: int | None
    shared_bytes: int
    stack_bytes: int | None
    local_bytes: int | None = None
    allocated_registers: int | None = None
    accumulation_registers: int | None = None
    scalar_registers: int | None = None
    spilled_registers: int | None = None
    spilled_scalars: int | None = None
    constant_bytes: tuple[tuple[int, int], ...] = ()
    argument_bytes: int | None = None
    max_threads: int | None = None
    barriers: int | None = None


def read_resources(image: bytes, entry: str) -> BinaryResources:
    """Return what a cubin or hsaco says of its kernel `entry`.

    Raises:
        FormatError: no such binary, no such kernel in it, or one that contradicts itself.
        LimitExceeded: more of anything than a kernel can have.
    """
    why = why_unusable(image)
    if why is not None:
        raise FormatError(f"{entry}: the device binary is {why}", kernel=entry)
    try:
        name = entry.encode()
        machine, flags = _MACHINE.unpack_from(image)
        if machine == _CUDA:
            return _of_cubin(image, name, entry)
        if machine == _AMD:
            return _of_hsaco(image, flags & _ARCHITECTURE, entry)
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise FormatError(
            f"{entry}: the device binary is damaged ({error})", kernel=entry
        ) from error
    raise FormatError(
        f"{entry}: the device binary is for machine {machine}; known are {_CUDA} (CUDA) and {_AMD}"
        " (AMD)",
        kernel=entry,
        machine=machine,
    )


# ------------------------------------------------------------------------------------------- NVIDIA


def _of_cubin(image: bytes, name: bytes, entry: str) -> BinaryResources:
    rows, names_row = sections(image)
    names = content_of(image, rows[names_row]) if names_row < len(rows) else b""
    own = {part: _row_named(rows, names, part + b"." + name, entry) for part in _PARTS}
    symbol, code = symbol_named(image, rows, name), own[b".text"]
    if symbol is None or code is None:
        raise FormatError(f"{entry}: the device binary has no kernel of that name", kernel=entry)
    everyone = _row_named(rows, names, INFO, entry)
    counts = _counts_of(content_of(image, everyone) if everyone else b"", symbol[0], entry)
    info = own[INFO]
    threads, barriers = _block_of(content_of(image, info) if info else b"")
    return BinaryResources(
        counts.get(_REGCOUNT),
        _size_of(own[b".nv.shared"], entry),
        counts.get(_MIN_STACK_SIZE),
        _size_of(own[b".nv.local"], entry),
        constant_bytes=_banks_of(rows, names, name, entry),
        max_threads=threads,
        barriers=code.flags >> _BARRIERS_SHIFT & _BARRIERS_MASK if barriers is None else barriers,
    )


_PARTS = (b".text", b".nv.shared", b".nv.local", INFO)


def _row_named(
    rows: list[ElfSection], names: bytes, wanted: bytes, entry: str
) -> ElfSection | None:
    found = [row for row in rows if names.startswith(wanted + b"\0", row.name_at)]
    if len(found) > 1:
        raise FormatError(
            f"{entry}: the cubin has {len(found)} sections {wanted.decode()}", kernel=entry
        )
    return found[0] if found else None


def _size_of(row: ElfSection | None, entry: str) -> int:
    size = row.size if row is not None else 0
    if size > _MOST:
        raise LimitExceeded(
            f"{entry}: {size} bytes of memory in the device binary",
            kernel=entry,
            limit=_MOST,
            got=size,
        )
    return size


def _counts_of(info: bytes, symbol: int, entry: str) -> dict[int, int]:
    """Return what is counted by symbol, for one of them."""
    counts: dict[int, int] = {}
    for attribute, _, payload in attributes(info):
        if attribute not in {_REGCOUNT, _MIN_STACK_SIZE}:
            continue
        number, figure = _BY_SYMBOL.unpack(payload)
        if number == symbol and counts.setdefault(attribute, figure) != figure:
            raise FormatError(
                f"{entry}: the cubin has two figures for attribute {attribute:#x},"
                f" {counts[attribute]} and {figure}",
                kernel=entry,
            )
    return counts


def _block_of(info: bytes) -> tuple[int | None, int | None]:
    """Return the most threads of a block, and the barriers."""
    threads = barriers = None
    for attribute, value, payload in attributes(info):
        if attribute in {_REQUIRED_THREADS, _MAX_THREADS}:
            x, y, z = _THREADS.unpack(payload)
            threads = x * y * z
        elif attribute == _NUM_BARRIERS:
            barriers = value
    return threads, barriers


def _banks_of(
    rows: list[ElfSection], names: bytes, name: bytes, entry: str
) -> tuple[tuple[int, int], ...]:
    banks: dict[int, int] = {}
    for row in rows:
        bank = _BANK.match(names, row.name_at) if names.startswith(_CONSTANT, row.name_at) else None
        if bank is not None and names.startswith(name + b"\0", bank.end()):
            number = int(bank[1])
            if number in banks:
                raise FormatError(
                    f"{entry}: the cubin has constant bank {number} twice", kernel=entry
                )
            banks[number] = _size_of(row, entry)
    return tuple(sorted(banks.items()))


# ---------------------------------------------------------------------------------------------- AMD


def _of_hsaco(image: bytes, architecture: int, entry: str) -> BinaryResources:
    said = amd_kernel(image, entry)
    shared, stack, arguments = (natural(said, key, _MOST, entry) for key in _DESCRIBED)
    vectors, scalars = (
        natural(said, ".vgpr_count", _MOST, entry),
        natural(said, ".sgpr_count", _MOST, entry),
    )
    accumulation = _optional(said, ".agpr_count", entry)
    *described, third, first = _descriptor(image, said, entry)
    for key, other in zip(_DESCRIBED, described, strict=True):
        _agree(key, said[key], other, entry)
    allocated = None
    if architecture in _UNIFIED | _APART:
        granule = 8 if architecture in _UNIFIED else 4
        allocated = ((first & _VECTOR_BITS) + 1) * granule
        _agree(".vgpr_count", vectors, allocated, entry, room=True)
        granules = (first >> _SCALAR_SHIFT & _SCALAR_BITS) + 1
        _agree(".sgpr_count", scalars, granules * _SCALAR_GRANULE, entry, room=True)
    if architecture in _UNIFIED and accumulation:
        # Where the accumulation registers begin in the file that both share.
        begin = ((third & _VECTOR_BITS) + 1) * _OFFSET_GRANULE
        _agree(".agpr_count", accumulation, vectors - begin, entry)
    return BinaryResources(
        vectors,
        shared,
        stack,
        allocated_registers=allocated,
        accumulation_registers=accumulation,
        scalar_registers=scalars,
        spilled_registers=_optional(said, ".vgpr_spill_count", entry),
        spilled_scalars=_optional(said, ".sgpr_spill_count", entry),
        argument_bytes=arguments,
        max_threads=_optional(said, ".max_flat_workgroup_size", entry),
    )


def _agree(key: str, noted: int, described: int, entry: str, *, room: bool = False) -> None:
    """Refuse a kernel whose descriptor has another figure; or, of room, less than it says it takes:
    more is how `waves_per_eu` keeps others away.
    """
    if noted > described or (noted != described and not room):
        raise FormatError(
            f"{entry}: the hsaco's metadata have {noted} for {key}, its kernel descriptor"
            f" {'allocates' if room else 'has'} {described}",
            kernel=entry,
            key=key,
        )


def _optional(said: dict[Any, Any], key: str, entry: str) -> int | None:
    return natural(said, key, _MOST, entry) if key in said else None


def _descriptor(image: bytes, said: dict[Any, Any], entry: str) -> tuple[int, ...]:
    """Return the words of the kernel's descriptor that are looked at."""
    rows, _ = sections(image)
    name = said.get(".symbol")
    symbol = symbol_named(image, rows, name.encode()) if isinstance(name, str) else None
    if symbol is None or symbol[1] >= len(rows):
        raise FormatError(f"{entry}: the hsaco has no kernel descriptor {name!r:.80}", kernel=entry)
    _, section, address = symbol
    content, at = content_of(image, rows[section]), address - rows[section].address
    if not 0 <= at <= len(content) - _DESCRIPTOR.size:
        raise FormatError(
            f"{entry}: the hsaco's kernel descriptor lies outside its section", kernel=entry
        )
    return _DESCRIPTOR.unpack_from(content, at)
