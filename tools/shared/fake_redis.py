# SPDX-License-Identifier: Apache-2.0
"""`FakeRedis`: a server on loopback that reads commands of Redis and answers each with whatever
bytes it is told to.

The tests of the Redis store and `python -m tools.fuzz replies` use it: a real server never sends
what is tried here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self, TypeAlias

#: Gets the words of a command, the first in capitals, and returns the bytes of its answer; None:
#: what an empty server says.
Answer: TypeAlias = Callable[[list[bytes]], "bytes | None"]
_NOTHING = b"$-1\r\n"


def honest(words: list[bytes]) -> bytes:
    """Return what an empty server answers, as far as the store asks; it forgets what it is told."""
    match words[0]:
        case b"EXISTS" | b"STRLEN" | b"PEXPIRE" | b"UNLINK":
            return b":0\r\n"
        case b"TIME":
            return b"*2\r\n$10\r\n1700000000\r\n$1\r\n5\r\n"
        case b"SCAN":
            return b"*2\r\n$1\r\n0\r\n*0\r\n"
        case b"GETRANGE":
            return b"$0\r\n\r\n"
        case b"PTTL":
            return b":-2\r\n"
        case b"GET":
            return _NOTHING
        case b"EVALSHA" | b"EVALSHA_RO" | b"EVAL" | b"EVAL_RO":
            return b"*%d\r\n" % int(words[2]) + b"$0\r\n\r\n" * int(words[2])
    return b"+OK\r\n"


class FakeRedis:
    """The server, for as long as a `with` block runs; `answer` may be changed at any time, and
    `asked` counts commands.
    """

    def __init__(self, answer: Answer = lambda _words: None) -> None:
        self.answer, self.asked = answer, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = False
        self._clients: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        for one in (self._listener, *self._clients):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def url(self, scheme: str = "redis", query: str = "") -> str:
        """Return the URL of a store here."""
        return f"{scheme}://127.0.0.1:{self.port}{query and f'/?{query}'}"

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.add(client)
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as lines:
            while line := lines.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(lines.readline()[1:])
                    words.append(lines.read(size + 2)[:-2])
                words[0] = words[0].upper()
                self.asked += 1
                answer = self.answer(words)
                client.sendall(honest(words) if answer is None else answer)
        self._clients.discard(client)
