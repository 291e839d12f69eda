# SPDX-License-Identifier: Apache-2.0
"""Programs that are generated, in Triton's interpreter: the numbers of torch, in as few kernels as
expected; `program_cases` holds the functions.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIMIT_S = 280
# What fails first when a step of the machine breaks: a tile, a mask, a looped and a held row, an
# indirect index, a change of an input, a fallback.
FEW = ("transposed", "joined", "looped_sums", "softmax", "put", "changed", "linear")
pytestmark = [
    pytest.mark.timeout(LIMIT_S + 20),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


def run(program, *args, **env):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "TORCH"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(HERE / program), *map(str, args)],
        env=clean | {"PYTHONPATH": str(HERE)} | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def problems(report):
    return {name: found["problems"] for name, found in report.items() if found["problems"]}


def test_a_few_programs_give_the_numbers_of_torch(tmp_path):
    """One program for each step of the machine."""
    report = run("program_worker.py", tmp_path, *FEW, TRITON_INTERPRET="1")
    assert report.keys() == set(FEW)
    assert problems(report) == {}


@pytest.mark.slow
def test_every_program_gives_the_numbers_of_torch(tmp_path):
    """Every function of the list: results, dtypes, strides, changed inputs, number of kernels and
    of operators called as they are.
    """
    report = run("program_worker.py", tmp_path, TRITON_INTERPRET="1")
    assert len(report) >= len(FEW)
    assert problems(report) == {}


@pytest.mark.slow
def test_torch_compile_runs_forward_and_backward(tmp_path):
    """A model through the backend of torch.compile: outputs and gradients of eager mode, also in
    another batch size.
    """
    report = run("backend_worker.py", tmp_path, TRITON_INTERPRET="1")
    assert report["largest_difference"] < 1e-5
    assert report["graphs"] == 4
    assert report["dynamic"] == [False, False, True, True]
    assert report["fallbacks"] == ["aten.addmm.default", "aten.mm.default"]


@pytest.mark.slow
def test_sizes_may_change_from_call_to_call(tmp_path):
    """A program with symbolic sizes gives the numbers of torch for sizes that it was not generated
    for.
    """
    report = run("dynamic_worker.py", tmp_path, TRITON_INTERPRET="1")
    assert report["shapes"] >= 3
    assert report["largest_difference"] < 1e-5
