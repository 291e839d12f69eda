# SPDX-License-Identifier: Apache-2.0
"""A program whose first call fails under torch.compile: the graph runs as torch has it, unless
torch refuses the values itself.
"""

import json

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")


def test_a_first_call_that_fails_ends_in_the_graph_as_torch_has_it(interpreted, tmp_path):
    """Results, changed inputs and random numbers are eager torch's, and the reason is told."""
    found = json.loads(interpreted("first_call_worker.py", tmp_path))
    wrong, (reason,) = found["wrong rule"]
    assert wrong == []
    assert "its first call failed: UnsupportedOperator: first_calls.halved" in reason
    wrong, (reason,) = found["no kernel"]
    assert wrong == []
    assert "no_such_name" in reason
    told, right, programs = found["refused"]
    assert "numbers below 3" in told
    assert right
    assert programs == ["Program"]
