# SPDX-License-Identifier: Apache-2.0
"""`opened_connection`: a connection to a Redis server as redis-py makes it (TLS, login, parsing),
with every limit set by us.

`Node` in `server_exchange.py` keeps them.  A new one can leave its login to be sent with the first
commands, which saves a start one turn.
"""

from __future__ import annotations

import inspect
import socket
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

from bundler.backends.redis.command_packing import Word
from bundler.backends.redis.metered_socket import REPLY_BYTES, Metered
from bundler.backends.redis.reply_parser import ReplyParser
from bundler.backends.redis.url_settings import RedisSettings

# A buffer of so much is filled with zeros for each connection.
READ_BYTES = 64 * 1024
# Told so, a release of redis-py that has this argument does not read its own version from disk,
# which takes 2 ms of a start.
_UNNAMED: dict[str, Any] = (
    {"driver_info": None}
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters
    else {}
)

#: A connection of one of the three classes below; `Any`, since redis-py annotates only some of
#: their methods.
Connected: TypeAlias = Any


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
