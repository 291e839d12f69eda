# SPDX-License-Identifier: Apache-2.0
"""Peers before a far store: units come from them, tags from the store, and nothing of what they do
is believed or waited for long.
"""

import contextlib
import http.server
import multiprocessing
import os
import random
import re
import threading
import time
import warnings

import oracle
import pytest
import redis_proxy

import bundler
from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.peers import parse_served
from bundler.backends.peers.peer_backend import PeerBackend
from bundler.backends.peers.served_objects import ServingBounds
from bundler.backends.port import Provable
from bundler.errors import BundlerError, BundlerWarning, ConfigError, StoreUnavailable
from bundler.store.store_server import StoreServer

ANYWHERE = "127.0.0.1:0"
SEEDS = range(6)


@pytest.fixture
def far(root):
    """The URL of a far store with a tag, that nobody has open."""
    with bundler.open_store(f"file://{root}") as store:
        store.push(oracle.restorable(*SEEDS, each=2000), "t")
    return f"file://{root}"


@pytest.fixture
def server(far):
    """A warm replica: a server of the same store."""
    with bundler.open_store(far) as store, store.serve(ANYWHERE) as server:
        yield server


def restored(url, tmp_path, peers, *near, name="cache", **choices):
    """Restore the tag with peers; returns the report, counters by tier, and the texts of
    warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bundler.open_store(*near, url, peers=peers, **choices) as store:
            report = store.restore("t", cache_dir=tmp_path / name, only="all")
            tiers = {tier.name.partition(" ")[0].partition(":")[0]: tier for tier in store.tiers}
    return (
        report,
        tiers,
        [str(one.message) for one in caught if issubclass(one.category, BundlerWarning)],
    )


def test_units_come_from_a_peer(far, server, tmp_path):
    """A restore reads units and manifest from the peer; of the far store only the tag."""
    report, tiers, said = restored(far, tmp_path, [server.url])
    assert (len(report.restored), said) == (len(SEEDS), [])
    assert (tiers["peer"].misses, tiers["file"].hits, tiers["file"].misses) == (0, 0, 0)
    assert tiers["peer"].hits == 2 * len(SEEDS) + 1


def test_what_a_peer_lacks_comes_from_the_far_store(far, tmp_path, memory):
    """Of a peer that has some kernels these come from it, the others from the store."""
    memory.push(oracle.restorable(*SEEDS[:2], each=2000), "other")
    with memory.serve(ANYWHERE) as server:
        report, tiers, said = restored(far, tmp_path, [server.url])
    assert (len(report.restored), said) == (len(SEEDS), [])
    assert (tiers["peer"].hits, tiers["file"].hits) == (2 * 2, 2 * len(SEEDS) - 4 + 1)


def test_a_near_directory_is_filled_by_peers(far, server, tmp_path):
    """What comes from a peer is kept near, and the next process of the host asks neither peer nor
    far store for it.
    """
    near = f"file://{tmp_path}/near"
    _, tiers, said = restored(far, tmp_path, [server.url], near)
    assert (tiers["peer"].hits, said) == (2 * len(SEEDS) + 1, [])
    report, tiers, said = restored(far, tmp_path, [server.url], near, name="again")
    assert (len(report.restored), tiers["peer"].hits, tiers["peer"].misses, said) == (
        len(SEEDS),
        0,
        0,
        [],
    )


def test_units_of_a_peer_need_no_dictionary_of_it(root, tmp_path):
    """A peer's unit that was compressed with a dictionary is kept without: the near store can be
    read by itself.
    """
    same = random.Random(1).randbytes(3000)
    bundle = bundler.merge(
        [oracle.restorable(n, each=40, extra={"k.ttir": same + b"%d" % n}) for n in range(40)]
    )
    with bundler.open_store(f"file://{tmp_path}/a", "memory:") as dictionary_store:
        dictionary_store.push(bundle, "t")
        assert dictionary_store.stats().dictionaries
        with bundler.open_store(f"file://{root}") as store:
            store.push(bundle, "t")
        with dictionary_store.serve(ANYWHERE) as server:
            near = f"file://{tmp_path}/near"
            report, tiers, said = restored(f"file://{root}", tmp_path, [server.url], near)
    assert (len(report.restored), tiers["peer"].misses, said) == (40, 0, [])
    with bundler.open_store(near) as store:
        assert store.stats().dictionaries == 0
        assert store.verify().sound


class Liar(http.server.BaseHTTPRequestHandler):
    """A server that answers as its server's `answer` says: a function that writes to the
    connection.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.requests.append(self.path)
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.server.answer(self)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def lying(answer):
    """Serve with an answer; yields the URL and the paths that were asked for."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.daemon_threads = False  # those that answer have ended when it is closed
    server.answer, server.requests = answer, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def raw(text, *body, pause_s=0.0):
    """Return an answer of these bytes, one part after the other."""

    def answer(handler):
        for part in (text.replace("\n", "\r\n").encode(), *body):
            handler.wfile.write(part)
            handler.wfile.flush()
            time.sleep(pause_s)

    return answer


OK = "HTTP/1.1 200 OK\nTriton-Bundler-Serve: 1\nContent-Length: {}\n\n"
HOSTILE = {
    "cut off": (raw(OK.format(1000), b"x" * 10), "unavailable: .*cut off"),
    "nonsense": (raw("SSH-2.0-OpenSSH_9\n"), "unavailable: .*no answer of"),
    "not a frame": (
        raw(OK.format(4), b"1234"),
        "unavailable: .*its answer is cut off, or no answer to what was asked",
    ),
    "endless": (
        raw("HTTP/1.1 200 OK\nTriton-Bundler-Serve: 1\n\n", *[b"x" * 2**20] * 64),
        "unavailable",
    ),
    "redirect": (
        raw("HTTP/1.1 302 Found\nLocation: http://127.0.0.1:1/\nContent-Length: 0\n\n"),
        "unavailable: .*302 .*redirects are not followed",
    ),
    "another web server": (
        raw("HTTP/1.1 404 Not Found\nContent-Length: 0\n\n"),
        "unavailable: .*is no `triton-bundler serve`",
    ),
    "busy": (
        raw("HTTP/1.1 503 Busy\nRetry-After: 60\nContent-Length: 0\n\n"),
        "timeout: .*busy .*503",
    ),
    "too many": (
        raw(
            "HTTP/1.1 429 Slow down\nRetry-After: Fri, 31 Dec 2027 23:59:59 GMT\nContent-Length:"
            " 0\n\n"
        ),
        "timeout: .*busy .*429",
    ),
    "broken": (raw("HTTP/1.1 500 Oops\nContent-Length: 0\n\n"), "unavailable: .*500"),
    "promises": (
        raw(OK.format(8), (-2).to_bytes(8, "big", signed=True)),
        "unavailable: .*promises objects and sends none",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_peer_that_talks_nonsense_costs_a_warning(far, tmp_path, name):
    """All kernels come from the far store, and one warning says why not from the peer."""
    answer, expected = HOSTILE[name]
    with lying(answer) as (url, _):
        report, tiers, said = restored(far, tmp_path, [f"{url}?timeout_s=0.3"])
    assert len(report.restored) == len(SEEDS)
    assert (tiers["peer"].hits, tiers["file"].hits) == (0, 2 * len(SEEDS) + 1)
    assert len(said) == 1, said
    assert re.search(expected, said[0])


@pytest.mark.parametrize(
    "name", ["hangs", pytest.param("slow-loris", marks=pytest.mark.slow), "slow body", "refused"]
)
def test_a_peer_that_is_dead_or_slow_costs_no_more_than_its_bound(far, tmp_path, name):
    """However it does not answer, the restore goes on after the time-out, once, and the peer is
    left alone.
    """
    slow = {
        "hangs": lambda handler: time.sleep(0.35),
        "slow-loris": raw("", *[b"H"] * 35, pause_s=0.01),
        "slow body": raw(OK.format(1000), *[b"x"] * 35, pause_s=0.01),
        "refused": None,
    }[name]
    with lying(slow) as (url, asked):
        target = "http://127.0.0.1:1" if slow is None else url
        started = time.monotonic()
        report, tiers, said = restored(far, tmp_path, [f"{target}?timeout_s=0.2"])
        spent = time.monotonic() - started
    assert (len(report.restored), len(said)) == (len(SEEDS), 1)
    assert spent < 1.2
    assert len(asked) <= 2
    assert tiers["file"].hits == 2 * len(SEEDS) + 1


@pytest.mark.parametrize("trusted", [True, False])
def test_a_peer_behind_tls(far, server, tmp_path, monkeypatch, trusted):
    """A proxy with a certificate that this machine trusts is a peer; any other is left out, with a
    warning.
    """
    authority = redis_proxy.Certificates(tmp_path)
    monkeypatch.setenv(
        "SSL_CERT_FILE", authority.ca if trusted else redis_proxy.Certificates(tmp_path, "other").ca
    )
    with redis_proxy.Proxy(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), tls=authority.context()
    ) as proxy:
        report, tiers, said = restored(
            far, tmp_path, [f"https://127.0.0.1:{proxy.port}?timeout_s=5"]
        )
    assert len(report.restored) == len(SEEDS)
    assert tiers["file"].hits == (0 if trusted else 2 * len(SEEDS) + 1)
    assert len(said) == (0 if trusted else 1)
    assert trusted or "CERTIFICATE_VERIFY_FAILED" in said[0]


class Forged(oracle.Wrapped):
    """A byte store that gives each unit as another unit of the same store: whole, but not what its
    key says.
    """

    def get_within(self, max_bytes):
        units = [key for key in max_bytes if key.startswith("v1/u/")]
        swapped = {key: units[position - 1] for position, key in enumerate(units)}
        found = self.inner.get_within(max_bytes)
        return {key: found[swapped.get(key, key)] for key in found}


def test_a_lying_peer_is_dropped_for_the_process(far, tmp_path, local):
    """Its units are whole by their seal and are others: one warning, no more requests, and the far
    store loses nothing.
    """
    with (
        StoreServer(Forged(local._backend.inner), ANYWHERE) as server,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with bundler.open_store(far, peers=[server.url]) as store:
            report = store.restore("t", cache_dir=tmp_path / "c", only="all")
            asked = server.total("requests_total")
            again = store.restore("t", cache_dir=tmp_path / "d", only="all")
        assert server.total("requests_total") == asked
    assert len(report.restored) == len(again.restored) == len(SEEDS)
    (said,) = [str(one.message) for one in caught if issubclass(one.category, BundlerWarning)]
    assert "sent something else as v1/u/" in said
    assert "does not ask it again" in said
    assert local.verify().sound


def test_a_manifest_of_a_peer_is_the_one_that_the_tag_names(far, tmp_path, local):
    """A peer that gives another manifest is dropped too."""

    class Other(oracle.Wrapped):
        def get_within(self, max_bytes):
            manifests = [key for key in max_bytes if key.startswith("v1/m/")]
            others = dict.fromkeys(manifests, oracle.raw(other)[oracle.of_kind(other, "m")[0]])
            return (
                self.inner.get_within({k: v for k, v in max_bytes.items() if k not in manifests})
                | others
            )

    with bundler.open_store("memory:") as other:
        other.push(oracle.restorable(99), "t")
        with StoreServer(Other(local._backend.inner), ANYWHERE) as server:
            report, _, said = restored(far, tmp_path, [server.url])
    assert len(report.restored) == len(SEEDS)
    assert len(said) == 1
    assert "sent something else as v1/m/" in said[0]


def test_a_tag_is_what_the_far_store_says(far, tmp_path, memory):
    """A peer's own tag of that name counts for nothing, and a tag that only a peer has is not
    there.
    """
    memory.push(oracle.restorable(99), "t")
    memory.push(oracle.restorable(99), "only-here")
    with memory.serve(ANYWHERE) as server, bundler.open_store(far, peers=[server.url]) as store:
        assert store.pull("t").digest == oracle.restorable(*SEEDS, each=2000).digest
        assert [tag.name for tag in store.tags()] == ["t"]
        with pytest.raises(bundler.NotFound):
            store.pull("only-here")


def test_looking_after_a_store_asks_no_peer(far, server):
    """What is verified, counted, pruned and pushed is the store's own."""
    with bundler.open_store(far, peers=[server.url]) as store:
        assert store.verify().sound
        store.stats()
        store.prune(grace_s=0)
        store.push(oracle.restorable(50), "new")
    assert server.total("objects_total") == 0


def test_a_signature_that_is_required_is_required_of_what_peers_have(
    far, server, tmp_path, monkeypatch
):
    """Units of a peer make nothing visible that nobody vouches for."""
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "no-keys"))
    with bundler.open_store(far, peers=[server.url]) as store, pytest.raises(bundler.Untrusted):
        store.restore("t", cache_dir=tmp_path / "c", only="all")
    assert not (tmp_path / "c").exists()


def test_peers_get_no_credentials(far, tmp_path, monkeypatch):
    """Nothing of the environment's secrets is in a request, and a URL with a password is refused
    without repeating it.
    """
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "TRITON_BUNDLER_PASSWORD_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "s3cret"))
    heads = []
    with lying(lambda handler: heads.append(str(handler.headers))) as (url, _):
        restored(far, tmp_path, [f"{url}?timeout_s=0.2"])
    assert heads
    assert not any("s3cret" in head or "Authorization" in head for head in heads)
    with pytest.raises(ConfigError, match="never given") as raised:
        bundler.open_store(far, peers=["http://user:s3cret@host:1"])
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "peers",
    [
        ["redis://host"],
        ["host:1"],
        ["http://"],
        ["http://host:99999"],
        ["http://host:1/path"],
        ["http://host:1?x=1"],
        ["http://host:1?timeout_s=0"],
        ["http://host:1?timeout_s=x"],
        ["http://a:1", "http://a:1/"],
        [f"http://h:{n}" for n in range(1, 10)],
        "http://host:1",
        ["http://ho\nst:1"],
        ["http://[::1"],
    ],
)
def test_a_peer_that_is_none_is_an_error(far, peers):
    """A setting that cannot be used is named."""
    with pytest.raises(ConfigError, match="peer"):
        bundler.open_store(far, peers=peers)


def test_peers_of_the_environment(far, server, tmp_path, monkeypatch):
    """They are asked unless the caller says which, or none."""
    monkeypatch.setenv("TRITON_BUNDLER_PEERS", f" http://127.0.0.1:1 , {server.url},")
    _, tiers, said = restored(far, tmp_path, None)
    assert (tiers["file"].hits, len(said)) == (0, 1)
    _, tiers, said = restored(far, tmp_path, (), name="again")
    assert (tiers, said) == ({}, [])


def test_peers_of_a_file(far, server, tmp_path, monkeypatch):
    """A file of settings names them as a list."""
    settings = tmp_path / "settings.toml"
    settings.write_text(f'peers = ["http://127.0.0.1:1", "{server.url}"]\n')
    monkeypatch.setenv("TRITON_BUNDLER_CONFIG", str(settings))
    _, tiers, said = restored(far, tmp_path, None)
    assert (tiers["file"].hits, len(said)) == (0, 1)


def test_a_program_hears_of_a_dead_peer_once(far, monkeypatch, tmp_path):
    """A session goes on without it, with one warning."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_BUNDLER_PEERS", "http://127.0.0.1:1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with bundler.session(far, "t", push=None):
            pass
    said = [str(one.message) for one in caught if issubclass(one.category, BundlerWarning)]
    assert len(said) == 1, said
    assert (
        "peer http://127.0.0.1:1: unavailable: Connection refused; the store goes on without it"
        in said[0]
    )


def test_what_peers_do_not_say_is_no_answer_of_a_dead_store(far, server, memory, tmp_path):
    """With a far store that died, lists and tags are errors, and so is an object that no peer has;
    units that peers have still come.
    """
    with bundler.open_store(far) as store, store.serve(ANYWHERE) as far_server:
        url = f"tb+{far_server.url}?timeout_s=0.2"
        with warnings.catch_warnings(), bundler.open_store(url, peers=[server.url]) as replica:
            warnings.simplefilter("ignore", BundlerWarning)
            found = replica.pull("t", read_only=True)
            lacking = oracle.restorable(50)
            store.push(lacking, "later")
            with bundler.open_store(url, peers=()) as other:
                unknown = other.pull("later", read_only=True)
                far_server.close()
                with pytest.raises(StoreUnavailable):
                    other.pull("t")
                with pytest.raises(StoreUnavailable):
                    unknown.blobs.read_blob(
                        bytes.fromhex(lacking.kernels[0].artifacts[0].digest[7:])
                    )
            for use in (replica.tags, replica.stats, lambda: replica.pull("t")):
                with pytest.raises(StoreUnavailable):
                    use()
            assert oracle.contents(found) == oracle.contents(oracle.restorable(*SEEDS, each=2000))


def test_a_forked_child_makes_connections_of_its_own(far, server, tmp_path):
    """Parent and child restore over one open store, neither disturbs the other."""
    with bundler.open_store(far, peers=[server.url]) as store:
        store.restore("t", cache_dir=tmp_path / "first", only="all")
        child = os.fork()
        if not child:
            done = store.restore("t", cache_dir=tmp_path / "child", only="all")
            os._exit(0 if len(done.restored) == len(SEEDS) and not store.tiers[1].hits else 1)
        again = store.restore("t", cache_dir=tmp_path / "parent", only="all")
        assert os.waitpid(child, 0)[1] == 0
        assert len(again.restored) == len(SEEDS)
        assert store.tiers[1].hits == 0


def test_a_served_store_is_a_store(server, tmp_path):
    """`tb+http://` pulls and lists as any store, and is only read."""
    with bundler.open_store(f"tb+{server.url}") as store:
        assert store.tags()[0].name == "t"
        assert store.stats().units == 2 * len(SEEDS)
        assert store.verify().sound
        digest = store.pull("t").digest
        assert len(
            store.restore(digest[:20], cache_dir=tmp_path / "c", only="all").restored
        ) == len(SEEDS)
        with pytest.raises(BundlerError, match="reading only"):
            store.push(oracle.restorable(1), "x")


@pytest.mark.parametrize(
    "name", ["cut off", "nonsense", "redirect", "another web server", "busy", "broken"]
)
def test_a_served_store_that_is_none_is_an_error(name):
    """A command gets one typed error that names the URL, within the deadline."""
    with (
        lying(HOSTILE[name][0]) as (url, _),
        bundler.open_store(f"tb+{url}?timeout_s=0.3") as store,
    ):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"tb\+http://127.0.0.1:\d+"):
            store.pull("t")
        assert time.monotonic() - started < 2


def test_a_retry_after_is_honoured(far, server, tmp_path):
    """Who is told to come again in a second does, when there is time."""
    busy = raw("HTTP/1.1 503 Busy\nRetry-After: 0\nContent-Length: 0\n\n")
    asked = []

    def answer(handler):
        asked.append(handler.path)
        (busy if len(asked) < 3 else raw(OK.format(3), b"val"))(handler)

    with (
        lying(answer) as (url, _),
        PeerBackend(parse_served(f"tb+{url}"), proofs_only=False) as peer,
    ):
        assert peer.read_ref("v1/t/x") == b"val"
    assert len(asked) == 3


def test_a_reader_takes_no_more_than_it_asked_for(server):
    """An answer larger than the sizes that were asked for is an error, and a plain size asks no
    peer.
    """
    with PeerBackend(parse_served(f"tb+{server.url}"), proofs_only=True) as peer:
        assert peer.get_within({"v1/u/" + "0" * 64: 100}) == {}
    assert server.total("requests_total") == 0
    with lying(raw(OK.format(8 + 50), (50).to_bytes(8, "big"), b"x" * 50)) as (url, _):
        wanted = {"v1/u/" + "0" * 64: Provable(10, lambda value, _need: value)}
        with (
            PeerBackend(parse_served(f"tb+{url}"), proofs_only=True) as peer,
            pytest.raises(BackendUnavailable, match="more of"),
        ):
            peer.get_within(wanted)


class Counted(oracle.Wrapped):
    """A far store, served to a test's replicas, that counts how often each unit is read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.reads = {}

    def get_within(self, max_bytes):
        for key in max_bytes:
            self.reads[key] = self.reads.get(key, 0) + 1
        return self.inner.get_within(max_bytes)


def replica(number, far, peers, cache_dir, start, results):
    """Restore in a process of its own, as a replica that starts with all others."""
    start.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bundler.open_store(far, peers=peers) as store:
            report = store.restore("t", cache_dir=f"{cache_dir}/{number}", only="all")
            results.put((len(report.restored), store.tiers[-1].hits))


def started_from_the_first(count, tmp_path):
    """Start a replica, then `count - 1` others from it; returns how often the far store read each
    unit, and how many kernels each restored.
    """
    context = multiprocessing.get_context("fork")
    with bundler.open_store(f"file://{tmp_path}/far") as store:
        store.push(oracle.restorable(*range(10), each=2000), "t")
        counted = Counted(store._backend.inner)
        # The far store is a server that keeps nothing in memory, so that each read of it is
        # counted.
        far_server = StoreServer(counted, ANYWHERE, ServingBounds(memory_bytes=0))
        with far_server:
            far = f"tb+{far_server.url}?timeout_s=60"
            near = f"file://{tmp_path}/near"
            with bundler.open_store(near, far) as first:
                assert (
                    len(first.restore("t", cache_dir=tmp_path / "first", only="all").restored) == 10
                )
                with first.serve(ANYWHERE) as server:
                    start, results = context.Event(), context.Queue()
                    peers = [f"{server.url}?timeout_s=60"]
                    processes = [
                        context.Process(
                            target=replica, args=(number, far, peers, tmp_path, start, results)
                        )
                        for number in range(count - 1)
                    ]
                    for process in processes:
                        process.start()
                    start.set()
                    done = [results.get(timeout=100) for _ in processes]
                    for process in processes:
                        process.join()
    units = {key: reads for key, reads in counted.reads.items() if key.startswith("v1/u/")}
    assert len(units) == 20
    return units, done


@pytest.mark.parametrize(
    "count", [8, pytest.param(64, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
def test_replicas_that_start_from_the_first_spare_the_far_store(tmp_path, count):
    """Of all replicas together the far store reads each unit at most three times; here once, by the
    first.
    """
    units, done = started_from_the_first(count, tmp_path)
    assert max(units.values()) <= 3
    assert done == [(10, 0)] * (count - 1)
