# SPDX-License-Identifier: Apache-2.0
"""Runs slices whose places are numbers that change, of either sign, through torch.compile beside
eager torch, with gradients; prints what differs and what is called; TRITON_INTERPRET=1.

`python slice_worker.py SOURCES CASE`
"""

import json
import os
import sys
import warnings

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch

from bundler.codegen.torch_backend import triton_bundler

warnings.filterwarnings("ignore")
# Each sign of a number is another graph; beyond the limit torch runs the function itself.
torch._dynamo.config.recompile_limit = 100
PLACES = (2, -2, 9, -9)
# Of 0 or 1 element, these lie beyond and in front already.
NEAR = (2, -2)


def written(x, k):
    """Places of `x[:, k - 4:]` too: the sign of a sum is no property of its numbers."""
    y = x.clone()
    y[:, k:] = 2
    y[:, k - 4 :: 3] += x[:, k - 4 :: 3]
    y[:, -5:k] *= 3
    return y


def squared(x, k):
    parts = (x[:, k:], x[:, k - 4 :: 2], x[:, -5:k], x[:, -3:])
    return sum((part * part).sum() for part in parts)


def one_of_each(x, k):
    """A place from -3 to 3 only: others are errors."""
    y, place = x.clone(), max(min(k, 3), -2) - 1
    y[:, place] = x[:, place] * 2 + x.diagonal(place).sum()
    return y


def inputs(size, dtype):
    return torch.arange(4 * size).remainder(7).view(4, size).to(dtype)


def differs(function, compiled, x, k):
    with_gradient = function is squared
    results = []
    for run in (compiled, function):
        mine = x.clone().requires_grad_(with_gradient)
        result = run(mine, k)
        results.append(torch.autograd.grad(result, mine)[0] if with_gradient else result)
    found, expected = results
    return found.dtype != expected.dtype or not torch.equal(found, expected)


wrong, called, whole = [], set(), []
CASES = {
    "written": [(written, (6, 7), torch.bfloat16), (written, (1, 0), torch.int64)],
    "squared": [(squared, (6, 7, 0), torch.float32)],
    "one of each": [(one_of_each, (6, 7), torch.int64)],
}
for function, sizes, dtype in CASES[sys.argv[2]]:
    torch._dynamo.reset()
    programs = []
    options = {"programs": programs}
    compiled = torch.compile(function, backend=triton_bundler, dynamic=True, options=options)
    wrong += [
        f"{function.__name__} {dtype} {size} {k}"
        for size in sizes
        for k in (PLACES if size > 1 else NEAR)
        if differs(function, compiled, inputs(size, dtype), k)
    ]
    whole += [function.__name__ for found in programs if not hasattr(found, "plan")]
    made = [found for found in programs if hasattr(found, "plan")]
    called |= {call.operator for program in made for call in program.fallbacks}
print(json.dumps({"wrong": wrong, "called": sorted(called), "whole": whole}))
