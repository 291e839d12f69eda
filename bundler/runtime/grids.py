# SPDX-License-Identifier: Apache-2.0
"""`checked`: a grid as the caller writes it, as three numbers within what a device can launch.

Every launch goes through it: of a `StaticKernel`, a `Handle`, a tuned kernel and a heuristic's
grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bundler.errors import CannotLaunchStatically

Grid = int | tuple[int, ...] | list[int] | Callable[[Mapping[str, Any]], Any]
_DIMENSIONS = 3
# Along x, y and z, in blocks; fixed by the driver interfaces, whatever the device.
LIMITS = {"cuda": (2**31 - 1, 65535, 65535), "hip": (2**31 - 1, 65536, 65536)}


def checked(grid: Any, name: str, backend: str, cluster: int = 1) -> tuple[int, int, int]:
    """Return a grid as three numbers; any of them may be zero, which launches nothing.

    Args:
        grid: one to three sizes, or one number.
        name: the kernel's, for errors.
        backend: whose limits hold.
        cluster: blocks for each program, which lie along x.

    Raises:
        CannotLaunchStatically: not one to three integers, negative, or more than a device can
            launch.
    """
    sizes = (
        (grid,) if isinstance(grid, int) else tuple(grid) if isinstance(grid, (tuple, list)) else ()
    )
    if not 0 < len(sizes) <= _DIMENSIONS or not all(isinstance(size, int) for size in sizes):
        raise CannotLaunchStatically(
            f"{name}: a grid is one to three integers, or a function of the arguments that returns"
            f" them; got {grid!r:.80}",
            kernel=name,
            grid=repr(grid)[:80],
        )
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:_DIMENSIONS]
    for axis, size, limit in zip("xyz", (x * cluster, y, z), LIMITS[backend], strict=True):
        if not 0 <= size <= limit:
            raise CannotLaunchStatically(
                f"{name}: the grid has {size} blocks along {axis}, expected 0 to {limit}; "
                "put the longest axis first, or let a program do more",
                kernel=name,
                axis=axis,
                got=size,
                limit=limit,
            )
    return x, y, z
