# SPDX-License-Identifier: Apache-2.0
"""A bundle that was pushed, built or mirrored, and a program with the two variables alone: each
kernel is a hit, and all say so.
"""

import plugged
import pytest

import bundler

_RECORD = """
import bundler
with bundler.recording() as recording:
    compile_one("gelu")
    compile_one("softmax")
with recording.collect() as bundle:
    bundle.save(sys.argv[2])
say(heard)
"""
_RUN = """
compile_one("gelu")
compile_one("softmax")
say([hit for _, hit in heard])
"""


@pytest.fixture
def bundle(tmp_path):
    """A bundle of kernels that another process compiled."""
    path = tmp_path / "lib.tbundle"
    env = plugged.environment(None, tmp_path / "recorded", TRITON_CACHE_MANAGER=None)
    heard, _ = plugged.run(_RECORD, env, path)
    assert [hit for _, hit in heard] == [False] * len(heard)
    with bundler.Bundle.load(path) as loaded:
        yield loaded


def hits(url, cache, **more):
    """Return how many kernels a new process found in a store, and how many it compiled."""
    heard, err = plugged.run(_RUN, plugged.environment(url, cache, **more))
    assert "Warning" not in err
    return heard.count(True), heard.count(False)


def test_a_pushed_bundle_is_found_without_its_tag(bundle, any_store_url, tmp_path, monkeypatch):
    """Every kernel is a hit, with no assembler; `explain` and `build --check` agree; what differs
    is compared with what was pushed.
    """
    many = len(bundle.kernels)
    with bundler.open_store(any_store_url) as store:
        store.push(bundle, "lib")
        assert store.stats().kernels == many
    env, tried = plugged.refusing(tmp_path / "refusing")
    assert hits(any_store_url, tmp_path / "cache", **env) == (many, 0)
    assert not tried.exists()
    monkeypatch.setenv("TRITON_BUNDLER_STORE", any_store_url)
    for kernel in bundle.kernels:
        (same,) = bundler.explain(kernel.key)
        assert (same.status, same.there_now) == ("recorded", True)
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    local = {"TRITON_BUNDLER_LOCAL": tmp_path / "local", "TRITON_BUNDLER_MODE": "read"}
    fusion = {"TRITON_DEFAULT_FP_FUSION": "0"}
    assert hits(any_store_url, tmp_path / "other", **fusion, **local) == (0, many)
    for one in bundler.explain(last=True):
        said = "environment TRITON_DEFAULT_FP_FUSION: false here"
        assert (one.status, said in one.sentence) == ("differs", True)


def test_a_bundle_that_was_mirrored_is_found(bundle, store_url, tmp_path):
    """By who has the mirror alone."""
    with bundler.open_store(store_url) as store, bundler.open_store(f"{store_url}-2") as mirror:
        store.push(bundle, "lib")
        store.sync_to(mirror)
    assert hits(f"{store_url}-2", tmp_path / "cache") == (len(bundle.kernels), 0)
