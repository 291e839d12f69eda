# SPDX-License-Identifier: Apache-2.0
"""The example's tiny Llama on a `DeviceMemory` whose memory is the host's, its kernels in the
interpreter, `decode` as a graph: prints how far its logits and tokens are from eager torch's.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

from bundler.runtime import DeviceMemory, DryDriver, ProgramRunner
from bundler.runtime.program.bundle_programs import CheckedMemory
from bundler.runtime.program.graph_replay import GraphRunner

PROMPT, ANSWER = 5, 8


class Launcher:
    """Gives kernels torch's tensors of the same memory; while a graph is captured, it is given the
    launches, and each launch of it does them again.
    """

    def __init__(self, modules, memory):
        self._modules, self._memory = modules, memory

    def bound(self, name, _sizes):
        kernel, memory = self._modules[name].bound(), self._memory

        def launch(*arguments):
            memory.pool.given(
                memory.stream,
                lambda: kernel(
                    *[torch.from_dlpack(one) if hasattr(one, "shape") else one for one in arguments]
                ),
            )

        return launch


def example(name):
    """Return a program of examples/ as a module."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


llama = example("llama")
model = llama.model_of(llama.TINY)
prompt = torch.randint(0, llama.TINY.words, (PROMPT,))
driver = DryDriver()
memory = DeviceMemory(driver=driver)
runners = {}
for program in llama.programs_of(model):
    constants = {name: memory.put(one.numpy()) for name, one in program.constants.items()}
    kind = GraphRunner if program.name == "decode" else ProgramRunner
    launcher = Launcher(program.modules, memory)
    runners[program.name] = kind(program.plan, launcher, CheckedMemory(memory), constants)


def begun():
    tokens, count, *caches = llama.state(llama.TINY)
    tokens[:PROMPT] = prompt
    return [tokens, count.fill_(PROMPT), *caches]


eager, ours = begun(), [memory.put(one.numpy()) for one in begun()]
steps = llama.entries_of(model)
off, held = [], []
for number in range(ANSWER):
    name = "decode" if number else "prefill_16"
    expected = steps[name](*eager)
    (found,) = runners[name](*ours)
    off.append(float((torch.from_dlpack(found) - expected).abs().max()))
    if number >= ANSWER - 2:
        held.append((found, expected))  # which the next call must not write over
off += [float((torch.from_dlpack(one) - other).abs().max()) for one, other in held]
caches = [
    float((torch.from_dlpack(a) - b).abs().max()) for a, b in zip(ours[2:], eager[2:], strict=True)
]
use = runners["decode"].graph_use
print(
    json.dumps(
        {
            "off": max(off),
            "caches": max(caches),
            "tokens": memory.array(ours[0]).tolist()[: PROMPT + ANSWER],
            "eager": eager[0].tolist()[: PROMPT + ANSWER],
            "graph": [use.replays, use.captures, use.refusal],
        }
    )
)
