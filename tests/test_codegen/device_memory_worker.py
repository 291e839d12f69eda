# SPDX-License-Identifier: Apache-2.0
"""Runs programs on a `DeviceMemory` whose memory is the host's, their kernels in the interpreter:
prints how far results are from eager torch's, and what is still allocated.
"""

import gc
import json
from collections.abc import Mapping

import torch

from bundler.codegen.program import generate
from bundler.runtime import DeviceMemory, DryDriver, ProgramRunner
from bundler.runtime.program.bundle_programs import CheckedMemory


class Module(torch.nn.Module):
    """Has parameters, and gives a view, a sum, what it changed in place, and an input."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(48)

    def forward(self, a, b):
        b.mul_(2)
        c = self.norm(a) + b
        return c[1:], c.sum(0), b, a.t()


class Launcher:
    """Gives kernels torch's tensors of the same memory."""

    def __init__(self, modules: Mapping):
        self._modules = modules

    def bound(self, name, _sizes):
        launch = self._modules[name].bound()
        return lambda *arguments: launch(
            *[torch.from_dlpack(one) if hasattr(one, "shape") else one for one in arguments]
        )


module, inputs = Module().requires_grad_(False), [torch.randn(33, 48), torch.randn(33, 48)]
program = generate(module, inputs)
driver = DryDriver()
memory = DeviceMemory(driver=driver, stream=3)
constants = {name: memory.put(tensor) for name, tensor in program.constants.items()}
runner = ProgramRunner(
    program.plan, Launcher(program.modules), CheckedMemory(memory), constants
)
given = [memory.put(one.numpy()) for one in inputs]
results = runner(*given)
expected = module(*inputs)
off = [
    float((torch.from_dlpack(ours) - theirs).abs().max())
    for ours, theirs in zip(results, expected, strict=True)
]
mine = results[2].address == given[1].address and results[3].address == given[0].address
numpys = memory.array(results[0]).shape, memory.array(results[3]).shape
del results
gc.collect()  # the interpreter leaves circles
held = len(driver.pools[0].live)
del given
gc.collect()
print(
    json.dumps(
        {
            "off": off,
            "views": mine,
            "shapes": numpys,
            "held": held,
            "left": len(driver.pools[0].live) - len(constants),
            "order": driver.pools[0].waits,
        }
    )
)
