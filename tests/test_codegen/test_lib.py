# SPDX-License-Identifier: Apache-2.0
"""The functions that kernels call, and the numbers in their text: their cases run with pytest in a
process in which Triton interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
HERE = Path(__file__).parent
CASES = ("lib_reduction_cases.py", "lib_search_cases.py", "lib_number_cases.py", "literal_cases.py")


@pytest.mark.slow
def test_functions_of_kernels_hold_their_promises(tmp_path):
    """Each case of the files passes in Triton's interpreter."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(HERE),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        f"--rootdir={tmp_path}",
        "-c",
        os.devnull,
    ]
    files = [HERE / name for name in CASES]
    done = subprocess.run(
        [*command, *files],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
