# SPDX-License-Identifier: Apache-2.0
"""Gradients of a weight that several layers share are added up as they are made.

Run as a program: `gradient_sum_cases.py [OPTIONS OF PYTEST]`, with TRITON_INTERPRET=1.
"""

import contextlib
import os
import sys

import pytest
import torch

from bundler.codegen import gradient_sums
from bundler.codegen.program import generate
from bundler.codegen.torch_backend import triton_bundler
from bundler.runtime.program.program_plan import OperatorStep

ROWS, COLUMNS = 5, 3


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Every matrix counts as large."""
    monkeypatch.setattr(gradient_sums, "_LEAST_BYTES", 1)


def example(count, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(7, width, dtype=dtype) for width in (ROWS, COLUMNS) for _ in range(count)]


def turned(*given):
    """The sum as backward has it: products turned, each added when it was made."""
    left, right = given[: len(given) // 2], given[len(given) // 2 :]
    total = None
    for one, other in zip(left, right, strict=True):
        product = (one.t() @ other).t()
        total = product if total is None else product + total
    return total


def plain(*given):
    left, right = given[: len(given) // 2], given[len(given) // 2 :]
    total = left[0].t() @ right[0]
    for one, other in zip(left[1:], right[1:], strict=True):
        total = total + one.t() @ other
    return total.relu()


def called(program):
    return [step.operator for step in program.plan.steps if isinstance(step, OperatorStep)]


@pytest.mark.parametrize("function", [turned, plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_products_are_added_as_they_are_made(function, dtype):
    given = example(5, dtype)
    program = generate(function, given)
    assert called(program) == ["aten.mm.default"] + ["aten.addmm.default"] * 4
    (found,) = program.run(*given)
    wanted = function(*given)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", [turned, plain])
def test_halves_are_rounded_no_more_than_by_eager_torch(function):
    """A product is not rounded before it is added."""
    given = example(8, torch.bfloat16)
    exact = function(*[one.double() for one in given])
    program = generate(function, given)
    assert called(program).count("aten.addmm.default") == 7
    found = (program.run(*given)[0], function(*given))
    ours, eager = ((one.double() - exact).square().mean() for one in found)
    assert ours <= eager


def of_three(*given):
    return turned(*given[:3], *given[4:7])


def scaled(*given):
    return torch.add(plain(*given), turned(*given).t(), alpha=2)


def first_known_last(*given):
    """What a product is added to comes behind it."""
    products = [one.t() @ other for one, other in zip(given[:4], given[4:], strict=True)]
    others = [one.sin() for one in products[::-1]]
    return sum(others[1:], others[0])


def read_elsewhere(*given):
    """Each product is a result, too."""
    products = [one.t() @ other for one, other in zip(given[:4], given[4:], strict=True)]
    return products[0] + products[1] + products[2] + products[3], *products


@pytest.mark.parametrize("function", [of_three, first_known_last, read_elsewhere])
def test_others_are_added_by_a_kernel(function):
    given = example(4)
    program = generate(function, given)
    assert set(called(program)) == {"aten.mm.default"}
    wanted = function(*given)
    results = wanted if isinstance(wanted, tuple) else (wanted,)
    for one, other in zip(program.run(*given), results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_scaled_term_is_added_by_a_kernel():
    given = example(4)
    program = generate(scaled, given)
    assert called(program).count("aten.addmm.default") == 6
    torch.testing.assert_close(program.run(*given)[0], scaled(*given))


def test_small_matrices_are_added_by_one_kernel(monkeypatch):
    monkeypatch.setattr(gradient_sums, "_LEAST_BYTES", ROWS * COLUMNS * 4 + 1)
    assert set(called(generate(plain, example(5)))) == {"aten.mm.default"}


def test_layers_that_share_weights_get_eager_gradients():
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6)

    def loss(x):
        for _ in range(5):
            x = x + torch.tanh(layer(x))
        return x.square().sum()

    programs, x = [], torch.randn(4, 6)
    options = {"programs": programs}
    compiled = torch.compile(loss, backend=triton_bundler, options=options)
    found = torch.autograd.grad(compiled(x), [*layer.parameters()])
    wanted = torch.autograd.grad(loss(x), [*layer.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    # Of five layers, the first product begins the sum.
    assert called(programs[-1]).count("aten.addmm.default") == 4


if __name__ == "__main__":
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:logging", "--noconftest", "-c", os.devnull]
    with contextlib.redirect_stdout(sys.stderr):
        sys.exit(pytest.main([__file__, *plain, *sys.argv[1:]]))
