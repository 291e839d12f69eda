# SPDX-License-Identifier: Apache-2.0
"""Trains functions whose backward programs write over what was saved for them, and prints what
differs from eager torch; TRITON_INTERPRET=1.

    python donated_worker.py CACHE
"""

import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from bundler.codegen import torch_backend
from bundler.codegen.channels_last import DONATED, FREED
from bundler.codegen.program import Program, program_of_graph
from bundler.runtime.program.program_plan import Overwrite
from bundler.runtime.program.run import ProgramRunner

ROWS, COLUMNS = 6, 40
LABELS = torch.arange(ROWS) % 5


def drawn(number, *sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(number))


def head(x, w):
    """What is saved of the rows becomes their gradient."""
    return (functional.cross_entropy(x @ w, LABELS),)


def head_returned(x, w):
    """The caller has what is saved."""
    rows = functional.log_softmax(x @ w, -1)
    return functional.nll_loss(rows, LABELS), rows


def head_seen(x, w):
    """The caller has a view of what is saved."""
    rows = functional.log_softmax(x @ w, -1)
    return functional.nll_loss(rows, LABELS), rows[1:3].t()


def head_of_copy(x, w):
    """What torch traces as a copy of an input."""
    return functional.nll_loss(functional.log_softmax(w.clone()[:ROWS], -1), LABELS) + x.sum(), w


def twice(x, w):
    """What is saved is read by two kernels."""
    rows = functional.log_softmax(x @ w, -1)
    return (functional.nll_loss(rows, LABELS) + (rows.exp() @ w.t()).square().mean(),)


def changed(x, w):
    """An input that is changed is saved before."""
    rows = functional.log_softmax((x + 1) @ w, -1)
    x.mul_(2)
    return functional.nll_loss(rows, LABELS) + (rows @ w.t() * x).sum(), x


def outer(x, w):
    """The gradient that could be written over what is saved is the caller's."""
    return (functional.nll_loss(functional.log_softmax(x, -1), LABELS) + w.sum(),)


FUNCTIONS = (head, head_returned, head_seen, head_of_copy, twice, changed, outer)


def given():
    return [one.requires_grad_() for one in (drawn(1, ROWS, 16), drawn(2, 16, COLUMNS))]


def trained(function, retained=0):
    """Return results, the inputs and all gradients of a call."""
    x, w = given()
    results = function(x * 1, w)
    found = []
    for number in range(retained + 1):
        inputs = torch.autograd.grad(results[0], (x, w), retain_graph=number < retained)
        found += [one.clone() for one in inputs]
    return [*(one.detach().clone() for one in results), x.detach(), w.detach(), *found]


def compiled(function, dynamic=None, **options):
    torch._dynamo.reset()
    programs = []
    options = {"programs": programs, "workers": 1, **options}
    backend = torch_backend.triton_bundler
    called = torch.compile(function, backend=backend, dynamic=dynamic, options=options)
    return called, programs


def wrong(function, called, retained=(0, 0, 0)):
    """Return the calls whose results, inputs or gradients are not eager torch's."""
    found = []
    for number, times in enumerate(retained):
        pairs = zip(trained(called, times), trained(function, times), strict=True)
        near = [torch.allclose(one, other, 1e-4, 1e-5) for one, other in pairs]
        found += [] if all(near) else [[number, near]]
    return found


def overwritten(programs):
    assert all(isinstance(one, Program) for one in programs), programs
    return [len(one.plan.overwritten) for one in programs]


def of(function, retained=(0, 0, 0), **options):
    called, programs = compiled(function, **options)
    return wrong(function, called, retained), overwritten(programs)


def chain(saved, other):
    """Two buffers take one memory in turn."""
    first = saved * 2
    second = first + (first @ other).sum(1, keepdim=True)
    return (second @ other,)


def chain_of_result(saved, other):
    """The second one is the caller's."""
    first = saved * 2
    return (first + (first @ other).sum(1, keepdim=True),)


def read_later(saved, other):
    """The input is read once more, together with what could be written over it."""
    first = saved * 2
    return ((first @ other) @ saved @ first,)


def elsewhere(saved, other):
    """Each element is read where another one is stored."""
    first = saved.t() * 2
    return (first.contiguous() @ other,)


def written(saved, other):
    """The input is one that the graph changes."""
    twice = saved * 2
    later = twice + (twice @ other).sum(1, keepdim=True)
    saved.copy_(twice)
    return (later @ other,)


def seen(saved, other):
    """A called operator may have the input's memory."""
    part = torch.ops.aten.view_as_complex(saved.view(SIDE, SIDE // 2, 2))
    return (saved * 2) @ other, torch.ops.aten.real(part)


def shown(saved, other):
    """The caller has a called operator's view of what could be written over the input."""
    first = (saved * 2).view(SIDE, SIDE // 2, 2)
    return torch.ops.aten.view_as_complex(first), other @ other


GRAPHS = (chain, chain_of_result, read_later, elsewhere, written, seen, shown)
SIDE = 8


def marked(function, offset=0):
    """Return the program of a function whose first input is donated."""
    given = [torch.empty(SIDE * SIDE + offset)[offset:].view(SIDE, SIDE) for _ in range(2)]
    module = make_fx(function, tracing_mode="fake")(*given)
    node = next(iter(module.graph.nodes))
    node.meta |= {FREED: True, DONATED: True}
    return program_of_graph(module)


def graph(function):
    """Return how many inputs a graph's program writes over, and whether its results are eager
    torch's in a call that consumes inputs, and in one that leaves them.
    """
    program = marked(function)
    first, second, third = ([drawn(1, SIDE, SIDE), drawn(2, SIDE, SIDE)] for _ in range(3))
    expected = function(*first)
    results = [program.run(*second), program.consume(third)]
    near = [all(map(torch.allclose, found, expected)) for found in results]
    return sum(isinstance(step, Overwrite) for step in program.plan.steps), near


def memory(function):
    """Return, of each call that consumes its inputs, whether it writes over those that the plan
    says, and whether no result is one; and whether another call leaves all inputs.
    """
    called, programs = compiled(function)
    seen = []
    real = ProgramRunner.consume

    def consume(self, inputs):
        before = [(one, one.clone()) for one in inputs if isinstance(one, torch.Tensor)]
        names = [item.name for item in self.plan.inputs if item.spec is not None]
        results = real(self, inputs)
        pairs = zip(names, before, strict=True)
        changed = {name for name, (one, old) in pairs if not torch.equal(one, old)}
        places = {
            one.data_ptr() for name, (one, _) in zip(names, before, strict=True) if name in changed
        }
        apart = places.isdisjoint(one.data_ptr() for one in results if one is not None)
        seen.append([changed == self.plan.overwritten, apart, inputs == []])
        return results

    trained(called)
    ProgramRunner.consume = consume
    trained(called)
    ProgramRunner.consume = real
    program = programs[-1]
    specs = [item.spec for item in program.plan.inputs]
    inputs = [torch.ones(one.sizes, dtype=getattr(torch, one.dtype)) for one in specs]
    inputs = [
        one.as_strided(one.shape, spec.strides) for one, spec in zip(inputs, specs, strict=True)
    ]
    copies = [one.clone() for one in inputs]
    program.run(*inputs)
    return seen, all(map(torch.equal, inputs, copies))


def failing():
    """Return whether a first call that fails at its end ends in torch's gradients."""
    called, programs = compiled(head, keep=False)
    real = ProgramRunner.__call__

    def fails(self, *inputs, **named):
        results = real(self, *inputs, **named)
        if self.plan.overwritten:
            raise RuntimeError("late")
        return results

    ProgramRunner.__call__ = fails
    found = wrong(head, called, (0,))
    ProgramRunner.__call__ = real
    return found, [type(one).__name__ for one in programs]


def several():
    """Return what is wrong where two calls are differentiated in another order than they ran."""
    called, _ = compiled(head)
    found = []
    for _ in range(3):
        x, w = given()
        first, second = (called(x * scale, w)[0] for scale in (1, 2))
        grads = [torch.autograd.grad(one, w)[0] for one in (second, first)]
        expected = [torch.autograd.grad(head(x * scale, w)[0], w)[0] for scale in (2, 1)]
        pairs = zip(grads, expected, strict=True)
        found.append(all(torch.allclose(*pair, 1e-4, 1e-5) for pair in pairs))
    return found


def main():
    found = {one.__name__: of(one) for one in FUNCTIONS}
    found |= {f"{one.__name__} again": of(one) for one in FUNCTIONS}
    found["not kept"] = of(head, keep=False)
    found["retained"] = of(head, (2, 0, 2, 0))
    found["retained, not kept"] = of(head, (2, 0, 2, 0), keep=False)
    found["changing sizes"] = of(head, (2, 0, 0), dynamic=True)
    found["graphs"] = of(head, graphs=True)
    with config.patch(donated_buffer=False):
        found["not donated"] = of(head)
    found |= {f"graph {one.__name__}": graph(one) for one in GRAPHS}
    found["unaligned"] = len(marked(chain, 1).plan.overwritten)
    found |= {
        "memory": [memory(one) for one in (head, twice, outer)],
        "failing": failing(),
        "several": several(),
    }
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
