# SPDX-License-Identifier: Apache-2.0
"""`handles_on`: makes handles of what a compile service compiled, so that kernel source goes in and
a launch comes out.

Users hand it to `CompileService.source` as `finish`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bundler.compile.compile_job import Compiled
from bundler.errors import CannotLaunchStatically
from bundler.lifecycle.bundle_builder import Builder, join
from bundler.runtime.launch.calls.specialization_match import Specialization
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.launch.handle import Handle
from bundler.runtime.launch.loaded_plans import PlanLoader
from bundler.runtime.launch.plans.plan_builder import BACKENDS
from bundler.toolchain import identity


def handles_on(
    driver: Driver | None = None, device: int | None = None
) -> Callable[[Compiled], Handle]:
    """Return a function that loads a compiled kernel and returns its handle.

    Args:
        driver: whose GPUs to use; None opens CUDA's or HIP's when the function is first called.
        device: None for the current one.

    The function raises `CannotLaunchStatically` for a kernel that only Triton can launch or whose
    files are not complete, `ToolchainMismatch` for one of another target, and `DriverError`.
    """

    def load(compiled: Compiled) -> Handle:
        chosen = driver or open_first_driver(BACKENDS)
        builder = Builder(os.path.dirname(compiled.directory), "launch")
        reason = compiled.add_to(builder)
        if reason is not None:
            raise CannotLaunchStatically(f"{compiled.key}: {reason}", key=compiled.key)
        bundle = join([builder], identity.environment())
        loader, kernel = PlanLoader(chosen), bundle.kernels[0]
        loader.add_source(bundle)
        loaded = loader.load(kernel, chosen.device() if device is None else device)
        return Handle(loaded, chosen, Specialization(kernel).arguments)

    return load
