# SPDX-License-Identifier: Apache-2.0
"""Says where the time of first launches goes, phase by phase, with a driver that launches nothing:
it needs no GPU.

    python -m tools.gpu launch-profile [--rounds N] [--library FILE] [--results DIR]

It needs Triton, which compiles the 150 kernels of `python -m tools.gpu check --only first` for
sm_90 once; each round then loads and launches them in a process of its own, without torch and
Triton.  The table has microseconds of processor time a kernel, the least of all rounds.  With a
library that stands in for CUDA's driver (tests/test_runtime/drivers/fake_driver.c, compiled)
launches take the path that they take on a GPU, through the compiled extensions.

`first_launches.py` takes the same profile on a GPU: `watch` puts a clock around our functions and
the driver's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.shared import measurement
from tools.shared.processes import output

KERNELS, SIZE, BLOCK = 150, 1024, 256
GRID = (SIZE // BLOCK, 1, 1)
ADDRESS = 1 << 40
# What the extension calls itself is part of the launch; the rest of the driver is called from
# Python.
IN_ONE_CALL = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute")
DRIVER_CALLS = (*IN_ONE_CALL, "cuFuncSetAttribute", "cuFuncSetCacheConfig")


class Profile:
    """Seconds by phase, each without the phases inside it, and how often each was entered.

    Args:
        clock: on a machine that others use the one of this process's own time tells more.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inside: list[float] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and adds the time that it takes to a phase."""

        @functools.wraps(function, updated=())
        def run(*arguments: Any, **keywords: Any) -> Any:
            started = self._clock()
            self._inside.append(0.0)
            try:
                return function(*arguments, **keywords)
            finally:
                spent, inside = self._clock() - started, self._inside.pop()
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - inside
                self.calls[phase] = self.calls.get(phase, 0) + 1
                if self._inside:
                    self._inside[-1] += spent

        return run

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Put a function of a class or module under the clock, for the rest of this process."""
        setattr(owner, name, self.timed(phase, getattr(owner, name)))

    def microseconds(self, kernels: int) -> dict[str, float]:
        """Return each phase in microseconds a kernel."""
        return {phase: seconds / kernels * 1e6 for phase, seconds in self.seconds.items()}


def watch(driver: Any, clock: Callable[[], float] = time.perf_counter) -> Profile:
    """Put everything between a bundle file and a launch under a clock, for the rest of this
    process.
    """
    from bundler.format.bundle import Bundle
    from bundler.runtime.launch import loaded_plans
    from bundler.runtime.launch.bundle_kernels import Kernels
    from bundler.runtime.launch.calls.specialization_choice import Choices
    from bundler.runtime.launch.calls.specialization_index import CallShape
    from bundler.runtime.launch.calls.specialization_match import Specialization
    from bundler.runtime.launch.static_kernel import StaticKernel

    profile = Profile(clock)
    Bundle.load = staticmethod(profile.timed("load: manifest", Bundle.load))  # type: ignore[method-assign]
    profile.watch(Kernels, "__init__", "load: kernels by name")
    profile.watch(Specialization, "_read", "choose: facts decoded")
    profile.watch(StaticKernel, "__init__", "choose: arguments of all specializations")
    profile.watch(Choices, "_grouped", "choose: index")
    profile.watch(StaticKernel, "_meet", "choose: specialization for the call")
    profile.watch(CallShape, "find", "choose: specialization for the constants")
    profile.watch(Bundle, "view_blob", "read: verified bytes")
    profile.watch(loaded_plans, "plan_with", "plan")
    profile.watch(type(driver), "load", "driver: around its calls")
    profile.watch(type(driver), "launcher", "driver: launcher")
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


def compile_all(path: str) -> dict[str, Any]:
    """Compile the kernels for sm_90 by Triton's JIT, without a GPU, and save a bundle of them."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    import bundler
    from tools.gpu import kernels

    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )
    with bundler.recording() as recording:
        for number in range(KERNELS):
            kernels.numbered.warmup(
                torch.float32, torch.float32, SIZE, NUMBER=number, BLOCK=BLOCK, grid=GRID
            )
    with recording.collect() as bundle:
        bundle.save(path)
        return {"kernels": len(bundle.kernels)}


def launch_all(path: str, watched: str, library: str = "") -> dict[str, Any]:
    """Load the bundle and launch all kernels with the dry driver, or over a library; `watched` says
    whether each phase is timed.
    """
    from bundler.runtime.launch.bundle_kernels import load

    driver = _driver(library)
    profile = watch(driver, time.process_time) if watched else Profile()
    started = time.process_time()
    kernel, x = load(path, driver=driver)["numbered"], Vector(ADDRESS)
    launch = profile.timed(
        "launch",
        lambda number: kernel[GRID](
            x, Vector(ADDRESS + (number + 1) * SIZE * 4), SIZE, NUMBER=number, BLOCK=BLOCK
        ),
    )
    for number in range(KERNELS):
        launch(number)
    seconds = time.process_time() - started
    if not library and len({launched.plan.key for launched in driver.launches}) != KERNELS:
        raise RuntimeError(
            f"{len(driver.launches)} launches, expected one of each of {KERNELS} kernels"
        )
    return {"us": seconds / KERNELS * 1e6, "phases_us": profile.microseconds(KERNELS)}


def _driver(library: str) -> Any:
    if library:
        from bundler.runtime.launch.drivers.cuda import CudaDriver

        driver = CudaDriver(library, compiled=True)
        driver.properties(driver.device())  # which the bare loop on a GPU does not ask for either
        return driver
    from bundler.runtime.launch.drivers.dry_driver import DryDriver

    return DryDriver("cuda")


STEPS: dict[str, Callable[..., dict[str, Any]]] = {"compile": compile_all, "launch": launch_all}


def main() -> int:
    """Compile, let processes launch in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind (7)")
    parser.add_argument(
        "--library",
        default="",
        help="a library that stands in for CUDA's driver; left out, the dry driver is used",
    )
    parser.add_argument(
        "--results", type=Path, help="where launch-profile.json goes; left out, nothing is written"
    )
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step[0]](*options.step[1:])))
        return 0
    with tempfile.TemporaryDirectory(prefix="launch-profile.") as folder:
        bundle = str(Path(folder, "first.tbundle"))
        _step(folder, "compile", bundle)
        plain = [
            _step(folder, "launch", bundle, "", options.library)["us"]
            for _ in range(options.rounds)
        ]
        watched = [
            _step(folder, "launch", bundle, "watched", options.library)["phases_us"]
            for _ in range(options.rounds)
        ]
    phases = {phase: min(each[phase] for each in watched) for phase in watched[0]}
    print(
        f"{min(plain):8.1f} us a kernel, first launches of {KERNELS} kernels with "
        f"{options.library or 'the dry driver'} (the clocks are off)"
    )
    for phase, spent in phases.items():
        print(f"{spent:8.1f}   {phase}")
    if options.results:
        measurement.save("launch-profile", {"us": plain, "phases_us": watched}, options.results)
    return 0


def _step(folder: str, *arguments: str) -> dict[str, Any]:
    """Run one step in a process of its own."""
    environment = {"TRITON_CACHE_DIR": os.path.join(folder, "cache")}
    said = output("tools.gpu", "launch-profile", "--step", *arguments, environment=environment)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result
