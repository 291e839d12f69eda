# SPDX-License-Identifier: Apache-2.0
"""A byte store that fails once, at each call in turn: the tag names the old bundle or the new one,
and a second push completes.
"""

import contextlib

import oracle
import pytest
import store_builders as build

from bundler.errors import (
    AccessDenied,
    BundlerError,
    DigestMismatch,
    FormatError,
    StoreFull,
    StoreUnavailable,
)
from bundler.lifecycle.machine_store import Store

TYPED = (StoreUnavailable, StoreFull, AccessDenied)
NEW = {"merge": ("A", "B", "C"), "replace": ("B", "C"), "create": ("B", "C")}


def with_old(mode):
    """Return a store in memory in which the tag names kernels A and B, or for `create` is
    not set.
    """
    store = Store(oracle.MemoryBackend(), "memory:")
    store.push(oracle.bundle("A", "B"), "other" if mode == "create" else "t")
    return store


def every_call(make, fault, act, cheap=None):
    """Yield (number, the call struck, a store with the state after it) for each call that `act`
    makes.
    """
    start, at = make(), 0
    while True:
        store = oracle.copied(start)
        broken = oracle.wrapped(store, oracle.Faulty, fault, at, cheap=cheap)
        error = None
        try:
            act(broken)
        except BundlerError as caught:
            error = caught
        if broken._backend.inner.struck is None:
            assert error is None
            assert at > 3
            return
        yield broken._backend.inner.struck, error, store
        at += 1


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("mode", NEW)
@pytest.mark.parametrize("fault", ["fails", "loses"])
def test_a_push_is_all_or_nothing(fault, mode, cheap):
    """After a failure of any call the tag names the old or the new bundle, whole; the same push
    then completes.
    """
    bundle, old = oracle.bundle("B", "C"), with_old(mode)
    before = oracle.contents(old.pull("t")) if mode != "create" else None
    after = oracle.contents(oracle.bundle(*NEW[mode]))
    struck = set()
    for name, error, store in every_call(
        lambda: old, fault, lambda s: s.push(bundle, "t", mode), cheap
    ):
        struck.add(name)
        # Marking the old bundle as in use is a courtesy, and so are entries of the index where they
        # may not be written: nobody's failures. What is there is asked again without the index
        # where that was refused.
        assert (
            isinstance(error, TYPED)
            or name in {"put", "get", "exists"}
            or (name, mode) == ("touch", "merge")
        ), name
        found = (
            oracle.contents(store.pull("t"))
            if store.tags() and store.tags()[-1].name == "t"
            else None
        )
        assert found == (
            after if error is None or (name, fault) == ("swap_ref", "loses") else before
        ), name
        assert store.verify().sound
        store.push(bundle, "t", mode)
        assert oracle.contents(store.pull("t")) == after
        assert store.verify().sound
        assert store.push(bundle, "t", mode).blobs_sent == 0
    assert {"read_ref", "touch", "get" if cheap else "exists", "put", "flush", "swap_ref"} <= struck


@pytest.mark.parametrize("mode", NEW)
def test_a_bit_flipped_on_the_way_is_no_damage(mode):
    """A flipped bit in any answer or in what is sent: right bytes or a typed error, the tag is
    whole, nothing is removed.
    """
    bundle, old = oracle.bundle("B", "C"), with_old(mode)
    before = oracle.contents(old.pull("t")) if mode != "create" else None
    after = oracle.contents(oracle.bundle(*NEW[mode]))
    stored = oracle.raw(old)
    for name, error, store in every_call(lambda: old, "flips", lambda s: s.push(bundle, "t", mode)):
        assert error is None or isinstance(error, (*TYPED, FormatError)), name
        assert stored.items() <= oracle.raw(store).items()
        found = (
            oracle.contents(store.pull("t"))
            if store.tags() and store.tags()[-1].name == "t"
            else None
        )
        assert found == (after if error is None else before), name
        assert store.verify().sound, name
        store.push(bundle, "t", mode)
        assert oracle.contents(store.pull("t")) == after


def test_a_bit_flipped_where_nobody_reads_back_is_found_later():
    """On a store whose reads are dear a damaged unit is found when it is read, and the next push
    brings it.
    """
    bundle, old = oracle.bundle("B", "C"), with_old("merge")
    right = [
        oracle.contents(oracle.bundle("A", "B")),
        oracle.contents(oracle.bundle("A", "B", "C")),
    ]
    for name, _, store in every_call(
        lambda: old, "flips", lambda s: s.push(bundle, "t"), cheap=False
    ):
        with contextlib.suppress(BundlerError):
            assert oracle.contents(store.pull("t")) in right
        store.verify(repair=True)
        again = oracle.wrapped(store, oracle.Noting, cheap=False)
        again.push(bundle, "t")
        again.push(oracle.bundle("A", "B"), "t")
        assert oracle.contents(store.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C")), (
            name
        )
        assert store.verify().sound


def test_a_bit_flipped_while_pulling_is_asked_for_again():
    """A pull and everything read from it has the right bytes although one answer came damaged; the
    store is left alone.
    """
    old = with_old("merge")
    right, stored = oracle.contents(old.pull("t")), oracle.raw(old)
    seen = []
    for name, error, store in every_call(
        lambda: old, "flips", lambda s: seen.append(oracle.contents(s.pull("t")))
    ):
        assert oracle.raw(store) == stored
        if name == "read_ref":
            assert isinstance(error, BundlerError)
        else:
            assert error is None
    assert all(found == right for found in seen)


@pytest.mark.parametrize("fault", ["fails", "loses", "flips"])
def test_reading_either_answers_or_raises(fault):
    """Pull, restore's reads, tags, stats, verify and a dry prune never give something wrong when
    one call fails.
    """
    old = with_old("merge")
    old.push(oracle.bundle("D"))
    right = oracle.contents(old.pull("t"))
    acts = {
        "pull": lambda s: oracle.contents(s.pull("t")) == right,
        "tags": lambda s: [(t.name, t.kernels) for t in s.tags()] == [("t", 2)],
        "stats": lambda s: s.stats() == old.stats(),
        "verify": lambda s: s.verify().sound,
        "prune": lambda s: s.prune(dry_run=True).removed == (),
    }
    stored = oracle.raw(old)
    for act, right_answer in acts.items():
        at, struck = 0, ""
        while struck is not None:
            store = oracle.copied(old)
            broken = oracle.wrapped(store, oracle.Faulty, fault, at)
            try:
                fine = right_answer(broken)
            except BundlerError:
                fine = True
            struck = broken._backend.inner.struck
            # A tag that came damaged is reported as one that cannot be read; nothing else is wrong.
            assert fine or (fault, struck) == ("flips", "read_ref"), (act, struck)
            assert oracle.raw(store) == stored
            at += 1
        assert at > 2


@pytest.mark.parametrize("fault", ["fails", "loses", "flips"])
def test_a_prune_that_fails_has_removed_nothing_that_is_needed(fault):
    """Stopped at any call, pruning leaves a store that verifies, tags that are whole, and a second
    prune that completes.
    """
    old = with_old("merge")
    for seeds in ("CD", "DE", "F"):
        old.push(oracle.bundle(*seeds))
    oracle.age(old, 2 * oracle.DAY_S)
    right = oracle.contents(old.pull("t"))
    complete = oracle.copied(old)
    assert len(complete.prune().removed) == 15
    for name, error, store in every_call(lambda: old, fault, lambda s: s.prune()):
        assert error is None or isinstance(error, TYPED), name
        assert store.verify().sound, name
        assert oracle.contents(store.pull("t", read_only=True)) == right
        store.prune()
        assert oracle.raw(store) == oracle.raw(complete)


@pytest.mark.parametrize("fault", ["fails", "loses"])
def test_deleting_a_tag_may_be_repeated(fault):
    """A failed deletion has happened or not; the second try ends without the tag."""
    old = with_old("merge")
    for name, error, store in [*_calls(old, fault)]:
        assert isinstance(error, TYPED)
        assert (store.tags() == ()) == ((name, fault) == ("swap_ref", "loses"))
        store.delete_tag("t")
        assert store.tags() == ()


def _calls(old, fault):
    for at in range(2):
        store = oracle.copied(old)
        broken = oracle.wrapped(store, oracle.Faulty, fault, at)
        with pytest.raises(BundlerError) as caught:
            broken.delete_tag("t")
        yield broken._backend.inner.struck, caught.value, store


def test_a_way_that_damages_everything_removes_nothing():
    """A reader whose memory or network is broken, so that each answer is damaged differently, does
    not empty the store.
    """

    class Broken(oracle.Wrapped):
        number = 0

        def around(self, name, call, argument):
            answer = call(argument)
            if name != "get":
                return answer
            type(self).number += 1
            return {
                key: data[:-1] + bytes([data[-1] ^ (self.number % 255 + 1)])
                for key, data in answer.items()
            }

    old = with_old("merge")
    stored = oracle.raw(old)
    broken = Store(Broken(oracle.innermost(old)), "memory:")
    with pytest.raises(DigestMismatch):
        broken.pull("t")
    with pytest.raises(BundlerError):
        broken.push(oracle.bundle("C"), "t")
    assert not broken.verify(repair=True).sound
    assert stored.items() <= oracle.raw(old).items()
    assert oracle.kernels(old.pull("t")) == oracle.keys("A", "B")


def test_a_swap_that_others_win_is_tried_again(memory):
    """A push whose tag changed meanwhile merges with what it names now."""
    memory.push(oracle.bundle("A"), "t")
    slow = oracle.wrapped(memory, oracle.Pausing, "put", "after")
    with oracle.running(lambda: slow.push(oracle.bundle("B"), "t")):
        assert slow._backend.inner.reached.wait(60)
        memory.push(oracle.bundle("C"), "t")
        slow._backend.inner.go_on.set()
    assert oracle.contents(memory.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C"))
    assert memory.verify().sound


def test_a_tag_that_is_created_meanwhile_is_not_created_again(memory):
    """Of two that create a tag one succeeds, and the other is told."""
    from bundler.errors import MergeConflict

    slow = oracle.wrapped(memory, oracle.Pausing, "put", "after")
    with (
        pytest.raises(MergeConflict),
        oracle.running(lambda: slow.push(oracle.bundle("B"), "t", "create")),
    ):
        assert slow._backend.inner.reached.wait(60)
        memory.push(oracle.bundle("C"), "t", "create")
        slow._backend.inner.go_on.set()
    assert oracle.kernels(memory.pull("t")) == oracle.keys("C")


def test_a_tag_that_never_holds_still_is_given_up(memory):
    """After many lost races the push says so, with a typed error."""

    class Losing(oracle.Wrapped):
        def around(self, name, call, argument):
            return False if name == "swap_ref" else call(argument)

    losing = oracle.wrapped(memory, Losing)
    with pytest.raises(
        StoreUnavailable, match="tag t changed 100 times while we pushed; try again"
    ):
        losing.push(oracle.bundle("A"), "t")
    memory.push(oracle.bundle("A"), "t")
    with pytest.raises(StoreUnavailable, match="tag t keeps changing; try again"):
        losing.delete_tag("t")


def test_several_kinds_of_entries_survive_a_failed_push(memory):
    """Tuning files, libraries and pickles are all there after a failure and a second push."""
    bundle = build.several()
    for name, _, store in every_call(lambda: memory, "fails", lambda s: s.push(bundle, "t")):
        store.push(bundle, "t")
        assert oracle.contents(store.pull("t")) == oracle.contents(bundle), name


def test_a_manifest_that_comes_damaged_twice_is_not_given_up(memory):
    """While the tag's manifest cannot be read although it is there, a merge raises; what the tag
    holds is not replaced.
    """
    memory.push(oracle.bundle("A", "B"), "t")
    manifest = oracle.manifest_of(memory, "t")

    class Bad(oracle.Wrapped):
        left = 2

        def around(self, name, call, argument):
            answer = call(argument)
            if name == "get" and manifest in answer and self.left:
                self.left -= 1
                answer[manifest] = answer[manifest][: -1 - self.left]
            return answer

    with pytest.raises(DigestMismatch):
        oracle.wrapped(memory, Bad).push(oracle.bundle("C"), "t")
    assert oracle.kernels(memory.pull("t")) == oracle.keys("A", "B")
    memory.push(oracle.bundle("C"), "t")
    assert oracle.contents(memory.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C"))
