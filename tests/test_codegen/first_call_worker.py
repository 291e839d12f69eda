# SPDX-License-Identifier: Apache-2.0
"""Compiles functions whose programs fail when they are first called, and prints what differs from
eager torch, and why the graph runs as torch has it.
"""

import json
import os
import sys
from dataclasses import replace

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch

import bundler.codegen
from bundler.codegen import torch_backend


@torch.library.custom_op("first_calls::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Return every second element; its rule for fake tensors says every one."""
    return x[::2].clone()


@halved.register_fake
def _(x):
    return torch.empty_like(x)


def broken(module, options=None, **rest):
    """Return a program whose kernels do not compile."""
    program = bundler.codegen.program.program_of_graph(module, options, **rest)
    kernels = {
        name: replace(
            kernel, source=kernel.source.replace("xoffset = ", "xoffset = no_such_name + ")
        )
        for name, kernel in program.kernels.items()
    }
    return replace(program, kernels=kernels)


def wrong_rule(x, noise):
    x.mul_(3)
    return halved(x + torch.rand_like(x)), torch.rand_like(noise)


def changed(x, noise):
    x.add_(noise)
    x.mul_(3)
    return x * torch.rand_like(noise), x.sum()


def compared(function, *, generate):
    torch.manual_seed(0)
    torch_backend.program_of_graph = generate
    programs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=torch_backend.triton_bundler, options={"programs": programs}
    )
    wrong = []
    for call in range(2):
        mine, theirs, noise = torch.ones(8), torch.ones(8), torch.arange(8.0)
        torch.manual_seed(call)
        ours = compiled(mine, noise)
        torch.manual_seed(call)
        eager = function(theirs, noise)
        pairs = zip((*ours, mine), (*eager, theirs), strict=True)
        wrong += [f"{call}: {a} is not {b}" for a, b in pairs if not torch.equal(a, b)]
    return wrong, [getattr(one, "reason", "") for one in programs]


def refused_by_torch():
    """Give torch's own error where torch refuses the values, too, and run the program
    afterwards.
    """
    programs = []
    torch_backend.program_of_graph = bundler.codegen.program.program_of_graph

    def function(x):
        torch._assert_async((x < 3).all(), "numbers below 3")
        return x * 2

    compiled = torch.compile(
        function, backend=torch_backend.triton_bundler, options={"programs": programs}
    )
    told = ""
    try:
        compiled(torch.tensor([1, 5]))
    except RuntimeError as error:
        told = str(error)
    right = compiled(torch.tensor([1, 2])).tolist() == [2, 4]
    return told, right, [type(one).__name__ for one in programs]


real = bundler.codegen.program.program_of_graph
print(
    json.dumps(
        {
            "wrong rule": compared(wrong_rule, generate=real),
            "no kernel": compared(changed, generate=broken),
            "refused": refused_by_torch(),
        }
    )
)
