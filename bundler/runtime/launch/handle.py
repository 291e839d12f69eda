# SPDX-License-Identifier: Apache-2.0
"""`Handle`: one specialization on one device, launched without choosing it again, for loops where
each microsecond counts; `PlanLoader`: brings kernels from a bundle onto devices, once for each
device, when they are first needed.

`StaticKernel.handle` makes a handle for users, and the tuner one for each candidate that it times;
both load through a `PlanLoader`.  `feed_of` makes of a call's arguments the values that a launcher
packs: tuples and tensor descriptors are taken apart, and constants left out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bundler.errors import CannotLaunchStatically, DriverUnavailable
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.format.host_descriptors import by_place
from bundler.format.launch_spec import Argument, LaunchFacts
from bundler.format.summary import count
from bundler.runtime import grids
from bundler.runtime.launch.argument_types import is_descriptor, is_tensor
from bundler.runtime.launch.call_key import check_address, check_memory
from bundler.runtime.launch.drivers.driver import Driver, Launcher, Module
from bundler.runtime.launch.parameter_buffer import Packer
from bundler.runtime.launch.plan import TENSOR_MAP, LaunchPlan, Piece, TensorMap
from bundler.runtime.launch.plan_builder import plan_with
from bundler.runtime.launch.specialization_match import bind

# Addresses of a kernel's arguments whose tensor maps are kept.
_MAX_KNOWN = 256


class LoadedPlan(NamedTuple):
    """A kernel on a device, ready to be launched."""

    plan: LaunchPlan
    module: Module
    launcher: Launcher
    device: int


class PlanLoader:
    """Loads each kernel once a device, and unloads them all.

    Thread-safe: of several threads that need a kernel at once, one loads it.  A process that was
    forked off after the first load gets `DriverUnavailable`.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._loaded: dict[tuple[str, int], LoadedPlan] = {}
        self._sources: dict[str, Bundle] = {}
        self._lock, self._process = threading.Lock(), os.getpid()

    def add_source(self, bundle: Bundle) -> None:
        """Let kernels of another bundle be loaded; the bundle has to stay open."""
        self._sources.update((kernel.key, bundle) for kernel in bundle.kernels)

    def load(self, kernel: Kernel, device: int, alike: LaunchFacts | None = None) -> LoadedPlan:
        """Return a kernel on a device.

        Args:
            kernel: of a bundle that was added.
            device: the number of the device.
            alike: its launch facts, but for the constants, where the caller has decoded them.

        Raises:
            DigestMismatch: its binary is not what was recorded; the driver never sees it.
            CannotLaunchStatically, FormatError: see `build_plan`.
            ToolchainMismatch, DriverError: see `Driver.load`.
        """
        found = self._loaded.get((kernel.key, device))
        if found is not None:
            return found
        if os.getpid() != self._process:
            raise DriverUnavailable(
                f"{kernel.name}: this process was forked after its parent opened the driver, which"
                " does not survive that; load the bundle here, in a process started by spawn",
                kernel=kernel.name,
            )
        with self._lock:
            found = self._loaded.get((kernel.key, device))
            if found is None:
                found = self._loaded[kernel.key, device] = self._load(kernel, device, alike)
            return found

    def _load(self, kernel: Kernel, device: int, alike: LaunchFacts | None) -> LoadedPlan:
        name, digest = kernel.binary_file()
        image = bytes(self._sources[kernel.key].view_blob(digest, name))
        plan = plan_with(kernel, image, kernel.launch.facts if alike is None else alike)
        module = self.driver.load(plan, image, device)
        return LoadedPlan(plan, module, self.driver.launcher(module), device)

    def unload(self) -> None:
        """Take every kernel off its device; what is launched later is loaded again."""
        with self._lock:
            for loaded in self._loaded.values():
                loaded.module.unload()
            self._loaded.clear()


class Handle:
    """Launches one compiled kernel.

    `launch(grid_x, grid_y, grid_z, stream, *values)` checks its first call like any launch: number,
    kinds and ranges of the values, where tensors lie, the grid.  After that it is the driver's own
    launcher, which checks what packing needs and no more: that the values are those the kernel was
    specialized for (types, alignment, on the device) is the caller's to know. With `debug` every
    call is checked.  Keep `handle.launch` in a variable only after the first call.

    `values` are what the kernel's binary takes: constants left out, tuples and descriptors taken
    apart.  `values(...)` makes them from arguments as the kernel's author wrote them.  Launch hooks
    are not called.  Any thread may launch.
    """

    __slots__ = ("_arguments", "_debug", "_driver", "_feed", "_loaded", "_packer", "launch")

    launch: Callable[..., None]

    def __init__(
        self,
        loaded: LoadedPlan,
        driver: Driver,
        arguments: Sequence[Argument],
        *,
        debug: bool = False,
    ) -> None:
        self._loaded, self._driver, self._arguments, self._debug = loaded, driver, arguments, debug
        self._feed = feed_of(loaded, driver, arguments)
        self._packer = Packer(loaded.plan)
        self.launch = self._checked

    def __repr__(self) -> str:
        return f"<handle of {self.plan.kernel} ({self.plan.key[:8]}) on device {self.device}>"

    @property
    def plan(self) -> LaunchPlan:
        """What the kernel takes and needs."""
        return self._loaded.plan

    @property
    def device(self) -> int:
        """The device that the kernel was loaded on."""
        return self._loaded.device

    def values(self, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        """Return what `launch` takes for these arguments of the kernel; constants may be left out
        when they have a default.

        Raises:
            CannotLaunchStatically: arguments that the kernel does not have.
        """
        call = bind(self.plan.kernel, self._arguments, args, keywords)
        if call.options:
            raise CannotLaunchStatically(
                f"{self.plan.kernel}: has no parameter {', '.join(map(repr, call.options))}",
                kernel=self.plan.kernel,
            )
        return tuple(self._feed(call.values))

    def _checked(self, grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        plan, launcher = self.plan, self._loaded.launcher
        grids.checked((grid_x, grid_y, grid_z), plan.kernel, plan.target.backend, plan.cluster)
        self._packer.pack(values)
        for parameter, value in zip(plan.arguments, values, strict=True):
            if parameter.kind == "pointer":
                check_memory(
                    plan.kernel, parameter.name, value, self.device, self._driver.pointer_device
                )
                check_address(
                    plan.kernel, parameter.name, value, self.device, self._driver.pointer_device
                )
        if grid_x and grid_y and grid_z:
            launcher(grid_x, grid_y, grid_z, stream, *values)
        if not self._debug:
            self.launch = launcher


Feed = Callable[[Sequence[Any]], Sequence[Any]]


def feed_of(loaded: LoadedPlan, driver: Driver, declared: Sequence[Argument]) -> Feed:
    """Return what makes of a call's arguments, one for each parameter of the function, the values
    for the launcher.

    Args:
        loaded: the kernel on its device.
        driver: that loaded it.
        declared: the parameters of the function.
    """
    pieces = loaded.plan.pieces
    if all(len(piece.path) == 1 and piece.rank is None for piece in pieces) and _one_each(pieces):
        return _picking([piece.path[0] for piece in pieces])
    return _NestedArguments(loaded, driver, declared)


def _one_each(pieces: Sequence[Piece]) -> bool:
    return len({piece.path for piece in pieces}) == len(pieces)


def _picking(indices: list[int]) -> Feed:
    count = len(indices)
    if indices == list(range(count)):
        return lambda arguments: arguments[:count]
    return lambda arguments: [arguments[index] for index in indices]


class _AtAddress(NamedTuple):
    """A descriptor as drivers read it, without Triton's class: no block, which is the kernel's."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _NestedArguments:
    """For kernels with tuples or tensor descriptors among their arguments."""

    def __init__(self, loaded: LoadedPlan, driver: Driver, declared: Sequence[Argument]) -> None:
        self._plan, self._device, self._driver = loaded.plan, loaded.device, driver
        self._described = by_place(declared)
        # What was passed of a descriptor that the function describes, by argument and address.
        self._known: dict[tuple[int, int], list[Any]] = {}
        maps = {tensor_map.argument: tensor_map for tensor_map in loaded.plan.tensor_maps}
        # One step an argument: its first piece, how many pieces it has, and the map that a
        # descriptor becomes.
        self._steps: list[tuple[Piece, int, TensorMap | None]] = []
        for number, piece in enumerate(loaded.plan.pieces):
            if piece.rank is not None or not self._steps or self._steps[-1][0].path != piece.path:
                self._steps.append((piece, 1, maps.get(number)))
            else:
                first, size, tensor_map = self._steps[-1]
                self._steps[-1] = (first, size + 1, tensor_map)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        for piece, size, tensor_map in self._steps:
            value: Any = arguments
            for index in piece.path:
                value = value[index]
            if piece.rank is None:
                values.append(value)
            elif piece.path[0] in self._described and not is_descriptor(value):
                values.extend(self._described_values(piece, size, tensor_map, value))
            else:
                values.extend(self._apart(piece, size, tensor_map, value))
        return values

    def _described_values(
        self, piece: Piece, size: int, tensor_map: TensorMap | None, value: Any
    ) -> list[Any]:
        """Return what is passed for a tensor, or an address, in the place of which the function
        declares a descriptor; the driver is asked once for each address.
        """
        place, ask = piece.path[0], self._driver.pointer_device
        address = value.data_ptr() if is_tensor(value) else value
        if type(address) is not int:
            return self._apart(piece, size, tensor_map, value)
        found = self._known.get((place, address))
        if found is None:
            # A map says nothing of where its memory lies.
            check_memory(self._plan.kernel, piece.name, value, self._device, ask)
            check_address(self._plan.kernel, piece.name, value, self._device, ask)
            described = self._described[place]
            whole = _AtAddress(address, described.shape, described.strides)
            found = self._apart(piece, size, tensor_map, whole)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[place, address] = found
        return found

    def _apart(
        self, piece: Piece, size: int, tensor_map: TensorMap | None, value: Any
    ) -> list[Any]:
        """Return what Triton's launcher passes for a tensor descriptor."""
        rank = piece.rank or 0
        is_one = isinstance(value, _AtAddress) or is_descriptor(value)
        if not is_one or len(value.shape) != rank or len(value.strides) != rank:
            raise CannotLaunchStatically(
                f"{self._plan.kernel}: argument {piece.name!r}: expected a tensor descriptor of"
                f" {count(rank, 'dimension')}, got {type(value).__name__}",
                kernel=self._plan.kernel,
                argument=piece.name,
                expected=rank,
            )
        sides = [*map(int, value.shape), *map(int, value.strides)]
        if piece.kind == TENSOR_MAP and tensor_map is not None:
            return [self._driver.tensor_map(self._plan, tensor_map, value), *sides]
        # A pointer, shape and strides, then flags as many as this Triton passes, then shape and
        # strides again.
        flags = [
            getattr(value, "padding", "zero") == "nan",
            bool(getattr(value, "round_f32_to_tf32", False)),
        ]
        return [value.base, *sides, *flags[: size - 1 - 2 * len(sides)], *sides]
