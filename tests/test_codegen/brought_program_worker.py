# SPDX-License-Identifier: Apache-2.0
"""Trains a model through torch.compile, with programs that a bundle or a store brings, and prints
how many graphs were lowered and a digest of the gradients; TRITON_INTERPRET=1.

    python brought_program_worker.py CACHE record BUNDLE
    python brought_program_worker.py CACHE restore BUNDLE TRUST
    python brought_program_worker.py CACHE session STORE TRUST
"""

import contextlib
import hashlib
import json
import os
import sys

import torch

import bundler
from bundler.codegen import lower
from bundler.codegen.torch_backend import triton_bundler

cache, how, where, *trust = sys.argv[1:]
os.environ["XDG_CACHE_HOME"] = cache
lowered = []
lower_graph = lower.lower_graph


def counted(module, **options):
    lowered.append(module)
    return lower_graph(module, **options)


def trained():
    """Return the gradients of a model after a step, as a digest."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))
    compiled = torch.compile(model, backend=triton_bundler)
    (compiled(torch.randn(8, 16)) ** 2).mean().backward()
    found = hashlib.sha256()
    for one in model.parameters():
        found.update(bytes(one.grad.view(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


lower.lower_graph = counted
told = {}
with contextlib.ExitStack() as stack:
    recording = None
    if how == "record":
        recording = stack.enter_context(bundler.recording(programs=True))
    elif how == "restore":
        report = bundler.restore(where, f"{cache}/triton", trust=trust[0])
        told["skipped"] = [name for name, _ in report.skipped]
        told["restored"] = [*report.companions]
    else:
        store = stack.enter_context(bundler.open_store(where, trust=trust[0]))
        stack.enter_context(bundler.session(store))
    told["result"] = trained()
    if recording is not None:
        recording.collect().save(where)
print(json.dumps({**told, "lowered": len(lowered)}))
