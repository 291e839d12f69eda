# SPDX-License-Identifier: Apache-2.0
"""What is pushed comes back, is sent once, and is named last."""

import oracle
import pytest
import store_builders as build

import bundler
from bundler.errors import (
    ConfigError,
    EmptyBundle,
    FormatError,
    MergeConflict,
    NotFound,
    UnsupportedVersion,
)
from bundler.format import manifest
from bundler.format.manifest import Observation, Observed
from bundler.store import store_layout


def test_a_bundle_comes_back_as_it_was(store):
    """Entries of every kind, observations and digest are the same after push and pull, by tag and
    by digest.
    """
    bundle = build.several()
    report = store.push(bundle, "t")
    for name in ("t", bundle.digest):
        with store.pull(name) as pulled:
            assert oracle.contents(pulled) == oracle.contents(bundle)
            assert (pulled.digest, pulled.content, pulled.observed) == (
                bundle.digest,
                bundle.content,
                bundle.observed,
            )
            pulled.verify()
            assert pulled.to_bytes() == bundle.to_bytes()
    assert (report.digest, report.tag_before, report.tag_after) == (
        bundle.digest,
        None,
        bundle.digest,
    )
    assert not bundler.diff(bundle, pulled)


def test_kernels_that_triton_compiled_come_back(local, real):
    """A recorded bundle is the same bundle after the store, to the byte."""
    local.push(real, "t")
    with local.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(real)
        assert pulled.to_bytes() == real.to_bytes()
    assert local.verify().sound


def test_real_caches_come_back(local, real_cache):
    """What a compiler and a model left behind comes back whole, helper libraries and pickles
    included.
    """
    with bundler.pack(real_cache) as bundle:
        local.push(bundle, "real/cache")
        with local.pull("real/cache") as pulled:
            assert oracle.contents(pulled) == oracle.contents(bundle)
            assert pulled.digest == bundle.digest
    assert local.verify().sound
    assert local.stats().unit_bytes < sum(size for _, size in bundle.content.blobs) / 2


def test_an_empty_bundle_can_be_stored(store):
    """Nothing is something that can be named, by who says that it is meant."""
    bundle = oracle.bundle()
    with pytest.raises(EmptyBundle, match="nothing was pushed"):
        store.push(bundle, "t")
    assert store.tags() == ()
    assert store.push(bundle, "t", allow_empty=True).blobs_sent == 0
    assert store.pull("t").digest == bundle.digest
    assert store.verify().sound


def test_without_a_tag_a_bundle_is_found_by_its_digest(store):
    """A push without a tag names nothing."""
    report = store.push(oracle.bundle("A"))
    assert (store.tags(), report.tag_before, report.tag_after) == ((), None, None)
    assert oracle.kernels(store.pull(report.digest)) == oracle.keys("A")


def test_a_second_push_sends_nothing(store):
    """What is there is not sent again, nor compressed, nor named again."""
    bundle = build.several()
    first = store.push(bundle, "t")
    before = oracle.raw(store)
    noting = oracle.wrapped(store, oracle.Noting)
    second = noting.push(bundle, "t")
    assert noting._backend.inner.named("put", "swap_ref") == []
    assert (second.blobs_sent, second.bytes_sent, second.repaired) == (0, 0, 0)
    assert second.blobs_present == first.blobs_sent > 0
    assert oracle.raw(store) == before


def test_a_second_push_decodes_nothing(store, monkeypatch):
    """A tag that names the same content already says what to look for; what it observed besides is
    kept.
    """
    bundle = build.several()
    seen = Observed({bundle.kernels[0].key: Observation(devices=(5,))})
    store.push(bundler.Bundle(bundle.content, seen, bundle.blobs), "t")
    monkeypatch.setattr(manifest.Content, "decode", None)
    for _ in range(2):
        report = store.push(bundle, "t")
        assert (report.blobs_sent, report.tag_before, report.tag_after) == (
            0,
            bundle.digest,
            bundle.digest,
        )
    monkeypatch.undo()
    assert store.pull("t").observed.kernels[bundle.kernels[0].key].devices == (5,)
    assert store.verify().sound


def test_a_second_push_mends_what_was_lost(store):
    """A unit or the manifest that somebody removed is sent again, though the tag names the same
    content.
    """
    bundle = build.several()
    store.push(bundle, "t")
    for kind in "um":
        store._backend.delete([oracle.of_kind(store, kind)[0]])
        assert not store.verify().sound
        report = store.push(bundle, "t")
        assert report.bytes_sent > 0
        assert report.blobs_sent == (kind == "u")
        assert store.verify().sound


def test_bundles_that_overlap_share_units(store):
    """Only what another bundle has not brought is sent."""
    one, two = oracle.bundle("A", "B"), oracle.bundle("B", "C")
    assert store.push(one, "one").blobs_sent == 4  # two kernels: launch set and the rest of each
    report = store.push(two, "two")
    assert (report.blobs_sent, report.blobs_present) == (2, 2)
    assert len(oracle.of_kind(store, "u")) == 6
    assert [oracle.kernels(store.pull(tag)) for tag in ("one", "two")] == [
        oracle.keys("A", "B"),
        oracle.keys("B", "C"),
    ]


def test_what_was_sent_is_counted_in_stored_bytes(store):
    """The report counts what is in the store now, the manifest included."""
    report = store.push(build.several(), "t")
    assert report.bytes_sent == sum(map(len, oracle.raw(store).values()))
    assert report.blobs_sent == len(oracle.of_kind(store, "u"))
    assert report.seconds >= 0


def test_the_launch_set_is_a_unit_of_its_own(store):
    """Who needs only what a launch needs does not fetch the rest."""
    store.push(oracle.bundle("A", "B"), "t")
    noting = oracle.wrapped(store, oracle.Noting)
    with noting.pull("t") as pulled:
        kernel = pulled.kernels[0]
        assert [len(keys) for keys in noting._backend.inner.named("get")] == [1]
        pulled.read(kernel.binary)
        pulled.read(kernel.metadata)
        assert noting._backend.inner.named("get")[1:] == [[oracle.unit_of(store, pulled)]]
        pulled.read(kernel.artifact("k.ttir"))
        assert noting._backend.inner.named("get")[2:] == [
            [oracle.unit_of(store, pulled, kind="ttir")]
        ]


def test_prefetching_takes_few_round_trips(store, monkeypatch):
    """A hundred kernels are fetched in one call, and in several where one would be too large."""
    bundle = oracle.bundle(*range(100))
    store.push(bundle, "t")
    digests = [bytes.fromhex(a.digest[7:]) for kernel in bundle.kernels for a in kernel.artifacts]
    for limit, calls in ((store_layout.BATCH_KEYS, 1), (64, 4)):
        monkeypatch.setattr("bundler.store.blob_source.BATCH_KEYS", limit)
        noting = oracle.wrapped(store, oracle.Noting)
        with noting.pull("t") as pulled:
            pulled.blobs.prefetch(digests)
            assert [len(keys) for keys in noting._backend.inner.named("get")[1:]] == [
                min(limit, 200)
            ] * (calls - 1) + [200 - (calls - 1) * limit]
            assert oracle.contents(pulled) == oracle.contents(bundle)
            pulled.blobs.prefetch(digests)
            assert len(noting._backend.inner.named("get")) == calls + 1


def test_batches_stay_small_when_units_are_large(memory, monkeypatch):
    """One call carries about as many bytes as it may, and at least one unit."""
    monkeypatch.setattr("bundler.store.store_layout.BATCH_BYTES", 10_000)
    noting = oracle.wrapped(memory, oracle.Noting)
    noting.push(oracle.bundle(*range(10), extra={"k.llir": build.noise("x", 30_000)}), "t")
    assert all(len(items) <= 20 for items in noting._backend.inner.named("put"))
    assert len(noting._backend.inner.named("put")) >= 10


def test_what_was_decoded_is_forgotten_beyond_a_bound(store, monkeypatch):
    """A pulled bundle keeps the last units in memory, not all."""
    monkeypatch.setattr("bundler.store.blob_source.CACHED_BYTES", 1000)
    bundle = oracle.bundle(*range(30))
    store.push(bundle, "t")
    with store.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(bundle)
        assert sum(map(len, pulled.blobs._cache.values())) <= 1000
    assert pulled.blobs._cache == {}


def test_blobs_that_kernels_share_are_read_from_either(store):
    """A file that two kernels have in common is found as long as one of their units is there."""
    files = build.Files()
    both = {"shared.llir": b"the same text" * 99}
    bundle = files.bundle(*(files.kernel(seed, source=seed, extra=both) for seed in "AB"))
    store.push(bundle, "t")
    oracle.drop(store, oracle.unit_of(store, bundle, 0, "llir"))
    with store.pull("t") as pulled:
        assert pulled.read(pulled.kernels[0].artifact("shared.llir")) == both["shared.llir"]
        with pytest.raises(NotFound, match="is missing; push the bundle again"):
            pulled.read(pulled.kernels[0].artifact("k.ttir"))
    noting = oracle.wrapped(store, oracle.Noting)
    with noting.pull("t") as pulled:
        pulled.blobs.prefetch([bytes.fromhex(a.digest[7:]) for a in pulled.kernels[1].artifacts])
        assert set(noting._backend.inner.named("get")[1]) == {
            oracle.unit_of(store, bundle, 1, k) for k in ("cubin", "llir")
        }


def test_a_blob_of_another_bundle_is_not_found(store):
    """A pulled bundle reads its own content only."""
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("A"), "small")
    with store.pull("small") as pulled, pytest.raises(NotFound, match="in this bundle"):
        pulled.read(oracle.bundle("B").kernels[0].binary)


# -------------------------------------------------------------------------------------------- Modes


def test_merge_makes_the_tag_name_the_union(store):
    """Pushes to one tag add up, in any order, and the report says what the tag named."""
    one = store.push(oracle.bundle("A"), "t")
    two = store.push(oracle.bundle("B"), "t")
    store.push(oracle.bundle("B"), "u")
    store.push(oracle.bundle("A"), "u")
    assert oracle.contents(store.pull("t")) == oracle.contents(oracle.bundle("A", "B"))
    assert store.pull("t").digest == store.pull("u").digest == two.digest == two.tag_after
    assert two.tag_before == one.digest
    assert store.push(oracle.bundle("A"), "t").tag_after == two.digest


def test_merge_counts_the_variants_that_it_drops(store):
    """Another build of the same kernel is left out, and counted."""
    store.push(oracle.bundle("A", source="here"), "t")
    report = store.push(oracle.bundle("A", source="there"), "t")
    assert report.variants_dropped == 1
    assert oracle.kernels(store.pull("t")) == oracle.keys("A")
    assert store.verify().sound


def test_merge_keeps_what_was_observed(store):
    """Devices of both recordings are known afterwards."""
    for device in (0, 3):
        bundle = oracle.bundle("A")
        seen = Observed({build.key("A"): Observation(devices=(device,))})
        store.push(bundler.Bundle(bundle.content, seen, bundle.blobs), "t")
    assert store.pull("t").observed.devices == (0, 3)
    assert len(oracle.of_kind(store, "m")) == 2


def test_replace_makes_the_tag_name_this(store):
    """What the tag named before is no longer named, and still there."""
    before = store.push(oracle.bundle("A"), "t")
    report = store.push(oracle.bundle("B"), "t", mode="replace")
    assert oracle.kernels(store.pull("t")) == oracle.keys("B")
    assert (report.tag_before, report.tag_after) == (before.digest, report.digest)
    assert oracle.kernels(store.pull(before.digest)) == oracle.keys("A")


def test_create_refuses_a_tag_that_names_something_else(store):
    """A tag that is set stays; naming the same again is fine."""
    store.push(oracle.bundle("A"), "t", mode="create")
    assert store.push(oracle.bundle("A"), "t", mode="create").blobs_sent == 0
    with pytest.raises(MergeConflict, match="tag t is set already; use mode='merge' or 'replace'"):
        store.push(oracle.bundle("B"), "t", mode="create")
    assert oracle.kernels(store.pull("t")) == oracle.keys("A")


def test_kernels_that_contradict_each_other_are_not_merged(store):
    """One key for two kernels is a conflict; the tag stays, and replace decides."""
    store.push(oracle.bundle("A"), "t")
    other = oracle.bundle("A", name="other")
    with pytest.raises(MergeConflict):
        store.push(other, "t")
    assert store.pull("t").digest == oracle.bundle("A").digest
    assert store.push(other, "t", mode="replace").tag_after == other.digest


@pytest.mark.parametrize("mode", ["", "Merge", "append", None])
def test_other_modes_are_refused(memory, mode):
    """A misspelled mode does nothing."""
    with pytest.raises(ConfigError, match="expected 'merge', 'replace', 'create'"):
        memory.push(oracle.bundle("A"), "t", mode=mode)
    assert oracle.raw(memory) == {}


@pytest.mark.parametrize("mode", ["merge", "replace", "create"])
def test_what_a_newer_version_wrote_is_not_stored(memory, mode):
    """A bundle with features that would be lost is refused, before anything is sent."""
    with (
        oracle.newer() as bundle,
        pytest.raises(UnsupportedVersion, match="upgrade triton-bundler"),
    ):
        memory.push(bundle, "t", mode=mode)
    assert (oracle.raw(memory), memory.tags()) == ({}, ())


# --------------------------------------------------------------------------------------------- Tags

TAGS = ("t", "T", "_", "0", "llama3/h200", "a/b/c/d", "a", "a/b", "x" * 100, "v1.0-rc_2", "v1/t/t")
NOT_TAGS = (
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    "a/b/c/d/e",
    ".",
    "..",
    "a/../b",
    ".hidden",
    "-a",
    "a b",
    "a\n",
    "é",
    "a:b",
    "a@b",
    "x" * 101,
    "+gen",
)


def test_tags_of_the_grammar_are_different(store):
    """Every valid tag names its own bundle, and all are listed."""
    for number, tag in enumerate(TAGS):
        store.push(oracle.bundle(number), tag)
    assert {tag: oracle.kernels(store.pull(tag)) for tag in TAGS} == {
        t: oracle.keys(n) for n, t in enumerate(TAGS)
    }
    assert [info.name for info in store.tags()] == sorted(TAGS)
    assert {info.name: info.digest for info in store.tags()} == {
        t: oracle.bundle(n).digest for n, t in enumerate(TAGS)
    }


@pytest.mark.parametrize("tag", NOT_TAGS)
def test_other_tags_are_refused(memory, tag):
    """What is not a tag is a ConfigError that says the grammar, for every call that takes one."""
    for call in (
        lambda: memory.push(oracle.bundle("A"), tag),
        lambda: memory.pull(tag),
        lambda: memory.delete_tag(tag),
        lambda: memory.restore(tag),
        lambda: memory.restore(tag, missing_ok=True),
    ):
        with pytest.raises(ConfigError, match=r"not a tag.*such as llama3/h200"):
            call()
    assert oracle.raw(memory) == {}


@pytest.mark.parametrize(
    "digest", ["sha256:", "sha256:xyz", "sha256:" + "A" * 64, "sha256:" + "0" * 63]
)
def test_what_looks_like_a_digest_and_is_none_is_refused(store, digest):
    """Pulling by a mistyped digest says so."""
    with pytest.raises(ConfigError, match="not a digest"):
        store.pull(digest)


def test_a_bundle_is_found_by_how_its_digest_begins(store):
    """Eight digits and more are enough, with `sha256:` or without; a tag of that name wins."""
    digest = store.push(oracle.bundle("A")).digest
    other = store.push(oracle.bundle("B"), "b").digest
    begin = digest.removeprefix("sha256:")
    for name in (
        begin[:8],
        begin[:20],
        begin[:63],
        begin,
        f"sha256:{begin[:8]}",
        f"sha256:{begin[:63]}",
        digest,
    ):
        with store.pull(name) as bundle:
            assert bundle.digest == digest
    store.push(oracle.bundle("B"), begin[:8])
    with store.pull(begin[:8]) as bundle:
        assert bundle.digest == other


def test_a_beginning_of_no_digest_or_of_several(store):
    """Too few digits are a ConfigError, as are those of two bundles, which it names; of no bundle
    they are NotFound.
    """
    digest = store.push(oracle.bundle("A")).digest
    for name in ("sha256:0123456", "sha256:0"):
        with pytest.raises(ConfigError, match="expected 8 digits of a digest or more"):
            store.pull(name)
    for name in ("sha256:01234567", "01234567"):
        with pytest.raises(NotFound, match="01234567"):
            store.pull(name)
    assert store.restore("01234567", missing_ok=True).restored == ()
    begin = digest.removeprefix("sha256:")[:8]
    twins = sorted([digest, f"sha256:{begin}{'f' * 56}"])
    store._backend.put({f"{store_layout.manifests_of(twins[1])}/{'0' * 16}": b"never read"})
    with pytest.raises(
        ConfigError, match=f"begins 2 digests: {twins[0]}, {twins[1]}; give more digits"
    ) as caught:
        store.pull(begin)
    assert caught.value.candidates == tuple(twins)


def test_a_tag_that_is_called_almost_so_is_offered(store):
    """For an unknown tag those with a like name are suggested, in a pull and as a fact; for one
    like no other, none.
    """
    for tag in ("llama3/h200", "llama3/h100", "gemma"):
        store.push(oracle.bundle("A"), tag)
    with pytest.raises(
        NotFound, match=r"no tag 'lama3/h200'; did you mean 'llama3/h200' or 'llama3/h100'\?"
    ) as caught:
        store.pull("lama3/h200")
    assert (caught.value.tag, caught.value.near) == ("lama3/h200", ("llama3/h200", "llama3/h100"))
    assert (store.near_tags("gemma"), store.near_tags("qwen")) == (("gemma",), ())
    with pytest.raises(NotFound, match=r"no tag 'qwen'; `triton-bundler tags` lists them"):
        store.pull("qwen")


def test_what_is_not_there_is_not_found(store):
    """An unknown tag or digest is NotFound, which is a KeyError, and names it."""
    for name in ("t", "sha256:" + "0" * 64):
        with pytest.raises(NotFound, match=name) as caught:
            store.pull(name)
        assert isinstance(caught.value, KeyError)


def test_tags_are_deleted_once(store):
    """A deleted tag names nothing; its bundle stays until it is pruned, and the tag can be set
    again.
    """
    digest = store.push(oracle.bundle("A"), "t").digest
    assert [store.delete_tag("t"), store.delete_tag("t"), store.delete_tag("absent")] == [
        True,
        False,
        False,
    ]
    assert store.tags() == ()
    with pytest.raises(NotFound):
        store.pull("t")
    assert store.pull(digest).digest == digest
    assert store.push(oracle.bundle("A"), "t", mode="create").blobs_sent == 0


def test_tags_say_what_is_in_them(store):
    """The list of tags has kernels, targets and sizes of each bundle."""
    bundle = build.several()
    store.push(bundle, "t")
    (info,) = store.tags()
    size = sum(size for _, size in bundle.content.blobs)
    assert (info.name, info.digest, info.kernels) == ("t", bundle.digest, 3)
    assert (info.targets, info.size_bytes, info.problem) == (("cuda:90", "hip:gfx942"), size, None)


def test_stats_count_what_is_stored(store):
    """Objects, bytes and tags are what lies in the store."""
    assert vars(store.stats()) == dict.fromkeys(vars(store.stats()), 0)
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("A"), "u")
    tagged = sum(map(len, oracle.raw(store).values()))
    store.push(oracle.bundle("C"))
    found = oracle.raw(store)
    stats = store.stats()
    sizes = {
        letter: sum(len(found[key]) for key in oracle.of_kind(store, letter)) for letter in "um"
    }
    assert (stats.units, stats.manifests, stats.tags) == (6, 3, 2)
    assert (stats.unit_bytes, stats.manifest_bytes, stats.tagged_bytes) == (
        sizes["u"],
        sizes["m"],
        tagged,
    )


# -------------------------------------------------------------------------------------------- Order


@pytest.mark.parametrize("cheap", [True, False])
def test_units_come_first_then_the_manifest_then_the_tag(memory, cheap):
    """Each is written after what it names was acknowledged and flushed."""
    noting = oracle.wrapped(memory, oracle.Noting, cheap)
    noting.push(oracle.bundle("A", "B"), "t")
    order = []
    for name, argument in noting._backend.inner.calls:
        if name == "put":
            order.append({key[:4] for key in argument})
        elif name in {"swap_ref", "flush"}:
            order.append(name)
    assert order == [{"v1/u"}, "flush", {"v1/m"}, "flush", {"v1/b"}, "swap_ref"]


def test_what_is_missing_is_asked_before_it_is_sent(memory):
    """Only what the store says it has not is read from the bundle and sent."""
    memory.push(oracle.bundle("A"), "t")
    noting = oracle.wrapped(memory, oracle.Noting, cheap=False)
    noting.push(oracle.bundle("A", "B"), "u")
    (asked, *_), (sent, *_) = (
        noting._backend.inner.named("exists"),
        noting._backend.inner.named("put"),
    )
    manifest = oracle.manifest_of(memory, "u")
    units = {key for key in asked if not key.startswith("v1/b/")}
    assert set(sent) < units - {manifest} == set(oracle.of_kind(memory, "u"))
    assert len(units) - 1 == 2 * len(sent) == 4


def test_a_store_far_away_is_asked_a_few_times(memory):
    """A push of a hundred kernels to a store whose reads are dear reads nothing and takes a handful
    of calls.
    """
    noting = oracle.wrapped(memory, oracle.Noting, cheap=False)
    noting.push(oracle.bundle(*range(100)), "t")
    names = [name for name, _ in noting._backend.inner.calls if name != "flush"]
    assert names == ["read_ref", "touch", "exists", "put", "put", "put", "swap_ref"]


def test_what_is_found_was_marked_as_in_use_before(memory):
    """Presence is asked after touching, so that a prune in between cannot take what is found."""
    memory.push(oracle.bundle("A"), "t")
    for cheap in (True, False):
        noting = oracle.wrapped(memory, oracle.Noting, cheap)
        noting.push(oracle.bundle("A"), "u", mode="replace")
        units = set(oracle.of_kind(memory, "u"))
        calls = [
            name
            for name, argument in noting._backend.inner.calls
            if name != "flush" and units & set(argument or ())
        ]
        assert calls == ["touch", "get" if cheap else "exists"]


def test_pulling_marks_what_it_pulled_as_in_use(store):
    """A prune spares what somebody pulled lately; a read-only pull leaves no trace."""
    digest = store.push(oracle.bundle("A")).digest
    oracle.age(store, 2 * oracle.DAY_S)
    with store.pull(digest, read_only=True):
        assert len(store.prune(dry_run=True).removed) == 4
    with store.pull(digest):
        entry = oracle.entry_of(oracle.bundle("A").kernels[0])
        assert store.prune(dry_run=True).removed == (entry,)


# ----------------------------------------------------------------------------------------- Versions


def test_two_layouts_lie_side_by_side(store):
    """Objects and tags of another major version are neither read, counted, verified nor pruned."""
    theirs = {"v2/u/" + "0" * 64: b"another format", "v2/m/x": b"", "v10/u/y": b"", "other": b"x"}
    for key, data in theirs.items():
        oracle.overwrite(store, key, data)
    assert oracle.innermost(store).swap_ref("v2/t/t", None, b"theirs")
    store.push(oracle.bundle("A"), "t")
    assert [info.name for info in store.tags()] == ["t"]
    assert (store.stats().units, store.stats().manifests) == (2, 1)
    assert store.verify().checked == 4
    store.delete_tag("t")
    oracle.age(store, 30 * oracle.DAY_S)
    assert len(store.prune().removed) == 4
    assert oracle.raw(store) == theirs
    assert oracle.innermost(store).read_ref("v2/t/t") == b"theirs"


def test_a_tag_of_a_newer_version_is_left_alone(store):
    """What a newer version named is a typed error, and only `replace` puts something else there."""
    import msgpack

    store.push(oracle.bundle("A"), "other")
    oracle.set_tag(store, "t", value := msgpack.packb([2, "something new"]))
    for call in (
        lambda: store.pull("t"),
        lambda: store.push(oracle.bundle("B"), "t"),
        lambda: store.push(oracle.bundle("B"), "t", mode="create"),
        lambda: store.restore("t", missing_ok=True),
    ):
        with pytest.raises(FormatError, match="upgrade triton-bundler"):
            call()
    assert oracle.innermost(store).read_ref("v1/t/t") == value
    assert [(info.name, info.digest is None) for info in store.tags()] == [
        ("other", False),
        ("t", True),
    ]
    assert store.push(oracle.bundle("B"), "t", mode="replace").tag_before is None
    assert oracle.kernels(store.pull("t")) == oracle.keys("B")
