# SPDX-License-Identifier: Apache-2.0
"""`Handle`: one specialization on one device, launched without choosing it again, for loops where
each microsecond counts.

`StaticKernel.handle` makes one for users, and the tuner makes one for each candidate that it times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.format.launch_spec import Argument
from bundler.runtime import grids
from bundler.runtime.launch.calls.argument_flattening import feed_of
from bundler.runtime.launch.calls.device_check import check_address, check_memory
from bundler.runtime.launch.calls.specialization_match import bind
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.loaded_plans import LoadedPlan
from bundler.runtime.launch.plans.parameter_buffer import Packer
from bundler.runtime.launch.plans.plan import LaunchPlan


class Handle:
    """Launches one compiled kernel.

    `launch(grid_x, grid_y, grid_z, stream, *values)` checks its first call like any launch: number,
    kinds and ranges of the values, where tensors lie, the grid.  After that it is the driver's own
    launcher, which checks what packing needs and no more: that the values are those the kernel was
    specialized for (types, alignment, on the device) is the caller's to know. With `debug` every
    call is checked.  Keep `handle.launch` in a variable only after the first call.

    `values` are what the kernel's binary takes: constants left out, tuples and descriptors taken
    apart.  `values(...)` makes them from arguments as the kernel's author wrote them.  Launch hooks
    are not called.  Any thread may launch.
    """

    __slots__ = ("_arguments", "_debug", "_driver", "_feed", "_loaded", "_packer", "launch")

    launch: Callable[..., None]

    def __init__(
        self,
        loaded: LoadedPlan,
        driver: Driver,
        arguments: Sequence[Argument],
        *,
        debug: bool = False,
    ) -> None:
        self._loaded, self._driver, self._arguments, self._debug = loaded, driver, arguments, debug
        self._feed = feed_of(loaded.plan, driver)
        self._packer = Packer(loaded.plan)
        self.launch = self._checked

    def __repr__(self) -> str:
        return f"<handle of {self.plan.kernel} ({self.plan.key[:8]}) on device {self.device}>"

    @property
    def plan(self) -> LaunchPlan:
        """What the kernel takes and needs."""
        return self._loaded.plan

    @property
    def device(self) -> int:
        """The device that the kernel was loaded on."""
        return self._loaded.device

    def values(self, *args: Any, **keywords: Any) -> tuple[Any, ...]:
        """Return what `launch` takes for these arguments of the kernel; constants may be left out
        when they have a default.

        Raises:
            CannotLaunchStatically: arguments that the kernel does not have.
        """
        call = bind(self.plan.kernel, self._arguments, args, keywords)
        if call.options:
            raise CannotLaunchStatically(
                f"{self.plan.kernel}: has no parameter {', '.join(map(repr, call.options))}",
                kernel=self.plan.kernel,
            )
        return tuple(self._feed(call.values))

    def _checked(self, grid_x: int, grid_y: int, grid_z: int, stream: int, /, *values: Any) -> None:
        plan, launcher = self.plan, self._loaded.launcher
        grids.checked((grid_x, grid_y, grid_z), plan.kernel, plan.target.backend, plan.cluster)
        self._packer.pack(values)
        for parameter, value in zip(plan.arguments, values, strict=True):
            if parameter.kind == "pointer":
                check_memory(
                    plan.kernel, parameter.name, value, self.device, self._driver.pointer_device
                )
                check_address(
                    plan.kernel, parameter.name, value, self.device, self._driver.pointer_device
                )
        if grid_x and grid_y and grid_z:
            launcher(grid_x, grid_y, grid_z, stream, *values)
        if not self._debug:
            self.launch = launcher
