# SPDX-License-Identifier: Apache-2.0
"""`DeviceTensor`: a tensor of any library as a launch sees it: an address with dtype and shape;
`device_tensor` makes one of what a program is given.

Where there is no `__cuda_array_interface__`, as of libraries for GPUs of AMD, DLPack is asked;
nothing of these libraries is imported. A tensor of torch is passed as it is. `run` converts the
inputs of a program with it.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.runtime.launch.argument_types import is_tensor

# Elements as torch names them -> what arrays call them, by kind and size in bytes, and how `struct`
# reads them.
_ELEMENTS = {
    "float64": ("f8", "d"),
    "float32": ("f4", "f"),
    "float16": ("f2", "e"),
    "int64": ("i8", "q"),
    "int32": ("i4", "i"),
    "int16": ("i2", "h"),
    "int8": ("i1", "b"),
    "uint64": ("u8", "Q"),
    "uint32": ("u4", "I"),
    "uint16": ("u2", "H"),
    "uint8": ("u1", "B"),
    "bool": ("b1", "?"),
}
_TYPES = {name: dtype for dtype, (name, _) in _ELEMENTS.items()}
_BYTES = {dtype: int(name[1:]) for name, dtype in _TYPES.items()}
_BYTES |= {"bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4}
# Where kernels of a GPU find memory: CUDA, ROCm, host memory that CUDA or ROCm pinned, managed
# memory.
_DEVICES = frozenset({2, 3, 10, 11, 13})
_HOST = 1
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6
_FLOAT8 = {10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz"}
_NAME = b"dltensor"
#: Elements that tensors of a program may have.
DTYPES = frozenset({*_BYTES, *_FLOAT8.values(), "float8_e8m0fnu"})


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans from its first one."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def item_bytes(dtype: str) -> int:
    """Return how many bytes an element has."""
    return _BYTES.get(dtype, 1)


@dataclass(frozen=True)
class DeviceTensor:
    """Memory of a device.

    Attributes:
        address: of the first element.
        dtype: as torch names it.
        shape, strides: in elements.
        owner: what keeps the memory.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any = field(default=None, repr=False, compare=False)

    def data_ptr(self) -> int:
        """Return the address, as torch's tensors do."""
        return self.address

    def ptr_range(self) -> int:
        """Return how many bytes the tensor spans, as launches for AMD ask."""
        return span(self.shape, self.strides) * item_bytes(self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = item_bytes(self.dtype)
        if self.dtype not in _ELEMENTS:
            raise AttributeError(f"arrays have no name for {self.dtype}")
        name, _ = _ELEMENTS[self.dtype]
        return {
            "shape": self.shape,
            "strides": tuple(stride * size for stride in self.strides),
            "typestr": f"|{name}" if size == 1 else f"<{name}",
            "data": (self.address, False),
            "version": 3,
        }


def device_tensor(value: Any, *, host: bool = False) -> Any:
    """Return a value as a launch takes it: torch's tensors as they are, others by
    `__cuda_array_interface__` or DLPack.

    Args:
        value: of any library.
        host: take memory of the host too, for kernels that no GPU runs.

    Raises:
        CannotLaunchStatically: it is no tensor of a device, or of an element type that no kernel
            takes.
    """
    if is_tensor(value):
        return value
    described = getattr(value, "__cuda_array_interface__", None)
    if described is None and hasattr(value, "__dlpack__"):
        return _dlpack_tensor(value, host=host)
    if described is None:
        raise CannotLaunchStatically(
            "an input of the program: expected a tensor of a device, with data_ptr,"
            f" __cuda_array_interface__ or __dlpack__, got {type(value).__name__}",
            got=type(value).__name__,
        )
    code = str(described["typestr"])
    dtype = _TYPES.get(code[1:])
    if dtype is None or code[0] == ">":
        raise CannotLaunchStatically(
            f"an input of the program: no kernel takes elements of type {code}", got=code
        )
    shape, size = tuple(described["shape"]), item_bytes(dtype)
    given = described.get("strides")
    strides = tuple(stride // size for stride in given) if given else contiguous(shape)
    return DeviceTensor(int(described["data"][0]), dtype, shape, strides, value)


def host_tensor(value: Any) -> Any:
    """Return a tensor that a program was generated to find on the host: torch's as it is, others by
    DLPack.

    Raises:
        ConfigError: its memory is a device's.
    """
    where = getattr(getattr(value, "device", None), "type", None)
    if is_tensor(value) and where in {None, "cpu"}:
        return value
    if not is_tensor(value) and hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] == 1:
            return device_tensor(value, host=True)
        where = "a device"
    raise ConfigError(
        f"an input of the program: expected a tensor on the CPU, got {type(value).__name__} on"
        f" {where}; copy it there first",
        got=where,
    )


def host_number(tensor: Any) -> int | float | bool:
    """Return the number of a tensor on the host that has one element."""
    if hasattr(tensor, "item"):
        number: int | float | bool = tensor.item()
        return number
    data = ctypes.string_at(tensor.address, item_bytes(tensor.dtype))
    if tensor.dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    if tensor.dtype not in _ELEMENTS:
        raise ConfigError(
            f"a tensor of {tensor.dtype} on the host: expected one of {', '.join(_ELEMENTS)}",
            got=tensor.dtype,
        )
    _, code = _ELEMENTS[tensor.dtype]
    found: int | float | bool = struct.unpack(f"<{code}", data)[0]
    return found


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


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


def _dlpack_tensor(value: Any, *, host: bool) -> DeviceTensor:
    """Return a tensor that a capsule of DLPack describes.

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
            f"an input of the program: {type(value).__name__} lies in memory of DLPack's device"
            f" type {kind}, expected a GPU's; copy it there first",
            got=kind,
        )
    shape = tuple(found.shape[: found.rank])
    strides = tuple(found.strides[: found.rank]) if found.strides else contiguous(shape)
    address = (found.data or 0) + found.offset
    return DeviceTensor(address, _dtype(found.dtype), shape, strides, (value, capsule))


def _dtype(kind: _Type) -> str:
    if kind.lanes == 1 and kind.code == _BOOL:
        return "bool"
    name = _FLOAT8.get(kind.code) or (
        f"{_KINDS[kind.code]}{kind.bits}" if kind.code in _KINDS else None
    )
    if name is None or kind.lanes != 1:
        raise CannotLaunchStatically(
            f"an input of the program: no kernel takes elements of DLPack's type {kind.code} with"
            f" {kind.lanes} times {kind.bits} bits",
            got=kind.code,
        )
    return name
