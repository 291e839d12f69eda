# SPDX-License-Identifier: Apache-2.0
"""Says what commands and the plug-in do when an object store fails, and how long it takes them.

    python -m tools.cluster cloud-faults [--settings QUERY] [--only WORDS] [--results DIR] [--page FILE]
    python -m tools.cluster cloud-faults --check [--results DIR] [--page FILE]      exit 1 when the page has another table

For each case of `CASES` a server on this host fails in that way (`failing`), and the tests go through
the same table with short time-outs.  A restore by
tag is made there, as commands make it, and then a process compiles one kernel with Triton through
our cache manager: what it lost is the time that its thread was in calls of the store, and that of
its end.  The figures go to docs/results/, and their table into docs/stores.md.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tools.cluster.fault_plugin import KERNEL, TARGET
from tools.shared import example_kernels, measurement, programs
from tools.shared.object_server import Answer, ObjectServer, Request, etag_of
from tools.shared.processes import ROOT, answer, python_path

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
PAGE = ROOT / "docs" / "stores.md"
RESULT = "cloud-faults"
BEGIN, END = "<!-- begin: cloud-faults -->\n", "<!-- end: cloud-faults -->\n"
COLUMNS = ["what the server does", "a restore by tag", "after"]
COLUMNS += ["the plug-in compiles, and loses", "warnings"]
TAG = "t"
MANAGER = "bundler.integrations.triton:BundlerCacheManager"
LISTED = 100_000
PEAK = """
import json, sys, time
from bundler.backends.cloud import CloudBackend, connect, parse_url
url = sys.argv[1]
backend = CloudBackend(connect(parse_url(url), url))
backend.put({"a": b"1", "b": b"2"})
def peak():
    # Not `getrusage`, whose peak begins with that of the process that forked this one.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before, started = peak(), time.perf_counter()
backend.delete(["a"])
print(json.dumps([time.perf_counter() - started, peak() - before]))
"""


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
    fault: Callable[[ObjectServer], Fault] | None = None
    says: str = "StoreUnavailable"
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
    Case("nobody listens on the port", place="nobody"),
    Case("connections are never accepted", place="queue"),
    Case("the server takes requests and never answers", _every(lambda a: replace(a, late_s=None))),
    Case(
        "each answer comes 0.2 s late",
        _every(lambda a: replace(a, late_s=0.2)),
        says="",
        seconds=10,
    ),
    Case("500 to everything", _always(500, "InternalError")),
    Case("503 with Retry-After of an hour", _always(503, "SlowDown", _HOUR)),
    Case("429 with Retry-After of an hour", _always(429, "TooManyRequests", _HOUR)),
    Case("503 once", _first(1, 503), says=""),
    Case("wrong credentials (403)", _always(403, "InvalidAccessKeyId"), says="AccessDenied"),
    Case(
        "a signature that does not match (403)",
        _always(403, "SignatureDoesNotMatch"),
        says="AccessDenied",
    ),
    Case(
        "a clock that is off by 15 minutes (403)",
        _always(403, "RequestTimeTooSkewed"),
        says="AccessDenied",
    ),
    Case("an expired session token (400)", _always(400, "ExpiredToken"), says="AccessDenied"),
    Case("no such bucket (404)", _always(404, "NoSuchBucket")),
    Case("a bucket of another region (301 without a place)", _always(301, "PermanentRedirect")),
    Case("307 to another host that has no store", place="elsewhere"),
    Case(
        "307 in a circle",
        lambda server: lambda asked, _: Answer(307, {"Location": f"{server.endpoint}{asked.path}"}),
    ),
    Case("a certificate that nobody vouches for", place="tls"),
    Case("a server that speaks no TLS", place="no tls"),
    Case("the catalog is cut off", _reads(CATALOG, lambda a: replace(a, sent=len(a.body) // 2))),
    Case("the catalog has another byte", _reads(CATALOG, _changed)),
    Case(
        "the catalog says that it has 1 TB",
        _reads(CATALOG, lambda a: replace(a, length=10**12, sent=len(a.body))),
    ),
    Case(
        "a page of a proxy instead of the catalog",
        _reads(CATALOG, lambda a: replace(a, body=b"<html>log in</html>")),
    ),
    Case("packs are cut off", _reads(PACKS, lambda a: replace(a, sent=len(a.body) // 2))),
    Case("packs come shorter than they are", _reads(PACKS, lambda a: replace(a, body=a.body[:-1]))),
    Case("packs have another byte", _reads(PACKS, _changed), says="NotFound"),
    Case("ranges of packs are refused (416)", _reads(PACKS, lambda _: Answer(416))),
    Case("each answer has another ETag", _every(_another_etag), says=""),
    Case("the server dies after one request", _dies_after(1)),
    Case("the server dies after two requests", _dies_after(2)),
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


def main() -> int:
    """Measure and write, or check the page."""
    options = programs.arguments(
        __doc__,
        check=(False, "measure nothing; exit 1 when the page is stale"),
        settings=("", "what follows the URL: timeout_s=1"),
        only=("", "the cases with these words in their name"),
        results=(measurement.RESULTS, "where the figures go"),
        page=(PAGE, "the page with the table"),
    )
    file = options.results / f"{RESULT}.json"
    if options.check:
        return write_table(options.page, json.loads(file.read_text()), check=True)
    url = f"{STORE_URL}?{options.settings}" if options.settings else STORE_URL
    rows = measure(url, options.only)
    result = {"settings": options.settings, "rows": rows, "listing": listing(url)}
    print(f"written to {measurement.save(RESULT, result, options.results)}")
    write_table(options.page, result, check=False)
    wrong = [row["case"] for row in rows if not row["ok"]]
    print("\n".join(f"wrong: {name}" for name in wrong))
    return 1 if wrong else 0


def measure(url: str, only: str = "") -> list[dict[str, Any]]:
    """Return a row for each case; prints them as they come."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        objects = stored(work)
        for case in CASES:
            if only in case.name:
                row = {"case": case.name, **command(case, objects, work, url)}
                found = plug_in(case, objects, work, url)
                row |= {"lost_s": found["waited_s"] + found["end_s"], "warnings": found["warnings"]}
                row["ok"] = row["ok"] and found["whole"] and len(found["warnings"]) <= 1
                rows.append(row)
                print(
                    f"{case.name:<50} {row['error'] or 'restored':<17} {row['seconds']:6.2f} s;"
                    f" plug-in lost {row['lost_s']:5.2f} s, {len(row['warnings'])} warnings",
                    flush=True,
                )
    return rows


def stored(work: Path) -> dict[str, bytes]:
    """Push a bundle with one kernel under the tag; returns what lies in the bucket then."""
    import bundler

    os.environ |= {**CREDENTIALS, "TRITON_CACHE_DIR": str(work / "recorded")}
    with bundler.recording() as recording:
        example_kernels.load().compile_one(KERNEL, TARGET)
    with ObjectServer().serving() as server, recording.collect() as bundle:
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint
        with bundler.open_store(STORE_URL) as store:
            store.push(bundle, TAG)
        return dict(server.objects)


def command(case: Case, objects: dict[str, bytes], work: Path, url: str) -> dict[str, Any]:
    """Restore by tag as commands do; returns the error, what it says, and the seconds."""
    import bundler

    with failing(case, objects, work) as endpoint, tempfile.TemporaryDirectory(dir=work) as cache:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        error, said, kernels = "", "", 0
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(), bundler.open_store(url) as store:
                warnings.simplefilter("ignore", bundler.BundlerWarning)
                kernels = len(store.restore(TAG, cache_dir=cache, only="all").restored)
        except bundler.BundlerError as raised:
            error, said = type(raised).__name__, str(raised)
        seconds = time.perf_counter() - started
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    secret = any(CREDENTIALS[name] in said for name in names)
    right = error == case.says and (kernels > 0) == (not case.says) and not secret
    told = {"error": error, "said": said.replace(endpoint, "ENDPOINT")}
    return {**told, "seconds": seconds, "ok": right}


def plug_in(case: Case, objects: dict[str, bytes], work: Path, url: str) -> dict[str, Any]:
    """Compile a kernel in a process whose store fails; returns its seconds and its warnings."""
    with failing(case, objects, work) as endpoint, tempfile.TemporaryDirectory(dir=work) as cache:
        environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": endpoint,
            "TRITON_CACHE_MANAGER": MANAGER,
            "TRITON_CACHE_DIR": cache,
            "TRITON_BUNDLER_STORE": url,
        }
        found: dict[str, Any] = answer("tools.cluster.fault_plugin", environment=environment)
    found["warnings"] = [text.replace(endpoint, "ENDPOINT") for text in found["warnings"]]
    return found


def listing(url: str) -> dict[str, float]:
    """Delete an object where a hundred thousand files lie; returns seconds and how much memory that
    took.
    """
    server = ObjectServer()
    server.objects = {f"store/packs/{number:016x}": b"x" for number in range(LISTED)}
    with server.serving():
        found = {"AWS_ENDPOINT_URL": server.endpoint, "PYTHONPATH": python_path()}
        line = [sys.executable, "-c", PEAK, url]
        environment = {**os.environ, **CREDENTIALS, **found}
        said = subprocess.check_output(line, env=environment, text=True, cwd=ROOT)
    seconds, kib = json.loads(said)
    return {"files": LISTED, "seconds": seconds, "peak_mb": kib / 1024}


def table(result: dict[str, Any]) -> str:
    """Return the table, and what a listing took."""
    rows = [
        [
            row["case"],
            f"`{row['error']}`" if row["error"] else "restored",
            f"{row['seconds']:.2f} s",
            f"{row['lost_s']:.1f} s",
            len(row["warnings"]),
        ]
        for row in result["rows"]
    ]
    found = result["listing"]
    return (
        f"{measurement.table(COLUMNS, rows)}\nA prune beside {found['files']:,} files of others took"
        f" {found['seconds']:.1f} s and {found['peak_mb']:.0f} MB; a listing that does not end is"
        " given up after 200,000 files or a minute."
    )


def with_table(page: str, result: dict[str, Any]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(result) + "\n" + END + rest.partition(END)[2]


def write_table(path: Path, result: dict[str, Any], *, check: bool) -> int:
    """Put the table into the page, or only compare; returns the exit status."""
    text = with_table(path.read_text(), result)
    return measurement.write_page(path, text, "tools.cluster cloud-faults", check=check)
