# SPDX-License-Identifier: Apache-2.0
"""`NativePool`: the `MemoryPool` of CUDA and HIP, whose libraries have the same calls under other
names (`PoolCalls`); `NativeDriver.pool` makes one.

It is a pool of its own (`cuMemPoolCreate`), so that what other libraries free and keep is not
touched, and it keeps what was freed until the device has no other memory left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from bundler.errors import DriverError, OutOfDeviceMemory

OUT_OF_MEMORY = 2
# Of a pool: memory that lies where its device says, and that is given back to the system when it is
# trimmed, not at each wait.
_PINNED_ALLOCATION, _ON_DEVICE, _RELEASE_THRESHOLD, _KEEP_ALL = 1, 1, 4, 2**64 - 1
# Pinned for all devices; a stream beside the default one; an event that keeps no time.
_PORTABLE, _NON_BLOCKING, _WITHOUT_TIME = 1, 1, 2
# A capture that forbids nothing to this thread and to others: memory of the graph is allocated
# meanwhile, on another stream.
_RELAXED = 2


# What a pool calls -> what a library calls it, and its argument types.
CallTable = Mapping[str, tuple[str, tuple[object, ...]]]


class PoolCalls(NamedTuple):
    """What both libraries call what a pool needs, and what graphs need; older ones lack some of the
    second.

    Attributes:
        kind: DLPack's number of such devices.
        copied: what a copy takes in front of its stream.
    """

    pool: CallTable
    graphs: CallTable
    kind: int
    copied: tuple[int, ...] = ()


class PoolDriver(Protocol):
    """What a pool asks of its driver."""

    @property
    def backend(self) -> str:
        """Whose library it is."""

    def check_alive(self) -> None:
        """Raise when this process cannot use the driver any more."""

    def check(self, status: int, call: str) -> None:
        """Raise unless the status of a call is zero."""

    def on_device(self, device: int) -> Callable[[], None]:
        """Make a device current; returns what goes back."""


class _Properties(ctypes.Structure):
    """CUmemPoolProps and hipMemPoolProps, which have the same members as far as we set them."""

    _fields_ = (
        ("allocation", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("place", ctypes.c_int),
        ("device", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 72),
    )


class NativePool:
    """A pool of one device's memory; see `MemoryPool`.

    Args:
        driver: whose library is called.
        device: its number.
        calls: their names.
        find: returns a function of the library, None where it has none.
    """

    def __init__(
        self,
        driver: PoolDriver,
        device: int,
        calls: PoolCalls,
        find: Callable[[str, tuple[object, ...]], Any | None],
    ) -> None:
        self._driver, self._device, self._calls = driver, device, calls
        self._find = find
        self._functions = self._found(calls.pool)
        self._pool = ctypes.c_void_p()
        wanted = _Properties(_PINNED_ALLOCATION, 0, _ON_DEVICE, device)
        self._do("create", self._pool, ctypes.byref(wanted))
        keep = ctypes.c_uint64(_KEEP_ALL)
        self._do("set_attribute", self._pool, _RELEASE_THRESHOLD, ctypes.byref(keep))

    @property
    def place(self) -> tuple[int, int]:
        """The device, as DLPack names it."""
        return self._calls.kind, self._device

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of memory in the order of a stream."""
        address = ctypes.c_uint64()
        status = self._status("allocate", address, size_bytes, self._pool, stream)
        if status == OUT_OF_MEMORY:
            # What was freed may wait for the stream, and what is kept may be in pieces too small.
            self.synchronize(stream)
            self._do("trim", self._pool, 0)
            status = self._status("allocate", address, size_bytes, self._pool, stream)
        if status == OUT_OF_MEMORY:
            free, total = self.info()
            raise out_of_memory(size_bytes, free, total, self._device)
        self._driver.check(status, f"allocating {size_bytes} bytes")
        return address.value

    def free(self, address: int, stream: int) -> None:
        """Give memory back once the stream has come this far."""
        self._do("free", address, stream)

    def info(self) -> tuple[int, int]:
        """Return how many bytes are free, and how many there are."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._do("info", free, total)
        return free.value, total.value

    def pin(self, size_bytes: int) -> int:
        """Return the address of pinned memory of the host."""
        address = ctypes.c_uint64()
        self._do("pin", address, size_bytes, _PORTABLE)
        return address.value

    def unpin(self, address: int) -> None:
        """Give pinned memory back."""
        self._do("unpin", address)

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy in the order of the stream."""
        self._do("copy", target, source, size_bytes, *self._calls.copied, stream)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        """Set bytes in the order of the stream."""
        self._do("fill", address, byte, size_bytes, stream)

    def new_stream(self) -> int:
        """Return a stream."""
        made = ctypes.c_void_p()
        self._do("new_stream", made, _NON_BLOCKING)
        return made.value or 0

    def drop_stream(self, stream: int) -> None:
        """Forget a stream once its work is done."""
        self._do("drop_stream", stream)

    def order(self, first: int, then: int) -> None:
        """Let one stream wait for what another was given so far."""
        if first == then:
            return
        # An event each time: memory may be freed, and so call this, in the midst of it.
        event = ctypes.c_void_p()
        self._do("new_event", event, _WITHOUT_TIME)
        try:
            self._do("record", event, first)
            self._do("wait", then, event, 0)
        finally:
            self._do("drop_event", event)

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self._do("synchronize", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether somebody captures what the stream is given."""
        status = ctypes.c_int()
        self._do_graph("is_capturing", stream, status)
        return status.value != 0

    def begin_capture(self, stream: int) -> None:
        """Have work of a stream become a graph."""
        self._do_graph("begin", stream, _RELAXED)

    def end_capture(self, stream: int) -> int:
        """Return a graph of that work."""
        template, made = ctypes.c_void_p(), ctypes.c_void_p()
        self._do_graph("end", stream, template)
        try:
            self._do_graph("instantiate", made, template, 0)
        finally:
            self._do_graph("drop_template", template)
        return made.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a graph."""
        self._do_graph("launch", graph, stream)

    def drop_graph(self, graph: int) -> None:
        """Forget a graph."""
        self._do_graph("drop", graph)

    def close(self) -> None:
        """Give the pool back."""
        self._do("destroy", self._pool)

    def _do_graph(self, call: str, *arguments: Any) -> None:
        if call not in self._functions:
            self._functions |= self._found(self._calls.graphs)
        self._do(call, *arguments)

    def _found(self, table: CallTable) -> dict[str, tuple[str, Any]]:
        """Return the name and the function of each call."""
        found = {call: (name, self._find(name, types)) for call, (name, types) in table.items()}
        lacking = sorted(name for name, function in found.values() if function is None)
        if lacking:
            raise DriverError(
                f"the library of {self._driver.backend} lacks {', '.join(lacking)}: update the"
                " driver",
                lacking=lacking,
            )
        return found

    def _status(self, call: str, *arguments: Any) -> int:
        self._driver.check_alive()
        leave = self._driver.on_device(self._device)
        try:
            status: int = self._functions[call][1](*arguments)
        finally:
            leave()
        return status

    def _do(self, call: str, *arguments: Any) -> None:
        self._driver.check(self._status(call, *arguments), self._functions[call][0])


def out_of_memory(asked: int, free: int, total: int, device: int) -> OutOfDeviceMemory:
    """Return the error of an allocation that a device has no memory for."""
    return OutOfDeviceMemory(
        f"device {device}: asked for {asked} bytes of memory, and of {total} there are {free} free;"
        " drop tensors, or run smaller batches",
        asked=asked,
        free=free,
        total=total,
        device=device,
    )
