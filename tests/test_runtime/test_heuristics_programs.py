# SPDX-License-Identifier: Apache-2.0
"""Programs of their own: our candidates beside those of the installed torch, and a kernel of each
heuristic in the interpreter.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Ten seconds on a machine that has nothing else to do.
LIMIT_S = 280
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 20),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

POINTS, SEED = 5000, 1
# What a float32 sum of thousands of terms may be off by.
ERROR = 5e-4


def run(program, *args, **env):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "TORCHINDUCTOR_"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(HERE / program), *map(str, args)],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or "2.13" not in importlib.metadata.version("torch"),
    reason="the rules are those of torch 2.13",
)
def test_the_rules_choose_what_torch_chooses():
    """On 5,000 random problems torch's own functions give the same configs in the same order, or
    refuse as we do.
    """
    report = run("compare_heuristics.py", POINTS, SEED)
    assert report["points"] == POINTS
    assert report["different"] == []
    # The points are worth something: many lists with several candidates, and few problems that
    # neither can solve.
    assert report["lists"] > POINTS // 3
    assert report["refused"] < POINTS // 10


def test_a_kernel_of_each_heuristic_gives_right_numbers():
    """In Triton's interpreter, without a GPU: every heuristic's blocks and grid cover the problem
    exactly once.
    """
    errors = run("heuristic_kernels.py", TRITON_INTERPRET="1")
    assert len(errors) == 17
    assert {name: error for name, error in errors.items() if error > ERROR} == {}


@pytest.mark.gpu
def test_a_kernel_of_each_heuristic_gives_right_numbers_on_a_gpu(tmp_path):
    """The same kernels, tuned and launched on the device: nothing that tuning does to its clones is
    seen in the results.
    """
    errors = run("heuristic_kernels.py", TRITON_CACHE_DIR=str(tmp_path))
    assert len(errors) == 17
    assert {name: error for name, error in errors.items() if error > ERROR} == {}
