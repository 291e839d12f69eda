# SPDX-License-Identifier: Apache-2.0
"""What one launch costs the CPU, by every way that there is; tensors change from launch to launch.

`check.py` calls `rows`.  Beside the ways stands what the steps of a launch cost alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import subprocess
import sysconfig
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu import launches
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
CALLS, REPEATS = 100_000, 7
# Three of the values are tensors.
TENSORS = 3
# The headers of our extensions: what looks for hooks is measured as it is.
HEADERS = Path(__file__).parents[2] / "bundler/runtime/launch"
_STEPS = r"""
#include <Python.h>
#include <stdint.h>
#include <time.h>
#include "_profiler_hooks.h"
static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}
double place(int (*ask)(void **), long count) {
  void *found;
  double started = now();
  for (long i = 0; i < count; i++)
    ask(&found);
  return (now() - started) / count;
}
double lock(long count) {
  double started = now();
  for (long i = 0; i < count; i++) {
    PyThreadState *state = PyEval_SaveThread();
    PyEval_RestoreThread(state);
  }
  return (now() - started) / count;
}
double address(int (*read)(void *, void **), void *handle, long count) {
  void *found;
  double started = now();
  for (long i = 0; i < count; i++)
    read(handle, &found);
  return (now() - started) / count;
}
double facts(int (*type)(void *, int32_t *), int (*device)(void *, int32_t *), int (*dtype)(void *, int32_t *),
             int (*address)(void *, void **), void *handle, long count) {
  int32_t told[3];
  void *found;
  double started = now();
  for (long i = 0; i < count; i++) {
    type(handle, &told[0]);
    device(handle, &told[1]);
    dtype(handle, &told[2]);
    address(handle, &found);
  }
  return (now() - started) / count;
}
static hooks_class_t seen;
double hooks(PyObject *chains, long count) {
  double started = now();
  for (long i = 0; i < count; i++)
    may_be_called(&seen, chains);
  return (now() - started) / count;
}
double stream(int (*ask)(int32_t, int32_t, void **), long count) {
  void *found;
  double started = now();
  for (long i = 0; i < count; i++)
    ask(2, 0, &found);
  return (now() - started) / count;
}
static PyObject *take(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *names) { Py_RETURN_NONE; }
static PyMethodDef definition = {"nothing", (PyCFunction)(void (*)(void))take, METH_FASTCALL | METH_KEYWORDS, ""};
PyObject *nothing(void) { return PyCFunction_New(&definition, NULL); }
"""
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
    targets = {name: target for name, target in OURS.values() if target}
    found = []
    for name, taken in samples.items():
        us, ratio, most = median(taken), median(ratios(taken, samples[LIMIT])), targets.get(name)
        said = f"{us:.2f} us, {ratio:.2f} x the C loop" + (f" (at most {most})" if most else "")
        ok = most is None or ratio <= most
        found.append(check(f"CPU cost of a launch: {name}", ok, said))
    for way, taken_ns in result["steps_ns"].items():
        said = ", ".join(f"{step} {spent:.0f}" for step, spent in taken_ns.items())
        found.append(check(f"CPU cost of the steps of a launch alone, ns: {way}", True, said))
    return found, {"cost": result}


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
    samples = in_turns({name: functools.partial(us_of, run) for name, run in ways.items()}, SAMPLES)
    return {
        "samples_us": samples,
        "absent": absent,
        "launches": BATCHES * BATCH,
        "steps_ns": steps(Path(folder), tensors, _our_kernel(bundle, "compiled")),
    }


def us_of(run: Callable[[], None]) -> float:
    """Return microseconds of a launch, over some batches of them; `run` launches one."""
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
    from bundler.runtime.launch.bundle_kernels import load

    return load(bundle, driver=launches.open_driver(path))["add"]


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


def steps(folder: Path, tensors: list[list[Any]], kernel: Any) -> dict[str, Any]:
    """Return nanoseconds by step, each alone in a loop, of a launch by handle and by dispatcher: no
    launch takes less than their sum.

    What is left between the two is packing, comparing, and that in a launch the driver's code has
    taken the caches which a loop of one step has to itself.

    Args:
        folder: where C is compiled.
        tensors: three of them for each launch.
        kernel: ours, compiled.
    """
    # Not above: the check imports this module, and its replay has no code of ours.
    from bundler.toolchain.profiler_hooks import CHAINS, are_present
    from bundler.toolchain.tensor_handles import find_handles

    library = _compiled(folder)
    nothing = library.nothing()
    handles = find_handles()
    assert handles is not None
    assert handles.device_type
    of_c = (handles.device_type, handles.device, handles.dtype, handles.function)
    current = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent, ctypes.c_void_p)
    x = tensors[0][0]
    handle = id(x) + handles.offset
    addresses = library.address(handles.function, handle, CALLS)
    facts = library.facts(*of_c, handle, CALLS)

    def by_handle() -> None:
        for one, two, three in tensors:
            nothing(16, 1, 1, 0, one, two, three, SIZE)

    def by_name() -> None:
        for one, two, three in tensors:
            nothing(one, two, three, SIZE, BLOCK=BLOCK)

    common = {
        "cuCtxGetCurrent: whether the thread is where the kernel is": library.place(current, CALLS),
        "the interpreter's lock, given back and taken": library.lock(CALLS),
    }
    return {
        "handle": {
            "Python's loop and a call of nothing": _each(by_handle, len(tensors)),
            f"addresses of {TENSORS} tensors, by torch's function of C": TENSORS * addresses,
            **common,
        },
        "dispatcher": {
            "Python's loop and a call of nothing": _each(by_name, len(tensors)),
            "kernel[grid]": _each(lambda: kernel[GRID], 1),
            f"address, device and type of {TENSORS} tensors, by torch's functions of C": TENSORS
            * facts,
            "whether profilers added hooks to Triton": library.hooks(CHAINS, CALLS),
            "torch's stream, by torch's table": library.stream(_stream(), CALLS),
            **common,
        },
        "before": {
            "address, device and type of a tensor, by three calls of Python": _each(
                lambda: (x.data_ptr(), x.get_device(), x.dtype), 1
            ),
            "whether profilers added hooks to Triton, by Python": _each(are_present, 1),
        },
    }


def _each(work: Callable[[], Any], count: int) -> float:
    number = max(CALLS // (10 * count), 1)
    return min(timeit.repeat(work, number=number, repeat=REPEATS)) / (number * count) * 1e9


def _compiled(folder: Path) -> Any:
    source, path = folder / "steps.c", folder / "libsteps.so"
    source.write_text(_STEPS)
    include = sysconfig.get_paths()["include"]
    line = ["gcc", "-O2", "-shared", "-fPIC", f"-I{include}", f"-I{HEADERS}"]
    subprocess.run([*line, str(source), "-o", str(path)], check=True)
    library = ctypes.PyDLL(str(path))
    for name, kinds in (
        ("place", [ctypes.c_void_p, ctypes.c_long]),
        ("lock", [ctypes.c_long]),
        ("hooks", [ctypes.py_object, ctypes.c_long]),
        ("facts", [*[ctypes.c_void_p] * 5, ctypes.c_long]),
        ("address", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]),
        ("stream", [ctypes.c_void_p, ctypes.c_long]),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = kinds, ctypes.c_double
    library.nothing.restype = ctypes.py_object
    return library


def _stream() -> int:
    """Return the address of the function in torch's table that tells of the current stream."""
    import torch

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    table: Any = torch.Tensor
    address = pointer(table.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    # Behind a version, an older table and four functions.
    return ctypes.c_void_p.from_address(address + 48).value or 0


STEPS: dict[str, Step] = {"cost": cost}
