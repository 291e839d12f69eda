# SPDX-License-Identifier: Apache-2.0
"""Places of inputs that programs write to, as caches that `index_copy_` adds to: without a copy
where nothing can tell.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen import generate  # noqa: E402  # needs torch
from bundler.runtime.program.program_plan import Launch  # noqa: E402


def test_inputs_are_written_where_they_lie_unless_something_could_tell(interpreted):
    """Numbers are eager torch's in any case; who reads the old elements later, or gets the new ones
    as a result, has a copy.
    """
    outcomes = json.loads(interpreted("in_place_worker.py"))
    assert {name for name, (_, equal, _) in outcomes.items() if not equal} == set()
    plain = {name: found for name, found in outcomes.items() if "transposed" not in name}
    made = {name: copies for name, (copies, _, _) in plain.items()}
    assert made == {name: wanted for name, (_, _, wanted) in plain.items()}


def test_stores_at_places_that_values_decide_share_a_launch_with_other_elements():
    """No order is open but that of equal places, which torch leaves open, too."""

    def function(cache, places, rows, x):
        cache.index_copy_(0, places, rows)
        return x.exp()

    given = [torch.zeros(9, 50), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 50)]
    program = generate(function, [*given, torch.zeros(70)])
    assert sum(isinstance(step, Launch) for step in program.plan.steps) == 1


def test_a_slow_function_of_few_elements_is_computed_once():
    """By whoever reads it, of many elements by each kernel that does."""

    def function(angles, one, other):
        turns = angles.cos()
        return one * turns, (other * turns).sum(0)

    for length, count in ((64, 1), (1 << 15, 2)):
        given = [torch.zeros(length), torch.zeros(3, length), torch.zeros(70, length)]
        sources = generate(function, given).sources.values()
        assert sum("math.cos(" in source for source in sources) == count
