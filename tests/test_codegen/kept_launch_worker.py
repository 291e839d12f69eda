# SPDX-License-Identifier: Apache-2.0
"""Runs a program for a GPU that is not there as torch.compile runs it, and prints what was launched,
and by whom: `kept_launch_worker.py CACHE [recorded] [profiled] [odd] [text] [other]`.

Everything but the GPU and its memory is real: Triton compiles the kernels, and nothing runs them.
"""

import hashlib
import json
import os
import sys
from contextlib import nullcontext

os.environ["XDG_CACHE_HOME"] = f"{sys.argv[1]}/user"
os.environ["TRITON_CACHE_DIR"] = f"{sys.argv[1]}/triton"

import torch

import bundler
from bundler.codegen import compile_ahead, module_decorators
from bundler.codegen import program as programs
from bundler.codegen.trace import EXPORTED, RETURNED_INPUTS, trace
from bundler.lifecycle.tuning_directory import tuning_counters
from bundler.runtime import DryDriver
from bundler.runtime.launch.drivers.driver import DeviceProperties
from bundler.runtime.tuning import autotuned_kernel, benchmark
from bundler.toolchain import tuner_toolchain

CHOSEN = sys.argv[2:]
driver = DryDriver("cuda")
if "other" in CHOSEN:
    driver = DryDriver("cuda", properties=DeviceProperties("90", 1024, 232448, 32, 114, True))
opened = lambda *_: driver  # noqa: E731
module_decorators._driver = autotuned_kernel.open_first_driver = opened
benchmark_clock = benchmark.GivenClock(lambda call, quantiles: [1.0] * 3)
addresses = iter(range(1 << 40, 1 << 41, 1 << 24))


class Tensor:
    """What a tensor is to a launch: an address, where it lies, and how."""

    device = torch.device("cuda", 0)

    def __init__(self, dtype, shape, strides, address=None):
        self.dtype, self.shape, self.strides = dtype, shape, strides
        self.address = next(addresses) if address is None else address

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0

    def stride(self):
        return self.strides

    def size(self):
        return self.shape

    def is_neg(self):
        return False

    def is_conj(self):
        return False


class Memory:
    """Gives out addresses, as torch's allocator of a GPU does."""

    seeds = None

    def __init__(self, _device):
        self.device = None

    def current_device(self):
        return nullcontext()

    def allocate(self, dtype, sizes, strides):
        return Tensor(getattr(torch, dtype), sizes, strides)


programs.TorchMemory = Memory
compiles, compile_call = [], tuner_toolchain.compile_call


def counted(function, *rest, **named):
    """Note which kernels are asked of Triton's compiler."""
    compiles.append(function.__name__)
    return compile_call(function, *rest, **named)


tuner_toolchain.compile_call = counted
NUMBER = 2.5 if "text" in CHOSEN else 1.5


def function(x, y, z):
    soft = torch.softmax(x * y, -1)
    return soft, x.t().contiguous() + NUMBER, soft.sum(0), (z * 2).tanh()


def traced():
    given = (torch.zeros(96, 200), torch.zeros(200), torch.zeros(512, 768))
    made = trace(function, given, device="cuda")
    made.meta.pop(EXPORTED, None)
    made.meta.pop(RETURNED_INPUTS, None)
    return made


def run():
    """Return the program, which ran once; the clock of its kernels measures nothing."""
    program = programs.program_of_graph(traced(), guarded=True, keep=True)
    compile_ahead.wait(compile_ahead.start(program, 1))
    kept = program.kept_launches
    for name in program.kernels if kept is None else ():
        tuned = program.modules[name].here().tuned
        tuned._make_clock = lambda: benchmark_clock
        object.__setattr__(tuned.options, "workers", 1)
    at = 8 if "odd" in CHOSEN else 0
    inputs = [
        Tensor(torch.float32, (96, 200), (200, 1), (1 << 39) + at),
        Tensor(torch.float32, (200,), (1,), 1 << 38),
        Tensor(torch.float32, (512, 768), (768, 1), 1 << 37),
    ]
    for _ in range(2):
        program.consume(list(inputs))
    program.keep_launches()
    return program


def by_triton():
    """Return which kernels' modules were run."""
    return sorted(
        name
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("bundler_source_")
        for name in vars(module)
        if name.startswith("triton_") and name != "triton_"
    )


if "profiled" in CHOSEN:
    torch.autograd.profiler._is_profiler_enabled = True
with bundler.recording() if "recorded" in CHOSEN else nullcontext() as recording:
    program = run()
launches = [
    {
        "kernel": launch.plan.kernel,
        "grid": launch.grid,
        "binary": hashlib.sha256(module.image).hexdigest(),
        "parameters": launch.parameters.hex(),
    }
    for launch in driver.launches
    for module in driver.modules
    if module.plan is launch.plan
]
print(
    json.dumps(
        {
            "launches": launches,
            "kept": [name for name in program.kernels if name in (program.kept_launches or ())],
            "modules": by_triton(),
            "gluon": "triton.experimental.gluon" in sys.modules,
            "library": "bundler.codegen.lib" in sys.modules,
            "compiles": sorted(compiles),
            "found": tuning_counters().found,
            "tuned": tuning_counters().tuned,
            "recorded": None if recording is None else len(recording.collect().kernels),
            "kernels": list(program.kernels),
        }
    )
)
