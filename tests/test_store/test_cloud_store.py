# SPDX-License-Identifier: Apache-2.0
"""Bundles in S3: pushed, pulled and restored through a real server, and how many requests a start
costs.
"""

import gc
import time
import warnings

import oracle
import pytest
import s3_server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")

import bundler
from bundler.errors import BundlerWarning, ConfigError, StoreUnavailable

KERNELS = 300
MOST_REQUESTS = 8


@pytest.fixture(scope="module")
def endpoint():
    """The address of the server."""
    with s3_server.running() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(endpoint, monkeypatch):
    """A proxy that counts, through which stores go."""
    for name, value in s3_server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_server.Proxy(endpoint).serving() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
        gc.collect()
        time.sleep(0.1)  # threads of obstore close the connections


@pytest.fixture
def s3(endpoint):
    """The URL of a store in a new bucket."""
    return f"s3://{s3_server.make_bucket(endpoint)}/kernels"


def test_a_pull_of_three_hundred_kernels_takes_few_requests(proxy, s3, tmp_path):
    """Catalog, manifest and units, and the mark of their use: no more requests for 300 kernels than
    for three.
    """
    with bundler.open_store(s3) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        store.push(oracle.restorable(*range(KERNELS), each=4000), "t")
    proxy.requests.clear()
    with bundler.open_store(s3) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        report = store.restore("t", cache_dir=tmp_path / "cache", only="all")
    assert len(report.restored) == KERNELS
    assert len(proxy.requests) <= MOST_REQUESTS, proxy.requests


@pytest.mark.slow
def test_real_kernels_are_pushed_and_pulled(proxy, s3, real):
    """Real kernels come back byte by byte, tags are listed, and the store is sound."""
    with bundler.open_store(s3) as store:
        store.push(real, "demo")
        assert [tag.name for tag in store.tags()] == ["demo"]
        with store.pull("demo") as pulled:
            assert oracle.contents(pulled) == oracle.contents(real)
            assert oracle.kernels(pulled) == oracle.kernels(real)
        assert store.verify().damaged == ()


def test_errors_name_the_store_and_the_fix(proxy, s3):
    """A missing bucket, and credentials in the URL."""
    with (
        bundler.open_store("s3://there-is-none/kernels") as store,
        pytest.raises(StoreUnavailable, match="no such bucket"),
    ):
        store.push(oracle.bundle("A"), "t")
    with pytest.raises(ConfigError, match="credentials in the environment") as raised:
        bundler.open_store("s3://user:hush@bucket/kernels")
    assert "hush" not in str(raised.value)


def test_without_obstore_the_error_names_the_extra(monkeypatch):
    """The message says how to install it."""
    import sys

    for name in list(sys.modules):
        if name.startswith("bundler.backends.cloud."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match="cloud"):
        bundler.open_store("s3://bucket/kernels")
