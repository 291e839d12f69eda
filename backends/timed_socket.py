# SPDX-License-Identifier: Apache-2.0
"""`TimedSocket`: a connection with one deadline for all that is read and written, however slowly
the bytes come.

A time-out of the system begins anew with each byte, so that who sends one a second is never done.
`PeerServer`, `PeerBackend` and `HttpExchange` use it.
"""

from __future__ import annotations

import io
import math
import socket
import time
from typing import Any

_CHUNK_BYTES = 256 * 1024


class TimedSocket:
    """A connection, as far as `http.client` and `http.server` use one.

    Args:
        inner: the connection; closed with this object.
        seconds: how long all that follows may take; `expire_in` says otherwise.
        silence_s: how long each wait may take.
        bytes_per_s: what comes faster than this may take as long as it takes.
    """

    def __init__(
        self,
        inner: socket.socket,
        seconds: float,
        silence_s: float = math.inf,
        bytes_per_s: float = math.inf,
    ) -> None:
        self._inner, self._silence_s, self._bytes_per_s = inner, silence_s, bytes_per_s
        self._until_s, self._readers, self._closed = 0.0, 0, False
        self.expire_in(seconds)

    def expire_in(self, seconds: float) -> None:
        """Let all that is read and written from now on take so long at most."""
        self._until_s = time.monotonic() + seconds

    def makefile(self, *_args: Any, **_options: Any) -> io.BufferedReader:
        """Return what reads from the connection, which stays open for it when this is closed."""
        self._readers += 1
        return io.BufferedReader(_TimedReader(self))

    def receive_into(self, buffer: Any) -> int:
        """Read what is there; raises `TimeoutError` after the deadline."""
        self._inner.settimeout(self._left_s())
        count = self._inner.recv_into(buffer)
        self._until_s += count / self._bytes_per_s
        return count

    def sendall(self, data: Any) -> None:
        """Write everything; raises `TimeoutError` after the deadline."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            self._inner.settimeout(self._left_s())
            self._inner.sendall(view[start : start + _CHUNK_BYTES])

    def shutdown(self) -> None:
        """End what other threads read and write here."""
        try:
            self._inner.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was faster

    def close(self) -> None:
        """Close it, once nobody reads from it any more; closing twice is fine."""
        self._closed = True
        if self._readers == 0:
            self._inner.close()

    def drop_reader(self) -> None:
        """Note that what `makefile` returned is closed."""
        self._readers -= 1
        if self._closed:
            self.close()

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("not done in time")
        return min(left_s, self._silence_s)


class _TimedReader(io.RawIOBase):
    def __init__(self, inner: TimedSocket) -> None:
        self._source = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.receive_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._source.drop_reader()
