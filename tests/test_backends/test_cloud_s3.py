# SPDX-License-Identifier: Apache-2.0
"""The contract against a real S3 server, what its failures mean, and a store behind a plain web
server.
"""

import functools
import http.server
import threading
import time

import pytest
import s3_server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[cloud]'")
from cloud_contract import CloudContract, connections_end  # noqa: F401  # a fixture
from obstore.store import LocalStore

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.breaker import Guarded
from bundler.backends.cloud import CloudBackend, connect, parse_url
from bundler.backends.cloud.object_exchange import Bucket
from bundler.store.store_layout import encode_object
from bundler.store.store_urls import open_backend

pytestmark = pytest.mark.slow

ITEMS = {f"u/{number}": encode_object(b"%d" % number * 1000) for number in range(20)}


@pytest.fixture(scope="module")
def endpoint():
    """The address of the server."""
    with s3_server.running() as endpoint:
        yield endpoint


@pytest.fixture
def s3(endpoint, monkeypatch):
    """The URL of a store in a new bucket, reached directly."""
    for name, value in s3_server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return f"s3://{s3_server.make_bucket(endpoint)}/some/prefix"


@pytest.fixture
def proxy(endpoint, s3, monkeypatch):
    """A proxy before the server, through which stores that are opened now go."""
    with s3_server.Proxy(endpoint).serving() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def plain(url, **settings):
    """Open a store without guard."""
    found = parse_url(url)
    return CloudBackend(
        connect(found, url), **({"writable": found.writable, "touch_every_s": 0} | settings)
    )


@pytest.mark.slow
class TestS3(CloudContract):
    """The contract, for S3."""

    clock_step_s = 0.02

    @pytest.fixture
    def backend(self, s3):
        """An empty bucket."""
        with plain(s3) as backend:
            yield backend


def test_a_store_by_its_url(s3):
    """Objects and refs come back by the URL alone, of another prefix nothing does."""
    with open_backend([s3])[0] as backend:
        assert backend.put(ITEMS) == ITEMS.keys()
        assert backend.swap_ref("t/a", None, b"1")
        assert not backend.swap_ref("t/a", None, b"2")
        backend.touch(ITEMS)
    with open_backend([s3])[0] as backend:
        assert (backend.get(ITEMS), list(backend.list_refs())) == (ITEMS, ["t/a"])
    with open_backend([f"{s3}/other"])[0] as backend:
        assert (backend.get(ITEMS), list(backend.list())) == ({}, [])


def test_writers_of_two_handles_lose_nothing(s3):
    """Conflicts of the server, 412, are tried again until each has its turn."""
    handles = [plain(s3) for _ in range(4)]
    threads = [
        threading.Thread(target=handle.put, args=({f"{number}/{n}": b"x" for n in range(5)},))
        for number, handle in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(handles[0].list())) == 20


def test_a_missing_bucket_is_said_to_be_missing(s3):
    """It is an error for reading and for writing, and never an empty store."""
    backend = plain("s3://there-is-none/prefix")
    for call in (lambda: backend.get(["a"]), lambda: backend.put({"a": b"1"})):
        with pytest.raises(BackendUnavailable, match="no such bucket"):
            call()


@pytest.mark.parametrize("status", [409, 412])
def test_conflicts_are_tried_again(proxy, s3, status):
    """A writer that the server sends back reads what is there, and does its change anew."""
    backend = plain(s3)
    backend.put({"a": b"1"})
    left = [status, status]

    def spoil(handler):
        if handler.command == "PUT" and handler.path.endswith("catalog") and left:
            handler.reply(left.pop(), {}, b"<Error><Code>Conflict</Code></Error>")
            return True
        return False

    proxy.spoil = spoil
    assert backend.put({"b": b"2"}) == {"b"}
    assert backend.get(["a", "b"]) == {"a": b"1", "b": b"2"}
    assert left == []


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (401, BackendDenied),
        (403, BackendDenied),
        (429, BackendUnavailable),
        (500, BackendUnavailable),
        (503, BackendUnavailable),
    ],
)
def test_refusals_are_typed_and_hold_no_secret(proxy, s3, status, expected):
    """Wrong credentials are denied, an overloaded server is unavailable; both soon, whatever
    Retry-After says.
    """
    backend = plain(f"{s3}?timeout_s=1")
    secret = s3_server.ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]

    def spoil(handler):
        handler.reply(
            status, {"Retry-After": "600"}, f"<Error><Code>SlowDown</Code>{secret}</Error>".encode()
        )
        return True

    proxy.spoil = spoil
    started = time.monotonic()
    for call in (
        lambda: backend.get(["a"]),
        lambda: backend.put({"a": b"1"}),
        lambda: backend.swap_ref("t", None, b"1"),
    ):
        with pytest.raises(expected) as raised:
            call()
        assert (
            secret not in f"{raised.value} {raised.value.__cause__}"
            f" {raised.getrepr(style='native').reprcrash}"
        )
    assert time.monotonic() - started < 10


def test_an_overloaded_server_is_asked_again(proxy, s3):
    """One answer of 503 costs a moment and no error."""
    backend = plain(s3)
    backend.put(ITEMS)
    left = [503]

    def spoil(handler):
        if left:
            handler.reply(left.pop(), {"Retry-After": "0"})
            return True
        return False

    proxy.spoil = spoil
    assert backend.exists(ITEMS) == ITEMS.keys()
    assert left == []


def test_another_host_is_not_asked(proxy, s3, endpoint):
    """A redirect to another host is an error, and nothing is sent there."""
    seen = []

    def answer(handler):
        seen.append(handler.headers.get("Authorization"))
        handler.reply(
            200, {"ETag": '"x"', "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}, b"theirs"
        )
        return True

    with s3_server.Proxy(endpoint).serving() as other:
        other.spoil = answer
        elsewhere = other.endpoint.replace("127.0.0.1", "localhost")
        proxy.spoil = lambda handler: (
            handler.reply(307, {"Location": elsewhere + handler.path}) or True
        )
        with pytest.raises(BackendUnavailable, match="redirects to another host"):
            plain(s3).get(["a"])
    assert seen == []


def test_truncated_answers_are_errors(proxy, s3):
    """Of a body that ends too early nothing is taken."""
    with plain(s3) as backend:
        backend.put(ITEMS)
        proxy.cut = 7
        for reader in (backend, plain(f"{s3}?timeout_s=0.5")):
            with pytest.raises(BackendError):
                reader.get(ITEMS)


def test_ranges_of_another_size_are_errors(proxy, s3):
    """A server that answers a range with less, and says so, is not believed."""
    backend = plain(s3)
    backend.put(ITEMS)

    def spoil(handler):
        if "packs/" in handler.path:
            handler.reply(
                206,
                {
                    "Content-Range": "bytes 0-2/3",
                    "ETag": '"x"',
                    "Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT",
                },
                b"abc",
            )
            return True
        return False

    proxy.spoil = spoil
    with pytest.raises(BackendUnavailable):
        backend.get(ITEMS)


def test_a_slow_server_costs_no_more_than_the_deadline(proxy, s3):
    """The call is given up in time, and while the store rests the next one costs nothing."""
    backend, _ = open_backend([f"{s3}?timeout_s=0.2"])
    guarded = backend._tiers[0].backend
    assert isinstance(guarded, Guarded)
    proxy.delay_s = 3.0
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        guarded.read_ref("t")
    assert time.monotonic() - started < 1.5
    started = time.monotonic()
    with pytest.raises(BackendUnavailable):
        guarded.read_ref("t")
    assert time.monotonic() - started < 0.2


def test_no_server_is_unavailable(s3, monkeypatch):
    """A port that nobody listens on is an error soon."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.free_port()}")
    started = time.monotonic()
    with pytest.raises(BackendUnavailable):
        plain(f"{s3}?timeout_s=1").get(["a"])
    assert time.monotonic() - started < 5


def test_a_server_that_speaks_no_tls_is_unavailable(endpoint, s3, monkeypatch):
    """A failing TLS handshake is an error soon."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.replace("http:", "https:"))
    with pytest.raises(BackendUnavailable):
        plain(f"{s3}?timeout_s=1").get(["a"])


def test_who_may_not_write_reads(proxy, s3):
    """A touch that is denied is left out, a put is denied."""
    plain(s3).put(ITEMS)

    def spoil(handler):
        if handler.command != "GET":
            handler.reply(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return True
        return False

    proxy.spoil = spoil
    reader = plain(s3)
    assert reader.get(ITEMS) == ITEMS
    reader.touch(ITEMS)
    assert reader.claim(ITEMS) == ITEMS.keys()
    with pytest.raises(BackendDenied, match="check the credentials"):
        reader.put({"new": b"1"})


class _Whole(http.server.SimpleHTTPRequestHandler):
    """Serves whole files, as the standard library does."""

    def log_message(self, *_):
        """Nothing is printed."""


class _Ranged(_Whole):
    """Serves ranges too."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        if wanted is None:
            super().do_GET()
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        with open(self.translate_path(self.path), "rb") as file:
            data = file.read()
        part = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture(params=[_Whole, _Ranged], ids=["without ranges", "with ranges"])
def web(request, tmp_path, endpoint, s3):
    """The address of a web server with a copy of a store's files, and the folder that it serves."""
    folder = tmp_path / "site" / "kernels"
    folder.mkdir(parents=True)
    with CloudBackend(Bucket(LocalStore(folder), "folder")) as publisher:
        publisher.put(ITEMS)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(request.param, directory=str(tmp_path / "site"))
    )
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/kernels", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_web_server_is_read(web):
    """Everything that is read comes, and nothing can be changed."""
    url, _ = web
    backend, name = open_backend([url])
    assert name == url
    with backend:
        assert backend.get([*ITEMS, "absent"]) == ITEMS
        assert backend.exists(ITEMS) == ITEMS.keys()
        assert {stat.key for stat in backend.list("u")} == ITEMS.keys()
        assert not backend.writable
        backend.touch(ITEMS)
        with pytest.raises(BackendDenied):
            backend.put({"a": b"1"})


def test_a_web_server_without_a_store_says_so(web):
    """A wrong folder is an error, and not an empty store."""
    url, _ = web
    with pytest.raises(BackendUnavailable, match="holds no store"):
        plain(f"{url}/elsewhere").get(["a"])
