# SPDX-License-Identifier: Apache-2.0
"""A function that changes an input and returns it: the program returns the input's own memory, and
stores each number once.
"""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.program.program_plan import Allocate, Launch  # noqa: E402


def steps(program, kind):
    return [step for step in program.plan.steps if isinstance(step, kind)]


def test_a_changed_input_that_is_returned_is_not_stored_twice():
    """What the function returns is the input itself, so no memory is taken for it."""

    def function(a, b):
        a.mul_(2).add_(b)
        return a, b + 1

    program = generate(function, [torch.ones(64), torch.ones(64)])
    assert program.plan.outputs[0].buffer == "arg0"
    assert len(steps(program, Allocate)) == 1
    assert [len(step.arguments) for step in steps(program, Launch)] == [
        4
    ]  # both inputs, one result, the size


@pytest.mark.parametrize(
    "returned",
    [lambda a: a.clone(), lambda a: a + 0.0, lambda a: a.t().contiguous()],
    ids=["copy", "sum", "turned"],
)
def test_what_is_no_changed_input_has_memory_of_its_own(returned):
    """A copy of a changed input, and one in another order, are results of their own."""

    def function(a):
        a.mul_(2)
        return returned(a)

    program = generate(function, [torch.ones(8, 8)])
    assert program.plan.outputs[0].buffer != "arg0"


@pytest.mark.parametrize(
    "seen", [lambda a: a.t(), lambda a: a[1:, ::2], lambda a: a.view(-1), lambda a: a.t_()]
)
def test_a_view_of_a_changed_input_shares_its_memory(seen):
    """What eager torch returns as a view of an input that the function changes is one."""

    def function(a):
        a.mul_(2)
        return seen(a)

    program = generate(function, [torch.ones(8, 8)])
    example = torch.ones(8, 8)
    expected, output = seen(example), program.plan.outputs[0]
    assert output.buffer == "arg0"
    assert output.spec.sizes == tuple(expected.shape)
    assert output.spec.strides == expected.stride()
    assert output.spec.offset == expected.storage_offset()


def test_a_view_before_the_change_is_not_the_input():
    """A result that was computed from what the input held before is not confused with it."""

    def function(a):
        old = a + 0.0
        a.mul_(2)
        return old, a

    program = generate(function, [torch.ones(64)])
    buffers = [output.buffer for output in program.plan.outputs]
    assert buffers[1] == "arg0"
    assert buffers[0] != "arg0"
