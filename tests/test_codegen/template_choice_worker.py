# SPDX-License-Identifier: Apache-2.0
"""Runs torch.compile with `templates="where faster"` in Triton's interpreter, with a clock that
finds every second kernel faster than its operator; prints JSON: how often something was timed, what
differs from eager torch, and whether operators and templates are in the programs;
TRITON_INTERPRET=1.

`python template_choice_worker.py DIRECTORY training | inference | changing | attention ...`
"""

import json
import os
import sys
from unittest import mock

os.environ["XDG_CACHE_HOME"] = os.environ["TRITON_CACHE_DIR"] = sys.argv[1]

import torch
import torch.nn.functional as F

from bundler.codegen.measured_templates import TemplateMeasurements
from bundler.runtime import DryDriver
from bundler.runtime.tuning.benchmark import GivenClock

timed = []


def bench(call, quantiles):
    """Run both forms of each piece, and say how long they took."""
    call()
    timed.append(len(timed) // 2 % 2 == len(timed) % 2)
    return [1.0 + timed[-1]] * len(quantiles)


def here(device, policy, sources):
    """Return what measures on a GPU that is imitated, by running kernels in the interpreter."""
    return TemplateMeasurements(
        device, policy, DryDriver("cuda"), lambda: GivenClock(bench), sources
    )


def layer(x, w1, b1, w2, scale):
    """Return a gated product of another one, and attention."""
    hidden = F.gelu(F.linear(x, w1, b1)) * F.linear(x, w1 * scale)
    heads = F.linear(hidden, w2).unflatten(-1, (2, 16)).transpose(0, 1)
    return F.layer_norm(hidden, hidden.shape[-1:]).sum(0), heads


def attended(heads):
    """Return attention of heads, which is called where gradients are needed."""
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


torch.manual_seed(0)
inputs = [torch.randn(size) for size in ((24, 32), (48, 32), (48,), (32, 48), (48, 1))]
programs, wrong = [], []
options = {"templates": "where faster", "programs": programs, "keep": False, "workers": 1}


def compare(name, function, given, *, dynamic=False):
    """Note what differs from eager torch, in results and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="triton_bundler", options=options, dynamic=dynamic)
    found = []
    for one in (compiled, function):
        leaves = [tensor.clone().requires_grad_(tensor.requires_grad) for tensor in given]
        results = one(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        if any(leaf.requires_grad for leaf in leaves):
            sum(result.sin().sum() for result in results).backward()
        found.append([*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            wrong.append(f"{name} {number}")


with mock.patch.object(TemplateMeasurements, "here", here):
    for case in sys.argv[2:]:
        attends, trained = case == "attention", case == "training"
        given = [torch.randn(1, 2, 24, 16)] if attends else inputs
        given = [tensor.detach().requires_grad_(trained) for tensor in given]
        compare(case, attended if attends else layer, given, dynamic=case == "changing")
called = {one.operator for program in programs for one in program.fallbacks}
kinds = {kernel.text.kind for program in programs for kernel in program.kernels.values()}
print(json.dumps([len(timed), wrong, sorted(called), sorted(kinds)]))
