# SPDX-License-Identifier: Apache-2.0
"""`PeerConnections`: requests to one server of objects, over connections that are kept.

Of the standard library, since its connections survive being left behind in a forked child.
Redirects are not followed, nothing but the request is sent, and an answer has a bound in bytes and
one deadline.  `PeerBackend` uses it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import time
from collections import deque
from http import HTTPStatus

from bundler.backends.backend_errors import BackendTimeout, BackendUnavailable
from bundler.backends.peers.peer_urls import MARK, PeerSettings
from bundler.backends.peers.timed_socket import TimedSocket

_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "triton-bundler"}
_BUSY = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}
_LEAST_PAUSE_S = 0.05
_EXPECTED = {HTTPStatus.OK, HTTPStatus.NOT_FOUND}


class _Connection(http.client.HTTPConnection):
    """A connection whose reads and writes have one deadline."""

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__(settings.host, settings.port)
        self._settings = settings
        self.timed: TimedSocket | None = None

    def connect(self) -> None:
        """Connect; as the base class, but for the deadline."""
        limit_s = self._settings.connect_s
        made = socket.create_connection((self.host, self.port), limit_s)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._settings.secure:
                import ssl  # milliseconds, which nobody pays who has no TLS

                made = ssl.create_default_context().wrap_socket(made, server_hostname=self.host)
        except BaseException:
            made.close()
            raise
        self.timed = self.sock = TimedSocket(made, limit_s)


class PeerConnections:
    """Connections to one server; safe under threads, and in a forked child, which makes its own."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self._idle: deque[tuple[int, _Connection]] = deque()

    def ask(
        self, method: str, path: str, body: bytes | None, most_bytes: int, until_s: float
    ) -> tuple[int, bytes]:
        """Return the status, 200 or 404, and the bytes of the answer to one request; a server that
        is busy is asked again as long as there is time.

        Args:
            method, path, body: the request.
            most_bytes: how many bytes the answer may have.
            until_s: when it has to be there, a time of `time.monotonic`.

        Raises:
            BackendTimeout: it was not there in time.
            BackendUnavailable: there is no answer, or none that such a server gives.
        """
        while True:
            status, answer, pause_s = self._once(method, path, body, most_bytes, until_s)
            if status in _EXPECTED:
                return status, answer
            if status not in _BUSY:
                raise BackendUnavailable(f"{self.settings.shown}: {_said(status)}")
            # With jitter: replicas that were refused together are not to come back together.
            # no secret
            pause_s = max(pause_s, _LEAST_PAUSE_S) * random.uniform(1.0, 1.25)  # noqa: S311
            if time.monotonic() + pause_s >= until_s:
                raise BackendTimeout(f"{self.settings.shown}: busy ({_said(status)})")
            time.sleep(pause_s)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop()[1].close()

    def _once(
        self, method: str, path: str, body: bytes | None, most_bytes: int, until_s: float
    ) -> tuple[int, bytes, float]:
        shown = self.settings.shown
        try:
            request = (method, path, body, most_bytes, until_s)
            kept = self._kept()
            if kept is not None:
                # The server closes connections that were idle for long.
                with contextlib.suppress(ConnectionError):
                    return self._exchange(kept, *request)
            return self._exchange(_Connection(self.settings), *request)
        except TimeoutError as error:
            raise BackendTimeout(f"{shown}: no answer in time") from error
        except (OSError, ValueError) as error:
            raise BackendUnavailable(
                f"{shown}: {getattr(error, 'strerror', None) or error}"
            ) from error
        except http.client.HTTPException as error:
            raise BackendUnavailable(
                f"{shown}: its answer is cut off, or no answer of `triton-bundler serve`"
                f" ({type(error).__name__})"
            ) from error

    def _exchange(
        self,
        connection: _Connection,
        method: str,
        path: str,
        body: bytes | None,
        most_bytes: int,
        until_s: float,
    ) -> tuple[int, bytes, float]:
        try:
            if connection.timed is None:
                connection.connect()
            assert connection.timed is not None
            connection.timed.expire_in(until_s - time.monotonic())
            connection.request(method, path, body, _HEADERS)
            with connection.getresponse() as response:
                data = response.read(most_bytes + 1)
                if len(data) > most_bytes:
                    raise http.client.LineTooLong("answer")
                if response.status in _EXPECTED and response.getheader(MARK) is None:
                    raise BackendUnavailable(
                        f"{self.settings.shown}: is no `triton-bundler serve`; correct the URL"
                    )
                if response.length:
                    raise http.client.IncompleteRead(data)
                keep = not response.will_close
            pause_s = _pause_s(response.headers.get("Retry-After", ""))
        except BaseException:
            connection.close()
            raise
        if keep:
            self._idle.append((os.getpid(), connection))
        else:
            connection.close()
        return response.status, data, pause_s

    def _kept(self) -> _Connection | None:
        with contextlib.suppress(IndexError):
            while True:
                pid, connection = self._idle.pop()
                if pid == os.getpid():
                    return connection
                connection.close()  # the parent's: this closes only the child's copy
        return None


def _pause_s(text: str) -> float:
    """Return how long a server that is busy wants to be left alone; one that names a date, or
    nothing, a second.
    """
    # more than a day
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0  # noqa: PLR2004


def _said(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "no such status"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"answers {status} {phrase}, and redirects are not followed"
    return f"answers {status} {phrase}"
