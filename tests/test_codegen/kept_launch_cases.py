# SPDX-License-Identifier: Apache-2.0
"""A program for a GPU that is not there, run as torch.compile runs it: Triton compiles its kernels,
and a dry driver writes down what is launched.
"""

import hashlib
from contextlib import nullcontext

import torch

from bundler.codegen import compile_ahead, module_decorators
from bundler.codegen import program as programs
from bundler.codegen.trace import EXPORTED, RETURNED_INPUTS, trace
from bundler.runtime.tuning import autotuned_kernel, heuristic_kernel
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.toolchain import tuner_toolchain

SIZES = (96, 200), (200,), (512, 768)


class Tensor:
    """What a tensor is to a launch: an address, where it lies, and how."""

    device = torch.device("cuda", 0)

    def __init__(self, dtype, shape, strides, address):
        self.dtype, self.shape, self.strides, self.address = dtype, shape, strides, address

    def data_ptr(self):
        return self.address

    def get_device(self):
        return 0

    def stride(self):
        return self.strides

    def is_neg(self):
        return False

    def is_conj(self):
        return False


class Memory:
    """Gives out addresses, as torch's allocator of a GPU does."""

    seeds = device = None

    def __init__(self, _device):
        self.allocated = 0

    def current_device(self):
        return nullcontext()

    def allocate(self, dtype, sizes, strides):
        self.allocated += 1
        return Tensor(getattr(torch, dtype), sizes, strides, self.allocated << 24)


def imitate(driver, put=setattr):
    """Have programs of this process run on a driver, and kernels tuned by a clock that measures
    nothing; returns the list that gets each kernel that Triton's compiler is asked for.
    """
    asked, compile_call, tuner = [], tuner_toolchain.compile_call, heuristic_kernel.AutotunedKernel

    def compiled(function, *rest, **named):
        asked.append(function.__name__)
        return compile_call(function, *rest, **named)

    def tuned(*given, options, clock, **named):
        object.__setattr__(options, "workers", 1)
        clock = lambda: GivenClock(lambda call, quantiles: [1.0] * 3)  # noqa: E731
        return tuner(*given, options=options, clock=clock, **named)

    put(tuner_toolchain, "compile_call", compiled)
    put(heuristic_kernel, "AutotunedKernel", tuned)
    put(programs, "TorchMemory", Memory)
    put(module_decorators, "_driver", lambda: driver)
    put(autotuned_kernel, "open_first_driver", lambda _: driver)
    return asked


def run(number=1.5):
    """Run a program twice, which was perhaps kept; returns it."""

    def function(x, y, z):
        soft = torch.softmax(x * y, -1)
        return soft, x.t().contiguous() + number, soft.sum(0), (z * 2).tanh()

    made = trace(function, [torch.zeros(sizes) for sizes in SIZES], device="cuda")
    made.meta.pop(EXPORTED, None)
    made.meta.pop(RETURNED_INPUTS, None)
    program = programs.program_of_graph(made, guarded=True, keep=True)
    compile_ahead.wait(compile_ahead.start(program, 1))
    inputs = [
        Tensor(torch.float32, sizes, (*sizes[1:], 1), place << 32)
        for place, sizes in enumerate(SIZES, 1)
    ]
    for _ in range(2):
        program.consume(list(inputs))
    program.keep_launches()
    return program


def launched(driver):
    """Return all that decides about the launches of a driver, and forget them."""
    found = [
        (
            launch.plan.kernel,
            list(launch.grid),
            launch.parameters.hex(),
            [
                hashlib.sha256(module.image).hexdigest()
                for module in driver.modules
                if module.plan is launch.plan
            ],
        )
        for launch in driver.launches
    ]
    driver.launches.clear()
    return found
