# SPDX-License-Identifier: Apache-2.0
"""`call_step`: calls the operator of a step; what fails says which step it was.  `run` uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bundler.errors import OperatorFailed
from bundler.runtime.program.program_plan import OperatorStep, ProgramPlan


def call_step(
    memory: Any, plan: ProgramPlan, step: OperatorStep, decoded: Callable[[Any], Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Call the operator of a step.

    Args:
        memory: a `ProgramMemory`.
        plan: whose step it is.
        step: one of its steps.
        decoded: makes an argument of what stands in the step.

    Returns:
        Its results, by the names of their buffers, and what it was given.

    Raises:
        OperatorFailed: it returned other results than the plan counts on, or a `CheckedMemory`
            refused the call.
    """
    try:
        arguments = [decoded(item) for item in step.arguments]
        keywords = {name: decoded(item) for name, item in step.keywords.items()}
        result = memory.call(step.operator, arguments, keywords)
    except OperatorFailed as error:
        raise _failed(plan, step, error.message) from error.__cause__
    if step.single:
        results = (result,)
    elif isinstance(result, (list, tuple)):
        results = tuple(result)
    else:
        raise _failed(plan, step, f"expected a tuple of results, got {type(result).__name__}")
    if len(results) != len(step.outputs):
        raise _failed(plan, step, f"expected {len(step.outputs)} results, got {len(results)}")
    named = {
        name: value for name, value in zip(step.outputs, results, strict=True) if name is not None
    }
    for name, value in named.items():
        if not hasattr(value, "shape"):
            raise _failed(plan, step, f"expected a tensor for {name}, got {type(value).__name__}")
    return named, [arguments, keywords]


def _failed(plan: ProgramPlan, step: OperatorStep, reason: str) -> OperatorFailed:
    number = next(place for place, other in enumerate(plan.steps) if other is step)
    return OperatorFailed(
        f"step {number} of the program, {step.operator}: {reason}",
        operator=step.operator,
        step=number,
    )
