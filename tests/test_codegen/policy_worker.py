# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels of two functions on a GPU that is not there, where a launch of fewer
programs counts as faster, and prints as JSON what was chosen for each, and how many launches were
timed.

    policy_worker.py '{"max_autotune": true}' save|restore BUNDLE
"""

import json
import sys

import torch

import bundler
from bundler.codegen import module_decorators
from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate
from bundler.runtime import DryDriver
from bundler.runtime.tuning import autotuned_kernel, tuner
from bundler.runtime.tuning.benchmark import GivenClock

driver, timed = DryDriver("cuda"), []


def programs_of_a_launch(call, quantiles):
    """Return the number of programs as the time of a launch."""
    call()
    timed.append(driver.launches[-1].grid)
    return [float(timed[-1][0])] * len(quantiles)


class OnTheGpu:
    """What a tensor is to a launch: an address, and where it lies."""

    dtype = torch.float32

    def data_ptr(self):
        return 1 << 40

    def get_device(self):
        return 0


def launched(function, sizes, arguments, policy):
    program = generate(
        function, [torch.empty(sizes)], device="cuda", options=GenerateOptions(policy=policy)
    )
    (kernel,) = program.modules.values()
    before = len(timed)
    kernel.bound()(*arguments)
    (made,) = kernel._made.values()
    (choice,) = made.tuned.choices.values()
    return {
        "how": choice.how,
        "config": {**choice.config.kwargs, "num_warps": choice.config.num_warps},
        "timed": len(timed) - before,
        "candidates": len(made.configs),
    }


def main(policy, how, path):
    """Print what was chosen."""
    module_decorators._driver = lambda: driver
    autotuned_kernel.open_first_driver = lambda _: driver
    tuner.CudaClock = lambda *_: GivenClock(programs_of_a_launch)
    chosen, x = ProgramPolicy(**json.loads(policy)), OnTheGpu()

    def both():
        n = 1 << 20
        return [
            launched(lambda a: a.sin(), (n,), (x, x, n), chosen),
            launched(lambda a: a.sum(1), (2048, 4096), (x, x, 2048, 4096), chosen),
        ]

    if how == "save":
        with bundler.recording() as recording:
            found = both()
        recording.collect().save(path)
    else:
        bundler.restore(path)
        found = both()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
