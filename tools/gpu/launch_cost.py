# SPDX-License-Identifier: Apache-2.0
"""What one launch costs the CPU, by every way that there is; tensors change from launch to launch.

`check.py` calls `rows`.  Beside the ways stands what the dispatcher has to ask torch at each
launch: no dispatcher goes below that.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import subprocess
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu import launch_steps, launches
from tools.gpu.steps import Row, Step
from tools.shared.measurement import check, in_turns, median, ratios

SAMPLES = 27
# A batch is far shorter than the driver's queue, so that no launch ever waits; a sample is many of
# them.
BATCH, BATCHES = 400, 6
SIZE, BLOCK = 4096, 256
GRID = (SIZE // BLOCK, 1, 1)
LIMIT = "C loop around cuLaunchKernel"
OURS = {
    ("compiled", "handle"): ("ours by handle, compiled extension", 1.1),
    ("ctypes", "handle"): ("ours by handle, pure Python", None),
    ("compiled", "dispatcher"): ("ours by dispatcher, compiled extension", 1.4),
    ("ctypes", "dispatcher"): ("ours by dispatcher, pure Python", None),
}
_LOOP = r"""
#include <stdint.h>
typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int loop(launch_t launch, void *f, unsigned grid, unsigned block, unsigned shared, void *stream, int count, uint64_t *x,
         uint64_t *y, uint64_t *out, int n, int tensors) {
  uint64_t scratch = 0;
  int status = 0;
  for (int i = 0; i < count; i++) {
    uint64_t a = x[i % tensors], b = y[i % tensors], c = out[i % tensors];
    void *parameters[] = {&a, &b, &c, &n, &scratch, &scratch};
    status |= launch(f, grid, 1, 1, block, 1, 1, shared, stream, parameters, 0);
  }
  return status;
}
"""


def rows(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Measure in one process; a row for each way, with the ratio to the C loop, and our targets."""
    result = step(folder, "cost", str(folder), cache=folder / "cost-cache")
    samples = result["samples_us"]
    limit = median(samples[LIMIT])
    targets = {name: target for name, target in OURS.values() if target}
    found, figures = [], {}
    for name, taken in samples.items():
        us, ratio, most = median(taken), median(ratios(taken, samples[LIMIT])), targets.get(name)
        said = f"{us:.2f} us, {ratio:.2f} x the C loop" + (f" (at most {most})" if most else "")
        ok = most is None or ratio <= most
        found.append(check(f"CPU cost of a launch: {name}", ok, said))
        figure = {"name": name, "ours": us, "limit": limit, "ratio": ratio, "unit": "us"}
        figures[name] = {**figure, "target": most}
    answers = ", ".join(f"{name} {taken:.3f}" for name, taken in result["questions_us"].items())
    found.append(check("CPU cost of what a dispatcher asks torch, us", True, answers))
    for way, taken_ns in result["steps_ns"].items():
        said = ", ".join(f"{step} {spent:.0f}" for step, spent in taken_ns.items())
        found.append(check(f"CPU cost of the steps of a launch alone, ns: {way}", True, said))
    return found, {"cost": {"figures": figures, **result}}


def cost(folder: str) -> dict[str, Any]:
    """Take turns among all ways; returns microseconds a launch, by way, one for each round."""
    import torch

    import bundler

    kernel = launches.load_kernels().add
    tensors = [[torch.randn(SIZE, device="cuda") for _ in range(3)] for _ in range(8)]
    with bundler.recording() as recording:
        compiled = kernel[GRID](*tensors[0], SIZE, BLOCK=BLOCK)
    bundle = recording.collect()
    absent: dict[str, str] = {}
    theirs = peers(kernel, compiled, tensors, absent)
    ways = {LIMIT: c_loop(Path(folder), compiled, tensors), **theirs, **ours(bundle, tensors)}
    for run in ways.values():
        run()
    samples = in_turns(
        {name: functools.partial(_us_of, run) for name, run in ways.items()}, SAMPLES
    )
    return {
        "samples_us": samples,
        "absent": absent,
        "launches": BATCHES * BATCH,
        "questions_us": questions(tensors[0][0]),
        "steps_ns": launch_steps.steps(
            Path(folder), tensors, _our_kernel(bundle, "compiled"), GRID, SIZE, BLOCK
        ),
    }


def _us_of(run: Callable[[], None]) -> float:
    """Return microseconds of a launch, over some batches of them."""
    import torch

    spent = 0.0
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        spent += time.perf_counter() - started
    torch.cuda.synchronize()
    return spent / (BATCHES * BATCH) * 1e6


def _our_kernel(bundle: Any, path: str) -> Any:
    driver = launches.open_driver(path)  # before the import below, which looks for the extension
    from bundler.runtime.launch.bundle_kernels import load

    return load(bundle, driver=driver)["add"]


def questions(tensor: Any) -> dict[str, float]:
    """Return what each question costs that a dispatcher asks at a launch, in microseconds; the last
    three once a tensor.
    """
    import torch

    device = tensor.get_device()
    asked: dict[str, Callable[[], Any]] = {
        "a call of nothing": lambda: None,
        "device": torch._C._cuda_getDevice,  # noqa: SLF001  # what the drivers ask, too
        "stream": functools.partial(torch._C._cuda_getCurrentRawStream, device),  # noqa: SLF001
        "data_ptr": tensor.data_ptr,
        "get_device": tensor.get_device,
        "dtype": functools.partial(getattr, tensor, "dtype"),
    }
    return {
        name: min(timeit.repeat(ask, number=BATCH, repeat=SAMPLES)) / BATCH * 1e6
        for name, ask in asked.items()
    }


def c_loop(folder: Path, compiled: Any, tensors: list[list[Any]]) -> Callable[[], None]:
    """Return the limit: the same launches in a loop of C."""
    import torch

    source, library = folder / "loop.c", folder / "libloop.so"
    source.write_text(_LOOP)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p)
    loop = ctypes.CDLL(str(library)).loop
    addresses = [
        (ctypes.c_uint64 * len(tensors))(*[each[i].data_ptr() for each in tensors])
        for i in range(3)
    ]
    stream = torch.cuda.current_stream().cuda_stream
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared

    def run() -> None:
        function, on = ctypes.c_void_p(compiled.function), ctypes.c_void_p(stream)
        where = (GRID[0], warps * 32, shared, on)
        status = loop(launch, function, *where, BATCH, *addresses, SIZE, len(tensors))
        if status:
            raise RuntimeError(f"cuLaunchKernel: {status}")

    return run


def peers(
    kernel: Any, compiled: Any, tensors: list[list[Any]], absent: dict[str, str]
) -> dict[str, Callable[[], None]]:
    """Return what a user would launch with otherwise; what this machine lacks goes to `absent`."""
    import torch

    stream = torch.cuda.current_stream().cuda_stream
    turns = list(itertools.islice(itertools.cycle(tensors), BATCH))

    def jit() -> None:
        for x, y, out in turns:
            kernel[GRID](x, y, out, SIZE, BLOCK=BLOCK)

    def run_directly() -> None:
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        for x, y, out in turns:
            run(*GRID, stream, function, packed, None, None, None, x, y, out, SIZE, BLOCK)

    found = {"Triton, kernel[grid](...)": jit, "Triton, CompiledKernel.run": run_directly}
    for name, make in (
        ("torch's static launcher", _torch_static),
        ("cuda.bindings", _cuda_bindings),
    ):
        try:
            found[name] = make(compiled, turns, stream)
            found[name]()
        except Exception as error:  # noqa: BLE001  # a peer that does not work here is left out, and the result says so
            absent[name] = f"{type(error).__name__}: {error}"
            found.pop(name, None)
    return found


def _torch_static(compiled: Any, turns: list[list[Any]], stream: int) -> Callable[[], None]:
    # Only what it reads of a compiled kernel, since the file it wants is the cache's own.
    from torch._C import _StaticCudaLauncher as launcher

    path = next(
        Path(str(path)) for name, path in compiled.metadata_group.items() if name.endswith(".cubin")
    )
    loaded = launcher._load_kernel(str(path), compiled.metadata.name, compiled.metadata.shared, 0)  # noqa: SLF001
    function = loaded[-3]  # newer releases return the module in front
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    launch = launcher._launch_kernel  # noqa: SLF001

    def run() -> None:
        for x, y, out in turns:
            launch(function, *GRID, warps, shared, "OOOiOO", (x, y, out, SIZE, None, None), stream)

    return run


def _cuda_bindings(compiled: Any, turns: list[list[Any]], stream: int) -> Callable[[], None]:
    driver = importlib.import_module("cuda.bindings.driver")
    types = (*[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared

    def run() -> None:
        launch, function = driver.cuLaunchKernel, compiled.function
        for x, y, out in turns:
            values = (x.data_ptr(), y.data_ptr(), out.data_ptr(), SIZE, 0, 0)
            launch(function, *GRID, warps * 32, 1, 1, shared, stream, (values, types), 0)

    return run


def ours(bundle: Any, tensors: list[list[Any]]) -> dict[str, Callable[[], None]]:
    """Return our four ways."""
    import torch

    stream = torch.cuda.current_stream().cuda_stream
    turns = list(itertools.islice(itertools.cycle(tensors), BATCH))
    found: dict[str, Callable[[], None]] = {}
    for path in launches.PATHS:
        kernel = _our_kernel(bundle, path)
        handle = kernel.handle(*tensors[0], SIZE, BLOCK=BLOCK)
        handle.launch(*GRID, stream, *tensors[0], SIZE)  # checked, the others are not

        def by_handle(launch: Any = handle.launch) -> None:
            for x, y, out in turns:
                launch(16, 1, 1, stream, x, y, out, SIZE)

        def by_dispatcher(kernel: Any = kernel) -> None:
            for x, y, out in turns:
                kernel[GRID](x, y, out, SIZE, BLOCK=BLOCK)

        found[OURS[path, "handle"][0]] = by_handle
        found[OURS[path, "dispatcher"][0]] = by_dispatcher
    return found


STEPS: dict[str, Step] = {"cost": cost}
