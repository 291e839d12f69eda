# SPDX-License-Identifier: Apache-2.0
"""`CudaDriver`: kernels on NVIDIA GPUs, through the driver API alone; `drivers.py` opens it.

What it shares with HIP is in `native_driver.py`: here are contexts, pointers, limits of functions,
launch attributes, and tensor descriptors of the host as the 128-byte maps that the bulk copy engine
reads (`_encode_tensor_map`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable
from bundler.runtime.launch.drivers import cuda_api as api
from bundler.runtime.launch.drivers.launchers import Leave, image_loader, packed_attributes
from bundler.runtime.launch.drivers.native_driver import MAX_THREADS, Library, NativeDriver
from bundler.runtime.launch.drivers.native_pool import PoolCalls
from bundler.runtime.launch.plan import TENSOR_MAP_BYTES, LaunchPlan, TensorMap

_POOL_CALLS = PoolCalls(api.POOL, api.GRAPHS, kind=2)
# A block gets this much shared memory, static and dynamic together, from any GPU.  The driver
# launches a kernel that needs more only after its limit was raised with cuFuncSetAttribute.
_SHARED_WITHOUT_ASKING_BYTES = 48 * 1024
# Where the extension's `load_image` stopped.
_LOADING, _FINDING = 1, 2
_MAP_ALIGNMENT = 64
# The compiler numbers three types (bf16, fp32 and fp64 among them) in another order than the
# driver.
_DEVICE_TO_HOST = {8: 10, 9: 8, 10: 9}
# Up to this version the driver sets a bit that makes reads from small tensors fault; Triton and
# CUTLASS clear it as well.
_LAST_VERSION_WITH_FAULT = 13010
_SMALL_TENSOR_BYTES = 128 * 1024
_FAULTY_BIT = 64 + 21


class CudaDriver(NativeDriver):
    """The CUDA driver of this process; see `Driver` and `NativeDriver`.

    Args:
        library: the name or path of the driver's library.
        compiled: whether launches go through our extension; None: if it was built.
    """

    backend = "cuda"
    calls = api.CALLS
    asked = (
        api.MAX_THREADS_PER_BLOCK,
        api.MAX_SHARED_OPTIN,
        api.WARP_SIZE,
        api.MULTIPROCESSORS,
        api.COOPERATIVE_LAUNCH,
    )
    pool_calls = _POOL_CALLS
    elsewhere: ClassVar[frozenset[int]] = frozenset(
        {api.INVALID_CONTEXT, api.INVALID_HANDLE, api.CONTEXT_IS_DESTROYED}
    )

    def __init__(self, library: str = api.LIBRARY, compiled: bool | None = None) -> None:
        self._retained: dict[int, int] = {}
        super().__init__(Library(library, api.SIGNATURES, self.backend), compiled)
        functions = tuple(getattr(self._library, name) for name in api.LOADING)
        self.load_image = None if self.launch_path == "ctypes" else image_loader(functions)

    def pointer_device(self, address: int) -> int | None:
        """Return the device that an address belongs to, None for memory that no device can read."""
        self.check_alive()
        self._ensure_context()
        kind, managed, device = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_int()
        ask = self._library.cuPointerGetAttribute
        if ask(ctypes.byref(kind), api.POINTER_MEMORY_TYPE, address):
            return None
        self.check(
            ask(ctypes.byref(managed), api.POINTER_IS_MANAGED, address), "cuPointerGetAttribute"
        )
        if kind.value == api.MEMORY_ON_HOST or managed.value:
            return self.device()
        self.check(
            ask(ctypes.byref(device), api.POINTER_DEVICE_ORDINAL, address), "cuPointerGetAttribute"
        )
        return device.value

    def tensor_map(self, plan: LaunchPlan, tensor_map: TensorMap, descriptor: Any) -> bytes:
        """Return the 128 bytes that a tensor descriptor on the host becomes for this kernel."""
        self.check_alive()
        encode = self._library.find(
            "cuTensorMapEncodeTiled", api.OPTIONAL_SIGNATURES["cuTensorMapEncodeTiled"]
        )
        return _encode_tensor_map(encode, self._version(), plan, tensor_map, descriptor)

    def _start(self) -> None:
        status = self._library.cuInit(0)
        if status == api.NOT_INITIALIZED:
            raise DriverUnavailable(
                "CUDA cannot be used in this process: it was in use before the process was forked;"
                " start processes with multiprocessing's 'spawn' or 'forkserver'",
                backend=self.backend,
                status=status,
            )
        if status:
            raise DriverUnavailable(
                f"CUDA cannot be used here: {self._words(status)}; is there a GPU, and does"
                " CUDA_VISIBLE_DEVICES show it?",
                backend=self.backend,
                status=status,
            )

    def _words(self, status: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        if self._library.cuGetErrorName(status, name) or self._library.cuGetErrorString(
            status, text
        ):
            return f"status {status}"
        return f"{(name.value or b'').decode()} ({(text.value or b'').decode()})"

    def _version(self) -> int:
        version = ctypes.c_int()
        self.check(self._library.cuDriverGetVersion(version), "cuDriverGetVersion")
        return version.value

    # ------------------------------------------------------------------------------------- Contexts

    def _current_device(self) -> int:
        device = ctypes.c_int()
        status = self._library.cuCtxGetDevice(device)
        if status == api.INVALID_CONTEXT:  # there is none in this thread
            return 0
        if status:
            self.refuse(status, "cuCtxGetDevice")
        return device.value

    def _current_place(self) -> int:
        context = ctypes.c_void_p()
        self.check(self._library.cuCtxGetCurrent(context), "cuCtxGetCurrent")
        return context.value or 0

    def _go_to(self, device: int) -> tuple[int, Leave]:
        """Make a context for a device current: the one that is, if it is on that device, else the
        primary one.
        """
        current = self._current_place()
        if current and self._current_device() == device:
            return current, _stay
        primary = self._primary(device)
        return primary, self._enter(primary)

    def _primary(self, device: int) -> int:
        with self.lock:
            if device not in self._retained:
                context = ctypes.c_void_p()
                self.check(
                    self._library.cuDevicePrimaryCtxRetain(context, device),
                    f"making a context on device {device}",
                )
                self._retained[device] = context.value or 0
            return self._retained[device]

    def _ensure_context(self) -> None:
        if not self._current_place():
            self._enter(self._primary(0))

    def _enter(self, context: int) -> Leave:
        current = self._current_place()
        if current == context:
            return _stay
        if not current:
            # Stays, as it would after a call of CUDA's runtime: the thread's next launches find it.
            self.check(self._library.cuCtxSetCurrent(context), "cuCtxSetCurrent")
            return _stay
        self.check(self._library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        return self._leave

    def _leave(self) -> None:
        self.check(self._library.cuCtxPopCurrent_v2(ctypes.c_void_p()), "cuCtxPopCurrent")

    # -------------------------------------------------------------------------- Devices and modules

    def _arch(self, device: int) -> str:
        return str(self._ask_device(api.MAJOR, device) * 10 + self._ask_device(api.MINOR, device))

    def _load_here(
        self, plan: LaunchPlan, image: bytes, device: int
    ) -> tuple[int, int, int] | None:
        """Load a binary in one call of the extension: each call through ctypes costs as much as the
        driver's quicker ones.
        """
        found = (
            None
            if self.load_image is None
            else self.load_image(image, plan.entry.encode(), device, MAX_THREADS)
        )
        if found is None:
            return None
        step, status, place, handle, function, threads = found
        if step == _LOADING:
            self._refuse_image(plan, device, status)
        try:
            if status:
                call = (
                    f"looking for the entry {plan.entry!r}"
                    if step == _FINDING
                    else "cuFuncGetAttribute"
                )
                self.refuse(status, call, plan)
            # As `_allow` finds out of nearly every kernel that it needs nothing.
            if (
                plan.shared_bytes
                or plan.cluster > api.PORTABLE_CLUSTER
                or plan.block_threads > threads
            ):
                self._allow(plan, function, device, threads)
        except DriverError:
            self._library.cuModuleUnload(handle)
            raise
        return place, handle, function

    def _allow(self, plan: LaunchPlan, function: int, device: int, threads: int) -> None:
        """Let the kernel have the shared memory and the cluster that it was compiled for, too."""
        super()._allow(plan, function, device, threads)
        if plan.shared_bytes:
            static = self._ask_function(function, api.FUNCTION_STATIC_SHARED, plan)
            if plan.shared_bytes + static > _SHARED_WITHOUT_ASKING_BYTES:
                self._do("cuFuncSetCacheConfig", function, api.CACHE_PREFER_SHARED)
                self._set_function(
                    function, api.FUNCTION_MAX_DYNAMIC_SHARED, plan.shared_bytes, plan
                )
        if plan.cluster > api.PORTABLE_CLUSTER:
            self._set_function(function, api.FUNCTION_NON_PORTABLE_CLUSTER, 1, plan)

    def _set_function(self, function: int, attribute: int, value: int, plan: LaunchPlan) -> None:
        self.check(
            self._library.cuFuncSetAttribute(function, attribute, value),
            f"cuFuncSetAttribute({attribute}, {value})",
            plan,
        )

    def _launching(self, plan: LaunchPlan) -> tuple[Any, Any | None, bytes]:
        # CUDA before 11.8 lacks the second, and a kernel with attributes is then refused.
        plain, extended = self._library.find(api.LAUNCH), self._library.find(api.LAUNCH_EXTENDED)
        return plain, extended, launch_attributes(plan)


def _stay() -> None:
    """The way back for a thread that went nowhere."""


def launch_attributes(plan: LaunchPlan) -> bytes:
    """Return the launch attributes as the driver's structures, in the order that Triton's launcher
    has.
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    if plan.pdl:
        found.append((api.PROGRAMMATIC_SERIALIZATION, (1,)))
    if plan.cooperative:
        found.append((api.COOPERATIVE, (1,)))
    if plan.cluster > 1:
        found += [
            (api.CLUSTER_DIMENSION, (plan.cluster, 1, 1)),
            (api.CLUSTER_SCHEDULING, (api.CLUSTER_SPREAD,)),
        ]
    return packed_attributes(*found)


def _encode_tensor_map(
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
        CannotLaunchStatically: the descriptor does not fit the kernel, or the driver has no tensor
            maps.
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
        _refuse(
            plan,
            f"a tensor descriptor has shape {shape} and strides {strides}; this kernel takes {rank}"
            " dimensions, the last of them contiguous",
        )
    if wanted.fp4_padded:
        shape[-1] *= 2
    rounds = getattr(descriptor, "round_f32_to_tf32", False)
    element = (
        api.TENSOR_MAP_TF32 if rounds else _DEVICE_TO_HOST.get(wanted.elem_type, wanted.elem_type)
    )
    fill = api.FILL_NAN if getattr(descriptor, "padding", "zero") == "nan" else api.FILL_NONE
    # The driver counts dimensions from the innermost; the stride of that one goes without saying.
    sizes, steps = shape[::-1], [stride * wanted.elem_size for stride in strides[::-1]]
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % _MAP_ALIGNMENT
    status = encode(
        ctypes.addressof(memory) + start,
        element,
        rank,
        address,
        _array(ctypes.c_uint64, sizes),
        _array(ctypes.c_uint64, [*steps[1:], 0]),
        _array(ctypes.c_uint32, wanted.block_size[::-1]),
        _array(ctypes.c_uint32, [1] * rank),
        api.INTERLEAVE_NONE,
        wanted.swizzle,
        api.PROMOTION_L2_128B,
        fill,
    )
    if status:
        _refuse(
            plan,
            f"the driver makes no tensor map (status {status}) of address {address:#x}, shape"
            f" {list(shape)}, strides {list(strides)}, block {list(wanted.block_size)}, element"
            f" type {element}, swizzle {wanted.swizzle}; an address is a multiple of 16, and so are"
            " the strides in bytes",
        )
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
