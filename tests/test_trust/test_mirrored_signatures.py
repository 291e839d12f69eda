# SPDX-License-Identifier: Apache-2.0
"""Mirrors of signed stores: signatures and epochs go along, and no tag is set back."""

import pytest

import bundler
from bundler import Bundle
from bundler.store import store_layout

TAG = "prod/llama"


def value(store):
    return store._backend.read_ref(store_layout.tag_key(TAG))


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A second store, of the same name for who signs and reads."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE_NAME", "prod")
    with bundler.open_store(str(tmp_path / "mirror")) as store:
        yield store


def test_a_mirror_is_as_good_as_its_source(signers, store, kernels, mirror):
    """What the source's tag and bundle are signed with makes the mirror's visible under require."""
    store.push(Bundle.load(kernels), TAG, key=signers.alice)
    report = store.sync_to(mirror)
    assert (report.moved, report.failed) == ((TAG,), ())
    assert value(mirror) == value(store)
    mirror.signatures = signers.policy()
    assert mirror.pull(TAG).kernels
    envelopes = [stat.key for stat in store._backend.list("v1/e")]
    assert sorted(stat.key for stat in mirror._backend.list("v1/e")) == sorted(envelopes) != []
    assert store.sync_to(mirror).kept == (TAG,)


@pytest.mark.parametrize("signed", [True, False])
def test_no_tag_is_set_back(signers, store, kernels, mirror, signed):
    """An older statement, or none, does not replace what the mirror has; the reason names both
    epochs.
    """
    bundle = Bundle.load(kernels)
    store.push(bundle.select(target="cuda:90"), TAG, key=signers.alice if signed else None)
    mirror.push(bundle, TAG, key=signers.alice)
    before = value(mirror)
    report = store.sync_to(mirror)
    assert report.failed[0][0] == TAG
    assert ("an older statement (epoch " if signed else "what nobody signed") in report.failed[0][1]
    assert value(mirror) == before
