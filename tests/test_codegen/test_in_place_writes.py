# SPDX-License-Identifier: Apache-2.0
"""Places of inputs that programs write to, as caches that `index_copy_` adds to: without a copy
where nothing can tell.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


def test_inputs_are_written_where_they_lie_unless_something_could_tell(interpreted):
    """Numbers are eager torch's in any case; who reads the old elements later, or gets the new ones
    as a result, has a copy.
    """
    outcomes = json.loads(interpreted("in_place_worker.py"))
    assert {name for name, (_, equal, _) in outcomes.items() if not equal} == set()
    plain = {name: found for name, found in outcomes.items() if "transposed" not in name}
    made = {name: copies for name, (copies, _, _) in plain.items()}
    assert made == {name: wanted for name, (_, _, wanted) in plain.items()}
