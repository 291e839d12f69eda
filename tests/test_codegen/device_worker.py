# SPDX-License-Identifier: Apache-2.0
"""Runs programs that were traced for a GPU on the CPU's memory, beside eager torch, and prints what
differs; TRITON_INTERPRET=1.
"""

import json
import sys

import torch
from torch.utils._pytree import tree_leaves

from bundler.codegen.program import GenerateOptions, generate
from bundler.toolchain.torch_memory import TorchMemory

torch.manual_seed(0)
norm = torch.nn.BatchNorm2d(3)


def mixed(x):
    number, places = torch.tensor(2.5) * 3, torch.arange(3)
    return x * number + places[1] * torch.sqrt(number), number + 1, places.to(x.device) + x[:3, 0]


def places(x):
    """Offsets in a grid, of integers that kernels compute, and a bucket of a logarithm."""
    grid = torch.zeros(3, 3, 2)
    steps = torch.arange(3).view(1, -1) - torch.arange(3).view(-1, 1)
    grid[:, :, 1] = steps.repeat(1, 1) ** 2
    grid[:, :, 0] = steps.abs()
    bucket = (torch.log(1 + torch.arange(4).float()) * 3).long()
    rows = torch.arange(x.shape[0]).flip(0)
    table = torch.arange(4).float().log1p().to(x.device)
    return x[rows] + bucket.to(x.device), grid.to(x.device) + x[0, 0], table


CASES = {
    "places": places,
    "numbers of the host": mixed,
    "there and back": lambda x: (x.to("cpu").sum() + 2) * x,
    "made on the host": lambda x: (
        torch.zeros_like(x, device="cpu"),
        x + torch.ones(x.shape[0], 1, device="cpu").to(x.device),
        x.new_zeros(3, device="cpu") + 1,
    ),
    "float64": lambda x: x.double() * (1.0 / x.shape[0]) + torch.tensor(1 / 3, dtype=torch.float64),
    "integers": lambda x: x.long() * torch.tensor(7) + torch.tensor(True),
    "places of the host": lambda x: x[torch.tensor([2, 0])] + 1,
    "changed": lambda x: x.add_(torch.tensor(0.5)),
}


def run(program, inputs):
    def launch(name, arguments, _sizes):
        program.modules[name].run(*arguments)

    memory = TorchMemory("cpu")
    return program.runner(memory, launch, memory.seeds)(*inputs)


def differs(found, expected):
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError as error:
        return str(error)
    return ""


wrong, options = {}, GenerateOptions(sources=sys.argv[1])
for name, function in CASES.items():
    program = generate(function, [torch.randn(5, 4)], dynamic=True, device="cuda", options=options)
    for size in (5, 7):
        given = torch.randn(size, 4)
        copy = given.clone()
        found, expected = run(program, [given]), tree_leaves(function(copy))
        if difference := differs([*found, given], [*expected, copy]):
            wrong[f"{name} {size}"] = difference

program = generate(norm, [torch.randn(2, 3, 4, 4)], device="cuda", options=options)
eager = torch.nn.BatchNorm2d(3)
given = torch.randn(2, 3, 4, 4)
found = run(program, [given])
if difference := differs([*found, *norm.buffers()], [eager(given), *eager.buffers()]):
    wrong["batch norm"] = difference
# A constant that the function returns is the caller's own copy each time, and nothing is called.
program = generate(
    lambda x: (x + 1, torch.tensor(2.5), torch.tensor([1, 2])),
    [torch.randn(5, 4)],
    device="cuda",
    options=options,
)
given = torch.randn(5, 4)
for _ in range(2):
    found = run(program, [given])
    if difference := differs(found, (given + 1, torch.tensor(2.5), torch.tensor([1, 2]))):
        wrong["returned constants"] = difference
    found[1].add_(1)
    found[2].add_(1)
if program.fallbacks:
    wrong["returned constants"] = str(program.fallbacks)
print(json.dumps({"cases": len(CASES) + 1, "wrong": wrong}))
