# SPDX-License-Identifier: Apache-2.0
"""The store in Redis passes the contract on every server found here and on a cluster, with a
writer's rights alone.
"""

import os
import threading
import time

import hypothesis
import pytest
import redis_server
from hypothesis.stateful import run_state_machine_as_test

from bundler.backends.redis import RedisBackend
from bundler.backends.redis import value_parts as values
from bundler.backends.testing import BackendContract, state_machine
from bundler.backends.testing.backend_contract import in_threads

# The suite shares its machine: time-outs are tested elsewhere.
PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}
MIB = 1024 * 1024


def header(data, ttl_s=60):
    """Return what is stored for a small value, told a second time."""
    return b"TBw" + str(ttl_s * 1000).zfill(13).encode() + data


class Contract(BackendContract):
    """How the contract looks behind a server."""

    clock_step_s = 0.02

    def reopen(self, backend):
        """Open the same namespace again."""
        return RedisBackend(backend._settings)

    def peek(self, backend, key):
        """Read the keys of the server."""
        stored = self.admin.get(f"tb:o:{key}")
        if stored is None or stored[:3] == b"TBw":
            return stored and stored[16:]
        digest, size = stored[32:48].decode(), int(stored[16:32])
        parts = [
            self.admin.get(f"tb:p:{key}:{digest}:{number}")[16:]
            for number in range(-(-size // (8 * MIB)))
        ]
        assert len(b"".join(parts)) == size
        return b"".join(parts)

    def poke(self, backend, key, data):
        """Write a key of the server."""
        self.admin.set(f"tb:o:{key}", header(data), px=60_000)


class TestServer(Contract):
    """The contract, on one server."""

    @pytest.fixture
    def backend(self, server):
        """An empty server."""
        self.admin = server.client()
        self.admin.flushall()
        with RedisBackend.from_url(server.url(), **PATIENT) as opened:
            yield opened


@pytest.fixture(scope="module")
def nodes():
    """A cluster of three masters, of the last server found."""
    with redis_server.cluster(redis_server.NAMES[-1]) as started:
        yield started


class ClusterClient:
    """Reads and writes keys wherever they are."""

    def __init__(self, nodes):
        import redis

        self._cluster = redis.RedisCluster(
            "127.0.0.1", nodes[0].port, username="admin", password=redis_server.PASSWORDS["admin"]
        )
        self.get, self.set, self.close = self._cluster.get, self._cluster.set, self._cluster.close


class TestCluster(Contract):
    """The contract, on a cluster."""

    @pytest.fixture
    def backend(self, nodes):
        """An empty cluster."""
        for node in nodes:
            node.client().flushall()
        self.admin = ClusterClient(nodes)
        with RedisBackend.from_url(redis_server.cluster_url(nodes), **PATIENT) as opened:
            yield opened
        self.admin.close()


def test_states(server):
    """Any sequence of calls does what a dictionary would do."""

    def emptied():
        server.client().flushall()
        return RedisBackend.from_url(server.url(), **PATIENT)

    run_state_machine_as_test(
        state_machine(emptied), settings=hypothesis.settings.get_profile("backends")
    )


def test_states_of_a_cluster(nodes):
    """Any sequence of calls does the same on a cluster."""

    def emptied():
        for node in nodes:
            node.client().flushall()
        return RedisBackend.from_url(redis_server.cluster_url(nodes), **PATIENT)

    settings = hypothesis.settings(hypothesis.settings.get_profile("backends"), max_examples=10)
    run_state_machine_as_test(state_machine(emptied), settings=settings)


@pytest.fixture
def backend(server, admin):
    """An empty store."""
    with RedisBackend.from_url(server.url(), **PATIENT) as opened:
        yield opened


def calls(admin):
    """Return how often the server ran each command since this was asked last."""
    found = {
        name.removeprefix("cmdstat_"): stat["calls"]
        for name, stat in admin.info("commandstats").items()
    }
    admin.config_resetstat()
    return {
        name: count
        for name, count in found.items()
        if name not in {"info", "config", "config|resetstat", "auth"}
    }


def test_a_kernel_is_one_get_and_one_set(backend, admin):
    """The commands on the way of a kernel are the few that were meant, and connecting sends none of
    its own.
    """
    calls(admin)
    backend.put({"v1/u/a": b"1"})
    assert calls(admin) == {"set": 1}
    backend.get(["v1/u/a"])
    assert calls(admin) == {"getrange": 1}
    backend.read_ref("v1/t/x")
    assert calls(admin) == {"getrange": 1, "exists": 1, "pexpire": 1}
    backend.exists(["v1/u/a", "v1/u/b"])
    backend.touch(["v1/u/a", "v1/u/b"])
    calls(admin)
    backend.exists(["v1/u/a", "v1/u/b"])
    backend.touch(["v1/u/a", "v1/u/b"])
    assert calls(admin).keys() <= {
        "evalsha",
        "evalsha_ro",
        "strlen",
        "getrange",
        "exists",
        "pexpire",
    }


def test_batches_are_bounded(backend, admin):
    """Six hundred values of 128 KiB go in pieces of 16 MiB and come in two exchanges."""
    data = os.urandom(128 * 1024)
    items = {f"v1/u/{number}": data for number in range(600)}
    sizes = []
    link, replies = backend._link, backend._link.replies

    def noting(commands, *rest):
        sizes.append(
            (
                len(commands),
                sum(
                    len(word) for _, words in commands for word in words if isinstance(word, bytes)
                ),
            )
        )
        return replies(commands, *rest)

    link.replies = noting
    assert backend.put(items) == items.keys()
    assert max(count for count, _ in sizes) <= 512
    assert max(size for _, size in sizes) <= 16 * MIB
    sizes.clear()
    assert backend.get(items) == items
    assert [count for count, _ in sizes] == [512, 88]


@pytest.mark.parametrize(
    "size",
    [values.WHOLE_BYTES, values.WHOLE_BYTES + 1, values.PART_BYTES, 2 * values.PART_BYTES + 1],
)
def test_values_are_split_over_a_limit(backend, admin, size):
    """No stored value is larger than 8 MiB and a header; parts live and go with their head."""
    data = os.urandom(size)
    assert backend.put({"v1/u/a": data}) == {"v1/u/a"}
    names = admin.keys("*")
    assert len(names) == (1 if size <= 256 * 1024 else 1 + -(-size // (8 * MIB)))
    assert max(admin.strlen(name) for name in names) <= 8 * MIB + 16
    assert backend.get(["v1/u/a"]) == {"v1/u/a": data}
    assert [stat.size_bytes for stat in backend.list()] == [size]
    for name in names:
        admin.pexpire(name, 5_000)
    backend.touch(["v1/u/a"])
    assert min(admin.pttl(name) for name in names) > 60_000
    assert backend.put({"v1/u/a": data}) == frozenset()
    assert backend.delete(["v1/u/a"]) == {"v1/u/a"}
    assert admin.keys("*") == []


def test_a_value_that_lost_a_part_is_not_there_and_is_put_again(backend, admin):
    """When the server evicted a part, the value counts as missing everywhere, and the next put, of
    any size, restores it.
    """
    large, small = os.urandom(9 * MIB), b"small"
    for again in (large, small):
        backend.put({"v1/u/a": large})
        (part,) = admin.keys("tb:p:*:0")
        admin.delete(part)
        assert backend.get(["v1/u/a"]) == {}
        assert backend.exists(["v1/u/a"]) == frozenset()
        backend.put({"v1/u/a": again})
        assert backend.exists(["v1/u/a"]) == {"v1/u/a"}
        assert backend.get(["v1/u/a"]) == {"v1/u/a": again}
        backend.delete(["v1/u/a"])


def test_writers_of_different_large_values_do_not_mix_them(backend):
    """Of threads that put different large values under one key one wins, and every reader sees its
    value whole.
    """
    contents = [os.urandom(300 * 1024) for _ in range(4)]
    for turn in range(3):
        created = in_threads(
            [lambda d=data, t=turn: backend.put({f"v1/u/{t}": d}) for data in contents]
        )
        assert sum(map(len, created)) == 1
        assert backend.get([f"v1/u/{turn}"])[f"v1/u/{turn}"] in contents


def test_a_value_may_be_too_large(backend, monkeypatch):
    """A value over the limit is refused before anything is sent."""
    from bundler.backends.backend_errors import BackendFull

    monkeypatch.setattr(values, "MAX_BYTES", 1000)
    with pytest.raises(BackendFull, match="has 1001 bytes, and a value at most 1000"):
        backend.put({"b": b"1", "a": b"x" * 1001})
    assert list(backend.list()) == []


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"TB",
        b"garbage",
        b"TBs" + b"9" * 45,
        b"TBs" + b"0" * 45,
        b"TBw000000000100",
        b"\xff" * 100,
    ],
    ids=repr,
)
def test_damaged_values_come_as_they_are(backend, admin, stored):
    """A value whose header is damaged is listed and got, for who reads checks digests; it can be
    deleted and put again.
    """
    admin.set("tb:o:v1/u/a", stored)
    if stored:
        assert backend.get(["v1/u/a"]) == {"v1/u/a": stored}
        assert [(stat.key, stat.modified_s) for stat in backend.list()] == [("v1/u/a", 0.0)]
        backend.touch(["v1/u/a"])
        assert admin.pttl("tb:o:v1/u/a") > 1000
        assert backend.delete(["v1/u/a"]) == {"v1/u/a"}
        assert backend.put({"v1/u/a": b"1"}) == {"v1/u/a"}


def test_everything_expires_and_units_live_longer_than_what_names_them(server, admin):
    """Units outlive manifests by a day and more, and each is prolonged by use, by what its writer
    wanted.
    """
    with RedisBackend.from_url(server.url(), ttl_s=1000, **PATIENT) as short:
        short.put({"v1/u/a": b"1", "v1/m/b/c": b"2"})
        short.swap_ref("v1/t/x", None, b"3")
        assert short.lease("k", 50)
    assert all(admin.pttl(name) > 0 for name in admin.keys("*"))
    assert 999_000 < admin.pttl("tb:o:v1/m/b/c") <= 1_000_000
    assert 999_000 < admin.pttl("tb:r:v1/t/x") <= 1_000_000
    assert admin.pttl("tb:o:v1/u/a") > 1_250_000 + 86_300_000
    for name in admin.keys("*"):
        admin.pexpire(name, 10_000)
    with RedisBackend.from_url(server.url(), ttl_s=5000, **PATIENT) as long:
        long.touch(["v1/u/a", "v1/m/b/c"])
        assert long.read_ref("v1/t/x") == b"3"
        assert 999_000 < admin.pttl("tb:o:v1/m/b/c") <= 1_000_000
        assert 1_000_000 < admin.pttl("tb:r:v1/t/x") <= 5_000_000
        now_s = long.now_s()
        assert all(abs(stat.modified_s - now_s) < 5 for stat in long.list())


def test_what_expired_is_not_there(backend, admin):
    """An object whose time is over is neither got nor listed, and can be put again."""
    backend.put({"a": b"1"})
    admin.pexpire("tb:o:a", 1)
    time.sleep(0.02)
    assert (backend.get(["a"]), list(backend.list())) == ({}, [])
    assert backend.put({"a": b"2"}) == {"a"}


def test_namespaces_are_stores_of_their_own(server, admin):
    """Two namespaces on one server know nothing of each other."""
    with (
        RedisBackend.from_url(server.url("admin", query="namespace=tb-x"), **PATIENT) as one,
        RedisBackend.from_url(server.url("admin"), namespace="tb", **PATIENT) as other,
    ):
        one.put({"a": b"1"})
        one.swap_ref("t", None, b"1")
        assert (
            other.get(["a"]),
            list(other.list()),
            other.read_ref("t"),
            list(other.list_refs()),
        ) == (
            {},
            [],
            None,
            [],
        )
        assert other.put({"a": b"2"}) == {"a"}
        assert one.get(["a"]) == {"a": b"1"}


def test_databases_are_stores_of_their_own(server, admin):
    """The database of the URL is the one that is used."""
    with RedisBackend.from_url(server.url(scheme="redis") + "/3", **PATIENT) as backend:
        backend.put({"a": b"1"})
    assert admin.keys("*") == []
    assert admin.info("keyspace").keys() == {"db3"}


def test_foreign_keys_are_not_listed(backend, admin):
    """Keys of others that look a little like ours are nothing of ours."""
    backend.put({"a": b"1"})
    admin.mset(
        {
            "tb": b"",
            "tb:o:": b"",
            "tb:o:../x": b"",
            "tb:o:\xff": b"",
            "tbx:o:a": b"",
            "o:a": b"",
            "tb:p:a:0:0": b"",
        }
    )
    assert [stat.key for stat in backend.list()] == ["a"]


def test_threads_share_a_store(backend):
    """Eight threads that put, get, list and count at once on one handle each get their own
    answers.
    """
    failures = []

    def work(number):
        mine = {f"t{number}/{turn}": b"%d/%d" % (number, turn) * 50 for turn in range(40)}
        for key, data in mine.items():
            if backend.put({key: data}) != {key} or backend.get([key]) != {key: data}:
                failures.append(key)
        if {stat.key for stat in backend.list(f"t{number}")} != mine.keys() or backend.get(
            mine
        ) != mine:
            failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_closed_store_still_answers_and_keeps_nothing_open(server, backend, admin):
    """A call after closing makes a connection for itself alone."""
    backend.put({"a": b"1"})
    backend.close()
    backend.close()
    assert backend.get(["a"]) == {"a": b"1"}
    writers = [client for client in admin.client_list() if client.get("user") == "writer"]
    assert writers == []


def test_scripts_that_the_server_forgot_are_sent_again(backend, admin):
    """After the server lost its scripts, calls go on as before."""
    backend.put({"a": b"1"})
    assert backend.exists(["a"]) == {"a"}
    admin.script_flush()
    assert backend.exists(["a"]) == {"a"}
    assert backend.swap_ref("t", None, b"1")
    admin.script_flush()
    backend.touch(["a"])
    assert backend.delete(["a"]) == {"a"}
