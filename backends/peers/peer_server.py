# SPDX-License-Identifier: Apache-2.0
"""`PeerServer`: hands on the objects and tags of a byte store over HTTP, for reading.

Of the standard library: what it has to do is small, and its bounds are the point.  No TLS and no
passwords: who needs them puts a reverse proxy before it.  `bundler/store/store_server.py` makes
one.

`ObjectRequests` answers the requests of one connection; `peers/__init__.py` lists the routes.
Nothing but keys that `ServedKeys` admits is looked up, and no path of a file system is made of what
was asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from bundler.backends.backend_errors import BackendError, BadSettings
from bundler.backends.keys import is_key
from bundler.backends.peers import MARK, object_frames
from bundler.backends.peers.served_objects import ServedObjects
from bundler.backends.timed_socket import TimedSocket

RETRY_AFTER_S = 1
# Who takes less than this a second is slow on purpose, or on a line that a far store serves as
# well.
LEAST_BYTES_PER_S = 1e6
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_BYTES, _TEXT = "application/octet-stream", "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class ObjectRequests(http.server.BaseHTTPRequestHandler):
    """The requests of one connection.

    Args:
        connection: the connection, which the caller closes.
        objects: what is served.
        leaving: tells whether the server is about to end.
    """

    protocol_version = "HTTP/1.1"
    server_version = "triton-bundler"
    sys_version = ""

    def __init__(
        self,
        connection: TimedSocket,
        objects: ServedObjects,
        leaving: Callable[[], bool],
    ) -> None:
        # Not the base class's, which wants a server of `socketserver`, and serves while it is made.
        self._timed, self._objects = connection, objects
        self._tally, self._bounds = objects.tally, objects.bounds
        self._leaving = leaving
        self.busy = False
        self.rfile, self.close_connection = connection.makefile("rb"), False
        self.client_address = ("", 0)
        self._until_s, self._answered = 0.0, False

    def serve(self) -> None:
        """Answer until the other side is done, or slow; raises `OSError` for what happens to the
        connection.
        """
        try:
            while not self.close_connection and not self._leaving():
                self._timed.expire_in(self._bounds.idle_s)
                if not self.rfile.peek(1):  # type: ignore[attr-defined]  # a BufferedReader
                    return
                self.busy = True
                self._timed.expire_in(self._bounds.request_s)
                self._until_s, self._answered = time.monotonic() + self._bounds.request_s, False
                self.handle_one_request()
                self.busy = False
        finally:
            self.rfile.close()

    def handle_one_request(self) -> None:
        """Read one request and answer it."""
        self.raw_requestline = self.rfile.readline(65537)
        if len(self.raw_requestline) > 65536:  # noqa: PLR2004  # as the base class
            self.requestline = self.request_version = self.command = ""
            self._say(HTTPStatus.REQUEST_URI_TOO_LONG, "none")
            return
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        routes = {"GET": self._get, "HEAD": self._get, "POST": self._post}
        route = routes.get(self.command)
        if route is None:
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "none", headers={"Allow": "GET, HEAD, POST"})
            return
        try:
            route()
        except ValueError as error:  # of `urlsplit`
            self.log_error("%s", error)
            self._say(HTTPStatus.BAD_REQUEST, "none")
        except BackendError as error:
            if not self._answered:
                self.log_error("%s", error)
                why = "the source does not answer; try again\n"
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, "none", why)

    def _get(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # what follows is no request
        parts = urlsplit(self.path)
        if parts.path == "/health":
            leaving = self._leaving()
            status = HTTPStatus.SERVICE_UNAVAILABLE if leaving else HTTPStatus.OK
            self._say(status, "health", "leaving\n" if leaving else "ok\n")
        elif parts.path == "/metrics":
            self._send(
                HTTPStatus.OK, "metrics", self._tally.text().encode(), {"Content-Type": _METRICS}
            )
        elif parts.path == "/keys":
            self._keys(parts.query)
        else:
            self._one(parts.path.removeprefix("/"))

    def _keys(self, query: str) -> None:
        prefix = dict(parse_qsl(query)).get("prefix", "")
        if prefix and not is_key(prefix):
            self._say(HTTPStatus.BAD_REQUEST, "keys", "the prefix is no key\n")
            return
        listed = self._objects.listing(prefix, self._until_s)
        lines = [f"{stat.key} {stat.size_bytes} {stat.modified_s:.3f}\n" for stat in listed]
        self._send(HTTPStatus.OK, "keys", "".join(lines).encode(), {"Content-Type": _TEXT})

    def _one(self, key: str) -> None:
        """Answer with one object or tag, a range of it, or that it has not changed."""
        value: bytes | None = None
        route = "tags" if self._objects.keys.is_ref(key) else "object"
        if route == "tags":
            value = self._objects.read_ref(key, self._until_s)
        elif self._objects.keys.is_object(key):
            most = object_frames.ANSWER_BYTES << 8
            value = dict(self._objects.get({key: most}, self._until_s))[key]
            self._tally.add("objects_total", result="absent" if value is None else "sent")
        if value is None:
            self._say(HTTPStatus.NOT_FOUND, route, "there is no such object or tag\n")
            return
        etag = f'"{hashlib.sha256(value).hexdigest()}"'
        # An object never changes under its key, and a tag does.
        age = "public, max-age=31536000, immutable" if route == "object" else "no-cache"
        headers = {
            "ETag": etag,
            "Content-Type": _BYTES,
            "Accept-Ranges": "bytes",
            "Cache-Control": age,
        }
        if etag in {tag.strip() for tag in self.headers.get("If-None-Match", "").split(",")}:
            self._send(HTTPStatus.NOT_MODIFIED, route, b"", headers)
            return
        self._ranged(route, value, headers, etag)

    def _ranged(self, route: str, value: bytes, headers: dict[str, str], etag: str) -> None:
        asked = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        if asked is None or not any(asked.groups()) or self.headers.get("If-Range", etag) != etag:
            # As the standard has it for a range that is none of ours.
            self._send(HTTPStatus.OK, route, value, headers)
            return
        first, last = asked.groups()
        start = int(first) if first else max(0, len(value) - int(last))
        end = min(int(last) + 1, len(value)) if first and last else len(value)
        if start >= end:
            headers["Content-Range"] = f"bytes */{len(value)}"
            self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, route, b"", headers)
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(value)}"
        self._send(HTTPStatus.PARTIAL_CONTENT, route, memoryview(value)[start:end], headers)

    def _post(self) -> None:
        path = urlsplit(self.path).path
        length = self.headers.get("Content-Length", "")
        if path not in {"/objects", "/exists"}:
            self.close_connection = True
            self._say(HTTPStatus.NOT_FOUND, "none", "there is no such route\n")
            return
        most = object_frames.QUESTION_BYTES
        is_size = length.isdecimal() and len(length) <= len(str(most)) and int(length) <= most
        if self.headers.get("Transfer-Encoding") or not is_size:
            self.close_connection = True
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            self._say(status, path[1:], "too large, or of unknown size\n")
            return
        body = self.rfile.read(int(length))
        asked = object_frames.decode_question(body) if len(body) == int(length) else None
        if asked is None:
            self._say(
                HTTPStatus.BAD_REQUEST, path[1:], "expected lines of a key and a number of bytes\n"
            )
        elif path == "/objects":
            self._many(asked)
        else:
            there = self._objects.present(list(asked), self._until_s)
            answer = "".join("1" if key in there else "0" for key in asked)
            self._send(HTTPStatus.OK, "exists", answer.encode(), {"Content-Type": _TEXT})

    def _many(self, asked: dict[str, int]) -> None:
        found = dict(self._objects.get(asked, self._until_s))
        parts: list[bytes] = []
        sent = size = 0
        for key, most in asked.items():
            value, why = found.get(key), object_frames.ABSENT
            if key not in found or (
                value is not None and size and size + len(value) > object_frames.ANSWER_BYTES
            ):
                value, why = None, object_frames.LATER
            elif value is not None and len(value) > most:
                value, why = None, object_frames.LARGER
            parts.append(object_frames.encode_size(why if value is None else len(value)))
            if value is not None:
                parts.append(value)
                sent, size = sent + 1, size + len(value)
        absent = sum(value is None for value in found.values())
        self._tally.add("objects_total", sent, result="sent")
        self._tally.add("objects_total", absent, result="absent")
        self._send(HTTPStatus.OK, "objects", b"".join(parts), {"Content-Type": _BYTES})

    def _say(
        self, status: HTTPStatus, route: str, text: str = "", headers: dict[str, str] | None = None
    ) -> None:
        every = {"Content-Type": _TEXT, **(headers or {})}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            every["Retry-After"] = str(RETRY_AFTER_S)
        if not text:
            self.close_connection = True
        self._send(status, route, (text or f"{status.phrase}\n").encode(), every)

    def _send(
        self, status: HTTPStatus, route: str, body: bytes | memoryview, headers: dict[str, str]
    ) -> None:
        self._answered = True
        self.close_connection = self.close_connection or self._leaving()
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Date: {self.date_time_string()}",
            f"{MARK}: 1",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if status != HTTPStatus.NOT_MODIFIED:
            lines.append(f"Content-Length: {len(body)}")
        lines.append(f"Connection: {'close' if self.close_connection else 'keep-alive'}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        sent = b"" if self.command == "HEAD" or status == HTTPStatus.NOT_MODIFIED else body
        self._timed.expire_in(self._bounds.request_s + len(sent) / LEAST_BYTES_PER_S)
        # Counted first, so that whoever has the answer finds it counted; an answer that is cut off
        # counts among `connections_total` too.
        self._tally.add("requests_total", route=route, code=str(status.value))
        self._tally.add("sent_bytes_total", len(sent))
        self._timed.sendall(head + sent if len(sent) < LEAST_BYTES_PER_S else head)
        if len(sent) >= LEAST_BYTES_PER_S:
            self._timed.sendall(sent)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the base class found wrong with a request."""
        self.close_connection = True
        self._say(HTTPStatus(code), "none")

    def send_response_only(self, code: int, message: str | None = None) -> None:
        """Say that a body may follow, which is all that the base class says by itself."""
        self._timed.sendall(
            f"HTTP/1.1 {HTTPStatus(code).value} {HTTPStatus(code).phrase}\r\n".encode()
        )

    def end_headers(self) -> None:
        """End what `send_response_only` began."""
        self._timed.sendall(b"\r\n")

    # the base class's name for it
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing: requests are counted."""


# The system keeps so many connections that nobody accepted yet: a job's replicas come together.
BACKLOG = 512
# How often the thread that accepts looks whether it is to end, where closing does not wake it.
_LOOK_S = 0.5
_REFUSAL_S = 0.2
_REFUSAL = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_AFTER_S}\r\nContent-Length:"
    " 0\r\nConnection: close\r\n\r\n"
)
_log = logging.getLogger("bundler.store")
# A program that does not configure logging sees no lines of it.
_log.addHandler(logging.NullHandler())


class PeerServer:
    """Serves until it is closed, in threads of its own: one that accepts, and one for each
    connection.

    Guarantees: no more connections, reads and seconds for a request than the bounds of `objects`
    say, however slow the other side is. Does not guarantee that who asks is who he seems: what is
    served is for everybody who reaches the address.

    Args:
        objects: what is served.
        host, port: where to listen; port 0 for one that is free.

    Raises:
        BadSettings: it cannot listen there.
    """

    def __init__(
        self,
        objects: ServedObjects,
        host: str,
        port: int,
    ) -> None:
        self._objects, self._tally, self._bounds = objects, objects.tally, objects.bounds
        self._socket = _listening(host, port)
        self.host, self.port = self._socket.getsockname()[:2]
        self._leaving = False
        self._lock = threading.Lock()
        self._open: dict[TimedSocket, ObjectRequests] = {}
        self._none_open = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._accept, name="bundler-serve", daemon=True)
        self._thread.start()

    def close(self, drain_s: float = 0.0) -> bool:
        """Listen no more, and end; True when every request that was under way got its answer.

        Args:
            drain_s: how long to wait for these.
        """
        self._leaving = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._thread.join()
        until_s = time.monotonic() + drain_s
        with self._none_open:
            for connection, requests in self._open.items():
                if not requests.busy:
                    connection.shutdown()
            while self._open and (left_s := until_s - time.monotonic()) > 0:
                self._none_open.wait(left_s)
            cut = [connection for connection, requests in self._open.items() if requests.busy]
            for connection in list(self._open):
                connection.shutdown()
        return not cut

    def abandon(self) -> None:
        """Leave all to the parent process, in a forked child: the port is free as soon as the
        parent closes it.
        """
        self._leaving = True
        self._socket.close()

    def _accept(self) -> None:
        while not self._leaving:
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._leaving:
                    return
                # No descriptor is left, for instance.
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(_LOOK_S)
                continue
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        connection = TimedSocket(accepted, self._bounds.idle_s)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = ObjectRequests(connection, self._objects, lambda: self._leaving)
        with self._lock:
            full = len(self._open) >= self._bounds.connections
            if not full:
                self._open[connection] = requests
        if not full:
            try:
                threading.Thread(
                    target=self._serve,
                    args=(connection, requests),
                    name="bundler-peer",
                    daemon=True,
                ).start()
                self._tally.add("connections_total", result="accepted")
                self._tally.add("connections", 1)
            except RuntimeError:  # the system has no more threads
                full = True
                with self._lock:
                    self._open.pop(connection)
        if full:
            self._refuse(connection)

    def _refuse(self, connection: TimedSocket) -> None:
        self._tally.add("connections_total", result="refused")
        with contextlib.suppress(OSError):
            connection.expire_in(_REFUSAL_S)
            connection.sendall(_REFUSAL.encode())
            connection.shutdown()
        connection.close()

    def _serve(self, connection: TimedSocket, requests: ObjectRequests) -> None:
        try:
            requests.serve()
        except TimeoutError:
            if requests.busy:
                self._tally.add("connections_total", result="cut")
        except OSError as error:
            _log.debug("a connection ended: %s", error)
        finally:
            connection.shutdown()  # a forked child may have it open still
            connection.close()
            self._tally.add("connections", -1)
            with self._none_open:
                self._open.pop(connection, None)
                self._none_open.notify_all()


def _listening(host: str, port: int) -> socket.socket:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadSettings(f"cannot listen on {where}: {why}; give another address") from error
    made.settimeout(_LOOK_S)
    return made
