# SPDX-License-Identifier: Apache-2.0
"""DLPack, the format in which libraries of arrays pass memory on: `capsule_of` makes a capsule of a
tensor, `described` reads one. Nothing of these libraries is imported.

A capsule that we make keeps its tensor until the library that took it, or the capsule itself, is
done with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Kinds of devices: memory of the host, of CUDA and ROCm.
HOST, CUDA, ROCM = 1, 2, 10
#: Where kernels of a GPU find memory: the latter two, host memory that they pinned, managed memory.
DEVICES = frozenset({CUDA, 3, ROCM, 11, 13})
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6
#: Elements of eight bits -> their number.
FLOAT8 = {
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_FLOAT8_NAMES = {code: name for name, code in FLOAT8.items()}
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("rank", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("holder", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Description(NamedTuple):
    """What a capsule says.

    Attributes:
        dtype: as torch names it; None where no kernel takes such elements, which `type` describes.
        strides: in elements; None of a tensor that lies row by row.
        device: its kind and number.
    """

    address: int
    dtype: str | None
    type: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: tuple[int, int]


# Prototypes of our own: those of `ctypes.pythonapi` are everybody's.
_api = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
# Of a capsule that is being freed, which is no object any more.
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_keep = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", _api))
_drop = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("Py_DecRef", _api))


def _deleted(managed: int) -> None:
    """Let the tensor of a capsule go; libraries call it from any thread."""
    _drop(_Managed.from_address(managed).holder)


def _capsule_freed(capsule: int) -> None:
    """Let the tensor of a capsule go that nobody took: who takes it gives it another name."""
    if _is_named(capsule, _NAME):
        _deleted(_dying_pointer(capsule, _NAME))


_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_deleted)
_free_capsule = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_capsule_freed)


def described(capsule: Any) -> Description:
    """Return what a capsule says; raises `ValueError` where it is one of something else."""
    found = _Tensor.from_address(_pointer(capsule, _NAME))
    shape = tuple(found.shape[: found.rank])
    strides = tuple(found.strides[: found.rank]) if found.strides else None
    kind = found.dtype
    return Description(
        (found.data or 0) + found.offset,
        _dtype(kind),
        f"{kind.code} with {kind.lanes} times {kind.bits} bits",
        shape,
        strides,
        (found.device.type, found.device.number),
    )


def capsule_of(
    tensor: Any,
    address: int,
    dtype: str,
    bits: int,
    shape: Sequence[int],
    strides: Sequence[int],
    device: tuple[int, int],
) -> Any:
    """Return a capsule.

    Args:
        tensor: what keeps the memory.
        address, dtype, shape, strides: of its first element; strides in elements.
        bits: of an element.
        device: its kind and number.
    """
    sides = ctypes.c_int64 * len(shape)
    sizes, steps = sides(*shape), sides(*strides)
    managed = _Managed()
    managed.tensor = _Tensor(
        address, _Device(*device), len(shape), _Type(_code(dtype), bits, 1), sizes, steps, 0
    )
    holder = (tensor, sizes, steps, managed)
    managed.holder = id(holder)
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    _keep(holder)
    return _new_capsule(
        ctypes.addressof(managed), _NAME, ctypes.cast(_free_capsule, ctypes.c_void_p)
    )


def _code(dtype: str) -> int:
    if dtype == "bool":
        return _BOOL
    kind = dtype.rstrip("0123456789")
    return FLOAT8[dtype] if dtype in FLOAT8 else {v: k for k, v in _KINDS.items()}[kind]


def _dtype(kind: _Type) -> str | None:
    if kind.lanes != 1:
        return None
    if kind.code == _BOOL:
        return "bool"
    if kind.code in _KINDS:
        return f"{_KINDS[kind.code]}{kind.bits}"
    return _FLOAT8_NAMES.get(kind.code)
