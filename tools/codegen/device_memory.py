# SPDX-License-Identifier: Apache-2.0
"""`DeviceMemory`: memory of a GPU through the CUDA driver alone, for programs that are replayed in
a process without torch.

`cold_replay` and `mission_launch` make one: what arrays of numpy hold is copied in, and results are
copied out.  Tensors of a program are one part each of memory that is taken once, and all free again
after `reset`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from bundler.runtime.program.device_tensors import DeviceTensor, contiguous, item_bytes

_ALIGNMENT = 512


class DeviceMemory:
    """A context on the first GPU, and memory there.

    Args:
        size: bytes that are taken.
    """

    def __init__(self, size: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._start, self._size, self._used = address.value, size, 0

    def reset(self) -> None:
        """Take all memory back."""
        self._used = 0

    def allocate(
        self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> DeviceTensor:
        """Return a new tensor, whose elements may be anything."""
        made = DeviceTensor(self._start + self._used, dtype, tuple(sizes), tuple(strides))
        self._used += -(-max(made.ptr_range(), 1) // _ALIGNMENT) * _ALIGNMENT
        if self._used > self._size:
            raise MemoryError(f"{self._used} bytes are needed, {self._size} were taken")
        return made

    def view(
        self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> DeviceTensor:
        """Return a tensor's memory seen in another way."""
        return DeviceTensor(
            tensor.data_ptr() + offset * item_bytes(tensor.dtype),
            tensor.dtype,
            tuple(sizes),
            tuple(strides),
        )

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Refuse: there is no torch that could call it."""
        raise NotImplementedError(operator)

    def put(self, values: Any, dtype: str) -> DeviceTensor:
        """Copy an array of numpy, whose elements have the bits of a dtype."""
        made = self.allocate(dtype, values.shape, contiguous(values.shape))
        if values.nbytes:
            self._copy_in(made, ctypes.c_void_p(values.ctypes.data), values.nbytes)
        return made

    def integers(self, numbers: Sequence[int]) -> DeviceTensor:
        """Return a new int64 tensor that holds these numbers: seeds of a program."""
        made = self.allocate("int64", (len(numbers),), (1,))
        source = (ctypes.c_int64 * len(numbers))(*numbers)
        self._copy_in(made, source, ctypes.sizeof(source))
        return made

    def _copy_in(self, tensor: DeviceTensor, source: Any, size: int) -> None:
        address = ctypes.c_uint64(tensor.address)
        self._call("cuMemcpyHtoD_v2", address, source, ctypes.c_size_t(size))

    def fill(self, tensor: DeviceTensor) -> None:
        """Set every byte of a tensor to zero."""
        size = ctypes.c_size_t(tensor.ptr_range())
        self._call("cuMemsetD8_v2", ctypes.c_uint64(tensor.address), 0, size)

    def get(self, tensor: DeviceTensor) -> bytearray:
        """Return the bytes that a tensor spans."""
        found = bytearray(tensor.ptr_range())
        if found:
            there = (ctypes.c_char * len(found)).from_buffer(found)
            address, size = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(len(found))
            self._call("cuMemcpyDtoH_v2", there, address, size)
        return found

    def synchronize(self) -> None:
        """Wait until the GPU has done everything."""
        self._call("cuCtxSynchronize")

    def _call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver; raises where it reports an error."""
        status = getattr(self._cuda, function)(*arguments)
        if status:
            raise RuntimeError(f"CUDA status {status}")
