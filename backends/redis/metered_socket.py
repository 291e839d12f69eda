# SPDX-License-Identifier: Apache-2.0
"""`Metered`: a socket with a limit of time and of bytes for each exchange, which redis-py's
connections read from.

`Link` in `server_exchange.py` puts it between a connection and its socket; both kinds of exchange
give it an allowance for each exchange.
"""

from __future__ import annotations

import time
from typing import Any

from bundler.backends.redis.reply_errors import OverlongReply

# An exchange may take `timeout_s`, and as much longer as its bytes take at this pace.  A server
# that trickles is given up.
BYTES_PER_S = 10_000_000
# All answers of an exchange together, where the caller does not say: far more than a page of a
# listing has.
REPLY_BYTES = 16 * 1024 * 1024


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
