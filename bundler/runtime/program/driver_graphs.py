# SPDX-License-Identifier: Apache-2.0
"""`DriverGraphs`: CUDA graphs of a `DeviceMemory` by the driver alone: capture, launch, and who
still has the memory of a result.

`GraphRunner` has the rules by which a program uses them, and asks `toolchain.torch_memory` for
torch's.  Memory that a captured call allocates is no part of the graph: it comes from an `_Arena`,
which the graph keeps, since a graph that allocates cannot be launched twice without giving back
what its results lie in.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bundler.errors import DriverError, DriverUnavailable
from bundler.runtime.program.device_tensors import DeviceTensor

_ALIGNED_BYTES = 512


class DriverGraphs:
    """Graphs of one memory.

    Args:
        memory: a `DeviceMemory`.
        streams: of it, one of which is captured.
    """

    #: Whether a launch may write over what graphs that were captured later keep: each has memory of
    #: its own.
    shares_memory = False
    #: A number that grows when graphs of before are no longer to be launched.
    age = 0

    def __init__(self, memory: Any, streams: Any) -> None:
        self._memory, self._pool, self._streams = memory, memory.pool, streams
        #: What names the device.
        self.device = f"{memory.place}"

    def why_not(self, operator: str, masks: bool) -> str:
        """Return why an operator cannot be part of a graph."""
        return f"{operator} is called by torch"

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the memory."""
        return isinstance(value, DeviceTensor)

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor lies on the host: none of a `DeviceMemory` does."""
        return False

    def is_grad_enabled(self) -> bool:
        """Whether gradients are followed now."""
        return False

    def is_capturing(self) -> bool:
        """Whether somebody captures a graph on the current stream."""
        found: bool = self._pool.is_capturing(self._memory.stream)
        return found

    def stream(self) -> int:
        """Return the handle of the stream that launches go to now."""
        found: int = self._memory.stream
        return found

    def as_usual(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: tensors have no modes here."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Wait until the stream is done, as before a graph is given up."""
        self._memory.synchronize()

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Return what launches all that a function would, in one graph, and what the function
        returned: tensors whose numbers each launch writes anew.

        Raises:
            DriverError, or what the function raises: what it does cannot be captured.
        """
        memory, pool = self._memory, self._pool
        arena, side, stream = _Arena(memory), memory.new_stream(), memory.current
        pool.begin_capture(side.handle)
        try:
            with self._streams.captured(side, arena):
                results = run()
        except BaseException:
            with contextlib.suppress(DriverError):  # the first error tells more
                pool.drop_graph(pool.end_capture(side.handle))
            raise
        graph = _Graph(memory, pool.end_capture(side.handle), arena, stream)
        lent: dict[int, _Lent] = {}
        return graph.launch, tuple([self._lent(result, arena, lent) for result in results])

    def _lent(self, result: Any, arena: _Arena, lent: dict[int, _Lent]) -> Any:
        """Return a result that lies in memory of the graph so that its users are counted."""
        owner = getattr(result, "owner", None)
        if getattr(owner, "arena", None) is not arena:
            return result
        found = lent.setdefault(id(owner), _Lent(owner))
        return replace(result, owner=_Loan(found))

    def name_of(self, tensor: Any) -> int:
        """Return what names a tensor's memory."""
        return id(self.storage(tensor))

    def storage(self, tensor: Any) -> Any:
        """Return what keeps a tensor's memory."""
        owner = tensor if tensor.owner is None else tensor.owner
        return owner.memory if isinstance(owner, _Loan) else owner

    def users(self, storage: Any) -> int:
        """Return how many results have memory that a graph writes."""
        return len(storage.users)

    def same(self, tensor: Any) -> Callable[[], Any]:
        """Return what makes new tensors of a result's memory."""
        return lambda: replace(tensor, owner=_Loan(tensor.owner.memory))

    def copies(self, tensors: Sequence[Any]) -> list[Any]:
        """Return copies of results; those that share memory do so again."""
        memory, made, found = self._memory, dict[int, Any](), []
        for tensor in tensors:
            lent: _Lent = tensor.owner.memory
            new = made.get(id(lent))
            if new is None:
                size = lent.owner.size_bytes
                new = made[id(lent)] = memory.allocate("uint8", (size,))
                self._pool.copy(new.address, lent.owner.address, size, memory.stream)
            address = new.address + tensor.address - lent.owner.address
            found.append(replace(tensor, address=address, owner=new.owner))
        return found

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copy tensors that lie alike."""
        for target, source in zip(targets, sources, strict=True):
            self._memory.copy(target, source)

    def recognizer(self, tensors: Sequence[Any]) -> Callable[..., bool]:
        """Return what says whether other tensors have dtype, sizes and strides of these."""
        known = [_look_of(tensor) for tensor in tensors]
        return lambda *others: (
            all(isinstance(one, DeviceTensor) for one in others)
            and list(map(_look_of, others)) == known
        )


def _look_of(tensor: DeviceTensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.strides, id(tensor.memory)


class _Graph:
    """A graph, the memory that it works in, and the stream that it is launched on."""

    def __init__(self, memory: Any, handle: int, arena: _Arena, stream: tuple[int, Any]) -> None:
        self._memory, self._handle, self._arena, self._stream = memory, handle, arena, stream

    def launch(self) -> None:
        """Launch all of it."""
        self._memory.pool.launch_graph(self._handle, self._stream[0])

    def __del__(self) -> None:
        with contextlib.suppress(DriverUnavailable):  # in a forked child, which has none
            self._memory.pool.drop_graph(self._handle)


class _FreeBlocks:
    """Blocks that nobody has, by size; the smallest that is large enough is given out."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int]] = []

    def take(self, size_bytes: int) -> tuple[int, int] | None:
        """Return the size and the place of a block; None where there is none so large."""
        found = bisect.bisect_left(self._blocks, (size_bytes, 0))
        return self._blocks.pop(found) if found < len(self._blocks) else None

    def add(self, size_bytes: int, place: int) -> None:
        """Let a block be given out again."""
        bisect.insort(self._blocks, (size_bytes, place))


class _Arena:
    """Memory of what a graph allocates, in blocks that it uses again as it goes.

    A block is free for what the same capture allocates next, since a graph of one stream does one
    thing after the other.  All of it is given back with the graph and its last result.

    Args:
        memory: that it comes from, on its current stream, which is not the one that is captured.
    """

    def __init__(self, memory: Any) -> None:
        self._memory, (self._stream, self._kept) = memory, memory.current
        self._sizes: dict[int, int] = {}
        self._free = _FreeBlocks()

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a block, the smallest that is free and large enough, or a new
        one.
        """
        size = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        found = self._free.take(size)
        if found is not None:
            return found[1]
        address: int = self._memory.pool.allocate(size, self._stream)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        """Let a block be used again."""
        self._free.add(self._sizes[address], address)

    def __del__(self) -> None:
        with contextlib.suppress(DriverUnavailable):
            for address in self._sizes:
                self._memory.pool.free(address, self._stream)


class _Lent:
    """An allocation of a graph that results lie in; `users` are those that are there."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.users: set[int] = set()


class _Loan:
    """What keeps a result, and every view of it."""

    __slots__ = ("memory",)

    def __init__(self, memory: _Lent) -> None:
        self.memory = memory
        memory.users.add(id(self))

    def __del__(self) -> None:
        self.memory.users.discard(id(self))
