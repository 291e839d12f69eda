# SPDX-License-Identifier: Apache-2.0
"""What a server does when many ranks restore in the same moment, each on a core of its own.

    python -m tools.cluster.replay      reads a job as one JSON line, answers one JSON line

Simulated ranks share the few cores of this machine, and so come one after the other.  Here one
rank's conversation with the server is recorded, and then replayed by thousands of connections at
once, byte for byte, by a client that does nothing else: the server is what they wait for.  A rank
sends its next question when all bytes of an answer as long as the recorded one are there.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

CHUNK = 1024 * 1024


@dataclass
class Turn:
    """One question and how long its answer is."""

    question: bytes
    answer_bytes: int


@dataclass
class ReplayedConnection:
    """One connection: what it still has to say, and how long each answer took."""

    sock: socket.socket
    turn: int = 0
    unsent: bytes = b""
    missing: int = 0
    asked_at_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    failed: str = ""


class ConnectionReplay:
    """All connections, driven by one thread."""

    def __init__(self, port: int, turns: list[Turn]) -> None:
        self._port, self._turns = port, turns
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(CHUNK)

    def run(self, ranks: int, limit_s: float) -> list[ReplayedConnection]:
        """Let so many ranks connect and run at once; returns when all have ended, failed, or the
        time is over.
        """
        connections = [self._connecting() for _ in range(ranks)]
        until_s, open_ = time.monotonic() + limit_s, ranks
        while open_ and time.monotonic() < until_s:
            for event, mask in self._selector.select(1.0):
                open_ -= self._step(event.data, mask)
        for connection in connections:
            if connection.turn < len(self._turns) and not connection.failed:
                connection.failed = "no answer in time"
            connection.sock.close()
        self._selector.close()
        return connections

    def _connecting(self) -> ReplayedConnection:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = ReplayedConnection(sock, asked_at_s=time.monotonic())
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", self._port))
        self._ask(connection)
        self._selector.register(sock, selectors.EVENT_WRITE, connection)
        return connection

    def _ask(self, connection: ReplayedConnection) -> None:
        turn = self._turns[connection.turn]
        connection.unsent, connection.missing, connection.asked_at_s = (
            turn.question,
            turn.answer_bytes,
            time.monotonic(),
        )

    def _step(self, connection: ReplayedConnection, mask: int) -> bool:
        """Do what one connection is ready for; True when it has ended."""
        try:
            if mask & selectors.EVENT_WRITE:
                connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
                if not connection.unsent:
                    self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
                return False
            count = connection.sock.recv_into(self._buffer)
            if not count:
                raise ConnectionResetError("closed by the server")
        except OSError as error:
            connection.failed = f"{type(error).__name__}: {error}"
            self._selector.unregister(connection.sock)
            return True
        connection.missing -= count
        return connection.missing <= 0 and self._answered(connection)

    def _answered(self, connection: ReplayedConnection) -> bool:
        connection.waits_s.append(time.monotonic() - connection.asked_at_s)
        connection.turn += 1
        if connection.turn == len(self._turns):
            self._selector.unregister(connection.sock)
            return True
        self._ask(connection)
        self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
        return False


def dropped() -> int:
    """Return how many connections this host has dropped so far, since the queue of a listener was
    full.
    """
    with contextlib.suppress(OSError), open("/proc/net/netstat", encoding="ascii") as file:
        names, values = (line.split() for line in file if line.startswith("TcpExt:"))
        return int(values[names.index("ListenOverflows")])
    return 0


def main() -> int:
    """Do one job."""
    job = json.loads(sys.stdin.readline())
    turns = [Turn(question.encode("latin-1"), size) for question, size in job["turns"]]
    began, before = time.monotonic(), dropped()
    connections = ConnectionReplay(job["port"], turns).run(job["ranks"], job["limit_s"])
    failed = [connection.failed for connection in connections if connection.failed]
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "dropped": dropped() - before,
                "failed": len(failed),
                "failures": sorted(set(failed))[:5],
                "waits_s": [
                    max(connection.waits_s) for connection in connections if connection.waits_s
                ],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
