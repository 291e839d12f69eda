# SPDX-License-Identifier: Apache-2.0
"""Products whose rows do not begin at multiples of 16 bytes: results become kernels, operands get
zeros behind their lines.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bundler.codegen import GenerateOptions, generate, torch_backend, uneven_products
from bundler.codegen.decompositions import decompositions

BY_RULE = GenerateOptions(templates="by rule")
HALF = torch.bfloat16
aten = torch.ops.aten


class Products(TorchDispatchMode):
    """Keeps the operands of each product."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.mm.default:
            self.operands.append(args)
        return func(*args, **kwargs or {})


def head(hidden, weight, bias):
    return F.linear(hidden, weight, bias).float().sum(-1)


@pytest.mark.parametrize(
    ("rows", "columns", "length", "dtype", "options", "is_called"),
    [
        (256, 2049, 1536, HALF, BY_RULE, False),
        (256, 2050, 1536, torch.float16, BY_RULE, False),
        (256, 2048, 1536, HALF, BY_RULE, True),
        (256, 2049, 1535, HALF, BY_RULE, True),
        (256, 2049, 1536, torch.float32, BY_RULE, True),
        (16, 2049, 4096, HALF, BY_RULE, True),
        (256, 2049, 1536, HALF, GenerateOptions(), True),
    ],
)
def test_large_products_with_uneven_rows_are_kernels(
    rows, columns, length, dtype, options, is_called
):
    """In 16 bits, where their operands are even; others are called, and all without the rule."""
    inputs = [
        torch.empty(sizes, dtype=dtype) for sizes in ((rows, length), (columns, length), (columns,))
    ]
    program = generate(head, inputs, device="cuda", options=options)
    assert bool(program.fallbacks) == is_called
    assert any(name.startswith("triton_mm") for name in program.kernels) != is_called


@pytest.mark.parametrize("turned", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(33, 17, 41), (32, 17, 40), (33, 16, 40), (32, 16, 41)], ids=str)
def test_uneven_operands_get_zeros_behind_their_lines(monkeypatch, sizes, turned):
    """In whatever order both lie, the product is the same, and of even matrices where it is taken
    apart at all.
    """
    monkeypatch.setattr(uneven_products, "_is_judged", lambda *_: True)
    rows, length, columns = sizes
    pair = [torch.randn(rows, length).to(HALF), torch.randn(length, columns).to(HALF)]
    for place in turned:
        pair[place] = pair[place].t().contiguous().t()
    even = [max(one.stride()) % 8 == 0 for one in pair]
    with Products() as seen:
        found = uneven_products.with_even_operands(*pair)
    if all(even):
        assert found is NotImplemented
        return
    torch.testing.assert_close(found, pair[0] @ pair[1], rtol=1e-2, atol=1e-2)
    (given,) = seen.operands
    assert all(max(one.stride()) % 8 == 0 for one in given)
    assert (found.shape, found.stride()) == ((rows, columns), (columns, 1))


@pytest.mark.parametrize(
    ("left", "right", "dtype", "device", "is_judged"),
    [
        ((513, 1), (1024, 1), HALF, "cuda", True),
        ((1, 513), (1024, 1), HALF, "cuda", True),
        ((0, 1), (1024, 1), HALF, "cuda", False),
        ((1026, 2), (1024, 1), HALF, "cuda", False),
        ((513, 1), (1024, 1), torch.float32, "cuda", False),
        ((513, 1), (1024, 1), HALF, "cpu", False),
    ],
)
def test_matrices_that_lie_in_lines_on_a_gpu_are_judged(left, right, dtype, device, is_judged):
    """Not a row that stands for many, nor other types, nor other devices."""
    with FakeTensorMode():
        pair = [
            torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            for sizes, strides in (((513, 513), left), ((513, 1024), right))
        ]
        assert uneven_products._is_judged(*pair) == is_judged


def test_torch_compile_takes_products_apart_by_both_rules(monkeypatch):
    """A column times a row is one product for each element, as ever; others get even rows."""
    column, row = torch.randn(5, 1), torch.randn(1, 7)
    assert torch.equal(torch_backend._product(column, row), column * row)
    left, right = torch.randn(6, 9).to(HALF), torch.randn(9, 8).to(HALF)
    assert torch_backend._product(left, right) is NotImplemented
    monkeypatch.setattr(uneven_products, "_is_judged", lambda *_: True)
    with Products() as seen:
        torch_backend._product(left, right)
    assert [tuple(one.shape) for one in seen.operands[0]] == [(6, 16), (16, 8)]
    assert decompositions()[aten.mm.default](left, right) is NotImplemented


# -------------------------------------------------------------------------------------------- A GPU


@pytest.mark.gpu
def test_a_head_and_its_gradients_are_eager_torchs(tmp_path, monkeypatch):
    """Logits lie as eager torch's; results are as near to float64's as eager's, and half again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    weight = torch.randn(2049, 1024, device="cuda", dtype=HALF) / 32
    hidden = torch.randn(256, 1024, device="cuda", dtype=HALF)
    labels = torch.randint(0, 2049, (256,), device="cuda")

    def step(hidden, weight):
        logits = hidden @ weight.t()
        return logits, F.cross_entropy(logits.float(), labels)

    def results(function, dtype):
        given = [one.to(dtype).detach().requires_grad_() for one in (hidden, weight)]
        logits, loss = function(*given)
        loss.backward()
        return [logits.detach(), loss.detach(), *(one.grad for one in given)]

    programs = []
    compiled = torch.compile(
        step, backend="triton_bundler", options={"programs": programs, "keep": False}
    )
    ours, eager, exact = results(compiled, HALF), results(step, HALF), results(step, torch.float64)
    assert any(name.startswith("triton_mm") for name in programs[0].kernels)
    assert [one.stride() for one in ours] == [one.stride() for one in eager]
    for one, other, truth in zip(ours, eager, exact, strict=True):
        off, allowed = ((it.double() - truth).norm() / truth.norm() for it in (one, other))
        assert off <= 1.5 * allowed + 1e-4
