# SPDX-License-Identifier: Apache-2.0
"""Runs in Triton's interpreter: prints as JSON the comments of a compiled program, and for each
16-bit float, with and without upcasting, which results have eager torch's bits; and whether the
other form of each reduction computes what eager torch does.
"""

import json

import torch

from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate
from bundler.toolchain.torch_memory import TorchMemory


def normed(x, w):
    y = torch.nn.functional.layer_norm(x, (64,))
    return torch.softmax(torch.mm(y * 2, w).relu(), -1)


def arithmetic(a, b):
    c = (a * b + a) * b - a
    return torch.sigmoid(c) * b, (a * a + b).sum(-1) * a[:, 0], torch.softmax(a * b, -1)


def comments():
    programs = []
    options = {"programs": programs, "workers": 1, "keep": False}
    torch.compile(normed, backend="triton_bundler", options=options)(
        torch.zeros(8, 64), torch.zeros(64, 32)
    )
    return [line for program in programs for (one,) in program.comments.values() for line in one]


def equal_bits(dtype, upcast):
    torch.manual_seed(0)
    inputs = [torch.randn(16, 96).to(dtype) for _ in range(2)]
    program = generate(arithmetic, inputs, options=GenerateOptions(upcast=upcast))
    found = zip(program.run(*inputs), arithmetic(*inputs), strict=True)
    return [torch.equal(result, expected) for result, expected in found]


def reductions():
    """Functions of rows, one of each kind of reduction and scan, and their inputs."""
    torch.manual_seed(0)
    row = torch.randn(4, 1200)
    yield lambda a: torch.softmax(a, -1), [row]
    yield lambda a: (a.var(1), a.argmax(1), a.cumsum(1)), [row[:, :90]]
    yield lambda a, w: torch.nn.functional.layer_norm(a, (1200,), w), [row, row[0]]
    yield lambda a: a.sum(0), [row.t().contiguous()[:300]]


def other_forms():
    """Return whether each other form of a kernel computes what eager torch does."""
    found = []
    options = GenerateOptions(policy=ProgramPolicy(multi_kernel=True))
    for function, inputs in reductions():
        program = generate(function, inputs, options=options)
        memory, modules = TorchMemory("cpu"), program.modules

        def launch(name, arguments, _sizes, program=program, modules=modules):
            ((other, places),) = program.plan.kernels[name].others.items() or [(name, None)]
            given = arguments if places is None else [arguments[place] for place in places]
            modules[other].run(*given)

        expected = function(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        results = program.runner(memory, launch, memory.seeds)(*inputs)
        found += [
            torch.allclose(one.double(), other.double(), atol=1e-4, rtol=1e-4)
            for one, other in zip(results, expected, strict=True)
        ]
    return found


if __name__ == "__main__":
    bits = {
        f"{dtype} {upcast}": equal_bits(dtype, upcast)
        for dtype in (torch.float16, torch.bfloat16)
        for upcast in (True, False)
    }
    print(json.dumps({"comments": comments(), "bits": bits, "forms": other_forms()}))
