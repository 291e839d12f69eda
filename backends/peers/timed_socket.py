# SPDX-License-Identifier: Apache-2.0
"""`TimedSocket`: a connection with one deadline for all that is read and written, however slowly
the bytes come.

A time-out of the system begins anew with each byte, so that who sends one a second is never done.
`PeerServer` and `PeerBackend` use it.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Any

_CHUNK_BYTES = 256 * 1024


class TimedSocket:
    """A connection, as far as `http.client` and `http.server` use one.

    Args:
        inner: the connection; closed with this object.
        seconds: how long all that follows may take; `expire_in` says otherwise.
    """

    def __init__(self, inner: socket.socket, seconds: float) -> None:
        self._inner = inner
        self._until_s = 0.0
        self.expire_in(seconds)

    def expire_in(self, seconds: float) -> None:
        """Let all that is read and written from now on take so long at most."""
        self._until_s = time.monotonic() + seconds

    def makefile(self, *_args: Any, **_options: Any) -> io.BufferedReader:
        """Return what reads from the connection; it does not close it."""
        return io.BufferedReader(_TimedReader(self))

    def receive_into(self, buffer: Any) -> int:
        """Read what is there; raises `TimeoutError` after the deadline."""
        self._inner.settimeout(self._left_s())
        return self._inner.recv_into(buffer)

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
        """Close it; closing twice is fine."""
        self._inner.close()

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("not done in time")
        return left_s


class _TimedReader(io.RawIOBase):
    def __init__(self, inner: TimedSocket) -> None:
        self._source = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.receive_into(buffer)
