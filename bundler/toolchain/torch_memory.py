# SPDX-License-Identifier: Apache-2.0
"""`TorchMemory`: tensors of torch for programs that are replayed or run: allocation, views, and operators called by name; `example_tensor`.

The generator's programs, and users of `load_program` whose programs call operators, make one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bundler.errors import ConfigError, NotFound

# Operators of other namespaces are a program's own, and may do anything.
_NAMESPACES = frozenset({"aten", "prims"})


class TorchMemory:
    """Allocates on one device.

    Args:
        device: as torch names it, `cpu` or `cuda:0`.

    Raises:
        ConfigError: torch is not installed.
    """

    def __init__(self, device: str = "cpu") -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ConfigError(f"tensors of torch were asked for, and torch cannot be imported: {error}") from error
        self._device = self._torch.device(device)

    def allocate(self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a new tensor, whose elements may be anything."""
        return self._torch.empty_strided(sizes, strides, dtype=getattr(self._torch, dtype), device=self._device)

    def view(self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        """Return a tensor's memory seen in another way; the offset counts from the tensor's first element."""
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)

    def integers(self, numbers: Sequence[int]) -> Any:
        """Return a new int64 tensor that holds these numbers."""
        return self._torch.tensor(list(numbers), dtype=self._torch.int64, device=self._device)

    def seeds(self, count: int) -> Any:
        """Return seeds of random numbers from torch's default generator of the device, which `torch.manual_seed` sets."""
        limits = self._torch.iinfo(self._torch.int64)
        return self._torch.randint(limits.min, limits.max, (count,), dtype=self._torch.int64, device=self._device)

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call an operator of ATen by its name.

        Raises:
            NotFound: there is none of that name.
        """
        namespace, _, rest = operator.partition(".")
        packet, _, overload = rest.rpartition(".")
        if namespace not in _NAMESPACES:
            raise NotFound(
                f"operator {operator}: a program calls operators of {', '.join(sorted(_NAMESPACES))} alone",
                name=operator,
            )
        try:
            found = getattr(getattr(getattr(self._torch.ops, namespace), packet), overload)
        except AttributeError as error:
            raise NotFound(f"operator {operator}: the installed torch has none of that name", name=operator) from error
        given = [self._decoded(item) for item in arguments]
        return found(*given, **{name: self._decoded(item) for name, item in keywords.items()})

    def _decoded(self, item: Any) -> Any:
        """Return a value that only torch has for its name."""
        if isinstance(item, list):
            return [self._decoded(part) for part in item]
        if not isinstance(item, dict):
            return item
        ((kind, name),) = item.items()
        if kind == "device":
            return self._device
        if kind in {"dtype", "memory_format", "layout"}:
            return getattr(self._torch, name)
        raise NotFound(f"a call's argument {item!r:.80}: expected a dtype, a device or a memory format", name=kind)


def example_tensor(text: str) -> Any:
    """Return a tensor of zeros of a type and sizes, such as `float32[128,512]`, on the CPU.

    Raises:
        ConfigError: the text is no such description, or torch is not installed.
    """
    found = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", text)
    torch: Any = TorchMemory()._torch  # noqa: SLF001  # of this module
    dtype = getattr(torch, found[1], None) if found else None
    if found is None or not isinstance(dtype, torch.dtype):
        raise ConfigError(f"input {text!r}: expected a dtype of torch and sizes, such as float32[128,512]", got=text)
    return torch.zeros([int(size) for size in found[2].split(",") if size], dtype=dtype)


def random_tensor(dtype: str, sizes: Sequence[int], strides: Sequence[int], *, device: str) -> Any:
    """Return a tensor of random floats, or of zeros where the dtype is of whole numbers, since these may be indices.

    Raises:
        ConfigError: torch is not installed.
    """
    memory = TorchMemory(device)
    tensor = memory.allocate(dtype, tuple(sizes), tuple(strides))
    torch: Any = memory._torch  # noqa: SLF001  # of this module
    # 8-bit floats are not drawn, but converted; elements that a tensor repeats are written once.
    tensor = tensor.zero_()
    return (
        tensor.copy_(torch.randn(tuple(sizes), device=device))
        if tensor.dtype.is_floating_point and 0 not in strides
        else tensor
    )


def unusual_numbers(tensors: Sequence[Any]) -> str:
    """Return what is wrong with the numbers of tensors of torch: the first that has a NaN or an infinity; empty where none has."""
    for number, tensor in enumerate(tensors):
        if getattr(tensor, "is_floating_point", bool)():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            for kind in ("isnan", "isinf"):
                if bool(getattr(wide, kind)().any()):
                    return f"tensor {number} has {'a NaN' if kind == 'isnan' else 'an infinity'}"
    return ""
