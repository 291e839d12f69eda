# SPDX-License-Identifier: Apache-2.0
"""`block_occupancy`: how much of a multiprocessor a kernel's blocks can fill, and what keeps them
from filling more.

The report of `triton-bundler report` shows it.  Figures of CUDA are those of the table "Technical
Specifications per Compute Capability" in NVIDIA's CUDA Programming Guide, and allocation goes as
NVIDIA's occupancy calculator says; those of AMD are of the LLVM User Guide for AMDGPU and AMD's
CDNA ISA documents.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from bundler.format.entries import Target

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
