# SPDX-License-Identifier: Apache-2.0
"""`DryPool`: the `MemoryPool` of `DryDriver`, whose memory is the host's, and which counts what is
in use.

All work is done at once, so streams are numbers; which of them waits for which is written down.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from bundler.errors import DriverError
from bundler.runtime.launch.drivers.native_pool import out_of_memory

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
