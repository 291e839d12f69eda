# SPDX-License-Identifier: Apache-2.0
"""How kernels run: from a bundle to a launch, without a compiler in the process.

    kernels = bundler.runtime.load("model.tbundle")
    kernels["add"][(n // 1024,)](x, y, out, n, BLOCK=1024)

`docs/launching.md` says more.  What is public is listed here; nothing of it imports torch or
Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.runtime.configs import Config
    from bundler.runtime.heuristics.grid_expressions import TextGrid
    from bundler.runtime.launch.bundle_kernels import Kernels, load
    from bundler.runtime.launch.drivers.driver import DeviceProperties, Driver, Launcher, Module
    from bundler.runtime.launch.drivers.driver_opening import open_driver
    from bundler.runtime.launch.drivers.dry_driver import DryDriver
    from bundler.runtime.launch.handle import Handle
    from bundler.runtime.launch.plans.plan import LaunchPlan, Parameter
    from bundler.runtime.launch.plans.plan_builder import build_plan, can_launch
    from bundler.runtime.launch.static_kernel import StaticKernel
    from bundler.runtime.program.bundle_programs import load_program
    from bundler.runtime.program.run import ProgramMemory, ProgramRunner
    from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel
    from bundler.runtime.tuning.candidate_compiler import handles_on
    from bundler.runtime.tuning.descent import Descent, Space
    from bundler.runtime.tuning.launch_dump import LaunchDump
    from bundler.runtime.tuning.occupancy import DeviceLimits
    from bundler.runtime.tuning.profiler_clock import ProfilerClock
    from bundler.runtime.tuning.tuner_options import TunerOptions
    from bundler.runtime.tuning.tuner_plugins import TunedLaunch, TunerPlugin
    from bundler.runtime.tuning.tuner_reports import BandwidthReport
    from bundler.runtime.tuning.tuning_winners import LookupTable

_MODULE_OF_NAME = {
    "AutotunedKernel": "tuning.autotuned_kernel",
    "BandwidthReport": "tuning.tuner_reports",
    "Config": "configs",
    "Descent": "tuning.descent",
    "DeviceLimits": "tuning.occupancy",
    "DeviceProperties": "launch.drivers.driver",
    "Driver": "launch.drivers.driver",
    "DryDriver": "launch.drivers.dry_driver",
    "Handle": "launch.handle",
    "Kernels": "launch.bundle_kernels",
    "LaunchDump": "tuning.launch_dump",
    "LaunchPlan": "launch.plans.plan",
    "Launcher": "launch.drivers.driver",
    "LookupTable": "tuning.tuning_winners",
    "Module": "launch.drivers.driver",
    "Parameter": "launch.plans.plan",
    "ProfilerClock": "tuning.profiler_clock",
    "ProgramMemory": "program.run",
    "ProgramRunner": "program.run",
    "Space": "tuning.descent",
    "StaticKernel": "launch.static_kernel",
    "TextGrid": "heuristics.grid_expressions",
    "TunedLaunch": "tuning.tuner_plugins",
    "TunerOptions": "tuning.tuner_options",
    "TunerPlugin": "tuning.tuner_plugins",
    "build_plan": "launch.plans.plan_builder",
    "can_launch": "launch.plans.plan_builder",
    "handles_on": "tuning.candidate_compiler",
    "load": "launch.bundle_kernels",
    "load_program": "program.bundle_programs",
    "open_driver": "launch.drivers.driver_opening",
}

__all__ = [
    "AutotunedKernel",
    "BandwidthReport",
    "Config",
    "Descent",
    "DeviceLimits",
    "DeviceProperties",
    "Driver",
    "DryDriver",
    "Handle",
    "Kernels",
    "LaunchDump",
    "LaunchPlan",
    "Launcher",
    "LookupTable",
    "Module",
    "Parameter",
    "ProfilerClock",
    "ProgramMemory",
    "ProgramRunner",
    "Space",
    "StaticKernel",
    "TextGrid",
    "TunedLaunch",
    "TunerOptions",
    "TunerPlugin",
    "build_plan",
    "can_launch",
    "handles_on",
    "load",
    "load_program",
    "open_driver",
]


# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF_NAME.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
