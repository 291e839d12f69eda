# SPDX-License-Identifier: Apache-2.0
"""Masks: with whatever blocks a kernel is launched, it computes the same and touches nothing beside
its tensors.
"""

import json

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 80])
def test_kernels_touch_nothing_beside_their_tensors_whatever_the_blocks(
    interpreted, tmp_path, first
):
    """Random functions, launched with random blocks in memory with borders of NaN, give torch's
    numbers and leave the borders alone.
    """
    assert json.loads(interpreted("mask_worker.py", tmp_path, first, 80, timeout=280)) == {}


def test_a_border_that_is_written_is_seen(beside, monkeypatch):
    """One element written before or behind a tensor is counted, and one inside is not."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    memory = beside("mask_worker").BorderedMemory()
    tensor = memory.allocate("float32", (3, 5), (5, 1))
    whole = memory.allocate("bool", (7,), (1,))
    tensor.fill_(2.0)
    whole.fill_(True)
    assert memory.written() == 0
    tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).fill_(1.0)
    whole.as_strided((1,), (1,), whole.storage_offset() + 7).fill_(True)
    assert memory.written() == 2
