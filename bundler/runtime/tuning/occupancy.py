# SPDX-License-Identifier: Apache-2.0
"""`usage_of`: the registers and spills of a kernel, read from its binary; `Occupancy`: how many of
its blocks run at once.

The tuner does not time configs that spill too much, and halves blocks where too few run at once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from bundler.errors import FormatError
from bundler.format.binaries.device_elf import INFO, amd_kernel, attributes, section_named
from bundler.format.entries import Target
from bundler.runtime.launch.driver import DeviceProperties

_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_BY_SYMBOL = struct.Struct("<II")  # index of the function's symbol, a number
_SPILL_UNIT_BYTES = 4
_REGISTERS = 65536
# Threads that a multiprocessor holds, by compute capability; newer chips than these are taken for
# the last.
_CUDA_THREADS = {
    75: 1024,
    80: 2048,
    86: 1536,
    87: 1536,
    89: 1536,
    90: 2048,
    100: 2048,
    103: 2048,
    110: 1536,
    120: 1536,
}
_AMD_THREADS = 2048


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
