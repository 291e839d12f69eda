# SPDX-License-Identifier: Apache-2.0
"""Runs verified programs in Triton's interpreter, right ones and ones with a lowering that was
broken, and prints JSON; TRITON_INTERPRET=1.
"""

import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch

from bundler.codegen.lowerings import pointwise_lowerings
from bundler.codegen.program import GenerateOptions, generate
from bundler.codegen.torch_backend import triton_bundler
from bundler.errors import WrongResult
from bundler.toolchain import reference_graph

VERIFIED = GenerateOptions(verify=True)
report = {}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=triton_bundler, options=options)


def wrong(call):
    """Return what is said of a wrong result; nothing where none is found."""
    try:
        call()
    except WrongResult as error:
        return {
            "message": error.message,
            **{n: str(error.facts[n]) for n in ("output", "kernel", "line")},
        }
    return {}


def two_results(x):
    first = x.exp()
    return first, x.sin() + 1


# What is right passes, and only the first call is compared.
runs = []
run_graph = reference_graph.ReferenceGraph.run
reference_graph.ReferenceGraph.run = lambda self, inputs: runs.append(1) or run_graph(self, inputs)
program = generate(two_results, [torch.randn(40)], options=VERIFIED)
for _ in range(3):
    program.run(torch.randn(40))
found = program.verifier.verification
report["right"] = {"runs": len(runs), "checked": found.checked, "float64": found.float64}

# A changed input is changed once, and so is one that it shares memory with.
memory = torch.zeros(6)


def changes(x, y):
    x.add_(1)
    y.mul_(3)
    return x + y


programs = []
x, y = torch.ones(4), torch.full((4,), 2.0)
result = compiled(changes, verify=True, programs=programs)(x, y)
report["changed"] = [x.tolist(), y.tolist(), result.tolist()]
report["changes checked"] = [sorted(one.verifier.verification.checked) for one in programs]


# Random numbers are those of a call without it, and named as unchecked.
def noisy(x):
    return x + torch.rand(5), x * 2


numbers = []
for verify in (False, True):
    torch.manual_seed(7)
    program = generate(noisy, [torch.ones(5)], options=GenerateOptions(verify=verify))
    numbers.append([program.run(torch.ones(5))[0].tolist(), torch.rand(2).tolist()])
report["same numbers"] = numbers[0] == numbers[1]
report["unchecked"] = program.verifier.verification.unchecked


# Which of equal elements is named is a program's choice, but where it calls the operator.
def chosen(x):
    return (*x.topk(4, 0), *x.kthvalue(9, -1, True), *x.sort())


equals = torch.randint(0, 4, (12, 30)).float()
program = generate(chosen, [equals], options=VERIFIED)
program.run(equals)
report["choices"] = len(program.verifier.verification.checked)
equals = torch.randint(0, 4, (2, 1100)).float()
program = generate(lambda x: tuple(x.topk(300)), [equals], options=VERIFIED)
program.run(equals)
report["choices called"] = [fallback.operator for fallback in program.fallbacks]

# Forward and backward.
programs = []
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
given = torch.randn(4, 8, requires_grad=True)
compiled(model, verify=True, programs=programs)(given).square().mean().backward()
report["training"] = [one.verifier.verification.float64 for one in programs]

# A lowering that is wrong is found, by each way in; without the switch it is not.
pointwise_lowerings.POINTWISE["sin"] = pointwise_lowerings.POINTWISE["cos"]
inputs = torch.randn(40)
silent = generate(two_results, [inputs])
report["silent"] = bool((silent.run(inputs)[1] - two_results(inputs)[1]).abs().max() > 0.1)
program = generate(two_results, [inputs], options=VERIFIED)
report["wrong"] = wrong(lambda: program.run(inputs))
report["wrong again"] = wrong(lambda: program.run(inputs))
report["wrong compiled"] = wrong(lambda: compiled(two_results, verify=True)(inputs))
changed = generate(lambda x: x.copy_(x.sin()), [inputs], options=VERIFIED)
report["wrong change"] = wrong(lambda: changed.run(inputs.clone()))
print(json.dumps(report))
