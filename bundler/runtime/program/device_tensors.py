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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.runtime.launch.argument_types import is_tensor
from bundler.runtime.program import dlpack

#: How libraries name the default stream of CUDA, whose own number is 0.
LEGACY_STREAM = 1
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
#: What arrays call elements, by kind and size in bytes -> as torch names them, and the other way.
TYPES = {name: dtype for dtype, (name, _) in _ELEMENTS.items()}
TYPES |= {"c16": "complex128", "c8": "complex64"}
ARRAY_NAMES = {dtype: name for name, dtype in TYPES.items()}
_BYTES = {dtype: int(name[1:]) for dtype, name in ARRAY_NAMES.items()}
_BYTES |= {"bfloat16": 2, "complex32": 4}
#: Elements that tensors of a program may have.
DTYPES = frozenset({*_BYTES, *dlpack.FLOAT8})
_OBJECTS = {dtype: dtype for dtype in DTYPES}


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
        memory: a `DeviceMemory` that it is of, without which no library is given it by DLPack.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any = field(default=None, repr=False, compare=False)
    memory: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The compiled dispatcher tells dtypes apart by the objects, so these must never go.
        object.__setattr__(self, "dtype", _OBJECTS.get(self.dtype, self.dtype))

    def data_ptr(self) -> int:
        """Return the address, as torch's tensors do."""
        return self.address

    def ptr_range(self) -> int:
        """Return how many bytes the tensor spans, as launches for AMD ask."""
        return span(self.shape, self.strides) * item_bytes(self.dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = item_bytes(self.dtype)
        if self.dtype not in ARRAY_NAMES:
            raise AttributeError(f"arrays have no name for {self.dtype}")
        if self.memory is not None and self.memory.place[0] == dlpack.HOST:
            raise AttributeError("the memory is the host's")
        name = ARRAY_NAMES[self.dtype]
        return {
            "shape": self.shape,
            "strides": tuple(stride * size for stride in self.strides),
            "typestr": f"|{name}" if size == 1 else f"<{name}",
            "data": (self.address, False),
            "version": 3,
            # On which the memory is written: who reads it on another one waits for it.
            "stream": None if self.memory is None else self.memory.stream or LEGACY_STREAM,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind and the number of the device, as DLPack has them."""
        return self._shared_by().place  # type: ignore[no-any-return]  # of `memory`, an Any

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule with which another library reads the memory.

        Args:
            stream: on which it reads: what was launched so far comes before.
            max_version: of DLPack that the library knows; a capsule is of the first, which all do.
            dl_device: where it wants the memory.
            copy: whether it has to be one.

        Raises:
            BufferError: the memory is no `DeviceMemory`'s, or would have to be copied.
        """
        memory = self._shared_by()
        if copy or dl_device not in {None, memory.place}:
            raise BufferError("the memory is passed on where it is, and not copied")
        memory.order_before(stream)
        bits = 8 * item_bytes(self.dtype)
        return dlpack.capsule_of(
            self, self.address, self.dtype, bits, self.shape, self.strides, memory.place
        )

    def _shared_by(self) -> Any:
        if self.memory is None:
            raise BufferError("nobody knows on which device this memory is: it came by its address")
        return self.memory


class PlacedTensor(DeviceTensor):
    """Memory that a `DeviceMemory` allocated or looked at: which device it is on need not be asked
    of the driver at each launch.
    """

    def get_device(self) -> int:
        """Return the number of the device, as torch's tensors do."""
        number: int = self.memory.device_number
        return number


def device_tensor(value: Any, *, host: bool = False, **stream: int) -> Any:
    """Return a value as a launch takes it: torch's tensors as they are, others by
    `__cuda_array_interface__` or DLPack.

    Args:
        value: of any library.
        host: take memory of the host too, for kernels that no GPU runs.
        stream: on which it is read, for libraries that have DLPack.

    Raises:
        CannotLaunchStatically: it is no tensor of a device, or of an element type that no kernel
            takes.
    """
    if is_tensor(value):
        return value
    described = getattr(value, "__cuda_array_interface__", None)
    if described is None and hasattr(value, "__dlpack__"):
        return _dlpack_tensor(value, host=host, **stream)
    if described is None:
        raise CannotLaunchStatically(
            "an input of the program: expected a tensor of a device, with data_ptr,"
            f" __cuda_array_interface__ or __dlpack__, got {type(value).__name__}",
            got=type(value).__name__,
        )
    return array_tensor(value, described)


def array_tensor(value: Any, described: Mapping[str, Any]) -> DeviceTensor:
    """Return what an array interface tells: `__cuda_array_interface__`, or numpy's of the host.

    Raises:
        CannotLaunchStatically: no kernel takes such elements.
    """
    code = str(described["typestr"])
    dtype = TYPES.get(code[1:])
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


def _dlpack_tensor(value: Any, *, host: bool, **stream: int) -> DeviceTensor:
    """Return a tensor that a capsule of DLPack describes.

    Args:
        value: has `__dlpack__`.
        host: take memory of the host too, which kernels of a GPU cannot read.
        stream: on which it is read, for libraries that order their work before that.

    Raises:
        CannotLaunchStatically: its memory is no device's, or no kernel takes its elements.
    """
    kind = type(value).__name__
    try:
        capsule = value.__dlpack__(**stream)
        found = dlpack.described(capsule)
    # A capsule of another name; what cannot be passed on, such as a lazy conjugate.
    except (ValueError, BufferError) as error:
        raise CannotLaunchStatically(
            f"an input of the program: {kind}.__dlpack__() gives no tensor: {error}"
        ) from error
    place = found.device[0]
    if place not in dlpack.DEVICES and not (host and place == dlpack.HOST):
        raise CannotLaunchStatically(
            f"an input of the program: {kind} lies in memory of DLPack's device type {place},"
            " expected a GPU's; copy it there first",
            got=place,
        )
    if found.dtype is None:
        raise CannotLaunchStatically(
            f"an input of the program: no kernel takes elements of DLPack's type {found.type}",
            got=found.type,
        )
    strides = contiguous(found.shape) if found.strides is None else found.strides
    return DeviceTensor(found.address, found.dtype, found.shape, strides, (value, capsule))
