# SPDX-License-Identifier: Apache-2.0
"""What the tests of compiling share: a service whose workers do as they are told."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(path):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
    return module


work = _load(HERE / "service_work.py")


@pytest.fixture
def cache(tmp_path):
    """A directory for kernels."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def service(cache, monkeypatch):
    """Make services that are closed after the test."""
    from bundler.compile.service import CompileService

    monkeypatch.syspath_prepend(str(HERE))
    made = []

    def make(workers=2, **more):
        settings = {
            "cache_dir": cache,
            "perform": "service_work:perform",
            "preload": "",
            "isolate": True,
        } | more
        made.append(CompileService(workers, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close(cancel=True)


@pytest.fixture(scope="module")
def engine():
    """Two processes that import this package once for all tests."""
    with work.processes() as executor:
        while len(executor._processes) < 2:  # a call starts a process where all are busy
            list(executor.map(time.sleep, (0.2,) * 4))
        yield executor


@pytest.fixture
def on(cache, monkeypatch):
    """Make services of an executor, closed after the test."""
    from bundler.compile.service import CompileService

    monkeypatch.syspath_prepend(str(HERE))
    made = []

    def make(executor, **more):
        settings = {"cache_dir": cache, "perform": "service_work:perform", "preload": ""} | more
        made.append(CompileService(executor=executor, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close(cancel=True)


@pytest.fixture
def starts(cache):
    """Return the commands that workers began with, in order."""
    return lambda: (
        (cache / "starts").read_text().splitlines() if os.path.exists(cache / "starts") else []
    )
