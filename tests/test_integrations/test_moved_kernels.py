# SPDX-License-Identifier: Apache-2.0
"""A comment above a kernel, or above a function that it calls: who asks for it gets the kernel that
was recorded, without a compile.
"""

import hashlib
import json

import msgpack
import plugged
import pytest
import zstandard

import bundler

pytest.importorskip("triton")
pytestmark = pytest.mark.toolchain

_SOURCE = """\
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FACTOR = tl.constexpr(3)

@triton.jit
def shift(X, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(X + at, scaled(tl.load(X + at, at < N)) + 1, at < N)

@triton.jit
def scaled(x):
    return x * FACTOR

@triton.jit
def guarded(X):
    value = tl.load(X)
    tl.device_assert(value > 0, "positive")
    tl.store(X, value)

CASES = {
    "shift": (shift, {"X": "*fp32", "N": "i32", "BLOCK": "constexpr"}, {"BLOCK": 64}, {}),
    "guarded": (guarded, {"X": "*fp32"}, {}, {"debug": True}),
}

def compile_one(name, _target):
    fn, signature, constants, options = CASES[name]
    source = ASTSource(fn, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""
_ABOVE_KERNEL = ("@triton.jit\ndef shift", "# why\n\n@triton.jit\ndef shift")
_ABOVE_HELPER = ("@triton.jit\ndef scaled", "# what\n@triton.jit\ndef scaled")
_RECORD = """
import bundler
with bundler.recording() as recording:
    for name in sys.argv[3:]:
        compile_one(name)
with recording.collect() as bundle:
    bundle.save(sys.argv[2])
say(heard)
"""
# Says the compiles that Triton's own listener heard, then what the kernel is.
_RUN = """
made = kernels.compile_one(sys.argv[2], "cuda:90")
cubin = made.asm["cubin"].hex()
said = made.metadata._asdict()
say([[hit for _, hit in heard], cubin, said.get("bundler_moved_from"), made.hash])
"""


def source(folder, *edits, name="kernels.py"):
    """Write the kernels with edits, and return the file."""
    text = _SOURCE
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The path of a bundle of both kernels, as another process compiled them."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "lib.tbundle"
    env = plugged.environment(None, folder / "cache", TRITON_CACHE_MANAGER=None)
    plugged.run(_RECORD, env, path, "shift", "guarded", kernels=source(folder))
    return path


def original(path, name="shift"):
    """Return the recorded kernel of this name, and its device binary."""
    with bundler.Bundle.load(path) as bundle:
        (kernel,) = (one for one in bundle.kernels if one.name == name)
        return kernel, bundle.read(kernel.binary)


def ask(folder, url, kernels, name="shift", *, code=_RUN, cache="cache", **more):
    """Ask for a kernel in a new process; returns whether it was a hit, its cubin, its mark and its
    hash, the report, and what was warned.
    """
    report = folder / "report.json"
    more = {
        "TRITON_BUNDLER_MOVED": "1",
        "TRITON_BUNDLER_REPORT": report,
        "TRITON_BUNDLER_LOCAL": folder / "local",
        **more,
    }
    env = plugged.environment(url, folder / cache, **more)
    said, err = plugged.run(code, env, name, kernels=kernels)
    return said, json.loads(report.read_text()), err


@pytest.mark.parametrize("tag", [None, "lib"], ids=["by-key", "by-tag"])
@pytest.mark.parametrize(
    "edits",
    [[_ABOVE_KERNEL], [_ABOVE_HELPER], [_ABOVE_HELPER, _ABOVE_KERNEL]],
    ids=["kernel", "helper", "both"],
)
def test_a_comment_above_a_kernel_or_its_helper_compiles_nothing(
    recorded, store_url, tmp_path, edits, tag
):
    """By Triton's own listener; same binary, the mark names the recorded key, counters and report
    say so, and nothing is published.
    """
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
        before = {kernel.key for kernel in store.pull("lib").kernels}
    kernel, cubin = original(recorded)
    env, tried = plugged.refusing(tmp_path / "refusing")
    said, report, _ = ask(
        tmp_path, store_url, source(tmp_path, *edits), TRITON_BUNDLER_TAG=tag, **env
    )
    hits, binary, mark, moved_hash = said
    assert (hits, mark, bytes.fromhex(binary)) == ([True], kernel.key, cubin)
    assert not tried.exists()
    (placed,) = report["moved_from"]
    assert (report["moved"], report["moved_from"][placed]) == (1, kernel.key)
    assert (report["compiles"], report["misses"], report["published"]) == (0, 0, 0)
    assert sum(report["found"].values()) == report["hits"] == 1
    assert placed != kernel.key
    metadata = json.loads((tmp_path / "cache" / placed / "shift.json").read_text())
    assert (metadata["hash"], metadata["bundler_moved_from"]) == (moved_hash, kernel.key)
    with bundler.open_store(store_url) as store:
        assert {kernel.key for kernel in store.pull("lib").kernels} == before
        assert store.kernel_records().look_up([placed]).missing == (placed,)


def test_nobody_gets_a_moved_kernel_who_did_not_ask(recorded, store_url, tmp_path):
    """The kernel is compiled, as Triton's key says."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    said, report, _ = ask(
        tmp_path, store_url, source(tmp_path, _ABOVE_KERNEL), TRITON_BUNDLER_MOVED=None
    )
    assert (said[0], said[2], report["moved"]) == ([False], None, 0)


@pytest.mark.parametrize(
    "change",
    [
        ("scaled(tl.load(X + at, at < N)) + 1", "scaled(tl.load(X + at, at < N)) + 2"),
        ("return x * FACTOR", "return x * FACTOR + 1"),
        ("FACTOR = tl.constexpr(3)", "FACTOR = tl.constexpr(4)"),
        ('{"BLOCK": 64}', '{"BLOCK": 128}'),
        ('"N": "i32"', '"N": "i64"'),
        ('{"BLOCK": 64}, {}', '{"BLOCK": 64}, {"num_warps": 8}'),
    ],
    ids=["kernel", "helper", "global", "constant", "signature", "option"],
)
def test_a_change_of_code_misses(recorded, store_url, tmp_path, change):
    """Also where the kernel moved too."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    said, report, _ = ask(
        tmp_path,
        store_url,
        source(tmp_path, change, _ABOVE_KERNEL, _ABOVE_HELPER),
        TRITON_BUNDLER_TAG="lib",
    )
    assert (said[0], said[2], report["moved"]) == ([False], None, 0)


def test_a_kernel_with_device_asserts_that_tell_lines_is_compiled(recorded, store_url, tmp_path):
    """What such a kernel prints would name the old line."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    said, _, _ = ask(tmp_path, store_url, source(tmp_path, _ABOVE_HELPER), "guarded")
    assert (said[0], said[2]) == ([False], None)


def test_a_kernel_that_a_session_published_is_found_once_it_moved(any_store_url, tmp_path):
    """By its record, in a store of each kind; a third place finds it too, though the second
    published nothing.
    """
    first, _, _ = ask(tmp_path, any_store_url, source(tmp_path), cache="a")
    second, _, _ = ask(
        tmp_path, any_store_url, source(tmp_path, _ABOVE_KERNEL, name="b.py"), cache="b"
    )
    third, _, _ = ask(
        tmp_path, any_store_url, source(tmp_path, _ABOVE_HELPER, name="c.py"), cache="c"
    )
    assert (first[0], second[0], third[0]) == ([False], [True], [True])
    assert first[1] == second[1] == third[1]
    assert second[2] == third[2] is not None


def test_a_store_keeps_what_moved_kernels_are_found_by(recorded, store_url, tmp_path):
    """Verified, mirrored, pruned with its kernels, and made again where it is lost; one that leads
    nowhere is removed.
    """
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
        many = len(bundle.kernels)
        assert len(entries(tmp_path / "store")) == many
        with bundler.open_store(f"{store_url}-2") as mirror:
            store.sync_to(mirror)
        assert len(entries(tmp_path / "store-2")) == many
        for path in entries(tmp_path / "store"):
            path.unlink()
        store.verify(repair=True)
        assert len(entries(tmp_path / "store")) == many
        store.prune(grace_s=0)
        assert len(entries(tmp_path / "store")) == many
        (damaged, *_) = entries(tmp_path / "store")
        damaged.write_bytes(b"damaged")
        assert [key[:5] for key, _ in store.verify(repair=True).damaged] == ["v1/l/"]
        assert len(entries(tmp_path / "store")) == many
        store.delete_tag("lib")
        store.prune(grace_s=0)
        assert entries(tmp_path / "store") == []


def entries(root):
    """Return the files in which a store says where kernels are that moved."""
    return sorted(path for path in (root / "data" / "v1" / "l").rglob("*") if path.is_file())


def test_an_entry_that_leads_to_another_kernel_is_no_hit(recorded, store_url, tmp_path):
    """Whatever a store says, the kernel is proven by Triton's own hash of its source at the
    recorded lines.
    """
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    guarded, _ = original(recorded, "guarded")
    payload = zstandard.compress(msgpack.packb([1, guarded.key]))
    for path in entries(tmp_path / "store"):
        value = path.read_bytes()
        path.write_bytes(
            value[:4] + hashlib.sha256(msgpack.packb([1, guarded.key])).digest() + payload
        )
    said, report, _ = ask(tmp_path, store_url, source(tmp_path, _ABOVE_KERNEL))
    assert (said[0], report["errors"]) == ([False], {})


_COLLECT = """
import bundler
with bundler.recording() as recording:
    made = kernels.compile_one(sys.argv[2], "cuda:90")
bundle = recording.collect()
packed = bundler.pack(os.environ["TRITON_CACHE_DIR"])
say([[hit for _, hit in heard], len(bundle.kernels), [why for _, why in bundle.left_out],
     len(packed.kernels), [why for _, why in packed.left_out]])
"""


def test_a_moved_kernel_is_neither_recorded_nor_packed(recorded, store_url, tmp_path):
    """Both say why; a restore of the real one replaces it."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    moved = source(tmp_path, _ABOVE_KERNEL)
    (hits, kernels, left_out, packed, not_packed), _, _ = ask(
        tmp_path, store_url, moved, code=_COLLECT
    )
    assert (hits, kernels, packed) == ([True], 0, 0)
    assert all("only moved" in why for why in (*left_out, *not_packed))
    assert len(left_out) == len(not_packed) == 1
    fresh = tmp_path / "fresh.tbundle"
    env = plugged.environment(None, tmp_path / "own", TRITON_CACHE_MANAGER=None)
    plugged.run(_RECORD, env, fresh, "shift", kernels=moved)
    report = bundler.restore(fresh, tmp_path / "cache", only="all")
    assert len(report.repaired) == 1


_RESTORE = """
import bundler
report = bundler.restore(sys.argv[3], moved=True, only="all")
made = kernels.compile_one(sys.argv[2], "cuda:90")
say([[hit for _, hit in heard], report.moved, len(report.restored)])
"""


def test_a_restore_places_kernels_of_functions_that_moved(recorded, tmp_path):
    """For functions that are there already; with the recorded ones, which other checkouts may ask
    for.
    """
    kernel, _ = original(recorded)
    env = plugged.environment(None, tmp_path / "cache", TRITON_CACHE_MANAGER=None)
    moved = source(tmp_path, _ABOVE_HELPER)
    (hits, told, restored), _ = plugged.run(_RESTORE, env, "shift", recorded, kernels=moved)
    assert (hits, [origin for _, origin in told], restored) == ([True], [kernel.key], 3)
    (hits, told, _), _ = plugged.run(
        _RESTORE, env, "shift", recorded, kernels=source(tmp_path, name="same.py")
    )
    assert (hits, told) == ([True], [])


_EXPLAIN = """
kernels.compile_one(sys.argv[2], "cuda:90")
import bundler
say([one.sentence for one in bundler.explain(last=True)])
"""


def test_explain_says_that_only_a_helper_moved(recorded, store_url, tmp_path):
    """And not that a function changed."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    told, _, _ = ask(
        tmp_path,
        store_url,
        source(tmp_path, _ABOVE_HELPER),
        code=_EXPLAIN,
        TRITON_BUNDLER_MOVED=None,
        TRITON_BUNDLER_MODE="read",
    )
    assert len(told) == 1
    assert "only line numbers: of a function that it calls" in told[0]


_MISS = """
import bundler
with bundler.open_store(sys.argv[3]) as store:
    trips, real = [], store._backend.inner.get_within
    store._backend.inner.get_within = lambda asked: trips.append(list(asked)) or real(asked)
    with bundler.session(store, push=None, moved=sys.argv[4] == "1") as session:
        kernels.compile_one(sys.argv[2], "cuda:90")
say([len(trips), session.counters.misses])
"""


def test_a_miss_costs_one_look_up_more(recorded, store_url, tmp_path):
    """Where no kernel is like the one that is asked for."""
    with bundler.Bundle.load(recorded) as bundle, bundler.open_store(store_url) as store:
        store.push(bundle, "lib")
    other = source(tmp_path, ("+ 1, at < N)", "+ 7, at < N)"))
    trips = {}
    for moved in "01":
        env = plugged.environment(
            None,
            tmp_path / f"cache-{moved}",
            TRITON_CACHE_MANAGER=None,
            TRITON_BUNDLER_LOCAL=tmp_path / "local",
        )
        said, _ = plugged.run(_MISS, env, "shift", store_url, moved, kernels=other)
        trips[moved], misses = said
        assert misses == 1
    assert trips["1"] == trips["0"] + 1
