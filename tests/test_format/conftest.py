# SPDX-License-Identifier: Apache-2.0
"""What the tests of the format share; helpers are loaded by path, since tests are no package."""

import importlib.util
from pathlib import Path

import hypothesis
import pytest

HERE = Path(__file__).parent
DATA = HERE.parent / "data"

hypothesis.settings.register_profile("format", deadline=None, max_examples=60)
hypothesis.settings.load_profile("format")


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build():
    """The builders."""
    return _load(HERE / "builders.py")


@pytest.fixture(scope="session")
def drawn():
    """The Hypothesis strategies."""
    return _load(HERE / "strategies.py")


@pytest.fixture(scope="session")
def independent():
    """The reader that shares no code with the package."""
    return _load(HERE / "independent_reader.py")


@pytest.fixture(scope="session")
def other_encoder():
    """The fuzzer's own way into the tables and out of them, which shares no code with the
    package.
    """
    return importlib.import_module("tools.fuzz.container")


@pytest.fixture(scope="session")
def make_golden():
    """The program that made the golden files."""
    return _load(DATA / "make_golden.py")


@pytest.fixture(scope="session")
def wide(build):
    """The bytes of a bundle with more compressed frames of IR than stay decoded, and its blobs."""
    files = build.Files()
    texts = [build.noise(number, 1 << 16) * 100 for number in range(9)]
    kernels = [files.kernel(n, f"k{n}", extra={f"k{n}.llir": text}) for n, text in enumerate(texts)]
    return files.bundle(*kernels).to_bytes(), files.blobs
