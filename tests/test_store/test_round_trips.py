# SPDX-License-Identifier: Apache-2.0
"""How often a server is asked, counted by our link to it and by the server: latency times that is
what a start costs.
"""

import functools
import time
import warnings

import oracle
import pytest
import redis_proxy
import redis_server
import store_builders as build

import bundler
from bundler.backends.redis import server_exchange
from bundler.errors import BundlerWarning
from bundler.lifecycle import compatibility

KERNELS = 300
BATCH = 512
PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}
LATENCY_S = 0.05


@pytest.fixture(scope="module")
def server():
    """A server of these tests' own, which knows our scripts."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        with bundler.open_store(started.url(), **PATIENT) as store:
            store.push(oracle.bundle("A"), "warm")
            store.pull("warm").close()
        yield started


@pytest.fixture
def trips(monkeypatch):
    """A list that gets, for each exchange with a server, how many commands were sent."""
    made, run = [], server_exchange.run

    def noting(work, *rest):
        made.append(sum(len(commands) for _, commands in work))
        return run(work, *rest)

    monkeypatch.setattr(server_exchange, "run", noting)
    return made


@pytest.fixture
def asked(server, trips):
    """Return a function that makes a call with a store of its own: what it gave, exchanges, and
    commands that the server saw.
    """
    server.client().flushdb()

    def ask(call):
        server.client().config_resetstat()
        trips.clear()
        with bundler.open_store(server.url(), **PATIENT) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", BundlerWarning)
            answer = call(store)
        seen = server.client().info("commandstats")
        return answer, len(trips), {name[8:]: row["calls"] for name, row in seen.items()}

    return ask


def batches(keys):
    """Return how many batches so many keys make."""
    return -(-keys // BATCH)


def test_a_restore_by_tag_takes_four_round_trips_and_one_for_each_batch(asked, tmp_path):
    """Tag, manifest, marks and units: of everything, and of the launch set, whose units are half as
    many.
    """
    asked(lambda store: store.push(oracle.restorable(*range(KERNELS)), "t"))
    for keep, units in (("all", 2 * KERNELS), ("launch", KERNELS)):
        words = {"cache_dir": tmp_path / keep, "keep": keep, "only": "all"}
        report, trips, commands = asked(lambda store, words=words: store.restore("t", **words))
        assert len(report.restored) == KERNELS
        assert 4 <= trips <= 4 + batches(units)
        # Of the tag, the manifest, each unit, and each mark, which reads the beginning of what it
        # marks.
        assert commands["getrange"] == 2 + units + 1 + 2 * KERNELS
        assert commands["exists"] == 1
        assert "get" not in commands


@pytest.mark.serial
def test_a_start_takes_its_round_trips_times_the_latency(asked, trips, server, tmp_path):
    """With 50 ms a turn, restoring 300 kernels takes one turn for each exchange, none for logging
    in, and no wait of ours.
    """
    asked(lambda store: store.push(oracle.restorable(*range(KERNELS)), "t"))
    with redis_proxy.Proxy(server.socket, latency_s=LATENCY_S) as proxy:
        trips.clear()
        with bundler.open_store(proxy.url(server), **PATIENT) as store:
            started = time.monotonic()
            with store.pull("t") as bundle:
                bundle.blobs.prefetch([digest for digest, _ in bundle.content.blobs])
            took_s = time.monotonic() - started
        assert proxy.connections == 1
    turns = len(trips)
    assert turns <= 5
    # The bytes, and what else this machine does, have a second.
    assert turns * LATENCY_S <= took_s < turns * LATENCY_S + 1


def test_a_warm_rank_with_two_hundred_kernels_asks_six_times_at_most(asked, tmp_path):
    """Also where they have 20 MB: nothing is near, everything is on the server."""
    asked(lambda store: store.push(oracle.restorable(*range(200), each=100_000), "t"))
    report, trips, _ = asked(lambda store: store.restore("t", cache_dir=tmp_path, only="all"))
    assert len(report.restored) == 200
    assert trips <= 6


def test_a_push_takes_five_round_trips_and_two_for_each_batch(asked):
    """Tag, dictionaries, manifest, index, tag, and for each batch have/want and data; with nothing
    to send, the first of these, and a sample of the index.
    """
    bundle, keys = oracle.restorable(*range(KERNELS)), 2 * KERNELS + 1
    report, trips, commands = asked(lambda store: store.push(bundle, "t", "replace"))
    assert report.blobs_sent == 2 * KERNELS
    assert trips <= 5 + 2 * batches(keys)
    assert commands["set"] >= keys
    report, trips, commands = asked(lambda store: store.push(bundle, "t", "replace"))
    assert (report.blobs_sent, report.bytes_sent) == (0, 0)
    assert trips <= 2 + batches(keys)
    assert "set" not in commands


def test_a_dictionary_costs_a_push_one_round_trip_and_a_pull_none(asked, trips, server):
    """What units have in common is stored before them, and comes with the first of them."""
    files = build.Files()
    alike = files.bundle(
        *(
            files.kernel(
                seed,
                "k",
                source=f"a.py {seed}",
                extra={"k.llir": build.noise("same", 60_000) + b"%d" % seed},
            )
            for seed in range(20)
        )
    )
    assert asked(lambda store: store.push(alike, "t"))[1] <= 5 + 2
    with bundler.open_store(server.url(), **PATIENT) as store:
        assert store.stats().dictionaries == 1
        trips.clear()
        with store.pull("t") as pulled:
            pulled.blobs.prefetch([digest for digest, _ in pulled.content.blobs])
            assert oracle.contents(pulled) == oracle.contents(alike)
            assert len(trips) == 4


def test_ptxas_is_asked_as_soon_as_the_tag_says_for_what(trips, server, tmp_path, monkeypatch):
    """The program takes milliseconds, in which the manifest is fetched and decoded; it is asked
    once.
    """
    server.client().flushdb()
    files = build.Files()
    alike = files.bundle(
        *(
            files.kernel(s, extra={"k.llir": build.noise("x", 60_000) + s.encode()})
            for s in "ABCDEF"
        )
    )
    begun, begin = [], compatibility.Questions._begin

    def noting(questions, call):
        begun.append((call, len(trips)))
        begin(questions, call)

    monkeypatch.setattr(compatibility.Questions, "_begin", noting)
    with bundler.open_store(server.url(), **PATIENT) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        store.push(alike, "t")
        trips.clear()
        store.restore("t", cache_dir=tmp_path)
    (target,) = {kernel.target for kernel in alike.kernels}
    of_ptxas = [(call.args, after) for call, after in begun if isinstance(call, functools.partial)]
    assert of_ptxas == [((int(target.arch),), 1)]


def test_a_near_tier_holds_dictionaries_too(tmp_path):
    """What was fetched once is read from the directory when the server is gone."""
    near, files = f"file://{tmp_path}/near", build.Files()
    alike = files.bundle(
        *(
            files.kernel(s, extra={"k.llir": build.noise("x", 60_000) + s.encode()})
            for s in "ABCDEF"
        )
    )
    with redis_server.running(redis_server.NAMES[0]) as mortal:
        with bundler.open_store(mortal.url(), **PATIENT) as store:
            store.push(alike, "t")
            assert store.stats().dictionaries == 1
        with bundler.open_store(near, mortal.url(), **PATIENT) as store, store.pull("t") as pulled:
            assert oracle.contents(pulled) == oracle.contents(alike)
        url = mortal.url()
    with warnings.catch_warnings(), bundler.open_store(near, url) as store:
        warnings.simplefilter("ignore", BundlerWarning)
        with store.pull("t") as pulled:
            assert oracle.contents(pulled) == oracle.contents(alike)
    with bundler.open_store(near) as store:
        assert store.verify().sound
        assert store.stats().dictionaries == 1


def test_single_files_come_in_one_round_trip(asked, tmp_path):
    """Tuning files are units of their own, and are fetched together all the same."""
    files = build.Files()
    (key,) = oracle.real_keys("A")
    tuned = [
        files.tuning(f"{key}/{number}.autotune.json", b"{}%d" % number) for number in range(40)
    ]
    asked(lambda store: store.push(files.bundle(*tuned), "t"))
    report, trips, _ = asked(lambda store: store.restore("t", cache_dir=tmp_path))
    assert len(report.companions) == 40
    assert trips == 4
