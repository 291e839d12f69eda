# SPDX-License-Identifier: Apache-2.0
"""Compiles functions and models through torch.compile in one process, and prints how many graphs
were lowered, and how many torch traced, which guards torch has on their sizes, and a digest of each
result's bytes; TRITON_INTERPRET=1.

    python second_start_worker.py CACHE
"""

import hashlib
import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from torch.utils.checkpoint import checkpoint

from bundler.codegen import lower, torch_backend

lowered = []
traced = []
guards = []
lower_graph, compile_graph = lower.lower_graph, torch_backend.compile_graph


def counted(module, **options):
    lowered.append(module)
    return lower_graph(module, **options)


def listening(module, *rest, **keywords):
    """Note torch's guards on the sizes of a graph once it is compiled."""
    traced.append(module)
    compiled = compile_graph(module, *rest, **keywords)
    for node in module.graph.find_nodes(op="placeholder"):
        for size in getattr(node.meta["val"], "shape", ()):
            if isinstance(size, torch.SymInt):
                guards.append(sorted({str(one.expr) for one in size.node.shape_env.guards}))
                return compiled
    return compiled


lower.lower_graph, torch_backend.compile_graph = counted, listening


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode())
        found.update(bytes(raw.tolist()))
    return found.hexdigest()


def drawn(number, *sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(number))


def trained():
    """Train a model at three batches, of which the second has sizes that change."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    compiled, found = compile(model), []
    for batch in (8, 11, 9):
        result = compiled(drawn(batch, batch, 16))
        (result**2).mean().backward()
        found += [result, *(one.grad for one in model.parameters())]
    return found


def inferred():
    """Run a function whose graph holds tensors, one of a single number and one of several."""
    several = torch.arange(8.0)
    compiled = compile(lambda x: torch.softmax(x * torch.tensor(0.3) + several, -1))
    return [compiled(drawn(1, 6, 8))]


def changed():
    """Change an input in place, and return it and a view of it."""

    def function(x):
        x.add_(1)
        return x, x[1:], x.sum(0)

    given = drawn(2, 5, 3)
    return [given, *compile(function)(given)]


def kept_numbers():
    """Draw random numbers in a checkpointed part, whose state plans save by our own operators."""
    torch.manual_seed(3)
    x = drawn(3, 6, 8).requires_grad_()

    def function(x):
        part = checkpoint(lambda y: torch.dropout(y.sin(), 0.5, True), x, use_reentrant=False)
        return part.sum() * 2

    result = compile(function)(x)
    result.backward()
    return [result, x.grad]


def other_numbers():
    """Run what differs from `inferred` in the number that its graph holds, and in nothing else."""
    several = torch.arange(8.0)
    compiled = compile(lambda x: torch.softmax(x * torch.tensor(0.4) + several, -1))
    return [compiled(drawn(1, 6, 8))]


def generated():
    """Run the function of `inferred` where programs are not kept."""
    several = torch.arange(8.0)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.softmax(x * torch.tensor(0.3) + several, -1),
        backend=torch_backend.triton_bundler,
        options={"keep": False, "programs": programs},
    )
    return [compiled(drawn(1, 6, 8))]


def sized():
    """Compute with numbers of sizes, which the host computes."""
    compiled = compile(lambda x: (x * (x.shape[0] / 3) + torch.arange(x.shape[0])[:, None]).sum(1))
    return [compiled(drawn(batch, batch, 5)) for batch in (4, 7, 6)]


def compile(function):  # noqa: A001  # as torch calls it
    torch._dynamo.reset()
    options = {"programs": programs}
    return torch.compile(function, backend=torch_backend.triton_bundler, options=options)


found = {}
for run in (trained, inferred, changed, kept_numbers, other_numbers, sized, generated):
    lowered.clear()
    traced.clear()
    guards.clear()
    programs = []
    results = digest(run())
    found[run.__name__] = {
        "lowered": len(lowered),
        "traced": len(traced),
        "programs": len(programs),
        "calls": [[one.operator for one in program.fallbacks] for program in programs],
        "guards": list(guards),
        "results": results,
    }
print(json.dumps(found))
