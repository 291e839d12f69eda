# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a `DeviceMemory` whose memory is the host's, with weights from files, its
kernels in the interpreter: prints how far results are from eager torch's, and what is still
allocated.
"""

import gc
import json
import sys
from collections.abc import Mapping

import torch
from safetensors.torch import save_file

from bundler.codegen.program import generate
from bundler.runtime import DeviceMemory, DryDriver, ProgramRunner
from bundler.runtime.program.bundle_programs import CheckedMemory
from bundler.runtime.program.program_weights import bound_weights
from bundler.toolchain.torch_memory import TorchMemory


class Module(torch.nn.Module):
    """Has parameters, and gives a view, a sum, what it changed in place, and an input."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(48)
        self.same = torch.nn.ParameterList([self.norm.weight])  # shared
        self.scale = torch.nn.Parameter(torch.tensor(1.5))  # one number
        self.register_buffer("table", torch.randn(48).bfloat16(), persistent=False)

    def forward(self, a, b):
        b.mul_(2)
        c = self.norm(a) * self.scale + b * self.same[0] + self.table
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


def fresh():
    """Return a module with numbers of its own."""
    made = Module().requires_grad_(False)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.copy_(torch.randn(tensor.shape))
    return made


# The program is of one module, the weights and the eager results of another.
inputs = [torch.randn(33, 48), torch.randn(33, 48)]
program, module = generate(fresh(), inputs), fresh()
driver, folder = DryDriver(), sys.argv[1]
memory = DeviceMemory(driver=driver, stream=3)
saved = {name: tensor for name, tensor in module.state_dict().items() if name != "same.0"}
save_file(saved, f"{folder}/module.safetensors")
save_file({"table": module.table, "other": torch.ones(3)}, f"{folder}/table.safetensors")
files = [f"{folder}/module.safetensors", f"{folder}/table.safetensors"]
constants = bound_weights(program.plan, files, memory, {})
theirs = ProgramRunner(
    program.plan,
    Launcher(program.modules),
    TorchMemory(),
    bound_weights(program.plan, files, TorchMemory(), {}),
)(*[one.clone() for one in inputs])
runner = ProgramRunner(program.plan, Launcher(program.modules), CheckedMemory(memory), constants)
given = [memory.put(one.numpy()) for one in inputs]
results = runner(*given)
expected = module(*inputs)
off_of_torch = max(float((a - b).abs().max()) for a, b in zip(theirs, expected, strict=True))
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
            "off": [*off, off_of_torch],
            "weights": {name: one.names for name, one in program.plan.weights.items()},
            "views": mine,
            "shapes": numpys,
            "held": held,
            "left": len(driver.pools[0].live) - len({one.address for one in constants.values()}),
            "order": driver.pools[0].waits,
        }
    )
)
