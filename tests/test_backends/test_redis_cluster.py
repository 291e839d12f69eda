# SPDX-License-Identifier: Apache-2.0
"""The store on a Redis Cluster while keys move and masters die; the contract is in
test_redis.py.
"""

import threading
import time

import pytest
import redis_server
from redis.crc import key_slot

from bundler.backends.backend_errors import BackendDenied, BackendUnavailable
from bundler.backends.redis import RedisBackend, server_exchange

PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}


@pytest.fixture(scope="module")
def nodes():
    """A cluster of three masters."""
    with redis_server.cluster(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def backend(nodes):
    """An empty store."""
    for node in nodes:
        node.client().flushall()
    with RedisBackend.from_url(redis_server.cluster_url(nodes), **PATIENT) as opened:
        yield opened


def identity(node):
    """Return a node's name in its cluster."""
    return node.client().cluster("MYID")


def owner(nodes, name):
    """Return the node that has a key, and another one."""
    slot = key_slot(name.encode())
    for node in nodes:
        if node.client().execute_command("CLUSTER", "COUNTKEYSINSLOT", slot):
            return node, next(other for other in nodes if other is not node), slot
    raise AssertionError(name)


def test_keys_are_spread_and_any_node_finds_them(nodes, backend):
    """Keys lie on all masters; one seed is enough to find every key, whichever it is."""
    items = {f"v1/u/{number}": b"%d" % number for number in range(300)}
    assert backend.put(items) == items.keys()
    assert min(node.client().dbsize() for node in nodes) > 50
    for node in nodes:
        with RedisBackend.from_url(redis_server.cluster_url([node]), **PATIENT) as other:
            assert other.get(items) == items
            assert {stat.key for stat in other.list("v1/u")} == items.keys()


def test_a_node_that_knows_a_part_of_the_cluster_is_not_believed(nodes, backend, monkeypatch):
    """A node that has just come tells of a few slots; the next one is asked, and what only the
    first one tells is not followed.
    """
    told, ask = [], server_exchange.ask

    def asked(node, shown, *words):
        found = ask(node, shown, *words)
        if words == ("CLUSTER", "SLOTS"):
            told.append(node)
            if len(told) == 1:
                first, last, (host, port, *rest), *more = found[0]
                return [[first, last, [host, port + 1, *rest], *more]]
        return found

    monkeypatch.setattr(server_exchange, "ask", asked)
    items = {f"v1/u/{number}": b"%d" % number for number in range(300)}
    with RedisBackend.from_url(redis_server.cluster_url(nodes), **PATIENT) as opened:
        assert opened.put(items) == items.keys()
        assert opened.get(items) == items
    assert len(told) == 2
    assert told[0] is not told[1]


def test_a_batch_is_one_turn_for_all_masters(nodes, backend, monkeypatch):
    """A batch goes to all masters at once, so that it costs one turn and not one for each."""
    backend.exists(["v1/u/a"])  # from here on it knows which master has which slot
    turns = []
    run = server_exchange.run
    monkeypatch.setattr(
        server_exchange, "run", lambda work, *rest: turns.append(len(work)) or run(work, *rest)
    )
    items = {f"v1/u/{number}": b"%d" % number for number in range(300)}
    backend.put(items)
    assert backend.get(items) == items
    assert backend.exists(items) == items.keys()
    assert turns[0] == 3
    assert len(turns) <= 5


def test_keys_that_move_are_found(nodes, backend):
    """While a slot moves keys are asked for where they went, and afterwards found there; nothing is
    lost or made twice.
    """
    keys = [f"v1/u/{number}" for number in range(50)]
    backend.put({key: key.encode() for key in keys})
    moving = keys[7]
    name = f"tb:o:{moving}"
    source, target, slot = owner(nodes, name)
    old, new = source.client(), target.client()
    new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", identity(source))
    old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", identity(target))
    assert backend.get(keys) == {key: key.encode() for key in keys}
    secret = redis_server.PASSWORDS["admin"]
    old.execute_command(
        "MIGRATE", "127.0.0.1", target.port, name, 0, 5000, "AUTH2", "admin", secret
    )
    # The old master says ASK.
    assert backend.get(keys) == {key: key.encode() for key in keys}
    assert backend.put({moving: b"other"}) == frozenset()
    assert backend.exists([moving]) == {moving}
    # The one that gets it first, else the other two may yet agree that it is the old one's.
    for node in (target, *(node for node in nodes if node is not target)):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", identity(target))
    # Now it says MOVED.
    assert backend.get(keys) == {key: key.encode() for key in keys}
    assert backend.delete([moving]) == {moving}
    assert backend.put({moving: b"new"}) == {moving}
    assert owner(nodes, name)[0] is target


def test_a_key_that_is_never_found_is_an_error(nodes, backend, monkeypatch):
    """Following redirections ends after a few."""
    import redis

    backend.put({"a": b"1"})
    asked = []

    def lost(wanted, most_bytes):
        asked.append(len(wanted))
        return [redis.exceptions.MovedError("1 127.0.0.1:1") for _ in wanted]

    monkeypatch.setattr(backend._link, "_asked", lost)
    with pytest.raises(BackendUnavailable):
        backend.get(["a"])
    assert len(asked) == server_exchange.REDIRECTS + 1


def test_threads_share_a_cluster(backend):
    """Threads on one handle get their own answers, the first time too, when nobody knows yet who
    has what.
    """
    failures = []

    def work(number):
        mine = {f"t{number}/{turn}": b"%d/%d" % (number, turn) for turn in range(30)}
        if backend.put(mine) != mine.keys() or backend.get(mine) != mine:
            failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_readers_of_a_cluster_read(nodes, backend):
    """The users are the same on a cluster."""
    backend.put({"v1/u/a": b"1"})
    with RedisBackend.from_url(redis_server.cluster_url(nodes, "reader"), **PATIENT) as reader:
        assert reader.get(["v1/u/a"]) == {"v1/u/a": b"1"}
        assert [stat.key for stat in reader.list()] == ["v1/u/a"]
        with pytest.raises(BackendDenied):
            reader.put({"v1/u/b": b"1"})


def test_a_cluster_that_is_not_there_is_unavailable():
    """When no seed answers, the error comes after the limits of each, and names the cluster without
    its password.
    """
    ports = [redis_server.free_port() for _ in range(2)]
    url = f"redis+cluster://writer:s3cret@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    with (
        RedisBackend.from_url(url) as backend,
        pytest.raises(BackendUnavailable, match="refused") as caught,
    ):
        backend.get(["a"])
    assert f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_cluster_that_nobody_has_put_together_is_unavailable():
    """Nodes without slots are no cluster yet, and a single server is none at all: typed errors."""
    with (
        redis_server.running(redis_server.NAMES[0], files=("cache.conf", "cluster.conf")) as node,
        RedisBackend.from_url(redis_server.cluster_url([node]), **PATIENT) as backend,
    ):
        for call in (lambda b: b.get(["a"]), lambda b: list(b.list()), lambda b: b.now_s()):
            with pytest.raises(BackendUnavailable, match="no master has any slot"):
                call(backend)
    with redis_server.running(redis_server.NAMES[0]) as single:
        url = redis_server.cluster_url([single])
        with (
            RedisBackend.from_url(url, **PATIENT) as backend,
            pytest.raises(BackendUnavailable, match="cluster support"),
        ):
            backend.get(["a"])


@pytest.mark.serial
def test_a_dead_master_is_an_error_and_the_others_work(nodes):
    """Keys of a killed master are unavailable within the limits; those of the others are there (the
    last test: it kills).
    """
    with RedisBackend.from_url(redis_server.cluster_url(nodes), timeout_s=1) as backend:
        items = {f"v1/u/{number}": b"%d" % number for number in range(60)}
        backend.put(items)
        victim = owner(nodes, "tb:o:v1/u/7")[0]
        lost = [key for key in items if owner(nodes, f"tb:o:{key}")[0] is victim]
        victim.kill()
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            backend.get(["v1/u/7"])
        assert time.monotonic() - started < 4
        kept = [key for key in items if key not in lost]
        assert backend.get(kept) == {key: items[key] for key in kept}
        with pytest.raises(BackendUnavailable):
            backend.get(lost[:1] + kept)
