# SPDX-License-Identifier: Apache-2.0
"""What tests of integrations share: helpers beside them, stores of both kinds, and a process
without a session.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(path):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plugged = _load(HERE / "plugged.py")
if "json_schemas" not in sys.modules:
    _load(HERE.parent / "json_schemas.py")
if "redis_server" not in sys.modules:
    _load(HERE.parent / "redis_server.py")


@pytest.fixture
def store_url(tmp_path):
    """The URL of a store in a directory."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def redis_url():
    """The URL of a store in Redis."""
    import redis_server

    with redis_server.running(redis_server.NAMES[0]) as server:
        # A machine that runs the whole suite may be slower than the limits for real work.
        yield server.url(query="timeout_s=20&connect_timeout_s=20")


@pytest.fixture(params=["store_url", "redis_url"], ids=["directory", "redis"])
def any_store_url(request):
    """The URL of a store of each kind."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def recorded():
    """Return a function that lists the names of the kernels that a store has records of."""
    import bundler

    def names(url):
        with bundler.open_store(url, read_only=True) as store:
            return sorted(kernel.name for kernel in store.kernel_records().recorded(1000))

    return names
