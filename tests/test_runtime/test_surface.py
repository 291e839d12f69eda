# SPDX-License-Identifier: Apache-2.0
"""What bundler.runtime exports is what docs/api.md says of it."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import bundler.runtime

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = re.sub(r"\s+", " ", (ROOT / "docs" / "api.md").read_text()).replace("( ", "(")
CLASSES = (
    *("Handle", "Kernels", "StaticKernel", "LaunchPlan", "Driver"),
    *("DeviceMemory", "DeviceStream", "DeviceTensor", "MemoryPool", "PinnedMemory"),
)


def _signature(name, function):
    text = re.sub(
        r"""(: |-> )(?:'([^']*)'|"([^"]*)")""", r"\1\2\3", str(inspect.signature(function))
    )
    return name + text.replace("(self, ", "(").replace("(self)", "()")


def test_each_exported_name_is_documented():
    """Every name, sorted, and every signature of a function, method and field."""
    assert sorted(bundler.runtime.__all__) == bundler.runtime.__all__
    missing = [
        name
        for name in bundler.runtime.__all__
        if f"`{name}`" not in DOCUMENTED and f"{name}(" not in DOCUMENTED
    ]
    for name in bundler.runtime.__all__:
        thing = getattr(bundler.runtime, name)
        if inspect.isfunction(thing):
            missing += [line for line in [_signature(name, thing)] if line not in DOCUMENTED]
    for name in CLASSES:
        for member, value in vars(getattr(bundler.runtime, name)).items():
            if inspect.isfunction(value) and not member.startswith("_"):
                missing += [line for line in [_signature(member, value)] if line not in DOCUMENTED]
    for name in ("LaunchPlan", "Parameter", "DeviceProperties"):
        fields = getattr(bundler.runtime, name).__dataclass_fields__.values()
        missing += [
            f"{name}.{field.name}"
            for field in fields
            if f"{field.name}: {field.type}" not in DOCUMENTED
        ]
    assert missing == []


def test_importing_the_runtime_is_light():
    """No driver, no compiler and no tensor library comes with the import, nor with all its
    names.
    """
    code = """
import sys, bundler.runtime
for name in bundler.runtime.__all__:
    getattr(bundler.runtime, name)
print(sorted({"torch", "triton", "numpy", "redis", "ctypes.util"} & set(sys.modules)), "bundler.runtime.launch.drivers.cuda" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] False"


def test_rules_come_without_launch_and_tuning():
    """Each rule module is imported alone; the decorators, which tune, come when one is asked for,
    and no other name does.
    """
    code = """
import importlib, pkgutil, sys
from bundler.runtime import heuristics
for module in pkgutil.iter_modules(heuristics.__path__):
    importlib.import_module(f"{heuristics.__name__}.{module.name}")
rooms = [name for name in sys.modules if name.startswith(("bundler.runtime.launch", "bundler.runtime.tuning"))]
found = [name for name in heuristics.__all__ if getattr(heuristics, name).__name__ != name]
print(rooms, found, hasattr(heuristics, "HeuristicKernel"), set(heuristics.__all__) <= set(dir(heuristics)))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] [] False True"


def test_a_static_kernel_comes_without_the_recorder():
    """Launching does not import what records and compiles; only a fallback does."""
    code = """
import sys, bundler.runtime.launch.static_kernel
print(sorted({"bundler.lifecycle.recorder", "bundler.compile", "bundler.store"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
