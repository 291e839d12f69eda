# SPDX-License-Identifier: Apache-2.0
"""Runs a function with dropout forward and backward through the backend of torch.compile in
Triton's interpreter, and prints JSON; TRITON_INTERPRET=1.
"""

import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import torch.nn.functional as F

from bundler.codegen.torch_backend import triton_bundler

programs = []


def function(x):
    return F.dropout(x.tanh(), 0.3) * 2


compiled = torch.compile(function, backend=triton_bundler, options={"programs": programs})
results = []
for seed in (1, 1, 2):
    torch.manual_seed(seed)
    x = torch.full((32, 64), 0.5, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    results.append((y.detach(), x.grad))
kept = results[0][0] != 0
slope = (1 - torch.tanh(torch.tensor(0.5)) ** 2) * 2 / 0.7
print(
    json.dumps(
        {
            "fallbacks": [
                fallback.operator for program in programs for fallback in program.fallbacks
            ],
            "equal after an equal seed": [
                torch.equal(results[0][0], results[n][0]) for n in (1, 2)
            ],
            "gradient is of the mask": torch.allclose(
                results[0][1], torch.where(kept, slope, 0.0), rtol=1e-5
            ),
            "dropped": float((~kept).float().mean()),
        }
    )
)
