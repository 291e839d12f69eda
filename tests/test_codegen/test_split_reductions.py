# SPDX-License-Identifier: Apache-2.0
"""Reductions of few long rows in pieces, also where the length of rows changes from call to
call.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen import generate  # noqa: E402  # needs torch
from bundler.runtime.program.program_plan import Launch  # noqa: E402


@pytest.mark.slow
def test_rows_of_any_length_are_reduced_in_pieces(interpreted):
    """Shorter than there are pieces, and longer than the example's; variances of rows without a
    divisor near the number of pieces; places of equal numbers and of NaN.
    """
    outcomes = json.loads(interpreted("split_worker.py"))
    assert {name: wrong for name, (_, wrong) in outcomes.items() if wrong} == {}
    assert {launches for launches, _ in outcomes.values()} == {2}


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x: x.sum(), (3_000_000,)),
        (torch.var_mean, (3_000_000,)),
        (lambda x: x.amax(1), (4, 700_000)),
        (lambda x: x.argmin(1), (4, 700_000)),
        (lambda x: x.sum((1, 2)), (4, 700, 1000)),
        (lambda x: x.amax((0, 1)), (700, 1000, 64)),
    ],
)
def test_one_program_reduces_long_rows_of_any_length_in_two_launches(function, sizes):
    """One kernel would leave a GPU idle but for as many programs as there are rows; rows may be of
    several dimensions, and memory may run across them.
    """
    program = generate(function, [torch.empty(sizes)], dynamic=True)
    assert sum(isinstance(step, Launch) for step in program.plan.steps) == 2


def test_a_sum_of_everything_shares_the_kernel_of_its_rows():
    """Cut into these rows, so that each is read where it was reduced."""

    def divergence(a, b):
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        return torch.nn.functional.kl_div(a, b, log_target=True, reduction="batchmean")

    found = {}
    for rows in (264, 263):
        program = generate(divergence, [torch.empty(rows, 4096)] * 2)
        found[rows] = sum(isinstance(step, Launch) for step in program.plan.steps)
    assert found[264] == 2 < found[263]


@pytest.mark.parametrize("sizes", [(3000,), (500, 3000)])
def test_short_rows_and_many_rows_are_one_kernel(sizes):
    """The example's length decides."""
    assert len(generate(lambda x: x.sum(-1), [torch.empty(sizes)], dynamic=True).kernels) == 1


@pytest.mark.slow
def test_kernels_of_changing_rows_compile_for_both_makers():
    """Sums and variances, along memory and across it."""
    program = generate(
        lambda x: (x.sum(), torch.var_mean(x), x.view(-1, 8).sum(0)),
        [torch.empty(3_000_000)],
        dynamic=True,
    )
    targets = ["cuda:90", "hip:gfx942"]
    assert len(program.build(targets).kernels) == len(targets) * len(program.kernels)


@pytest.mark.parametrize(
    ("function", "readers"),
    [(lambda a, b: a * b, 1), (lambda a, _: a * 2, 2)],
)
def test_what_is_returned_is_read_where_it_was_stored(function, readers):
    """A sum across rows reads the product that is returned, one tensor instead of two; what is made
    of one tensor is computed again.
    """

    def both(a, b):
        made = function(a, b)
        return made, made.sum(0)

    program = generate(both, [torch.zeros(8192, 1024, device="meta") for _ in range(2)])
    launches = [step for step in program.plan.steps if isinstance(step, Launch)]
    assert sum("@arg0" in step.arguments for step in launches) == readers
