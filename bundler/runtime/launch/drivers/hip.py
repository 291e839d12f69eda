# SPDX-License-Identifier: Apache-2.0
"""`HipDriver`: kernels on AMD GPUs, through the HIP library alone; `drivers.py` opens it.

Its calls mirror CUDA's, with a device where CUDA has a context; what is the same is in
`native_driver.py`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int
from typing import Any, ClassVar

from bundler.errors import CannotLaunchStatically, DriverError, DriverUnavailable
from bundler.runtime.launch.drivers import hip_api as api
from bundler.runtime.launch.drivers.hip_library import library_path
from bundler.runtime.launch.drivers.launchers import Leave, packed_attributes
from bundler.runtime.launch.drivers.native_driver import Library, NativeDriver, NativeModule
from bundler.runtime.launch.drivers.native_pool import PoolCalls
from bundler.runtime.launch.plan import LaunchPlan, TensorMap

_POOL_CALLS = PoolCalls(api.POOL, api.GRAPHS, kind=10, copied=(api.COPY_BY_ADDRESS,))


class HipDriver(NativeDriver):
    """The HIP library of this process; see `Driver` and `NativeDriver`.

    Args:
        library: the name or path of the library; None: as `library_path` finds it.
        compiled: whether launches go through our extension; None: if it was built.
    """

    backend = "hip"
    calls = api.CALLS
    asked = (
        api.MAX_THREADS_PER_BLOCK,
        api.MAX_SHARED,
        api.WARP_SIZE,
        api.MULTIPROCESSORS,
        api.COOPERATIVE_LAUNCH,
    )
    pool_calls = _POOL_CALLS
    elsewhere: ClassVar[frozenset[int]] = frozenset(
        {api.INVALID_DEVICE, api.INVALID_HANDLE, api.INVALID_CONTEXT}
    )

    def __init__(self, library: str | None = None, compiled: bool | None = None) -> None:
        # By module: HSA wants the bytes to outlive their reader, which HIP keeps until the module
        # is unloaded.
        self._images: dict[int, bytes] = {}
        super().__init__(Library(library or library_path(), api.SIGNATURES, self.backend), compiled)

    def load(self, plan: LaunchPlan, image: bytes, device: int) -> NativeModule:
        """Load verified bytes on a device."""
        module = super().load(plan, image, device)
        self._images[module.handle] = image
        return module

    def unload(self, module: NativeModule) -> None:
        """Unload a module's binary."""
        super().unload(module)
        del self._images[module.handle]

    def pointer_device(self, address: int) -> int | None:
        """Return the device that an address belongs to, None for memory that no device can read."""
        self.check_alive()
        found = api.PointerAttributes()
        # Memory that HIP does not know is an error as documented, and unregistered in some
        # releases.
        if self._library.hipPointerGetAttributes(ctypes.byref(found), address):
            self._forget()
            return None
        if found.type == api.UNREGISTERED:
            return None
        return (
            int(found.device)
            if found.type == api.ON_DEVICE and not found.managed
            else self.device()
        )

    def tensor_map(self, plan: LaunchPlan, tensor_map: TensorMap, descriptor: Any) -> bytes:
        """Refuse: AMD's GPUs have no such maps."""
        raise CannotLaunchStatically(f"{plan.kernel}: HIP has no tensor maps", kernel=plan.kernel)

    def _start(self) -> None:
        status = self._library.hipInit(0)
        if status:
            self._forget()
            why = (
                "it was in use before this process was forked; start processes with"
                " multiprocessing's 'spawn'"
                if status == api.NOT_INITIALIZED
                else f"{self._words(status)}; is there a GPU, and does HIP_VISIBLE_DEVICES show it?"
            )
            raise DriverUnavailable(
                f"HIP cannot be used here: {why}", backend=self.backend, status=status
            )

    def _words(self, status: int) -> str:
        ask = self._library.find(api.ERROR_STRING, (c_int,))
        if ask is None:
            return f"status {status}"
        ask.restype = c_char_p
        return f"status {status} ({ask(status).decode()})"

    def _forget(self) -> None:
        # HIP keeps the last error of a thread, and torch raises what it finds there after its own
        # next launch.
        self._library.hipGetLastError()

    def _current_device(self) -> int:
        device = c_int()
        self.check(self._library.hipGetDevice(device), "hipGetDevice")
        return device.value

    _current_place = _current_device

    def _go_to(self, device: int) -> tuple[int, Leave]:
        return device, self._enter(device)

    def _enter(self, device: int) -> Leave:
        before = self._current_device()
        if before != device:
            self._set_device(device)
        return functools.partial(self._set_device, before)

    def _set_device(self, device: int) -> None:
        self.check(self._library.hipSetDevice(device), f"hipSetDevice({device})")

    def _arch(self, device: int) -> str:
        memory = ctypes.create_string_buffer(api.PROPERTIES_BYTES)
        self.check(
            self._library.hipGetDevicePropertiesR0600(memory, device),
            f"asking for properties of device {device}",
        )
        name = memory.raw[api.ARCH_AT : api.ARCH_AT + api.ARCH_BYTES].partition(b"\0")[0].decode()
        return name.partition(":")[0]  # the rest says which features are switched on

    def _launching(self, plan: LaunchPlan) -> tuple[Any, Any | None, bytes]:
        if plan.cluster > 1:
            extended = self._library.find(api.LAUNCH_EXTENDED)
            if extended is None:
                raise DriverError(
                    f"{plan.kernel}: clusters need {api.LAUNCH_EXTENDED}, which this HIP library"
                    " lacks; update it",
                    kernel=plan.kernel,
                )
            return self._library.find(api.LAUNCH), extended, _attributes(plan)
        # The second takes one argument less than the first, the last, which the calling conventions
        # of our platforms allow.
        name = api.LAUNCH_COOPERATIVE if plan.cooperative else api.LAUNCH
        return self._library.find(name), None, b""


def _attributes(plan: LaunchPlan) -> bytes:
    """Return the two attributes that Triton's launcher gives; HIP refuses a launch with one that it
    does not know.
    """
    return packed_attributes(
        (api.CLUSTER_DIMENSION, (plan.cluster, 1, 1)), (api.COOPERATIVE, (int(plan.cooperative),))
    )
