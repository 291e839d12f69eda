# SPDX-License-Identifier: Apache-2.0
"""Checks that the memory which a kernel is to use lies on the device that runs it.

`check_memory` looks at the tensors of a value, `check_address` at an address given as a number.
`StaticKernel` calls them for each new kind of call, `Handle` at its first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.runtime.launch.calls.argument_types import is_descriptor, is_tensor
from bundler.runtime.launch.calls.call_key import device_of

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
