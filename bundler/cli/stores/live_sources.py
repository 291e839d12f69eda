# SPDX-License-Identifier: Apache-2.0
"""`open_source`: what `top` watches, a store or an endpoint of metrics, each asked now and then for
a `SourceStatus`.

What is dear is asked for seldom: no question takes more than about a twentieth of the time. Of
metrics nothing but the text format of Prometheus is understood (`read_metrics`), and no library of
it is needed.
"""

from __future__ import annotations

import base64
import http.client
import math
import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from bundler.backends.lease_holders import HeldLease
from bundler.cli.stores.store_options import as_url, with_environment
from bundler.cli.wording import masked
from bundler.errors import BundlerError, NotFound, StoreUnavailable
from bundler.store.bundle_store import BundleStore
from bundler.store.kernel_records import LEASES
from bundler.store.store_failures import store_errors
from bundler.store.store_reports import StoreStats
from bundler.store.store_urls import Opening, local_directory, open_backend

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


class MetricsSource:
    """An endpoint of metrics."""

    def __init__(self, url: str) -> None:
        self._url, self._shown = url, masked(url)

    def look(self) -> SourceStatus:
        """Ask for its numbers."""
        try:
            samples = read_metrics(self._url)
        except BundlerError as error:
            return _unseen(self._shown, "metrics", error)
        breakers = sorted(
            dict(labels).get("tier", "")
            for (name, labels), value in samples.items()
            if name == f"{_PREFIX}breaker_state" and value
        )
        return SourceStatus(
            self._shown, "metrics", numbers=_numbers(samples), breakers=tuple(breakers)
        )

    def close(self) -> None:
        """Nothing is held."""


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


def open_source(url: str) -> MetricsSource | StoreSource:
    """Return what a URL names; raises as opening a store does."""
    return MetricsSource(url) if is_endpoint(url) else StoreSource(url)


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
            labels = {one["name"]: _unescaped(one["value"]) for one in pairs}
            found[match["name"], tuple(sorted(labels.items()))] = value
    return found


def total(samples: Mapping[tuple[str, Labels], float], name: str, **labels: str) -> float:
    """Return the sum of a metric, of all labels that agree with these; 0 where there is none."""
    wanted = labels.items()
    held = (pair for pair in samples.items() if pair[0][0] == name)
    return sum(value for (_, own), value in held if wanted <= dict(own).items())


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
