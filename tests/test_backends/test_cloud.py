# SPDX-License-Identifier: Apache-2.0
"""The store in an object store passes the contract, in memory here; and its packs, times and lost
answers.
"""

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

    lease_s = 0.3

    @pytest.fixture
    def backend(self):
        """A bucket that is empty."""
        with opened(MemoryStore()) as backend:
            yield backend


def test_states():
    """Any sequence of calls does what a dictionary would do."""
    run_state_machine_as_test(
        state_machine(lambda: opened(MemoryStore())),
        settings=hypothesis.settings.get_profile("backends"),
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


@pytest.mark.parametrize(
    "data", [b"", b"<html>log in</html>", None], ids=["empty", "page", "truncated"]
)
def test_a_catalog_that_is_none_is_an_error(data):
    """A page of a proxy, or half a catalog, is said to be that, and is never taken for an empty
    store.
    """
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
    """Values of secret settings and signed queries are cut out of an error's text, and no other
    error hangs on it.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
    error = meaning_of(
        RuntimeError(
            "GET https://h/c?sig=abc failed: 403 Forbidden hush-hush-hush\nDebug source: more"
        ),
        "az://c",
    )
    assert isinstance(error, BackendDenied)
    assert not any(word in str(error) for word in ("hush", "sig=", "more"))
    bucket = connect(parse_url("s3://bucket/p"), "s3://bucket/p")
    assert "hush" not in repr(CloudBackend(bucket))


class _Deaf(Bucket):
    """Writes everything, and loses each answer: the request is made again, and meets its
    own file.
    """

    def create(self, name, data):
        super().create(name, data)
        raise Conflict

    def replace(self, name, data, etag):
        super().replace(name, data, etag)
        raise Conflict


def test_a_lease_whose_answer_was_lost_is_held():
    """Who finds its own token has the lease, may prolong it and give it back; nobody else gets it
    meanwhile.
    """
    store = MemoryStore()
    deaf = CloudBackend(_Deaf(store, "memory"))
    mine = deaf.lease("k", 60)
    assert mine is not None
    assert opened(store).lease("k", 60) is None
    assert mine.renew(60)
    assert mine.release()
    again = deaf.lease("k", 60)
    assert again is not None
    assert opened(store).lease("k", 60) is None


def test_a_damaged_lease_is_nobodys():
    """A file that holds no time is taken over, one that is too large is an error."""
    store = MemoryStore()
    backend = opened(store)
    assert backend.lease("k", 60) is not None
    ((name, _),) = backend._bucket.names("leases")
    store.put(name, b"nothing of ours")
    assert backend.lease("k", 60) is not None
    store.put(name, b"x" * 1000)
    with pytest.raises(BackendUnavailable, match="1,000 bytes"):
        backend.lease("k", 60)


def test_old_leases_are_removed_by_prune(monkeypatch):
    """A lease that nobody wrote for a day goes when a prune looks through the packs; a young one
    stays.
    """
    from bundler.backends.cloud import cloud_backend

    backend = opened(MemoryStore())
    assert backend.lease("old", 60).release()
    time.sleep(0.05)
    young = backend.lease("young", 60)
    monkeypatch.setattr(cloud_backend, "OLD_S", 0.02)
    backend.put({"a": b"1"})
    backend.delete(["a"])
    assert len(list(backend._bucket.names("leases"))) == 1
    assert young.renew(60)


def test_a_listing_that_does_not_end_is_given_up(monkeypatch):
    """Of a folder with more files than any store has an error comes, and not a list that grows."""
    from bundler.backends.cloud import object_exchange

    backend = opened(MemoryStore())
    for number in range(25):
        backend.put({f"u/{number}": b"x"})
    monkeypatch.setattr(object_exchange, "LISTED", 20)
    monkeypatch.setattr(object_exchange, "LISTED_AT_ONCE", 5)
    with pytest.raises(BackendUnavailable, match="lists more than 20 files"):
        list(backend._bucket.names("packs"))
    assert backend.delete(["u/1"]) == {"u/1"}


def test_a_replacement_is_asked_for_by_etag_and_by_generation(monkeypatch):
    """S3 and Azure compare the ETag, Google the generation: what a server gave of both is sent
    back, and nothing else.
    """
    from bundler.backends.cloud import object_exchange
    from bundler.backends.cloud.object_exchange import Revision

    modes = []

    def put(_store, _name, _data, *, mode, use_multipart):
        assert not use_multipart
        modes.append(mode)
        return {"e_tag": '"y"', "version": "8"}

    monkeypatch.setattr(object_exchange.obstore, "put", put)
    bucket = Bucket(MemoryStore(), "memory")
    assert bucket.replace("a", b"", Revision('"x"', "7")) == Revision('"y"', "8")
    bucket.replace("a", b"", Revision('"x"', None))
    assert modes == [{"e_tag": '"x"', "version": "7"}, {"e_tag": '"x"'}]
