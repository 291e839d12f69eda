# SPDX-License-Identifier: Apache-2.0
"""Takes steps of optimizers through the backend of torch.compile in Triton's interpreter, beside
eager ones, and prints JSON; TRITON_INTERPRET=1.
"""

import itertools
import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch

from bundler.codegen.torch_backend import triton_bundler

report = {}
for kind, lists in itertools.product((torch.optim.AdamW, torch.optim.SGD), (True, False)):
    torch._dynamo.reset()
    programs = []
    ours = [torch.nn.Parameter(torch.randn(sizes)) for sizes in ((20,), (6, 7), (30,))]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    options = {"lr": 1e-2, "weight_decay": 0.01, "foreach": lists}
    options |= {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": True}
    one, other = kind(ours, **options), kind(theirs, **options)
    step = torch.compile(one.step, backend=triton_bundler, options={"programs": programs})
    for _ in range(3):
        for mine, other_one in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other_one.grad = mine.grad.clone()
        step()
        other.step()
    report[f"{kind.__name__} {'lists' if lists else 'tensors'}"] = {
        "difference": max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
        ),
        "fallbacks": [fallback.operator for program in programs for fallback in program.fallbacks],
        "kernels": [len(program.kernels) for program in programs],
    }
print(json.dumps(report))
