# SPDX-License-Identifier: Apache-2.0
"""`ReplyParser`: reads the answers of a Redis server, and no more of one than the exchange allows.

The parsers that redis-py has believe what a server says: an array of two thousand million elements
is allocated before one of them has come, and arrays inside arrays go as deep as Python's stack.
`server_connections.py` gives each connection this one.
"""

from __future__ import annotations

import ssl
from typing import Any

from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse, ResponseError

# The answer to CLUSTER SLOTS is the deepest of those that are read here: ranges, nodes, a node,
# what is known of it.
MOST_DEPTH = 4
# An error of the server's may be a long line; each other line is a number.
LINE_BYTES = 64 * 1024
_INTEGER_DIGITS = 20
# What an element of an array takes here besides its bytes, at least.
ELEMENT_BYTES = 64
_END = b"\r\n"
# Read bytes are dropped from the buffer once there are so many: each time the rest is moved.
_DROPPED_BYTES = 1 << 20
# Of a large value so many bytes are asked for at a time.
_LARGE_READ_BYTES = 1 << 20


class ReplyParser(BaseParser):
    """A parser of RESP 2, as redis-py's connections use one; texts come as bytes.

    Guarantees: what a server announces is compared with the allowance of the exchange (see
    `Metered`) before memory is taken for it, and what is no RESP 2 raises `InvalidResponse`.

    Args:
        socket_read_size: how many bytes are asked of the socket at a time.
    """

    def __init__(self, socket_read_size: int) -> None:
        self._read_bytes = socket_read_size
        self._socket: Any = None
        self._received, self._at = bytearray(), 0

    def on_connect(self, connection: Any) -> None:
        """Read from a connection's socket from now on."""
        self._socket = connection._sock  # noqa: SLF001  # as redis-py's parsers do
        self._received, self._at = bytearray(), 0

    def on_disconnect(self) -> None:
        """Forget the socket and what came from it."""
        self._socket = None
        self._received, self._at = bytearray(), 0

    def can_read(self, timeout: float = 0, **_: Any) -> bool:
        """Tell whether anything came that nobody asked for; raises when the server is gone."""
        if self._at < len(self._received):
            return True
        self._socket.settimeout(timeout)
        try:
            self._receive()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._socket.settimeout(None)
        return True

    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return the next answer; one that is an error of the server's is returned too, or raised
        where the connection is of no more use.
        """
        answer = self._read(0)
        if self._at == len(self._received):
            self._received.clear()
            self._at = 0
        elif self._at > _DROPPED_BYTES:
            del self._received[: self._at]
            self._at = 0
        if isinstance(answer, ServerGone):
            raise answer
        return answer

    def _read(self, depth: int) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = _integer(line)
            return None if size == -1 else self._bulk(size, line)
        if kind == b":":
            return _integer(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._error(rest)
        if kind == b"*":
            count = _integer(line)
            return None if count == -1 else self._array(count, depth, line)
        raise InvalidResponse(f"{line[:80]!r} is no answer of Redis")

    def _line(self) -> bytes:
        start = self._at
        while (end := self._received.find(_END, start)) < 0:
            start = max(self._at, len(self._received) - 1)
            if start - self._at > LINE_BYTES:
                raise InvalidResponse(f"a line of an answer is longer than {LINE_BYTES} bytes")
            self._receive()
        line = bytes(self._received[self._at : end])
        self._at = end + len(_END)
        return line

    def _bulk(self, size: int, line: bytes) -> bytes:
        if size < 0:
            raise InvalidResponse(f"{line!r} is no size of a value")
        end = self._at + size
        if (missing := end + len(_END) - len(self._received)) > 0:
            self._socket.expect(missing)
        while (missing := end + len(_END) - len(self._received)) > 0:
            self._receive(missing)
        if self._received[end : end + len(_END)] != _END:
            raise InvalidResponse(f"a value is longer than the {size} bytes that were announced")
        value = bytes(memoryview(self._received)[self._at : end])
        self._at = end + len(_END)
        return value

    def _array(self, count: int, depth: int, line: bytes) -> list[Any]:
        if count < 0 or depth >= MOST_DEPTH:
            raise InvalidResponse(f"{line!r} is no array, or one at depth {depth + 1}")
        self._socket.spend(count * ELEMENT_BYTES)
        return [self._read(depth + 1) for _ in range(count)]

    def _error(self, text: bytes) -> Exception:
        try:
            # redis-py's
            error: Exception = self.parse_error(text.decode("utf-8", "replace"))  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as wrong:  # a redirection without an address
            raise InvalidResponse(f"{text[:80]!r} is no error of Redis") from wrong
        known = isinstance(error, (ResponseError, ServerGone))
        return error if known else ResponseError(str(error))

    def _receive(self, missing: int = 0) -> None:
        data = self._socket.recv(max(self._read_bytes, min(missing, _LARGE_READ_BYTES)))
        if not data:
            raise ServerGone("the server closed the connection")
        self._received += data


def _integer(line: bytes) -> int:
    """Return the number of a line, which has 64 bits at most."""
    digits = line[1:]
    if len(digits) <= _INTEGER_DIGITS and digits.lstrip(b"+-").isdigit():
        try:
            number = int(digits)
        except ValueError:
            pass
        else:
            if -(1 << 63) <= number < 1 << 63:
                return number
    raise InvalidResponse(f"{line[:80]!r} holds no number of 64 bits")
