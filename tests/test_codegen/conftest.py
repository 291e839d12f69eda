# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernel generator share: programs that run in Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def interpreted():
    """Run a program of this folder in the interpreter, with `libdevice_shim` and the other modules here importable."""

    def run(program, *arguments, timeout=100):
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
        command = [sys.executable, str(HERE / program), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
