# SPDX-License-Identifier: Apache-2.0
"""Runs modules forward and backward by torch.compile beside eager torch; prints what differs.

`decomposition_worker.py DIRECTORY [NAME ...]`, with TRITON_INTERPRET=1, prints the operators that
are called too.  A result is right if its error beside float64 is at most twice eager's own, or a
hundred-thousandth of what is usual in it; dtypes, sizes and strides are eager's.
"""

import copy
import json
import os
import sys
from types import SimpleNamespace

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import torch._dynamo
from torch import nn

from bundler.codegen.torch_backend import triton_bundler

F, aten = nn.functional, torch.ops.aten
CASES = {}


def case(*inputs):
    """Note a function or module with its inputs: sizes of random numbers, or what makes one."""

    def note(function):
        CASES[function.__name__.strip("_")] = (function, inputs)
        return function

    return note


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Normed(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.norm = norm or nn.BatchNorm2d(5)

    def forward(self, x):
        return self.norm(x)


heads = [(2, 4, 8, 16)] * 3
statistics = [(4, 5, 6, 7), (5,), (5,), (5,), (5,)]


@case(*heads)
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case(*heads)
def attention_results(q, k, v):
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


@case((4, 5, 6, 7))
class batch_norm(Normed):
    pass


@case(lambda: torch.randn(4, 5, 7, 6).transpose(2, 3))
class batch_norm_transposed(Normed):
    pass


@case(lambda: torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last))
class batch_norm_channels_last(Normed):
    pass


@case((4, 5, 6, 7))
class batch_norm_of_the_batch_alone(Normed):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(5, track_running_stats=False, affine=False))


@case(lambda: torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last))
class batch_norm_in_inference(Normed):
    def forward(self, x):
        self.norm.eval()
        return self.norm(x)


@case((4, 5))
class batch_norm_of_rows(Normed):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(5))


@case((2, 3, 4, 5, 6))
class batch_norm_of_volumes(Normed):
    def __init__(self):
        super().__init__(nn.BatchNorm3d(3))


@case((4, 5, 6, 7))
class instance_norm(Normed):
    def __init__(self):
        super().__init__(nn.InstanceNorm2d(5, affine=True, track_running_stats=True))


@case(*statistics)
def batch_norm_operator(x, weight, bias, mean, variance):
    mean, variance = mean.detach().clone(), variance.detach().abs() + 0.5
    return (
        *torch.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5),
        mean,
        variance,
    )


@case(*statistics)
def batch_norm_with_update(x, weight, bias, mean, variance):
    mean, variance = mean.detach().clone(), variance.detach().abs() + 0.5
    results = aten._batch_norm_with_update(x, weight, bias, mean, variance, 0.1, 1e-5)
    return *results[:3], mean, variance


@case(*statistics)
def batch_norm_no_training(x, weight, bias, mean, variance):
    fixed = mean.detach(), variance.detach().abs() + 0.5
    return aten._native_batch_norm_legit_no_training(x, weight, bias, *fixed, 0.1, 1e-5)[0]


@case(*statistics[:3])
def batch_norm_no_stats(x, weight, bias):
    return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)


@case((4, 8), (6, 8), (6,))
def linear(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


@case((4, 1), (1, 6), (6,))
def outer(x, y, z):
    return x @ y, torch.addmm(z, x, y, beta=0.5, alpha=2)


@case((4, 6), (6,), (4,))
def vectors(x, y, z):
    return x @ y, torch.addmv(z, x, y, beta=0.5, alpha=2), y @ y


@case((2, 3, 8, 8), (4, 3, 3, 3), (4,))
def convolution(x, weight, bias):
    return F.relu(F.conv2d(x, weight, bias, padding=1))


@case(lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
def pools(x):
    return F.adaptive_avg_pool2d(x, (4, 2)).sum(1), F.adaptive_avg_pool2d(x.detach(), (3, 5))


@case((2, 3, 6, 6), (2, 4, 5, 2))
def grid(x, places):
    return F.grid_sample(x, places.tanh(), align_corners=False)


@case((4, 5, 6), (6, 4))
def diagonals(x, y):
    return x.diagonal(-1, 0, 2), x.diagonal_scatter(y, 1, 0, 1)


@case((8, 10))
def activations(x):
    return (
        F.rrelu(x, training=False),
        F.silu(x),
        F.glu(x),
        torch.angle(x),
        torch.lerp(x, x.cos(), 0.7),
    )


@case((6, 8))
def copies(x):
    return aten.view_copy(x.T, [6, 8]), aten.narrow_copy(x, 0, 1, 2), aten.unbind_copy(x)[1]


@case(lambda: torch.randint(1, 100, (20,)), lambda: torch.randint(1, 100, (20,)))
def integers(x, y):
    return torch.lcm(x, y), torch.tril_indices(4, 5), torch.triu_indices(4, 5)


@case((8, 10), lambda: torch.tensor([1, 2, -100, 3, 4, -100, 5, 6]))
def cross_entropy(x, target):
    return F.cross_entropy(x, target, label_smoothing=0.1), F.nll_loss(x, target, reduction="none")


@case((8, 10), (8, 10))
def losses(x, y):
    return F.huber_loss(x, y, delta=0.7), F.smooth_l1_loss(x, y, beta=0.7), F.mse_loss(x, y)


@case((4, 6, 16))
class other_norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(16), nn.LayerNorm(16), nn.GroupNorm(3, 6)])

    def forward(self, x):
        return [norm(x) for norm in self.norms]


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in value for leaf in leaves(part)]


def as_dtype(tensor, dtype):
    """Return a leaf of the graph with the strides of a tensor."""
    if not tensor.is_floating_point():
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype).copy_(tensor)
    return made.requires_grad_(True)


def answer(module, inputs, run):
    """Return results, gradients and buffers."""
    results = leaves(run(*inputs))
    tracked = [result for result in results if result.requires_grad]
    random = torch.Generator().manual_seed(7)
    seeds = [torch.randn(result.shape, generator=random).to(result.dtype) for result in tracked]
    if tracked:
        torch.autograd.backward(tracked, seeds)
    leaves_of_graph = [*inputs, *module.parameters()]
    gradients = [leaf.grad for leaf in leaves_of_graph if leaf.grad is not None]
    buffers = list(module.buffers())
    return SimpleNamespace(
        results=[r.detach() for r in results], gradients=gradients, buffers=buffers
    )


def error(found, exact):
    same = (found == exact) | (found.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, found.double() - exact.double()).square().mean().sqrt())


def difference(ours, eager, exact):
    """Return why a tensor is wrong, None where it is right."""
    kinds = [(one.dtype, one.shape, one.stride()) for one in (ours, eager)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} is not {kinds[1]}"
    if not ours.is_floating_point():
        return None if torch.equal(ours, eager) else "integers differ"
    if not ours.numel():
        return None
    usual = max(float(exact.double().square().mean().sqrt()), 1e-3)
    mine, theirs = error(ours, exact), error(eager, exact)
    return None if mine <= 2 * theirs + 1e-5 * usual else f"error {mine}, eager's {theirs}"


def run(name):
    function, inputs = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = function() if isinstance(function, type) else Called(function)
    given = [one() if callable(one) else torch.randn(one) for one in inputs]
    programs, answers = [], []
    for dtype in (torch.float32, torch.float32, torch.float64):
        mine = copy.deepcopy(module).to(dtype)
        backend = {"backend": triton_bundler, "options": {"programs": programs}, "dynamic": False}
        called = mine if answers else torch.compile(mine, **backend)
        answers.append(answer(mine, [as_dtype(one, dtype) for one in given], called))
    problems = []
    for part in ("results", "gradients", "buffers"):
        columns = [getattr(one, part) for one in answers]
        if len({len(column) for column in columns}) != 1:
            problems.append(f"{part}: {[len(column) for column in columns]}")
            continue
        for place, row in enumerate(zip(*columns, strict=True)):
            wrong = difference(*row)
            problems += [f"{part} {place}: {wrong}"] if wrong else []
    calls = [
        [one.operator for one in getattr(program, "fallbacks", [program])] for program in programs
    ]
    return {"problems": problems, "calls": calls}


print(json.dumps({name: run(name) for name in sys.argv[2:] or CASES}))
