# SPDX-License-Identifier: Apache-2.0
"""How much memory a program has at once: the order of its steps, and what of it is stored."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen import generate  # noqa: E402
from bundler.runtime.program.device_tensors import item_bytes, span  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Allocate,
    Launch,
    OperatorStep,
    Release,
)
from tests.test_codegen import peak_worker  # noqa: E402  # needs torch

MEGABYTE = 1 << 20


def program_of(function, *shapes, dtypes=()):
    """Return a function's program for tensors without memory."""
    dtypes = dtypes or [torch.float32] * len(shapes)
    given = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return generate(function, given)


def peak_of(plan):
    """Return how many bytes a program has at most, beyond its inputs."""
    held, most = {}, 0
    for step in plan.steps:
        if isinstance(step, Allocate):
            held[step.name] = _bytes(step.spec)
        elif isinstance(step, OperatorStep):
            made = zip(step.outputs, step.results, strict=True)
            held |= {name: _bytes(spec) for name, spec in made if name is not None}
        elif isinstance(step, Release):
            held.pop(step.name, None)
        most = max(most, sum(held.values()))
    return most


def _bytes(spec):
    return span(spec.sizes, spec.strides) * item_bytes(spec.dtype)


@pytest.mark.parametrize("function", [peak_worker.shortcut, peak_worker.early])
def test_what_waits_through_the_widest_part_of_a_program_is_read_before_or_made_behind(function):
    """4 MB lie in memory between where they are written and read; 16 MB are there at the peak."""
    shapes = (512, 64), (64, 2048), (2048, 4096), (2048, 2048), (4096, 2048), (4096, 4096)
    if function is peak_worker.shortcut:
        shapes = *shapes[:3], (2048, 64), (4096, 64), shapes[-1]
    assert peak_of(program_of(function, *shapes).plan) < 17 * MEGABYTE


def test_equal_results_of_one_kernel_are_stored_once():
    program = program_of(
        peak_worker.masks, (512, 512), (512, 512), dtypes=(torch.float32, torch.bool)
    )
    masks = [step for step in program.plan.steps if isinstance(step, Allocate)]
    assert len(masks) == 1
    assert sum(isinstance(step, Launch) for step in program.plan.steps) == 2


def test_what_is_converted_to_a_wider_dtype_is_stored_in_the_narrow_one():
    images = [(2, 3, 64, 64)] * 7
    program = program_of(peak_worker.widened, *images, dtypes=[torch.bfloat16] * 7)
    stored = [step.spec for step in program.plan.steps if isinstance(step, Allocate)]
    whole = {spec.dtype for spec in stored if spec.sizes == images[0]}
    assert whole == {"bfloat16"}


@pytest.mark.parametrize("length", [512, 4096])
def test_a_softmax_is_written_over_what_it_is_of(length):
    """But what is not stored in the last pass over the rows has memory of its own."""
    shapes = (64, 32), (32, length)
    steps = program_of(peak_worker.softmax, *shapes).plan.steps
    assert not any(isinstance(step, Allocate) for step in steps)
    steps = program_of(peak_worker.scaled_softmax, *shapes).plan.steps
    made = [step.spec for step in steps if isinstance(step, Allocate)]
    assert sorted(spec.dtype for spec in made if spec.sizes == (64, length)) == [
        "float16",
        "float32",
    ]


def test_orders_and_stores_change_no_number(interpreted):
    """Each result has memory of its own, and what is changed later is read before."""
    outcomes = json.loads(interpreted("peak_worker.py"))
    assert {name: found for name, found in outcomes.items() if found} == {}
    assert len(outcomes) == len(peak_worker.CASES) + 2 * len(peak_worker.ROWS)
