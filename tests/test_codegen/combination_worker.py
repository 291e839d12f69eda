# SPDX-License-Identifier: Apache-2.0
"""Runs the functions of `combination_cases` with kernels that share launches and with each by
itself, and prints JSON: launches of both, whether all bytes are equal, and how far they are from
torch; TRITON_INTERPRET=1.
"""

import json
import os
import sys
from unittest import mock

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from combination_cases import CASES, inputs_of
from torch.utils._pytree import tree_leaves

from bundler.codegen import schedule
from bundler.codegen.program import GenerateOptions, generate
from bundler.runtime.program.program_plan import Launch, read_plan


def bytes_of(tensors):
    """Return dtypes, sizes and all bytes."""
    return [
        (str(one.dtype), one.shape, one.detach().reshape(-1).view(torch.uint8).tolist())
        for one in tensors
    ]


def ran(name):
    """Return how many launches a program has, and its results and changed inputs."""
    function = CASES[name][0]
    program = generate(
        function, inputs_of(name), options=GenerateOptions(sources=f"{sys.argv[1]}/sources")
    )
    plan = read_plan(program.plan.to_json())
    given = inputs_of(name)
    results = program.run(*given, seed=3)
    launches = sum(isinstance(step, Launch) for step in plan.steps)
    return launches, tensors_of([*results, *given])


def tensors_of(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


report = {}
for name in sys.argv[2:] or CASES:
    together, found = ran(name)
    with mock.patch.object(schedule, "combined", lambda groups, *_: list(groups)):
        apart, other = ran(name)
    given = inputs_of(name)
    wanted = tensors_of([CASES[name][0](*given), *given])
    near = [
        torch.allclose(a, b, 1e-2 if name == "halves" else 1e-4, 1e-5)
        for a, b in zip(found, wanted, strict=True)
    ]
    report[name] = {
        "launches": [together, apart],
        "equal": bytes_of(found) == bytes_of(other),
        "near": name == "drawn" or all(near),
    }
print(json.dumps(report))
