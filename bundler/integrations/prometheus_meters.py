# SPDX-License-Identifier: Apache-2.0
"""`Meters`: what observers hear, as metrics of Prometheus; the only module that imports
`prometheus_client`.

`metrics_export.py` makes the one of a process, and `EndpointServer`, which shows it over HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import REGISTRY as SHARED
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from bundler.fork_safety import after_fork

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from bundler.observers import Labels
    from bundler.trace_spans import Fact

PREFIX = "triton_bundler_"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
# From a few kernels of a local file to thousands from far away.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Series that are there from the start: the rate of one that appears with its first event lacks that
# event.
_FROM_THE_START = (
    ("lookups_total", ("miss", "none")),
    ("lookups_total", ("hit", "triton")),
    ("lookups_total", ("hit", "tag")),
    ("lookups_total", ("hit", "store")),
    ("leases_total", ("granted",)),
    ("leases_total", ("waited",)),
    ("leases_total", ("without",)),
)
_OUTCOMES = ("replayed", "later", "not_found", "changed", "skipped")


class MetricRow(NamedTuple):
    """One metric: its kind, its name without the prefix, its labels and what it means."""

    kind: type[Counter | Gauge | Histogram]
    name: str
    labels: tuple[str, ...]
    meaning: str


METRICS = (
    MetricRow(
        Counter,
        "lookups_total",
        ("result", "tier"),
        "Kernels that Triton asked for: found (hit) in a tier, or found nowhere (miss, tier none).",
    ),
    MetricRow(Counter, "compiles_total", (), "Kernels that Triton compiled."),
    MetricRow(Counter, "compile_seconds_total", (), "Seconds that these compiles took."),
    MetricRow(
        Counter,
        "seconds_saved_total",
        (),
        "Seconds that the compiles of the hits took when they were recorded.",
    ),
    MetricRow(Counter, "published_total", (), "Kernels and files that were published one by one."),
    MetricRow(
        Counter,
        "bytes_total",
        ("direction", "tier"),
        "Bytes of kernels that were fetched from a tier, or sent to one.",
    ),
    MetricRow(Histogram, "restore_seconds", (), "Seconds that each restore of a bundle took."),
    MetricRow(
        Counter,
        "steps_total",
        ("step", "result"),
        "Steps that ended: restore, pull, push, compile, compile_once, replay; fine, or error.",
    ),
    MetricRow(
        Gauge,
        "breaker_state",
        ("tier",),
        "Whether a server of a store is asked: 0 closed, it is; 1 half open, one question; 2 open,"
        " it rests.",
    ),
    MetricRow(
        Counter,
        "leases_total",
        ("result",),
        "Turns to compile for everyone: granted, waited for another's, or taken without a lease.",
    ),
    MetricRow(Gauge, "leases_held", (), "Leases that are held now."),
    MetricRow(
        Counter,
        "replayed_kernels_total",
        ("outcome",),
        "Kernels of replays: replayed, later, not_found, changed, skipped.",
    ),
)


class Meters:
    """A listener of observers; safe in any thread.

    In multi-process mode the numbers are in files of a directory, and each reader sees those of all
    processes.  Else a forked child counts from nought.

    Attributes:
        shared: whether it is in multi-process mode.
        heard: whether anything has happened yet.
    """

    def __init__(self) -> None:
        self.shared = MULTIPROCESS in os.environ
        self._begin()
        after_fork(self._reset_in_child)
        if not self.shared:
            SHARED.register(_Forwarded(self))  # a program's own endpoint shows our metrics too

    def _begin(self) -> None:
        self.heard = False
        self.registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {
            row.name: _made(row, self.registry) for row in METRICS
        }
        for name, values in _FROM_THE_START:
            self._made[name].labels(*values)

    def _reset_in_child(self) -> None:
        if not self.shared:
            self._begin()

    def count(self, name: str, number: float, labels: Labels) -> None:
        """Add to a counter; to a gauge the number may be negative."""
        self.heard = True
        metric = self._made.get(f"{name}_total") or self._made[name]
        one = metric.labels(**labels) if labels else metric
        # no row of METRICS that is counted is a histogram
        one.inc(number)  # type: ignore[union-attr]

    def state(self, name: str, value: float, labels: Labels) -> None:
        """Set a gauge."""
        # a gauge, by its name
        self._made[f"{name}_state"].labels(**labels).set(value)  # type: ignore[union-attr]

    def step(self, name: str, seconds: float, facts: Mapping[str, Fact]) -> None:
        """Count a step, and what it tells."""
        self.count("steps", 1, {"step": name, "result": "error" if "error" in facts else "fine"})
        if "error" in facts:
            return
        if name == "restore":
            # a histogram, by its name
            self._made["restore_seconds"].observe(seconds)  # type: ignore[union-attr]
            self.count(
                "bytes", float(facts.get("bytes", 0)), {"direction": "fetched", "tier": "bundle"}
            )
        elif name == "push":
            self.count("bytes", float(facts["bytes_sent"]), {"direction": "sent", "tier": "store"})
        elif name == "compile":
            self.count("compiles", 1, {})
            self.count("compile_seconds", seconds, {})
        elif name == "replay":
            for outcome in _OUTCOMES:
                self.count("replayed_kernels", float(facts[outcome]), {"outcome": outcome})

    def readable(self) -> CollectorRegistry:
        """Return what a reader gets: the numbers of this process, or in multi-process mode
        of all.
        """
        if not self.shared:
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus."""
        return generate_latest(self.readable()).decode()

    def end(self) -> None:
        """Let go of what is the case only while this process lives."""
        if self.shared:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]


def _made(row: MetricRow, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = f"{PREFIX}{row.name}"
    if row.kind is Histogram:
        return Histogram(name, row.meaning, row.labels, registry=registry, buckets=SECONDS)
    if row.kind is Gauge:
        # Of many processes one that finds a server dead is what matters; leases add up.
        adds_up = row.name == "leases_held"
        return Gauge(
            name,
            row.meaning,
            row.labels,
            registry=registry,
            multiprocess_mode="livesum" if adds_up else "livemax",
        )
    return Counter(name, row.meaning, row.labels, registry=registry)


class _Forwarded:
    """A collector that yields what the meters of this process hold now."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterable[Metric]:
        """Yield each metric."""
        return self._meters.registry.collect()


class EndpointServer:
    """Shows metrics over HTTP in threads of this process, until it is closed; in a forked child
    there is no server.

    Args:
        meters: what to show.
        host, port: where to listen; port 0 for one that is free.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, meters: Meters, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, meters.readable())
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/metrics"
        self._owner = os.getpid()
        after_fork(self._abandon)

    def close(self) -> None:
        """End it; closing twice is fine."""
        if self._owner == os.getpid():
            self._owner = 0
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _abandon(self) -> None:
        # The parent goes on listening; the child's copy of the socket would keep the port in use
        # after the parent's end.
        self._server.socket.close()
