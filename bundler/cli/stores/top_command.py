# SPDX-License-Identifier: Apache-2.0
"""The command `top`: a live view of stores and of processes that show metrics.

`app.py` lists it. What is watched is a store (`StoreSource`) or an endpoint of metrics, each asked
now and then for a `SourceStatus`. What is dear is asked for seldom: no question takes more than
about a twentieth of the time. Of metrics nothing but the text format of Prometheus is understood
(`read_metrics`), and no library of it is needed.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import math
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bundler.backends.port import HeldLease
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, option
from bundler.cli.interruption import asked_to_end
from bundler.cli.stores.store_options import as_url, with_environment
from bundler.cli.terminal import Screen
from bundler.cli.wording import masked
from bundler.errors import BundlerError, NotFound, StoreUnavailable
from bundler.store.bundle_store import BundleStore
from bundler.store.kernel_records import LEASES
from bundler.store.store_failures import store_errors
from bundler.store.store_reports import StoreStats
from bundler.store.store_urls import Opening, local_directory, open_backend

MOST_SOURCES = 64
LEAST_INTERVAL_S, INTERVAL_S = 0.5, 2.0
_AT_ONCE = 8
# Two columns of rates stand beside what they are the rate of.
_COUNTS = ("endpoint", "hits", "/s", "misses", "/s", "hit %")
_PROCESSES = (*_COUNTS, "compiles", "seconds", "saved", "fetched", "breakers")
_STORES = ("store", "size", "units", "records", "tags", "failures", "leases")
_LEASES = ("kernel", "compiled by", "left", "store")
_TIMEOUT_S = 2.0
# Thousands of samples; an address that sends more is none of ours.
MOST_BYTES = 4 * 1024 * 1024
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>[A-Za-z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Labels = tuple[tuple[str, str], ...]
_Samples = dict[tuple[str, Labels], float]
T = TypeVar("T")
# A listing that takes a second is made every twenty.
REST = 20
STATS_EVERY_S = 30.0
MOST_LEASES = 100
_PREFIX = "triton_bundler_"


@command(
    "Watch hits, misses, leases and store sizes.",
    "top http://127.0.0.1:9464/metrics file:///var/cache/kernels",
    "top --once redis://kernel-cache:6379",
)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@option(
    "--interval SECONDS",
    "How often to look; what takes long is looked at less often.",
    type=click.FloatRange(LEAST_INTERVAL_S, 3600),
    default=INTERVAL_S,
)
@flag("--once", "Look once and end, as with --json and where no person watches.")
def top(screen: Screen, urls: tuple[str, ...], interval: float, once: bool) -> int:
    """Watch stores and processes until Ctrl-C: hits and misses, who compiles which kernel under a
    lease, what a store holds.

    URL is a store, or an endpoint of metrics: http://HOST:PORT, or what ends in /metrics. Nothing
    is changed anywhere. With --once, exit status 1 when a URL did not answer.
    """
    if len(urls) > MOST_SOURCES:
        raise click.UsageError(f"{len(urls)} URLs; {MOST_SOURCES} at most")
    live = not (once or screen.as_json or screen.quiet) and screen.out.is_terminal
    with _opened(urls) as look:
        if live:
            _watch(screen, look, interval)
            return FINE
        statuses = look()
    for status in statuses:
        for line in _lines(status):
            screen.line(line)
    fine = not any(status.error for status in statuses)
    screen.finish({"sources": [status.as_json() for status in statuses], "ok": fine})
    return FINE if fine else PROBLEM


@contextlib.contextmanager
def _opened(urls: Sequence[str]) -> Iterator[Callable[[], list[SourceStatus]]]:
    """Open the sources; yields what looks at all of them, several at a time."""
    with contextlib.ExitStack() as stack:
        looks: list[Callable[[], SourceStatus]] = []
        for url in urls:
            if is_endpoint(url):
                looks.append(functools.partial(_look_at_endpoint, url))
            else:
                looks.append(stack.enter_context(contextlib.closing(StoreSource(url))).look)
        threads = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        yield lambda: list(threads.map(lambda look: look(), looks))


def _watch(screen: Screen, look: Callable[[], list[SourceStatus]], interval: float) -> None:
    """Show what is seen until Ctrl-C, which is how a view ends."""
    with asked_to_end() as ending:
        before, before_s = look(), time.monotonic()
        with Live(_view(before, before, 0.0), console=screen.out, auto_refresh=False) as live:
            while not ending.wait(interval):
                now, now_s = look(), time.monotonic()
                live.update(_view(now, before, now_s - before_s), refresh=True)
                before, before_s = now, now_s


def _view(
    statuses: Sequence[SourceStatus], before: Sequence[SourceStatus], seconds: float
) -> Group:
    """Return what a terminal shows: processes, stores, leases, and what does not answer."""
    processes: list[list[str]] = []
    stores: list[list[str]] = []
    leases: list[list[str]] = []
    errors = []
    for status, last in zip(statuses, before, strict=True):
        if status.error:
            errors.append(Text(wording.plain(f"{status.url}: {status.error}"), style="red"))
        elif status.kind == "metrics":
            processes.append(_process_row(status, last, seconds))
        else:
            names = ("units", "records", "tags", "failures")
            counts = [f"{status.numbers[name]:,.0f}" for name in names]
            size = wording.size(int(status.numbers["bytes"]))
            stores.append([status.url, size, *counts, str(len(status.leases))])
            for lease in status.leases:
                left = wording.duration(lease.left_s) if lease.left_s is not None else ""
                leases.append([kernel_of(lease), lease.holder, left, status.url])
    tables = (
        _table("processes", _PROCESSES, processes),
        _table("stores", _STORES, stores),
        _table("leases", _LEASES, leases),
    )
    return Group(*(table for table in tables if table.row_count), *errors)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for place, column in enumerate(columns):
        right = place > 0 and columns is not _LEASES
        table.add_column(
            column, justify="right" if right else "left", overflow="ellipsis", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(wording.plain(cell)) for cell in row))
    return table


def _process_row(status: SourceStatus, last: SourceStatus, seconds: float) -> list[str]:
    numbers, earlier = status.numbers, last.numbers

    def rate(name: str) -> str:
        known = seconds > 0 and name in earlier
        return f"{max(0.0, numbers[name] - earlier[name]) / seconds:.1f}" if known else ""

    asked = numbers["hits"] + numbers["misses"]
    return [
        status.url,
        f"{numbers['hits']:,.0f}",
        rate("hits"),
        f"{numbers['misses']:,.0f}",
        rate("misses"),
        f"{100 * numbers['hits'] / asked:.1f}" if asked else "",
        f"{numbers['compiles']:,.0f}",
        wording.duration(numbers["compile_seconds"]),
        wording.duration(numbers["seconds_saved"]),
        wording.size(int(numbers["bytes_fetched"])),
        ", ".join(status.breakers),
    ]


def _lines(status: SourceStatus) -> Iterator[str]:
    """Yield what is printed where nobody watches: one line for a source, one for each lease."""
    if status.error:
        yield f"{status.url}: error: {status.error}"
        return
    yield f"{status.url}: " + ", ".join(
        f"{name} {value:g}" for name, value in status.numbers.items()
    )
    for name in status.breakers:
        yield f"  breaker of {name} is not closed"
    for lease in status.leases:
        left = f", {lease.left_s:.0f} s left" if lease.left_s is not None else ""
        yield (
            f"  {kernel_of(lease) or 'a kernel'} is compiled by {lease.holder or 'somebody'}{left}"
        )


@dataclass(frozen=True)
class SourceStatus:
    """What one look at a source showed.

    Attributes:
        url: the source, without secrets.
        kind: `store` or `metrics`.
        error: why nothing was seen; empty when something was.
        numbers: of an endpoint: hits, misses and so on; of a store: objects and bytes.
        leases: of a store: who compiles which kernel.
        breakers: of an endpoint: stores whose breaker is not closed.
    """

    url: str
    kind: str
    error: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    leases: tuple[HeldLease, ...] = ()
    breakers: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        leases = [lease._asdict() for lease in self.leases]
        return {**asdict(self), "leases": leases, "breakers": list(self.breakers)}


class _CachedAnswer(Generic[T]):
    """A question whose answer is kept for a while, the longer the longer it took."""

    def __init__(self, ask: Callable[[], T], least_s: float) -> None:
        self._ask, self._least_s, self._again_s = ask, least_s, 0.0
        self._answer: list[T] = []

    def __call__(self) -> T:
        began_s = time.monotonic()
        if not self._answer or began_s >= self._again_s:
            self._answer = [self._ask()]
            ended_s = time.monotonic()
            self._again_s = ended_s + max(self._least_s, REST * (ended_s - began_s))
        return self._answer[0]


def _look_at_endpoint(url: str) -> SourceStatus:
    """Ask an endpoint of metrics for its numbers."""
    try:
        samples = read_metrics(url)
    except BundlerError as error:
        return _unseen(masked(url), "metrics", error)
    breakers = sorted(
        dict(labels).get("tier", "")
        for (name, labels), value in samples.items()
        if name == f"{_PREFIX}breaker_state" and value
    )
    return SourceStatus(masked(url), "metrics", numbers=_numbers(samples), breakers=tuple(breakers))


class StoreSource:
    """A store: its leases, and how much it holds; opened for reading, and by the URL alone."""

    def __init__(self, url: str) -> None:
        self._backend, self._name = open_backend(
            [with_environment(as_url(url))], Opening(read_only=True)
        )
        self._directory = local_directory(as_url(url))
        self._store = BundleStore(self._backend, self._name)
        self._stats: _CachedAnswer[StoreStats] = _CachedAnswer(self._store.stats, STATS_EVERY_S)
        self._leases: _CachedAnswer[list[HeldLease]] = _CachedAnswer(self._held, 0.0)

    def look(self) -> SourceStatus:
        """Ask for leases and sizes."""
        try:
            if self._directory is not None and not os.path.isdir(self._directory):
                raise NotFound(f"no directory {self._directory} yet; push makes it")
            leases, stats = self._leases(), self._stats()
        except BundlerError as error:
            return _unseen(self._name, "store", error)
        names = ("units", "records", "tags", "failures")
        numbers = {"bytes": stats.size_bytes, **{name: getattr(stats, name) for name in names}}
        return SourceStatus(self._name, "store", numbers=numbers, leases=tuple(leases))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _held(self) -> list[HeldLease]:
        with store_errors(self._name):
            leases = self._backend.leases()
            ours = f"{LEASES}/"
            held = [one for one in leases if one.key.startswith(ours) or not one.key]
        return sorted(held, key=lambda lease: lease.key)[:MOST_LEASES]


def kernel_of(lease: HeldLease) -> str:
    """Return the key of the kernel that is compiled under a lease."""
    return lease.key.removeprefix(f"{LEASES}/")


def _unseen(url: str, kind: str, error: BundlerError) -> SourceStatus:
    return SourceStatus(url, kind, masked(error.message).removeprefix(f"{url}: "))


def _numbers(samples: _Samples) -> dict[str, float]:
    def of(name: str, **labels: str) -> float:
        return total(samples, f"{_PREFIX}{name}", **labels)

    return {
        "hits": of("lookups_total", result="hit"),
        "misses": of("lookups_total", result="miss"),
        "compiles": of("compiles_total"),
        "compile_seconds": of("compile_seconds_total"),
        "seconds_saved": of("seconds_saved_total"),
        "bytes_fetched": of("bytes_total", direction="fetched"),
        "bytes_sent": of("bytes_total", direction="sent"),
        "restores": of("restore_seconds_count"),
        "leases_held": of("leases_held"),
        "requests": of("serve_requests_total"),
        "served_bytes": of("serve_sent_bytes_total"),
    }


def is_endpoint(url: str) -> bool:
    """Tell whether a URL is one of metrics: `http://host:port`, or one that ends in `/metrics`;
    others are stores.
    """
    parts = urlsplit(url)
    return parts.scheme in {"http", "https"} and (
        parts.path in {"", "/"} or parts.path.endswith("/metrics")
    )


def read_metrics(url: str) -> _Samples:
    """Return what an endpoint shows; raises `StoreUnavailable`."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    path, query = (parts.path, parts.query) if parts.path.endswith("/metrics") else ("/metrics", "")
    # `is_endpoint` looked at the scheme
    asked = urllib.request.Request(urlunsplit((parts.scheme, host, path, query, "")))  # noqa: S310
    if user:
        asked.add_header(
            "Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        )
    # The endpoint is near: a proxy of the environment would be asked for an address that only this
    # host knows.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(asked, timeout=_TIMEOUT_S) as answer:
            data = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StoreUnavailable(f"{asked.full_url}: {error}") from error
    if len(data) > MOST_BYTES:
        raise StoreUnavailable(f"{asked.full_url}: more than {MOST_BYTES} bytes, expected metrics")
    return parsed(data.decode("utf-8", "replace"))


def parsed(text: str) -> _Samples:
    """Return the samples of a text; what is none is left out."""
    found: _Samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            pairs = _LABEL.finditer(match["labels"] or "")
            labels = {one["name"]: _ESCAPED.sub(_meant, one["value"]) for one in pairs}
            found[match["name"], tuple(sorted(labels.items()))] = value
    return found


def total(samples: Mapping[tuple[str, Labels], float], name: str, **labels: str) -> float:
    """Return the sum of a metric, of all labels that agree with these; 0 where there is none."""
    wanted = labels.items()
    held = (pair for pair in samples.items() if pair[0][0] == name)
    return sum(value for (_, own), value in held if wanted <= dict(own).items())


def _meant(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]
