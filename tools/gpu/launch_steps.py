# SPDX-License-Identifier: Apache-2.0
"""What the steps of a launch by handle and by dispatcher cost, each alone in a loop, in
nanoseconds: no launch takes less than their sum.

`launch_cost.py` calls `steps`, whose figures `python -m tools.bench page` puts beside what whole
launches take.  What is left between the two is packing, comparing, and that in a launch the
driver's code has taken the caches which a loop of one step has to itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS, SAMPLES = 100_000, 7
# A handle takes as many values as the kernel of launch_cost.py; three of them are tensors.
TENSORS = 3
# The headers of our extensions: what looks for hooks is measured as it is.
HEADERS = Path(__file__).parents[2] / "bundler/runtime/launch"
CODE = r"""
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
double tensor(int (*read)(void *, void *), PyObject *object, long count) {
  uint64_t found[16];
  double started = now();
  for (long i = 0; i < count; i++)
    read(object, found);
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
double data_ptr(PyObject *tensor, long count) {
  PyObject *found = PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "data_ptr");
  PyCFunction ask = ((PyMethodDescrObject *)found)->d_method->ml_meth;
  double started = now();
  for (long i = 0; i < count; i++) {
    PyObject *number = ask(tensor, NULL);
    PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
  }
  Py_DECREF(found);
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


def steps(
    folder: Path,
    tensors: list[list[Any]],
    kernel: Any,
    grid: tuple[int, ...],
    size: int,
    block: int,
) -> dict[str, Any]:
    """Return nanoseconds by step, of a launch by handle and by dispatcher.

    Args:
        folder: where C is compiled.
        tensors: three of them for each launch.
        kernel: ours, compiled.
        grid, size, block: of the launch.
    """
    # Not above: the check imports this module, and its replay has no code of ours.
    from bundler.toolchain.profiler_hooks import CHAINS, are_present

    library = _compiled(folder)
    nothing = library.nothing()
    read, stream = _table()
    current = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent, ctypes.c_void_p)
    x = tensors[0][0]

    def by_handle() -> None:
        for one, two, three in tensors:
            nothing(16, 1, 1, 0, one, two, three, size)

    def by_name() -> None:
        for one, two, three in tensors:
            nothing(one, two, three, size, BLOCK=block)

    common = {
        "cuCtxGetCurrent: whether the thread is where the kernel is": library.place(current, CALLS),
        "the interpreter's lock, given back and taken": library.lock(CALLS),
    }
    return {
        "handle": {
            "Python's loop and a call of nothing": _each(by_handle, len(tensors)),
            **_addresses(library, x),
            **common,
        },
        "dispatcher": {
            "Python's loop and a call of nothing": _each(by_name, len(tensors)),
            "kernel[grid]": _each(lambda: kernel[grid], 1),
            **_facts(library, x, read),
            "whether profilers added hooks to Triton": library.hooks(CHAINS, CALLS),
            "torch's stream, by torch's table": library.stream(stream, CALLS),
            **common,
        },
        "before": {
            "address, device and type of a tensor, by three calls of Python": _each(
                lambda: (x.data_ptr(), x.get_device(), x.dtype), 1
            ),
            "address, device and type of a tensor, by torch's table": library.tensor(
                read, x, CALLS
            ),
            "whether profilers added hooks to Triton, by Python": _each(are_present, 1),
            "address of a tensor, by torch's data_ptr(), called from C": library.data_ptr(x, CALLS),
        },
    }


def _addresses(library: Any, tensor: Any) -> dict[str, float]:
    from bundler.toolchain.tensor_handles import find_handles

    found = find_handles()
    if found is None:
        spent, way = library.data_ptr(tensor, CALLS), "data_ptr()"
    else:
        spent = library.address(found.function, id(tensor) + found.offset, CALLS)
        way = "function of C"
    return {f"addresses of {TENSORS} tensors, by torch's {way}": TENSORS * spent}


def _facts(library: Any, tensor: Any, read: int) -> dict[str, float]:
    from bundler.toolchain.tensor_handles import find_handles

    found = find_handles()
    if found is None or not found.device_type:
        spent, way = library.tensor(read, tensor, CALLS), "by torch's table"
    else:
        told = (found.device_type, found.device, found.dtype, found.function)
        spent = library.facts(*told, id(tensor) + found.offset, CALLS)
        way = "by torch's functions of C"
    return {f"address, device and type of {TENSORS} tensors, {way}": TENSORS * spent}


def _each(work: Callable[[], Any], count: int) -> float:
    number = max(CALLS // (10 * count), 1)
    return min(timeit.repeat(work, number=number, repeat=SAMPLES)) / (number * count) * 1e9


def _compiled(folder: Path) -> Any:
    source, path = folder / "steps.c", folder / "libsteps.so"
    source.write_text(CODE)
    include = sysconfig.get_paths()["include"]
    line = ["gcc", "-O2", "-shared", "-fPIC", f"-I{include}", f"-I{HEADERS}"]
    subprocess.run([*line, str(source), "-o", str(path)], check=True)
    library = ctypes.PyDLL(str(path))
    for name, kinds in (
        ("place", [ctypes.c_void_p, ctypes.c_long]),
        ("lock", [ctypes.c_long]),
        ("data_ptr", [ctypes.py_object, ctypes.c_long]),
        ("hooks", [ctypes.py_object, ctypes.c_long]),
        ("facts", [*[ctypes.c_void_p] * 5, ctypes.c_long]),
        ("address", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]),
        ("tensor", [ctypes.c_void_p, ctypes.py_object, ctypes.c_long]),
        ("stream", [ctypes.c_void_p, ctypes.c_long]),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = kinds, ctypes.c_double
    library.nothing.restype = ctypes.py_object
    return library


def _table() -> tuple[int, int]:
    """Return the addresses of the functions in torch's table that tell of a tensor and of the
    current stream.
    """
    import torch

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    table: Any = torch.Tensor
    address = pointer(table.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    # Behind a version, an older table and three functions.
    read, stream = (ctypes.c_void_p * 2).from_address(address + 40)
    return int(read or 0), int(stream or 0)
