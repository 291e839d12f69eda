# SPDX-License-Identifier: Apache-2.0
"""`dlpack_tensor`: a tensor of a library that speaks DLPack, as an address with dtype, shape and strides; nothing of that library is imported.

`device_tensors` asks it for inputs of programs that have no `__cuda_array_interface__`, such as tensors of a library for AMD's GPUs.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from bundler.errors import CannotLaunchStatically

# Where kernels of a GPU find memory: CUDA, ROCm, host memory that CUDA or ROCm pinned, managed memory.
_DEVICES = frozenset({2, 3, 10, 11, 13})
_HOST = 1
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6
_FLOAT8 = {10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz"}
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _Device), ("rank", ctypes.c_int32), ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    )  # fmt: skip


class Described(NamedTuple):
    """What a capsule of DLPack says; strides are None for a dense tensor, and the memory lives as long as the owner."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    owner: Any


def dlpack_tensor(value: Any, *, host: bool = False) -> Described:
    """Return where a tensor lies.

    Args:
        value: has `__dlpack__`.
        host: take memory of the host too, which kernels of a GPU cannot read.

    Raises:
        CannotLaunchStatically: its memory is no device's, or no kernel takes its elements.
    """
    capsule = value.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        found = _Tensor.from_address(pointer(capsule, _NAME))
    except ValueError as error:  # a capsule of another name
        raise CannotLaunchStatically(
            f"an input of the program: {type(value).__name__}.__dlpack__() gives no tensor: {error}"
        ) from error
    kind = found.device.type
    if kind not in _DEVICES and not (host and kind == _HOST):
        raise CannotLaunchStatically(
            f"an input of the program: {type(value).__name__} lies in memory of DLPack's device type {kind}, expected a GPU's; copy it there first",
            got=kind,
        )
    strides = tuple(found.strides[place] for place in range(found.rank)) if found.strides else None
    shape = tuple(found.shape[place] for place in range(found.rank))
    return Described(
        (found.data or 0) + found.offset, _dtype(found.dtype), shape, strides, (value, capsule)
    )


def _dtype(kind: _Type) -> str:
    if kind.lanes == 1 and kind.code == _BOOL:
        return "bool"
    name = _FLOAT8.get(kind.code) or (
        f"{_KINDS[kind.code]}{kind.bits}" if kind.code in _KINDS else None
    )
    if name is None or kind.lanes != 1:
        raise CannotLaunchStatically(
            f"an input of the program: no kernel takes elements of DLPack's type {kind.code} with {kind.lanes} times {kind.bits} bits",
            got=kind.code,
        )
    return name
