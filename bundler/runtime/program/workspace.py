# SPDX-License-Identifier: Apache-2.0
"""`Workspace`: the buffers between a plan's steps, at places of one allocation, which each call
makes once; `BoundPlan` has one where the memory is a `DeviceMemory`.

A pool mostly gives the address that it gave before, so the tensors of one call are those of the
next, and a step that allocates has nothing left to do.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bundler.runtime.program.device_tensors import PlacedTensor, item_bytes, span
from bundler.runtime.program.program_plan import Allocate, ProgramPlan, Release, TensorSpec

_ALIGNED_BYTES = 256
_Shape = tuple[tuple[int, ...], tuple[int, ...]]


class _Life(NamedTuple):
    """How many bytes a buffer has, and the steps that allocate and release it."""

    size_bytes: int
    first: int
    last: int


def _placed(lives: Mapping[str, _Life]) -> tuple[dict[str, int], int]:
    """Return the place of each buffer, and how many bytes all need.

    The largest is placed first, each as low as nothing lies that is there at the same time: mostly
    all need as much as the largest ones that are there at once.
    """
    places: dict[str, int] = {}
    total = 0
    taken: list[tuple[int, int, _Life]] = []
    for name, life in sorted(lives.items(), key=lambda item: -item[1].size_bytes):
        place = 0
        for start, end, other in taken:
            if other.first < life.last and life.first < other.last:
                if place + life.size_bytes <= start:
                    break
                place = max(place, end)
        places[name], end = place, place + life.size_bytes
        bisect.insort(taken, (place, end, life))
        total = max(total, end)
    return places, total


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
        lives: dict[str, _Life] = {}
        shapes: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
        for number, step in enumerate(plan.steps):
            if isinstance(step, Allocate) and step.name not in results:
                sizes, strides = shape(step.spec)
                wanted = max(span(sizes, strides) * item_bytes(step.spec.dtype), 1)
                size = -(-wanted // _ALIGNED_BYTES) * _ALIGNED_BYTES
                lives[step.name] = _Life(size, number, len(plan.steps))
                shapes[step.name] = step.spec.dtype, sizes, strides
            elif isinstance(step, Release) and step.name in lives:
                lives[step.name] = lives[step.name]._replace(last=number)
        places, self.size_bytes = _placed(lives)
        self.buffers = list(lives)
        self._tensors = [(places[name], *look) for name, look in shapes.items()]
        self._latest: tuple[int, list[PlacedTensor]] = (-1, [])

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
