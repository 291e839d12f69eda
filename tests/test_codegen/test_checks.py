# SPDX-License-Identifier: Apache-2.0
"""Operators without results, which are called for what they check: where in a program, and of which
kind.
"""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.program.allowed_operators import unlisted  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Launch,
    OperatorStep,
    read_plan,
)


def test_a_check_comes_before_an_input_is_changed():
    """It is called though nobody reads a result of it, and what stands behind it in the function
    has not been done.
    """

    def function(x):
        torch._assert_async((x > 0).all(), "positive numbers")
        y = x + 1
        x.mul_(2)
        return y

    plan = generate(function, [torch.ones(64)]).plan
    kinds = [type(step) for step in plan.steps]
    (check,) = (step for step in plan.steps if isinstance(step, OperatorStep))
    assert check.operator == "aten._assert_async.msg"
    assert check.outputs == check.results == (None,)
    writes = [n for n, step in enumerate(plan.steps) if isinstance(step, Launch)]
    assert kinds.index(OperatorStep) == writes[0] + 1  # the first kernel computes the condition
    assert "@arg0" not in plan.steps[writes[0]].arguments[1:]
    assert unlisted(read_plan(plan.to_json())) == ()


def test_called_operators_wait_for_a_check():
    """What an operator refuses is refused before another operator counts on it."""
    plan = generate(torch.linalg.inv, [torch.eye(3)]).plan
    calls = [step.operator for step in plan.steps if isinstance(step, OperatorStep)]
    assert calls == ["aten.linalg_inv_ex.default", "aten._linalg_check_errors.default"]


def test_torch_compile_calls_a_check_that_torch_orders_by_a_token():
    """No graph runs as torch has it, and what the check refuses is refused."""
    programs = []
    compiled = torch.compile(
        torch.linalg.inv, backend="triton_bundler", options={"programs": programs}
    )
    torch.testing.assert_close(compiled(torch.eye(3) * 2), torch.eye(3) / 2)
    called = [one.operator for program in programs for one in program.fallbacks]
    assert "aten._linalg_check_errors.default" in called
    with pytest.raises(RuntimeError, match="singular"):
        compiled(torch.zeros(3, 3))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_a_check_that_tracing_has_made_is_not_made_again():
    """torch.export asks for dtypes and devices before each conversion."""
    given = torch.ones(4)
    exported = torch.export.export(_Converted(), (given,))
    assert "_assert_tensor_metadata" in str(exported.graph)
    assert generate(exported, [given]).fallbacks == ()


class _Converted(torch.nn.Module):
    def forward(self, x):
        return x.to(torch.float64) + 1


def test_a_result_that_nobody_reads_is_not_kept():
    """Nor is it compared with what torch traced, which may be wrong, as of the workspace of a
    recurrent layer.
    """
    (call,) = (
        step
        for step in generate(lambda x: torch.linalg.svd(x)[1], [torch.eye(3)]).plan.steps
        if isinstance(step, OperatorStep)
    )
    assert [name is not None for name in call.outputs] == [False, True, False]
