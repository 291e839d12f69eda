# SPDX-License-Identifier: Apache-2.0
"""Servers that answer commands of Redis with what no Redis says: a typed error each time, in little
memory and time.
"""

import contextlib
import itertools
import resource
import time

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import InvalidResponse

import bundler
from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.redis import RedisBackend, server_exchange
from bundler.backends.redis.replies import OverlongReply, ReplyParser
from bundler.backends.redis.server_connections import Metered
from bundler.errors import NotFound, StoreUnavailable
from tools.shared.fake_redis import FakeRedis

MIB = 1 << 20
SLACK_S = 6.0
CALLS = {
    "get": lambda b: b.get(["v1/u/a"]),
    "put": lambda b: b.put({"v1/u/a": b"1"}),
    "put large": lambda b: b.put({"v1/u/a": bytes(300_000)}),
    "exists": lambda b: b.exists(["v1/u/a"]),
    "delete": lambda b: b.delete(["v1/u/a"]),
    "touch": lambda b: b.touch(["v1/u/a"]),
    "list": lambda b: list(b.list()),
    "read_ref": lambda b: b.read_ref("t"),
    "swap_ref": lambda b: b.swap_ref("t", None, b"1"),
    "list_refs": lambda b: list(b.list_refs()),
    "now_s": lambda b: b.now_s(),
    "lease": lambda b: b.lease("k", 10),
    "leases": lambda b: list(b.leases()),
}
WRONG = {
    "nested": b"*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
    "a million arrays": b"*1\r\n" * 1_000_000,
    "a long number": b":" + b"9" * 5000 + b"\r\n",
    "65 bits": b":18446744073709551616\r\n",
    "an endless array": b"*2000000000\r\n",
    "an array of 64 bits": b"*9223372036854775807\r\n",
    "a negative size": b"$-5\r\n",
    "a huge text": b"$99999999999\r\n",
    "a text that goes on": b"$1\r\nabc\r\n",
    "no redirection": b"-MOVED\r\n",
    "RESP 3": b"%1\r\n+a\r\n+b\r\n",
    "an endless line": b"x" * 200_000,
}


@contextlib.contextmanager
def talking(answer, scheme="redis"):
    """Open a store on a server that gives these answers; yields both."""
    with (
        FakeRedis(answer) as server,
        RedisBackend.from_url(server.url(scheme), timeout_s=1) as backend,
    ):
        yield server, backend


def fails(call, backend, kinds=BackendUnavailable):
    """Make a call that must fail as unavailable, within seconds."""
    started = time.monotonic()
    with pytest.raises(kinds) as caught:
        CALLS[call](backend)
    assert time.monotonic() - started < SLACK_S
    return str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_answer_is_unavailable(call, name):
    """Whatever is announced or sent; memory is not taken before the bytes have come."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with talking(lambda _words: WRONG[name]) as (_server, backend):
        fails(call, backend, (BackendUnavailable, BackendError))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 64 * MIB


@pytest.mark.parametrize(
    "answer",
    [b":7\r\n", b"$3\r\nabc\r\n", b"*0\r\n", b"*2\r\n:1\r\n:2\r\n", b"*-1\r\n", b"*1\r\n*0\r\n"],
)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_an_answer_of_another_kind_is_typed(answer, scheme):
    """Every call either takes an answer of the kind that its command has, or raises our error."""
    with talking(lambda _words: answer, scheme) as (_server, backend):
        for call in CALLS.values():
            try:
                call(backend)
            except BackendError as error:
                # some calls may accept it
                assert "Redis" in str(error) or "redis" in str(error)  # noqa: PT017


def test_a_wrong_answer_names_command_and_kind():
    """The message says what was asked, what came and what was expected."""
    with talking(lambda words: b"*0\r\n" if words[0] == b"GETRANGE" else None) as (
        _server,
        backend,
    ):
        said = fails("get", backend)
    assert said == "answered GETRANGE with a list of 0; expected a text; is it a Redis server?"


def endless(cursors):
    """Return an answer of which the listing never ends."""

    def answer(words):
        if words[0] != b"SCAN":
            return None
        cursor = b"%d" % next(cursors)
        return b"*2\r\n$%d\r\n%s\r\n*1\r\n$9\r\ntb:r:v1/x\r\n" % (len(cursor), cursor)

    return answer


def test_a_listing_that_gives_the_same_place_twice_ends():
    """A cursor that never reaches 0 is noticed when it comes again."""
    with talking(endless(itertools.cycle([5, 7]))) as (server, backend):
        for call in ("list_refs", "leases"):
            assert "no end" in fails(call, backend)
        assert server.asked < 40


def test_a_listing_without_end_has_a_limit_of_time(monkeypatch):
    """Where each place is a new one, time ends it."""
    monkeypatch.setattr(server_exchange, "LISTING_S", 0.2)
    with talking(endless(itertools.count(1))) as (_, backend):
        assert "no end" in fails("list_refs", backend)


def test_a_listing_without_end_has_a_limit_of_names(monkeypatch):
    """Names without end are not all kept."""
    monkeypatch.setattr(server_exchange, "LISTED_NAMES", 50)
    with talking(endless(itertools.count(1))) as (_, backend):
        assert "no end" in fails("list_refs", backend)


def test_the_error_for_a_missing_tag_does_not_wait_for_a_listing():
    """What the tags are called that are there is a hint, for which nobody waits long."""
    with (
        FakeRedis(endless(itertools.count(1))) as server,
        bundler.open_store(server.url()) as store,
    ):
        started = time.monotonic()
        with pytest.raises(NotFound, match="no tag 'nope'"):
            store.pull("nope")
        assert time.monotonic() - started < SLACK_S
        assert store.near_tags("nope") == ()


def test_strict_mode_waits_once_and_briefly_for_what_is_nearest():
    """What was recorded is listed within the time that it is given, or not at all."""
    with (
        FakeRedis(endless(itertools.count(1))) as server,
        bundler.open_store(server.url()) as store,
    ):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            list(store.kernel_records().recorded(10, within_s=0.2))
        assert time.monotonic() - started < SLACK_S


def test_a_node_that_names_no_address_is_typed():
    """Ports and hosts of a cluster are those of addresses."""
    for host, port in ((b"a\0b", 1), (b"h", 99_999), (b"h", -1), (b"\xff", 80)):
        told = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$%d\r\n%s\r\n:%d\r\n" % (len(host), host, port)
        with talking(lambda _words, told=told: told, "redis+cluster") as (_server, backend):
            assert "no address" in fails("get", backend)


class Pieces:
    """A socket that gives some bytes, in pieces."""

    def __init__(self, pieces):
        self.pieces = list(pieces)

    def settimeout(self, seconds):
        """Take no notice."""

    def recv(self, count):
        """Give the next piece."""
        return self.pieces.pop(0) if self.pieces else b""


def parsed(pieces, most_bytes=100_000):
    """Return what the parser makes of the next answer."""
    parser = ReplyParser(1000)
    metered = Metered(Pieces(pieces), 10)
    metered.begin(most_bytes)
    parser.on_connect(type("Connection", (), {"_sock": metered}))
    return parser.read_response()


VALUES = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def encoded(value):
    """Return the bytes of a value in RESP 2."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


def depth(value):
    """Return how deep lists lie in lists."""
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(1, 9))
def test_values_are_read_as_they_were_written(value, size):
    """However the bytes are cut on their way; what lies too deep is refused."""
    data = encoded(value)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    if depth(value) <= 4:
        assert parsed(pieces) == value
    else:
        with pytest.raises(InvalidResponse):
            parsed(pieces)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    """Nothing but errors of Redis's or ours comes out."""
    for kind in (b"", b"*2\r\n", b"$", b":", b"-", b"*"):
        try:
            parsed([kind + data])
        except (redis.RedisError, OverlongReply):
            continue


def test_elements_count_against_the_allowance():
    """An array takes memory besides its bytes."""
    assert parsed([b"*10\r\n" + b":1\r\n" * 10]) == [1] * 10
    with pytest.raises(OverlongReply):
        parsed([b"*2000\r\n"], most_bytes=100_000)
