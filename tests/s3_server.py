# SPDX-License-Identifier: Apache-2.0
"""A real S3 server for tests: moto, as a process on a free port of the loopback; and a proxy that
counts, delays and spoils answers.

It answers one request at a time, as its compare-and-set is not atomic between threads.
"""

import contextlib
import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

_MAIN = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "hush-hush-hush",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
PATIENCE_S = 60
_DROPPED = {"connection", "transfer-encoding", "content-length", "keep-alive"}


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running():
    """Start a server and yield its endpoint; skips aloud where moto or obstore is missing."""
    for package in ("obstore", "moto", "flask"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[test]'")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, "the S3 server ended"
            assert time.monotonic() < until, "the S3 server does not listen"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def make_bucket(endpoint, name=None):
    """Make a bucket and return its name."""
    name = name or f"b{os.urandom(6).hex()}"
    urllib.request.urlopen(
        urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=30
    ).close()
    return name


class Proxy(http.server.ThreadingHTTPServer):
    """Stands before a server.

    Attributes:
        requests: method, path and range of each, in order.
        spoil: called with a handler before it forwards; True when it has answered itself.
        cut: how many bytes at the end of an answer's body are left out.
        delay_s: how long each answer waits.
    """

    daemon_threads = True

    def __init__(self, endpoint):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = endpoint.removeprefix("http://")
        self.requests, self.spoil, self.cut, self.delay_s = [], lambda handler: False, 0, 0.0

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def serving(self):
        thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request, client_address):
        """A client that hung up is what some tests want."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, self.headers.get("Range")))
        time.sleep(self.server.delay_s)
        if self.server.spoil(self):
            return
        link = http.client.HTTPConnection(self.server.target, timeout=30)
        link.request(
            self.command,
            self.path,
            body,
            {k: v for k, v in self.headers.items() if k.lower() != "host"},
        )
        answer = link.getresponse()
        data = answer.read()
        self.reply(
            answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in _DROPPED}, data
        )
        link.close()

    def reply(self, status, headers, data=b""):
        """Answer; the last bytes may be left out, and the connection is closed then."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(data[: len(data) - self.server.cut] if self.server.cut else data)
        self.close_connection = self.close_connection or self.server.cut > 0

    def log_message(self, *_):
        """Tests read `requests`."""

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward
