# SPDX-License-Identifier: Apache-2.0
"""Runs kernels that reduce rows and across rows in Triton's interpreter, for few rows, and prints
for each case launches, kernels with both, and what is farther from float64 than eager torch is.

Run as a program: `mixed_worker.py NAME ...`, `mixed_worker.py changing`, which trains with
numbers of rows that change, or `mixed_worker.py random COUNT`, with TRITON_INTERPRET=1.
"""

import json
import random
import sys
from functools import partial

import torch
import torch.nn.functional as F

from bundler.codegen import generate
from bundler.codegen.loops import mixed_reductions
from bundler.runtime.program.program_plan import Launch

# The interpreter takes minutes for as many rows as a GPU needs to gain by it.
mixed_reductions._LEAST_ELEMENTS, mixed_reductions._LEAST_ROWS = 0, 32
mixed_reductions._ROWS_FOR_A_COLUMN = 0


def layer_norm(g, x, w):
    _, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], w, w, 1e-5)
    both = [True, True, True]
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(g, x, [x.shape[-1]], mean, rstd, w, w, both)


def rms_norm(g, x, w):
    _, backward = torch.func.vjp(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), x, w)
    return backward(g)


def chained(g, x, w):
    """The bias in front of a norm has the sum over rows of what the norm's rows come to."""
    found = layer_norm(g, x, w)
    return *found, found[0].sum(0)


def extremes(g, x, w):
    """Elements beyond the last row must not be the largest, nor a factor."""
    size, factor = x.abs() + 1, g.sigmoid() + 0.55
    return x.sum(1), (-size).amax(0), size.amin(0), factor.prod(0), size.sum(0), (g * x).amax(1)


def softmax(g, x, w):
    p = torch.softmax(x, -1)
    return p * (g - (p * g).sum(-1, keepdim=True)), (p * g).sum(0), w + 1


def behind_columns(g, x, w):
    """Rows that need what all rows came to in each column are another kernel's."""
    return (x * x.sum(0)).sum(1), g.sum(1), w + 1


def beside_a_scan(g, x, w):
    return (w.expand_as(x).cumsum(1) * x).sum(1), x.sum(1), (x * g).sum(0)


def in_place(g, x, w):
    """What changes is read before, row by row."""
    total = (x * g).sum(0)
    x.mul_(w).sub_((x * g).sum(1, keepdim=True))
    return total


FUNCTIONS = (layer_norm, rms_norm, chained, extremes, softmax, behind_columns)
FUNCTIONS = {f.__name__: f for f in (*FUNCTIONS, beside_a_scan, in_place)}


def outcome(name, rows, columns, dtype):
    """Return launches, kernels that also reduce across rows, and results that are too far off."""
    made = torch.Generator().manual_seed(rows + columns)
    shapes = ((rows, columns), (rows, columns), (columns,))
    given = [torch.randn(sizes, generator=made).to(dtype) for sizes in shapes]
    function = FUNCTIONS[name]
    program = generate(function, [value.clone() for value in given])

    def results(call, values):
        found = call(*values)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        return [part.double() for part in (*found, *values)]

    found = results(program.run, [value.clone() for value in given])
    eager = results(function, [value.clone() for value in given])
    exact = results(function, [value.double() for value in given])
    scales = [part.square().mean().sqrt() for part in exact]
    wrong = [
        place
        for place, (ours, theirs, best) in enumerate(zip(found, eager, exact, strict=True))
        if not (ours - best).abs().max() <= 2 * (theirs - best).abs().max() + 1e-6 * scales[place]
    ]
    launches = sum(isinstance(step, Launch) for step in program.plan.steps)
    mixed = sum("rsplit_size" in source for source in program.sources.values())
    return launches, mixed, wrong


def changing():
    """Return kernels that also reduce across rows, of one program for any number of rows, and the
    numbers of rows with which gradients are wrong.
    """
    programs, columns = [], 66
    weight = torch.randn(columns, requires_grad=True)
    options = {"programs": programs, "keep": False}

    def norm(x, w):
        return F.layer_norm(x, (columns,), w, w)

    compiled, wrong = torch.compile(norm, backend="triton_bundler", options=options), []
    for rows in (37, 7, 80):
        x, g = torch.randn(rows, columns, requires_grad=True), torch.randn(rows, columns)
        torch._dynamo.mark_dynamic(x, 0)
        found, expected = (
            torch.autograd.grad(function(x, weight), (x, weight), g)
            for function in (compiled, norm)
        )
        if not all(map(partial(torch.allclose, rtol=1e-5, atol=1e-5), found, expected)):
            wrong.append(rows)
    sources = [source for program in programs for source in program.sources.values()]
    return sum("rsplit_size" in source for source in sources), wrong


def drawn(count):
    """Yield cases of any size."""
    chance = random.Random(0)
    for _ in range(count):
        columns = chance.randint(64, 300)
        rows = chance.randint(32, 300)
        dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
        yield chance.choice(list(FUNCTIONS)), rows, columns, dtype


if __name__ == "__main__":
    names = sys.argv[1:]
    if names == ["changing"]:
        print(json.dumps(changing()))
        sys.exit()
    cases = [(name, 37, 66, torch.float32) for name in names]
    if names[0] == "random":
        cases = drawn(int(names[1]))
    print(json.dumps({f"{n} {r} {c} {d}": outcome(n, r, c, d) for n, r, c, d in cases}))
