# SPDX-License-Identifier: Apache-2.0
"""How long a new process takes to the end of the first launches of 150 kernels: Triton, ours, and a
bare loop.

`check.py` calls `rows`.  Further processes run under clocks, which `watch` puts around our functions
and the driver's: the result says what each phase of ours and each call of the driver took.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu import launches
from tools.gpu.steps import Row, Step
from tools.shared.measurement import check, median, medians

KERNELS, SIZE, BLOCK = 150, 1024, 256
GRID = (SIZE // BLOCK, 1, 1)
# What the extension calls itself is part of the launch; the rest of the driver is called from
# Python.
IN_ONE_CALL = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute")
DRIVER_CALLS = (*IN_ONE_CALL, "cuFuncSetAttribute", "cuFuncSetCacheConfig")
ROUNDS = 5
PROFILED_ROUNDS = 3
# Ours may take this many times what the bare loop takes, by launch path.
MOST = {"compiled": 2.0, "ctypes": 3.0}
SPARE_BYTES = 50_000_000
WORDS = {
    "compiled": "compiled extension",
    "ctypes": "pure Python",
    "triton": "Triton, warm cache",
}


def rows(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Record once, then let new processes take turns; returns the rows and the figures."""
    bundle, cubins, cache = (
        str(folder / name) for name in ("first.tbundle", "cubins", "first-cache")
    )
    cold = step(folder, "first-record", bundle, cubins, cache=Path(cache))
    ours = {path: ("first-static", bundle, path) for path in launches.PATHS}
    steps: dict[str, tuple[str, ...]] = {"bare": ("first-bare", cubins), **ours}
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in (*steps, "triton")}
    for number in range(ROUNDS):
        for name, words in steps.items():
            taken[name].append(step(folder, *words, cache=folder / "nothing"))
        if number < 2:  # each takes seconds, and is far from the others
            taken["triton"].append(step(folder, "first-triton", cache=Path(cache)))
    samples = {name: [run["seconds"] * 1e3 for run in runs] for name, runs in taken.items()}
    limit = median(samples["bare"])
    found = []
    for name, words_of in WORDS.items():
        ms, most = median(samples[name]), MOST.get(name)
        import_ms = median(run["import_s"] for run in taken[name] if "import_s" in run) * 1e3
        said = f"{ms:.1f} ms, {ms / limit:.2f} x the bare loop's {limit:.1f} ms"
        said += f" (at most {most})" if most else f"; imports {import_ms:.0f} ms"
        ok = most is None or ms / limit <= most
        found.append(check(f"first launches of {KERNELS} kernels: {words_of}", ok, said))
    found += _facts(taken)
    phases = {
        name: [
            step(folder, *words, "watched", cache=folder / "nothing")["phases_us"]
            for _ in range(PROFILED_ROUNDS)
        ]
        for name, words in steps.items()
    }
    for name, runs in phases.items():
        said = ", ".join(f"{phase} {spent:.1f}" for phase, spent in medians(runs).items())
        found.append(check(f"first launches, us a kernel by phase: {name}", True, said))
    told = {"cold_s": cold["seconds"], "runs": taken, "phases_us": phases}
    return found, {"first": told}


def _facts(taken: dict[str, list[dict[str, Any]]]) -> list[Row]:
    ours = taken["compiled"] + taken["ctypes"]
    processes, expected = (*ours, *taken["bare"]), taken["triton"][0]["digest"]
    equal = all(run["digest"] == expected for run in processes)
    foreign = sorted({name for run in ours for name in run["foreign"]})
    growth, cubins = max(run["growth_bytes"] for run in ours), ours[0]["cubin_bytes"]
    same = f"the same as Triton's in {len(processes)} processes"
    there = f"imported: {', '.join(foreign)}" if foreign else "neither is in sys.modules"
    grew = f"grew by {growth / 1e6:.1f} MB for {cubins / 1e6:.2f} MB of cubins"
    enough = growth <= cubins + SPARE_BYTES
    return [
        check(f"numbers of the {KERNELS} kernels, bit for bit", equal, same),
        check("restore and launch without torch and Triton", not foreign, there),
        check("host memory after context creation", enough, f"{grew} (at most those + 50 MB)"),
    ]


def record(bundle_path: str, cubins: str) -> dict[str, Any]:
    """Compile and launch all kernels by Triton; saves a bundle, and the cubins one by one for the
    bare loop.
    """
    import bundler

    with bundler.recording() as recording:
        result = by_triton()
    with recording.collect() as bundle:
        bundle.save(bundle_path)
        Path(cubins).mkdir()
        numbers = {
            dict(kernel.launch.require_facts().constants)[(3,)].payload: kernel
            for kernel in bundle.kernels
        }
        for number, kernel in numbers.items():
            Path(cubins, f"{number}.cubin").write_bytes(bundle.read(kernel.binary))
            spec = kernel.launch
            Path(cubins, f"{number}.json").write_text(
                json.dumps([spec.entry, spec.num_warps * 32, spec.shared_bytes])
            )
    return result


def by_triton() -> dict[str, Any]:
    """Launch all kernels by Triton, from its cache where that has them."""
    started = time.perf_counter()
    import torch

    kernel = launches.load_kernels().numbered
    imported = time.perf_counter() - started
    x = torch.arange(SIZE, dtype=torch.float32, device="cuda")
    out = torch.zeros((KERNELS, SIZE), dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for number in range(KERNELS):
        kernel[GRID](x, out[number], SIZE, NUMBER=number, BLOCK=BLOCK)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    digest = hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()
    return {"seconds": seconds, "import_s": imported, "digest": digest}


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


class Card:
    """Memory of a GPU and a context on it, through the driver alone."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.check(self.cuda.cuInit(0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.cuda.cuCtxSetCurrent(context))
        self.x, self.out = self._allocate(SIZE * 4), self._allocate(KERNELS * SIZE * 4)
        values = (ctypes.c_float * SIZE)(*range(SIZE))
        self.check(
            self.cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(self.x), values, ctypes.c_size_t(SIZE * 4))
        )
        self.check(self.cuda.cuCtxSynchronize())

    @staticmethod
    def check(status: int) -> None:
        """Raise unless the driver did it."""
        if status:
            raise RuntimeError(f"a call of CUDA failed with {status}")

    def _allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
        return address.value

    def row(self, number: int) -> int:
        """Return the address where a kernel writes."""
        return self.out + number * SIZE * 4

    def digest(self) -> str:
        """Return a digest of everything that was written."""
        size = KERNELS * SIZE * 4
        memory = ctypes.create_string_buffer(size)
        self.check(
            self.cuda.cuMemcpyDtoH_v2(memory, ctypes.c_uint64(self.out), ctypes.c_size_t(size))
        )
        return hashlib.sha256(memory.raw).hexdigest()


def bare(cubins: str, watched: str = "") -> dict[str, Any]:
    """Read, cuModuleLoadData, cuModuleGetFunction, cuLaunchKernel: the limit."""
    card, profile = Card(), Profile()
    folder = Path(cubins)
    specs = [json.loads((folder / f"{number}.json").read_text()) for number in range(KERNELS)]
    names = ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuCtxSynchronize")
    calls = [getattr(card.cuda, name) for name in names]
    read = Path.read_bytes
    if watched:
        calls = [profile.timed(call.__name__, call) for call in calls]
        read = profile.timed("read", read)
    load, find, launch, synchronize = calls
    started = time.perf_counter()
    for number, (entry, threads, shared) in enumerate(specs):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        card.check(load(ctypes.byref(module), read(folder / f"{number}.cubin")))
        card.check(find(ctypes.byref(function), module, entry.encode()))
        x, row = ctypes.c_uint64(card.x), ctypes.c_uint64(card.row(number))
        values = (x, row, ctypes.c_int(SIZE), ctypes.c_uint64(), ctypes.c_uint64())
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        card.check(launch(function, *GRID, threads, 1, 1, shared, None, parameters, None))
    card.check(synchronize())
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "digest": card.digest(), "phases_us": profile.microseconds(KERNELS)}


def static(path: str, launch_path: str, watched: str = "") -> dict[str, Any]:
    """Launch all kernels from the bundle, in a process that has neither torch nor Triton."""
    card = Card()
    before = _resident_bytes()
    started = time.perf_counter()
    driver = launches.open_driver(launch_path)
    from bundler.runtime.launch.bundle_kernels import load

    imported = time.perf_counter() - started
    profile = watch(driver) if watched else Profile()
    started = time.perf_counter()
    kernels = load(path, driver=driver)
    opened = time.perf_counter() - started
    kernel, x = kernels["numbered"], Vector(card.x)
    synchronize: Callable[..., Any] = card.cuda.cuCtxSynchronize

    def launch(number: int) -> None:
        kernel[GRID](x, Vector(card.row(number)), SIZE, NUMBER=number, BLOCK=BLOCK)

    if watched:
        launch = profile.timed("launch", launch)
        synchronize = profile.timed("synchronize", synchronize)
    for number in range(KERNELS):
        launch(number)
    card.check(synchronize())
    seconds = time.perf_counter() - started
    cubin_bytes = sum(s.kernel.binary.size for s in kernel.specializations)
    return {
        "seconds": seconds,
        "import_s": imported,
        "open_s": opened,
        "digest": card.digest(),
        "path": driver.launch_path,
        "growth_bytes": _resident_bytes() - before,
        "cubin_bytes": cubin_bytes,
        "phases_us": profile.microseconds(KERNELS),
        "foreign": [name for name in ("torch", "triton") if name in sys.modules],
    }


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not tell how much memory this process uses")


STEPS: dict[str, Step] = {
    "first-record": record,
    "first-triton": by_triton,
    "first-bare": bare,
    "first-static": static,
}
