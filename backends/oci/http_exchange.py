# SPDX-License-Identifier: Apache-2.0
"""`HttpExchange`: one request and its answer, which end by a deadline whatever the server does.

A socket's own timeout ends a silence; a server that sends a byte now and then would still hold a
client for ever, so connections are `TimedSocket`s.  They are kept for the next request.  Redirects
and credentials are the caller's business: `registry.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from bundler.backends.backend_errors import BackendTimeout, BackendUnavailable, BadSettings
from bundler.backends.breaker import bounded
from bundler.backends.oci.docker_credentials import Credentials
from bundler.backends.timed_socket import TimedSocket

_PORTS = {"http": 80, "https": 443}
# What comes faster than this may take as long as it takes.
SLOWEST_BYTES_A_S = 256 * 1024
_READ_BYTES = 64 * 1024


class RefusedRequest(BackendUnavailable):
    """The server answered what asking again does not change."""


class InsecureAnswer(RefusedRequest):
    """The server could not prove who it is, or wants to go on without TLS."""


class Origin(NamedTuple):
    """Whom a request goes to; credentials are for one of them."""

    scheme: str
    host: str
    port: int


def origin_of(url: str) -> Origin:
    """Return whom a URL leads to; raises `BackendUnavailable` for one that is not of HTTP."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("not a URL of HTTP")
        return Origin(parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme])
    except ValueError as error:
        raise BackendUnavailable(f"the registry names the address {url!r:.100}: {error}") from error


class RegistryAnswer:
    """What a server answered; read it to the end or close it.

    Attributes:
        status: of HTTP.
        headers: of HTTP.
        url: what was asked for.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        url: str,
        opened: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> None:
        self.status, self.headers, self.url = response.status, response.headers, url
        self._exchange, self._connection, self._response = exchange, opened, response

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self) -> Iterator[bytes]:
        """Yield the body; raises `BackendUnavailable` when it ends early or the time is over."""
        with self._exchange.meanings():
            while chunk := self._response.read(_READ_BYTES):
                self._exchange.received_bytes += len(chunk)
                yield chunk
            if self._response.length:
                raise BackendUnavailable(
                    f"{self._exchange.name}: an answer ended {self._response.length:,} bytes early"
                )
        self.close()

    def read(self, most_bytes: int) -> bytes:
        """Return the body; raises `BackendUnavailable` for more than so many bytes."""
        parts, size = [], 0
        for chunk in self.chunks():
            size += len(chunk)
            if size > most_bytes:
                self.close()
                raise RefusedRequest(
                    f"{self._exchange.name}: an answer of more than {most_bytes:,} bytes"
                )
            parts.append(chunk)
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection for the next request where nothing is left to read; closing twice is
        fine.
        """
        if self._response.length == 0:
            self._response.read()  # takes nothing, and tells the connection that the answer is over
        if self._response.isclosed() and self._connection.sock is not None:
            self._exchange.keep(origin_of(self.url), self._connection)
        else:
            self._response.close()
            self._connection.close()


class HttpExchange:
    """Connections to servers, one to each at a time; for one thread.

    Args:
        name: what messages call the registry.
        timeout_s: for how long a server may be silent.
        ca_file: certificates to check servers' with; empty for the system's.

    Attributes:
        received_bytes: how many bytes of answers came so far.
    """

    def __init__(self, name: str, timeout_s: float, ca_file: str = "") -> None:
        self.name, self._timeout_s, self._ca_file = name, timeout_s, ca_file
        self._kept: dict[Origin, http.client.HTTPConnection] = {}
        self._context: ssl.SSLContext | None = None
        self.received_bytes = 0

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        until: float,
        body: BinaryIO | bytes | None = None,
    ) -> RegistryAnswer:
        """Send a request and return its answer.

        Args:
            method, url, headers: of HTTP.
            until: when it has to be over, by the monotonic clock, but for the time of the bytes of
                the answer.
            body: what is sent; `headers` has its length.

        Raises:
            BackendTimeout: the time is over, or the server was silent.
            InsecureAnswer: TLS failed.
            BackendUnavailable: the server cannot be reached, or answers nonsense.
        """
        origin = origin_of(url)
        kept = self._kept.pop(origin, None)
        if kept is not None:
            try:
                return self._exchange(kept, method, url, headers, until, body)
            except BackendTimeout:
                raise
            except BackendUnavailable:
                # A server may close what it has kept for a while; nothing was answered, so it is
                # asked again.
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
        return self._exchange(self._connected(origin, until), method, url, headers, until, body)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        url: str,
        headers: Mapping[str, str],
        until: float,
        body: BinaryIO | bytes | None,
    ) -> RegistryAnswer:
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if parts.scheme == "http" and _proxy(origin_of(url)):
            target = url
        timed: Any = connection.sock  # as `_connected` made it
        try:
            with self.meanings():
                timed.expire_in(until - time.monotonic())
                connection.request(method, target, body=body, headers=dict(headers))
                return RegistryAnswer(self, url, connection, connection.getresponse())
        except BaseException:
            connection.close()
            raise

    def _connected(self, origin: Origin, until: float) -> http.client.HTTPConnection:
        proxy = _proxy(origin)
        host, port = (proxy.host, proxy.port) if proxy else (origin.host, origin.port)
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=self._timeout_s, context=self._tls()
            )
            if proxy:
                connection.set_tunnel(origin.host, origin.port, proxy.headers)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        with self.meanings():
            # In a thread, since a look-up of a name cannot be given a time.
            bounded(connection.connect, min(self._timeout_s, max(0.001, until - time.monotonic())))
        # As much of a socket as `http.client` uses.
        connection.sock = TimedSocket(connection.sock, 0.0, self._timeout_s, SLOWEST_BYTES_A_S)
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            try:
                self._context = ssl.create_default_context(cafile=self._ca_file or None)
            except (OSError, ssl.SSLError) as error:
                raise BadSettings(
                    f"{self.name}: ca_file={self._ca_file}: {error}; expected certificates as PEM"
                ) from error
        return self._context

    @contextlib.contextmanager
    def meanings(self) -> Iterator[None]:
        """Raise a byte store's error for the system's."""
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError):
                raise BackendTimeout(
                    f"{self.name}: no whole answer in time; raise timeout_s if the network is slow"
                ) from error
            if isinstance(error, ssl.SSLError):
                raise InsecureAnswer(
                    f"{self.name}: TLS failed: {error.reason or error}; name its certificate"
                    " authority with ca_file=, or set plain_http=1 for a registry without TLS"
                ) from error
            raise BackendUnavailable(
                f"{self.name}: {_words(error)}; check the address, and that it is up"
            ) from error

    def keep(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        """Take back a connection on which nothing is under way."""
        if self._kept.setdefault(origin, connection) is not connection:
            connection.close()

    def close(self) -> None:
        """Close what is kept."""
        while self._kept:
            self._kept.popitem()[1].close()


class _Proxy(NamedTuple):
    host: str
    port: int
    headers: dict[str, str]


def _proxy(origin: Origin) -> _Proxy | None:
    """Return the proxy that the environment names (`https_proxy`, `http_proxy`, `no_proxy`)."""
    url = urllib.request.getproxies_environment().get(origin.scheme)
    if not url or urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    parts = urlsplit(url if "//" in url else f"http://{url}")
    headers = {}
    if parts.username:
        login = Credentials(unquote(parts.username), unquote(parts.password or ""))
        headers["Proxy-Authorization"] = login.basic
    return _Proxy(parts.hostname or "", parts.port or 80, headers)


def _words(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__
