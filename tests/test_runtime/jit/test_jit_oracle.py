# SPDX-License-Identifier: Apache-2.0
"""What reaches the driver through our launchers is what reaches it through Triton's own, for every
kind of launch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import compiling
import pytest

from bundler.runtime.launch.jit import jit_modules

ORACLE = Path(__file__).with_name("jit_oracle.py")
pytestmark = [pytest.mark.slow, pytest.mark.toolchain]
# Triton launches with what it could not convert, and raises afterwards; ours raises before.
RAISED_EARLIER = (
    "pointer -1",
    "pointer 18446744073709551616",
    "fp16 100000.0",
    "fp16 3e+38",
    "fp16 1e+39",
    "fp16 -1e+300",
)
# Triton multiplies sizes in 32 bits: this grid looks empty to it, and nothing is launched.
LAUNCHED_ALL_THE_SAME = ("grid (1048576, 1048576, 1)",)


def run(way, fake_cuda, folder, **more):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env = clean | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "HOME": str(folder),
        "LD_LIBRARY_PATH": str(fake_cuda),
        **more,
    }
    line = [sys.executable, "-P", "-W", "ignore", str(ORACLE), way, str(fake_cuda / "libcuda.so.1")]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def outcomes(found):
    """Drop what a release words in its own way: who raises a TypeError for 3.6's 64 bits, and what
    a map could not be made of.
    """
    for name, row in found.items():
        if isinstance(row["said"], list) and (name.startswith(("u64", "fill_tma"))):
            row["said"] = row["said"][0]
    return found


@pytest.mark.timeout(300)
def test_launches_are_those_of_triton(fake_cuda, tmp_path):
    """Configuration, attributes, parameters, calls of the driver, hooks and errors are the same,
    case by case.
    """
    compiling.compiler()
    if jit_modules.compiled_driver() is None:
        pytest.skip("needs the extension _jit_driver, which was not built")
    by_triton, ours = (
        run("triton", fake_cuda, tmp_path),
        run("bundler", fake_cuda, tmp_path, CC="/bin/false"),
    )
    expected, found = outcomes(by_triton["found"]), outcomes(ours["found"])
    different = {name for name, row in expected.items() if row != found[name]}
    assert different <= {*RAISED_EARLIER, *LAUNCHED_ALL_THE_SAME}
    assert all(found[name]["launches"] == [] for name in RAISED_EARLIER if name in different)
    assert all(len(found[name]["launches"]) == 1 for name in LAUNCHED_ALL_THE_SAME)
    assert expected.keys() == found.keys()
    assert sum(len(row["launches"]) for row in found.values()) > 330
    assert set(ours["answers"]) - {None} <= {
        "a launcher of ('*fp32', 'fp8e5'): Unknown data type: 'fp8e5'"
    }
    assert None in ours["answers"]
