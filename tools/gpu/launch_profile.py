# SPDX-License-Identifier: Apache-2.0
"""Where the time of first launches goes, phase by phase: `watch` puts a clock around our functions
and the driver's, for `first_launches.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

KERNELS, SIZE, BLOCK = 150, 1024, 256
GRID = (SIZE // BLOCK, 1, 1)
# What the extension calls itself is part of the launch; the rest of the driver is called from
# Python.
IN_ONE_CALL = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute")
DRIVER_CALLS = (*IN_ONE_CALL, "cuFuncSetAttribute", "cuFuncSetCacheConfig")


class Profile:
    """Seconds by phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and adds the time that it takes to a phase."""

        @functools.wraps(function, updated=())
        def run(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*arguments, **keywords)
            finally:
                spent, inside = time.perf_counter() - started, self._inside.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - inside
                if self._inside:
                    self._inside[-1] += spent

        return run

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Put a function of a class or module under the clock, for the rest of this process."""
        setattr(owner, name, self.timed(phase, getattr(owner, name)))

    def microseconds(self, kernels: int) -> dict[str, float]:
        """Return each phase in microseconds a kernel."""
        return {phase: seconds / kernels * 1e6 for phase, seconds in self.seconds.items()}


def watch(driver: Any) -> Profile:
    """Put everything between a bundle file and a launch under a clock, for the rest of this
    process.
    """
    from bundler.format.bundle import Bundle
    from bundler.runtime.launch import handle
    from bundler.runtime.launch.bundle_kernels import Kernels
    from bundler.runtime.launch.specialization_choice import CallShape, Choices
    from bundler.runtime.launch.specialization_match import Specialization
    from bundler.runtime.launch.static_kernel import StaticKernel

    profile = Profile()
    Bundle.load = staticmethod(profile.timed("load: manifest", Bundle.load))  # type: ignore[method-assign]
    for owner, name, phase in (
        (Kernels, "__init__", "load: kernels by name"),
        (Specialization, "_read", "choose: facts decoded"),
        (StaticKernel, "__init__", "choose: arguments of all specializations"),
        (Choices, "_grouped", "choose: index"),
        (StaticKernel, "_meet", "choose: specialization for the call"),
        (CallShape, "find", "choose: specialization for the constants"),
        (Bundle, "view_blob", "read: verified bytes"),
        (handle, "plan_with", "plan"),
        (type(driver), "load", "driver: around its calls"),
        (type(driver), "launcher", "driver: launcher"),
    ):
        profile.watch(owner, name, phase)
    library = getattr(driver, "_library", None)
    if getattr(driver, "load_image", None) is not None:
        profile.watch(driver, "load_image", f"driver: {', '.join(IN_ONE_CALL)} in one call")
    for name in DRIVER_CALLS if library is not None else ():
        profile.watch(library, name, f"driver: {name}")
    return profile


class Vector:
    """Memory with a type, on the first device: all that a launch asks of a tensor."""

    dtype = "float32"

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address

    def get_device(self) -> int:
        """Return the device's number."""
        return 0
