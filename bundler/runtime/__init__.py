# SPDX-License-Identifier: Apache-2.0
"""How kernels run: from a bundle to a launch, without a compiler in the process.

    kernels = bundler.runtime.load("model.tbundle")
    kernels["add"][(n // 1024,)](x, y, out, n, BLOCK=1024)

`docs/launching.md` says more.  What is public is listed here; nothing of it imports torch or Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.runtime.configs import Config
    from bundler.runtime.driver import DeviceProperties, Driver, open_driver
    from bundler.runtime.dry import DryDriver
    from bundler.runtime.handle import Handle
    from bundler.runtime.kernel import StaticKernel
    from bundler.runtime.opening import Kernels, load
    from bundler.runtime.plan import LaunchPlan, Parameter
    from bundler.runtime.planning import build_plan, can_launch
    from bundler.runtime.tuning.autotuned import AutotunedKernel
    from bundler.runtime.tuning.descent import Descent, Space
    from bundler.runtime.tuning.options import TunerOptions
    from bundler.runtime.tuning.reporting import BandwidthReport, LaunchDump
    from bundler.runtime.tuning.winners import LookupTable

_HOMES = {
    "AutotunedKernel": "tuning.autotuned",
    "BandwidthReport": "tuning.reporting",
    "Config": "configs",
    "Descent": "tuning.descent",
    "DeviceProperties": "driver",
    "Driver": "driver",
    "DryDriver": "dry",
    "Handle": "handle",
    "Kernels": "opening",
    "LaunchDump": "tuning.reporting",
    "LaunchPlan": "plan",
    "LookupTable": "tuning.winners",
    "Parameter": "plan",
    "Space": "tuning.descent",
    "StaticKernel": "kernel",
    "TunerOptions": "tuning.options",
    "build_plan": "planning",
    "can_launch": "planning",
    "load": "opening",
    "open_driver": "driver",
}

__all__ = [
    "AutotunedKernel",
    "BandwidthReport",
    "Config",
    "Descent",
    "DeviceProperties",
    "Driver",
    "DryDriver",
    "Handle",
    "Kernels",
    "LaunchDump",
    "LaunchPlan",
    "LookupTable",
    "Parameter",
    "Space",
    "StaticKernel",
    "TunerOptions",
    "build_plan",
    "can_launch",
    "load",
    "open_driver",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
