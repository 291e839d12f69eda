# SPDX-License-Identifier: Apache-2.0
"""`PlanLoader`: brings kernels from a bundle onto devices, once for each device, when they are
first needed.

It verifies the bytes of a kernel, builds its plan, loads it, and returns all of it as `LoadedPlan`.
`StaticKernel` and the tuner load through it.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from bundler.errors import DriverUnavailable
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.format.launch_spec import LaunchFacts
from bundler.runtime.launch.drivers.driver import Driver, Launcher, Module
from bundler.runtime.launch.plans.plan import LaunchPlan
from bundler.runtime.launch.plans.plan_builder import plan_with


class LoadedPlan(NamedTuple):
    """A kernel on a device, ready to be launched."""

    plan: LaunchPlan
    module: Module
    launcher: Launcher
    device: int


class PlanLoader:
    """Loads each kernel once a device, and unloads them all.

    Thread-safe: of several threads that need a kernel at once, one loads it.  A process that was
    forked off after the first load gets `DriverUnavailable`.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._loaded: dict[tuple[str, int], LoadedPlan] = {}
        self._sources: dict[str, Bundle] = {}
        self._lock, self._process = threading.Lock(), os.getpid()

    def add_source(self, bundle: Bundle) -> None:
        """Let kernels of another bundle be loaded; the bundle has to stay open."""
        self._sources.update((kernel.key, bundle) for kernel in bundle.kernels)

    def load(self, kernel: Kernel, device: int, alike: LaunchFacts | None = None) -> LoadedPlan:
        """Return a kernel on a device.

        Args:
            kernel: of a bundle that was added.
            device: the number of the device.
            alike: its launch facts, but for the constants, where the caller has decoded them.

        Raises:
            DigestMismatch: its binary is not what was recorded; the driver never sees it.
            CannotLaunchStatically, FormatError: see `build_plan`.
            ToolchainMismatch, DriverError: see `Driver.load`.
        """
        found = self._loaded.get((kernel.key, device))
        if found is not None:
            return found
        if os.getpid() != self._process:
            raise DriverUnavailable(
                f"{kernel.name}: this process was forked after its parent opened the driver, which"
                " does not survive that; load the bundle here, in a process started by spawn",
                kernel=kernel.name,
            )
        with self._lock:
            found = self._loaded.get((kernel.key, device))
            if found is None:
                found = self._loaded[kernel.key, device] = self._load(kernel, device, alike)
            return found

    def _load(self, kernel: Kernel, device: int, alike: LaunchFacts | None) -> LoadedPlan:
        name, digest = kernel.binary_file()
        image = bytes(self._sources[kernel.key].view_blob(digest, name))
        plan = plan_with(kernel, image, kernel.launch.facts if alike is None else alike)
        module = self.driver.load(plan, image, device)
        return LoadedPlan(plan, module, self.driver.launcher(module), device)

    def unload(self) -> None:
        """Take every kernel off its device; what is launched later is loaded again."""
        with self._lock:
            for loaded in self._loaded.values():
                loaded.module.unload()
            self._loaded.clear()
