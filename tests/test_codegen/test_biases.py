# SPDX-License-Identifier: Apache-2.0
"""Which products are called without their bias, which the kernels that read them add."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from bundler.codegen.biases import added_behind  # noqa: E402
from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.runtime.program.program_plan import Launch, OperatorStep  # noqa: E402

X, WEIGHT, BIAS = (2, 3, 4), (5, 4), (5,)


def example(dtype=torch.float32):
    return [torch.randn(size, dtype=dtype) for size in (X, WEIGHT, BIAS)]


def gelu_of_linear(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def called(function, inputs, **options):
    program = generate(function, inputs, **options)
    return [step.operator for step in program.plan.steps if isinstance(step, OperatorStep)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_computes_of_each_element_adds_the_bias(dtype, device):
    """As in TorchInductor, through views of the product, in no more launches."""
    inputs = example(dtype)
    assert called(gelu_of_linear, inputs, device=device) == ["aten.mm.default"]
    launches = generate(gelu_of_linear, inputs, device=device).plan.steps
    assert sum(isinstance(step, Launch) for step in launches) == 1


def test_halves_are_rounded_once():
    """The sum of a product and its bias is rounded; the product alone would be, too."""
    function = lambda *given: F.linear(*given).relu()  # noqa: E731
    assert called(function, example()) == ["aten.mm.default"]
    assert called(function, example(torch.bfloat16)) == ["aten.addmm.default"]


@pytest.mark.parametrize(
    "function",
    [
        F.linear,
        lambda *given: F.gelu(F.linear(*given)).sum() + F.linear(*given).sum(),
        lambda *given: F.linear(*given).softmax(-1),
        lambda x, weight, bias: F.linear(F.linear(x, weight, bias), weight.t()),
        lambda x, weight, bias: torch.addmm(bias, x[0], weight.t(), beta=2).relu(),
        lambda x, weight, bias: torch.addmm(bias, x[0], weight.t(), alpha=2).relu(),
    ],
    ids=["result", "also a sum", "softmax", "product", "beta", "alpha"],
)
def test_others_are_given_the_whole_sum(function):
    """A reduction or an operator that is called would need a launch more, and what is scaled is
    rounded otherwise.
    """
    assert "aten.addmm.default" in called(function, example())


def test_a_product_that_a_kernel_computes_keeps_its_bias():
    """A template adds it itself."""
    graph = make_fx(gelu_of_linear, tracing_mode="fake")(*example())
    assert len(added_behind(graph)) == 1
    assert not called(gelu_of_linear, example(), options=GenerateOptions(templates="all"))
