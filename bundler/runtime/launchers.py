# SPDX-License-Identifier: Apache-2.0
"""The two ways a launch reaches a driver's library: our compiled extension, and ctypes where it was not built."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from bundler.runtime.cuda_api import ATTRIBUTE_BYTES
from bundler.runtime.packing import Packer, struct_format
from bundler.runtime.plan import LaunchPlan

# What `fail` is told when it was not the driver that refused.
CLOSED, BAD_GRID = -1, -2
MAX_GRID = 2**31 - 1
_ALIGNMENT = 128  # of a tensor map
# CUlaunchConfig and HIP_LAUNCH_CONFIG: grid, block, shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("=7I4xQQI4x")

Leave = Callable[[], None]
# Addresses of global and profile scratch, and what to call after the launch.
Scratch = Callable[[int, int, int, int], tuple[int, int, Leave]]


@dataclass(frozen=True)
class Binding:
    """A kernel on a device, ready to be launched by either path.

    `plain` and `extended` are the driver's launch functions; `where`, the driver's, and `here`, ours, tell the thread's context
    or device, which should be `place`; `enter` goes there and returns the way back; `fail` turns a status into an error.
    """

    plan: LaunchPlan
    function: int
    place: int
    attributes: bytes
    plain: Any
    extended: Any | None
    where: Any
    here: Callable[[], int]
    fail: Callable[[int], NoReturn]
    enter: Callable[[], Leave]
    scratch: Scratch | None
    # Statuses that a launch from another context or device gives.
    elsewhere: frozenset[int]


def compiled_type() -> Any | None:
    """Return the extension's launcher, None where it was not built."""
    try:
        from bundler.runtime import _launch  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _launch.Launcher


def compiled_launcher(kind: Any, binding: Binding) -> Any:
    """Return a launcher of the extension; it has a `pack` method, which returns the parameter buffer, and `close`."""
    plan, packers = binding.plan, list[Packer]()

    def slow_pack(values: tuple[Any, ...]) -> bytes:
        if not packers:  # few kernels ever need it
            packers.append(Packer(plan))
        return bytes(packers[0].pack(values))

    extended = binding.extended if binding.attributes else None
    return kind(
        plain=_address(binding.plain),
        extended=0 if extended is None else _address(extended),
        where=_address(binding.where),
        place=binding.place,
        function=binding.function,
        block=plan.block_threads,
        cluster=plan.cluster,
        shared=plan.shared_bytes,
        attributes=binding.attributes,
        buffer_bytes=plan.buffer_bytes,
        arguments=len(plan.arguments),
        fields=tuple((p.kind, p.offset, -1 if p.argument is None else p.argument) for p in plan.parameters),
        slow_pack=slow_pack,
        fail=binding.fail,
        enter=binding.enter,
        scratch=binding.scratch,
    )


def _address(function: Any) -> int:
    # A function of ctypes is memory that holds its address; cast() would take five times as long.
    return ctypes.c_void_p.from_buffer(function).value or 0


# bf16 is missing: no code of struct cuts a number off.
_QUICK_TYPES: dict[str, type] = {
    **{f"{sign}{bits}": int for sign in "iu" for bits in (8, 16, 32, 64)},
    "fp16": float,
    "fp32": float,
    "fp64": float,
}


def ctypes_launcher(binding: Binding) -> Any:
    """Return a launcher that goes through ctypes; it has `close`, too.

    What the driver reads lies in frames; a call takes one and gives it back, so that two threads never share one.  The
    function is a closure, and packs common values itself, since each Python call saved is a tenth of what is ours in a launch.
    """
    rare, frames = _Rare(binding), list[list[Any]]()
    take, give_back, pack, with_scratch = frames.pop, frames.append, rare.pack_into, rare.scratch is not None
    quick_pack, plain, pointers = _quick(binding.plan)
    # The types of the last call whose pointers were all tensors of one type, and that type's data_ptr.
    known: tuple[list[type], Any] = ([], None)

    def launch(grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        nonlocal known
        try:
            hot = take()
        except IndexError:
            hot = _Frame(binding).hot
        buffer, aim, go, frame = hot
        types, (known_types, address) = [*map(type, values)], known
        try:
            if types == known_types:
                quick_pack(buffer, 0, *map(address, values[:pointers]), *values[pointers:])
            elif types == plain:
                quick_pack(buffer, 0, *values)
            else:
                pack(buffer, values)
                known = _tensors(types, plain, pointers) or known
        except _NOT_QUICK:
            pack(buffer, values)
        place = (grid_x, grid_y, grid_z, stream)
        if rare.closed or with_scratch or place != aim:
            if rare.prepare(frame, place):
                rare.launch(frame, place, values)
        else:
            status = go()
            if status:
                rare.second_try(status, frame)
        give_back(hot)

    launch.close = rare.close  # type: ignore[attr-defined]
    return launch


# Such values are `Packer`'s to accept or refuse.
_NOT_QUICK = (AttributeError, IndexError, TypeError, ValueError, OverflowError, struct.error)


def _quick(plan: LaunchPlan) -> tuple[Any, list[type | None], int]:
    """Return what packs just the arguments, the types that it packs as `Packer` would, and how many pointers come first.

    Pointers are addresses there, as the dispatcher passes them; in a call by handle they are tensors in front.
    """
    kinds = [parameter.kind for parameter in plan.arguments]
    plain = [int if kind == "pointer" else _QUICK_TYPES.get(kind) for kind in kinds]
    pointers = next((index for index, kind in enumerate(kinds) if kind != "pointer"), len(kinds))
    end = max((parameter.offset + parameter.size for parameter in plan.arguments), default=0)
    structure = struct.Struct(struct_format(replace(plan, parameters=plan.arguments, buffer_bytes=end)))
    return structure.pack_into, plain, pointers


def _tensors(types: list[type], plain: list[type | None], pointers: int) -> tuple[list[type], Any] | None:
    """Return the types of a call and their `data_ptr`, if tensors of one type are in front and numbers as in `plain` follow."""
    if pointers == 0 or len({*types[:pointers]}) > 1 or types[pointers:] != plain[pointers:]:
        return None
    address = getattr(types[0], "data_ptr", None)
    return None if address is None else (types, address)


class _Rare:
    """What a launch through ctypes seldom needs."""

    def __init__(self, binding: Binding) -> None:
        self._binding, self.closed, self.scratch = binding, False, binding.scratch
        self.pack_into = Packer(binding.plan).pack_into

    def close(self) -> None:
        """Launch nothing any more: each call fails."""
        self.closed = True

    def prepare(self, frame: _Frame, place: tuple[Any, ...]) -> bool:
        """Write another grid and stream into a frame; False when there is nothing to launch."""
        if self.closed:
            self._binding.fail(CLOSED)
        *grid, stream = place
        cluster = self._binding.plan.cluster
        if not all(isinstance(programs, int) and 0 <= programs <= MAX_GRID for programs in grid):
            self._binding.fail(BAD_GRID)
        if grid[0] * cluster > MAX_GRID:
            self._binding.fail(BAD_GRID)
        if 0 in grid:
            return False
        frame.aim(grid[0] * cluster, grid[1], grid[2], stream)
        frame.hot[1:3] = place, frame.launch
        return True

    def launch(self, frame: _Frame, place: tuple[int, int, int, int], values: tuple[Any, ...]) -> None:
        """Launch a prepared frame."""
        if self.scratch is not None:
            self._with_scratch(self.scratch, frame, place, values)
            return
        status = frame.launch()
        if status:
            self.second_try(status, frame)

    def second_try(self, status: int, frame: _Frame) -> None:
        """Launch again in the right context, which is looked at only now: asking before each launch costs as much as packing."""
        binding = self._binding
        if status in binding.elsewhere and binding.here() != binding.place:
            leave = binding.enter()
            try:
                status = frame.launch()
            finally:
                leave()
        if status:
            binding.fail(status)

    def _with_scratch(
        self, scratch: Scratch, frame: _Frame, place: tuple[int, int, int, int], values: tuple[Any, ...]
    ) -> None:
        leave = self._binding.enter()  # allocating needs the right context as much as launching does
        try:
            global_address, profile_address, release = scratch(*place)
            try:
                self.pack_into(frame.buffer, values, global_address, profile_address)
                status = frame.launch()
            finally:
                release()
        finally:
            leave()
        if status:
            self._binding.fail(status)


class _Frame:
    """Memory for one launch: the parameter buffer, the pointers into it, and the configuration."""

    __slots__ = ("_attributes", "_binding", "_config", "_memory", "_parameters", "buffer", "hot", "launch")

    def __init__(self, binding: Binding) -> None:
        plan = binding.plan
        self._binding = binding
        self._memory = ctypes.create_string_buffer(plan.buffer_bytes + _ALIGNMENT)
        start = -ctypes.addressof(self._memory) % _ALIGNMENT
        self.buffer = memoryview(self._memory)[start : start + plan.buffer_bytes]
        first = ctypes.addressof(self._memory) + start
        self._parameters = (ctypes.c_void_p * len(plan.parameters))(*[first + p.offset for p in plan.parameters])
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._attributes = ctypes.create_string_buffer(binding.attributes, len(binding.attributes) or 1)
        self.launch: Callable[[], int] = _unaimed
        # What each launch takes out at once: the buffer, where the frame is aimed at, what launches there, the frame.
        self.hot: list[Any] = [self.buffer, None, self.launch, self]

    def aim(self, grid_x: int, grid_y: int, grid_z: int, stream: int) -> None:
        """Set the grid, in blocks, and the stream of the launches to come."""
        binding, plan = self._binding, self._binding.plan
        # ctypes passes on what is an argument already, and would make one of anything else at each launch.
        function, parameters = ctypes.c_void_p.from_param(binding.function), ctypes.byref(self._parameters)
        if binding.extended is not None:
            count = len(binding.attributes) // ATTRIBUTE_BYTES
            address = ctypes.addressof(self._attributes) if count else 0
            _CONFIG.pack_into(self._config, 0, grid_x, grid_y, grid_z, plan.block_threads, 1, 1, plan.shared_bytes,
                              stream, address, count)  # fmt: skip
            self.launch = functools.partial(binding.extended, ctypes.byref(self._config), function, parameters, None)
        else:
            sizes = map(ctypes.c_uint, (grid_x, grid_y, grid_z, plan.block_threads, 1, 1, plan.shared_bytes))
            self.launch = functools.partial(
                binding.plain, function, *sizes, ctypes.c_void_p.from_param(stream), parameters, None
            )


def _unaimed() -> int:
    raise AssertionError("a frame is aimed before it is launched")
