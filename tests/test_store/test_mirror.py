# SPDX-License-Identifier: Apache-2.0
"""Mirrors: what moves, in which order, what stays, and what an interrupted or hostile run leaves
behind.
"""

import random

import oracle
import pytest

import bundler
from bundler.backends.backend_errors import BackendUnavailable
from bundler.errors import ConfigError, NotFound, StoreUnavailable
from bundler.store.store_layout import BATCH_BYTES


@pytest.fixture
def target():
    """An empty store to mirror into."""
    with bundler.open_store("memory:") as store:
        yield store


class Watched(oracle.Wrapped):
    """A byte store that notes what is written, and fails after some writes."""

    def __init__(self, inner, writes=None):
        super().__init__(inner)
        self.written, self.left = [], writes

    def _count(self, keys):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise BackendUnavailable("gone")
        self.written += keys

    def put(self, items):
        self._count(list(items))
        return self.inner.put(items)

    def swap_ref(self, key, expected, value):
        self._count([key])
        return self.inner.swap_ref(key, expected, value)


def test_what_is_missing_moves_and_the_rest_stays(memory, target):
    """Units that the target has for another tag are not sent, and what is there is told."""
    memory.push(oracle.bundle("A", "B"), "x")
    memory.push(oracle.bundle("C"), "y")
    target.push(oracle.bundle("B"), "own")
    report = memory.sync_to(target)
    assert (report.moved, report.kept, report.units_moved, report.units_present) == (
        ("x", "y"),
        (),
        4,
        2,
    )
    assert report.bytes_moved == sum(
        len(value)
        for key, value in oracle.raw(memory).items()
        if key not in oracle.raw(bundler_of("B"))
    )
    assert [tag.name for tag in target.tags()] == ["own", "x", "y"]
    assert target.verify().sound


def bundler_of(*seeds):
    """Return a store in memory with these kernels."""
    store = bundler.open_store("memory:")
    store.push(oracle.bundle(*seeds))
    return store


def test_who_watches_is_told_of_units_that_moved(memory, target):
    """All that are missing are known before the first of a tag moves; a dry run moves none."""
    memory.push(oracle.bundle("A", "B"), "x")
    told = []
    memory.sync_to(target, dry_run=True, watch=lambda *numbers: told.append(numbers))
    assert told == []
    memory.sync_to(target, watch=lambda *numbers: told.append(numbers))
    assert told == [(4, 4)]


def test_units_come_before_manifests_and_these_before_tags(memory, target):
    """In this order a reader never finds a name for what is not there; last, each kernel is found
    by its key.
    """
    memory.push(oracle.bundle("A", "B"), "x")
    target._backend.inner = watched = Watched(target._backend.inner)
    memory.sync_to(target)
    kinds = [key.split("/")[1] for key in watched.written]
    assert kinds == ["u"] * 4 + ["m", "t", "b", "b"]


@pytest.mark.parametrize("writes", range(4))
def test_a_run_that_is_interrupted_goes_on_where_it_ended(memory, target, writes):
    """Wherever the target fails, it stays sound, names nothing that it lacks, and the next run
    sends only the rest.
    """
    memory.push(oracle.bundle("A", "B"), "x")
    memory.push(oracle.bundle("C", "D"), "y")
    inner = target._backend.inner
    target._backend.inner = Watched(inner, writes)
    with pytest.raises(StoreUnavailable):
        memory.sync_to(target)
    target._backend.inner = inner
    there = target.stats().units
    assert target.verify().dangling == ()
    report = memory.sync_to(target)
    assert report.units_moved == 8 - there
    assert report.failed == ()
    assert oracle.contents(target.pull("y")) == oracle.contents(oracle.bundle("C", "D"))


def test_an_object_that_the_target_lost_is_sent_again(memory, target):
    """A tag that is there already is checked for what it reaches."""
    memory.push(oracle.bundle("A"), "x")
    memory.sync_to(target)
    oracle.drop(target, oracle.of_kind(target, "u")[0])
    report = memory.sync_to(target)
    assert (report.moved, report.units_moved, report.units_present) == (("x",), 1, 1)
    assert target.verify().sound


def test_a_tag_that_changed_is_what_the_source_says(memory, target):
    """The source is what the target is to hold."""
    memory.push(oracle.bundle("A"), "x")
    target.push(oracle.bundle("B"), "x")
    memory.sync_to(target)
    assert target.pull("x").digest == memory.pull("x").digest


def test_a_damaged_tag_leaves_the_others(memory, target):
    """Its damage is the reason, nothing damaged is written, the source stays as it is, and the
    other tag is mirrored.
    """
    memory.push(oracle.bundle("A"), "bad")
    memory.push(oracle.bundle("B"), "good")
    with memory.pull("bad", read_only=True) as found:
        flipped = oracle.unit_of(memory, found)
    oracle.flip(memory, flipped)
    before = oracle.raw(memory)
    report = memory.sync_to(target)
    assert (report.moved, [tag for tag, _ in report.failed]) == (("good",), ["bad"])
    assert flipped in report.failed[0][1]
    assert [tag.name for tag in target.tags()] == ["good"]
    assert flipped not in oracle.raw(target)
    assert oracle.raw(memory) == before


def test_units_that_are_others_are_refused(memory, target):
    """Bytes that are whole by their seal and belong to another key do not reach the target."""
    memory.push(oracle.bundle("A", "B"), "x")
    first, second = oracle.of_kind(memory, "u")[:2]
    oracle.overwrite(memory, first, oracle.raw(memory)[second])
    report = memory.sync_to(target)
    assert [tag for tag, _ in report.failed] == ["x"]
    assert target.stats().units == 0


def test_dictionaries_go_along(root, tmp_path, target):
    """Units that were compressed with a dictionary arrive with it, byte for byte."""
    same = random.Random(1).randbytes(3000)
    bundle = bundler.merge(
        [oracle.restorable(n, each=40, extra={"k.ttir": same + b"%d" % n}) for n in range(40)]
    )
    with bundler.open_store(f"file://{tmp_path}/near", f"file://{root}") as source:
        source.push(bundle, "t")
        assert source.stats().dictionaries > 0
        source.sync_to(target)
        assert target.stats() == source.stats()
    assert target.verify().sound
    assert oracle.contents(target.pull("t")) == oracle.contents(bundle)


def test_only_tags_that_match(memory, target):
    """Globs choose tags; one that matches nothing is an error that says so."""
    for seed, tag in zip("ABC", ("llama/h200", "llama/b200", "qwen"), strict=True):
        memory.push(oracle.bundle(seed), tag)
    assert memory.sync_to(target, ["llama/*", "none"]).moved == ("llama/b200", "llama/h200")
    assert target.stats().units == 4
    with pytest.raises(NotFound, match="no tag matches none, nor-this"):
        memory.sync_to(target, ["none", "nor-this"])


def test_a_dry_run_changes_nothing_and_says_the_same(memory, target):
    """What it says of tags and units is what the run then does."""
    memory.push(oracle.bundle("A"), "x")
    memory.push(oracle.bundle("A", "C"), "y")
    target.push(oracle.bundle("B"), "old")
    before = oracle.raw(target)
    dry = memory.sync_to(target, dry_run=True, delete_tags=True)
    assert (oracle.raw(target), [tag.name for tag in target.tags()]) == (before, ["old"])
    done = memory.sync_to(target, delete_tags=True)
    assert (dry.moved, dry.kept, dry.deleted, dry.units_moved) == (
        done.moved,
        done.kept,
        done.deleted,
        done.units_moved,
    )
    assert (done.deleted, [tag.name for tag in target.tags()]) == (("old",), ["x", "y"])
    assert (done.units_moved, done.units_present) == (4, 2)


def test_an_empty_source_deletes_nothing(memory, target):
    """A wrong URL is not to empty a mirror; without deleting, nothing to do is fine."""
    target.push(oracle.bundle("A"), "x")
    with pytest.raises(ConfigError, match="has no tags"):
        memory.sync_to(target, delete_tags=True)
    assert memory.sync_to(target).moved == ()
    assert [tag.name for tag in target.tags()] == ["x"]


def test_a_store_is_not_mirrored_into_itself(local):
    """It is an error, and not a run that does nothing."""
    with pytest.raises(ConfigError, match="same store"):
        local.sync_to(local)


def test_memory_is_bounded(memory, target):
    """No read of units may bring more than a batch, however large the bundle."""
    memory.push(oracle.restorable(*range(5), each=5 * 2**20), "big")
    asked = []

    class Read(oracle.Wrapped):
        def get_within(self, max_bytes):
            asked.append(sum(most for key, most in max_bytes.items() if key.startswith("v1/u/")))
            return self.inner.get_within(max_bytes)

    memory._backend.inner = Read(memory._backend.inner)
    memory.sync_to(target)
    assert len([size for size in asked if size]) >= 2
    assert max(asked) <= BATCH_BYTES * 1.01
