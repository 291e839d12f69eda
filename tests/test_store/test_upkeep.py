# SPDX-License-Identifier: Apache-2.0
"""`UpkeepContract`: counting, pruning and mirroring do the same on every kind of store; read-only
ones refuse.
"""

import contextlib
import time
import warnings

import oracle
import pytest
import redis_server
import s3_server

import bundler
from bundler.errors import AccessDenied, BundlerWarning

REDIS = sorted(redis_server.binaries())[:1]


@pytest.fixture(scope="module")
def server():
    """One Redis server for all tests."""
    with redis_server.running(REDIS[0]) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint():
    """The address of one S3 server for all tests."""
    with s3_server.running() as endpoint:
        yield endpoint


class UpkeepContract:
    """What looking after a store does, whatever it is kept in; each kind gives `address`, an empty
    store's URLs.
    """

    @pytest.fixture
    def address(self, tmp_path):
        """The URLs of an empty store; of tiers, the nearest first."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, address):
        """The store, open."""
        with warnings.catch_warnings(), bundler.open_store(*address) as store:
            warnings.simplefilter("ignore", BundlerWarning)
            yield store

    def test_stats_count_what_is_there(self, store):
        """Units, manifests and tags, and the bytes that tags reach."""
        assert store.stats().units == 0
        store.push(oracle.bundle("A", "B"), "team/x")
        store.push(oracle.bundle("C"))
        found = store.stats()
        assert (found.units, found.manifests, found.tags, found.records) == (6, 2, 1, 0)
        assert 0 < found.tagged_bytes < found.unit_bytes + found.manifest_bytes

    def test_prune_removes_what_no_tag_needs_and_nothing_else(self, store):
        """A dry run says what the run then does; what a live tag shares stays."""
        store.push(oracle.bundle("A", "B"), "t")
        store.push(oracle.bundle("B", "C"))
        self.wait(store)
        dry = store.prune(dry_run=True, grace_s=0)
        assert store.stats().units == 6
        done = store.prune(grace_s=0)
        assert sorted(done.removed) == sorted(dry.removed)
        assert (done.removed_bytes, done.kept_bytes) == (dry.removed_bytes, dry.kept_bytes)
        assert (store.stats().units, store.stats().manifests) == (4, 1)
        assert done.kept_bytes == done.tagged_bytes
        assert store.verify().sound
        assert oracle.contents(store.pull("t")) == oracle.contents(oracle.bundle("A", "B"))

    def test_who_watches_is_told_how_far_it_is(self, store):
        """Verify counts the objects that it reads, prune those that it removes, each up to the
        total, and a dry run counts none.
        """
        store.push(oracle.bundle("A", "B"))
        self.wait(store)
        told = []
        checked = store.verify(watch=lambda *numbers: told.append(numbers)).checked
        assert told == [(done, checked) for done in range(checked + 1)]
        told.clear()
        assert store.prune(
            dry_run=True, grace_s=0, watch=lambda *numbers: told.append(numbers)
        ).removed
        assert told == []
        removed = len(store.prune(grace_s=0, watch=lambda *numbers: told.append(numbers)).removed)
        assert (told[0], told[-1], told == sorted(told)) == ((0, removed), (removed, removed), True)

    def test_the_grace_spares_a_push_under_way(self, store):
        """What was used lately stays, and so does what is younger than was asked for."""
        store.push(oracle.bundle("A"))
        report = store.prune()
        assert (report.removed, {held.by for held in report.held}) == ((), {"grace"})
        self.wait(store)
        report = store.prune(older_than_s=3600, grace_s=0)
        assert (report.removed, {held.by for held in report.held}) == ((), {"older_than"})
        assert store.stats().units == 2

    def test_the_oldest_go_first_until_it_is_small_enough(self, store):
        """With a number of bytes prune stops there; what tags reach is never removed for it."""
        store.push(oracle.bundle("A"))
        self.wait(store)
        store.push(oracle.bundle("B"))
        store.push(oracle.bundle("C"), "t")
        self.wait(store)
        total = store.prune(dry_run=True, grace_s=0, max_bytes=10**9).kept_bytes
        report = store.prune(max_bytes=total - 1, grace_s=0)
        assert len(report.removed) == 1
        assert report.kept_bytes < total
        report = store.prune(max_bytes=0, grace_s=0)
        assert report.over_limit_bytes == report.kept_bytes == report.tagged_bytes
        assert store.verify().sound

    def test_a_store_that_is_only_read_refuses(self, address):
        """Pruning is a typed refusal, a dry run is fine, and nothing changes."""
        with bundler.open_store(*address) as store:
            store.push(oracle.bundle("A"))
        with bundler.open_store(*address, read_only=True) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", BundlerWarning)
            with pytest.raises(AccessDenied, match="only read"):
                store.prune(grace_s=0)
            store.prune(dry_run=True, grace_s=0)
            assert store.stats().units == 2

    def test_it_is_mirrored_and_mirrors(self, store):
        """Its tags go to another store and come back from there; the second time nothing moves."""
        bundle = oracle.bundle("A", "B")
        store.push(bundle, "team/x")
        with bundler.open_store("memory:") as other, bundler.open_store("memory:") as third:
            report = store.sync_to(other)
            assert (report.moved, report.units_moved, report.failed) == (("team/x",), 4, ())
            assert oracle.contents(other.pull("team/x")) == oracle.contents(bundle)
            other.push(oracle.bundle("C"), "team/y")
            report = other.sync_to(store)
            assert (report.moved, report.kept, report.units_moved) == (("team/y",), ("team/x",), 2)
            assert other.sync_to(store).moved == ()
            assert store.verify().sound
            assert [tag.name for tag in store.tags()] == ["team/x", "team/y"]
            store.sync_to(third)
            assert oracle.contents(third.pull("team/y")) == oracle.contents(oracle.bundle("C"))

    def wait(self, store):
        """Let the store's clock go on by more than it can tell apart."""
        time.sleep(0.01)


class TestMemory(UpkeepContract):
    """In memory."""

    @pytest.fixture
    def address(self):
        """A store that ends with its handle."""
        return ["memory:"]

    def test_a_store_that_is_only_read_refuses(self, store):
        """A second handle would be another store: the first one says no."""
        store.push(oracle.bundle("A"))
        store._backend.writable = False
        with pytest.raises(AccessDenied, match="only read"):
            store.prune(grace_s=0)


class TestDirectory(UpkeepContract):
    """In a directory."""

    @pytest.fixture
    def address(self, tmp_path):
        """A directory that is not there yet."""
        return [f"file://{tmp_path}/store"]


class TestTiersUpkeep(UpkeepContract):
    """Two directories as tiers: what is looked after is the farther one."""

    @pytest.fixture
    def address(self, tmp_path):
        """Both directories."""
        return [f"file://{tmp_path}/near", f"file://{tmp_path}/far"]


class TestRedisUpkeep(UpkeepContract):
    """On a Redis server."""

    @pytest.fixture
    def address(self, server, request):
        """A namespace of its own."""
        name = "".join(filter(str.isalnum, request.node.name))[-20:]
        return [server.url(user="admin", query=f"namespace={name}&timeout_s=5&connect_timeout_s=5")]


@pytest.mark.slow
class TestS3Upkeep(UpkeepContract):
    """In a bucket."""

    @pytest.fixture
    def address(self, endpoint, monkeypatch):
        """A bucket of its own."""
        for name, value in (s3_server.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        return [f"s3://{s3_server.make_bucket(endpoint)}/kernels?touch_every_s=0"]


def test_a_served_store_is_counted_and_refuses(memory):
    """What others serve has the same numbers as at home, and cannot be pruned or mirrored into."""
    memory.push(oracle.bundle("A"), "t")
    with memory.serve("127.0.0.1:0") as server, bundler.open_store(f"tb+{server.url}") as store:
        assert store.stats() == memory.stats()
        assert store.prune(dry_run=True, grace_s=0) == memory.prune(dry_run=True, grace_s=0)
        with pytest.raises(AccessDenied, match="only read"):
            store.prune(grace_s=0)
        with (
            contextlib.closing(bundler.open_store("memory:")) as source,
            pytest.raises(AccessDenied, match="only read"),
        ):
            source.sync_to(store)
