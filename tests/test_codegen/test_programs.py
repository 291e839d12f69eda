# SPDX-License-Identifier: Apache-2.0
"""Programs that are generated, in Triton's interpreter: the numbers of torch, in as few kernels as
expected; `program_cases` holds the functions.
"""

import importlib.util
import json

import pytest

LIMIT_S = 280
# What fails first when a step of the machine breaks: a tile, a mask, a looped and a held row, an
# indirect index, a change of an input, a fallback, a row across memory, a bias, a
# scatter in another order.
FEW = (
    *("transposed", "joined", "looped_sums", "softmax", "put", "changed", "linear"),
    *("batch_norm_of_few_pixels", "biases", "bias_of_positions"),
)
pytestmark = [
    pytest.mark.timeout(LIMIT_S + 20),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.fixture
def run(interpreted, tmp_path):
    """Run a program of this folder, and return what it reports in its last line."""

    def reported(program, *arguments):
        said = interpreted(program, tmp_path, *arguments, timeout=LIMIT_S)
        return json.loads(said.splitlines()[-1])

    return reported


def problems(report):
    return {name: found["problems"] for name, found in report.items() if found["problems"]}


def test_a_few_programs_give_the_numbers_of_torch(run):
    """One program for each step of the machine."""
    report = run("program_worker.py", *FEW)
    assert report.keys() == set(FEW)
    assert problems(report) == {}


@pytest.mark.slow
def test_every_program_gives_the_numbers_of_torch(run):
    """Every function of the list: results, dtypes, strides, changed inputs, number of kernels and
    of operators called as they are.
    """
    report = run("program_worker.py")
    assert len(report) >= len(FEW)
    assert problems(report) == {}


@pytest.mark.slow
def test_torch_compile_runs_forward_and_backward(run):
    """A model through the backend of torch.compile: outputs and gradients of eager mode, also in
    another batch size.
    """
    report = run("backend_worker.py")
    assert report["largest_difference"] < 1e-5
    assert report["graphs"] == 4
    assert report["dynamic"] == [False, False, True, True]
    assert report["fallbacks"] == ["aten.addmm.default", "aten.mm.default"]


@pytest.mark.slow
def test_sizes_may_change_from_call_to_call(run):
    """A program with symbolic sizes gives the numbers of torch for sizes that it was not generated
    for.
    """
    report = run("dynamic_worker.py")
    assert report["shapes"] >= 3
    assert report["largest_difference"] < 1e-5
