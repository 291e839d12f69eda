# SPDX-License-Identifier: Apache-2.0
"""`opened_connection`: a connection to a Redis server as redis-py makes it (TLS, login, parsing),
with every limit set by us.

`Metered` is its socket, with a limit of time and of bytes for each exchange; `packed` writes
commands, many in one piece: redis-py packs them one by one, each as generally as its clients need
it, and sends them in pieces of 6 KB, which for the three hundred reads of a restore takes longer
than reading the answers.

`Node` in `server_exchange.py` keeps them.  A new one can leave its login to be sent with the first
commands, which saves a start one turn.
"""

from __future__ import annotations

import inspect
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.exceptions import ResponseError
from redis.retry import Retry

from bundler.backends.redis.replies import OverlongReply, ReplyParser, Word
from bundler.backends.redis.url_settings import RedisSettings

# An exchange may take `timeout_s`, and as much longer as its bytes take at this pace.  A server
# that trickles is given up.
BYTES_PER_S = 10_000_000
# All answers of an exchange together, where the caller does not say: far more than a page of a
# listing has.
REPLY_BYTES = 16 * 1024 * 1024
# A buffer of so much is filled with zeros for each connection.
READ_BYTES = 64 * 1024
# Told so, a release of redis-py that has this argument does not read its own version from disk,
# which takes 2 ms of a start.
_TAKEN = inspect.signature(AbstractConnection.__init__).parameters.keys()
_UNNAMED: dict[str, Any] = dict.fromkeys({"driver_info"} & _TAKEN)
# A value of this size is sent as it is, and not copied beside what is around it.
_LARGE_BYTES = 64 * 1024

#: A connection of one of the three classes below; `Any`, since redis-py annotates only some of
#: their methods.
Connected: TypeAlias = Any


class Metered:
    """A socket whose waits and bytes count against one allowance, which `begin` gives anew.

    Bytes that trickle in do not prolong the time.  Bytes are counted where they come in: a parser
    would keep all of a value, whatever size it has, before anybody could refuse it.

    Args:
        sock: the socket.
        timeout_s: for one exchange.
    """

    def __init__(self, sock: Any, timeout_s: float) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self._pause_s = timeout_s
        self.begin(REPLY_BYTES)

    def begin(self, most_bytes: int) -> None:
        """Start the allowance anew, with so many bytes of answers."""
        self._until, self._left_bytes = time.monotonic() + self._timeout_s, most_bytes

    def settimeout(self, seconds: float | None) -> None:
        """Do not wait longer than this for the next bytes; a parser that only looks whether there
        are any says 0.
        """
        self._pause_s = self._timeout_s if seconds is None else seconds

    def recv(self, *args: Any) -> bytes:
        """Receive, as `socket.recv`."""
        self._wait()
        data: bytes = self._sock.recv(*args)
        self._received(len(data))
        return data

    def expect(self, count: int) -> None:
        """Refuse an answer that is announced to be longer than what is left of the allowance."""
        if count > self._left_bytes:
            raise OverlongReply(
                "the server sends more than was asked for; somebody stored values that are none of"
                " ours"
            )

    def spend(self, count: int) -> None:
        """Take memory that is not bytes received, as elements of arrays are, from the allowance."""
        self.expect(count)
        self._left_bytes -= count

    def _received(self, count: int) -> None:
        self._until += count / BYTES_PER_S
        self.spend(count)

    def sendall(self, data: Any) -> None:
        """Send, as `socket.sendall`."""
        self._until += len(data) / BYTES_PER_S
        self._wait()
        self._sock.sendall(data)

    def _wait(self) -> None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for this exchange is over")
        # A parser restores the whole time limit when it has looked, and in a long answer more than
        # that may be left.
        self._sock.settimeout(
            left_s if self._pause_s >= self._timeout_s else min(left_s, self._pause_s)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _Once(Retry):
    """Never tries again, and has no state: redis-py copies, deeply, what each connection is
    given.
    """

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Once:
        return self


_ONCE = _Once(NoBackoff(), 0)


class _Limited(AbstractConnection):
    """A connection over a `Metered` socket, which does not tell the server the name and version of
    its library.

    Attributes:
        login: what has to be sent, with the first commands, for the server to know who we are;
            empty once that was answered.
    """

    def __init__(self, *, logs_in_later: bool = False, **kwargs: Any) -> None:
        # it gets the connection
        super().__init__(**_UNNAMED, **kwargs, redis_connect_func=_Limited._greet)  # type: ignore[arg-type]
        # Each of these would be an exchange more at every connection; which one there is depends on
        # the release.
        self.driver_info = self.lib_name = self.lib_version = None
        self.login: list[tuple[Word, ...]] = []
        self._logs_in_later = logs_in_later

    def _connect(self) -> Any:
        return Metered(self._connected(), self.socket_timeout or 0.0)

    def _connected(self) -> Any:
        return super()._connect()  # type: ignore[no-untyped-call,safe-super]  # redis-py's

    def _greet(self) -> None:
        """Log in, or see to it that this is done with the first commands; redis-py calls it for
        each new socket.
        """
        if not self._logs_in_later:
            self.on_connect()  # type: ignore[no-untyped-call]  # redis-py's
            return
        self._parser.on_connect(self)
        if self.password:
            who = (self.username, self.password) if self.username else (self.password,)
            self.login.append(("AUTH", *who))
        if self.db:
            self.login.append(("SELECT", self.db))

    def is_known(self) -> bool:
        """Read the answers to `login`, if that was sent; False where one is an error, and what
        followed was of no use.
        """
        errors = [
            answer
            for answer in [answer_of(self) for _ in self.login]
            if isinstance(answer, ResponseError)
        ]
        self.login = []
        return not errors

    def log_in(self) -> None:
        """Connect anew, and log in as redis-py does it: who knows what old servers expect, and
        which error to raise.
        """
        self._logs_in_later = False
        self.disconnect()  # type: ignore[no-untyped-call]  # redis-py's
        self.connect()  # type: ignore[no-untyped-call]

    def begin(self, most_bytes: int = REPLY_BYTES) -> None:
        """Start the allowance anew."""
        if self._sock is not None:
            self._sock.begin(most_bytes)


class _Tcp(_Limited, Connection):
    """Over TCP."""

    def _connected(self) -> Any:
        # Of a text Python would make a name of the internet first, which takes 3 ms in a new
        # process, also for a number.
        host: Any = self.host.encode() if self.host.isascii() else self.host
        sock = socket.create_connection((host, self.port), self.socket_connect_timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.settimeout(self.socket_timeout)
        except BaseException:
            sock.close()
            raise
        return sock


class _Tls(_Limited, SSLConnection):
    """Over TLS."""


class _Unix(_Limited, UnixDomainSocketConnection):
    """Over a socket of this host."""

    host = ""


def connection_arguments(settings: RedisSettings) -> dict[str, Any]:
    """Return what redis-py is told for each connection, but for the address; no time-out or retry
    is left to its defaults.
    """
    arguments: dict[str, Any] = {
        "username": settings.user,
        "password": settings.secret(),
        "db": settings.db,
        "protocol": 2,
        "parser_class": ReplyParser,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.timeout_s,
        "socket_read_size": READ_BYTES,
        "retry": _ONCE,
        "retry_on_timeout": False,
        "retry_on_error": [],
        "health_check_interval": 0,  # see server_exchange.IDLE_S
    }
    if settings.socket is None:
        arguments["socket_keepalive"] = True
    if settings.tls:
        arguments |= {
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": settings.ca,
            "ssl_certfile": settings.cert,
            "ssl_keyfile": settings.key,
        }
    return arguments


def opened_connection(
    settings: RedisSettings, address: tuple[str, int] | None, *, logs_in_later: bool
) -> Connected:
    """Return a connection that is not connected yet.

    Args:
        settings: how to reach the server.
        address: its host and port; None for a socket of this host.
        logs_in_later: whether `login` is left to be sent with the first commands.
    """
    arguments = connection_arguments(settings) | {"logs_in_later": logs_in_later}
    if address is None:
        return _Unix(path=settings.socket, **arguments)
    host, port = address
    return (_Tls if settings.tls else _Tcp)(host=host, port=port, **arguments)


def answer_of(connection: Connected) -> Any:
    """Return the next answer, also one that is an error of the server's."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def packed(commands: Iterable[Sequence[Word]]) -> list[bytes]:
    """Return what is sent for some commands, in pieces."""
    pieces: list[bytes] = []
    small: list[bytes] = []
    for words in commands:
        small.append(b"*%d\r\n" % len(words))
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode()
            if len(data) < _LARGE_BYTES:
                small.append(b"$%d\r\n%b\r\n" % (len(data), data))
            else:
                pieces += [b"%b$%d\r\n" % (b"".join(small), len(data)), data]
                small = [b"\r\n"]
    return [*pieces, b"".join(small)]
