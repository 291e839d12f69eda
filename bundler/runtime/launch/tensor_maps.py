# SPDX-License-Identifier: Apache-2.0
"""`encode_tensor_map`: a tensor descriptor of the host as the 128-byte map that NVIDIA's bulk copy engine reads, for `CudaDriver`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NoReturn

from bundler.errors import CannotLaunchStatically
from bundler.runtime.launch import cuda_api as api
from bundler.runtime.launch.plan import TENSOR_MAP_BYTES, LaunchPlan, TensorMap

_MAP_ALIGNMENT = 64
# The compiler numbers three types (bf16, fp32 and fp64 among them) in another order than the driver.
_DEVICE_TO_HOST = {8: 10, 9: 8, 10: 9}
# Up to this version the driver sets a bit that makes reads from small tensors fault; Triton and CUTLASS clear it as well.
_LAST_VERSION_WITH_FAULT = 13010
_SMALL_TENSOR_BYTES = 128 * 1024
_FAULTY_BIT = 64 + 21


def encode_tensor_map(
    encode: Any, driver_version: int, plan: LaunchPlan, wanted: TensorMap, descriptor: Any
) -> bytes:
    """Return the map.

    Args:
        encode: the driver's `cuTensorMapEncodeTiled`, None where it has none.
        driver_version: as the driver gives it: 13010 is CUDA 13.1.
        plan: of the kernel, for the words of an error.
        wanted: what the compiler wants of the map.
        descriptor: with `base`, `shape`, `strides`, and perhaps `padding` and `round_f32_to_tf32`.

    Raises:
        CannotLaunchStatically: the descriptor does not fit the kernel, or the driver has no tensor maps.
    """
    if encode is None:
        _refuse(plan, "the driver is too old for tensor maps, which came with CUDA 12; update it")
    try:
        base, shape, strides = descriptor.base, list(descriptor.shape), list(descriptor.strides)
        address = base if isinstance(base, int) else base.data_ptr()
    except (AttributeError, TypeError) as error:
        _refuse(plan, f"{type(descriptor).__name__} is no tensor descriptor: {error}")
    rank = len(wanted.block_size)
    if not len(shape) == len(strides) == rank or strides[-1] != 1:
        _refuse(plan, f"a tensor descriptor has shape {shape} and strides {strides}; this kernel takes {rank} dimensions, "
                "the last of them contiguous")  # fmt: skip
    if wanted.fp4_padded:
        shape[-1] *= 2
    rounds = getattr(descriptor, "round_f32_to_tf32", False)
    element = (
        api.TENSOR_MAP_TF32 if rounds else _DEVICE_TO_HOST.get(wanted.elem_type, wanted.elem_type)
    )
    fill = api.FILL_NAN if getattr(descriptor, "padding", "zero") == "nan" else api.FILL_NONE
    return _encode(encode, driver_version, plan, wanted, address, element, fill, shape, strides)


def _encode(
    encode: Any,
    driver_version: int,
    plan: LaunchPlan,
    wanted: TensorMap,
    address: int,
    element: int,
    fill: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> bytes:
    rank = len(shape)
    # The driver counts dimensions from the innermost; the stride of that one goes without saying.
    sizes, steps = shape[::-1], [stride * wanted.elem_size for stride in strides[::-1]]
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    status = encode(
        ctypes.addressof(memory) + start, element, rank, address,
        _array(ctypes.c_uint64, sizes), _array(ctypes.c_uint64, [*steps[1:], 0]),
        _array(ctypes.c_uint32, wanted.block_size[::-1]), _array(ctypes.c_uint32, [1] * rank),
        api.INTERLEAVE_NONE, wanted.swizzle, api.PROMOTION_L2_128B, fill,
    )  # fmt: skip
    if status:
        _refuse(plan, f"the driver makes no tensor map (status {status}) of address {address:#x}, shape {list(shape)}, "
                f"strides {list(strides)}, block {list(wanted.block_size)}, element type {element}, "
                f"swizzle {wanted.swizzle}; an address is a multiple of 16, and so are the strides in bytes")  # fmt: skip
    encoded = memory.raw[start : start + TENSOR_MAP_BYTES]
    last_byte = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if driver_version <= _LAST_VERSION_WITH_FAULT and last_byte + 1 < _SMALL_TENSOR_BYTES:
        encoded = (int.from_bytes(encoded, "little") & ~(1 << _FAULTY_BIT)).to_bytes(
            TENSOR_MAP_BYTES, "little"
        )
    return encoded


def _array(kind: Any, numbers: Sequence[int]) -> Any:
    return (kind * len(numbers))(*numbers)


def _refuse(plan: LaunchPlan, reason: str) -> NoReturn:
    raise CannotLaunchStatically(f"{plan.kernel}: {reason}", kernel=plan.kernel)
