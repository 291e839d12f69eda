# SPDX-License-Identifier: Apache-2.0
"""`usage_of`: the registers and spills of a kernel, read from its binary; `Occupancy`: what a
multiprocessor has for its blocks; `block_occupancy`: how many of them fill it, and what keeps them
from filling more.

The tuner does not time configs that spill too much, and halves blocks where too few run at once;
`triton-bundler report` shows how full a multiprocessor gets.  Figures of CUDA are those of the table
"Technical Specifications per Compute Capability" in NVIDIA's CUDA Programming Guide, and allocation
goes as NVIDIA's occupancy calculator says; those of AMD are of the LLVM User Guide for AMDGPU and
AMD's CDNA ISA documents.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from bundler.errors import FormatError
from bundler.format.device_elf import INFO, amd_kernel, attributes, section_named
from bundler.format.entries import Target
from bundler.runtime.launch.drivers.driver import DeviceProperties

_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_BY_SYMBOL = struct.Struct("<II")  # index of the function's symbol, a number
_SPILL_UNIT_BYTES = 4
_KIB = 1024
# NVIDIA: registers are given to warps in these steps, and warps to the four quarters of a
# multiprocessor.
_REGISTERS, _REGISTER_STEP, _THREAD_STEP, _QUARTERS = 65536, 256, 8, 4
# Shared memory is given in these steps; from sm_80 on each block has this much more, which the
# system keeps.
_SHARED_STEP, _SHARED_RESERVED, _RESERVES_SINCE, _TOLD_SINCE = 128, 1024, 80, 90
# AMD: vector registers of a lane of a SIMD, and their steps; four SIMDs share the LDS.
_SIMDS, _LDS_STEP = 4, 512


class _Multiprocessor(NamedTuple):
    warps: int
    blocks: int
    shared_bytes: int


class _Simd(NamedTuple):
    waves: int
    registers: int
    step: int
    lds_bytes: int


_CUDA = {
    "75": _Multiprocessor(32, 16, 64 * _KIB),
    "80": _Multiprocessor(64, 32, 164 * _KIB),
    "86": _Multiprocessor(48, 16, 100 * _KIB),
    "87": _Multiprocessor(48, 16, 164 * _KIB),
    "89": _Multiprocessor(48, 24, 100 * _KIB),
    "90": _Multiprocessor(64, 32, 228 * _KIB),
    "100": _Multiprocessor(64, 32, 228 * _KIB),
    "103": _Multiprocessor(64, 32, 228 * _KIB),
    "120": _Multiprocessor(48, 24, 100 * _KIB),
}
_AMD = {
    "gfx908": _Simd(10, 256, 4, 64 * _KIB),
    "gfx90a": _Simd(8, 512, 8, 64 * _KIB),
    "gfx942": _Simd(8, 512, 8, 64 * _KIB),
    "gfx950": _Simd(8, 512, 8, 160 * _KIB),
}
# Threads that a multiprocessor holds, by compute capability; newer chips than these are taken for
# the last.  Of 110 no more is known.
_CUDA_THREADS = {int(arch): has.warps * 32 for arch, has in _CUDA.items()} | {110: 1536}
_AMD_THREADS = 2048
# 32-bit words; the thresholds that Inductor has for its own kernels.
_MOST_SPILLS, _MOST_SPILLS_HIP = 16, 32


@dataclass(frozen=True)
class Usage:
    """What one thread of a kernel takes; None where the binary does not tell.

    Attributes:
        registers: registers.
        spills: 32-bit words kept in memory for want of registers.
    """

    registers: int | None
    spills: int | None


@dataclass(frozen=True)
class DeviceLimits:
    """What somebody knows of a multiprocessor of the device: 32-bit registers, and threads that can
    be resident; None for unknown.
    """

    registers: int | None = None
    threads: int | None = None

    def or_else(self, other: DeviceLimits) -> DeviceLimits:
        """Return these limits, and those of another source where these are unknown."""
        return DeviceLimits(self.registers or other.registers, self.threads or other.threads)


@dataclass(frozen=True)
class Occupancy:
    """What one multiprocessor of a device has.

    Attributes:
        backend, major: `cuda` or `hip`, and the major compute capability (0 on AMD).
        registers, threads: 32-bit registers, and threads that can be resident.
        warp_size: threads of a warp.
        multiprocessors: how many there are.
    """

    backend: str
    major: int
    registers: int
    threads: int
    warp_size: int
    multiprocessors: int

    @staticmethod
    def of(
        backend: str, properties: DeviceProperties, told: DeviceLimits | None = None
    ) -> Occupancy:
        """Return what is known of a device: as it was told, else the figures of its architecture.

        Args:
            backend, properties: of the device.
            told: by the device itself, or by whoever declared it.
        """
        capability = int(properties.arch) if properties.arch.isdecimal() else 0
        known = [number for number in sorted(_CUDA_THREADS) if number <= capability]
        threads = _AMD_THREADS if backend == "hip" else _CUDA_THREADS[known[-1]] if known else 0
        limits = (told or DeviceLimits()).or_else(DeviceLimits(_REGISTERS, threads))
        return Occupancy(
            backend,
            capability // 10,
            limits.registers or 0,
            limits.threads or 0,
            properties.warp_size,
            properties.multiprocessors,
        )


def most_spills(backend: str) -> int:
    """Return how many 32-bit words a thread of a kernel may spill that is no user's own."""
    return _MOST_SPILLS_HIP if backend == "hip" else _MOST_SPILLS


def usage_of(image: bytes, entry: str, target: Target) -> Usage:
    """Return what a cubin or hsaco says of its kernel; what it does not say is None.

    Raises:
        FormatError: the binary cannot be read.
    """
    if target.backend == "hip":
        found = amd_kernel(image, entry)
        registers, spills = found.get(".vgpr_count"), found.get(".vgpr_spill_count")
        return Usage(
            registers if type(registers) is int else None, spills if type(spills) is int else None
        )
    return _cubin_usage(image, entry)


def _cubin_usage(image: bytes, entry: str) -> Usage:
    """Read the counts, which are kept by symbol; a binary of Triton has its kernel's, and those of
    functions that are called.
    """
    counts: dict[int, list[int]] = {_REGCOUNT: [], _FRAME_SIZE: []}
    try:
        for attribute, _, payload in attributes(section_named(image, INFO) or b""):
            if attribute in counts and len(payload) >= _BY_SYMBOL.size:
                counts[attribute].append(_BY_SYMBOL.unpack_from(payload)[1])
    except struct.error as error:
        raise FormatError(
            f"{entry}: the device binary is damaged ({error})", kernel=entry
        ) from error
    registers, frames = counts[_REGCOUNT], counts[_FRAME_SIZE]
    return Usage(max(registers, default=None), max(frames) // _SPILL_UNIT_BYTES if frames else None)


# ------------------------------------------------------------ Of the blocks of one kernel


class BlockOccupancy(Struct, frozen=True):
    """How many blocks of a kernel one multiprocessor (AMD: compute unit) holds.

    Attributes:
        blocks: blocks at once; 0 where one block alone needs more than there is.
        warps: warps (wavefronts) of these blocks.
        most_warps: warps that it holds at most.
        limit: what keeps it from holding more: `registers`, `shared memory`, `warps` or `blocks`.
    """

    blocks: int
    warps: int
    most_warps: int
    limit: str

    @property
    def share(self) -> float:
        """Warps of those that it holds at most, 0 to 1."""
        return self.warps / self.most_warps


def block_occupancy(
    target: Target,
    warps: int,
    registers: int | None,
    static_shared_bytes: int,
    dynamic_shared_bytes: int,
) -> BlockOccupancy | None:
    """Work out the occupancy of a kernel.

    Args:
        target: `cuda:90` and the like.
        warps: of a block.
        registers: 32-bit vector registers of a thread, AMD's accumulation registers among them
            where they share a file.
        static_shared_bytes: of a block, as `BinaryResources` has them: from sm_90 on with the 1024
            bytes that the system keeps.
        dynamic_shared_bytes: of a block, as Triton's metadata say.

    Returns:
        None where the architecture is not known, or the registers are not.
    """
    if registers is None or warps < 1:
        return None
    arch = target.arch.rstrip("af") if target.backend == "cuda" else target.arch
    if target.backend == "cuda" and arch in _CUDA:
        return _cuda(
            _CUDA[arch], int(arch), warps, registers, static_shared_bytes, dynamic_shared_bytes
        )
    if target.backend == "hip" and arch in _AMD:
        return _amd(_AMD[arch], warps, registers, static_shared_bytes + dynamic_shared_bytes)
    return None


def _cuda(
    has: _Multiprocessor,
    capability: int,
    warps: int,
    registers: int,
    static_bytes: int,
    dynamic_bytes: int,
) -> BlockOccupancy:
    of_warp = _up(_up(max(registers, 1), _THREAD_STEP) * 32, _REGISTER_STEP)
    fitting = _REGISTERS // of_warp // _QUARTERS * _QUARTERS
    kept = _SHARED_RESERVED if capability >= _RESERVES_SINCE else 0
    if capability >= _TOLD_SINCE and static_bytes >= _SHARED_RESERVED:
        static_bytes -= _SHARED_RESERVED
    shared = _up(static_bytes + dynamic_bytes + kept, _SHARED_STEP)
    limits = {"warps": has.warps // warps, "registers": fitting // warps, "blocks": has.blocks}
    if static_bytes + dynamic_bytes:
        limits["shared memory"] = has.shared_bytes // shared
    return _least(limits, warps, has.warps)


def _amd(has: _Simd, warps: int, registers: int, lds_bytes: int) -> BlockOccupancy:
    most = has.waves * _SIMDS
    waves = min(has.waves, has.registers // _up(max(registers, 1), has.step)) * _SIMDS
    limits = {"warps": most // warps, "registers": waves // warps}
    if lds_bytes:
        limits["shared memory"] = has.lds_bytes // _up(lds_bytes, _LDS_STEP)
    return _least(limits, warps, most)


def _least(limits: dict[str, int], warps: int, most: int) -> BlockOccupancy:
    limit = min(
        limits, key=limits.__getitem__
    )  # the first of equals: what no change of the kernel lifts
    return BlockOccupancy(limits[limit], limits[limit] * warps, most, limit)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
