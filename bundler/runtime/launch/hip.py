# SPDX-License-Identifier: Apache-2.0
"""`HipDriver`: kernels on AMD GPUs, through the HIP library alone; `drivers.py` opens it.

Its calls mirror CUDA's, with a device where CUDA has a context; what is the same is in `native_driver.py`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, ClassVar

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable
from bundler.runtime.launch.cuda import launch_attributes
from bundler.runtime.launch.driver import DeviceProperties
from bundler.runtime.launch.launchers import Binding, Leave
from bundler.runtime.launch.native_driver import Calls, Library, NativeDriver, NativeModule
from bundler.runtime.launch.plan import LaunchPlan, TensorMap
from bundler.runtime.launch.scratch import scratch_for

LIBRARY = "libamdhip64.so"
_OUT, _OUT_INT = POINTER(c_void_p), POINTER(c_int)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "hipInit": (c_uint,),
    "hipGetDeviceCount": (_OUT_INT,),
    "hipGetDevice": (_OUT_INT,),
    "hipSetDevice": (c_int,),
    "hipDeviceGetAttribute": (_OUT_INT, c_int, c_int),
    "hipGetDevicePropertiesR0600": (c_void_p, c_int),
    "hipModuleLoadData": (_OUT, c_char_p),
    "hipModuleUnload": (c_void_p,),
    "hipModuleGetFunction": (_OUT, c_void_p, c_char_p),
    "hipFuncGetAttribute": (_OUT_INT, c_int, c_void_p),
    "hipPointerGetAttributes": (c_void_p, c_void_p),
    "hipMallocAsync": (POINTER(c_uint64), c_size_t, c_void_p),
    "hipFreeAsync": (c_uint64, c_void_p),
}
_CALLS = Calls(
    device_count="hipGetDeviceCount",
    device_attribute="hipDeviceGetAttribute",
    module_load="hipModuleLoadData",
    module_unload="hipModuleUnload",
    module_function="hipModuleGetFunction",
    function_attribute="hipFuncGetAttribute",
    allocate="hipMallocAsync",
    free="hipFreeAsync",
)
_NOT_INITIALIZED = 3
_INVALID_DEVICE, _INVALID_HANDLE, _INVALID_CONTEXT = 101, 400, 201
# Device attributes
_COOPERATIVE, _MAX_THREADS, _MULTIPROCESSORS, _MAX_SHARED, _WARP_SIZE = 10, 56, 63, 74, 87
# hipDeviceProp_tR0600, of which we read one string; room for what later releases add.
_PROPERTIES_BYTES, _ARCH_AT, _ARCH_BYTES = 4096, 1160, 256
_UNREGISTERED, _ON_DEVICE = 0, 2


class _PointerAttributes(ctypes.Structure):
    _fields_ = (("type", c_int), ("device", c_int), ("device_pointer", c_void_p), ("host_pointer", c_void_p),
                ("managed", c_int), ("flags", c_uint))  # fmt: skip


class HipDriver(NativeDriver):
    """The HIP library of this process; see `Driver` and `NativeDriver`.

    Args:
        library: the name or path of the library.
        compiled: whether launches go through our extension; None: if it was built.
    """

    backend = "hip"
    calls = _CALLS
    elsewhere: ClassVar[frozenset[int]] = frozenset({_INVALID_DEVICE, _INVALID_HANDLE, _INVALID_CONTEXT})

    def __init__(self, library: str = LIBRARY, compiled: bool | None = None) -> None:
        super().__init__(Library(library, _SIGNATURES, self.backend), compiled)

    def pointer_device(self, address: int) -> int | None:
        """Return the device that an address belongs to, None for memory that no device can read."""
        self.check_alive()
        found = _PointerAttributes()
        # Memory that HIP does not know is an error before ROCm 6, and unregistered since.
        if self._library.hipPointerGetAttributes(ctypes.byref(found), address) or found.type == _UNREGISTERED:
            return None
        return int(found.device) if found.type == _ON_DEVICE and not found.managed else self.device()

    def tensor_map(self, plan: LaunchPlan, tensor_map: TensorMap, descriptor: Any) -> bytes:
        """Refuse: AMD's GPUs have no such maps."""
        raise CannotLaunchStatically(f"{plan.kernel}: HIP has no tensor maps", kernel=plan.kernel)

    def _start(self) -> None:
        status = self._library.hipInit(0)
        if status:
            why = (
                "it was in use before this process was forked; start processes with multiprocessing's 'spawn'"
                if status == _NOT_INITIALIZED
                else f"{self._words(status)}; is there a GPU, and does HIP_VISIBLE_DEVICES show it?"
            )
            raise DriverUnavailable(f"HIP cannot be used here: {why}", backend=self.backend, status=status)

    def _words(self, status: int) -> str:
        ask = self._library.find("hipGetErrorString", (c_int,))
        if ask is None:
            return f"status {status}"
        ask.restype = c_char_p
        return f"status {status} ({(ask(status) or b'').decode()})"

    def _current_device(self) -> int:
        device = c_int()
        self.check(self._library.hipGetDevice(device), "hipGetDevice")
        return device.value

    def _go_to(self, device: int) -> tuple[int, Leave]:
        return device, self._enter(device)

    def _enter(self, device: int) -> Leave:
        before = self._current_device()
        if before != device:
            self._set_device(device)
        return functools.partial(self._set_device, before)

    def _set_device(self, device: int) -> None:
        self.check(self._library.hipSetDevice(device), f"hipSetDevice({device})")

    def _read_properties(self, device: int) -> DeviceProperties:
        memory = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self.check(
            self._library.hipGetDevicePropertiesR0600(memory, device), f"asking for properties of device {device}"
        )
        name = memory.raw[_ARCH_AT : _ARCH_AT + _ARCH_BYTES].partition(b"\0")[0].decode()
        return DeviceProperties(
            arch=name.partition(":")[0],  # the rest says which features are switched on
            max_threads_per_block=self._ask_device(_MAX_THREADS, device),
            max_shared_optin_bytes=self._ask_device(_MAX_SHARED, device),
            warp_size=self._ask_device(_WARP_SIZE, device),
            multiprocessors=self._ask_device(_MULTIPROCESSORS, device),
            cooperative=bool(self._ask_device(_COOPERATIVE, device)),
        )

    def _bind(self, module: NativeModule) -> Binding:
        plan, plain, extended = module.plan, "hipModuleLaunchKernel", None
        if plan.cluster > 1:
            extended = self._library.find("hipDrvLaunchKernelEx")
            if extended is None:
                raise DriverError(
                    f"{plan.kernel}: clusters need hipDrvLaunchKernelEx, which this HIP library lacks; update it",
                    kernel=plan.kernel,
                )
        elif plan.cooperative:
            # It takes one argument less than the other, the last, which the calling conventions of our platforms allow.
            plain = "hipModuleLaunchCooperativeKernel"
        return Binding(
            plan=plan,
            function=module.function,
            place=module.place,
            attributes=b"" if extended is None else launch_attributes(plan),
            plain=self._library.find(plain),
            extended=extended,
            ask_place=self._library.hipGetDevice,
            current_place=self._current_device,
            fail=module.refuse_launch,
            enter=functools.partial(self._enter, module.device),
            scratch=scratch_for(plan, functools.partial(self._pool, module.device)),
            elsewhere=self.elsewhere,
        )
