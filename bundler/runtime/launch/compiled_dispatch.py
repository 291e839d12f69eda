# SPDX-License-Identifier: Apache-2.0
"""`compiled_dispatcher`: the compiled half of `StaticKernel`'s launch, where the extension
`_launch` was built.

It tells calls apart as `Reader` does, and hands to Python those that it does not know.  `Gridded`
is what `StaticKernel` inherits from for `kernel[grid]`: the extension's type, or the same in
Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.toolchain.profiler_hooks import CHAINS, RECORDING, are_present


def dispatcher_type() -> Any | None:
    """Return the extension's dispatcher, None where it was not built."""
    return None if EXTENSION is None else EXTENSION.Dispatcher


class PythonGridded:
    """Has `_launch`, which `self[grid]` calls with the grid in front."""

    _launch: Callable[..., None]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)


if TYPE_CHECKING:
    Gridded = PythonGridded
else:
    Gridded = PythonGridded if EXTENSION is None else EXTENSION.Gridded


def compiled_dispatcher(
    driver: Driver,
    hooks: Hooks,
    slow: Callable[..., Any],
    first: Callable[..., Any],
    measure: Callable[..., Any],
    positions: tuple[bool, ...],
    by_name: Mapping[str, bool],
    capacity: int,
    observed: Callable[[], bool] | None = None,
) -> Callable[..., None] | None:
    """Return what launches as `slow` does, at little more than half the cost for calls like earlier
    ones, or None.

    Args:
        driver: its `device` and `stream` are asked for at each launch, unless the tensors are
            torch's: then the kernel is launched where they lie, from a thread that is there, on
            torch's stream.
        hooks: with any of them present, `slow` launches.
        slow: launches any call; gets those that are not common.
        first: launches any call; gets the first of a kind, and returns (launcher, values it takes
            as `BoundCall` says it, grids, what `measure` needs, what returns the same for the
            constants of a call that differs in them alone, or None there and where it cannot tell),
            None when such calls are always for `slow`, False when nothing is known of them yet.
        measure: gets (what `first` returned for it, arguments, keywords, grid), returns three
            sizes.
        positions: of each parameter, whether it counts by its value.
        by_name: the same by name; a name that is missing does.
        capacity: kinds of calls to remember.
        observed: whether hooks are present or torch's profiler records, asked where C cannot tell;
            with a yes `slow` launches. With it calls have numbers where others have a grid, which
            `measure` finds the grid for.
    """
    # On HIP more about a tensor counts than the dispatcher reads.
    kind = (
        dispatcher_type() if driver.launch_path == "compiled" and driver.backend == "cuda" else None
    )
    if kind is None:
        return None
    made: Callable[..., None] = kind(
        driver=driver,
        enter=hooks.enter,
        leave=hooks.leave,
        present=observed or are_present,
        slow=slow,
        first=first,
        measure=measure,
        positions=bytes(positions),
        names=dict(by_name),
        capacity=capacity,
        numbers=observed is not None,
        chains=CHAINS,
        recording=None if observed is None else RECORDING,
    )
    return made
