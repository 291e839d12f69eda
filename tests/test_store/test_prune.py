# SPDX-License-Identifier: Apache-2.0
"""Pruning: what may go, in which order, what is spared, and who stands in the way."""

import oracle
import pytest
import store_builders as build
from hypothesis import given
from hypothesis import strategies as st

from bundler import open_store
from bundler.errors import AccessDenied, ConfigError, NotFound

DAYS = oracle.DAY_S


@pytest.fixture
def filled(store):
    """A store in which the tag t names A and B, and C and D lie there without a tag; all are ten
    days old.
    """
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("B", "C"))
    store.push(oracle.bundle("D"))
    oracle.age(store, 10 * DAYS)
    return store


def sizes(store, *keys):
    """Return the stored bytes of objects; of all without keys."""
    found = oracle.raw(store)
    return sum(len(found[key]) for key in keys or found)


def reached(store, tag="t"):
    """Return the keys that a tag reaches, told a second time."""
    with store.pull(tag, read_only=True) as pulled:
        entries = {oracle.entry_of(kernel) for kernel in pulled.kernels}
        return (
            {oracle.manifest_of(store, tag)}
            | entries
            | {
                oracle.unit_of(store, pulled, number, kind)
                for number in range(len(pulled.kernels))
                for kind in ("cubin", "ttir")
            }
        )


def test_what_no_tag_reaches_is_removed(filled):
    """Objects that nothing tagged needs go; what a tag reaches stays, shared units included."""
    needed = reached(filled)
    before = oracle.raw(filled)
    report = filled.prune()
    assert set(report.removed) == before.keys() - needed
    assert set(oracle.raw(filled)) == needed
    assert report.removed_bytes == sum(len(before[key]) for key in report.removed)
    assert report.kept_bytes == report.tagged_bytes == sizes(filled)
    assert (report.spared, report.over_limit_bytes, report.unfollowed) == (0, 0, ())
    assert filled.verify().sound
    assert oracle.contents(filled.pull("t")) == oracle.contents(oracle.bundle("A", "B"))
    assert filled.prune().removed == ()


def test_a_dry_run_removes_nothing_and_says_the_same(filled):
    """What would be removed is what is removed then."""
    before = oracle.raw(filled)
    dry = filled.prune(dry_run=True)
    assert oracle.raw(filled) == before
    assert filled.prune() == dry


def test_what_was_touched_in_the_last_day_is_spared(filled):
    """Young objects stay, with all that a young manifest names, and are counted."""
    oracle.age(filled, DAYS - 600)
    report = filled.prune()
    assert (report.removed, report.spared) == ((), len(oracle.raw(filled)) - len(reached(filled)))
    oracle.age(filled, 2 * DAYS)
    (manifest,) = [
        k for k in oracle.of_kind(filled, "m") if k.split("/")[2] == oracle.bundle("D").digest[7:]
    ]
    oracle.age(filled, 0, manifest)
    report = filled.prune()
    assert report.spared == 3
    assert filled.verify().sound
    assert oracle.contents(filled.pull(oracle.bundle("D").digest)) == oracle.contents(
        oracle.bundle("D")
    )


def test_age_is_on_the_clock_of_the_store(filled, monkeypatch):
    """A machine whose clock is wrong removes nothing that the store's clock calls young."""

    class Elsewhere(oracle.Wrapped):
        def now_s(self):
            return super().now_s() - 9.5 * DAYS

    assert oracle.wrapped(filled, Elsewhere).prune().removed == ()
    assert len(filled.prune().removed) == 8


def test_the_oldest_go_first_until_there_is_room(filled):
    """With a limit, objects go by age until the store is small enough."""
    total = sizes(filled)
    (old,) = [
        k for k in oracle.of_kind(filled, "m") if k.split("/")[2] == oracle.bundle("D").digest[7:]
    ]
    units = [oracle.unit_of(filled, oracle.bundle("D"), 0, kind) for kind in ("cubin", "ttir")]
    (entry,) = [oracle.entry_of(kernel) for kernel in oracle.bundle("D").kernels]
    oracle.age(filled, 20 * DAYS, old, entry, *units)
    assert filled.prune(max_bytes=total).removed == ()
    for first in (entry, old):
        report = filled.prune(max_bytes=sizes(filled) - 1)
        assert report.removed == (first,)
    assert report.kept_bytes == sizes(filled) < total
    report = filled.prune(max_bytes=sizes(filled) - 1)
    assert len(report.removed) == 1
    assert report.removed[0] in units
    assert filled.verify().sound


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_pruning_half_leaves_no_manifest_without_its_units(filled, steps):
    """Wherever a limit stops pruning, what is left is sound: manifests go before what they name."""
    for _ in range(steps):
        assert len(filled.prune(max_bytes=sizes(filled) - 1).removed) >= 1
        assert filled.verify().sound


@given(st.data())
def test_whatever_was_used_when_what_is_left_is_sound(data):
    """Each object has an age of its own, since an entry is marked by a push of another bundle and
    a unit by one that shares it: no prune leaves a name without what it names.
    """
    with open_store("memory:") as store:
        for letters in ("AB", "BC", "D"):
            store.push(oracle.bundle(*letters), "t" if letters == "AB" else None)
        for key in sorted(oracle.raw(store)):
            oracle.age(store, data.draw(st.sampled_from([0, 2, 3]), key) * DAYS, key)
        most = data.draw(st.none() | st.integers(0, sizes(store)), "max_bytes")
        store.prune(max_bytes=most)
        assert store.verify().dangling == ()


def test_tagged_bytes_alone_may_exceed_the_limit(filled):
    """Nothing that a tag reaches goes for a limit's sake; the report says by how much it is
    exceeded.
    """
    tagged = sizes(filled, *reached(filled))
    report = filled.prune(max_bytes=tagged - 7)
    assert (report.kept_bytes, report.tagged_bytes, report.over_limit_bytes) == (tagged, tagged, 7)
    assert filled.prune(max_bytes=0, dry_run=True).over_limit_bytes == tagged
    assert filled.prune(max_bytes=tagged).over_limit_bytes == 0


def test_what_is_spared_counts_against_the_limit(filled):
    """Young objects that make the store too large are reported too."""
    oracle.age(filled, 0)
    report = filled.prune(max_bytes=1)
    assert (report.removed, report.over_limit_bytes) == ((), sizes(filled) - 1)


def test_an_age_can_be_asked_for(filled):
    """With an age only what is older goes, and never what is younger than a day."""
    assert filled.prune(older_than_s=11 * DAYS).removed == ()
    (old,) = [
        k for k in oracle.of_kind(filled, "m") if k.split("/")[2] == oracle.bundle("D").digest[7:]
    ]
    units = [oracle.unit_of(filled, oracle.bundle("D"), 0, kind) for kind in ("cubin", "ttir")]
    (entry,) = [oracle.entry_of(kernel) for kernel in oracle.bundle("D").kernels]
    oracle.age(filled, 12 * DAYS, old, entry, *units)
    report = filled.prune(older_than_s=11 * DAYS)
    assert set(report.removed) == {old, entry, *units}
    assert report.removed[:2] == (entry, old)
    oracle.age(filled, DAYS / 2)
    assert filled.prune(older_than_s=0).removed == ()


def held(report):
    """Return {what holds: (objects, bytes)} of a report."""
    return {one.by: (one.objects, one.size_bytes) for one in report.held}


def test_a_grace_of_nothing_frees_space_at_once(store):
    """With no grace what no tag reaches goes the moment it is pushed; what a tag reaches is
    whole.
    """
    store.push(oracle.bundle("A", "B"), "t")
    store.push(oracle.bundle("B", "C"))
    needed, before = reached(store), oracle.raw(store)
    assert store.prune().removed == ()
    assert set(store.prune(grace_s=0, dry_run=True).removed) == before.keys() - needed
    report = store.prune(grace_s=0)
    assert set(report.removed) == before.keys() - needed
    assert (set(oracle.raw(store)), report.spared, report.grace_s) == (needed, 0, 0)
    assert held(report) == {"tags": (7, report.tagged_bytes)}
    assert oracle.contents(store.pull("t")) == oracle.contents(oracle.bundle("A", "B"))
    store.delete_tag("t")
    assert store.prune(grace_s=0).kept_bytes == 0


def test_a_grace_is_as_long_as_was_asked_for(filled):
    """What was used within the grace stays, whether that is a minute or a month."""
    assert filled.prune(grace_s=11 * DAYS, dry_run=True).removed == ()
    oracle.age(filled, 90)
    assert filled.prune(grace_s=3600, dry_run=True).removed == ()
    assert len(filled.prune(grace_s=60).removed) == 8


@pytest.mark.parametrize("grace_s", [-1, float("nan"), float("inf")])
def test_a_grace_that_is_no_time_is_refused(filled, grace_s):
    """Seconds that are none are an error, and remove nothing."""
    before = oracle.raw(filled)
    with pytest.raises(ConfigError, match="grace_s"):
        filled.prune(grace_s=grace_s)
    assert oracle.raw(filled) == before


def test_the_report_says_what_holds_what(filled):
    """Each object that stays is counted once, under what holds it, and together they are what is
    kept.
    """
    total, tagged = sizes(filled), sizes(filled, *reached(filled))
    loose = [key for key in oracle.raw(filled) if key not in reached(filled)]
    young = sorted(key for key in loose if key.startswith("v1/u/"))[:1]
    oracle.age(filled, 60, *young)
    report = filled.prune(older_than_s=11 * DAYS)
    assert held(report) == {
        "tags": (7, tagged),
        "grace": (1, sizes(filled, *young)),
        "older_than": (7, total - tagged - sizes(filled, *young)),
    }
    report = filled.prune(max_bytes=total - 1)
    assert sum(one.size_bytes for one in report.held) == report.kept_bytes == sizes(filled)
    assert set(held(report)) == {"tags", "grace", "max_bytes"}
    oracle.drop(filled, oracle.manifest_of(filled, "t"))
    report = filled.prune(grace_s=0)
    assert (set(held(report)), report.removed) == ({"unread tags"}, ())


def test_what_is_used_while_a_prune_runs_is_held_by_that(memory):
    """An object that somebody uses between the look and the removal is counted as such."""
    memory.push(oracle.bundle("A"))
    (manifest,) = oracle.of_kind(memory, "m")
    oracle.age(memory, 10 * DAYS)

    class Touching(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "delete":
                self.inner.touch([manifest])
            return call(argument)

    assert held(oracle.wrapped(memory, Touching).prune()) == {"use": (3, sizes(memory))}


def test_a_push_that_loses_units_to_a_prune_without_grace_is_mended_by_the_next(local):
    """Without grace a prune may take what a push is about to name: those kernels are misses, and
    the next push sends them.
    """
    local.push(oracle.bundle("A", "B"))
    slow = oracle.wrapped(local, oracle.Pausing, "swap_ref", "before")
    with oracle.running(lambda: slow.push(oracle.bundle("A", "B", "C"), "t")):
        assert slow._backend.inner.reached.wait(60)
        local.prune(grace_s=0)
        slow._backend.inner.go_on.set()
    with pytest.raises(NotFound, match="push the bundle again"):
        oracle.contents(local.pull("t"))
    assert not local.verify().sound
    local.push(oracle.bundle("A", "B", "C"), "t")
    assert oracle.contents(local.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C"))
    assert local.verify().sound


def test_age_and_limit_hold_together(filled):
    """Given both, only what is old enough goes, and no more than needed."""
    total = sizes(filled)
    assert filled.prune(max_bytes=0, older_than_s=11 * DAYS).removed == ()
    assert len(filled.prune(max_bytes=total - 1, older_than_s=5 * DAYS).removed) == 1


def test_units_of_pushes_that_never_ended_are_removed(store):
    """What a push sent that was killed before its manifest goes when it is old."""

    class Killed(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "put" and any(key.startswith("v1/m/") for key in argument):
                raise KeyboardInterrupt
            return call(argument)

    with pytest.raises(KeyboardInterrupt):
        oracle.wrapped(store, Killed).push(oracle.bundle("A"), "t")
    assert (len(oracle.of_kind(store, "u")), oracle.of_kind(store, "m")) == (2, [])
    assert (store.prune().removed, store.prune().spared) == ((), 2)
    oracle.age(store, 2 * DAYS)
    assert len(store.prune().removed) == 2


def test_several_tags_keep_what_each_reaches(filled):
    """A unit stays as long as one tag needs it."""
    filled.push(oracle.bundle("B", "C"), "u")
    filled.delete_tag("t")
    oracle.age(filled, 2 * DAYS)
    filled.prune()
    assert oracle.contents(filled.pull("u")) == oracle.contents(oracle.bundle("B", "C"))
    assert filled.verify().sound
    filled.delete_tag("u")
    oracle.age(filled, 2 * DAYS)
    filled.prune()
    assert oracle.raw(filled) == {}


def test_a_tag_that_is_set_anew_while_it_is_followed_does_not_stop_pruning(filled):
    """What another prune removed behind a tag that names something else by now is no damage."""
    filled.push(oracle.bundle("D"), "u")
    oracle.age(filled, 10 * DAYS)
    before = oracle.manifest_of(filled, "u")

    class Overtaken(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "get" and before in argument and before in oracle.raw(filled):
                filled.push(oracle.bundle("C"), "u", "replace")
                oracle.drop(filled, before)
            return call(argument)

    report = oracle.wrapped(filled, Overtaken).prune()
    assert report.unfollowed == ()
    assert before not in oracle.raw(filled)
    assert report.removed
    assert oracle.contents(filled.pull("u")) == oracle.contents(oracle.bundle("C"))
    assert filled.verify().sound


@pytest.mark.parametrize("harm", [oracle.flip, oracle.drop], ids=["damaged", "missing"])
def test_a_tag_that_cannot_be_followed_stops_pruning(filled, harm):
    """Without its manifest nobody knows what a tag reaches: nothing goes, the report says why,
    until it is repaired.
    """
    harm(filled, oracle.manifest_of(filled, "t"))
    report = filled.prune()
    assert (report.removed, [tag for tag, _ in report.unfollowed]) == ((), ["t"])
    assert report.spared > 0
    filled.push(oracle.bundle("A", "B"), "t")
    assert len(filled.prune().removed) == 8
    assert filled.verify().sound


def test_a_damaged_manifest_that_no_tag_names_does_not(filled):
    """What is loose and damaged is removed like anything loose."""
    for key in oracle.of_kind(filled, "m"):
        if key != oracle.manifest_of(filled, "t"):
            oracle.flip(filled, key)
    oracle.age(filled, 2 * DAYS)
    assert len(filled.prune().removed) == 8
    assert filled.verify().sound


def test_a_listing_that_lacks_tags_is_an_error_and_nothing_is_removed(local, root, monkeypatch):
    """When the tags cannot all be listed, what they reach would look loose; nothing goes."""
    import os

    from bundler.errors import StoreUnavailable

    local.push(oracle.bundle("A"), "team/t")
    local.push(oracle.bundle("B"))
    oracle.age(local, 2 * DAYS)
    real, before = os.scandir, oracle.raw(local)

    def scandir(path):
        if str(path).endswith("refs/v1/t/team"):
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StoreUnavailable):
        local.prune()
    monkeypatch.undo()
    assert oracle.raw(local) == before


def test_a_store_that_may_not_be_changed_says_so(filled):
    """Pruning what we may only read is denied; a dry run works."""
    reader = oracle.wrapped(filled, oracle.Denying)
    with pytest.raises(AccessDenied):
        reader.prune()
    assert len(reader.prune(dry_run=True).removed) == 8


# ------------------------------------------------------------------------------------ Beside others


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["list", "read_ref", "get", "delete"])
def test_a_push_beside_a_prune_loses_nothing(local, name, when):
    """A bundle that is pushed while a prune stands at any of its calls, all of whose units were
    about to go, is whole.
    """
    local.push(oracle.bundle("A", "B"))
    local.push(oracle.bundle("C"), "other")
    oracle.age(local, 10 * DAYS)
    slow = oracle.wrapped(local, oracle.Pausing, name, when)
    with oracle.running(slow.prune):
        assert slow._backend.inner.reached.wait(60)
        local.push(oracle.bundle("A", "B"), "t")
        slow._backend.inner.go_on.set()
    assert oracle.contents(local.pull("t")) == oracle.contents(oracle.bundle("A", "B"))
    assert local.verify().sound


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "cheap"),
    [
        ("get", True),
        ("exists", False),
        *((n, c) for n in ("touch", "put", "flush", "swap_ref", "read_ref") for c in (True, False)),
    ],
)
def test_a_prune_beside_a_push_takes_nothing(local, name, when, cheap):
    """A prune that runs while a push stands at any of its calls leaves what the push will name."""
    local.push(oracle.bundle("A", "B"))
    oracle.age(local, 10 * DAYS)
    slow = oracle.wrapped(local, oracle.Pausing, name, when)
    slow._backend.reads_are_cheap = cheap
    with oracle.running(lambda: slow.push(oracle.bundle("A", "B", "C"), "t")):
        assert slow._backend.inner.reached.wait(60)
        local.prune()
        slow._backend.inner.go_on.set()
    assert oracle.contents(local.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C"))
    assert local.verify().sound


def test_what_is_touched_between_the_look_and_the_removal_stays(local, monkeypatch):
    """A push that finds an object at the very moment of its removal finds it afterwards too."""
    import os

    local.push(oracle.bundle("A"))
    oracle.age(local, 10 * DAYS)
    real, pushed = os.rename, []

    def rename(source, target):
        if not pushed:
            pushed.append(local.push(oracle.bundle("A"), "t"))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    report = local.prune()
    assert pushed[0].blobs_sent == 0
    assert report.removed == ()  # nor is the entry by which its kernel is found
    assert local.kernel_records().look_up([oracle.bundle("A").kernels[0].key]).bundle.kernels
    assert oracle.contents(local.pull("t")) == oracle.contents(oracle.bundle("A"))


def test_a_manifest_that_stays_keeps_its_units(memory):
    """When a manifest turns out to be in use, its units are not removed either, touched or not."""
    memory.push(oracle.bundle("A"))
    oracle.age(memory, 10 * DAYS)
    (manifest,) = oracle.of_kind(memory, "m")

    class Touching(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "delete":
                self.inner.touch([manifest])
            return call(argument)

    entry = oracle.entry_of(oracle.bundle("A").kernels[0])
    assert oracle.wrapped(memory, Touching).prune().removed == (entry,)
    assert memory.verify().sound


def test_pruning_takes_few_round_trips(memory):
    """A prune of a hundred bundles removes in batches."""
    for seed in range(100):
        memory.push(oracle.bundle(seed))
    oracle.age(memory, 10 * DAYS)
    noting = oracle.wrapped(memory, oracle.Noting)
    assert len(noting.prune().removed) == 400
    assert [len(keys) for keys in noting._backend.inner.named("delete")] == [100, 100, 200]
    assert len(noting._backend.inner.calls) < 18


def test_entries_of_every_kind_are_kept_and_removed(store):
    """Tuning files, libraries and pickles are units like others."""
    bundle = build.several()
    store.push(bundle, "t")
    oracle.age(store, 10 * DAYS)
    assert store.prune().removed == ()
    store.delete_tag("t")
    store.prune()
    assert oracle.raw(store) == {}
