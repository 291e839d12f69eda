# SPDX-License-Identifier: Apache-2.0
"""`DeviceTracing`: traces a function for a device that this machine, or this build of torch, does
not have.  Imports torch.

Inputs, and the parameters and buffers of a module, are torch's fake tensors on that device: they
have sizes and strides, and no memory.  Where torch would ask the device or its libraries how to
compute, this decides, so that every machine traces the same graph:

- `scaled_dot_product_attention` is flash attention for float16 and bfloat16 tensors of four
  dimensions, without a mask, whose heads have a multiple of 8 and at most 256 elements;
  memory-efficient attention for these types and float32, also with a mask of numbers whose last
  dimension is a multiple of 16, and elements of a head a multiple of 8; products and a softmax
  otherwise;
- recurrent layers and batch norm are torch's own operators, not cuDNN's;
- a device without a number is that of the trace.

`trace` uses it where `generate` is given a device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from bundler.errors import ConfigError, UnsupportedOperator

aten = torch.ops.aten
_DEVICES = ("cpu", "cuda")
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
# libc10's table of what switches between devices of each kind, and two numbers of c10::DeviceType.
_GUARDS, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 1, 14
_HALVES = frozenset({torch.float16, torch.bfloat16})
_LARGEST_HEAD, _HEAD_MULTIPLE, _MASK_MULTIPLE, _RANK = 256, 8, 16, 4


class DeviceTracing(TorchFunctionMode):  # type: ignore[misc]  # torch has no types for it
    """What torch's functions do while a function is traced for a device.

    Args:
        device: as torch names it.
        dynamic: let sizes be symbols.

    Raises:
        ConfigError: there is no such device, or no kernels for it.
    """

    def __init__(self, device: str, *, dynamic: bool) -> None:
        super().__init__()
        self.device = _device(device)
        self.mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=ShapeEnv() if dynamic else None
        )
        self._dynamic = dynamic

    @property
    def is_here(self) -> bool:
        """Whether this process has the device."""
        place = self.device.index or 0
        return self.device.type == "cpu" or place < int(torch.cuda.device_count())

    def faked(self, values: Sequence[Any]) -> list[Any]:
        """Return values in which tensors are fake ones on the device, with the same sizes and
        strides.
        """
        return [self._faked(v) if isinstance(v, torch.Tensor) else v for v in values]

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self.mode.from_tensor(tensor, static_shapes=not self._dynamic)
        with self.mode:
            return torch.empty_strided(
                known.size(), known.stride(), dtype=known.dtype, device=self.device
            )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch as this machine can trace it."""
        if function is torch.device:  # what it makes is placed where it is used
            return function(*args, **(kwargs or {}))
        keywords = {name: self._placed(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(self._placed, args))
        if function is torch.Tensor.cuda:
            return args[0].to(self.device)
        if function is _ATTENTION:
            return _attention(*args, **keywords)
        return function(*args, **keywords)

    def _placed(self, value: Any) -> Any:
        """Return a device with a number in the place of one without."""
        named = isinstance(value, str) and value == self.device.type
        plain = isinstance(value, torch.device) and value == torch.device(self.device.type)
        return self.device if (named or plain) and self.device.type != "cpu" else value


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {name!r}: torch has none of that name", got=name) from error
    if found.type not in _DEVICES:
        raise ConfigError(
            f"device {name!r}: expected one of {', '.join(_DEVICES)}, such as cuda or cuda:1",
            got=name,
        )
    return torch.device(found.type, found.index or 0) if found.type != "cpu" else found


@contextmanager
def _guarded() -> Iterator[None]:
    """Let torch's C++ part switch to a GPU that the build does not know, which does nothing, as it
    does for a build that knows GPUs and finds none.

    Indexing and copies switch to their tensor's device.  A build without GPUs has nobody to ask for
    that, so that of the device "meta", which has no memory either, is asked.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        guards = (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(library), _GUARDS)
    except (OSError, ValueError) as error:
        raise UnsupportedOperator(
            f"this build of torch, {torch.__version__}, cannot trace for a GPU: {error}; use a"
            " build with support for CUDA, no GPU is needed",
            operator="device",
        ) from error
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@contextmanager
def tracing_for(device: str, *, dynamic: bool) -> Iterator[DeviceTracing]:
    """Return a context in which a function is traced for a device; raises as `DeviceTracing`."""
    tracing = DeviceTracing(device, dynamic=dynamic)
    functional = torch.nn.functional
    theirs = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        with _guarded(), torch.backends.cudnn.flags(enabled=False), tracing.mode, tracing:
            yield tracing
    finally:
        functional.scaled_dot_product_attention = theirs


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    tensors = (query, key, value)
    head = query.shape[-1]
    fits = (
        all(tensor.dim() == _RANK and tensor.shape[-1] == head for tensor in tensors)
        and all(tensor.shape[-3] == query.shape[-3] for tensor in tensors)
        and all(tensor.dtype == query.dtype and tensor.stride(-1) == 1 for tensor in tensors)
        and head % _HEAD_MULTIPLE == 0
    )
    if fits and attn_mask is None and query.dtype in _HALVES and head <= _LARGEST_HEAD:
        return aten._scaled_dot_product_flash_attention(  # noqa: SLF001  # torch names it so
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if fits and query.dtype in {*_HALVES, torch.float32} and _is_bias(attn_mask, query):
        bias = attn_mask
        if bias is not None:
            bias = bias.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
        tracked = any(tensor.requires_grad for tensor in tensors)
        return aten._scaled_dot_product_efficient_attention(  # noqa: SLF001  # torch names it so
            query, key, value, bias, tracked, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(  # noqa: SLF001  # torch names it so
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _is_bias(mask: Any, query: Any) -> bool:
    """Whether memory-efficient attention takes a mask: none, or numbers in rows that begin at
    multiples of 16 elements.
    """
    if mask is None:
        return True
    rows = (*mask.shape[-1:], *mask.stride()[:-1])
    return bool(
        mask.dtype == query.dtype
        and mask.stride(-1) == 1
        and all(isinstance(part, int) and part % _MASK_MULTIPLE == 0 for part in rows)
    )
