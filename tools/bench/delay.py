# SPDX-License-Identifier: Apache-2.0
"""A network that answers late: what a server on this host says is passed on after a fixed time.

    python -m tools.bench.delay PORT SECONDS         prints the port that it listens on; ends with its standard input

Every answer arrives so much later than the server gave it, however many follow each other, as on a
link of that length.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator

from tools.shared.processes import listening

READ_BYTES = 256 * 1024


@contextlib.contextmanager
def delayed(port: int, seconds: float) -> Iterator[int]:
    """Run the program while the block runs, or nothing for no delay; yields the port to
    connect to.
    """
    if not seconds:
        yield port
        return
    with listening(__name__, str(port), str(seconds)) as passed_on:
        yield passed_on


def main(port: int, seconds: float) -> None:
    """Listen, and serve each connection by threads of its own, until standard input ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listener, port, seconds), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, port: int, seconds: float) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_the_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for target, arguments in (
            (_questions, (client, server)),
            (_answers, (server, on_the_way, seconds)),
            (_arrivals, (on_the_way, client)),
        ):
            threading.Thread(target=target, args=arguments, daemon=True).start()


def _questions(client: socket.socket, server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(READ_BYTES):
            server.sendall(data)
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def _answers(
    server: socket.socket, on_the_way: queue.SimpleQueue[tuple[float, bytes]], seconds: float
) -> None:
    data = b"."
    with contextlib.suppress(OSError), server:
        while data:
            data = server.recv(READ_BYTES)
            on_the_way.put((time.monotonic() + seconds, data))
    on_the_way.put((0.0, b""))


def _arrivals(on_the_way: queue.SimpleQueue[tuple[float, bytes]], client: socket.socket) -> None:
    with contextlib.suppress(OSError), client:
        while (arrival := on_the_way.get())[1]:
            time.sleep(max(0.0, arrival[0] - time.monotonic()))
            client.sendall(arrival[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
