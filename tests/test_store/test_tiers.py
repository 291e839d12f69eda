# SPDX-License-Identifier: Apache-2.0
"""Stores of several tiers: a directory before a real Redis, bases below, dead servers, and one
fetch for a whole host.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import oracle
import pytest
import store_builders as build

import bundler
from bundler.errors import AccessDenied, BundlerWarning, ConfigError, NotFound, StoreUnavailable
from bundler.lifecycle import kernel_writer
from bundler.store.store_layout import units_of

HERE = Path(__file__).parent
OPERATIONS = 200
# Deadlines for a machine that does other things too; time-outs themselves are tested with the
# defaults.
PATIENT = {"timeout_s": 5, "connect_timeout_s": 5}
# What redis-py says to a server when it connects, and what this test asks of it.
_GREETINGS = {"hello", "client", "auth", "select", "info", "ping", "command", "flushall", "config"}


def _shared(name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE.parent / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


redis_server = _shared("redis_server")


@pytest.fixture(scope="module")
def one_server():
    """A real Redis for this file."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def server(one_server):
    """The same, empty."""
    one_server.client().flushall()
    return one_server


@pytest.fixture
def mortal():
    """A server that a test may kill."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture
def opened():
    """Return a function that opens a store of one or more tiers; closed at the end."""
    stores = []

    def open_tiers(*urls, **choices):
        stores.append(bundler.open_store(*urls, **choices))
        return stores[-1]

    yield open_tiers
    for store in stores:
        store.close()


@pytest.fixture
def near(tmp_path):
    """The URL of a near directory."""
    return f"file://{tmp_path}/near"


def commands(server):
    """Return how many commands a server has run so far, greetings left out."""
    stats = server.client().info("commandstats")
    # Newer servers tell subcommands apart.
    named = {
        name.removeprefix("cmdstat_").partition("|")[0]: facts["calls"]
        for name, facts in stats.items()
    }
    return sum(calls for name, calls in named.items() if name not in _GREETINGS)


def sent_bytes(server):
    return server.client().info("stats")["total_net_output_bytes"]


def large(number, size=100_000):
    """Return a bundle of kernels with much in them that does not compress."""
    files = build.Files()
    kernels = (
        files.kernel(seed, extra={"k.llir": build.noise(seed, size)}) for seed in range(number)
    )
    return files.bundle(*kernels)


def tiers_of(store):
    return {tier.name: tier for tier in store.tiers}


# ------------------------------------------------------------------------------------ The whole way


def test_what_one_host_pushes_another_pulls_and_keeps(server, tmp_path, opened):
    """Pushed with one near tier, pulled with another: afterwards the second has everything near,
    the tag too.
    """
    first = opened(f"file://{tmp_path}/one", server.url(), **PATIENT)
    report = first.push(oracle.bundle("A", "B"), "t")
    assert report.blobs_sent == 4
    second = opened(f"file://{tmp_path}/two", server.url(), **PATIENT)
    with second.pull("t") as bundle:
        expected = oracle.contents(bundle)
    assert expected == oracle.contents(oracle.bundle("A", "B"))
    with opened(f"file://{tmp_path}/two").pull("t") as alone:
        assert oracle.contents(alone) == expected
    assert opened(server.url(), **PATIENT).verify().sound


def test_a_warm_start_takes_few_round_trips(server, tmp_path, opened):
    """By tag the server is asked four times at most for one batch; with everything near twice,
    whatever the bundle holds.
    """
    opened(server.url(), **PATIENT).push(large(20, 1000), "t")
    store = opened(f"file://{tmp_path}/near", server.url(), **PATIENT)
    far, asked = store._backend.inner._tiers[1], [0]

    def counted(call, ask=far.ask):
        asked[0] += 1
        return ask(call)

    far.ask = counted
    needed = []
    for _ in range(2):
        before = asked[0], commands(server)
        with store.pull("t") as bundle:
            bundle.blobs.prefetch([digest for digest, _ in bundle.content.blobs])
            oracle.contents(bundle)
        needed.append((asked[0] - before[0], commands(server) - before[1]))
    assert [calls for calls, _ in needed] == [4, 2]
    # Of the commands, the warm start saves those that read the manifest and each unit.
    assert needed[0][1] - needed[1][1] == 1 + len({unit.key for unit in units_of(bundle.content)})


def test_each_byte_is_hashed_once_at_each_trust_boundary(server, tmp_path, opened, monkeypatch):
    """From Redis through a directory tier into files: once as it came from the store, once as the
    content it is named by.
    """
    from bundler.format.digest import digest_raw, sha256

    pushed = oracle.restorable(*range(8), extra={"k.llir": build.noise(1, 20_000)})
    opened(server.url(), **PATIENT).push(pushed, "t")
    expected = Counter(digest for unit in units_of(pushed.content) for digest, _ in unit.blobs)
    store = opened(f"file://{tmp_path}/near", server.url(), **PATIENT)
    hashed = Counter()

    def counted(data=b"", real=hashlib.sha256):
        hashed[bytes(data)] += 1
        return real(data)

    for _ in range(2):  # from far, then from near
        hashed.clear()
        with store.pull("t") as bundle:
            with monkeypatch.context() as patched:
                patched.setattr(hashlib, "sha256", counted)
                patched.setattr(
                    kernel_writer, "compiled_writer", lambda: None
                )  # which compares where nobody counts
                assert len(bundler.restore(bundle, tmp_path / "cache", only="all").restored) == 8
            units = store._backend.get([unit.key for unit in units_of(bundle.content)]).values()
        assert {value[:4] for value in units} == {b"TBV1", b"TBD1"}
        assert [hashed[value[36:]] for value in units] == [1] * len(units)
        digests = {
            digest_raw(artifact.digest)
            for kernel in pushed.kernels
            for artifact in kernel.artifacts
        }
        assert {
            sha256(data): times for data, times in hashed.items() if sha256(data) in digests
        } == expected
        shutil.rmtree(tmp_path / "cache")


def test_merging_pushes_of_two_hosts_meet_at_the_truth(server, tmp_path, opened):
    """Each host adds to what the other has pushed, whatever its own near tier still says."""
    one = opened(f"file://{tmp_path}/one", server.url(), **PATIENT)
    two = opened(f"file://{tmp_path}/two", server.url(), **PATIENT)
    one.push(oracle.bundle("A"), "t")
    two.push(oracle.bundle("B"), "t")
    one.push(oracle.bundle("C"), "t")
    for store in (one, two):
        with store.pull("t") as bundle:
            assert oracle.kernels(bundle) == oracle.keys("A", "B", "C")
    assert two.delete_tag("t")
    with pytest.raises(NotFound):
        one.pull("t")


def test_a_push_is_in_the_farthest_tier_whole(tmp_path, near, opened):
    """What a near tier has is sent all the same, since others read the far one alone."""
    opened(near).push(oracle.bundle("A", "B"), "t")
    far = f"file://{tmp_path}/far"
    opened(near, far).push(oracle.bundle("A", "B"), "t")
    with opened(far).pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A", "B"))


@pytest.mark.parametrize("kind", ["u", "m"])
def test_a_damaged_near_copy_costs_no_kernel(tmp_path, near, opened, kind):
    """Each object of the near tier damaged in turn: everything is read, from far, and near again
    afterwards.
    """
    far = f"file://{tmp_path}/far"
    store = opened(near, far)
    store.push(oracle.bundle("A", "B"), "t")
    expected = oracle.contents(oracle.bundle("A", "B"))
    alone = opened(near)
    for key in oracle.of_kind(alone, kind):
        sound = oracle.raw(alone)[key]
        oracle.flip(alone, key)
        with pytest.warns(BundlerWarning, match="damaged"), opened(near, far).pull("t") as bundle:
            assert oracle.contents(bundle) == expected
        assert oracle.raw(alone)[key] == sound


# ------------------------------------------------------------------------ Bases and read-only tiers


def fixed(root):
    """Return what any change below a directory would change."""
    return {str(path): path.lstat().st_mtime_ns for path in [root, *root.rglob("*")]}


def test_a_base_below_a_writable_layer(tmp_path, opened):
    """What an image brought is read, built upon and left alone; the layer holds what is new."""
    base, layer = f"file://{tmp_path}/base", f"file://{tmp_path}/layer"
    opened(base).push(oracle.bundle("A"), "t")
    before = fixed(tmp_path / "base")
    store = opened(layer, f"{base}?readonly=1")
    with store.pull("t") as bundle:
        assert oracle.kernels(bundle) == oracle.keys("A")
    report = store.push(oracle.bundle("B"), "t")
    assert (report.tag_before, report.blobs_sent, report.blobs_present) == (
        oracle.bundle("A").digest,
        2,
        2,
    )
    with store.pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A", "B"))
    assert [tag.name for tag in store.tags()] == ["t"]
    assert store.delete_tag("t")
    with pytest.raises(AccessDenied, match="only read"):
        store.delete_tag("t")
    assert fixed(tmp_path / "base") == before


def test_an_image_before_a_shared_store(tmp_path, opened):
    """A nearer base answers first; what is pushed goes to the shared store whole."""
    image, far = f"file://{tmp_path}/image", f"file://{tmp_path}/far"
    opened(image).push(oracle.bundle("A"), "t")
    before = fixed(tmp_path / "image")
    store = opened(f"{image}?readonly=1", far)
    store.push(oracle.bundle("B"), "t")
    assert fixed(tmp_path / "image") == before
    with opened(far).pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A", "B"))


def test_a_store_opened_for_reading_is_left_as_it_is(tmp_path, near, opened):
    """`read_only` copies nothing to near tiers, marks nothing as used, and refuses every change."""
    far = f"file://{tmp_path}/far"
    opened(far).push(oracle.bundle("A"), "t")
    before = fixed(tmp_path / "far")
    store = opened(near, far, read_only=True)
    with store.pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A"))
    with pytest.raises(AccessDenied):
        store.push(oracle.bundle("B"), "t")
    assert fixed(tmp_path / "far") == before
    assert not (tmp_path / "near").exists()


def test_a_directory_that_may_not_be_written_is_a_read_only_tier(tmp_path, opened, monkeypatch):
    """It need not be said of a tier that is read-only anyway."""
    base = tmp_path / "base"
    opened(f"file://{base}").push(oracle.bundle("A"), "t")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(base) and may(path, mode))
    store = opened(f"file://{tmp_path}/layer", f"file://{base}")
    store.push(oracle.bundle("B"), "t")
    assert oracle.of_kind(opened(f"file://{tmp_path}/layer"), "m") != []
    monkeypatch.undo()
    with opened(f"file://{base}").pull("t") as bundle:
        assert oracle.kernels(bundle) == oracle.keys("A")


def test_who_may_only_read_the_server_pulls_and_is_refused_a_push(server, near, opened):
    """A server's user without the right to write fills a near tier; a push is an AccessDenied, not
    a silent loss.
    """
    opened(server.url(), **PATIENT).push(oracle.bundle("A"), "t")
    store = opened(near, server.url("reader"), **PATIENT)
    with store.pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A"))
    with pytest.raises(AccessDenied):
        store.push(oracle.bundle("B"), "t")
    with opened(near).pull("t") as bundle:
        assert oracle.kernels(bundle) == oracle.keys("A")


# ------------------------------------------------------------------------------------- Dead servers


def test_a_server_that_dies_leaves_what_is_near(mortal, near, opened):
    """Reads go on from the near tier with one warning; a push raises, or goes near as
    configured.
    """
    store = opened(near, mortal.url(), **PATIENT)
    store.push(oracle.bundle("A"), "t")
    mortal.kill()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with store.pull("t") as bundle:
                assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A"))
    assert len(caught) == 1
    assert "unavailable" in str(caught[0].message)
    assert "s3cret" not in str(caught[0].message)
    with pytest.raises(StoreUnavailable):
        store.push(oracle.bundle("B"), "t")
    with pytest.raises(StoreUnavailable):
        store.pull("other")
    degraded = opened(near, mortal.url(), when_down="degrade", **PATIENT)
    with pytest.warns(BundlerWarning):
        degraded.push(oracle.bundle("B"), "t")
    with degraded.pull("t") as bundle:
        assert oracle.kernels(bundle) == oracle.keys("A", "B")
    counted = store.tiers[1]
    assert counted.rested > 0
    assert 0 < counted.errors + counted.timeouts <= 3


def test_a_server_that_was_restarted_empty_is_filled_by_the_next_push(mortal, near, opened):
    """Its word counts: the tag is gone.  Pushing again sends everything, from what the
    program has.
    """
    opened(near, mortal.url(), **PATIENT).push(oracle.bundle("A"), "t")
    mortal.restart()
    store = opened(near, mortal.url(), **PATIENT)
    with pytest.raises(NotFound):
        store.pull("t")
    assert store.push(oracle.bundle("A"), "t").blobs_sent == 2
    with opened(mortal.url(), **PATIENT).pull("t") as bundle:
        assert oracle.contents(bundle) == oracle.contents(oracle.bundle("A"))


@pytest.mark.serial
@pytest.mark.parametrize("death", ["refused", "frozen"])
def test_a_dead_server_costs_a_second_in_all(mortal, near, opened, death):
    """Two hundred pulls through the real client, with its default time-outs, lose about a second
    together.
    """
    store = opened(near, mortal.url(scheme="redis"))
    store.push(oracle.bundle("A"), "t")
    if death == "refused":
        mortal.kill()
    else:
        mortal.process.send_signal(19)  # SIGSTOP: the system accepts, nobody answers
    far = store._backend.inner._tiers[1]
    spent = [0.0]

    def timed(call, ask=far.ask):
        started = time.monotonic()
        try:
            return ask(call)
        finally:
            spent[0] += time.monotonic() - started

    far.ask = timed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        for _ in range(OPERATIONS):
            with store.pull("t") as bundle:
                assert oracle.kernels(bundle) == oracle.keys("A")
    assert spent[0] < 1.5
    counted = store.tiers[1]
    assert counted.rested > OPERATIONS
    assert (counted.timeouts > 0) == (death == "frozen")


# ---------------------------------------------------------------------- One host, several processes


def fetch(processes, *urls):
    """Pull `t` in processes that start together; returns what each got."""
    line = [sys.executable, "-P", str(HERE / "tier_worker.py"), "t", *urls]
    started = []
    try:
        for _ in range(processes):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(line, **pipes))
        for process in started:
            assert process.stdout.readline() == "ready\n"
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=60)[0]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_of_four_processes_of_a_host_one_fetches(server, tmp_path, opened):
    """Four processes that start together take as many bytes from the server as one; without a near
    tier each takes them.
    """
    bundle = large(30)
    opened(server.url(), **PATIENT).push(bundle, "t")
    size = sum(size for _, size in bundle.content.blobs)
    taken = {}
    for name, processes, urls in (
        ("one", 1, [f"file://{tmp_path}/one", server.url()]),
        ("four", 4, [f"file://{tmp_path}/four", server.url()]),
        ("without", 2, [server.url()]),
    ):
        before = sent_bytes(server)
        answers = fetch(processes, *urls)
        taken[name] = sent_bytes(server) - before
        assert [count for count, _ in answers] == [30] * processes
        assert len({digest for _, digest in answers}) == 1
    assert taken["one"] > size / 2
    assert taken["four"] < 1.3 * taken["one"]
    assert taken["without"] > 1.9 * taken["one"]


def test_tiers_are_named_without_secrets(server, near, opened):
    """The store's name, its counters and repr hold no password."""
    store = opened(near, server.url(query="readonly=0"), **PATIENT)
    said = repr((store, store.name, store.tiers, store._backend))
    assert not any(password in said for password in redis_server.PASSWORDS.values())
    assert store.name == f"{near} + unix://…" or store.name.startswith(f"{near} + unix:///")
    assert [tier.name for tier in store.tiers] == store.name.split(" + ")


def test_a_tier_that_cannot_be_opened_closes_the_others(near, tmp_path):
    """A bad URL among several is a ConfigError, and nothing is left open or made."""
    with pytest.raises(ConfigError):
        bundler.open_store(near, "redis://:x@host:port")
    assert not (tmp_path / "near").exists()
    shutil.rmtree(tmp_path)
