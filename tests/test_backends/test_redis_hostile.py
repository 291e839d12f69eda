# SPDX-License-Identifier: Apache-2.0
"""Keys of our namespace that hold what no value of ours can be: each costs its own key, little
memory and no time.
"""

import resource
import time

import pytest
import redis

from bundler.backends.backend_errors import BackendFull, BackendUnavailable
from bundler.backends.port import Unread
from bundler.backends.redis import RedisBackend, server_exchange, value_parts

MIB = 1024 * 1024
# The default time limits of a store: what is large must not take them up.
HASTY = {"timeout_s": 2, "connect_timeout_s": 2}
# What a process may take more while it meets a value of 512 MB; 300 MiB is what a child with that
# limit would die of.
FEW_BYTES = 100 * MIB
KEY, NAME, REF = "v1/u/a", "tb:o:v1/u/a", "tb:r:v1/t/x"
DIGEST = "0123456789abcdef"


@pytest.fixture
def backend(server, admin):
    """An empty store."""
    with RedisBackend.from_url(server.url(), **HASTY) as opened:
        yield opened


def huge(admin, name):
    """Store 512 MB, the most that a server takes."""
    admin.setrange(name, 512 * MIB - 1, b"x")


def large(admin, name):
    """Store a byte more than any value of ours has, with a header of ours."""
    admin.set(name, b"TBw%013d" % 60_000 + bytes(value_parts.WHOLE_BYTES + 1))


def head(admin, name, size=1024 * MIB, part_bytes=8 * MIB + 16):
    """Store a head that names parts of 1 GiB, which are there."""
    admin.set(name, b"TBs%013d%016d%s" % (60_000, size, DIGEST.encode()))
    for number in range(-(-size // (8 * MIB))):
        admin.setrange(f"tb:p:{KEY}:{DIGEST}:{number}", part_bytes - 1, b"x")


def a_list(admin, name):
    """Store a list."""
    admin.rpush(name, "x", "y")


def a_hash(admin, name):
    """Store a hash."""
    admin.hset(name, "x", "y")


def a_set(admin, name):
    """Store a set."""
    admin.sadd(name, "x")


def a_sorted_set(admin, name):
    """Store a sorted set."""
    admin.zadd(name, {"x": 1})


def a_stream(admin, name):
    """Store a stream."""
    admin.xadd(name, {"x": "y"})


def short(admin, name):
    """Store fewer bytes than a part has."""
    admin.set(name, b"short")


WRONG = [a_list, a_hash, a_set, a_sorted_set, a_stream]


def peak_bytes():
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("store", [huge, large, head, *WRONG], ids=lambda f: f.__name__)
@pytest.mark.slow
def test_what_is_none_of_ours_costs_its_own_key_alone(backend, admin, store):
    """Reading, listing, touching and asking go on for the neighbors, in little memory and within
    the time limits.
    """
    store(admin, NAME)
    others = {f"v1/u/{number}": b"%d" % number for number in range(20)}
    backend.put(others)
    before = peak_bytes()
    started = time.monotonic()
    found = backend.get([KEY, *others])
    assert (type(found.pop(KEY)), found) == (Unread, others)
    assert type(backend.get([KEY])[KEY]) is Unread
    assert backend.exists(others) == others.keys()
    assert backend.claim([*others, KEY]) >= others.keys()
    backend.touch([*others, KEY])
    assert {stat.key for stat in backend.list()} == {*others, KEY}
    assert time.monotonic() - started < 5
    assert peak_bytes() - before < FEW_BYTES
    assert backend.delete([KEY, "v1/u/0"]) == {KEY, "v1/u/0"}
    assert admin.exists(NAME) == 0


@pytest.mark.parametrize("store", [large, *WRONG], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [1, 300_000])
def test_what_is_none_of_ours_is_not_there_and_gives_way(backend, admin, store, size):
    """It does not count as there, so that a push sends the object, and what is put takes
    its place.
    """
    store(admin, NAME)
    assert backend.exists([KEY]) == frozenset()
    assert backend.claim([KEY]) == frozenset()
    assert backend.put({KEY: b"x" * size, "v1/u/b": b"1"}) == {KEY, "v1/u/b"}
    assert backend.get([KEY, "v1/u/b"]) == {KEY: b"x" * size, "v1/u/b": b"1"}


def test_an_empty_value_gives_way(backend, admin):
    """Nothing of ours is stored without a header: what has no bytes is not there, and in nobody's
    way.
    """
    admin.set(NAME, b"")
    assert (backend.get([KEY]), backend.exists([KEY])) == ({}, frozenset())
    assert backend.put({KEY: b"1"}) == {KEY}
    admin.set(NAME, b"")
    assert backend.delete([KEY]) == {KEY}


def test_what_only_begins_like_a_head_is_none(backend, admin):
    """A head has a size of its own; a byte more, and it is a damaged value, which is there until it
    is deleted.
    """
    admin.set(NAME, b"TBs%013d%016d%s" % (60_000, MIB, DIGEST.encode()) + b"x")
    assert backend.exists([KEY]) == {KEY}
    assert len(backend.get([KEY])[KEY]) == value_parts.HEAD_BYTES + 1


@pytest.mark.parametrize("store", [*WRONG, short], ids=lambda f: f.__name__)
def test_parts_that_are_none_of_ours_are_missing_and_replaced(backend, admin, store):
    """A large value with a part of another type or size is not there; the next put repairs it,
    whoever puts first.
    """
    data = bytes(range(256)) * 1200
    for again in (True, False):
        backend.put({KEY: data})
        (part,) = admin.keys("tb:p:*")
        admin.delete(part, *([] if again else [NAME]))
        store(admin, part)
        assert backend.get([KEY]) == {}
        assert backend.exists([KEY]) == frozenset()
        backend.put({KEY: data})
        assert backend.exists([KEY]) == {KEY}
        assert backend.get([KEY]) == {KEY: data}
        backend.delete([KEY])


def test_a_limit_bounds_what_parts_may_bring(backend, admin):
    """Of a value whose head says more than the reader expects, the beginning of the first part is
    asked for and no more.
    """
    head(admin, NAME, size=40 * MIB)
    admin.config_resetstat()
    found = backend.get_within({KEY: MIB})[KEY]
    assert isinstance(found, Unread)
    assert (found.size_bytes, found.max_bytes, len(found)) == (40 * MIB, MIB, 128)
    assert admin.info("commandstats")["cmdstat_getrange"]["calls"] == 2
    assert len(backend.get_within({KEY: 40 * MIB})[KEY]) == 40 * MIB


@pytest.mark.parametrize("store", WRONG, ids=lambda f: f.__name__)
def test_a_ref_of_another_type_is_an_empty_one(backend, admin, store):
    """It is read as a value that says nothing, and can be changed and removed as that."""
    for after in (b"new", None):
        store(admin, REF)
        assert list(backend.list_refs()) == ["v1/t/x"]
        assert backend.read_ref("v1/t/x") == b""
        assert not backend.swap_ref("v1/t/x", None, b"new")
        assert backend.swap_ref("v1/t/x", b"", after)
        assert backend.read_ref("v1/t/x") == after
        admin.delete(REF)


def test_a_huge_ref_is_read_as_its_beginning(backend, admin):
    """A tag of 512 MB takes neither memory nor time, and can be replaced and removed by what was
    read of it.
    """
    for store, after in ((huge, b"new"), (large, None)):
        store(admin, REF)
        before, started = peak_bytes(), time.monotonic()
        beginning = backend.read_ref("v1/t/x")
        assert len(beginning) == value_parts.REF_BYTES + 1
        assert not backend.swap_ref("v1/t/x", beginning[:-1], b"new")
        assert backend.swap_ref("v1/t/x", beginning, after)
        assert backend.read_ref("v1/t/x") == after
        assert time.monotonic() - started < 5
        assert peak_bytes() - before < FEW_BYTES
        admin.delete(REF)
    with pytest.raises(BackendFull, match="a ref at most"):
        backend.swap_ref("v1/t/x", None, beginning)


def test_a_reader_reads_the_same(server, admin):
    """Who may only read meets what is none of ours as everybody does."""
    large(admin, NAME)
    a_hash(admin, "tb:o:v1/u/b")
    a_list(admin, REF)
    with RedisBackend.from_url(server.url("reader"), **HASTY) as reader:
        found = reader.get([KEY, "v1/u/b"])
        assert {key: type(value) for key, value in found.items()} == {KEY: Unread, "v1/u/b": Unread}
        assert reader.exists([KEY, "v1/u/b"]) == frozenset()
        assert {stat.key for stat in reader.list()} == {KEY, "v1/u/b"}
        assert reader.read_ref("v1/t/x") == b""


def test_a_lease_of_another_type_is_held_by_somebody(backend, admin):
    """It cannot be taken, and a lease that was replaced by it is lost; neither is an error."""
    mine = backend.lease("k", 50)
    admin.delete("tb:l:k")
    a_list(admin, "tb:l:k")
    assert backend.lease("k", 50) is None
    assert not mine.renew(50)
    assert not mine.release()


@pytest.mark.parametrize("user", ["writer", "reader"])
def test_names_of_megabytes_do_not_end_a_listing(server, admin, monkeypatch, user):
    """A page of names that is larger than an answer may be comes again without those that are
    longer than ours.
    """
    with RedisBackend.from_url(server.url(), **HASTY) as backend:
        backend.put({"a": b"1", "b": b"2"})
        backend.swap_ref("t", None, b"3")
    admin.set("tb:o:" + "x" * 300_000, b"")
    admin.set("tb:r:" + "x" * 300_000, b"")
    monkeypatch.setattr(server_exchange, "REPLY_BYTES", 100_000)
    monkeypatch.setattr(server_exchange.run, "__defaults__", (100_000,))
    with RedisBackend.from_url(server.url(user), **HASTY) as backend:
        assert {stat.key for stat in backend.list()} == {"a", "b"}
        assert list(backend.list_refs()) == ["t"]


def test_an_answer_longer_than_asked_for_is_unavailable(backend, admin):
    """A server that sends more than it was asked for is cut off, and the next call has a connection
    of its own.
    """
    backend.put({"a": b"x" * 200_000})
    link, name = backend._link, "tb:o:a"
    with pytest.raises(BackendUnavailable, match="more than was asked for"):
        link.exchange_strings([(name, ("GET", name))], 1000)
    assert backend.get(["a"]) == {"a": b"x" * 200_000}


def test_the_client_of_these_tests_sees_wrong_types(admin):
    """The server does refuse what is asked of a list as of a string: else nothing here would be
    tested.
    """
    a_list(admin, NAME)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        admin.get(NAME)
