# SPDX-License-Identifier: Apache-2.0
"""A store that is served over HTTP: what can be read, what cannot, and how much of it at once."""

import hashlib
import http.client
import os
import re
import socket
import threading
import time

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.peers import object_frames
from bundler.backends.peers.served_objects import ServingBounds
from bundler.backends.timed_socket import TimedSocket
from bundler.errors import ConfigError
from bundler.store.store_server import StoreServer

ANYWHERE = "127.0.0.1:0"


@pytest.fixture
def served(memory):
    """A store with a tag, and its server."""
    memory.push(oracle.restorable(1, 2, each=2000), "team/x")
    with memory.serve(ANYWHERE) as server:
        yield memory, server


def ask(server, method, path, body=None, headers=None):
    """Return status, headers and body of one request over a connection of its own."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        with connection.getresponse() as response:
            return response.status, dict(response.headers), response.read()
    finally:
        connection.close()


def a_unit(store):
    """Return the key and the stored bytes of a unit."""
    key = oracle.of_kind(store, "u")[0]
    return key, oracle.raw(store)[key]


def test_an_object_is_read_by_its_digest(served):
    """GET gives the stored bytes with their digest as ETag, HEAD the same without them, and who has
    them gets 304.
    """
    store, server = served
    key, value = a_unit(store)
    status, headers, body = ask(server, "GET", f"/{key}")
    assert (status, body, headers["ETag"]) == (200, value, f'"{hashlib.sha256(value).hexdigest()}"')
    assert "immutable" in headers["Cache-Control"]
    status, again, body = ask(server, "HEAD", f"/{key}")
    assert (status, body, again["ETag"], again["Content-Length"]) == (
        200,
        b"",
        headers["ETag"],
        str(len(value)),
    )
    assert ask(server, "GET", f"/{key}", headers={"If-None-Match": headers["ETag"]})[::2] == (
        304,
        b"",
    )


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ("bytes=0-3", 206, slice(0, 4)),
        ("bytes=10-", 206, slice(10, None)),
        ("bytes=-5", 206, slice(-5, None)),
        ("bytes=5-99999999", 206, slice(5, None)),
        ("bytes=99999999-", 416, slice(0, 0)),
        ("bytes=4-3", 416, slice(0, 0)),
        ("bytes=0-1,4-5", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
    ],
)
def test_a_range_of_an_object(served, asked, status, part):
    """One range comes as it is asked for; what is none of ours is the whole, as the standard has
    it.
    """
    key, value = a_unit(served[0])
    found, headers, body = ask(served[1], "GET", f"/{key}", headers={"Range": asked})
    assert (found, body) == (status, value[part])
    assert ("Content-Range" in headers) == (status != 200)
    stale = ask(served[1], "GET", f"/{key}", headers={"Range": asked, "If-Range": '"other"'})
    assert stale[::2] == (200, value)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/t",
        "/v1/t/",
        "/v1/t/none",
        "/v1/u",
        "/v1/k/abc",
        "/v1/f/abc",
        "/v1/u/../t/team/x",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/v1/t/../../data",
        "/v1/t/team%2fx",
        "/data/v1",
        "/catalog",
        "/v1/u/" + "0" * 64,
        "/v1/u/" + "A" * 64,
        "/v1/m/" + "0" * 64,
        "/v1/t/" + "a/" * 9 + "a",
        "http://other/v1/t/none",
    ],
)
def test_nothing_else_is_readable(served, path):
    """Other paths, of files too, are 404, and nothing of the file system is told."""
    status, _, body = ask(served[1], "GET", path)
    assert (status, body) == (404, b"there is no such object or tag\n")


def test_records_are_not_served(local, url):
    """A directory's other files, and objects that go by no digest, cannot be read, whatever lies
    there.
    """
    local.push(oracle.bundle("A"), "t")
    oracle.overwrite(local, "v1/k/secret", b"x")
    with local.serve(ANYWHERE) as server:
        assert ask(server, "GET", "/v1/k/secret")[0] == 404
        assert ask(server, "GET", "/keys?prefix=v1/k")[::2] == (200, b"")
        assert ask(server, "GET", "/keys?prefix=../..")[0] == 400
        body = object_frames.encode_question({"v1/k/secret": 100})
        assert ask(server, "POST", "/objects", body)[2] == object_frames.encode_size(
            object_frames.ABSENT
        )


def test_tags_are_read_and_listed(served):
    """A tag's value, which may change, is not to be kept by caches; lists name objects with
    sizes.
    """
    store, server = served
    status, headers, body = ask(server, "GET", "/v1/t/team/x")
    assert (status, body) == (200, store._backend.read_ref("v1/t/team/x"))
    assert headers["Cache-Control"] == "no-cache"
    assert ask(server, "GET", "/keys?prefix=v1/t")[2] == b"v1/t/team/x 0 0.000\n"
    lines = ask(server, "GET", "/keys?prefix=v1/u")[2].decode().splitlines()
    assert {line.split()[0]: int(line.split()[1]) for line in lines} == {
        key: len(value) for key, value in oracle.raw(store).items() if key.startswith("v1/u/")
    }


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("PUT", "/v1/t/x", b"x", {}, 405),
        ("DELETE", "/v1/t/team/x", None, {}, 405),
        ("POST", "/v1/t/team/x", b"x", {}, 404),
        ("POST", "/objects", b"no newline", {}, 400),
        ("POST", "/objects", b"v1/u/../x 5\n", {}, 400),
        ("POST", "/objects", b"v1/u/a -5\n", {}, 400),
        ("POST", "/objects", b"v1/u/a 5\n" * (object_frames.MOST_KEYS + 1), {}, 400),
        ("POST", "/objects", b"x" * (object_frames.QUESTION_BYTES + 1), {}, 413),
        ("POST", "/objects", None, {"Content-Length": "-1"}, 413),
        ("GET", "/health", None, {f"X-{number}": "x" for number in range(200)}, 431),
        ("GET", "/" + "x" * 70_000, None, {}, 414),
        ("POST", "/objects", None, {"Transfer-Encoding": "chunked", "Content-Length": "5"}, 413),
    ],
)
def test_bad_requests_are_refused(served, method, path, body, headers, status):
    """What is too large, malformed or would write gets its status, and the server goes on."""
    assert ask(served[1], method, path, body, headers)[0] == status
    assert ask(served[1], "GET", "/health")[::2] == (200, b"ok\n")


def test_an_address_that_is_no_url(served):
    """It is 400, and the thread that reads it does not fail."""
    with socket.create_connection(
        ("127.0.0.1", int(served[1].url.rpartition(":")[2]))
    ) as connection:
        connection.sendall(b"GET http://[nonsense/ HTTP/1.1\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@given(st.binary(max_size=64), st.integers(0, 4))
def test_an_answer_is_read_or_refused(body, count):
    """Any bytes are either all that was asked for, as they were sent, or a `ValueError`."""
    keys = [f"k{number}" for number in range(count)]
    try:
        found = list(object_frames.decode_answer(keys, memoryview(body)))
    except ValueError:
        return
    assert [key for key, _ in found] == keys
    sizes = [len(value) if isinstance(value, bytes) else value for _, value in found]
    parts = [value if isinstance(value, bytes) else b"" for _, value in found]
    assert (
        b"".join(object_frames.encode_size(s) + p for s, p in zip(sizes, parts, strict=True))
        == body
    )


@given(st.binary(max_size=64))
def test_a_question_is_read_or_refused(body):
    """Any bytes are either keys with sizes, which ask the same when they are written again, or
    nothing.
    """
    found = object_frames.decode_question(body)
    if found is not None:
        assert object_frames.decode_question(object_frames.encode_question(found)) == found


def test_metrics_have_the_format_of_prometheus(served):
    """Each line is a comment or a sample, and what was asked for is counted."""
    key, value = a_unit(served[0])
    ask(served[1], "GET", f"/{key}")
    text = ask(served[1], "GET", "/metrics")[2].decode()
    sample = re.compile(
        r'# (HELP|TYPE) \w+ .+|triton_bundler_serve_\w+(\{\w+="\w+"(,\w+="\w+")*\})? \d+'
    )
    assert [line for line in text.splitlines() if not sample.fullmatch(line)] == []
    assert 'triton_bundler_serve_requests_total{code="200",route="object"} 1' in text
    assert f"triton_bundler_serve_sent_bytes_total {len(value)}" in text
    assert "triton_bundler_serve_source_reads_total 1" in text


def test_an_answer_is_counted_when_its_reader_has_it(served, monkeypatch):
    """Whoever has an answer finds it in the counts, however late its server's thread goes on."""
    key, value = a_unit(served[0])
    send = TimedSocket.sendall
    found = []

    def noted(connection, data):
        found.append((served[1].total("requests_total"), served[1].total("sent_bytes_total")))
        send(connection, data)

    monkeypatch.setattr(TimedSocket, "sendall", noted)
    assert ask(served[1], "GET", f"/{key}")[2] == value
    assert found == [(1, len(value))]


def test_damage_is_not_handed_on(served):
    """An object whose bytes are not what was stored is absent, and counted."""
    store, server = served
    key, _ = a_unit(store)
    oracle.flip(store, key)
    assert ask(server, "GET", f"/{key}")[0] == 404
    assert 'objects_total{result="damaged"} 1' in server.metrics()


class Slow(oracle.Wrapped):
    """A byte store whose reads wait for an event."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go, self.reads, self.error = threading.Event(), [], None

    def get_within(self, max_bytes):
        self.reads.append(list(max_bytes))
        self.go.wait(10)
        if self.error is not None:
            raise self.error
        return self.inner.get_within(max_bytes)


def test_who_asks_at_one_time_shares_one_read(memory):
    """Twenty requests for one object read it once from the source, and later ones come from
    memory.
    """
    memory.push(oracle.restorable(1), "t")
    key, value = a_unit(memory)
    slow, got = Slow(memory._backend.inner), []
    with StoreServer(slow, ANYWHERE) as server:
        threads = [
            threading.Thread(target=lambda: got.append(ask(server, "GET", f"/{key}")[2]))
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        while len(slow.reads) < 1:
            time.sleep(0.001)
        slow.go.set()
        for thread in threads:
            thread.join()
        assert ask(server, "GET", f"/{key}")[2] == value
    assert got == [value] * 20
    assert slow.reads == [[key]]


def test_a_source_that_fails_is_503(memory):
    """The requests that wait for it get 503 with Retry-After, and the next one is tried anew."""
    memory.push(oracle.restorable(1), "t")
    key, value = a_unit(memory)
    slow = Slow(memory._backend.inner)
    slow.go.set()
    slow.error = BackendUnavailable("redis://secret-host: gone")
    with StoreServer(slow, ANYWHERE) as server:
        status, headers, body = ask(server, "GET", f"/{key}")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"secret" not in body
        slow.error = None
        assert ask(server, "GET", f"/{key}")[2] == value


def test_too_many_connections_are_refused(memory):
    """One more than the bound gets 503 with Retry-After, and is served once another has gone."""
    with StoreServer(memory._backend.inner, ANYWHERE, ServingBounds(connections=2)) as server:
        idle = [
            socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            for _ in range(2)
        ]
        until(lambda: server.total("connections") == 2)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as third:
            assert third.recv(1000).startswith(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
            )
        for connection in idle:
            connection.close()
        until(lambda: not server.total("connections"))
        assert ask(server, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "sent", [b"GET /health HTT", b"POST /objects HTTP/1.1\r\nContent-Length: 90\r\n\r\nv1/u"]
)
def test_who_is_slow_on_purpose_is_cut(memory, sent):
    """A request that comes byte by byte has one deadline for all of it, and its connection ends
    then.
    """
    with StoreServer(memory._backend.inner, ANYWHERE, ServingBounds(request_s=0.2)) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as loris:
            started = time.monotonic()
            loris.sendall(sent)
            loris.settimeout(0.05)
            ended = False
            while not ended and time.monotonic() - started < 5:
                try:
                    loris.sendall(b"x")
                    ended = loris.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended = True
            assert 0.15 < time.monotonic() - started < 2
        assert 'connections_total{result="cut"} 1' in server.metrics()


def test_leaving_finishes_what_is_under_way(memory):
    """Closing listens no more at once, ends idle connections, and waits for an answer that is under
    way.
    """
    memory.push(oracle.restorable(1), "t")
    key, value = a_unit(memory)
    slow, got, ended = Slow(memory._backend.inner), [], []
    server = StoreServer(slow, ANYWHERE)
    port = int(server.url.rpartition(":")[2])
    idle = http.client.HTTPConnection("127.0.0.1", port)
    idle.request("GET", "/health")
    idle.getresponse().read()
    asking = threading.Thread(target=lambda: got.append(ask(server, "GET", f"/{key}")))
    asking.start()
    while not slow.reads:
        time.sleep(0.001)
    closing = threading.Thread(target=lambda: ended.append(server.close(5)))
    closing.start()
    assert idle.sock.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    assert not ended
    slow.go.set()
    closing.join()
    asking.join()
    assert ended == [True]
    assert got[0][::2] == (200, value)
    assert got[0][1]["Connection"] == "close"
    idle.close()


def test_leaving_does_not_wait_for_ever(memory):
    """What is not answered within the bound is cut, and that is told."""
    memory.push(oracle.restorable(1), "t")
    key, _ = a_unit(memory)
    slow = Slow(memory._backend.inner)
    server = StoreServer(slow, ANYWHERE)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as asking:
        asking.sendall(f"GET /{key} HTTP/1.1\r\n\r\n".encode())
        while not slow.reads:
            time.sleep(0.001)
        started = time.monotonic()
        assert server.close(0.1) is False
        assert time.monotonic() - started < 2
        assert asking.recv(1) == b""
    slow.go.set()
    assert server.close() in {True, False}


def test_a_forked_child_does_not_hold_the_port(memory):
    """The port is free when the parent closes, though a child that was forked meanwhile
    lives on.
    """
    server = memory.serve(ANYWHERE)
    port = int(server.url.rpartition(":")[2])
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    server.close()
    with memory.serve(f"127.0.0.1:{port}") as again:
        assert ask(again, "GET", "/health")[0] == 200
    os.close(theirs)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "listen",
    [
        "",
        "8321",
        "host",
        "a b:1",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "300.0.0.1:0",
        "no.such.host.invalid:1",
    ],
)
def test_an_address_that_cannot_be_listened_on(memory, listen):
    """It is an error that names it and the fix."""
    with pytest.raises(ConfigError, match=r"address|expected HOST:PORT"):
        memory.serve(listen)


def test_a_port_that_is_taken(served):
    """It is an error too."""
    with pytest.raises(ConfigError, match=r"cannot listen on .*: Address already in use"):
        served[0].serve(served[1].url.removeprefix("http://"))
