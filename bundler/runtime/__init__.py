# SPDX-License-Identifier: Apache-2.0
"""How kernels run: from a bundle to a launch, without a compiler in the process.

    kernels = bundler.runtime.load("model.tbundle")
    kernels["add"][(n // 1024,)](x, y, out, n, BLOCK=1024)

`docs/launching.md` says more.  What is public is listed here, under the names that it has in
`bundler`; nothing of it imports torch or Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.runtime.configs import Config
    from bundler.runtime.heuristics.grid_expressions import TextGrid
    from bundler.runtime.launch.bundle_kernels import Kernels, load
    from bundler.runtime.launch.drivers.driver import (
        DeviceProperties,
        Driver,
        Launcher,
        MemoryPool,
        Module,
    )
    from bundler.runtime.launch.drivers.driver_opening import open_driver
    from bundler.runtime.launch.drivers.dry_driver import DryDriver
    from bundler.runtime.launch.handle import Handle
    from bundler.runtime.launch.plan import LaunchPlan, Parameter
    from bundler.runtime.launch.plan_builder import build_plan, can_launch
    from bundler.runtime.launch.static_kernel import StaticKernel
    from bundler.runtime.program.bundle_programs import load_program, load_programs
    from bundler.runtime.program.device_memory import DeviceMemory, DeviceStream, PinnedMemory
    from bundler.runtime.program.device_tensors import DeviceTensor
    from bundler.runtime.program.run import ProgramMemory, ProgramRunner
    from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel
    from bundler.runtime.tuning.benchmark import ProfilerClock
    from bundler.runtime.tuning.candidate_compiler import handles_on
    from bundler.runtime.tuning.descent import Descent, Space
    from bundler.runtime.tuning.occupancy import DeviceLimits
    from bundler.runtime.tuning.tuner_options import TunerOptions
    from bundler.runtime.tuning.tuner_plugins import TunedLaunch, TunerPlugin
    from bundler.runtime.tuning.tuner_reports import BandwidthReport, LaunchDump
    from bundler.runtime.tuning.tuning_winners import LookupTable

__all__ = [
    "AutotunedKernel",
    "BandwidthReport",
    "Config",
    "Descent",
    "DeviceLimits",
    "DeviceMemory",
    "DeviceProperties",
    "DeviceStream",
    "DeviceTensor",
    "Driver",
    "DryDriver",
    "Handle",
    "Kernels",
    "LaunchDump",
    "LaunchPlan",
    "Launcher",
    "LookupTable",
    "MemoryPool",
    "Module",
    "Parameter",
    "PinnedMemory",
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
    "load_programs",
    "open_driver",
]


# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module("bundler"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
