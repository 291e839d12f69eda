# SPDX-License-Identifier: Apache-2.0
"""`device_of`: what torch and Triton say about the GPU that a target stands for, from a table,
since no such GPU need be here.

A target is an architecture, and GPUs of one architecture differ in size: the table names the one
that is sold for servers, and a caller may give other values.  `imitated_torch.py` and
`program_imitation.py` answer programs with it while they are captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bundler.errors import ConfigError
from bundler.format.entries import Target

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
# What a kernel may use without asking for more, on every GPU that Triton supports.
_SHARED_BYTES = 48 * _KIB


@dataclass(frozen=True)
class TargetDevice:
    """A GPU as programs see it; names and units are those of torch's device properties.

    Attributes:
        name: as the driver says it.
        multi_processor_count: streaming multiprocessors, or compute units.
        shared_memory_per_block_optin: bytes that one block may have.
        total_memory, L2_cache_size: bytes.
        max_threads_per_multi_processor, regs_per_multiprocessor: of one multiprocessor.
    """

    name: str
    multi_processor_count: int
    shared_memory_per_block_optin: int
    total_memory: int
    L2_cache_size: int
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        """Bytes of one multiprocessor; a block leaves 1 KiB to the driver on NVIDIA's."""
        return self.shared_memory_per_block_optin + _KIB

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes that a block may have without asking for more."""
        return min(_SHARED_BYTES, self.shared_memory_per_block_optin)


_DEVICES = {
    "cuda:75": TargetDevice("Tesla T4", 40, 64 * _KIB, 15 * _GIB, 4 * _MIB, 1024),
    "cuda:80": TargetDevice("NVIDIA A100-SXM4-80GB", 108, 163 * _KIB, 80 * _GIB, 40 * _MIB),
    "cuda:86": TargetDevice("NVIDIA A10", 72, 99 * _KIB, 22 * _GIB, 6 * _MIB, 1536),
    "cuda:87": TargetDevice("Orin", 16, 163 * _KIB, 62 * _GIB, 4 * _MIB, 1536),
    "cuda:89": TargetDevice("NVIDIA L40S", 142, 99 * _KIB, 44 * _GIB, 96 * _MIB, 1536),
    "cuda:90": TargetDevice("NVIDIA H100 80GB HBM3", 132, 227 * _KIB, 80 * _GIB, 50 * _MIB),
    "cuda:100": TargetDevice("NVIDIA B200", 148, 227 * _KIB, 179 * _GIB, 126 * _MIB),
    "cuda:103": TargetDevice("NVIDIA B300 SXM6 AC", 148, 227 * _KIB, 268 * _GIB, 126 * _MIB),
    "cuda:120": TargetDevice("NVIDIA GeForce RTX 5090", 170, 99 * _KIB, 31 * _GIB, 96 * _MIB, 1536),
    "cuda:121": TargetDevice("NVIDIA GB10", 48, 99 * _KIB, 119 * _GIB, 24 * _MIB, 1536),
    "hip:gfx90a": TargetDevice("AMD Instinct MI250X", 110, 64 * _KIB, 64 * _GIB, 8 * _MIB),
    "hip:gfx942": TargetDevice("AMD Instinct MI300X", 304, 64 * _KIB, 191 * _GIB, 4 * _MIB),
    "hip:gfx950": TargetDevice("AMD Instinct MI355X", 256, 160 * _KIB, 287 * _GIB, 4 * _MIB),
    "hip:gfx1100": TargetDevice("AMD Radeon RX 7900 XTX", 48, 64 * _KIB, 24 * _GIB, 6 * _MIB),
    "hip:gfx1201": TargetDevice("AMD Radeon RX 9070 XT", 32, 64 * _KIB, 16 * _GIB, 8 * _MIB),
}
# Of a target that is not in the table: that of the newest generation of servers, by backend.
_OTHERS = {"cuda": "cuda:90", "hip": "hip:gfx942"}
_NAMES = tuple(field.name for field in fields(TargetDevice))


def device_of(
    target: Target, properties: Mapping[str, Any] | None = None
) -> tuple[TargetDevice, str | None]:
    """Return the GPU that a target stands for, and what was assumed about it, None when the table
    has the target.

    Args:
        target: the target.
        properties: values that differ from the table's, by their names in `TargetDevice`.

    Raises:
        ConfigError: no property has this name, or a value is of another type.
    """
    given = dict(properties or {})
    for name, value in given.items():
        kind = str if name == "name" else int
        if name not in _NAMES or type(value) is not kind:
            raise ConfigError(
                f"device property {name}={value!r}: expected one of {', '.join(_NAMES)}, the name a"
                " text and the others whole numbers",
                name=name,
                got=value,
            )
    known = _DEVICES.get(str(target))
    if known is not None:
        return replace(known, **given), None
    other = _OTHERS.get(target.backend, "cuda:90")
    assumed = (
        None
        if set(given) == set(_NAMES)
        else f"{target} is in no table of devices: taken for as large as {other}"
    )
    return replace(_DEVICES[other], **{"name": str(target), **given}), assumed
