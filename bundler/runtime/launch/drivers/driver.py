# SPDX-License-Identifier: Apache-2.0
"""`Driver`: the port to a GPU's driver, which CUDA, HIP and the dry driver implement and the rest
of the runtime calls.

With it `Module`, a loaded binary, `Launcher`, the function that launches it, `MemoryPool`, memory
of one device, and `DeviceProperties`.  `drivers.py` opens one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from bundler.errors import DriverError, ToolchainMismatch
from bundler.format.entries import Target
from bundler.runtime.launch.plan import LaunchPlan, TensorMap

#: Triton's option of a kernel all of whose programs run at once.
COOPERATIVE = "launch_cooperative_grid"


@dataclass(frozen=True)
class DeviceProperties:
    """What one GPU can do; `arch` is as in a `Target`: `90`, `gfx942`."""

    arch: str
    max_threads_per_block: int
    max_shared_optin_bytes: int
    warp_size: int
    multiprocessors: int
    cooperative: bool


def check_fits(plan: LaunchPlan, found: DeviceProperties, device: int) -> None:
    """Raise when a device cannot run a kernel: `ToolchainMismatch` for another architecture,
    `DriverError` for its limits.
    """
    if plan.target.arch != found.arch:
        raise ToolchainMismatch(
            f"{plan.kernel}: compiled for {plan.target.backend}:{plan.target.arch}, but device"
            f" {device} is {plan.target.backend}:{found.arch}; compile it for that one",
            kernel=plan.kernel,
            expected=plan.target.arch,
            got=found.arch,
            device=device,
        )
    for what, needed, limit in (
        ("threads a block", plan.block_threads, found.max_threads_per_block),
        ("bytes of shared memory a block", plan.shared_bytes, found.max_shared_optin_bytes),
        ("cooperative launches", int(plan.cooperative), int(found.cooperative)),
    ):
        if needed > limit:
            raise DriverError(
                f"{plan.kernel}: needs {needed} {what}, and device {device} has at most {limit}",
                kernel=plan.kernel,
                what=what,
                needed=needed,
                limit=limit,
                device=device,
            )


def all_at_once(
    backend: str, found: DeviceProperties, grids: Iterable[tuple[int, int, int]]
) -> bool:
    """Whether all programs of a launch with any of these grids are known to run at once where it
    is a cooperative one, so that they may wait for each other.

    A program that can run has a multiprocessor for itself. On AMD nobody has tried.
    """
    few = all(x * y * z <= found.multiprocessors for x, y, z in grids)
    return backend == "cuda" and found.cooperative and few


def target_of(driver: Driver, device: int) -> Target:
    """Return what kernels for a device are compiled for."""
    found = driver.properties(device)
    return Target(driver.backend, found.arch, found.warp_size)


class Module(Protocol):
    """One binary on one device."""

    @property
    def device(self) -> int:
        """The device that the binary was loaded on."""

    def unload(self) -> None:
        """Take the binary off the device; a second time does nothing.  Its launchers raise
        `DriverError` from then on.

        Launches that already run are the caller's to wait for.
        """


class Launcher(Protocol):
    """Packs the values of one kernel's arguments and launches it."""

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        """Launch on `stream` and return without waiting; a grid with no program is no launch.

        Any thread may call it, several at once: nothing is shared between two calls.

        Args:
            grid_x: programs along the first axis; with clusters, each program is as many blocks as
                a cluster has.
            grid_y: programs along the second axis.
            grid_z: programs along the third axis.
            stream: the driver's handle, 0 for the default stream.
            values: as `LaunchPlan` says, one for each argument, in their order.

        Raises:
            CannotLaunchStatically: wrong number or kind of values, or a number outside the range of
                its parameter.
            DriverError: the driver refused, or the process was forked, or the module unloaded.
        """


class MemoryPool(Protocol):
    """Memory of one device in the order of its streams, memory that is pinned on the host, and the
    streams themselves.

    Any thread may call it.  A stream is the driver's handle, 0 for the default stream.  In a forked
    child each method raises `DriverUnavailable`.
    """

    @property
    def place(self) -> tuple[int, int]:
        """Where the memory is, as DLPack numbers kinds of devices, and the device's number."""

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of memory that work of the stream may use from here on.

        Raises:
            OutOfDeviceMemory: there is not so much.
        """

    def free(self, address: int, stream: int) -> None:
        """Give memory back once the stream has come this far."""

    def info(self) -> tuple[int, int]:
        """Return how many bytes of the device are free, and how many it has."""

    def pin(self, size_bytes: int) -> int:
        """Return the address of memory of the host that the device reads and writes by itself."""

    def unpin(self, address: int) -> None:
        """Give pinned memory back; nothing may use it any more."""

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy in the order of the stream, from and to either side.

        It returns without waiting, and memory of the host that is not pinned may be changed then.
        Such memory is written when the stream was waited for.
        """

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        """Set bytes in the order of the stream."""

    def new_stream(self) -> int:
        """Return a stream that waits for no other one, and none for it."""

    def drop_stream(self, stream: int) -> None:
        """Forget a stream once its work is done."""

    def order(self, first: int, then: int) -> None:
        """Let what comes on one stream wait for what another has been given so far."""

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has done everything."""

    def is_capturing(self, stream: int) -> bool:
        """Whether somebody captures what the stream is given."""

    def begin_capture(self, stream: int) -> None:
        """Have work of a stream become a graph from here on, and not run; other streams go on.

        Raises:
            DriverError: the stream is captured already, or the library is too old.
        """

    def end_capture(self, stream: int) -> int:
        """Return a graph of all that a stream was given since its capture began, ready to launch.

        Raises:
            DriverError: something of it cannot be captured; the capture has ended all the same.
        """

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch all of a graph in the order of a stream."""

    def drop_graph(self, graph: int) -> None:
        """Forget a graph; one that runs runs to its end."""

    def close(self) -> None:
        """Give the pool back, of which no memory is in use, and none is allocated any more."""


class Driver(Protocol):
    """Access to the GPUs of this process.

    Every method may be called from any thread.  In a child process made by fork after the driver
    was opened, each raises `DriverError`: neither CUDA nor HIP survives a fork.
    """

    @property
    def backend(self) -> str:
        """`cuda` or `hip`: that of the targets it runs."""

    @property
    def launch_path(self) -> str:
        """How launches reach the driver: `compiled` (our extension), `ctypes` (pure Python), or
        `dry`.
        """

    def device(self) -> int:
        """Return the current device of this thread: torch's, when torch is in the process and uses
        the GPU.
        """

    def device_count(self) -> int:
        """Return how many devices this process may use."""

    def stream(self, device: int) -> int:
        """Return the handle of the current stream: torch's, when torch is in the process, else the
        default stream, 0.
        """

    def properties(self, device: int) -> DeviceProperties:
        """Return what a device can do."""

    def load(self, plan: LaunchPlan, image: bytes, device: int) -> Module:
        """Load verified bytes on a device, and allow the kernel the dynamic shared memory that it
        needs.

        Raises:
            ToolchainMismatch: the binary is for another architecture.
            DriverError: the driver refuses the binary, has no such entry, or the kernel needs more
                than the device has.
        """

    def launcher(self, module: Module) -> Launcher:
        """Return the function that launches a module's kernel."""

    def pool(self, device: int) -> MemoryPool:
        """Return a new pool of a device's memory, which keeps what was freed for what comes."""

    def pointer_device(self, address: int) -> int | None:
        """Return the device that an address belongs to, None for memory that no device can read.

        Host memory that every device can read (pinned, managed) belongs to the current one.
        """

    def tensor_map(self, plan: LaunchPlan, tensor_map: TensorMap, descriptor: Any) -> bytes:
        """Return the 128 bytes that a tensor descriptor on the host becomes for this kernel.

        Args:
            plan: of the kernel, for the words of an error.
            tensor_map: what the compiler wants of the map.
            descriptor: with `base`, `shape`, `strides` and `padding`, as
                `triton.tools.tensor_descriptor.TensorDescriptor`.

        Raises:
            CannotLaunchStatically: the descriptor does not fit the kernel, or the driver knows no
                tensor maps.
        """
