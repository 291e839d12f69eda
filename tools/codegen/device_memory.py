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
        self._check(self._cuda.cuInit(0))
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self._check(self._cuda.cuCtxSetCurrent(context))
        self._check(self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
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
            source = ctypes.c_void_p(values.ctypes.data)
            self._check(
                self._cuda.cuMemcpyHtoD_v2(
                    ctypes.c_uint64(made.address), source, ctypes.c_size_t(values.nbytes)
                )
            )
        return made

    def integers(self, numbers: Sequence[int]) -> DeviceTensor:
        """Return a new int64 tensor that holds these numbers: seeds of a program."""
        made = self.allocate("int64", (len(numbers),), (1,))
        source = (ctypes.c_int64 * len(numbers))(*numbers)
        self._check(
            self._cuda.cuMemcpyHtoD_v2(
                ctypes.c_uint64(made.address), source, ctypes.c_size_t(ctypes.sizeof(source))
            )
        )
        return made

    def fill(self, tensor: DeviceTensor) -> None:
        """Set every byte of a tensor to zero."""
        self._check(
            self._cuda.cuMemsetD8_v2(
                ctypes.c_uint64(tensor.address), 0, ctypes.c_size_t(tensor.ptr_range())
            )
        )

    def get(self, tensor: DeviceTensor) -> bytearray:
        """Return the bytes that a tensor spans."""
        found = bytearray(tensor.ptr_range())
        if found:
            there = (ctypes.c_char * len(found)).from_buffer(found)
            self._check(
                self._cuda.cuMemcpyDtoH_v2(
                    there, ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(len(found))
                )
            )
        return found

    def synchronize(self) -> None:
        """Wait until the GPU has done everything."""
        self._check(self._cuda.cuCtxSynchronize())

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA status {status}")
