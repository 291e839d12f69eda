# SPDX-License-Identifier: Apache-2.0
"""Trains one step of a small model through the backend of torch.compile, beside eager mode, and
prints what differs; TRITON_INTERPRET=1.
"""

import copy
import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch

from bundler.codegen.torch_backend import triton_bundler

programs = []
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
)
eager = copy.deepcopy(model)
compiled = torch.compile(model, backend=triton_bundler, options={"programs": programs})
differences = []
for batch in (8, 11):
    x = torch.randn(batch, 16)
    ours, theirs = compiled(x), eager(x)
    for out in (ours, theirs):
        (out**2).mean().backward()
    differences.append((ours - theirs).abs().max())
    differences += [
        (a.grad - b.grad).abs().max()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True)
    ]
print(
    json.dumps(
        {
            "largest_difference": float(max(differences)),
            "graphs": len(programs),
            "dynamic": [bool(program.plan.sizes) for program in programs],
            "fallbacks": sorted(
                {fallback.operator for program in programs for fallback in program.fallbacks}
            ),
        }
    )
)
