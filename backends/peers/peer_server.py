# SPDX-License-Identifier: Apache-2.0
"""`PeerServer`: hands on the objects and tags of a byte store over HTTP, for reading.

Of the standard library: what it has to do is small, and its bounds are the point.  No TLS and no
passwords: who needs them puts a reverse proxy before it.  `bundler/store/store_server.py` makes
one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from bundler.backends.backend_errors import BadSettings
from bundler.backends.peers.peer_requests import RETRY_AFTER_S, ObjectRequests, ServingBounds
from bundler.backends.peers.served_objects import ServedObjects
from bundler.backends.peers.serving_tally import ServingTally
from bundler.backends.peers.timed_socket import TimedSocket

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

    Guarantees: no more connections, reads and seconds for a request than `bounds` say, however slow
    the other side is. Does not guarantee that who asks is who he seems: what is served is for
    everybody who reaches the address.

    Args:
        objects: what is served.
        host, port: where to listen; port 0 for one that is free.
        tally, bounds: what is counted, and how much is done at once.

    Raises:
        BadSettings: it cannot listen there.
    """

    def __init__(
        self,
        objects: ServedObjects,
        host: str,
        port: int,
        tally: ServingTally,
        bounds: ServingBounds,
    ) -> None:
        self._objects, self._tally, self._bounds = objects, tally, bounds
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
                _log.warning(
                    "cannot accept a connection: %s", error
                )  # no descriptor is left, for instance
                time.sleep(_LOOK_S)
                continue
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        connection = TimedSocket(accepted, self._bounds.idle_s)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = ObjectRequests(
            connection, self._objects, self._tally, self._bounds, lambda: self._leaving
        )
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
