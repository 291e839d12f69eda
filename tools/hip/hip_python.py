# SPDX-License-Identifier: Apache-2.0
"""A program that `headers.py` starts beside an unpacked hip-python: prints, as JSON, what that
package knows of HIP's numbers.

    python -m tools.hip.hip_python hip.hip '["hipErrorNoDevice", ...]'

Where a member lies is found by writing a number at our place of it and reading it through the
package.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from typing import Any

from bundler.runtime.launch.drivers import hip_api

_ENUMERATIONS = (
    "hipError_t",
    "hipDeviceAttribute_t",
    "hipFunction_attribute",
    "hipMemoryType",
    "hipLaunchAttributeID",
)
_MEMBERS = {"type": "type", "device": "device", "isManaged": "managed", "allocationFlags": "flags"}


def main() -> int:
    """Print it."""
    hip: Any = importlib.import_module(sys.argv[1])
    wanted = json.loads(sys.argv[2])
    print(json.dumps({"numbers": _numbers(hip, wanted), "places": _places(hip)}))
    return 0


def _numbers(hip: Any, wanted: list[str]) -> dict[str, int]:
    enumerations = [getattr(hip, name) for name in _ENUMERATIONS]
    return {
        name: int(getattr(enumeration, name))
        for name in wanted
        for enumeration in enumerations
        if hasattr(enumeration, name)
    }


def _places(hip: Any) -> dict[str, int]:
    found = {
        "hipDeviceProp_tR0600": int(hip.hipDeviceProp_t().c_sizeof()),
        "hipPointerAttribute_t": int(hip.hipPointerAttribute_t().c_sizeof()),
    }
    for name in ("hipLaunchAttribute", "HIP_LAUNCH_CONFIG"):
        if hasattr(hip, name):
            found[name] = int(getattr(hip, name)().c_sizeof())
    memory = ctypes.create_string_buffer(hip_api.PROPERTIES_BYTES)
    ctypes.memmove(ctypes.addressof(memory) + hip_api.ARCH_AT, b"gfx942", 6)
    if hip.hipDeviceProp_t.fromObj(ctypes.addressof(memory)).gcnArchName in {b"gfx942", "gfx942"}:
        found["hipDeviceProp_tR0600.gcnArchName"] = hip_api.ARCH_AT
    for name, own in _MEMBERS.items():
        attributes = hip_api.PointerAttributes(**{own: 2})
        if int(getattr(hip.hipPointerAttribute_t.fromObj(ctypes.addressof(attributes)), name)) == 2:
            found[f"hipPointerAttribute_t.{name}"] = getattr(hip_api.PointerAttributes, own).offset
    return found


if __name__ == "__main__":
    sys.exit(main())
