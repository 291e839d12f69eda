# SPDX-License-Identifier: Apache-2.0
"""`DryDriver`: a driver without a GPU, for tests and trials, which checks and packs as the real
ones, and records each launch.

`DryPool` is its `MemoryPool`: the memory is the host's, and what is in use is counted.  All work is
done at once, so streams are numbers; which of them waits for which is written down.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bundler.errors import ConfigError, DriverError, DriverUnavailable
from bundler.runtime.launch.drivers.driver import DeviceProperties, Module, check_fits
from bundler.runtime.launch.drivers.native_pool import out_of_memory
from bundler.runtime.launch.parameter_buffer import Packer
from bundler.runtime.launch.plan import TENSOR_MAP_BYTES, LaunchPlan, TensorMap

# Real allocators align to this at least.
_ALIGNED_BYTES = 256
# What fresh memory holds: whoever reads it before it is written sees NaNs and large numbers.
_GARBAGE = 0xFF
_ON_HOST = 1


class DryPool:
    """Memory of a device that is not there; see `MemoryPool`.

    Attributes:
        live: address -> bytes of what is allocated and not freed.
        pinned: the same of pinned memory.
        streams: those that are there.
        waits: (first, then) of each `order` between two streams.
        allocations: how many there were so far.
        is_open: whether nobody closed it.
        graphs: those that are there -> what each does, in order.
    """

    def __init__(self, device: int, memory_bytes: int, check_process: Callable[[], None]) -> None:
        self._device, self._total, self._check = device, memory_bytes, check_process
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.live: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.streams: set[int] = set()
        self.waits: list[tuple[int, int]] = []
        self.allocations, self._last_stream, self.is_open = 0, 0xD0, True
        self._captured: dict[int, list[Callable[[], Any]]] = {}
        self.graphs: dict[int, list[Callable[[], Any]]] = {}
        self._last_graph = 0

    @property
    def place(self) -> tuple[int, int]:
        """The host, where other libraries may read it, too."""
        return _ON_HOST, 0

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of memory of the host."""
        self._check()
        free, total = self.info()
        if size_bytes > free:
            raise out_of_memory(size_bytes, free, total, self._device)
        address = self._taken(size_bytes)
        self.live[address] = size_bytes
        self.allocations += 1
        return address

    def free(self, address: int, stream: int) -> None:
        """Give memory back."""
        self._check()
        self._forget(self.live, address)

    def info(self) -> tuple[int, int]:
        """Return how many bytes are free, and how many there are."""
        return self._total - sum(self.live.values()), self._total

    def pin(self, size_bytes: int) -> int:
        """Return the address of memory of the host."""
        address = self._taken(size_bytes)
        self.pinned[address] = size_bytes
        return address

    def unpin(self, address: int) -> None:
        """Give pinned memory back."""
        self._forget(self.pinned, address)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy now."""
        self._check()
        self._inside(target, size_bytes)
        self._inside(source, size_bytes)
        self.given(stream, partial(ctypes.memmove, target, source, size_bytes))

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        """Set bytes now."""
        self._inside(address, size_bytes)
        self.given(stream, partial(ctypes.memset, address, byte, size_bytes))

    def new_stream(self) -> int:
        """Return a number that no other stream has."""
        self._last_stream += 1
        self.streams.add(self._last_stream)
        return self._last_stream

    def drop_stream(self, stream: int) -> None:
        """Forget a stream."""
        self.streams.remove(stream)

    def order(self, first: int, then: int) -> None:
        """Write down that one stream waits for another."""
        if first != then:
            self.waits.append((first, then))

    def synchronize(self, stream: int) -> None:
        """Do nothing: all is done."""
        self._check()

    def close(self) -> None:
        """Write down that nobody uses it any more."""
        self.is_open = False

    def is_capturing(self, stream: int) -> bool:
        """Whether a capture of the stream began, and did not end."""
        return stream in self._captured

    def begin_capture(self, stream: int) -> None:
        """Keep what the stream is given."""
        self._check()
        if stream in self._captured:
            raise DriverError(f"stream {stream:#x} is captured already", stream=stream)
        self._captured[stream] = []

    def end_capture(self, stream: int) -> int:
        """Return a number for what was kept."""
        self._last_graph += 1
        self.graphs[self._last_graph] = self._captured.pop(stream)
        return self._last_graph

    def launch_graph(self, graph: int, stream: int) -> None:
        """Do all of it, now, or as a part of another graph."""
        self._check()
        for work in self.graphs[graph]:
            self.given(stream, work)

    def drop_graph(self, graph: int) -> None:
        """Forget a graph."""
        del self.graphs[graph]

    def given(self, stream: int, work: Callable[[], Any]) -> None:
        """Do work of a stream, or keep it where the stream is captured."""
        if stream in self._captured:
            self._captured[stream].append(work)
        else:
            work()

    def _taken(self, size_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(size_bytes + _ALIGNED_BYTES)
        start = ctypes.addressof(buffer)
        address = start + -start % _ALIGNED_BYTES
        ctypes.memset(address, _GARBAGE, size_bytes)
        self._buffers[address] = buffer
        return address

    def _forget(self, held: dict[int, int], address: int) -> None:
        if held.pop(address, None) is None:
            raise DriverError(f"address {address:#x}: freed, and not allocated", address=address)
        del self._buffers[address]

    def _inside(self, address: int, size_bytes: int) -> None:
        """Raise where memory that begins in an allocation of ours does not end in it."""
        for start, size in (*self.live.items(), *self.pinned.items()):
            if start <= address < start + size and address + size_bytes > start + size:
                raise DriverError(
                    f"{size_bytes} bytes at {address:#x}: of that allocation there are"
                    f" {start + size - address}",
                    address=address,
                )


# One chip of each vendor, where a test does not say which.
_PROPERTIES = {
    "cuda": DeviceProperties("90", 1024, 227 * 1024, 32, 132, True),
    "hip": DeviceProperties("gfx942", 1024, 64 * 1024, 64, 304, True),
}
_MEMORY_BYTES = 80 << 30
_SCRATCH_ADDRESS = 0x5C00_0000_0000


@dataclass(frozen=True)
class DryLaunch:
    """One launch: the grid as the driver gets it, in blocks, and the parameter buffer byte for
    byte.
    """

    plan: LaunchPlan = field(repr=False)
    device: int
    grid: tuple[int, int, int]
    stream: int
    parameters: bytes
    scratch_bytes: tuple[int, int]


class DryModule:
    """One binary on one device that is not there."""

    def __init__(self, driver: DryDriver, plan: LaunchPlan, image: bytes, device: int) -> None:
        self.driver, self.plan, self.image, self.device = driver, plan, image, device
        self.loaded = True

    def unload(self) -> None:
        """Forget the binary; its launchers fail from then on."""
        self.loaded = False


class DryDriver:
    """Stands for a machine with GPUs in tests and trials.

    Everything but the GPU is real: the checks, the parameter buffer, the errors.  Thread-safe;
    after a fork it fails, as real drivers do.

    Args:
        backend: `cuda` or `hip`.
        properties: of each device; one of the vendor's when left out.
        current: the current device.
        handle: the handle of the current stream.
        memory_bytes: that each pool of memory has.

    Attributes:
        pools: that were made, each of which says what is in use.
    """

    launch_path = "dry"

    def __init__(
        self,
        backend: str = "cuda",
        properties: DeviceProperties | None = None,
        devices: int = 1,
        current: int = 0,
        handle: int = 0,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        if backend not in _PROPERTIES:
            raise ConfigError(
                f"there is no driver for {backend!r}; kernels run on 'cuda' or 'hip'",
                backend=backend,
            )
        self.backend, self.current, self.handle = backend, current, handle
        self.modules: list[DryModule] = []
        self.launches: list[DryLaunch] = []
        self.host_addresses: set[int] = set()
        self.pools: list[DryPool] = []
        self._memory_bytes = memory_bytes
        self._properties, self._devices = properties or _PROPERTIES[backend], devices
        self._lock, self._process = threading.Lock(), os.getpid()

    def device(self) -> int:
        """Return the device that the test made current."""
        return self.current

    def device_count(self) -> int:
        """Return how many devices the test asked for."""
        return self._devices

    def stream(self, device: int) -> int:
        """Return the handle that the test chose."""
        return self.handle

    def properties(self, device: int) -> DeviceProperties:
        """Return what the devices can do, the same for each."""
        self.check_process()
        return self._properties

    def load(self, plan: LaunchPlan, image: bytes, device: int) -> DryModule:
        """Write down a load, after the checks that real drivers make."""
        self.check_process()
        check_fits(plan, self._properties, device)
        module = DryModule(self, plan, image, device)
        with self._lock:
            self.modules.append(module)
        return module

    def launcher(self, module: Module) -> DryLauncher:
        """Return what writes down launches of a module."""
        assert isinstance(module, DryModule)
        return DryLauncher(module)

    def pool(self, device: int) -> DryPool:
        """Return a pool whose memory is the host's."""
        self.check_process()
        made = DryPool(device, self._memory_bytes, self.check_process)
        self.pools.append(made)
        return made

    def pointer_device(self, address: int) -> int | None:
        """Return the current device, None for the addresses that the test put on the host."""
        return None if address in self.host_addresses else self.current

    def tensor_map(self, plan: LaunchPlan, tensor_map: TensorMap, descriptor: Any) -> bytes:
        """Return bytes that tell the descriptor's address, as no GPU is there to read a
        real map.
        """
        base = descriptor.base
        address: int = base if isinstance(base, int) else base.data_ptr()
        return address.to_bytes(8, "little").ljust(TENSOR_MAP_BYTES, b"\0")

    def record(self, launch: DryLaunch) -> None:
        """Write down one launch, also as a part of a graph, when that is launched."""
        for pool in self.pools:
            if pool.is_capturing(launch.stream):
                pool.given(launch.stream, partial(self.record, launch))
                return
        with self._lock:
            self.launches.append(launch)

    def check_process(self) -> None:
        """Raise `DriverUnavailable` in a process that was forked off."""
        if os.getpid() != self._process:
            raise DriverUnavailable(
                "this process was forked after the driver was opened; start it by spawn instead"
            )


class DryLauncher:
    """Packs values as a real launcher does, and keeps the buffer."""

    def __init__(self, module: DryModule) -> None:
        self._module, self._packer = module, Packer(module.plan)

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        """Write down a launch; see `Launcher`."""
        module, plan = self._module, self._module.plan
        module.driver.check_process()
        if not module.loaded:
            raise DriverError(f"{plan.kernel}: its module was unloaded", kernel=plan.kernel)
        programs = grid_x * grid_y * grid_z
        needs = tuple(
            plan.scratch_bytes(programs, kind) for kind in ("global_scratch", "profile_scratch")
        )
        buffer = self._packer.pack(values, *(_SCRATCH_ADDRESS if need else 0 for need in needs))
        if programs:
            grid = (grid_x * plan.cluster, grid_y, grid_z)
            module.driver.record(
                DryLaunch(plan, module.device, grid, stream, bytes(buffer), (needs[0], needs[1]))
            )
