# SPDX-License-Identifier: Apache-2.0
"""`scratch_for`: memory that a kernel writes its intermediate results to, for the time of one
launch.

It comes from torch where torch uses the GPU, else from the driver.  The drivers hand the function
to their launchers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

from bundler.runtime.launch.drivers.launchers import Leave, Scratch
from bundler.runtime.launch.plans.plan import GLOBAL_SCRATCH, PROFILE_SCRATCH, LaunchPlan

# Both allocators align to this; more is made by allocating more.
_ALIGNED_BYTES = 256


class ScratchPool(Protocol):
    """Memory in the order of a stream: what is freed after a launch is reused only by what the
    stream does later.
    """

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory."""

    def free(self, address: int, stream: int) -> None:
        """Give memory back once the stream has come this far."""


class TorchPool:
    """torch's caching allocator: shares its memory with torch, and follows it into the capture of a
    graph.
    """

    def __init__(self, device: int) -> None:
        torch: Any = sys.modules["torch"]
        self._device = device
        self._cuda: Any = torch.cuda
        # What torch's own function calls once it has made the device the current one, which takes
        # longer than all the rest.
        self._raw = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)  # noqa: SLF001
        self._current = torch._C._cuda_getDevice  # noqa: SLF001

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory; torch raises its own out-of-memory error."""
        address: int
        if self._raw is not None and self._current() == self._device:
            address = self._raw(size_bytes, stream)
        else:
            address = self._cuda.caching_allocator_alloc(size_bytes, self._device, stream)
        return address

    def free(self, address: int, stream: int) -> None:
        """Give memory back to torch."""
        self._cuda.caching_allocator_delete(address)


def scratch_for(plan: LaunchPlan, pool: Callable[[], ScratchPool]) -> Scratch | None:
    """Return what allocates a kernel's scratch for each launch, None when the kernel needs none.

    Args:
        plan: says how much, for each program of the grid and each block of a cluster.
        pool: where from; asked at each launch, since torch may come into the process later.
    """
    if not (plan.global_scratch_bytes or plan.profile_scratch_bytes):
        return None
    sizes = (
        (GLOBAL_SCRATCH, plan.global_scratch_bytes, plan.global_scratch_align),
        (PROFILE_SCRATCH, plan.profile_scratch_bytes, plan.profile_scratch_align),
    )
    wanted = [
        (place, kind, align, align if align > _ALIGNED_BYTES else 0)
        for place, (kind, size, align) in enumerate(sizes)
        if size
    ]

    def allocate(grid_x: int, grid_y: int, grid_z: int, stream: int) -> tuple[int, int, Leave]:
        source, programs, addresses = pool(), grid_x * grid_y * grid_z, [0, 0]
        taken: list[int] = []
        try:
            for place, kind, align, spare in wanted:
                address = source.allocate(plan.scratch_bytes(programs, kind) + spare, stream)
                taken.append(address)
                addresses[place] = address + (-address % align if spare else 0)
        except BaseException:
            _give_back(source, taken, stream)
            raise
        return addresses[0], addresses[1], functools.partial(_give_back, source, taken, stream)

    return allocate


def _give_back(source: ScratchPool, taken: list[int], stream: int) -> None:
    """Give back all that was taken, the last first, also where one of them raises."""
    try:
        if taken:
            source.free(taken.pop(), stream)
    finally:
        if taken:
            _give_back(source, taken, stream)
