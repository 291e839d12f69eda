# SPDX-License-Identifier: Apache-2.0
"""`Workspace`: the buffers between a plan's steps, at places of one allocation, which each call
makes once; `BoundPlan` has one where the memory is a `DeviceMemory`.

A pool mostly gives the address that it gave before, so the tensors of one call are those of the
next, and a step that allocates has nothing left to do.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

from bundler.runtime.program.device_tensors import PlacedTensor, item_bytes, span
from bundler.runtime.program.program_plan import Allocate, ProgramPlan, Release, TensorSpec

_ALIGNED_BYTES = 256
_Shape = tuple[tuple[int, ...], tuple[int, ...]]


class FreeBlocks:
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


class Workspace:
    """Where the buffers of a plan lie; threads may share one.

    Args:
        plan: whose results lie elsewhere: they are the caller's.
        memory: a `DeviceMemory`, or a `CheckedMemory` of one.
        shape: returns sizes and strides of a spec, as numbers.

    Attributes:
        buffers: names of those that it has.
        size_bytes: of all.
    """

    def __init__(
        self, plan: ProgramPlan, memory: Any, shape: Callable[[TensorSpec], _Shape]
    ) -> None:
        self._allocate, self._owner = memory.allocate, memory.workspaces
        results = {output.buffer for output in plan.outputs}
        free, live = FreeBlocks(), dict[str, tuple[int, int]]()
        self._tensors: list[tuple[int, str, tuple[int, ...], tuple[int, ...]]] = []
        self.buffers: list[str] = []
        self.size_bytes = 0
        for step in plan.steps:
            if isinstance(step, Allocate) and step.name not in results:
                sizes, strides = shape(step.spec)
                wanted = max(span(sizes, strides) * item_bytes(step.spec.dtype), 1)
                block = free.take(-(-wanted // _ALIGNED_BYTES) * _ALIGNED_BYTES)
                live[step.name] = block or self._new(wanted)
                self.buffers.append(step.name)
                self._tensors.append((live[step.name][1], step.spec.dtype, sizes, strides))
            elif isinstance(step, Release) and step.name in live:
                free.add(*live.pop(step.name))
        self._latest: tuple[int, list[PlacedTensor]] = (-1, [])

    def _new(self, wanted: int) -> tuple[int, int]:
        size, place = -(-wanted // _ALIGNED_BYTES) * _ALIGNED_BYTES, self.size_bytes
        self.size_bytes += size
        return size, place

    def taken(self) -> tuple[Any, Sequence[PlacedTensor]]:
        """Return what has the memory of one call, and its buffers, which hold none of it.

        Raises:
            OutOfDeviceMemory: there is not so much.
        """
        held = self._allocate("uint8", (self.size_bytes,), (1,))
        address, tensors = self._latest
        if address != held.address:
            tensors = [
                PlacedTensor(held.address + place, dtype, sizes, strides, None, self._owner)
                for place, dtype, sizes, strides in self._tensors
            ]
            self._latest = held.address, tensors
        return held, tensors
