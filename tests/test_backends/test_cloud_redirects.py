# SPDX-License-Identifier: Apache-2.0
"""A store that redirects to another host: nothing is sent there, which would hold a session token
or a shared access signature.
"""

import contextlib
import http.server
import threading

import pytest

from bundler.backends.backend_errors import BackendError
from bundler.backends.cloud import connect, parse_url
from bundler.backends.cloud.object_exchange import NOWHERE, gate

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[test]'")
SECRETS = ("hush-hush-hush", "T0KEN-T0KEN", "SIG-SIG-SIG")
CALLS = {
    "read": lambda bucket: bucket.read("k", 100),
    "ranges": lambda bucket: bucket.read_ranges("k", [(0, 1)]),
    "create": lambda bucket: bucket.create("k", b"x"),
    "remove": lambda bucket: bucket.remove(["k"]),
    "names": lambda bucket: list(bucket.names("folder")),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Redirects as its server says, and keeps what it was asked."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(f"{self.path} {self.headers}")
        status, location = self.server.told
        self.send_response_only(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


@contextlib.contextmanager
def serving(status, location=None):
    """Serve one answer to everything, while the block runs."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.told, server.asked = (status, location), []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def environment(monkeypatch):
    """Settings of both clouds, and no proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    told = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRETS[0],
        "AWS_SESSION_TOKEN": SECRETS[1],
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AZURE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2021&sig={SECRETS[2]}",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("url", ["s3://bucket/prefix", "az://container/prefix"])
def test_nothing_is_sent_to_another_host(url, status, call, environment):
    """Whatever is asked and however it is redirected, the other host hears nothing, and the error
    is ours and holds no secret.
    """
    with serving(404) as other, serving(status, f"http://localhost:{other.server_port}/x") as first:
        for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT"):
            environment.setenv(name, f"http://127.0.0.1:{first.server_port}")
        bucket = connect(parse_url(f"{url}?timeout_s=2"), url)
        with contextlib.suppress(BackendError):
            CALLS[call](bucket)
        assert first.asked
        assert other.asked == []


def test_the_error_says_what_is_not_followed(environment):
    """Who named the wrong region or endpoint is told so."""
    with serving(307, "http://localhost:9/x") as first:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{first.server_port}")
        with pytest.raises(BackendError, match="redirects to another host, which is not followed"):
            connect(parse_url("s3://bucket?timeout_s=1"), "s3://bucket").read("k", 100)


def test_the_same_host_is_followed(environment):
    """A store may send its own requests elsewhere on its host."""
    with serving(200) as other, serving(307, f"http://127.0.0.1:{other.server_port}/x") as first:
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{first.server_port}")
        with contextlib.suppress(BackendError):
            connect(parse_url("s3://bucket?timeout_s=1"), "s3://bucket").read("k", 100)
        assert other.asked


@pytest.mark.parametrize(
    ("url", "told", "hosts"),
    [
        ("s3://b/p", {}, {"s3.us-east-1.amazonaws.com", "sts.amazonaws.com", "169.254.169.254"}),
        (
            "s3://b",
            {"AWS_REGION": "eu-west-3"},
            {"s3.eu-west-3.amazonaws.com", "sts.eu-west-3.amazonaws.com"},
        ),
        ("s3://b", {"AWS_ENDPOINT_URL_S3": "https://minio.lan:9000"}, {"minio.lan"}),
        ("s3://b", {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://10.0.0.7/x"}, {"10.0.0.7"}),
        ("s3://b--use1-az4--x-s3", {}, {"s3express-use1-az4.us-east-1.amazonaws.com"}),
        (
            "az://c",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a"},
            {"a.blob.core.windows.net", "login.microsoftonline.com"},
        ),
        ("az://c", {"AZURE_STORAGE_USE_EMULATOR": "true"}, {"127.0.0.1", "localhost"}),
        (
            "az://c",
            {"AZURE_AUTHORITY_HOST": "login.microsoftonline.us"},
            {"login.microsoftonline.us"},
        ),
        ("az://c", {"IDENTITY_ENDPOINT": "http://10.1.1.1:42/msi"}, {"10.1.1.1"}),
        ("az://c", {"AZURE_STORAGE_ENDPOINT": "https://[::1]:1/x"}, {"::1"}),
    ],
)
def test_the_hosts_of_a_store_and_of_its_credentials_are_reached(url, told, hosts):
    """Those of the cloud, those that settings name, and those of the machine that has
    credentials.
    """
    settings = gate(url, told)
    assert settings["proxy_url"] == NOWHERE
    assert hosts <= set(settings["proxy_excludes"].split(","))


@pytest.mark.parametrize("url", ["https://h/x", "gs://b"])
def test_stores_without_such_credentials_are_left_alone(url):
    """What no request but its Authorization holds, obstore keeps for itself."""
    assert gate(url, {}) == {}


def test_who_has_a_proxy_keeps_it():
    """Every request goes through it, and it decides."""
    assert gate("s3://b", {"https_proxy": "http://proxy:3128"}) == {}
    assert gate("s3://b", {"AWS_PROXY_URL": "http://proxy:3128"}) == {}
