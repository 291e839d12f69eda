# SPDX-License-Identifier: Apache-2.0
"""Checkpoints parts of functions that draw random numbers, through torch.compile, and prints what
is wrong with results, gradients and generators.
"""

import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from torch.utils.checkpoint import checkpoint

from bundler.codegen.torch_backend import triton_bundler

F = torch.nn.functional


def one_part(x):
    return checkpoint(
        lambda x: F.dropout(torch.relu(x @ x.t()), 0.5).sin(), x * 2, use_reentrant=False
    )


def two_parts(x):
    y = checkpoint(lambda x: F.dropout(x.sin(), 0.3), x, use_reentrant=False)
    z = checkpoint(
        lambda x: F.dropout(x.cos(), 0.3) * torch.rand_like(x), y * 2, use_reentrant=False
    )
    return z * torch.bernoulli(torch.full_like(z, 0.5))


def answer(function, x, seed):
    """Return the sum of a function, its gradient, and what is drawn afterwards."""
    torch.manual_seed(seed)
    result = function(x).sum()
    (gradient,) = torch.autograd.grad(result, x)
    return result.detach(), gradient, torch.rand(2)


def wrong(function, seed, *, equal):
    programs = []
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=triton_bundler, options={"programs": programs})
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    _, gradient, _ = answer(compiled, x, seed)
    found = []
    # The same seed draws the same numbers, so that the function has a slope.
    step = torch.randn_like(x) * 1e-6
    with torch.enable_grad():
        above, below = (
            answer(compiled, (x + s).detach().requires_grad_(), seed)[0] for s in (step, -step)
        )
    slope = (gradient * step).sum() * 2
    if not torch.allclose(above - below, slope, rtol=1e-4):
        found.append(f"gradient: {slope.item()} is not {(above - below).item()}")
    if not gradient.abs().sum() > 0:
        found.append("the gradient is 0")
    if equal:
        # Nothing else is drawn, so the numbers are those of torch alone.
        theirs = answer(torch.compile(function, backend="aot_eager"), x, seed)
        ours = answer(compiled, x, seed)
        pairs = zip(ours, theirs, strict=True)
        found += [f"{a} is not {b}" for a, b in pairs if not torch.allclose(a, b)]
    return found + [one.reason for one in programs if hasattr(one, "reason")]


print(
    json.dumps(
        {
            "one part": [wrong(one_part, seed, equal=True) for seed in (1, 2)],
            "two parts": [wrong(two_parts, seed, equal=False) for seed in (1, 2)],
        }
    )
)
