# SPDX-License-Identifier: Apache-2.0
"""Bundles in a real Redis that is absent, silent, killed, emptied, full, evicting, forbidding, slow
or lying.

Each time: a typed error or a whole answer, no wrong bytes, no wait beyond the limits, and `verify`
is clean or says what is missing.
"""

import os
import signal
import time
import warnings

import oracle
import pytest
import redis_proxy
import redis_server

import bundler
from bundler.backends.redis import RedisBackend
from bundler.errors import (
    AccessDenied,
    BundlerError,
    BundlerWarning,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.lifecycle.machine_store import Store

PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}
# The limits that a dead server is given here, and what a busy machine adds.
HASTY = {"timeout_s": 0.25, "connect_timeout_s": 0.25}
SLACK_S = 2.0
AB = ("A", "B")


def opened_at(url, **options):
    """Return a store at a Redis URL, without any tier between it and us."""
    backend = RedisBackend.from_url(url, **options)
    return Store(backend, repr(backend))


@pytest.fixture(scope="module")
def shared():
    """A server that no test of these stops."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def server(shared):
    """That server, empty."""
    shared.client().flushall()
    return shared


@pytest.fixture
def mortal():
    """A server of this test's own, which may be killed."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def at():
    """Return a function that opens a store at a URL; closed at the end."""
    stores = []

    def open_one(url, **options):
        stores.append(opened_at(url, **(options or PATIENT)))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(server, at):
    """An empty store."""
    return at(server.url())


keys, kernels = oracle.real_keys, oracle.restorable


def noise(count, first=0):
    """Return a bundle of large kernels."""
    return kernels(*range(first, first + count), each=200_000)


def raw(store):
    """Return {key: bytes} of every object."""
    backend = oracle.innermost(store)
    return backend.get([stat.key for stat in backend.list()])


def damage(server, key, change):
    """Change what the server has under the key of a small object, behind everybody's back, leaving
    its header.
    """
    admin, name = server.client(), f"tb:o:{key}"
    stored = admin.get(name)
    admin.set(name, stored[:16] + change(stored[16:]), keepttl=True)


def restored(store, cache, tag="t"):
    """Restore a tag into a directory; returns the report, and the files by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        report = store.restore(tag, cache_dir=cache, only="all")
    return report, {
        path.relative_to(cache).as_posix(): path.read_bytes()
        for path in cache.rglob("*")
        if path.is_file()
    }


def fails_in_time(call, kind, seconds):
    """Make a call that must fail, and in time."""
    started = time.monotonic()
    with pytest.raises(kind):
        call()
    assert time.monotonic() - started < seconds + SLACK_S


# ------------------------------------------------------------------ absent, silent, killed, emptied


def acts(store, cache):
    """Return everything that may be done with a store."""
    return {
        "push": lambda: store.push(kernels(*AB), "t"),
        "pull": lambda: store.pull("t"),
        "pull by digest": lambda: store.pull(kernels(*AB).digest),
        "restore": lambda: store.restore("t", cache_dir=cache),
        "restore what may be missing": lambda: store.restore("t", missing_ok=True, cache_dir=cache),
        "tags": store.tags,
        "delete_tag": lambda: store.delete_tag("t"),
        "stats": store.stats,
        "verify": store.verify,
        "prune": store.prune,
    }


@pytest.mark.serial
def test_a_server_that_is_absent_at_the_start(at, tmp_path):
    """Opening is fine, everything else a StoreUnavailable at once; when the server comes, the same
    store works.
    """
    store = at(f"redis://writer:x@127.0.0.1:{redis_server.free_port()}", **HASTY)
    for act in acts(store, tmp_path).values():
        fails_in_time(act, StoreUnavailable, 0.25)


@pytest.mark.serial
def test_a_server_that_takes_everything_and_says_nothing(server, at, tmp_path):
    """Each operation costs one time limit, and not a minute; what was there stays."""
    at(server.url()).push(kernels(*AB), "t")
    with redis_proxy.Proxy(server.socket, silent=True) as proxy:
        store = at(proxy.url(server), **HASTY)
        for act in acts(store, tmp_path).values():
            fails_in_time(act, StoreUnavailable, 0.25)
    assert at(server.url()).verify().sound


class Killing(oracle.Wrapped):
    """Kills the server before the n-th call."""

    def __init__(self, inner, server, at):
        super().__init__(inner)
        self.server, self.left, self.struck = server, at, None

    def around(self, name, call, argument):
        self.left -= 1
        if self.left == 0:
            self.struck = name
            self.server.kill()
        return call(argument)


def test_a_server_that_is_killed_in_a_push(mortal, at):
    """Killed before any call of a push: a typed error; started anew it is empty and sound, and the
    push completes.
    """
    struck = set()
    for number in range(1, 30):
        store = at(mortal.url())
        store.push(kernels("A"), "t")
        broken = Store(Killing(oracle.innermost(store), mortal, number), "redis")
        try:
            broken.push(kernels("B"), "t")
        except StoreUnavailable:
            struck.add(broken._backend.inner.struck)
        else:
            assert broken._backend.inner.struck in {None, "flush", "touch"}
        if broken._backend.inner.struck is None:
            break
        mortal.restart()
        assert store.verify().sound
        assert store.tags() == ()
        store.push(kernels(*AB), "t")
        assert oracle.contents(store.pull("t")) == oracle.contents(kernels(*AB))
        mortal.client().flushall()
    assert {"read_ref", "get", "put", "exists", "swap_ref"} <= struck


def test_a_server_that_is_killed_in_a_pull(mortal, at, tmp_path):
    """Killed between tag, manifest and content: a typed error, and of what was restored nothing is
    half.
    """
    for number in range(1, 30):
        store = at(mortal.url())
        store.push(kernels(*AB), "t")
        broken = Store(Killing(oracle.innermost(store), mortal, number), "redis")
        cache = tmp_path / str(number)
        try:
            report, files = restored(broken, cache)
        except StoreUnavailable:
            files = {
                path.relative_to(cache).as_posix(): path.read_bytes()
                for path in cache.rglob("*")
                if path.is_file()
            }
        if broken._backend.inner.struck is None:
            assert set(report.restored) == keys(*AB)
            break
        whole = oracle.contents(kernels(*AB))
        assert {
            name: data for name, data in files.items() if name in whole
        }.items() <= whole.items()
        mortal.restart()
    assert number > 3


def test_a_server_that_was_restarted_is_empty_and_filled_by_the_next_push(mortal, at):
    """What is gone is NotFound; a store that was open goes on, and sends everything again."""
    store = at(mortal.url())
    sent = store.push(kernels(*AB), "t").blobs_sent
    mortal.restart()
    with pytest.raises(NotFound, match="no tag 't'"):
        store.pull("t")
    assert store.verify().sound
    assert store.push(kernels(*AB), "t").blobs_sent == sent
    assert oracle.contents(store.pull("t")) == oracle.contents(kernels(*AB))


# ----------------------------------------------------------------------------------- full, evicting


def test_a_full_server_that_evicts_nothing(mortal, at):
    """Pushing is a StoreFull, the tag names what it named, which is whole; with room the same push
    completes.
    """
    store, admin = at(mortal.url()), mortal.client()
    store.push(kernels("A"), "t")
    large = noise(8)
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 400_000)
    with pytest.raises(StoreFull, match="raise maxmemory"):
        store.push(large, "t")
    assert oracle.contents(store.pull("t")) == oracle.contents(kernels("A"))
    assert store.verify().sound
    admin.config_set("maxmemory", "1gb")
    store.push(large, "t")
    assert len(store.pull("t").kernels) == 9


def test_a_server_that_evicts_between_manifest_and_kernels(mortal, at, tmp_path):
    """Tags lead to manifests whose kernels are partly gone: those are skipped with a reason, the
    others right, verify says what is missing, and the next push sends just that.
    """
    store, admin = at(mortal.url()), mortal.client()
    bundle = noise(20)
    store.push(bundle, "t")
    whole = oracle.contents(bundle)
    units = sorted(key for key in raw(store) if key.startswith("v1/u/"))
    admin.delete(*(f"tb:o:{key}" for key in units[::2]))
    report, files = restored(store, tmp_path / "cache")
    assert 0 < len(report.restored) < 20
    assert len(report.restored) + len(report.skipped) == 20
    assert all("missing" in reason for _, reason in report.skipped)
    right = {name: data for name, data in files.items() if name in whole}
    assert right.items() <= whole.items()
    verdict = store.verify()
    assert not verdict.sound
    assert verdict.damaged == ()
    assert verdict.dangling[0][0] == bundle.digest
    assert store.push(bundle, "t").blobs_sent == len(units[::2])
    assert store.verify().sound
    assert oracle.contents(store.pull("t")) == whole


def test_a_server_that_is_too_small_for_what_is_pushed(mortal, at, tmp_path):
    """With 4 MB for 12 MB of kernels every push succeeds or is a typed error, and what is restored
    is right.
    """
    store, admin = at(mortal.url()), mortal.client()
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 4_000_000)
    bundles = [noise(10, first=10 * number) for number in range(6)]
    for number, bundle in enumerate(bundles):
        store.push(bundle, f"t{number}")
    assert admin.info("stats")["evicted_keys"] > 10
    seen = set()
    for number, bundle in enumerate(bundles):
        cache = tmp_path / str(number)
        try:
            report, files = restored(store, cache, f"t{number}")
        except NotFound:
            seen.add("gone")
            continue
        whole = oracle.contents(bundle)
        assert {
            name: data for name, data in files.items() if name in whole
        }.items() <= whole.items()
        seen.add("partly" if report.skipped else "whole")
    assert "gone" in seen or "partly" in seen
    assert store.verify().damaged == ()
    store.push(bundles[0], "t0")
    assert store.stats().units > 0


# --------------------------------------------------------------------------------------- forbidding


def test_a_wrong_password_and_a_missing_right(server, at, tmp_path):
    """A wrong password is AccessDenied; a reader restores, and its push is AccessDenied and changes
    nothing.
    """
    at(server.url()).push(kernels(*AB), "t")
    wrong = at(server.url(password="wr0ng"))
    for act in acts(wrong, tmp_path).values():
        with pytest.raises(AccessDenied, match="check user, password") as caught:
            act()
        assert "wr0ng" not in str(caught.value)
    reader = at(server.url("reader"))
    report, _ = restored(reader, tmp_path / "cache")
    assert set(report.restored) == keys(*AB)
    assert [tag.name for tag in reader.tags()] == ["t"]
    assert reader.verify().sound
    stored = raw(reader)
    for act in (lambda: reader.push(kernels("C"), "t"), lambda: reader.delete_tag("t")):
        with pytest.raises(AccessDenied):
            act()
    assert raw(reader) == stored


def test_a_read_only_replica(server, at, tmp_path):
    """A replica restores; a push to it is AccessDenied."""
    at(server.url()).push(kernels(*AB), "t")
    secret = redis_server.PASSWORDS["admin"]
    server.client().config_set("repl-diskless-sync-delay", 0)
    of = (
        "--replicaof",
        "127.0.0.1",
        str(server.port),
        "--masteruser",
        "admin",
        "--masterauth",
        secret,
    )
    with redis_server.running(redis_server.NAMES[0], *of) as replica:
        admin = replica.client()
        redis_server._until(
            lambda: admin.info("replication")["master_link_status"] == "up",
            "the replica did not sync",
        )
        store = at(replica.url())
        report, _ = restored(store, tmp_path / "cache")
        assert set(report.restored) == keys(*AB)
        with pytest.raises(AccessDenied, match="a replica takes no writes"):
            store.push(kernels("C"), "t")


def test_tls_that_does_not_fit(server, at, tmp_path):
    """A certificate of an authority we do not know is a StoreUnavailable, and one that we know
    works.
    """
    authority = redis_proxy.Certificates(tmp_path)
    with redis_proxy.Proxy(server.socket, tls=authority.context()) as proxy:
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            at(proxy.url(server, scheme="rediss"), **HASTY).push(kernels(*AB), "t")
        at(proxy.url(server, scheme="rediss"), ca=authority.ca, **PATIENT).push(kernels(*AB), "t")
    assert oracle.contents(at(server.url()).pull("t")) == oracle.contents(kernels(*AB))


# --------------------------------------------------------------------------------------- slow, torn


@pytest.mark.serial
def test_a_network_with_200_ms_a_turn(server, at, tmp_path):
    """Push and restore take a few turns each, however many kernels there are."""
    bundle = kernels(*"ABCDEFGHIJKLMNOP")
    with redis_proxy.Proxy(server.socket, latency_s=0.2) as proxy:
        store = at(proxy.url(server), timeout_s=5)
        started = time.monotonic()
        store.push(bundle, "t")
        assert time.monotonic() - started < 0.2 * 14 + SLACK_S
        started = time.monotonic()
        report, _ = restored(store, tmp_path / "cache")
        assert time.monotonic() - started < 0.2 * 8 + SLACK_S
    assert len(report.restored) == 16


@pytest.mark.serial
def test_answers_that_trickle(server, at):
    """A byte each 50 ms is given up after the limit."""
    at(server.url()).push(kernels(*AB), "t")
    with redis_proxy.Proxy(server.socket, trickle_s=0.05) as proxy:
        store = at(proxy.url(server), **HASTY)
        fails_in_time(lambda: store.pull("t"), StoreUnavailable, 0.5)


def test_connections_that_are_reset_anywhere(server, at):
    """Reset after any number of bytes: a push or pull answers right or raises, the tag is whole,
    and the next push completes.
    """
    bundles = [kernels(*AB), kernels(*AB, "C")]
    right = [oracle.contents(bundle) for bundle in bundles]
    direct = at(server.url())
    with redis_proxy.Proxy(server.socket) as proxy:
        for cut in (1, 5, 40, 200, 600, 1500, 3000):
            server.client().flushall()
            direct.push(bundles[0], "t")
            proxy.reset_after = cut
            for act in (lambda s: s.push(bundles[1], "t"), lambda s: oracle.contents(s.pull("t"))):
                try:
                    found = act(at(proxy.url(server), **HASTY))
                except StoreUnavailable:
                    continue
                assert not isinstance(found, dict) or found in right
            assert oracle.contents(direct.pull("t")) in right
            assert direct.verify().sound
            proxy.reset_after = None
            at(proxy.url(server)).push(bundles[1], "t")
            assert oracle.contents(direct.pull("t")) == right[1]


# ------------------------------------------------------------------------------------------- others


def test_two_pushers_to_one_tag(server, at):
    """Of two that push to one tag at once both succeed, and the tag has the kernels of both."""
    first, second = at(server.url()), at(server.url())
    seeds = range(10)
    with oracle.running(lambda: [first.push(kernels(seed), "t") for seed in seeds[:5]]):
        for seed in seeds[5:]:
            second.push(kernels(seed), "t")
    assert oracle.kernels(first.pull("t")) == keys(*seeds)
    assert first.verify().sound


def test_values_corrupted_by_hand(server, store, tmp_path):
    """A flipped bit, a cut end or other bytes in any value: never wrong bytes; verify names it, and
    a push repairs it.
    """
    changes = [
        lambda data: (
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]
        ),
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: os.urandom(len(data)),
    ]
    bundle = kernels(*AB)
    whole = oracle.contents(bundle)
    store.push(bundle, "t")
    for key in sorted(raw(store)):
        for number, change in enumerate(changes):
            damage(server, key, change)
            verdict = store.verify()
            assert key in dict(verdict.damaged)
            cache = tmp_path / f"{key.replace('/', '_')}-{number}"
            try:
                _, files = restored(store, cache)
            except (DigestMismatch, FormatError, NotFound):
                files = {}
            assert {
                name: data for name, data in files.items() if name in whole
            }.items() <= whole.items()
            store.verify(repair=True)
            store.push(bundle, "t")
            assert store.verify().sound
            assert oracle.contents(store.pull("t")) == whole


def test_a_header_corrupted_by_hand(server, store):
    """Damage before the value, where our own header is, is damage too."""
    bundle = kernels(*AB)
    store.push(bundle, "t")
    admin = server.client()
    for key in sorted(raw(store)):
        for header in (b"TBx", b"TBs", b"\0\0\0", b""):
            stored = admin.get(f"tb:o:{key}")
            admin.set(f"tb:o:{key}", header + stored[3:])
            assert key in dict(store.verify(repair=True).damaged)
            store.push(bundle, "t")
            assert store.verify().sound
    assert oracle.contents(store.pull("t")) == oracle.contents(bundle)


def test_hostile_manifests_and_tags(server, store):
    """A bomb, another bundle's manifest, a manifest that is none, a tag that leads elsewhere: typed
    errors, little memory.
    """
    bundle, other = kernels(*AB), kernels("C")
    store.push(bundle, "t")
    store.push(other, "u")
    manifest, theirs = oracle.manifest_of(store, "t"), oracle.manifest_of(store, "u")
    values = {
        "another's": raw(store)[theirs],
        "none": oracle.sealed(b"\xc1"),
        "not sealed": b"x" * 100,
        "a head": b"TBs" + b"9" * 13 + b"9" * 16 + b"0" * 16,
    }
    for name, value in values.items():
        damage(server, manifest, lambda _, value=value: value)
        with pytest.raises(BundlerError) as caught:
            oracle.contents(store.pull("t"))
        assert isinstance(caught.value, (FormatError, DigestMismatch, NotFound)), name
        store.push(bundle, "t", "replace")
        store.verify(repair=True)
        store.push(bundle, "t", "replace")
        assert store.verify().sound, name
    bomb = oracle.sealed(bytes((64 << 20) + 1))
    damage(server, manifest, lambda _: bomb)
    with pytest.raises(LimitExceeded):
        store.pull("t")
    # Over a limit is not damaged: it may be another's who has higher limits.
    assert manifest in raw(store)
    oracle.drop(store, manifest)
    for value in (b"", b"\xff" * 50, b"x" * 100_000, b"v1/m/" + b"0" * 64):
        oracle.set_tag(store, "t", value)
        with pytest.raises(FormatError, match="tag t cannot be read"):
            store.pull("t")
    store.push(bundle, "t", "replace")
    assert oracle.contents(store.pull("t")) == oracle.contents(bundle)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_with_an_open_connection(store):
    """Parent and child push and pull at once through a store that was in use when they parted."""
    store.push(kernels("A"), "t")
    child = os.fork()
    if child == 0:
        signal.alarm(40)
        for number in range(5):
            store.push(kernels(number), "t")
        os._exit(0 if keys("A") <= oracle.kernels(store.pull("t")) else 1)
    for number in range(5):
        store.push(kernels(5 + number), "t")
    assert os.waitpid(child, 0)[1] == 0
    assert oracle.kernels(store.pull("t")) == keys("A", *range(10))
    assert store.verify().sound


def test_what_is_pulled_lives_on(server, at):
    """Pulling prolongs the tag, the manifest and the units; a read-only pull prolongs no object.
    What says where a kernel is lives long anyway.
    """
    store, admin = at(server.url(), ttl_s=100, **PATIENT), server.client()
    store.push(kernels(*AB), "t")
    entries = admin.keys("tb:o:v1/b/*")
    assert [admin.pttl(name) > 1_100_000 for name in entries] == [True] * len(AB)
    names = [name for name in admin.keys("tb:*") if name not in entries]
    for name in names:
        admin.pexpire(name, 50_000)
    store.pull("t", read_only=True).close()
    assert all(admin.pttl(name) <= 50_000 for name in names if name.startswith(b"tb:o:"))
    store.pull("t").close()
    assert all(admin.pttl(name) > 90_000 for name in names)


def test_records_and_manifests_are_the_same_keys():
    """The keys that live shorter are those of the layout's manifests."""
    from bundler.backends.redis.value_parts import RECORD
    from bundler.store import store_layout

    assert RECORD.match(f"{store_layout.MANIFESTS}/x")
    assert not RECORD.match(f"{store_layout.UNITS}/x")


def test_opening_a_store_by_its_url(server):
    """`open_store` takes a Redis URL, and its name holds no secret."""
    with bundler.open_store(server.url()) as store:
        store.push(kernels(*AB), "t")
        assert oracle.contents(store.pull("t")) == oracle.contents(kernels(*AB))
        assert "s3cret" not in repr(store) + store.name
