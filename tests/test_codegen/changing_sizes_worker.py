# SPDX-License-Identifier: Apache-2.0
"""Runs functions of sizes that change through torch.compile and `generate`, for several sizes,
beside eager torch; prints what differs; TRITON_INTERPRET=1.
"""

import json
import os
import sys
import warnings

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from bundler.codegen.program import generate
from bundler.codegen.torch_backend import triton_bundler

warnings.filterwarnings("ignore")
SIZES = (4, 6, 9)
torch.manual_seed(0)
conv = torch.nn.Conv2d(3, 8, 3, padding=1)
norm = torch.nn.BatchNorm2d(8).eval()
table = torch.nn.Embedding(16, 8)


def attention(x):
    q = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


def numbers(x):
    n = x.shape[0]
    y = torch.full((n,), n / 3) + x[:, 0] * torch.sym_sqrt(n) + torch.sym_max(n, 5) * n**-0.5
    y = torch.clamp(y, -1 / n, n / 9) + torch.where(x[:, 0] > 1 / n, 1 / n, n / 7)
    y = torch.add(y, x[:, 1], alpha=1.0 / n).masked_fill(x[:, 2] > n / 5, n / 7)
    return y + torch.arange(0, n, 1.0), n / 3


def into_slices(x, y):
    x = x.clone()
    x[1:-1] = 2.0
    x[-3:, ::2] += y[-3:, ::2]
    x[: y.shape[0] // 2, 1:] = y[: y.shape[0] // 2, 1:]
    x[1::2, -2:] *= 3
    return x


def of_five_columns(n):
    x = torch.randn(n, 5)
    torch._dynamo.mark_static(x, 1)  # else nobody knows that windows of three do not overlap
    return x


def scattered(x, y):
    """What backward of slices is made of."""
    n = x.shape[0]
    rows = torch.slice_scatter(torch.zeros_like(x), y[: n - 2].cos(), 0, 1, -1)
    windows = torch.as_strided_scatter(x.exp(), y[:, :3] * 2, (n, 3), (5, 1), 1)
    return rows, windows, torch.slice_scatter(x, y[:, 1::3], 1, 1, None, 3)


def maxima(x):
    y, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    return backward(y.exp(), x, [3, 3], [2, 2], [1, 1], [1, 1], False, places)


CASES = {
    "scattered": (scattered, lambda n: [of_five_columns(n), torch.randn(n, 5)]),
    "slices": (into_slices, lambda n: [torch.randn(n, 5), torch.randn(n, 5)]),
    "numbers": (numbers, lambda n: [torch.randn(n, 5)]),
    "float64": (
        lambda x: x * (1.0 / x.shape[0]) + x.shape[0] ** 0.5,
        lambda n: [torch.randn(n, 5).double()],
    ),
    "integers": (
        lambda x: (x > x.shape[0] / 3.0, x * (x.shape[0] / 3)),
        lambda n: [torch.arange(5 * n).view(n, 5)],
    ),
    "batch norm": (lambda x: norm(conv(x)).relu(), lambda n: [torch.randn(n, 3, 5, 5)]),
    "layer norm": (lambda x: F.layer_norm(x, (8,)) / x.shape[0], lambda n: [torch.randn(n, 3, 8)]),
    "attention": (attention, lambda n: [torch.randn(2, n, 8)]),
    "moments": (
        lambda x: (x.mean(0), x.var(0), x.std(), x.sum(0) / x.shape[0]),
        lambda n: [torch.randn(n, 6)],
    ),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        lambda n: [torch.randn(2, 3, n, n)],
    ),
    "positions": (lambda x: x + table(torch.arange(x.shape[1])), lambda n: [torch.randn(2, n, 8)]),
    "cross entropy": (F.cross_entropy, lambda n: [torch.randn(n, 7), torch.arange(n) % 7]),
    "cat": (
        lambda x, y: torch.cat([x, y])[x.shape[0] // 2 :] * 2,
        lambda n: [torch.randn(n, 11), torch.randn(n + 1, 11)],
    ),
    "view": (
        lambda x: x.view(x.shape[0], -1)[:1].expand(x.shape[0], -1) + 1,
        lambda n: [torch.randn(n, 5, 2)],
    ),
    "strided": (
        lambda x: x.flip(0) / x.shape[0] + x.roll(x.shape[0] // 2, 0),
        lambda n: [torch.randn(5, n).t()],
    ),
    "stack": (
        lambda x: torch.stack([torch.zeros_like(x), x.exp()], 1).sum(0),
        lambda n: [torch.randn(n)],
    ),
    "maxima": (maxima, lambda n: [torch.randn(n, 2, 2 * n, n + 1)]),
    "constant": (
        lambda x: x / torch.sqrt(torch.tensor(64.0)) + torch.tensor(2).item(),
        lambda n: [torch.randn(n, 5)],
    ),
}


def differs(found, expected):
    for got, want in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(want, torch.Tensor):
            if (type(got), got) != (type(want), want):
                return f"{got!r} is not {want!r}"
            continue
        close = (
            {"rtol": 1e-14, "atol": 1e-14}
            if want.dtype == torch.float64
            else {"rtol": 1e-4, "atol": 1e-5}
        )
        try:
            torch.testing.assert_close(got, want, **close)
        except AssertionError as error:
            return str(error)
    return ""


wrong, whole, scatters = {}, [], []
for name, (function, inputs) in CASES.items():
    torch._dynamo.reset()
    programs = []
    options = {"programs": programs}
    compiled = torch.compile(function, backend=triton_bundler, dynamic=True, options=options)
    with torch.no_grad():
        program = generate(function, inputs(SIZES[0]), dynamic=True)
        for size in SIZES:
            given = inputs(size)
            expected = function(*given)
            for way, run in (("compile", compiled), ("generate", program.run)):
                if difference := differs(run(*given), expected):
                    wrong[f"{name} {way} {size}"] = difference
    made = [found for found in programs if hasattr(found, "plan")]
    scatters += [
        call.operator for one in made for call in one.fallbacks if "scatter" in call.operator
    ]
    whole += [name for found in programs if not hasattr(found, "plan")]
print(json.dumps({"cases": len(CASES), "wrong": wrong, "whole": whole, "scatters": scatters}))
