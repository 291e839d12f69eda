# SPDX-License-Identifier: Apache-2.0
"""Registries that refuse, lie, hang or lead astray: typed errors, in time, with no secret in them,
and no credentials anywhere else.
"""

import contextlib
import io
import json
import time

import pytest
import registry_server

import bundler
from bundler import (
    AccessDenied,
    ConfigError,
    DigestMismatch,
    NotFound,
    StoreUnavailable,
    pull_image,
    push_image,
)
from bundler.backends.backend_errors import BackendTimeout
from bundler.backends.oci import open_image_place, parse_image_url

PASSWORD = "hush-hush-hush"


def pull(url, tmp_path):
    """Pull, and return the error's text; the file is not there then."""
    with pytest.raises(bundler.BundlerError) as caught:
        pull_image(url, tmp_path / "out.tbundle")
    assert not (tmp_path / "out.tbundle").exists()
    assert PASSWORD not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    return caught.value


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """What failed for a moment is done again soon."""
    monkeypatch.setattr("bundler.backends.oci.registry.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def pushed(registry, bundle_path):
    """A registry that has the image demo."""
    push_image(bundle_path, registry.url())
    registry.requests.clear()
    return registry


@pytest.fixture
def other():
    """Another host: the same address, and another port."""
    with registry_server.SmallRegistry().serving() as server:
        yield server


def spoil(registry, ending, reply, times=1000):
    """Answer requests whose path ends so with `reply`, so many times."""
    left = [times]

    def act(handler):
        if ending not in f"{handler.command} {handler.path}" or left[0] <= 0:
            return False
        left[0] -= 1
        reply(handler)
        return True

    registry.spoil = act


def test_nobody_listens(tmp_path):
    """A registry that is not there is unavailable, and the message names it."""
    error = pull("oci://127.0.0.1:9/team/kernels:demo?plain_http=1&timeout_s=0.5", tmp_path)
    assert isinstance(error, StoreUnavailable)
    assert "oci://127.0.0.1:9/team/kernels" in str(error)


def test_basic_credentials_are_those_of_docker_login(pushed, log_in, tmp_path):
    """Right ones open the door, wrong and missing ones are told apart from an absent image."""
    pushed.user, pushed.password = "alice", PASSWORD
    assert isinstance(pull(pushed.url(), tmp_path), AccessDenied)
    log_in(pushed.host, "alice", "hush-hush-wrong")
    assert "docker login" in str(pull(pushed.url(), tmp_path))
    log_in(pushed.host, "alice", PASSWORD)
    assert pull_image(pushed.url(), tmp_path / "out.tbundle").kernels == 4


def test_what_the_registry_says_of_a_secret_is_not_printed(pushed, log_in, tmp_path):
    """The registry repeats the header that it was sent."""
    log_in(pushed.host, "alice", PASSWORD)
    pushed.user, pushed.password = "alice", "another"
    error = pull(pushed.url(), tmp_path)
    assert "you are not Basic …" in str(error)


@pytest.mark.parametrize("where", ["registry", "other"])
def test_a_token_is_asked_for_with_the_credentials(where, pushed, other, log_in, tmp_path):
    """A server of tokens may be the registry or another host; the registry gets the token alone."""
    server = pushed if where == "registry" else other
    for one in {pushed, server}:
        one.user, one.password, one.token = "alice", PASSWORD, "t0k3n-t0k3n"
    pushed.realm = f"http://{server.host}/token"
    log_in(pushed.host, "alice", PASSWORD)
    assert pull_image(pushed.url(), tmp_path / "fine.tbundle").kernels == 4
    assert {who for _, path, who in pushed.requests if not path.startswith("/token")} == {
        "",
        "Bearer t0k3n-t0k3n",
    }
    log_in(pushed.host, "alice", "hush-hush-wrong")
    assert isinstance(pull(pushed.url(), tmp_path), AccessDenied)


def test_an_identity_token_is_exchanged_for_a_token(pushed, tmp_path):
    """It goes in the body of a POST, to the server of tokens alone."""
    pushed.user, pushed.password, pushed.token = "alice", PASSWORD, "t0k3n-t0k3n"
    pushed.realm = f"http://{pushed.host}/token"
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"auths": {pushed.host: {"identitytoken": PASSWORD}}})
    )
    assert pull_image(pushed.url(), tmp_path / "out.tbundle").kernels == 4
    assert {path for method, path, _ in pushed.requests if method == "POST"} == {"/token"}
    assert not any(PASSWORD in f"{path} {who}" for _, path, who in pushed.requests)


@pytest.mark.parametrize(
    "answer", [b"{}", b"[", b'{"token": "a\\nb: c"}', b'{"token": 7}', b'{"access_token": ""}']
)
def test_a_server_of_tokens_that_answers_nonsense(answer, pushed, tmp_path):
    """No line of its making gets into a header of ours."""
    pushed.realm, pushed.token = f"http://{pushed.host}/token", "x"
    spoil(pushed, "GET /token", lambda h: h.reply(200, answer))
    assert isinstance(pull(pushed.url(), tmp_path), StoreUnavailable)


def test_a_redirect_to_another_host_gets_no_credentials(pushed, other, log_in, tmp_path):
    """Registries send who wants a blob to an object store."""
    other.blobs = pushed.blobs
    pushed.user, pushed.password = "alice", PASSWORD
    log_in(pushed.host, "alice", PASSWORD)
    spoil(
        pushed,
        "GET /v2/team/kernels/blobs/",
        lambda h: h.reply(307, headers={"Location": f"http://{other.host}{h.path}"}),
    )
    assert pull_image(pushed.url(), tmp_path / "out.tbundle").kernels == 4
    assert [(who, path.split("/")[4]) for _, path, who in other.requests] == [("", "blobs")]


def test_redirects_end(pushed, tmp_path):
    """A registry that leads in a circle is told so after five steps."""
    spoil(pushed, "/manifests/demo", lambda h: h.reply(302, headers={"Location": h.path}))
    assert isinstance(pull(pushed.url(), tmp_path), StoreUnavailable)
    assert len(pushed.requests) == 6


def test_an_upload_that_is_led_elsewhere_gets_no_credentials(registry, other, bundle_path, log_in):
    """The place of an upload may be another host; it gets the bytes, and no credentials."""
    registry.user, registry.password = "alice", PASSWORD
    log_in(registry.host, "alice", PASSWORD)
    spoil(
        registry,
        "POST",
        lambda h: h.reply(
            202, headers={"Location": f"http://{other.host}/v2/team/kernels/blobs/uploads/1"}
        ),
    )
    push_image(bundle_path, registry.url())
    assert {who for _, _, who in other.requests} == {""}
    assert len(other.blobs) == 2


def test_a_truncated_blob_is_read_again_and_then_refused(pushed, tmp_path):
    """An answer that ends early is asked for again; one that always does is an error."""
    size = max(map(len, pushed.blobs.values()))

    def cut(handler):
        digest = handler.path.rpartition("/")[2]
        handler.reply(200, pushed.blobs[digest], cut=7)

    spoil(pushed, "GET /v2/team/kernels/blobs/", cut, times=1)
    assert pull_image(pushed.url(), tmp_path / "fine.tbundle").size_bytes == size
    spoil(pushed, "GET /v2/team/kernels/blobs/", cut)
    assert "early" in str(pull(pushed.url(), tmp_path))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + b"x", lambda data: data + b"x", lambda data: data[:-1]]
)
def test_a_lying_blob_is_refused(change, pushed, tmp_path):
    """Bytes under a digest are those bytes, or an error."""
    spoil(
        pushed,
        "GET /v2/team/kernels/blobs/",
        lambda h: h.reply(200, change(pushed.blobs[h.path.rpartition("/")[2]])),
    )
    assert isinstance(pull(pushed.url(), tmp_path), DigestMismatch)


def test_a_lying_manifest_is_refused(pushed, tmp_path):
    """One that is asked for by its digest has that digest."""
    digest = pushed.tags["demo"]
    data, kind = pushed.manifests[digest]
    pushed.manifests[digest] = (data + b" ", kind)
    assert isinstance(pull(pushed.url(f"@{digest}"), tmp_path), DigestMismatch)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"config":1}',
        b'{"config":{"mediaType":"a","digest":"b","size":-1},"layers":[]}',
        b"\xff" * 9,
    ],
)
def test_a_manifest_that_is_none_is_refused(data, pushed, tmp_path):
    """Whatever a registry answers, it is an error of ours."""
    spoil(
        pushed,
        "/manifests/demo",
        lambda h: h.reply(
            200, data, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
        ),
    )
    pull(pushed.url(), tmp_path)


def test_a_manifest_without_end_is_refused(pushed, tmp_path):
    """Registries themselves take 4 MiB at most."""
    spoil(pushed, "/manifests/demo", lambda h: h.reply(200, b" " * (4 << 20) + b"{}"))
    assert "more than" in str(pull(pushed.url("demo", "plain_http=1&timeout_s=1"), tmp_path))


def test_another_kind_of_image_is_no_bundle(pushed, tmp_path):
    """The message says what it is, and what is expected."""
    data, kind = pushed.manifests[pushed.tags["demo"]]
    other = json.dumps(json.loads(data) | {"layers": []}).encode()
    pushed.manifests[pushed.tags["demo"]] = (other, kind)
    spoil(pushed, "/manifests/demo", lambda h: h.reply(200, other, {"Content-Type": kind}))
    assert isinstance(pull(pushed.url(), tmp_path), bundler.FormatError)


@pytest.mark.parametrize("status", [429, 503])
def test_a_registry_that_is_busy_is_asked_again_when_it_says(status, pushed, tmp_path):
    """The first answer says to come again in no time."""
    spoil(
        pushed, "/manifests/demo", lambda h: h.reply(status, headers={"Retry-After": "0"}), times=2
    )
    assert pull_image(pushed.url(), tmp_path / "out.tbundle").kernels == 4


def test_a_registry_that_says_to_come_tomorrow_is_not_waited_for(pushed, tmp_path):
    """What it says is told, at once."""
    spoil(pushed, "/manifests/demo", lambda h: h.reply(429, headers={"Retry-After": "86400"}))
    started = time.monotonic()
    error = pull(pushed.url(), tmp_path)
    assert "86,400 s" in str(error)
    assert time.monotonic() - started < 3


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("how", ["silent", "drip"])
def test_no_wait_exceeds_the_deadline(how, pushed, tmp_path):
    """A registry that says nothing, or a byte now and then, is left after three times the silence
    that is allowed, and the time of the bytes.
    """

    def hang(handler):
        handler.close_connection = True
        until = time.monotonic() + 3
        if how == "drip":
            handler.send_response_only(200)
            handler.send_header("Content-Length", "100000")
            handler.end_headers()
        while time.monotonic() < until:
            time.sleep(0.1)
            if how == "drip":
                with contextlib.suppress(OSError):  # hung up on, as it should be
                    handler.wfile.write(b"x")

    spoil(pushed, "GET /v2/team/kernels/manifests", hang)
    started = time.monotonic()
    error = pull(pushed.url("demo", "plain_http=1&timeout_s=0.5"), tmp_path)
    assert isinstance(error, StoreUnavailable)
    assert time.monotonic() - started < 2.5


@pytest.mark.slow
def test_a_blob_that_drips_ends_in_time(pushed):
    """The bytes of a header come one at a time for ever; the connection is shut at the deadline."""

    def drip(handler):
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):  # hung up on, as it should be
            for _ in range(60):
                handler.wfile.write(b"X-A: b\r\n")
                time.sleep(0.05)

    spoil(pushed, "/blobs/", drip)
    place = open_image_place(parse_image_url(pushed.url("demo", "plain_http=1&timeout_s=0.2")))
    started = time.monotonic()
    with pytest.raises(Exception, match="in time"):
        place.read_blob("sha256:" + "0" * 64, 1, io.BytesIO())
    assert time.monotonic() - started < 2
    place.close()


def test_all_requests_of_a_pull_share_one_allowance(pushed, tmp_path):
    """A registry that takes its time for each answer, but never too long for one, does not hold a
    pull for the sum of all.
    """

    def late(handler):
        time.sleep(0.3)
        return False

    pushed.spoil = late
    started = time.monotonic()
    error = pull(pushed.url("demo", "plain_http=1&timeout_s=0.35"), tmp_path)
    assert isinstance(error, StoreUnavailable)
    assert len(pushed.requests) > 2
    assert time.monotonic() - started < 3 * 0.35 + 1
    pull_image(pushed.url("demo", "plain_http=1&timeout_s=2"), tmp_path / "out.tbundle")


def test_a_blob_that_is_said_to_be_large_gets_no_more_time(pushed):
    """The size in a manifest is the registry's word: a blob of 8 GB that drips ends as soon as a
    small one.
    """

    def drip(handler):
        handler.close_connection = True
        handler.send_response_only(200)
        handler.send_header("Content-Length", str(8 << 30))
        handler.end_headers()
        with contextlib.suppress(OSError):  # hung up on, as it should be
            for _ in range(60):
                handler.wfile.write(b"x")
                time.sleep(0.05)

    spoil(pushed, "/blobs/", drip)
    place = open_image_place(parse_image_url(pushed.url("demo", "plain_http=1&timeout_s=0.2")))
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        place.read_blob("sha256:" + "0" * 64, 8 << 30, io.BytesIO())
    assert time.monotonic() - started < 2
    place.close()


def test_many_tags_are_listed_page_by_page_up_to_a_bound(registry):
    """2,500 tags are three pages; a listing without end is an error, and one that goes on
    elsewhere, too.
    """
    registry.tags = {f"t{number:05}": "sha256:x" for number in range(2500)}
    place = open_image_place(parse_image_url(registry.url()))
    assert place.tags() == sorted(registry.tags)
    assert len(registry.requests) == 3
    page = json.dumps({"tags": ["t"] * 1000}).encode()
    for link, word in (
        ("/v2/team/kernels/tags/list?n=1000", "more than"),
        ("http://127.0.0.1:1/v2/", "another host"),
    ):
        following = {"Link": f'<{link}>; rel="next"'}
        spoil(registry, "/tags/list", lambda h, following=following: h.reply(200, page, following))
        with pytest.raises(Exception, match=word):
            place.tags()
    place.close()


def test_tls(bundle_path, tmp_path):
    """A certificate of nobody is refused, one that ca_file names is taken, and a registry without
    TLS is not spoken to by accident.
    """
    pem = registry_server.certificate(tmp_path)
    with registry_server.SmallRegistry(tls=pem).serving() as server:
        with pytest.raises(StoreUnavailable, match="ca_file="):
            push_image(bundle_path, server.url("demo", "timeout_s=5"))
        url = server.url("demo", f"timeout_s=5&ca_file={tmp_path / 'c'}")
        push_image(bundle_path, url)
        assert pull_image(url, tmp_path / "fine.tbundle").kernels == 4
        spoil(
            server,
            "/blobs/",
            lambda h: h.reply(307, headers={"Location": f"http://{server.host}{h.path}"}),
        )
        assert "without it" in str(pull(url, tmp_path))
        server.spoil, server.user, server.realm = (
            (lambda h: False),
            "alice",
            f"http://{server.host}/token",
        )
        assert "without TLS" in str(pull(url, tmp_path))
    with registry_server.SmallRegistry().serving() as plain:
        assert "plain_http=1" in str(pull(plain.url("demo", "timeout_s=2"), tmp_path))


@pytest.mark.parametrize(
    "text",
    ["{", '{"auths": 3}', '{"auths": {"HOST": {"auth": "%%%"}}}', '{"credsStore": "../evil"}'],
)
def test_a_damaged_file_of_credentials_is_told(text, registry, tmp_path):
    """The message names the file or the entry, and quotes nothing of it."""
    folder = tmp_path / "docker"
    folder.mkdir()
    (folder / "config.json").write_text(text.replace("HOST", registry.host))
    assert isinstance(pull(registry.url(), tmp_path), ConfigError)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ('echo \'{"Username": "alice", "Secret": "hush-hush-hush"}\'', None),
        ("echo credentials not found in native keychain; exit 1", AccessDenied),
        ("echo hush-hush-hush >&2; exit 2", AccessDenied),
        ("echo hush-hush-hush", AccessDenied),
    ],
)
def test_a_helper_of_docker_is_asked(script, kind, pushed, tmp_path, monkeypatch):
    """docker-credential-NAME gives user and password; what it says when it fails is not printed."""
    import os

    pushed.user, pushed.password = "alice", PASSWORD
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"credHelpers": {pushed.host: "tests"}})
    )
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(f"#!/bin/sh\n{script}\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if kind is None:
        assert pull_image(pushed.url(), tmp_path / "out.tbundle").kernels == 4
    else:
        assert isinstance(pull(pushed.url(), tmp_path), kind)


def test_a_proxy_of_the_environment_is_used(pushed, tmp_path, monkeypatch):
    """http_proxy is asked in place of a host that is not there."""
    monkeypatch.setenv("http_proxy", f"http://{pushed.host}")
    pushed.spoil = lambda h: (
        setattr(h, "path", h.path.removeprefix("http://registry.invalid")) or False
    )
    url = "oci://registry.invalid/team/kernels:demo?plain_http=1&timeout_s=5"
    assert pull_image(url, tmp_path / "out.tbundle").kernels == 4


def test_a_registry_that_only_reads_is_told(registry, bundle_path):
    """405 means that nothing can be pushed."""
    spoil(registry, "POST", lambda h: h.reply(405))
    with pytest.raises(AccessDenied, match="read only"):
        push_image(bundle_path, registry.url())


def test_no_such_repository(registry, tmp_path):
    """Neither the repository nor a tag is there."""
    assert isinstance(pull(registry.url("nothing"), tmp_path), NotFound)
