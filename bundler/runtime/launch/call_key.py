# SPDX-License-Identifier: Apache-2.0
"""`Reader`: reads a call's arguments once, for the key that `StaticKernel` remembers the call by
and the values it launches with.

Two calls with one key need the same kernel.  Every launch that the compiled dispatcher does not
take runs this, so it is written for speed: one pass, no object but the key.

`check_memory` looks whether the tensors of a value lie on the device that runs the kernel,
`check_address` the same of an address given as a number: `StaticKernel` asks for each new kind of
call, `Handle` at its first launch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.runtime.launch.argument_types import (
    has_small_range,
    is_constant,
    is_descriptor,
    is_tensor,
)

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_LONG_MIN, _LONG_MAX, _ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
_UNALIGNED = 15
_DOUBLE = struct.Struct(">d")
# Types of constants whose entry in a key is (type, value).
BY_VALUE = frozenset({int, bool, str, type(None)})
UNCACHEABLE = object()


class Reader:
    """Reads calls of one kernel.

    A key has one entry an argument.  Calls with equal keys need the same kernel; the other way
    round it need not hold.  Any thread may use it.

    Args:
        backend: whose rules hold.
        pointer_device: tells the device of an address, for tensors that do not.
    """

    def __init__(self, backend: str, pointer_device: Callable[[int], int | None]) -> None:
        self._pointer_device = pointer_device
        self._small_ranges_count = backend == "hip"
        # Types met before whose tensors tell their device; empty on HIP, where the size of a tensor
        # counts, too.
        self._tensor_types: frozenset[type] = frozenset()

    def read(
        self, args: Any, constant: Any, device: int, key: list[Any], values: list[Any]
    ) -> None:
        """Append to `key` an entry for each argument, and to `values` the argument, or its address
        when it is a tensor.

        Args:
            args: the arguments.
            constant: for each, whether it counts by its value; when it ends before them, the rest
                is not read.
            device: the current one.
            key: gets the entries; one may be `UNCACHEABLE`.
            values: see above.
        """
        tensor_types = self._tensor_types
        # naming `strict` costs as much as an argument
        for value, by_value in zip(args, constant):  # noqa: B905
            kind = type(value)
            if by_value:
                key.append((kind, value) if kind in BY_VALUE else self.constant(value))
                values.append(value)
            elif kind in tensor_types:
                address = value.data_ptr()
                key.append(_tensor_entry(value.dtype, address, value.get_device(), device))
                values.append(address)
            elif kind is int:
                if value != 1 and _INT_MIN <= value <= _INT_MAX:
                    key.append(2 if value & _UNALIGNED else 3)
                else:
                    key.append(_class_of(value))
                values.append(value)
            else:
                key.append(self._entry(value, device))
                values.append(value.data_ptr() if is_tensor(value) else value)

    def constant(self, value: Any) -> Any:
        """Return the entry of a value that is compiled in: another one for each value, of whatever
        type.
        """
        kind = type(value)
        if kind in BY_VALUE:
            return kind, value
        if kind is float:
            return kind, _DOUBLE.pack(value)  # -0.0 equals 0.0, and NaN not itself
        if kind is tuple:
            entries = tuple(map(self.constant, value))
            return UNCACHEABLE if UNCACHEABLE in entries else entries
        if kind.__name__ == "dtype":
            return kind, str(value)
        if is_constant(value):
            return kind, getattr(value, "cache_key", None) or self.constant(value.value)
        return UNCACHEABLE

    def _entry(self, value: Any, device: int) -> Any:
        if value is None:
            return None
        if isinstance(value, bool | float):
            return type(value)
        if isinstance(value, int):
            return _class_of(value)
        if isinstance(value, tuple):
            entries = tuple(self._entry(item, device) for item in value)
            return UNCACHEABLE if UNCACHEABLE in entries else ("tuple", entries)
        if is_tensor(value):
            return self._tensor(value, device)
        if is_descriptor(value):
            return ("descriptor", self._tensor(value.base, device), tuple(value.block_shape))
        return self.constant(value)

    def _tensor(self, tensor: Any, device: int) -> Any:
        found = device_of(tensor, self._pointer_device)
        entry = _tensor_entry(tensor.dtype, tensor.data_ptr(), found, device)
        if self._small_ranges_count:
            return entry, has_small_range(tensor)
        if hasattr(tensor, "get_device"):
            self._tensor_types |= {type(tensor)}
        return entry


def _tensor_entry(dtype: Any, address: int, found: int | None, device: int) -> Any:
    """Return the entry of a tensor found on a device: its type alone in the common case, aligned
    and on the current device.
    """
    aligned = address & _UNALIGNED == 0
    if aligned and found == device:
        return dtype
    # A tensor without memory may be anywhere, and one with memory on another device may not: they
    # are two kinds of call.
    return dtype, found, aligned, address == 0


def device_of(tensor: Any, pointer_device: Callable[[int], int | None]) -> int | None:
    """Return the index of a tensor's device, None or a negative number when it is no GPU; a null
    address is everywhere.
    """
    ask = getattr(tensor, "get_device", None)
    if ask is not None:
        device: int = ask()
        return device
    return pointer_device(tensor.data_ptr())


def _class_of(number: int) -> int:
    """Return one number for all integers that Triton compiles the same kernel for."""
    if number == 1:
        return 1
    aligned = number & _UNALIGNED == 0
    if _INT_MIN <= number <= _INT_MAX:
        return 2 + aligned
    if _LONG_MIN <= number <= _LONG_MAX:
        return 4 + aligned
    return 6 + aligned if 0 <= number <= _ULONG_MAX else 8


PointerDevice = Callable[[int], int | None]


def check_memory(
    kernel: str, argument: str, value: Any, device: int, pointer_device: PointerDevice
) -> None:
    """Raise unless every tensor in a value, which may be a tuple or a descriptor, lies on a device.

    Raises:
        CannotLaunchStatically: a tensor of the host, or of another device.
    """
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            check_memory(kernel, f"{argument}[{index}]", item, device, pointer_device)
    elif is_descriptor(value):
        check_memory(kernel, f"{argument}.base", value.base, device, pointer_device)
    elif is_tensor(value) and value.data_ptr():
        check_device(
            kernel, argument, device_of(value, pointer_device), device, f"a tensor ({value.dtype})"
        )


def check_address(
    kernel: str, argument: str, address: Any, device: int, pointer_device: PointerDevice
) -> None:
    """Raise unless an address given as an integer is null or lies on a device; a value that is no
    address passes.
    """
    if type(address) is int and address:
        check_device(kernel, argument, pointer_device(address), device, f"the address {address:#x}")


def check_device(kernel: str, argument: str, found: int | None, device: int, what: str) -> None:
    """Raise `CannotLaunchStatically` when memory found on one device is to be used on another."""
    if found == device:
        return
    where = "host memory" if found is None or found < 0 else f"device {found}"
    raise CannotLaunchStatically(
        f"{kernel}: argument {argument!r} is {what} in {where}, and the kernel is launched on"
        f" device {device}; move it there, or make its device the current one",
        kernel=kernel,
        argument=argument,
        expected=device,
        got=found,
    )
