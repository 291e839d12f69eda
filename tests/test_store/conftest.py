# SPDX-License-Identifier: Apache-2.0
"""What the tests of stores share: small bundles, stores of each kind, and wrappers that look on or
do damage.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(path, name=None):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    module = sys.modules[name or path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load(HERE.parent / "test_format" / "builders.py", "store_builders")
oracle = _load(HERE / "oracle.py")
redis_server, redis_proxy = (
    _load(HERE.parent / f"{shared}.py") for shared in ("redis_server", "redis_proxy")
)
s3_server = _load(HERE.parent / "s3_server.py")


@pytest.fixture
def root(tmp_path):
    """The directory of a local store; not there yet."""
    return tmp_path / "store"


@pytest.fixture
def url(root):
    """The URL of a local store."""
    return f"file://{root}"


@pytest.fixture
def opened():
    """Return a function that opens a store by its URL; closed at the end."""
    import bundler

    stores = []

    def open_one(url, **choices):
        stores.append(bundler.open_store(url, **choices))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture(params=["memory", "local"])
def store(request, url, opened):
    """An empty store of each kind."""
    return opened("memory:" if request.param == "memory" else url)


@pytest.fixture
def memory(opened):
    """An empty store in memory, where that kind is as good as any."""
    return opened("memory:")


@pytest.fixture
def local(url, opened):
    """An empty store in a directory."""
    return opened(url)


@pytest.fixture
def real(compiled):
    """Kernels that Triton compiled for two targets, as an open bundle."""
    import bundler

    with bundler.Bundle.load(compiled.bundle) as bundle:
        yield bundle
