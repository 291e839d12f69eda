# SPDX-License-Identifier: Apache-2.0
"""Time limits, connections and errors of the store in Redis: pinned, and measured against servers
that misbehave.
"""

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import redis
import redis_proxy
import redis_server
from redis.retry import Retry

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.redis import (
    RedisBackend,
    replies,
    server_connections,
    server_exchange,
)
from bundler.backends.redis.url_settings import parse
from bundler.backends.testing.backend_contract import in_threads

pytestmark = pytest.mark.serial
# A machine that does other things too is late by this much at most; far less than redis-py's own
# defaults would take.
SLACK_S = 2.0
CALLS = {
    "get": lambda b: b.get(["a"]),
    "put": lambda b: b.put({"a": b"1"}),
    "put large": lambda b: b.put({"a": os.urandom(300_000)}),
    "exists": lambda b: b.exists(["a"]),
    "delete": lambda b: b.delete(["a"]),
    "touch": lambda b: b.touch(["a"]),
    "list": lambda b: list(b.list()),
    "read_ref": lambda b: b.read_ref("t"),
    "swap_ref": lambda b: b.swap_ref("t", None, b"1"),
    "list_refs": lambda b: list(b.list_refs()),
    "now_s": lambda b: b.now_s(),
    "lease": lambda b: b.lease("k", 10),
}


@pytest.fixture(scope="module")
def server():
    """One server; what is tested here is ours."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def proxied(server, admin):
    """Return a function that opens a store through a proxy."""
    opened = []

    def open_one(timeout_s=0.25, **faults):
        proxy = redis_proxy.Proxy(server.socket, **faults).__enter__()
        opened.append(proxy)
        backend = RedisBackend.from_url(
            proxy.url(server), timeout_s=timeout_s, connect_timeout_s=0.25
        )
        opened.append(backend)
        return proxy, backend

    yield open_one
    for one in reversed(opened):
        one.__exit__(None, None, None)


def fails_within(call, backend, seconds):
    """Make a call that must fail as unavailable, and in time; returns the error."""
    started = time.monotonic()
    with pytest.raises(BackendUnavailable) as caught:
        CALLS[call](backend)
    assert time.monotonic() - started < seconds + SLACK_S
    return str(caught.value)


# ---------------------------------------------------------------------------- what redis-py is told


def test_every_timeout_and_retry_is_set():
    """Nothing about time and repetition is left to redis-py's defaults, which change from release
    to release.
    """
    plain = server_connections.connection_arguments(
        parse("redis://u:p@h/2?timeout_s=3&connect_timeout_s=2", {})
    )
    retry = plain.pop("retry")
    assert isinstance(retry, Retry)
    assert retry.get_retries() == 0 if hasattr(retry, "get_retries") else retry._retries == 0
    assert plain == {
        "username": "u",
        "password": "p",
        "db": 2,
        "protocol": 2,
        "parser_class": replies.ReplyParser,
        "socket_timeout": 3.0,
        "socket_connect_timeout": 2.0,
        "socket_read_size": 65536,
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,
        "socket_keepalive": True,
    }
    defaults = server_connections.connection_arguments(parse("redis://h", {}))
    assert (defaults["socket_timeout"], defaults["socket_connect_timeout"]) == (0.25, 0.25)


@pytest.mark.parametrize(
    "url", ["redis://u:p@h", "rediss://u:p@h", "unix://u:p@/s", "redis+cluster://u:p@h"]
)
def test_connections_have_what_was_set(url):
    """The connections that are made have the limits, no retries, no greetings, and check
    certificates and names.
    """
    settings = parse(url, {"timeout_s": 3, "connect_timeout_s": 2})
    connection = server_connections.opened_connection(
        settings, settings.hosts[0] if settings.hosts else None, logs_in_later=False
    )
    assert (connection.socket_timeout, connection.socket_connect_timeout) == (3, 2)
    assert (
        connection.retry._retries,
        connection.retry_on_error,
        connection.health_check_interval,
    ) == (0, [], 0)
    assert (connection.protocol, connection.driver_info, connection.client_name) == (2, None, None)
    if url.startswith("rediss"):
        assert (connection.cert_reqs.name, connection.check_hostname) == ("CERT_REQUIRED", True)


def test_all_arguments_of_redis_py_that_mean_time_are_known():
    """A release of redis-py with another argument about time, retries or health makes us look."""
    known = {
        "socket_timeout",
        "socket_connect_timeout",
        "retry_on_timeout",
        "retry_on_error",
        "health_check_interval",
        "retry",
        "orig_socket_timeout",
        # what maintenance notifications, which we leave off, would restore
        "orig_socket_connect_timeout",
    }
    names = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    assert {
        name
        for name in names
        if any(word in name for word in ("time", "retry", "health", "backoff"))
    } <= known


# Errors that mean no more than that the server is unavailable.
UNAVAILABLE = [
    "AskError",
    "BusyLoadingError",
    "ChildDeadlockedError",
    "ClusterCrossSlotError",
    "ClusterDownError",
    "ClusterError",
    "ConnectionError",
    "CrossSlotTransactionError",
    "DataError",
    "ExecAbortError",
    "IncorrectPolicyType",
    "InvalidPipelineStack",
    "InvalidResponse",
    "LockError",
    "LockNotOwnedError",
    "MasterDownError",
    "MaxConnectionsError",
    "ModuleError",
    "MovedError",
    "NoScriptError",
    "NoSuchFieldsetError",
    "PubSubError",
    "RedisClusterException",
    "RedisError",
    "ResponseError",
    "SlotNotCoveredError",
    "TryAgainError",
    "WatchError",
]


def test_every_error_of_redis_py_has_a_meaning():
    """No class of redis.exceptions is missing in our table or above, so that a release that adds
    one makes us decide.
    """
    theirs = {
        name
        for name, cls in vars(redis.exceptions).items()
        if isinstance(cls, type) and issubclass(cls, Exception)
    }
    assert theirs - replies._MEANINGS.keys() - set(UNAVAILABLE) == set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.exceptions.OutOfMemoryError("x"), BackendFull),
        (
            redis.exceptions.ResponseError(
                "Error running script: @user_script:1: -OOM command not allowed when"
            ),
            BackendFull,
        ),
        (redis.exceptions.AuthenticationError("x"), BackendDenied),
        (redis.exceptions.NoPermissionError("x"), BackendDenied),
        (redis.exceptions.ReadOnlyError("x"), BackendDenied),
        (
            redis.exceptions.ResponseError(
                "@user_script: The user executing the script can't run this command"
            ),
            BackendDenied,
        ),
        (redis.exceptions.ConnectionError("x"), BackendUnavailable),
        (redis.exceptions.TimeoutError("x"), BackendTimeout),
        (redis.exceptions.BusyLoadingError("x"), BackendUnavailable),
        (redis.exceptions.ResponseError("MISCONF Redis is configured to save"), BackendUnavailable),
        (TimeoutError(), BackendTimeout),
        (ConnectionResetError(104, "reset"), BackendUnavailable),
        (UnicodeError("label too long"), BackendUnavailable),
    ],
)
def test_errors_mean_one_of_four_things(error, kind):
    """Full, denied, late or unavailable; the message names the server."""
    found = replies.meaning(error, "redis://h:1/")
    assert type(found) is kind
    assert str(found).startswith("redis://h:1/: ")


# --------------------------------------------------------------------------- servers that misbehave


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_not_there_is_unavailable(call):
    """A refused port is a typed error at once, for every call."""
    with RedisBackend.from_url(f"redis://127.0.0.1:{redis_server.free_port()}") as backend:
        assert "refused" in fails_within(call, backend, 0.25)


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_never_answers_costs_the_time_limit(proxied, call):
    """A server that accepts and says nothing is given up after the limit, not after redis-py's
    minute.
    """
    _, backend = proxied(timeout_s=0.1, silent=True)
    started = time.monotonic()
    message = fails_within(call, backend, 0.1)
    assert time.monotonic() - started >= 0.08
    assert "Timeout" in message or "time" in message


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\0" * 100, b"*3\r\n", b""]
)
def test_a_server_that_is_no_redis_is_unavailable(words):
    """Whatever else listens on the port: a typed error, and in time."""

    def answer(listener):
        for _ in range(2):
            client, _ = listener.accept()
            with client:
                client.sendall(words)
                client.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with RedisBackend.from_url(f"redis://127.0.0.1:{listener.getsockname()[1]}") as backend:
            for call in ("get", "swap_ref"):
                fails_within(call, backend, 0.5)
        thread.join(10)


def test_a_server_that_does_not_accept_costs_the_time_limit():
    """A full queue of connections is a typed error after the limit for connecting."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        with RedisBackend.from_url(
            f"redis://127.0.0.1:{port}", connect_timeout_s=0.2, timeout_s=0.2
        ) as backend:
            fails_within("get", backend, 0.4)
        for filler in fillers:
            filler.close()


def test_bytes_that_trickle_in_do_not_prolong_the_limit(proxied, admin):
    """Each byte comes in time, all of them would take a minute: the whole answer has one limit."""
    proxy, backend = proxied()
    backend.put({"a": b"x" * 600})
    proxy.trickle_s = 0.1
    fails_within("get", backend, 0.25)


def test_a_slow_network_is_slow_and_no_error(proxied):
    """With 200 ms added to each turn everything works, since each exchange is within its limit."""
    _, backend = proxied(timeout_s=2, latency_s=0.2)
    # Logging in and asking are two turns: the second starts with a limit of its own.
    assert backend.put({"a": b"1"}) == {"a"}
    assert backend.get(["a"]) == {"a": b"1"}
    assert backend.swap_ref("t", None, b"1")


def test_large_answers_have_more_time():
    """The limit grows with the bytes that came, and only with them."""
    timed = server_connections.Metered(_Slow(60_000, 0.004), 0.05)
    started = time.monotonic()
    received = 0
    while received < 1_200_000:
        received += len(timed.recv())
    # Twenty times 4 ms is more than the 50 ms that nothing at all may take.
    assert time.monotonic() - started > 0.05
    stuck = server_connections.Metered(_Slow(1, 0.004), 0.05)
    with pytest.raises(TimeoutError):
        while True:
            stuck.recv()


class _Slow:
    """A socket that gives so many bytes at a time, so far apart."""

    def __init__(self, count, pause_s):
        self.count, self.pause_s = count, pause_s

    def settimeout(self, seconds):
        assert seconds > 0

    def recv(self):
        time.sleep(self.pause_s)
        return bytes(self.count)


def test_a_connection_is_used_again_at_once(proxied, server):
    """Forty questions on one connection take what the network takes: looking whether it is quiet
    waits for nothing.
    """
    proxy, backend = proxied(latency_s=0.01)
    backend.put({"a": b"1"})
    took_s = redis_proxy.took_s(lambda: [backend.get(["a"]) for _ in range(40)])
    assert proxy.connections == 1
    # 10 ms each, and as much again for a machine that does other things too; a wait would be 250 ms
    # each, 10 s in all.
    assert 0.4 <= took_s < 0.8 + SLACK_S


def test_a_reset_is_an_error_and_the_next_call_works(proxied):
    """A connection that breaks in an answer is dropped; the next call has one of its own."""
    proxy, backend = proxied()
    backend.put({"a": os.urandom(200_000)})
    proxy.reset_after = 70_000
    fails_within("get", backend, 0.25)
    proxy.reset_after = None
    assert len(backend.get(["a"])["a"]) == 200_000


def test_an_answer_that_comes_late_is_nobodys(proxied):
    """After a time-out the connection is dropped, so that the late answer is not taken for the next
    one's (CVE-2023-28858).
    """
    proxy, backend = proxied()
    backend.put({"a": b"1", "b": b"2"})
    proxy.latency_s = 0.4
    fails_within("get", backend, 0.25)
    proxy.latency_s = 0.0
    for _ in range(10):  # the late answer comes meanwhile
        assert backend.get(["b"]) == {"b": b"2"}
        time.sleep(0.04)


def test_a_call_that_is_interrupted_leaves_no_answer_behind(server, admin):
    """A KeyboardInterrupt between question and answer drops the connection too."""
    with RedisBackend.from_url(server.url()) as backend:
        backend.put({"a": b"1", "b": b"2"})
        connection = backend._link._seeds[0]._idle[0][0]
        read = connection.read_response

        def interrupted():
            raise KeyboardInterrupt

        connection.read_response = interrupted
        with pytest.raises(KeyboardInterrupt):
            backend.get(["a"])
        connection.read_response = read
        assert backend.get(["b"]) == {"b": b"2"}
        assert not connection.is_connected


def test_a_dropped_idle_connection_is_noticed_before_it_is_used(server, admin):
    """When the server closed our idle connections, or was restarted, the next call makes a new one
    and works.
    """
    with RedisBackend.from_url(server.url()) as backend:
        backend.put({"a": b"1"})
        admin.client_kill_filter(_type="normal", skipme=True)
        assert backend.get(["a"]) == {"a": b"1"}


def test_a_connection_that_was_idle_for_long_is_not_trusted(server, admin, monkeypatch):
    """What lay unused for longer than a firewall may remember is replaced."""
    with RedisBackend.from_url(server.url()) as backend:
        backend.put({"a": b"1"})
        first = backend._link._seeds[0]._idle[0][0]
        backend.get(["a"])
        assert backend._link._seeds[0]._idle[0][0] is first
        monkeypatch.setattr(server_exchange, "IDLE_S", 0.0)
        assert backend.get(["a"]) == {"a": b"1"}
        assert backend._link._seeds[0]._idle[0][0] is not first


def test_few_connections_are_kept(server, admin):
    """Many threads have a connection each while they need it; a handful stays."""
    with RedisBackend.from_url(server.url(), timeout_s=20, connect_timeout_s=20) as backend:
        backend.put({"a": b"1"})
        in_threads([lambda: [backend.get(["a"]) for _ in range(5)]] * 32)
        assert 1 <= len(backend._link._seeds[0]._idle) <= server_exchange.KEPT_CONNECTIONS


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(server, admin):
    """Parent and child use one store at once after a fork with an open connection, and neither gets
    the other's answers.
    """
    with RedisBackend.from_url(server.url(), timeout_s=20, connect_timeout_s=20) as backend:
        backend.put({f"k{number}": b"%d" % number for number in range(100)})

        def right():
            return all(
                backend.get([f"k{n}"]) == {f"k{n}": b"%d" % n} for _ in range(3) for n in range(100)
            )

        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if right() and backend.put({"child": b"1"}) == {"child"} else 1)
        assert right()
        assert os.waitpid(child, 0)[1] == 0
        assert right()
        assert backend.exists(["child"]) == {"child"}


_SECRETS = """
import os, subprocess, sys
from bundler.backends.redis import RedisBackend
backend = RedisBackend.from_url(sys.stdin.read())
backend.put({"env": b"1"})
print(subprocess.run(["env"], capture_output=True, text=True).stdout)
"""


def test_a_child_process_is_not_told_our_password(server, admin):
    """What we start has no secret in its environment, nor do we have one on our command line."""
    done = subprocess.run(
        [sys.executable, "-c", _SECRETS],
        input=server.url(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "s3cret" not in done.stdout + done.stderr


def test_messages_hold_no_secret(proxied, server):
    """Whatever fails, the message names the server and not who we are."""
    proxy, backend = proxied()
    proxy.silent = True
    messages = [fails_within("get", backend, 0.25)]
    with (
        RedisBackend.from_url(server.url(password="wr0ng-s3cret")) as wrong,
        pytest.raises(BackendError) as caught,
    ):
        wrong.get(["a"])
    messages.append(str(caught.value) + str(caught.value.__cause__))
    assert "s3cret" not in "".join(messages)
