# SPDX-License-Identifier: Apache-2.0
"""`scratch_for`: memory that a kernel writes its intermediate results to, for the time of one launch.

It comes from torch where torch uses the GPU, else from the driver.  The drivers hand the function to their launchers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from bundler.runtime.launch.launchers import Leave, Scratch
from bundler.runtime.launch.plan import GLOBAL_SCRATCH, PROFILE_SCRATCH, LaunchPlan

# Both allocators align to this; more is made by allocating more.
_ALIGNED_BYTES = 256


class ScratchPool(Protocol):
    """Memory in the order of a stream: what is freed after a launch is reused only by what the stream does later."""

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory."""

    def free(self, address: int, stream: int) -> None:
        """Give memory back once the stream has come this far."""


class TorchPool:
    """torch's caching allocator: shares its memory with torch, and follows it into the capture of a graph."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._cuda: Any = sys.modules["torch"].cuda

    def allocate(self, size_bytes: int, stream: int) -> int:
        """Return the address of new memory; torch raises its own out-of-memory error."""
        address: int = self._cuda.caching_allocator_alloc(size_bytes, self._device, stream)
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
    wanted = (
        (GLOBAL_SCRATCH, plan.global_scratch_bytes, plan.global_scratch_align),
        (PROFILE_SCRATCH, plan.profile_scratch_bytes, plan.profile_scratch_align),
    )

    def allocate(grid_x: int, grid_y: int, grid_z: int, stream: int) -> tuple[int, int, Leave]:
        source, held = pool(), ExitStack()
        with ExitStack() as stack:
            addresses = [
                stack.enter_context(_lent(source, plan.scratch_bytes(grid_x * grid_y * grid_z, kind), align, stream))
                if size
                else 0
                for kind, size, align in wanted
            ]
            held = stack.pop_all()
        return addresses[0], addresses[1], held.close

    return allocate


@contextmanager
def _lent(source: ScratchPool, size_bytes: int, align: int, stream: int) -> Iterator[int]:
    spare = align if align > _ALIGNED_BYTES else 0
    address = source.allocate(size_bytes + spare, stream)
    try:
        yield address + (-address % align if spare else 0)
    finally:
        source.free(address, stream)
