# SPDX-License-Identifier: Apache-2.0
"""Kernels of pushed bundles by their keys: found however they came there, for as long as something
has them, and never wrong.
"""

import warnings

import msgpack
import oracle
import pytest
import store_builders as build

import bundler
from bundler.errors import BundlerWarning
from bundler.format.candidate_timings import Timing, Tuning, from_file, record_id
from bundler.format.constant_values import Value
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Observed
from bundler.store import store_layout
from bundler.store.file_records import FileRecords
from bundler.store.kernel_index import KernelIndex


def found(store, *seeds, **choices):
    """Return the keys of these kernels that a process which has read nothing yet finds, each with
    the bytes that it should have.
    """
    with bundler.open_store(*store.urls) if store.urls else _again(store) as fresh:
        bundle = fresh.kernel_records().look_up(sorted(oracle.keys(*seeds)), **choices).bundle
        right = oracle.contents(oracle.bundle(*seeds))
        assert oracle.contents(bundle).items() <= right.items()
        return oracle.kernels(bundle)


def _again(store):
    """Return a store over the same bytes in memory."""
    return oracle.Store(oracle.innermost(store), store.name)


def entries(store):
    """Return the kernels that have an entry."""
    return {key.rpartition("/")[2] for key in oracle.of_kind(store, "b")}


def test_what_was_pushed_is_found_by_key(store):
    """With a tag or without, merged or not; what nobody pushed is missing."""
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("B", "C"), "t")
    store.push(oracle.bundle("D"))
    assert found(store, *"ABCDE") == oracle.keys(*"ABCD")
    assert found(store, *"ABCDE", keep="launch") == oracle.keys(*"ABCD")
    assert {kernel.key for kernel in store.kernel_records().recorded(99)} == oracle.keys(*"ABCD")
    assert len(list(store.kernel_records().recorded(2))) == 2
    assert store.stats().kernels == 4


def test_what_was_mirrored_is_found_by_key(memory, local):
    """Also where an earlier mirror had no entries."""
    memory.push(oracle.bundle("A", "B"), "t")
    memory.sync_to(local)
    assert found(local, "A", "B") == oracle.keys("A", "B")
    oracle.drop(local, *oracle.of_kind(local, "b"))
    assert memory.sync_to(local).kept == ("t",)
    assert found(local, "A", "B") == oracle.keys("A", "B")


def test_what_is_served_is_found_by_key(store):
    """A store over HTTP hands on what says where a kernel is, and kernels that were published by
    themselves.
    """
    store.push(oracle.bundle("A"), "t")
    store.kernel_records().publish(oracle.bundle("B"))
    with (
        store.serve("127.0.0.1:0") as server,
        bundler.open_store(server.url.replace("http", "tb+http")) as far,
    ):
        assert found(far, "A", "B", "C") == oracle.keys("A", "B")


def test_a_tag_that_moves_on_keeps_its_kernels_found(store):
    """Of what was merged into a tag the first manifest may be pruned; of what was replaced or
    deleted nothing is found then.
    """
    store.push(oracle.bundle("A"), "t")
    store.push(oracle.bundle("B"), "t")
    store.prune(grace_s=0)
    assert found(store, "A", "B") == oracle.keys("A", "B")
    store.push(oracle.bundle("C"), "t", "replace")
    assert found(store, "C") == oracle.keys("C")
    store.prune(grace_s=0)
    assert found(store, "A", "B", "C") == oracle.keys("C")
    assert entries(store) == oracle.keys("C")


@pytest.mark.parametrize("how", ["prune", "verify", "push"])
def test_entries_that_lead_nowhere_are_mended(store, how):
    """A kernel of two tags is found by the second when the first is gone."""
    store.push(oracle.bundle("A", "B"), "first")
    if how != "push":
        store.push(oracle.bundle("B", "C"), "second")
    store.delete_tag("first")
    oracle.drop(store, *(k for k in oracle.of_kind(store, "m") if k != _named(store, "second")))
    if how == "prune":
        store.prune(grace_s=0)
    elif how == "verify":
        assert store.verify(repair=True).indexed == 1
        assert store.verify(repair=True).indexed == 0
    else:
        store.push(oracle.bundle("B", "C"), "second")
    assert found(store, "A", "B", "C") == oracle.keys("B", "C")


def _named(store, tag):
    return oracle.manifest_of(store, tag) if tag in {info.name for info in store.tags()} else None


@pytest.mark.parametrize("how", ["prune", "verify", "push", "merge"])
def test_bundles_of_a_version_without_an_index_are_found_then(store, how):
    """What was pushed before there were entries gets them from the next prune, repair or push."""
    store.push(oracle.bundle("A", "B"), "t")
    oracle.drop(store, *oracle.of_kind(store, "b"))
    assert found(store, "A", "B") == set()
    assert store.verify().sound
    assert store.prune(dry_run=True, grace_s=0).removed == ()
    assert entries(store) == set()
    if how == "prune":
        store.prune()
    elif how == "verify":
        assert store.verify(repair=True).indexed == 2
    else:
        store.push(oracle.bundle("A", "B", *("C" if how == "merge" else "")), "t")
    assert found(store, "A", "B") == oracle.keys("A", "B")


def test_a_ref_that_no_tag_is_called_like_gives_entries_without_a_tag(store):
    """A repair would write entries that nobody can read."""
    store.push(oracle.bundle("A"), "t")
    backend = oracle.innermost(store)
    foreign = "v1/t/a/b/c/d/e/f"
    assert backend.swap_ref(foreign, None, backend.read_ref("v1/t/t"))
    store.delete_tag("t")
    oracle.drop(store, *oracle.of_kind(store, "b"))
    assert store.verify(repair=True).indexed == 1
    assert store.verify().sound
    assert found(store, "A") == oracle.keys("A")


def test_a_push_again_sends_nothing(store):
    """Entries that are there are not written again, nor by another tag with the same kernels."""
    store.push(oracle.bundle("A", "B"), "t")
    before = oracle.raw(store)
    assert store.push(oracle.bundle("A", "B"), "t").bytes_sent == 0
    assert store.push(oracle.bundle("A", "B"), "u").bytes_sent == 0
    assert oracle.raw(store) == before


def test_a_second_tag_of_the_same_bundle_asks_for_a_few_entries(memory):
    """Not for all of them, and with what is asked anyway; where one is missing, all are looked at
    and made again.
    """
    seeds = [f"{number:064x}" for number in range(300)]
    pushed = oracle.restorable(*seeds)
    memory.push(pushed, "t")
    far = oracle.wrapped(memory, oracle.Noting, cheap=False)
    far.push(pushed, "u")
    asked = [key for keys in far._backend.inner.named("exists", "get") for key in keys]
    assert len({key for key in asked if key.startswith("v1/b/")}) < 16
    assert far._backend.inner.named("put") == []
    for key in sorted(entries(memory))[:40]:
        del oracle.innermost(memory)._objects[f"v1/b/{key}"]
    memory.push(pushed, "w")
    assert len(entries(memory)) == len(pushed.kernels)


def test_the_first_record_counts_before_a_bundle(store):
    """A kernel that was published by itself is the one that everybody gets who reads
    nothing else.
    """
    store.kernel_records().publish(oracle.bundle("A"))
    store.push(oracle.bundle("A"), "t")
    noting = oracle.wrapped(store, oracle.Noting)
    assert noting.kernel_records().look_up(sorted(oracle.keys("A"))).bundle.kernels
    read = {key[:5] for name, keys in noting._backend.inner.calls if name == "get" for key in keys}
    assert read == {"v1/k/", "v1/u/"}


def test_the_next_kernel_of_a_bundle_asks_for_its_units_alone(store):
    """The manifest is read once; what was pruned meanwhile is a miss, and what came since
    is found.
    """
    store.push(oracle.bundle(*"ABC"), "t")
    noting = oracle.wrapped(store, oracle.Noting)
    records, (a, b, c) = noting.kernel_records(), sorted(oracle.keys(*"ABC"))
    assert records.look_up([a]).bundle.kernels
    noting._backend.inner.calls.clear()
    assert records.look_up([b]).bundle.kernels
    read = [key[:5] for name, keys in noting._backend.inner.calls if name == "get" for key in keys]
    assert set(read) == {"v1/u/"}
    store.push(oracle.bundle("D"), "t", "replace")
    store.prune(grace_s=0)
    assert records.look_up([c]).missing == (c,)
    assert oracle.kernels(records.look_up(sorted(oracle.keys("D"))).bundle) == oracle.keys("D")


def test_a_lost_unit_is_a_miss_with_its_reason_and_the_next_build_is_published(store):
    """A kernel whose bytes are gone is compiled, and found by its record from then on."""
    store.push(oracle.bundle("A"), "t")
    (key,) = oracle.keys("A")
    gone = oracle.unit_of(store, oracle.bundle("A"), 0, "cubin")
    oracle.drop(store, gone)
    looked_up = store.kernel_records().look_up([key])
    assert (looked_up.missing, gone in looked_up.damaged[key]) == ((key,), True)
    assert store.kernel_records().publish(oracle.bundle("A")).created == {key}
    assert found(store, "A") == {key}


def _value(*row):
    return store_layout.encode_object(msgpack.packb(row))


MANIFEST = "v1/m/" + "0" * 64 + "/" + "0" * 16
HOSTILE = {
    "noise": b"noise",
    "nothing": b"",
    "an empty row": _value(),
    "a map": store_layout.encode_object(msgpack.packb({1: 2})),
    "a newer version": _value(2, MANIFEST, ""),
    "no manifest": _value(1, "v1/u/" + "0" * 64, ""),
    "a path": _value(1, "v1/m/../../x", ""),
    "a tag that is none": _value(1, MANIFEST, "../x"),
    "numbers": _value(1, 2, 3),
    "a manifest that is not there": _value(1, MANIFEST, ""),
    "a tag that is not there": _value(1, MANIFEST, "other"),
    "another bundle": None,
    "too large": store_layout.encode_object(b"x" * 100_000),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_is_a_miss(store, value):
    """Whatever stands there: no exception, the other kernels are found, and a repair mends it."""
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("C"), "u")
    (key,) = oracle.keys("A")
    if value is None:
        value = oracle.raw(store)[oracle.entry_of(oracle.bundle("C").kernels[0])]
    oracle.overwrite(store, f"v1/b/{key}", value)
    assert found(store, "A", "B", "C") == oracle.keys("B", "C")
    assert store.push(oracle.bundle("A"), "u").digest
    assert found(store, "A", "B", "C") >= oracle.keys("B", "C")
    store.verify(repair=True)
    assert store.verify().sound
    assert found(store, "A", "B", "C") == oracle.keys("A", "B", "C")


def test_who_may_not_write_entries_pushes_all_the_same(store):
    """A user of one prefix of tags keeps that right; his kernels are found by their tag."""

    class Denying(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "put" and any(key.startswith("v1/b/") for key in argument):
                raise oracle.BackendDenied("not there")
            return call(argument)

    oracle.wrapped(store, Denying).push(oracle.bundle("A"), "t")
    assert oracle.kernels(store.pull("t")) == oracle.keys("A")
    assert found(store, "A") == set()


def test_near_and_far(tmp_path):
    """Through a near tier a pushed kernel is found, and again while the far one is gone."""
    near, far = f"file://{tmp_path}/near", f"file://{tmp_path}/far"
    with bundler.open_store(far) as store:
        store.push(oracle.bundle("A", "B"), "t")
    with bundler.open_store(near, far) as tiers:
        assert found(tiers, "A", "B") == oracle.keys("A", "B")
    with bundler.open_store(near) as alone, warnings.catch_warnings():
        warnings.simplefilter("error", BundlerWarning)
        assert alone.kernel_records().look_up(sorted(oracle.keys("A"))).bundle.kernels


def test_other_entries_of_a_bundle_do_not_matter(memory):
    """A bundle without kernels has no entries."""
    files = build.Files()
    memory.push(files.bundle(), "t", allow_empty=True)
    assert entries(memory) == set()
    assert memory.verify(repair=True).indexed == 0


# Single files ------------------------------------------------------------------------------------

KEY = build.key("T")
PARTS = (("device", "cuda:90"),)
PATHS = (f"{KEY}/k.autotune.json", f"{KEY}/cuda_utils.so")


def winner(block):
    """Return a winner of one tuning."""
    return TuningRecord("k", PARTS, (("BLOCK", Value("int", block)),), "autotune")


def with_files():
    """Return a bundle of a kernel, a tuning file, a library, and two winners of which the second is
    faster.
    """
    files = build.Files()
    timings = (Timing(winner(n).config, time_ns=time_ns) for n, time_ns in ((1, 20), (2, 10)))
    measured = Tuning(record_id("k", PARTS), tuple(timings))
    return files.bundle(
        files.kernel("A"),
        files.tuning(PATHS[0], b"tuned"),
        files.helper(PATHS[1], b"library"),
        records=[winner(1), winner(2)],
        observed=Observed({}, tunings=(measured,)),
    )


def of_files(store, trust="kernels"):
    """Return what a process that has read nothing yet finds of these files, by what they are known
    by.
    """
    known_by = [*(f"file {path}" for path in PATHS), f"tuning {record_id('k', PARTS)}", "file x/y"]
    with bundler.open_store(*store.urls) if store.urls else _again(store) as fresh:
        return fresh.file_records(trust).look_up_all(known_by)


def test_single_files_of_a_bundle_are_found_by_what_they_are_known_by(store):
    """Tuning files by their places, records by their ids, the faster of two; libraries with trust
    alone.
    """
    store.push(with_files(), "t")
    found = of_files(store)
    assert found.pop(f"file {PATHS[0]}") == b"tuned"
    (data,) = found.values()
    assert from_file(data)[0] == winner(2)
    assert of_files(store, "code")[f"file {PATHS[1]}"] == b"library"
    assert store.stats().kernels == 1


def test_what_was_published_by_itself_counts_before_a_bundle(store):
    """As for kernels: the first is everybody's."""
    store.file_records().publish(f"file {PATHS[0]}", "k.autotune.json", b"first")
    store.push(with_files(), "t")
    assert of_files(store)[f"file {PATHS[0]}"] == b"first"


def test_entries_of_files_are_mended_mirrored_and_pruned(memory, local):
    """As those of kernels are."""
    memory.push(with_files(), "t")
    memory.sync_to(local)
    assert of_files(local) == of_files(memory) != {}
    lost = [key for key in oracle.of_kind(local, "b") if key.startswith("v1/b/f/")]
    assert len(lost) == 3
    oracle.drop(local, *lost)
    assert of_files(local) == {}
    assert local.verify(repair=True).indexed == 3
    assert of_files(local) == of_files(memory)
    local.prune(grace_s=0)
    assert of_files(local) == of_files(memory)
    local.delete_tag("t")
    local.prune(grace_s=0)
    assert of_files(local) == {}
    assert not oracle.of_kind(local, "b")


def test_a_push_again_sends_nothing_for_files(store):
    """Of a bundle that is there the entries are there too."""
    store.push(with_files(), "t")
    assert store.push(with_files(), "t").bytes_sent == 0
    assert store.push(with_files(), "u").bytes_sent == 0


@pytest.mark.parametrize("lost", ["u", "m"])
def test_a_lost_file_is_a_miss(store, lost):
    """Without the unit or the manifest that an entry leads to."""
    store.push(with_files(), "t")
    oracle.drop(store, *oracle.of_kind(store, lost))
    assert f"file {PATHS[0]}" not in of_files(store)


def test_a_library_under_another_kind_is_code_all_the_same(store):
    """A bundle that calls a library a tuning file gets it no further than a library gets."""
    files = build.Files()
    store.push(files.bundle(files.tuning(PATHS[1], b"library")), "t")
    assert of_files(store) == {}
    index = KernelIndex(store._backend, judge=lambda _: False)
    refused = FileRecords(store._backend, store.name, index=index, code=True)
    assert refused.look_up(f"file {PATHS[1]}") is None
