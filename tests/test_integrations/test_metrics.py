# SPDX-License-Identifier: Apache-2.0
"""What observers hear of restores, pushes, pulls and breakers, and how it gets to Prometheus: over
HTTP, as a file, from many processes.
"""

import json
import logging
import os
import re
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import bundler
from bundler import observers
from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.memory import MemoryBackend
from bundler.integrations import metrics_export
from bundler.integrations.failure_policy import Tally
from bundler.integrations.prometheus_meters import METRICS, PREFIX
from bundler.lifecycle.compiled_once import CompileLeases
from bundler.store import store_urls
from bundler.store.store_server import StoreServer

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
PAGE = ROOT / "docs" / "metrics.md"
# A process that restores once, forks where it is told to, and restores again; the child restores
# once, and ends.
RESTORING = """
import os, sys
import bundler
with bundler.session("memory:", push=None):
    bundler.restore(sys.argv[1], sys.argv[2], only="all")
    child = os.fork() if sys.argv[3] else None
    bundler.restore(sys.argv[1], f"{sys.argv[2]}{child}", only="all")
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""


class Heard:
    """A listener that notes all it is told."""

    def __init__(self):
        self.counts, self.states, self.steps = [], [], []

    def count(self, name, number, labels):
        self.counts.append((name, number, dict(labels)))

    def state(self, name, value, labels):
        self.states.append((name, value, dict(labels)))

    def step(self, name, seconds, facts):
        assert seconds >= 0
        self.steps.append((name, dict(facts)))


@pytest.fixture
def heard():
    """A listener, until the test ends."""
    listener = Heard()
    observers.listen(listener)
    yield listener
    observers.leave(listener)


@pytest.fixture(scope="module")
def spans():
    """The spans that end in this process, in order: tracing is configured once for a process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def environment(tmp_path, **more):
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_BUNDLER_LOCAL": str(tmp_path / "ours"),
    }
    return {**os.environ, **ours, **{name: str(value) for name, value in more.items()}}


def restoring(tmp_path, *, forks=False, **more):
    """Run the program above."""
    line = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-c",
        RESTORING,
        str(BUNDLE),
        str(tmp_path / "cache"),
        "x" * forks,
    ]
    done = subprocess.run(
        line, env=environment(tmp_path, **more), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def samples(text):
    """Return the samples of a text of metrics: name and labels -> number."""
    lines = [
        line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")
    ]
    return {name: float(value) for name, _, value in lines}


def test_a_restore_push_and_pull_are_told_with_their_digest(heard, tmp_path):
    """Each is one step, with the digest of the bundle; one that fails has the code of its error."""
    with bundler.open_store("memory:") as store, bundler.Bundle.load(BUNDLE) as bundle:
        report = bundler.restore(bundle, tmp_path, only="all")
        pushed = store.push(bundle, "t")
        store.restore("t", cache_dir=tmp_path / "b", only="all")
        store.pull("t").close()
        with pytest.raises(bundler.NotFound):
            store.pull("u")
        digest, kernels = bundle.digest, len(bundle.kernels)
    told = {
        "digest": digest,
        "kernels": kernels,
        "skipped": len(report.skipped),
        "bytes": report.bytes,
    }
    sent = {
        "digest": digest,
        "bytes_sent": pushed.bytes_sent,
        "blobs_sent": pushed.blobs_sent,
        "store": "memory:",
    }
    pulled = {"digest": digest, "store": "memory:"}
    assert heard.steps == [
        ("restore", told),
        ("push", sent),
        ("pull", pulled),
        ("restore", told),
        ("pull", pulled),
        ("pull", {"error": "not-found"}),
    ]


def test_nobody_is_told_where_nobody_listens(monkeypatch):
    """Without listener, tracing and logging a step is an object that all share, and keeps
    nothing.
    """
    monkeypatch.setattr(observers, "_TRACING", "no such module")
    monkeypatch.setattr(observers, "listeners", ())
    with observers.step("restore", digest="x") as step:
        step.note(kernels=1)
    with observers.step("pull") as other:
        assert step is other
    assert (step.observed, step._facts) == (False, {})


def test_a_library_that_imports_opentelemetry_does_not_trace(monkeypatch):
    """redis-py imports it wherever it is installed; a program traces once it has set a provider."""

    class Proxy:
        pass

    tracing = types.SimpleNamespace(ProxyTracerProvider=Proxy, get_tracer_provider=Proxy)
    monkeypatch.setitem(sys.modules, "tracing", tracing)
    monkeypatch.setattr(observers, "_TRACING", "tracing")
    monkeypatch.setattr(observers, "listeners", ())
    assert observers.step("restore") is observers.step("pull")
    tracing.get_tracer_provider = TracerProvider
    assert observers.step("restore") is not observers.step("pull")


def test_a_breaker_tells_each_change_and_who_comes_later(heard):
    """Closed at first; a server that fails opens it, and an answer closes it again."""

    class Dying(MemoryBackend):
        dead = False

        def exists(self, keys):
            if self.dead:
                raise BackendUnavailable("gone")
            return super().exists(keys)

    backend = Dying()
    how = store_urls.Opening(probe_s=1e-6)
    guarded = store_urls._guarded(backend, "far", how, 0.5, 1.0, unhurried_s=None)
    guarded.exists(["a"])
    backend.dead = True
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            guarded.exists(["a"])
    later = Heard()
    observers.listen(later)
    observers.leave(later)
    assert ("breaker", 2, {"tier": "far"}) in later.states
    guarded._breaker.answered()
    assert [(name, value) for name, value, labels in heard.states if labels == {"tier": "far"}] == [
        ("breaker", 0),
        ("breaker", 2),
        ("breaker", 0),
    ]


def test_a_session_tells_what_it_counts_and_nothing_twice(heard):
    """Hits by tier, with the seconds saved and bytes; misses; compiles as steps; what a push or
    restore told is not told again.
    """
    tally = Tally()
    tally.hits.append(("store", 1.5, 100, "KEY"))
    tally.fold()
    tally.add("misses")
    tally.add("bytes_sent", 7)
    tally.add("bytes_sent", 8, told=True)
    tally.compiled("gelu", 2.0, "K")
    assert heard.counts == [
        ("lookups", 1, {"result": "hit", "tier": "store"}),
        ("seconds_saved", 1.5, {}),
        ("bytes", 100, {"direction": "fetched", "tier": "store"}),
        ("lookups", 1, {"result": "miss", "tier": "none"}),
        ("bytes", 7, {"direction": "sent", "tier": "store"}),
    ]
    assert heard.steps == [("compile", {"kernel": "gelu", "key": "K"})]
    counters = tally.snapshot()
    assert (counters.hits, counters.misses, counters.bytes_sent, counters.compiles) == (1, 1, 15, 1)


def test_a_turn_tells_of_its_lease(heard):
    """One that is granted is held until the turn is over; who waits in vain goes on without."""
    with bundler.open_store("memory:") as store:
        turns = CompileLeases(store.kernel_records())
        with turns.begin("A" * 52, 0.34) as turn:
            assert turn.holds
            with turns.begin("A" * 52, 0.0001) as other:
                assert not other.holds
    assert [(name, number, labels.get("result")) for name, number, labels in heard.counts] == [
        ("leases", 1, "granted"),
        ("leases_held", 1, None),
        ("leases", 1, "waited"),
        ("leases", 1, "without"),
        ("leases_held", -1, None),
    ]


def test_steps_are_spans_of_a_program_that_traces(spans, tmp_path):
    """A span has the digest as an attribute, one inside another is its child, and an error is
    recorded.
    """
    spans.clear()
    with (
        trace.get_tracer("test").start_as_current_span("job"),
        bundler.open_store("memory:") as store,
    ):
        with bundler.Bundle.load(BUNDLE) as bundle:
            store.push(bundle, "t")
            store.restore("t", cache_dir=tmp_path, only="all")
            digest = bundle.digest
        with pytest.raises(bundler.NotFound):
            store.pull("u")
        observers.ended("compile", 2.0, kernel="gelu", key="K")
    *ours, job = spans.get_finished_spans()
    assert [span.name for span in ours] == [
        f"triton_bundler.{name}" for name in ("push", "pull", "restore", "pull", "compile")
    ]
    assert [span.attributes.get("triton_bundler.digest") for span in ours] == [digest] * 3 + [
        None
    ] * 2
    assert {span.parent.span_id for span in ours} == {job.context.span_id}
    failed, compiled = ours[-2:]
    assert (failed.status.is_ok, failed.attributes["triton_bundler.error"]) == (False, "not-found")
    assert (compiled.end_time - compiled.start_time, compiled.attributes["triton_bundler.key"]) == (
        2_000_000_000,
        "K",
    )


def test_events_are_logged_with_fields(caplog, tmp_path):
    """A log record of `bundler.events` has what is told as fields, whose names docs/metrics.md
    lists.
    """
    with caplog.at_level(logging.INFO, "bundler.events"):
        bundler.restore(BUNDLE, tmp_path, only="all")
    (record,) = [record for record in caplog.records if record.name == "bundler.events"]
    fields = {name: value for name, value in vars(record).items() if name.startswith("bundler_")}
    assert (fields["bundler_event"], fields["bundler_digest"][:7]) == ("restore", "sha256:")
    assert set(fields) == {
        f"bundler_{name}" for name in ("event", "seconds", "digest", "kernels", "skipped", "bytes")
    }
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in fields if f"`{name}`" not in page] == []


def test_each_metric_is_documented():
    """docs/metrics.md has the table of metrics that the code has."""
    rows = [
        f"| `{PREFIX}{row.name}` | {row.kind.__name__.lower()} |"
        f" {', '.join(f'`{label}`' for label in row.labels)} | {row.meaning} |"
        for row in METRICS
    ]
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []


def test_a_session_shows_metrics_while_it_lasts(tmp_path):
    """By a port of the loopback address, where it says; a port that is taken is an error that names
    it.
    """
    with bundler.session("memory:", push=None, metrics_port=0) as session:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", session.metrics_url)
        before = samples(_get(session.metrics_url)).get("triton_bundler_restore_seconds_count", 0)
        bundler.restore(BUNDLE, tmp_path, only="all")
        found = samples(_get(session.metrics_url))
        port = session.metrics_url.split(":")[2].split("/")[0]
        with pytest.raises(
            bundler.ConfigError,
            match=f"metrics_port={port}: 127.0.0.1:{port} cannot be listened on",
        ):
            bundler.session("memory:", push=None, metrics_port=int(port))
    assert found["triton_bundler_restore_seconds_count"] == before + 1
    assert found['triton_bundler_bytes_total{direction="fetched",tier="bundle"}'] > 0
    with pytest.raises(OSError):
        _get(session.metrics_url)


def _get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch, tmp_path):
    """A port, or a file, that was asked for is an error which names the extra; a directory of other
    programs is none.
    """
    monkeypatch.setattr(metrics_export.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        bundler.ConfigError,
        match=r"metrics_port=0: metrics need prometheus_client; pip install '\.\[metrics\]'",
    ):
        bundler.session("memory:", metrics_port=0)
    monkeypatch.setenv("TRITON_BUNDLER_METRICS_FILE", str(tmp_path / "x.prom"))
    with pytest.raises(
        bundler.ConfigError,
        match=r"x\.prom: metrics need prometheus_client; pip install '\.\[metrics\]'",
    ):
        metrics_export.begin_metrics()
    monkeypatch.delenv("TRITON_BUNDLER_METRICS_FILE")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics_export.begin_metrics()
    assert metrics_export.metrics_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts"), [("job.prom", [2]), ("job-{pid}.prom", [1, 2])])
def test_a_batch_job_leaves_a_file(tmp_path, name, counts):
    """Written at the end, whole, with our metrics alone; a forked child counts from nought, and
    writes where the name has its number.
    """
    folder = tmp_path / "told"
    folder.mkdir()
    restoring(tmp_path, forks=True, TRITON_BUNDLER_METRICS_FILE=folder / name)
    assert [path.suffix for path in folder.iterdir()] == [".prom"] * len(counts)
    numbers = [samples(path.read_text()) for path in folder.iterdir()]
    assert sorted(one["triton_bundler_restore_seconds_count"] for one in numbers) == counts
    assert {name.startswith(PREFIX) for one in numbers for name in one} == {True}


@pytest.mark.slow
def test_many_processes_add_up(tmp_path):
    """In the multi-process mode of prometheus_client a reader sees what all did, also those that
    have ended.
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        restoring(tmp_path / str(number), PROMETHEUS_MULTIPROC_DIR=shared)
    code = "from bundler.integrations import metrics_export; print(metrics_export.metrics_text())"
    env = environment(tmp_path, PROMETHEUS_MULTIPROC_DIR=shared)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert samples(done.stdout)["triton_bundler_restore_seconds_count"] == 4, done.stderr


def test_serve_shows_them_beside_its_own(tmp_path):
    """GET /metrics of a server has its own numbers, then those of its process."""
    with StoreServer(
        MemoryBackend(), "127.0.0.1:0", more_metrics=metrics_export.metrics_text
    ) as server:
        text = _get(f"{server.url}/metrics")
    assert {"triton_bundler_serve_connections", "triton_bundler_restore_seconds_count"} <= samples(
        text
    ).keys()
    assert json.dumps(text).count("# TYPE triton_bundler_restore_seconds histogram") == 1
