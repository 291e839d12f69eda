# SPDX-License-Identifier: Apache-2.0
"""Keys of a store that hold what was never stored there: each is damage of its own, named, removed
and sent again.

The other bundles of the store stay whole all the while, and nothing takes memory or time by what
somebody else wrote.
"""

import hashlib
import re
import resource
import struct
import time
import warnings

import oracle
import pytest
import redis_server

import bundler
from bundler.backends.memory import MemoryBackend
from bundler.errors import BundlerWarning, DigestMismatch, FormatError, LimitExceeded, NotFound
from bundler.lifecycle.machine_store import Store
from bundler.store import store_layout

MIB = 1 << 20
PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}
FEW_BYTES = 150 * MIB
CASES = 20
A, B = oracle.restorable("A"), oracle.restorable("B")


@pytest.fixture(scope="module")
def shared():
    """A server that no test of these stops."""
    with redis_server.running(redis_server.NAMES[0], "--maxmemory", "0") as started:
        yield started


@pytest.fixture
def admin(shared):
    """The administrator of an empty server."""
    client = shared.client()
    client.flushall()
    yield client
    client.flushall()


@pytest.fixture
def store(shared, admin):
    """A store with the tags t, of A, and u, of B, and a record of A."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        with bundler.open_store(shared.url(), **PATIENT) as opened:
            opened.push(A, "t")
            opened.push(B, "u")
            opened.kernel_records().publish(A)
            yield opened


def a_list(admin, name):
    """Put a list in the place of a value."""
    admin.delete(name)
    admin.rpush(name, "x")


def a_hash(admin, name):
    """Put a hash in the place of a value."""
    admin.delete(name)
    admin.hset(name, "x", "y")


def huge(admin, name):
    """Put 512 MB in the place of a value."""
    admin.delete(name)
    admin.setrange(name, 512 * MIB - 1, b"x")


def a_head_of_a_gigabyte(admin, name):
    """Put a head in the place of a value, and the 1 GiB of parts that it names, which nobody has
    touched yet.
    """
    admin.set(name, b"TBs%013d%016d%s" % (60_000, 1 << 30, b"0" * 16))
    for number in range(128):
        admin.setrange(f"tb:p:{name[5:]}:{'0' * 16}:{number}", 8 * MIB + 15, b"x")


def only_a(admin, kind):
    """Return the names of what A needs and B does not, of a kind."""
    ours = {
        "u": {f"tb:o:{unit.key}" for unit in store_layout.units_of(A.content)},
        "m": {f"tb:o:{store_layout.manifest_key(A.digest, A.observed.encode())}"},
        "k": {f"tb:o:v1/k/{A.kernels[0].key}"},
        "t": {"tb:r:v1/t/t"},
    }[kind]
    assert all(map(admin.exists, ours))
    return sorted(ours)


def peak_bytes():
    """Return the most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *((a_list, kind) for kind in "umkt"),
        *((a_hash, kind) for kind in "umkt"),
        *((huge, kind) for kind in "ut"),
        (a_head_of_a_gigabyte, "u"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_one_bad_value_is_nobody_elses(store, admin, kind, change):
    """Of a unit, manifest, record or tag that is none: it is damaged, the rest of the store works,
    and a push repairs it.
    """
    (name, *_) = only_a(admin, kind)
    before, started = peak_bytes(), time.monotonic()
    change(admin, name)
    assert store.stats().tags == 2
    assert [tag.name for tag in store.tags()] == ["t", "u"]
    store.prune(dry_run=True)
    assert oracle.contents(store.pull("u")) == oracle.contents(B)
    if kind == "k":
        # The bundle of tag t has the kernel too.
        assert store.kernel_records().look_up([A.kernels[0].key]).bundle.kernels
    else:
        with pytest.raises((NotFound, FormatError, DigestMismatch)):
            oracle.contents(store.pull("t"))
    verdict = store.verify(repair=True)
    assert {key for key, _ in verdict.damaged} <= {name[5:]}
    store.push(A, "t", "replace")
    assert store.kernel_records().publish(A).bundle.kernels == A.kernels
    assert store.verify().sound
    assert oracle.contents(store.pull("t")) == oracle.contents(A)
    assert oracle.contents(store.pull("u")) == oracle.contents(B)
    assert time.monotonic() - started < 15
    assert peak_bytes() - before < FEW_BYTES


@pytest.mark.parametrize("change", [a_list, huge], ids=lambda f: f.__name__)
def test_a_push_replaces_what_is_in_its_way(store, admin, change):
    """Without verify, and without anybody having read it: what no value of ours can be counts as
    missing.
    """
    for kind in "um":
        change(admin, only_a(admin, kind)[0])
        store.push(A, "t")
        assert oracle.contents(store.pull("t")) == oracle.contents(A)


def test_verify_tells_and_removes(store, admin):
    """What is none of ours is damaged, by its key, and `repair` removes it, whatever it is."""
    units = only_a(admin, "u")
    a_list(admin, units[0])
    huge(admin, units[1])
    (tier,) = store._backend.inner._tiers
    backend = Store(tier.backend, "redis")
    (record,) = only_a(admin, "k")
    for repair in (False, True):
        verdict = backend.verify(repair=repair)
        assert {key for key, _ in verdict.damaged} == {name[5:] for name in units}
        # The record lost its units, and goes with them.
        assert set(verdict.removed) == (
            {name[5:] for name in [*units, record]} if repair else set()
        )
    assert admin.exists(*units) == 0


STRANGE = [
    "v1/d/zz",
    "v1/d",
    f"v1/d/{'A' * 64}",
    f"v1/d/{'0' * 63}",
    "v1/d/x/y",
    "v1/m",
    "v1/m/x",
    f"v1/m/{'0' * 64}",
    f"v1/m/{'0' * 64}/x",
    "v1/u",
    "v1/u/zz",
    "v1/k",
    "v1/k/x",
    f"v1/k/{'a' * 64}/x",
    "v1/s",
    "v1/s/x",
]


@pytest.mark.parametrize("key", STRANGE)
def test_a_strange_key_is_damage_or_nothing(key):
    """A key that nobody of ours made, with a value that is sealed right, ends no verify, prune or
    listing.
    """
    store = Store(MemoryBackend(), "memory")
    store.push(A, "t")
    store.kernel_records().publish(A)
    for payload in (
        b"",
        b"x" * 100,
        oracle.packed([1, b"x", b"y"]),
        oracle.packed([1, "a", "b", b"c"]),
    ):
        oracle.overwrite(store, key, oracle.sealed(payload))
        assert store.verify().damaged == tuple(sorted(store.verify(repair=True).damaged))
        store.stats()
        store.prune(dry_run=True)
        list(store.kernel_records().recorded(10))
        assert [tag.problem for tag in store.tags()] == [None]
    assert oracle.contents(store.pull("t")) == oracle.contents(A)


def test_strange_tags_are_told(store, admin):
    """Tags whose names or values nobody of ours made are listed with what is wrong, and can be
    deleted.
    """
    for number, value in enumerate(
        [b"", b"\xc1", b"x" * 1000, oracle.packed([1, "v1/m"]), oracle.packed([1, "v1/u/x"])]
    ):
        admin.set(f"tb:r:v1/t/strange{number}", value)
    a_list(admin, "tb:r:v1/t/list")
    problems = {tag.name: tag.problem for tag in store.tags()}
    assert {name for name, problem in problems.items() if problem is None} == {"t", "u"}
    assert len(problems) == 8
    assert store.prune().unfollowed
    for name, problem in problems.items():
        if problem is not None:
            assert store.delete_tag(name)
    assert [tag.name for tag in store.tags()] == ["t", "u"]


def test_a_tag_of_ten_megabytes_costs_nothing(store, admin):
    """It is refused by its size, before it is decoded; then it is replaced, or deleted."""
    arrays = b"\x93\x01\xa1x\xdd" + struct.pack(">I", 1_000_000) + b"\x90" * 10_000_000
    before, started = peak_bytes(), time.monotonic()
    admin.set("tb:r:v1/t/t", arrays)
    with pytest.raises(FormatError, match="tag t cannot be read"):
        store.pull("t")
    assert "at most" in {tag.name: tag.problem for tag in store.tags()}["t"]
    store.push(A, "t", "replace")
    assert oracle.contents(store.pull("t")) == oracle.contents(A)
    admin.set("tb:r:v1/t/t", arrays)
    assert store.delete_tag("t")
    assert time.monotonic() - started < 5
    assert peak_bytes() - before < FEW_BYTES


def test_the_value_of_a_tag_is_bounded_in_any_store():
    """Also where the byte store gives all of it: decoding starts only when it is small enough."""
    arrays = b"\x93\x01\xa1x\xdd" + struct.pack(">I", 1_000_000) + b"\x90" * 10_000_000
    with pytest.raises(FormatError, match="10000009 bytes or more, expected 131072 at most"):
        store_layout.decode_tag(arrays, "t")
    assert store_layout.hints_of(arrays) == ()
    with pytest.raises(LimitExceeded):
        store_layout.unpack_ref(arrays, "a failure")


@pytest.mark.parametrize("size", [MIB + 1, 16 * MIB])
def test_a_dictionary_that_declares_too_much_is_damaged(size):
    """It is refused by what its frame declares, before it is decoded, and removed: no limit of ours
    would let it pass.
    """
    store = Store(MemoryBackend(), "memory")
    key = f"v1/d/{hashlib.sha256(bytes(size)).hexdigest()}"
    oracle.overwrite(store, key, oracle.sealed(bytes(size)))
    verdict = store.verify(repair=True)
    assert verdict.damaged == ((key, f"{key}: declares {size} bytes, expected {MIB} at most"),)
    assert verdict.removed == (key,)


@pytest.mark.slow
def test_random_hostile_values_keep_every_promise(run_tool, tmp_path):
    """The fuzzer changes keys of a real server in all these ways, does what users do, and finds no
    promise broken.
    """
    done = run_tool("fuzz redis", "--count", CASES, "--seed", 5, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = {
        name: int(count)
        for name, count in re.findall(r"^(\w+) +(\d+) +[\d.]+%$", done.stdout, re.M)
    }
    assert sum(outcomes.values()) == CASES
    assert 0 < outcomes["accepted"] < CASES
    assert list(tmp_path.iterdir()) == []
