# SPDX-License-Identifier: Apache-2.0
"""The two ways a launch reaches a driver's library: our compiled extension, and ctypes where it was
not built.

A driver describes a loaded kernel as a `Binding` and makes of it `compiled_launcher(...)` or a
`CtypesLauncher`.  The extension packs values itself, in C; ctypes takes `Packer`.
`native_driver.py` is the caller.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from bundler.runtime.launch.drivers.cuda_api import ATTRIBUTE_BYTES
from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.launch.parameter_buffer import Packer
from bundler.runtime.launch.plan import LaunchPlan, Parameter, SharedParts
from bundler.toolchain.tensor_handles import find_handles

# What `fail` is told when it was not the driver that refused.
CLOSED, BAD_GRID = -1, -2
MAX_GRID = 2**31 - 1
_ALIGNMENT = 128  # of a tensor map
# Reading tensors by torch's functions saves 50 ns a tensor, and finding these functions takes as
# long as that of some thousand launches.
LAUNCHES_BEFORE_TELLING = 1000
# CUlaunchConfig and HIP_LAUNCH_CONFIG: grid, block, shared memory, stream, attributes and their
# number.
CONFIG = struct.Struct("=7I4xQQI4x")

Leave = Callable[[], None]
# Addresses of global and profile scratch, and what to call after the launch.
Scratch = Callable[[int, int, int, int], tuple[int, int, Leave]]


class Binding(NamedTuple):
    """A kernel on a device, ready to be launched by either path.

    A place is what a launch needs to be current in its thread: a context of CUDA, a device of HIP.

    Attributes:
        plan: of the kernel.
        function: the driver's handle of the kernel.
        place: where the kernel was loaded.
        attributes: launch attributes, as the driver's structures.
        plain: the library's function that launches.
        extended: the library's function that launches with attributes, None where it has none.
        ask_place: the library's function that writes the current place of the thread; the extension
            calls it.
        current_place: returns the same to Python.
        fail: raises the error that a status means.
        enter: makes `place` current and returns what goes back.
        scratch: allocates the kernel's scratch for a launch; None when it needs none.
        elsewhere: statuses of a launch from another place.
        forget: lets the library forget such a status, once the launch was made in the right place.
    """

    plan: LaunchPlan
    function: int
    place: int
    attributes: bytes
    plain: Any
    extended: Any | None
    ask_place: Any
    current_place: Callable[[], int]
    fail: Callable[[int], NoReturn]
    enter: Callable[[], Leave]
    scratch: Scratch | None
    elsewhere: frozenset[int]
    forget: Leave


def compiled_type() -> Any | None:
    """Return the extension's launcher, None where it was not built."""
    return None if EXTENSION is None else EXTENSION.Launcher


def tell_tensors_later(kind: Any | None) -> None:
    """Have the extension told how it reads tensors of torch without calling Python; to be called
    once torch is in use.

    That is after some launches: finding it out takes a millisecond, which a process that launches
    little never gets back.
    """
    if kind is not None:
        kind.ask_later(functools.partial(_tell_tensors, kind), LAUNCHES_BEFORE_TELLING)


def _tell_tensors(kind: Any) -> None:
    found = find_handles()
    if found is not None:
        kind.tell_tensors(*found)


def image_loader(functions: tuple[Any, ...]) -> Callable[[bytes, bytes, int, int], Any] | None:
    """Return what loads a binary in one call of the extension, None where that was not built.

    Args:
        functions: of the library, those that `load_image` in _launch.c names; it says what is given
            and returned, too.
    """
    if EXTENSION is None:
        return None
    return functools.partial(EXTENSION.load_image, tuple(map(_address, functions)))


def compiled_launcher(kind: Any, binding: Binding) -> Any:
    """Return a launcher of the extension; it has a `pack` method, which returns the parameter
    buffer, and `close`.
    """
    plan = binding.plan
    arguments, fields = _packings.get(plan.parameters, _packing)
    extended = binding.extended if binding.attributes else None
    return kind(
        plain=_addresses.get(binding.plain, _address),
        extended=0 if extended is None else _addresses.get(extended, _address),
        where=_addresses.get(binding.ask_place, _address),
        place=binding.place,
        function=binding.function,
        block=plan.block_threads,
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        attributes=binding.attributes,
        buffer_bytes=plan.buffer_bytes,
        arguments=arguments,
        fields=fields,
        slow_pack=slow_packer(plan),
        fail=binding.fail,
        enter=binding.enter,
        scratch=binding.scratch,
    )


def slow_packer(plan: LaunchPlan) -> Callable[[tuple[Any, ...]], bytes]:
    """Return what packs the values that the extension leaves to Python."""
    return functools.partial(_pack_slowly, plan)


def _pack_slowly(plan: LaunchPlan, values: tuple[Any, ...]) -> bytes:
    # Few kernels ever need it.
    return bytes(_packers.get(plan, Packer).pack(values))


_packers: SharedParts[LaunchPlan, Packer] = SharedParts(256)


def packed_attributes(*attributes: tuple[int, tuple[int, ...]]) -> bytes:
    """Return launch attributes, each a number and its values, as CUlaunchAttribute and
    hipLaunchAttribute hold them.
    """
    return b"".join(
        struct.pack(f"=I4x{len(values)}I", number, *values).ljust(ATTRIBUTE_BYTES, b"\0")
        for number, values in attributes
    )


def _packing(parameters: tuple[Parameter, ...]) -> tuple[int, tuple[tuple[str, int, int], ...]]:
    """Return how many values the extension packs, and for each parameter its kind, its offset and
    the value that fills it, or -1.
    """
    filled = sum(parameter.argument is not None for parameter in parameters)
    return filled, tuple(
        (p.kind, p.offset, -1 if p.argument is None else p.argument) for p in parameters
    )


# Plans of one signature share their parameters.
_packings: SharedParts[tuple[Parameter, ...], tuple[int, tuple[tuple[str, int, int], ...]]] = (
    SharedParts(1024)
)


def _address(function: Any) -> int:
    # A function of ctypes is memory that holds its address; cast() would take five times as long.
    return ctypes.c_void_p.from_buffer(function).value or 0


_addresses: SharedParts[Any, int] = SharedParts(64)


class CtypesLauncher:
    """A launcher that goes through ctypes.

    What the driver reads lies in frames.  A call takes one and gives it back, so that two threads
    never share one.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding, self._scratch = binding, binding.scratch
        self._pack_into = Packer(binding.plan).pack_into
        self._frames: list[_Frame] = []
        self._closed = False

    def close(self) -> None:
        """Launch nothing any more: each call fails."""
        self._closed = True

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        """Launch; see `Launcher`."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._binding)
        self._pack_into(frame.buffer, values)
        place = (grid_x, grid_y, grid_z, stream)
        if self._closed:
            self._binding.fail(CLOSED)
        if place == frame.place or self._aim(frame, place):
            if self._scratch is not None:
                self._launch_with_scratch(self._scratch, frame, place, values)
            else:
                status = frame.launch()
                if status:
                    self._launch_again(frame, status)
        self._frames.append(frame)

    def _aim(self, frame: _Frame, place: tuple[Any, ...]) -> bool:
        """Write a grid and a stream into a frame; returns False when there is nothing to launch."""
        *grid, stream = place
        cluster = self._binding.plan.cluster
        whole = all(isinstance(programs, int) and 0 <= programs <= MAX_GRID for programs in grid)
        if not whole or grid[0] * cluster > MAX_GRID:
            self._binding.fail(BAD_GRID)
        if 0 in grid:
            return False
        frame.aim(grid[0] * cluster, grid[1], grid[2], stream)
        frame.place = place
        return True

    def _launch_again(self, frame: _Frame, status: int) -> None:
        """Launch in the right place what another place refused; asking for the place before each
        launch costs as much as packing.
        """
        binding = self._binding
        if status in binding.elsewhere and binding.current_place() != binding.place:
            leave = binding.enter()
            try:
                status = frame.launch()
            finally:
                leave()
            if not status:
                binding.forget()
        if status:
            binding.fail(status)

    def _launch_with_scratch(
        self, scratch: Scratch, frame: _Frame, place: tuple[Any, ...], values: tuple[Any, ...]
    ) -> None:
        leave = (
            self._binding.enter()
        )  # allocating needs the right context as much as launching does
        try:
            global_address, profile_address, release = scratch(*place)
            try:
                self._pack_into(frame.buffer, values, global_address, profile_address)
                status = frame.launch()
            finally:
                release()
        finally:
            leave()
        if status:
            self._binding.fail(status)


class _Frame:
    """Memory for one launch: the parameter buffer, the pointers into it, and the configuration."""

    __slots__ = (
        "_attributes",
        "_binding",
        "_config",
        "_memory",
        "_parameters",
        "buffer",
        "launch",
        "place",
    )

    def __init__(self, binding: Binding) -> None:
        plan = binding.plan
        self._binding = binding
        self._memory = ctypes.create_string_buffer(plan.buffer_bytes + _ALIGNMENT)
        start = -ctypes.addressof(self._memory) % _ALIGNMENT
        self.buffer = memoryview(self._memory)[start : start + plan.buffer_bytes]
        first = ctypes.addressof(self._memory) + start
        self._parameters = (ctypes.c_void_p * len(plan.parameters))(
            *[first + p.offset for p in plan.parameters]
        )
        self._config = ctypes.create_string_buffer(CONFIG.size)
        self._attributes = ctypes.create_string_buffer(
            binding.attributes, len(binding.attributes) or 1
        )
        self.launch: Callable[[], int] = _unaimed
        # The grid and stream that `launch` launches on.
        self.place: tuple[Any, ...] | None = None

    def aim(self, grid_x: int, grid_y: int, grid_z: int, stream: int) -> None:
        """Set the grid, in blocks, and the stream of the launches to come."""
        binding, plan = self._binding, self._binding.plan
        # ctypes passes on what is an argument already, and would make one of anything else at each
        # launch.
        function, parameters = (
            ctypes.c_void_p.from_param(binding.function),
            ctypes.byref(self._parameters),
        )
        if binding.extended is not None:
            count = len(binding.attributes) // ATTRIBUTE_BYTES
            address = ctypes.addressof(self._attributes) if count else 0
            CONFIG.pack_into(
                self._config,
                0,
                grid_x,
                grid_y,
                grid_z,
                plan.block_threads,
                1,
                1,
                plan.shared_bytes,
                stream,
                address,
                count,
            )
            self.launch = functools.partial(
                binding.extended, ctypes.byref(self._config), function, parameters, None
            )
        else:
            sizes = map(
                ctypes.c_uint, (grid_x, grid_y, grid_z, plan.block_threads, 1, 1, plan.shared_bytes)
            )
            self.launch = functools.partial(
                binding.plain,
                function,
                *sizes,
                ctypes.c_void_p.from_param(stream),
                parameters,
                None,
            )


def _unaimed() -> int:
    raise AssertionError("a frame is aimed before it is launched")
