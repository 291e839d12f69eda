# SPDX-License-Identifier: Apache-2.0
"""The library that stands in for libcuda, under the name that Triton opens, and an extension that
gives Triton its modules.
"""

import subprocess
from pathlib import Path

import compiling
import pytest

from bundler.runtime.launch.jit import jit_modules

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory):
    """Compile the library once; returns its folder, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("cuda")
    line = [
        compiling.compiler(),
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        HERE / "fake_cuda.c",
        "-o",
        folder / "libcuda.so.1",
    ]
    subprocess.run(line, check=True)
    return folder


@pytest.fixture(scope="session")
def jit_extension(tmp_path_factory):
    """Return the extension `_jit_driver`: the installed one, or compiled now."""
    return jit_modules.compiled_driver() or compiling.compile_extension(
        "_jit_driver", tmp_path_factory.mktemp("jit_driver")
    )
