# SPDX-License-Identifier: Apache-2.0
"""The ways in which an object store fails, each as a server on this host that fails so, and what a
command must say then.

`CASES` is the table, `failing` starts the server of one case.  `tools.cluster.cloud_faults`
measures commands and the plug-in against each, and the tests go through the same table with short
time-outs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from tools.shared.object_server import Answer, ObjectServer, Request, etag_of

Fault = Callable[[Request, Answer], Answer | None]
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "hush-hush-hush",
    "AWS_SESSION_TOKEN": "a-session-token",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
STORE_URL = "s3://bench/store"
PACKS, CATALOG = "*packs/*", "*catalog"
_HOUR = {"Retry-After": "3600"}


@dataclass(frozen=True)
class Case:
    """One way to fail.

    Attributes:
        name: what happens, for the table.
        fault: makes what the server does, from the server; None where the place is what fails.
        says: the error that a restore must end with, by name; empty where it restores everything.
        place: where clients are sent.
        seconds: how many time-outs the call may take at most.
    """

    name: str
    says: str
    fault: Callable[[ObjectServer], Fault] | None = None
    place: Literal["server", "nobody", "queue", "tls", "no tls", "elsewhere"] = "server"
    seconds: float = 3.0


def _always(
    status: int, code: str = "", headers: dict[str, str] | None = None
) -> Callable[[ObjectServer], Fault]:
    body = (
        f"<Error><Code>{code}</Code><Message>as was asked</Message></Error>".encode()
        if code
        else b""
    )
    return lambda _server: lambda _asked, _answer: Answer(status, headers or {}, body)


def _first(count: int, status: int) -> Callable[[ObjectServer], Fault]:
    def fault(_server: ObjectServer) -> Fault:
        left = itertools.chain(
            [Answer(status, {"Retry-After": "0"})] * count, itertools.repeat(None)
        )
        return lambda _asked, _answer: next(left)

    return fault


def _reads(path: str, spoilt: Callable[[Answer], Answer]) -> Callable[[ObjectServer], Fault]:
    return lambda _server: (
        lambda asked, answer: (
            spoilt(answer) if asked.method == "GET" and fnmatchcase(asked.path, path) else None
        )
    )


def _every(spoilt: Callable[[Answer], Answer]) -> Callable[[ObjectServer], Fault]:
    return lambda _server: lambda _asked, answer: spoilt(answer)


def _dies_after(requests: int) -> Callable[[ObjectServer], Fault]:
    def fault(server: ObjectServer) -> Fault:
        before = len(server.requests)
        return lambda _asked, _answer: (
            Answer(0) if len(server.requests) - before > requests else None
        )

    return fault


def _another_etag(answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "ETag": etag_of(os.urandom(8))})


def _changed(answer: Answer) -> Answer:
    middle = len(answer.body) // 2
    return replace(
        answer,
        body=answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :],
    )


CASES = (
    Case("nobody listens on the port", "StoreUnavailable", place="nobody"),
    Case("connections are never accepted", "StoreUnavailable", place="queue"),
    Case(
        "the server takes requests and never answers",
        "StoreUnavailable",
        _every(lambda a: replace(a, late_s=None)),
    ),
    Case("each answer comes 0.2 s late", "", _every(lambda a: replace(a, late_s=0.2)), seconds=10),
    Case("500 to everything", "StoreUnavailable", _always(500, "InternalError")),
    Case("503 with Retry-After of an hour", "StoreUnavailable", _always(503, "SlowDown", _HOUR)),
    Case(
        "429 with Retry-After of an hour",
        "StoreUnavailable",
        _always(429, "TooManyRequests", _HOUR),
    ),
    Case("503 once", "", _first(1, 503)),
    Case("wrong credentials (403)", "AccessDenied", _always(403, "InvalidAccessKeyId")),
    Case(
        "a signature that does not match (403)",
        "AccessDenied",
        _always(403, "SignatureDoesNotMatch"),
    ),
    Case(
        "a clock that is off by 15 minutes (403)",
        "AccessDenied",
        _always(403, "RequestTimeTooSkewed"),
    ),
    Case("an expired session token (400)", "AccessDenied", _always(400, "ExpiredToken")),
    Case("no such bucket (404)", "StoreUnavailable", _always(404, "NoSuchBucket")),
    Case(
        "a bucket of another region (301 without a place)",
        "StoreUnavailable",
        _always(301, "PermanentRedirect"),
    ),
    Case("307 to another host that has no store", "StoreUnavailable", place="elsewhere"),
    Case(
        "307 in a circle",
        "StoreUnavailable",
        lambda server: lambda asked, _: Answer(307, {"Location": f"{server.endpoint}{asked.path}"}),
    ),
    Case("a certificate that nobody vouches for", "StoreUnavailable", place="tls"),
    Case("a server that speaks no TLS", "StoreUnavailable", place="no tls"),
    Case(
        "the catalog is cut off",
        "StoreUnavailable",
        _reads(CATALOG, lambda a: replace(a, sent=len(a.body) // 2)),
    ),
    Case("the catalog has another byte", "StoreUnavailable", _reads(CATALOG, _changed)),
    Case(
        "the catalog says that it has 1 TB",
        "StoreUnavailable",
        _reads(CATALOG, lambda a: replace(a, length=10**12, sent=len(a.body))),
    ),
    Case(
        "a page of a proxy instead of the catalog",
        "StoreUnavailable",
        _reads(CATALOG, lambda a: replace(a, body=b"<html>log in</html>")),
    ),
    Case(
        "packs are cut off",
        "StoreUnavailable",
        _reads(PACKS, lambda a: replace(a, sent=len(a.body) // 2)),
    ),
    Case(
        "packs come shorter than they are",
        "StoreUnavailable",
        _reads(PACKS, lambda a: replace(a, body=a.body[:-1])),
    ),
    Case("packs have another byte", "NotFound", _reads(PACKS, _changed)),
    Case(
        "ranges of packs are refused (416)",
        "StoreUnavailable",
        _reads(PACKS, lambda _: Answer(416)),
    ),
    Case("each answer has another ETag", "", _every(_another_etag)),
    Case("the server dies after one request", "StoreUnavailable", _dies_after(1)),
    Case("the server dies after two requests", "StoreUnavailable", _dies_after(2)),
)


@contextlib.contextmanager
def failing(case: Case, objects: dict[str, bytes], folder: Path) -> Iterator[str]:
    """Serve a bucket that fails in the way of a case; yields its endpoint.

    Args:
        case: how.
        objects: what lies in the bucket.
        folder: where a certificate may be made.
    """
    with contextlib.ExitStack() as stack:
        if case.place == "nobody":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            yield f"http://127.0.0.1:{port}"
            return
        if case.place == "queue":
            yield f"http://127.0.0.1:{_full_queue(stack)}"
            return
        server = ObjectServer(tls=_self_signed(folder) if case.place == "tls" else None)
        server.objects = dict(objects)
        stack.enter_context(server.serving())
        if case.fault is not None:
            server.fault = case.fault(server)
        if case.place == "elsewhere":
            other = stack.enter_context(ObjectServer().serving())
            # Not under the same name: that would be the same host for a client.
            place = other.endpoint.replace("127.0.0.1", "localhost")
            server.fault = lambda asked, _: Answer(307, {"Location": place + asked.path})
        yield (
            server.endpoint.replace("http:", "https:")
            if case.place == "no tls"
            else server.endpoint
        )


def _full_queue(stack: contextlib.ExitStack) -> int:
    """Listen and accept nothing, and fill the queue of connections, so that the next ones are not
    even refused.
    """
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    for _ in range(4):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
    return int(listener.getsockname()[1])


def _self_signed(folder: Path) -> ssl.SSLContext:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context
