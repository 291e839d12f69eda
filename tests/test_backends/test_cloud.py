# SPDX-License-Identifier: Apache-2.0
"""The store in an object store passes the contract, in memory here; and its packs, times and lost answers."""

import os
import time

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")
from cloud_contract import CloudContract, opened, packs_of
from obstore.store import MemoryStore

from bundler.backends.backend_errors import BackendDenied, BackendUnavailable, BadSettings
from bundler.backends.cloud import CloudBackend, connect, parse_url
from bundler.backends.cloud.cloud_backend import CATALOG
from bundler.backends.cloud.object_exchange import Bucket, Conflict, meaning_of
from bundler.backends.testing import state_machine


class TestCloudInMemory(CloudContract):
    """The contract, for a bucket in memory."""

    @pytest.fixture
    def backend(self):
        """A bucket that is empty."""
        with opened(MemoryStore()) as backend:
            yield backend


def test_states():
    """Any sequence of calls does what a dictionary would do."""
    run_state_machine_as_test(
        state_machine(lambda: opened(MemoryStore())), settings=hypothesis.settings.get_profile("backends")
    )


def test_what_one_call_puts_is_one_pack():
    """Three hundred objects are one file, and prune of most of them writes the rest anew."""
    backend = opened(MemoryStore())
    items = {f"u/{number}": b"%d" % number * 100 for number in range(300)}
    backend.put(items)
    before = packs_of(backend)
    assert len(before) == 1
    reader = opened(backend._bucket._store)
    assert reader.get(items) == items
    backend.delete([f"u/{number}" for number in range(200)])
    after = packs_of(backend)
    assert len(after) == 1
    assert after != before
    # The reader's catalog names a pack that is gone.
    kept = {key: value for key, value in items.items() if int(key[2:]) >= 200}
    assert reader.get(kept) == kept
    backend.delete(kept)
    assert packs_of(backend) == set()


def test_a_pack_that_somebody_removed_can_be_put_again():
    """Its objects count as absent, and are created by the next put."""
    backend = opened(MemoryStore())
    backend.put({"a": b"1", "b": b"2"})
    backend._bucket.remove([f"packs/{name}" for name in packs_of(backend)])
    assert backend.get(["a"]) == {}
    assert backend.exists(["a", "b"]) == frozenset()
    assert backend.put({"a": b"1"}) == {"a"}
    assert backend.get(["a"]) == {"a": b"1"}


def test_a_touch_that_was_left_out_still_protects():
    """An object in use so recently is not marked again, and a prune allows for that."""
    backend = opened(MemoryStore(), touch_every_s=60)
    backend.put({"a": b"1"})
    (before,) = backend.list()
    time.sleep(0.01)
    backend.touch(["a"])
    assert list(backend.list()) == [before]
    assert backend.delete(["a"], unmodified_since_s=time.time() + 30) == frozenset()
    assert backend.delete(["a"], unmodified_since_s=time.time() + 120) == {"a"}


class _Forgetful(Bucket):
    """Makes every change, and loses the answer of some."""

    lost = 0

    def replace(self, name, data, etag):
        answer = super().replace(name, data, etag)
        self.lost += 1
        if self.lost % 2:
            raise Conflict
        return answer


def test_a_change_whose_answer_was_lost_was_made():
    """The writer finds its own token in the catalog, and reports what it did."""
    backend = CloudBackend(_Forgetful(MemoryStore(), "memory"), touch_every_s=0)
    assert backend.put({"a": b"1"}) == {"a"}
    assert backend.put({"b": b"2"}) == {"b"}
    assert backend.swap_ref("t", None, b"1")
    assert backend.swap_ref("t", b"1", b"2")
    assert backend.delete(["a"]) == {"a"}
    assert backend.delete(["b"]) == {"b"}


@pytest.mark.parametrize("data", [b"", b"<html>log in</html>", None], ids=["empty", "page", "truncated"])
def test_a_catalog_that_is_none_is_an_error(data):
    """A page of a proxy, or half a catalog, is said to be that, and is never taken for an empty store."""
    store = MemoryStore()
    backend = opened(store)
    backend.put({"a": b"1"})
    whole = bytes(store.get(CATALOG).bytes())
    store.put(CATALOG, whole[:-1] if data is None else data)
    with pytest.raises(BackendUnavailable, match="no whole catalog"):
        backend.get(["b"])
    with pytest.raises(BackendUnavailable, match="no whole catalog"):
        backend.put({"b": b"1"})


def test_a_fork_is_refused_and_does_not_hang():
    """In a forked child every call is an error at once."""
    backend = opened(MemoryStore())
    backend.put({"a": b"1"})
    child = os.fork()
    if child == 0:
        try:
            backend.exists(["a"])
        except BackendUnavailable as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:s3cret@bucket/p",
        "s3://bucket?secret_key=s3cret",
        "s3:",
        "s3://b?timeout_s=0",
        "s3://b?timeout_s=x",
        "ftp://h/p",
    ],
)
def test_urls_that_cannot_be_used(url):
    """Credentials and unknown settings are refused, and not printed."""
    with pytest.raises(BadSettings) as raised:
        parse_url(url)
    assert "s3cret" not in str(raised.value)


def test_errors_hold_no_secret(monkeypatch):
    """Values of secret settings and signed queries are cut out of an error's text, and no other error hangs on it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
    error = meaning_of(
        RuntimeError("GET https://h/c?sig=abc failed: 403 Forbidden hush-hush-hush\nDebug source: more"), "az://c"
    )
    assert isinstance(error, BackendDenied)
    assert not any(word in str(error) for word in ("hush", "sig=", "more"))
    bucket = connect(parse_url("s3://bucket/p"), "s3://bucket/p")
    assert "hush" not in repr(CloudBackend(bucket))
