# SPDX-License-Identifier: Apache-2.0
"""Merging, comparing and selecting bundles."""

from dataclasses import replace
from itertools import permutations

import pytest

from bundler.errors import ConfigError, FormatError, MergeConflict, NotFound, UnsupportedVersion
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import diff, merge, metadata_identity
from bundler.format.constant_values import encode
from bundler.format.entries import Toolchain
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Observation, Observed, merge_observed


def keys(bundle):
    """Return the kernels' keys."""
    return [kernel.key for kernel in bundle.kernels]


def test_the_union_has_the_entries_of_all(build):
    """Merging bundles with different entries gives all of them, and their bytes."""
    files = build.Files()
    other = files.bundle(
        files.tuning(f"{build.key('F')}/x.autotune.json"), files.opaque("ab/more", b"more")
    )
    merged = merge([build.one("A"), build.one("B"), other])
    assert keys(merged) == [build.key("A"), build.key("B")]
    assert [entry.path for entry in (*merged.tuning_files, *merged.opaque)] == [
        f"{build.key('F')}/x.autotune.json",
        "ab/more",
    ]
    assert merged.variants_dropped == 0
    assert build.read_all(merged)["ab/more"] == b"more"
    with Bundle.from_bytes(merged.to_bytes()) as back:
        assert back.digest == merged.digest


def test_merging_with_itself_changes_nothing(build):
    """A bundle merged with itself is the same bundle."""
    bundle = build.several()
    assert merge([bundle, bundle]).digest == merge([bundle]).digest == bundle.digest
    assert merge([bundle, bundle]).variants_dropped == 0


def test_merging_nothing_is_refused():
    """Merging no bundle is a ConfigError."""
    with pytest.raises(ConfigError, match="at least one bundle, got none"):
        merge([])


def test_of_two_variants_the_least_digest_wins(build):
    """Two compiles of one kernel on different paths are variants: the least digest stays, in any
    order, and one is dropped.
    """
    variants = [build.one("A", source=f"/home/{who}/k.py") for who in ("ada", "bob", "eve")]
    least = min(bundle.kernels[0].files_digest for bundle in variants)
    for order in permutations(variants):
        merged = merge(order)
        assert merged.kernels[0].files_digest == least
        assert merged.variants_dropped == 2
        assert build.read_all(merged)


def test_the_same_variant_twice_counts_once(build):
    """A variant that two bundles hold is dropped once."""
    one, two = build.one("A", source="/home/ada/k.py"), build.one("A", source="/home/bob/k.py")
    assert merge([one, two, one, two, two]).variants_dropped == 1


def test_dropped_variants_add_up(build):
    """Merging step by step drops and counts the same variants as merging at once."""
    a, b, c = (build.one("A", source=f"/home/{who}/k.py") for who in ("ada", "bob", "eve"))
    at_once, stepwise = merge([a, b, c]), merge([merge([a, b]), c])
    assert (
        (stepwise.digest, stepwise.variants_dropped)
        == (at_once.digest, at_once.variants_dropped)
        == (at_once.digest, 2)
    )


def test_the_build_with_more_files_wins(build):
    """A build that has all files of another, and more, replaces it, and that is no variant."""
    whole = build.one("A", extra={"k.ptx": b"ptx"})
    launch = whole.select(keep="launch")
    for order in permutations([whole, launch]):
        merged = merge(order)
        assert merged.digest == whole.digest
        assert merged.variants_dropped == 0


def test_a_part_of_one_variant_does_not_decide_between_two(build):
    """The result does not depend on the order when one of three builds is a part of another."""
    a, b = (build.one("A", source=f"/home/{who}/k.py") for who in ("ada", "bob"))
    results = {
        (m.digest, m.variants_dropped)
        for m in map(merge, permutations([a, b, a.select(keep="launch")]))
    }
    results |= {
        (m.digest, m.variants_dropped)
        for m in map(merge, permutations([a, b, b.select(keep="launch")]))
    }
    assert results == {(merge([a, b]).digest, 1)}


def test_facts_are_adopted_from_a_recorded_twin(build):
    """A kernel that came by pack gets launch facts, key parts and toolchain from a recording of the
    same key.
    """
    parts = KeyParts((("a", "b"),), True).to_bytes()
    toolchain = Toolchain("3.7.1", "ab", "12.9")
    recorded = build.one("A", facts_bytes=build.facts(), parts_bytes=parts, toolchain=toolchain)
    for order in permutations([build.one("A"), recorded]):
        merged = merge(order)
        assert merged.digest == recorded.digest
        assert merged.kernels[0].require_parts()["a"] == "b"
        assert merged.variants_dropped == 0


def test_facts_are_adopted_from_another_variant(build):
    """The variant that wins gets the facts of one that was dropped."""
    one, two = build.one("A", source="/home/ada/k.py"), build.one("A", source="/home/bob/k.py")
    winner, loser = sorted((one, two), key=lambda bundle: bundle.kernels[0].files_digest)
    files = build.Files()
    kernel = loser.kernels[0]
    files.blobs.update({d: loser.blobs.read_blob(d) for d, _ in loser.content.blobs})
    recorded = files.bundle(replace(kernel, facts_bytes=build.facts()))
    for order in permutations([winner, recorded]):
        merged = merge(order)
        assert merged.kernels[0].files_digest == winner.kernels[0].files_digest
        assert merged.kernels[0].facts_bytes == build.facts()


def test_the_order_of_bundles_never_matters(build):
    """With variants, parts, and different facts at once, every order gives the same digest and
    count.
    """
    a = build.one("A", source="/home/ada/k.py", facts_bytes=build.facts(source_kind="ast"))
    b = build.one("A", source="/home/bob/k.py", toolchain=Toolchain("3.7.1", "ab"))
    c = build.one("A", source="/home/bob/k.py", facts_bytes=build.facts(source_kind="ir"))
    results = {
        (m.digest, m.variants_dropped)
        for m in map(merge, permutations([a, b, c, a.select(keep="launch")]))
    }
    assert len(results) == 1
    assert next(iter(results))[1] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "HIP"}, "target cuda:90 in one bundle, hip:gfx942 in another"),
        ({"name": "other"}, "entry point k in one bundle, other in another"),
        ({"metadata": {"shared": 1}}, "the metadata differs (shared: 0 and 1)"),
        ({"metadata": {"extra": True}}, "the metadata differs (extra: None and True)"),
    ],
)
def test_different_kernels_under_one_key_conflict(build, change, words):
    """One key with another target, entry point or metadata is a MergeConflict that says what
    differs.
    """
    change = {name: build.HIP if value == "HIP" else value for name, value in change.items()}
    with pytest.raises(MergeConflict) as caught:
        merge([build.one("A"), build.one("A", **change)])
    assert words in str(caught.value)
    assert caught.value.key == build.key("A")


def test_metadata_in_another_order_is_the_same(build):
    """Metadata that differs in spelling alone, such as the order of its keys, is no conflict but a
    variant.
    """
    files = build.Files()
    one = files.kernel("A")
    two = files.kernel("A", extra={"k.json": b'{"shared": 0,  "num_warps": 4, "name": "k"}'})
    assert one.metadata != two.metadata
    assert merge([files.bundle(one), files.bundle(two)]).variants_dropped == 1


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_metadata_that_is_no_object_cannot_be_compared(data):
    """Metadata that is not a JSON object is a FormatError."""
    with pytest.raises(FormatError, match="metadata"):
        metadata_identity(data)


def test_two_kinds_under_one_path_conflict(build):
    """A path that is a tuning file here and an opaque file there is a MergeConflict."""
    files = build.Files()
    with pytest.raises(
        MergeConflict, match="ab/x is a tuning file in one bundle and a opaque file in another"
    ):
        merge([files.bundle(files.tuning("ab/x")), files.bundle(files.opaque("ab/x"))])


def test_of_two_tuning_files_the_least_digest_wins(build):
    """Two results of one tuner under one path are variants, in any order."""
    files = build.Files()
    path = f"{build.key('A')}/k.autotune.json"
    bundles = [files.bundle(files.tuning(path, data)) for data in (b"1", b"2")]
    least = min(bundle.tuning_files[0].artifact.digest for bundle in bundles)
    for order in permutations(bundles):
        merged = merge(order)
        assert (merged.tuning_files[0].artifact.digest, merged.variants_dropped) == (least, 1)


@pytest.mark.parametrize(
    "path", ["programs/softmax.program.json", "notes/readme", "fxgraph/ab/entry"]
)
def test_two_things_under_a_chosen_name_are_refused(build, path):
    """A program, or a file, that differs under one name is never dropped: the error names it and
    both bundles, and equal ones are one.
    """
    files = build.Files()
    one, two = (files.bundle(files.opaque(path, data)) for data in (b"1", b"2"))
    with pytest.raises(MergeConflict) as caught:
        merge([one, two])
    assert caught.value.bundles == (one.digest, two.digest)
    assert all(bundle.digest[:19] in str(caught.value) for bundle in (one, two))
    assert path.split("/")[-1].partition(".")[0] in str(caught.value)
    assert merge([one, one, files.bundle(files.opaque("programs/other.program.json"))]).opaque


@pytest.mark.parametrize("key", ["f" + "a2" * 25 + "b", "A7" * 26, "0f" * 32])
def test_two_files_for_one_hash_are_variants(build, key):
    """What two processes made for one key of Inductor's is kept once, and counted."""
    files = build.Files()
    path = f"aotautograd/{key}/entry"
    merged = merge([files.bundle(files.opaque(path, data)) for data in (b"1", b"2")])
    assert (len(merged.opaque), merged.variants_dropped) == (1, 1)


def test_tuning_records_and_observations_are_joined(build):
    """Merging keeps each tuning record once, all devices, layouts and hosts, and the longer list of
    times.
    """
    record = TuningRecord("k", (("a", "b"),), (("X", encode(1)),), "autotune")
    one, two = build.Files(), build.Files()
    key = build.key("A")
    first = one.bundle(
        one.kernel("A"),
        records=[record],
        observed=Observed(
            {key: Observation((1,), ("triton",), (("ttir", 5),))}, ((("python", "3.11"),),)
        ),
    )
    second = two.bundle(
        two.kernel("A"),
        records=[record],
        observed=Observed(
            {key: Observation((0,), ("inductor",), (("ttir", 1), ("cubin", 2)))},
            ((("python", "3.12"),),),
        ),
    )
    for order in permutations([first, second]):
        merged = merge(order)
        assert merged.tuning_records == (record,)
        assert merged.observed.kernels == {
            key: Observation((0, 1), ("inductor", "triton"), (("ttir", 1), ("cubin", 2)))
        }
        assert merged.observed.environments == ((("python", "3.11"),), (("python", "3.12"),))
        assert merged.observed.devices == (0, 1)
    assert merge_observed(Observed(), first.observed) == first.observed


def test_what_was_merged_from_a_read_only_bundle_is_not_written(build):
    """A bundle that may not be written again may not be written as a part of another."""
    parts = build.Parts.of(build.one("A").to_bytes())
    parts.flags = (0, 1, 0)
    with Bundle.from_bytes(parts.join()) as bundle, pytest.raises(UnsupportedVersion):
        merge([build.one("B"), bundle]).to_bytes()


def test_a_merged_bundle_says_what_it_does_not_have(build):
    """A blob that no source has is not found."""
    merged = merge([build.one("A"), build.one("B")])
    with pytest.raises(NotFound, match="no blob sha256:"):
        merged.read(build.one("C", "other").kernels[0].binary)


def test_diff_names_what_was_added_removed_and_changed(build):
    """A comparison names entries by key or path, and is false when there is no difference."""
    one, two = build.Files(), build.Files()
    first = one.bundle(
        one.kernel("A"), one.kernel("B"), one.opaque("o/x", b"1"), one.helper("h/a.so")
    )
    second = two.bundle(
        two.kernel("A"), two.kernel("C"), two.opaque("o/x", b"2"), two.helper("h/a.so")
    )
    found = diff(first, second)
    assert (found.added, found.removed, found.changed) == (
        (build.key("C"),),
        (build.key("B"),),
        ("o/x",),
    )
    assert found
    assert not diff(first, first)
    assert diff(second, first).added == found.removed


def test_diff_sees_facts_and_not_observations(build):
    """A kernel whose facts differ is changed; another recording of the same is not."""
    files = build.Files()
    seen = files.bundle(files.kernel("A"), observed=Observed({build.key("A"): Observation((0,))}))
    assert not diff(build.one("A"), seen)
    assert diff(build.one("A"), build.one("A", facts_bytes=build.facts())).changed == (
        build.key("A"),
    )


def test_select_by_target(build):
    """Selecting a target keeps its kernels and the tuning files, and neither helper libraries nor
    opaque files.
    """
    chosen = build.several().select(target="hip:gfx942")
    assert [str(kernel.target) for kernel in chosen.kernels] == ["hip:gfx942"]
    assert (len(chosen.tuning_files), chosen.helpers, chosen.opaque) == (1, (), ())


def test_select_by_name(build):
    """Selecting names keeps kernels and tuning files that match the glob, with regard to case."""
    chosen = build.several().select(names="oth*")
    assert [kernel.name for kernel in chosen.kernels] == ["other"]
    assert chosen.tuning_files == ()
    assert [kernel.name for kernel in build.several().select(names="K").kernels] == []


def test_select_the_launch_set(build):
    """Selecting the launch set keeps device binary, metadata and tuning files, and saves without
    reading anything else.
    """
    chosen = build.several().select(keep="launch")
    assert {artifact.kind for kernel in chosen.kernels for artifact in kernel.artifacts} == {
        "cubin",
        "hsaco",
        "json",
    }
    assert (len(chosen.tuning_files), chosen.helpers, chosen.opaque) == (1, (), ())
    with Bundle.from_bytes(chosen.to_bytes()) as back:
        assert back.digest == chosen.digest
        assert {section.kind for section in back.blobs.sections} == {1, 3, 16, 17}


def test_select_everything_is_the_same_bundle(build):
    """Selecting without conditions gives the same digest."""
    assert build.several().select().digest == build.several().digest


def test_select_keeps_the_observations_of_what_it_keeps(build):
    """Observations of kernels that are left out are left out, and hosts stay."""
    files = build.Files()
    seen = {build.key(seed): Observation((0,)) for seed in "AB"}
    bundle = files.bundle(
        files.kernel("A"),
        files.kernel("B", "other"),
        observed=Observed(seen, ((("python", "3"),),)),
    )
    chosen = bundle.select(names="other")
    assert (list(chosen.observed.kernels), chosen.observed.environments) == (
        [build.key("B")],
        ((("python", "3"),),),
    )


@pytest.mark.parametrize("arguments", [{"keep": "ir"}, {"target": "cuda"}])
def test_select_refuses_what_it_does_not_know(build, arguments):
    """An unknown `keep` or target is a ConfigError that shows what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        build.several().select(**arguments)
