# SPDX-License-Identifier: Apache-2.0
"""A recording leaves the threads of the program alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain
PROGRAM = Path(__file__).with_name("busy_threads.py")


def test_threads_that_build_tuples_and_resize_arrays_are_not_disturbed(cache):
    """While the main thread records again and again, no thread that builds tuples, resizes arrays
    or adds globals meets an error.
    """
    # On an idle machine 1.5 s are about 20 recordings; walking Python's collector broke some 20
    # tuples in that time.
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, "1.5"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["recordings"] > 0
    assert told["broken"] == []
