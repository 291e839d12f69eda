# SPDX-License-Identifier: Apache-2.0
"""Dashboard and alert rules of deploy/: what promtool says of them, and what a real Prometheus
answers when it scrapes a real run.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import plugged
import pytest

from bundler.backends.peers.served_objects import METRICS as SERVED
from bundler.integrations.prometheus_meters import METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yml"
PATIENCE_S = 60
KINDS = ("_total", "_sum", "_count", "_bucket", "")
# A server whose GPU is a stand-in, which takes launches; Triton compiles its kernel for real.  It
# works until its input ends.
JOB = (
    """
sys.modules["torch"] = torch = __import__("types").ModuleType("torch")  # Triton would import the real one, which takes seconds
torch.Tensor = type("Tensor", (), {})
"""
    + plugged.STAND_IN_GPU
    + """
import threading
import bundler

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with bundler.open_store(sys.argv[2]) as store, bundler.session(store, "demo/all", metrics_port=0) as session:
    with bundler.recording() as recording:
        kernels.gelu_kernel[(8,)](x, x, 401408, BLOCK=1024)
    bundle = recording.collect()
    store.push(bundle, "demo/more")
    say(session.metrics_url)
    number = 0
    while not ended.wait(0.2):
        number += 1
        compile_one("gelu")
        store.push(bundle, "demo/more")
        store.restore("demo/more", cache_dir=f"{sys.argv[3]}/{number}", only="all")
        bundler.replay(bundle)
"""
)


def program(name):
    """Return a program of Prometheus: of the variable of its name, or on PATH; without it the test
    is skipped.
    """
    found = os.environ.get(name.upper()) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not here: apt-get install prometheus, or set {name.upper()}")
    return found


def dashboard():
    """Return the panels of the dashboard."""
    text = (DEPLOY / "grafana" / "dashboards" / "triton-bundler.json").read_text(encoding="utf-8")
    return json.loads(text)["panels"]


def panel_queries():
    """Yield the queries of the dashboard, as Grafana asks them for all jobs."""
    for panel in dashboard():
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*")


def rules():
    """Yield the name and the query of each rule, without the bound that an alert has."""
    for kind, name, text in re.findall(
        r"- (record|alert): (\S+)\n +expr: (?:>-\n)?((?:.|\n)+?)(?=\n +(?:for|labels):|\n\n)",
        RULES.read_text(),
    ):
        query = " ".join(text.split())
        value, bound = re.subn(r" [<>] [\d.]+$", "", query)
        assert bound == (kind == "alert"), name
        yield name, value


def test_each_query_asks_for_metrics_that_there_are():
    """Every metric that dashboard and rules name is one of ours, with labels that it has."""
    labels = {f"{PREFIX}{row.name}": {*row.labels, "le"} for row in METRICS}
    labels |= {f"{PREFIX}serve_{name}": {"route", "status"} for name in SERVED}
    recorded = {name for name, _ in rules() if ":" in name}
    queries = [*panel_queries(), *(query for _, query in rules())]
    assert (len(queries) > 20, len(recorded)) == (True, 1)
    for query in queries:
        named = re.findall(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?", query)
        assert named or any(name in query for name in recorded), query
        for name, selected in named:
            metric = next(
                (
                    name.removesuffix(kind) + end
                    for kind in KINDS
                    for end in ("", "_total")
                    if name.endswith(kind) and name.removesuffix(kind) + end in labels
                ),
                None,
            )
            assert metric, f"{query}: no metric {name}"
            assert set(re.findall(r"(\w+)=", selected)) <= labels[metric] | {"job"}, query
        by = {
            label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
        }
        assert by <= set().union(*labels.values()) | {"job", "instance"}, query


def test_what_compose_mounts_is_there():
    """docker-compose.yml starts Prometheus and Grafana with folders of deploy/ that exist, and they
    listen on the loopback address alone.
    """
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    mounted = set(re.findall(r"- \./(deploy/(?:prometheus|grafana)\S*?):", text))
    assert mounted == {
        "deploy/prometheus",
        "deploy/grafana/provisioning",
        "deploy/grafana/dashboards",
    }
    assert all((ROOT / folder).is_dir() for folder in mounted)
    assert text.count("profiles: [metrics]") == 2
    assert {"--web.listen-address=127.0.0.1:9090", "127.0.0.1"} <= {
        word for line in text.splitlines() for word in line.split()
    }
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    uid = re.search(r"uid: (\w+)", source)[1]
    assert {
        target["datasource"]["uid"] for panel in dashboard() for target in panel["targets"]
    } == {uid}


def test_promtool_finds_nothing_wrong():
    """The rules, and the configuration that names them, are sound to Prometheus's own checker."""
    for words in (
        ("check", "rules", RULES),
        ("check", "config", DEPLOY / "prometheus" / "prometheus.yml"),
    ):
        done = subprocess.run(
            [program("promtool"), *map(str, words)], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


@contextlib.contextmanager
def started(words, **options):
    """Run a program until the block ends; it is stopped by its number."""
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


@contextlib.contextmanager
def prometheus(binary, folder, targets):
    """Run a Prometheus that scrapes these addresses each second; yields a function that asks it a
    query.
    """
    listed = "".join(
        f"  - job_name: {job}\n    static_configs: [{{targets: ['{address}']}}]\n"
        for job, address in targets.items()
    )
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files:"
        f" ['{RULES}']\nscrape_configs:\n{listed}"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [
        binary,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
    ]
    with started(words, stderr=subprocess.DEVNULL):

        def ask(query):
            try:
                with urllib.request.urlopen(
                    f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}",
                    timeout=10,
                ) as answer:
                    return json.load(answer)["data"]["result"]
            except OSError:
                return []  # it is about to start

        yield ask


@pytest.mark.slow
def test_each_query_returns_data_of_a_real_run(tmp_path):
    """A job that compiles, restores, pushes and replays, and a server, are scraped for some
    seconds: each panel and each rule has something to show.
    """
    pytest.importorskip("triton")
    binary = program("prometheus")
    store = f"file://{tmp_path}/store?timeout_s=20"  # with a time-out it has a breaker
    env = plugged.environment(
        None, tmp_path / "cache", TRITON_CACHE_MANAGER=None, TRITON_BUNDLER_LOCAL=tmp_path / "ours"
    )
    serve = [
        sys.executable,
        "-m",
        "bundler",
        "serve",
        "--listen",
        "127.0.0.1:0",
        tmp_path / "store",
    ]
    (tmp_path / "prometheus").mkdir()
    with contextlib.ExitStack() as stack:
        job = plugged.start(JOB, env, store, tmp_path / "restored")
        stack.callback(lambda: (job.kill(), job.communicate(timeout=20)))
        url = json.loads(job.stdout.readline() or "null")
        assert url, job.stderr.read()
        server = stack.enter_context(started(serve, env=env))
        served = (
            next(line for line in server.stdout if line.startswith("serving at "))
            .split("//")[1]
            .strip()
        )
        ask = stack.enter_context(
            prometheus(binary, tmp_path / "prometheus", {"job": url.split("/")[2], "serve": served})
        )
        wanted = {*panel_queries(), *(query for _, query in rules())}
        end = time.monotonic() + PATIENCE_S
        while wanted and time.monotonic() < end:
            time.sleep(0.5)
            wanted = {
                query
                for query in wanted
                if not [one for one in ask(query) if one["value"][1] != "NaN"]
            }
            assert job.poll() is None, job.stderr.read()
        assert wanted == set()
        assert ask("max(triton_bundler_breaker_state)")[0]["value"][1] == "0"
        # The kernel of the call, and the one of the loop, which is compiled for other arguments;
        # all later ones are hits.
        assert float(ask("sum(triton_bundler_compiles_total)")[0]["value"][1]) == 2
        _, errors = job.communicate("", timeout=30)
        assert job.returncode == 0, errors
        assert ["is not in" in line for line in errors.splitlines()] == [
            True
        ]  # the tag, which the session makes
