# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an S3 server that is fast enough to measure clients with, and that can be told to
go wrong.

    python -m tools.shared.object_server SECONDS [FOLDER]     serves a bucket that holds the files of FOLDER; prints its port

It speaks what stores and `aws s3 sync` need: GET with ranges and If-None-Match, HEAD, PUT on
condition, DELETE, lists page by page. It keeps objects in memory, looks at no signature, and gives
each answer so many seconds late, however many are asked at once. Real servers and moto judge what
is right; this one is there because moto answers some hundred requests a second.
`tools.bench.cloud` runs it as a process, `tools.cluster.cloud_faults` as a thread, with a `fault`.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
DATE = "Sun, 22 Nov 2026 00:00:00 GMT"
PAGE = 1000
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    304: "Not Modified",
    404: "Not Found",
}
_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        """The path without the bucket, empty for the bucket itself."""
        return self.path.removeprefix("/").partition("/")[2]


@dataclass(frozen=True)
class Answer:
    """What the server says.

    Attributes:
        status, headers, body: as in HTTP; status 0 closes the connection without a word.
        length: what Content-Length says, None for the truth.
        sent: how many bytes of the body are sent before the connection is closed, None for all of
            them and leaving it open.
        late_s: how much later than others it comes; None for never.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None
    sent: int | None = None
    late_s: float | None = 0.0


class ObjectServer:
    """A bucket in memory.

    Args:
        delay_s: how long each answer waits.
        fault: returns an answer instead of the right one, or None for that; called with each
            request and its right answer.
        tls: for a server that speaks TLS.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        fault: Callable[[Request, Answer], Answer | None] = lambda _request, _answer: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.delay_s, self.fault, self._tls = delay_s, fault, tls
        self.port = 0
        self._listed: list[str] = []
        self._links: set[asyncio.Transport] = set()

    @property
    def endpoint(self) -> str:
        """The address for `AWS_ENDPOINT_URL`."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def answer(self, asked: Request) -> Answer:
        """Return what a bucket answers; all changes are made here, in one thread."""
        if not asked.key:
            if asked.method == "POST" and "delete" in asked.query:
                for name in re.findall(rb"<Key>([^<]*)</Key>", asked.body):
                    self.objects.pop(name.decode(), None)
                return _xml("<DeleteResult/>")
            return self._page(asked) if asked.method == "GET" else Answer(200)
        if asked.method == "PUT":
            return self._put(asked)
        if asked.method == "DELETE":
            self.objects.pop(asked.key, None)
            return Answer(204)
        return self._get(asked)

    def _put(self, asked: Request) -> Answer:
        held = self.objects.get(asked.key)
        expected = asked.headers.get("if-match")
        if (asked.headers.get("if-none-match") == "*" and held is not None) or (
            expected is not None and (held is None or etag_of(held) != expected)
        ):
            return _xml("<Error><Code>PreconditionFailed</Code></Error>", 412)
        self.objects[asked.key] = asked.body
        return Answer(200, {"ETag": etag_of(asked.body)})

    def _get(self, asked: Request) -> Answer:
        data = self.objects.get(asked.key)
        if data is None:
            return _xml("<Error><Code>NoSuchKey</Code></Error>", 404)
        headers = {"ETag": etag_of(data), "Last-Modified": DATE}
        if asked.headers.get("if-none-match") == headers["ETag"]:
            return Answer(304, headers)
        part = _RANGE.fullmatch(asked.headers.get("range", ""))
        if part is None:
            return Answer(200, headers, data)
        first, last = int(part[1]), min(int(part[2]), len(data) - 1)
        return Answer(
            206,
            headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"},
            data[first : last + 1],
        )

    def _page(self, asked: Request) -> Answer:
        prefix, after = (
            asked.query.get("prefix", [""])[0],
            asked.query.get("continuation-token", [""])[0],
        )
        if not after:  # sorted once for all pages
            self._listed = sorted(self.objects)
        start = (
            bisect.bisect_right(self._listed, after)
            if after
            else bisect.bisect_left(self._listed, prefix)
        )
        shown = [
            name
            for name in self._listed[start : start + PAGE]
            if name.startswith(prefix) and name in self.objects
        ]
        more = len(self._listed) > start + PAGE and self._listed[start + PAGE].startswith(prefix)
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-22T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(etag_of(self.objects[name]))}</ETag><Size>{len(self.objects[name])}</Size></Contents>"
            for name in shown
        )
        following = (
            f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
        )
        return _xml(
            f"<ListBucketResult><KeyCount>{len(shown)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{following}{entries}</ListBucketResult>"
        )

    def drop_links(self) -> None:
        """Close every connection in the middle of what it does; called in the server's own
        thread.
        """
        for link in list(self._links):
            link.abort()

    async def start(self) -> asyncio.Server:
        """Listen on a free port of the loopback."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Link(self), "127.0.0.1", 0, ssl=self._tls, backlog=1024
        )
        self.port = server.sockets[0].getsockname()[1]
        return server

    @contextlib.contextmanager
    def serving(self) -> Iterator[ObjectServer]:
        """Serve in a thread while the block runs."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(self.start())
        thread = threading.Thread(target=loop.run_forever, name="object-server", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(self.drop_links)
            loop.call_soon_threadsafe(lambda: loop.call_later(0.02, loop.stop))
            thread.join()
            loop.close()


class _Link(asyncio.Protocol):
    """One connection, which answers one request after another."""

    def __init__(self, server: ObjectServer) -> None:
        self._server, self._received = server, bytearray()
        self._link: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link = transport
        self._server._links.add(transport)  # noqa: SLF001  # the same module

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._links.discard(self._link)  # noqa: SLF001  # the same module

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_END)
        if end < 0:
            return
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        start, size = end + len(_END), int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue" and len(self._received) == start:
            self._link.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(self._received) - start < size:
            return
        body = bytes(self._received[start : start + size])
        del self._received[: start + size]
        method, target, _ = first.split(" ")
        parts = urlsplit(target)
        asked = Request(
            method,
            unquote(parts.path),
            parse_qs(parts.query, keep_blank_values=True),
            headers,
            _unchunked(headers, body),
        )
        self._server.requests.append(asked)
        right = self._server.answer(asked)
        answer = self._server.fault(asked, right) or right
        if answer.late_s is None:
            return
        late_s = self._server.delay_s + answer.late_s
        if late_s:
            asyncio.get_running_loop().call_later(late_s, self._send, asked.method, answer)
        else:
            self._send(asked.method, answer)

    def _send(self, method: str, answer: Answer) -> None:
        if self._link.is_closing():
            return
        if not answer.status:
            self._link.abort()
            return
        length = len(answer.body) if answer.length is None else answer.length
        lines = [
            f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Answer')}",
            f"Content-Length: {length}",
        ]
        head = (
            "\r\n".join([*lines, *(f"{name}: {value}" for name, value in answer.headers.items())])
            + "\r\n\r\n"
        )
        body = b"" if method == "HEAD" or answer.status == 304 else answer.body[: answer.sent]
        self._link.write(head.encode() + body)
        if answer.sent is not None:
            self._link.close()


def etag_of(data: bytes) -> str:
    """Return the ETag that S3 gives to an object that was written in one request."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _unchunked(headers: dict[str, str], body: bytes) -> bytes:
    """Return a body without the chunks in which clients of AWS sign or sum it."""
    if "aws-chunked" not in headers.get("content-encoding", ""):
        return body
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size.partition(b";")[0], 16)
        if not count:
            break
        whole, body = whole + body[:count], body[count + 2 :]
    return whole


def _xml(text: str, status: int = 200) -> Answer:
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, by what they are called in a bucket."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def _serve(delay_s: float, objects: dict[str, bytes]) -> None:
    server = ObjectServer(delay_s)
    server.objects = objects
    listening = await server.start()
    print(server.port, flush=True)
    async with listening:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(
        _serve(float(sys.argv[1]), files_of(Path(sys.argv[2])) if len(sys.argv) > 2 else {})
    )
