# SPDX-License-Identifier: Apache-2.0
"""Looking after kernels and files that were published one by one: counted, checked, and removed
with what only they need.
"""

import oracle
import pytest

from bundler.store.kernel_records import FAILURES, KernelRecords

DAYS = oracle.DAY_S
A, B = (oracle.restorable(seed) for seed in "AB")


def records(store):
    """Return the records of a store."""
    return KernelRecords(oracle.innermost(store), store.name)


def record_of(bundle):
    """Return the key of a kernel's record."""
    return f"v1/k/{bundle.kernels[0].key}"


@pytest.fixture
def published(store):
    """A store with the records of A and B, of which a tag reaches the units of B."""
    for bundle in (A, B):
        assert records(store).publish(bundle).created
    store.push(B, "t")
    return store


def units(store, bundle):
    """Return the keys of a kernel's units."""
    return {oracle.unit_of(store, bundle, 0, kind) for kind in ("cubin", "ttir")}


def test_stats_count_records(published):
    """Records, single files and failures have numbers of their own; their units count as units."""
    records(published).tell_failure(A.kernels[0].key, "no")
    published.file_records().publish("tuned", "x.json", b"{}")
    stats, raw = published.stats(), oracle.raw(published)
    assert (stats.units, stats.manifests, stats.records, stats.failures) == (4, 1, 3, 1)
    assert stats.record_bytes == sum(
        len(value) for key, value in raw.items() if key[:5] in {"v1/k/", "v1/s/"}
    )
    assert stats.index_bytes == sum(len(raw[key]) for key in oracle.of_kind(published, "b"))
    parts = (stats.unit_bytes, stats.manifest_bytes, stats.record_bytes, stats.index_bytes)
    assert sum(parts) == sum(map(len, raw.values()))
    keys = {key[5:] for key in raw if key[:5] in {"v1/k/", "v1/b/"}}
    assert stats.kernels == len(keys)


def test_verify_checks_records_and_their_units(published):
    """A store with records is sound; a flipped bit in a unit that only a record names is found in
    its blobs.
    """
    published.file_records().publish("tuned", "x.json", b"{}")
    assert published.verify().sound
    assert published.verify().checked == len(oracle.raw(published))
    (unit, other) = sorted(units(published, A))
    # Another payload under its key, sealed well: only who knows what is in a unit can tell.
    oracle.overwrite(published, unit, oracle.raw(published)[other])
    assert [key for key, _ in published.verify().damaged] == [unit]


def test_a_damaged_record_is_found_and_removed(published):
    """It is reported as any object is; once it is gone, the next build is everybody's."""
    oracle.flip(published, record_of(A))
    report = published.verify()
    assert [key for key, _ in report.damaged] == [record_of(A)]
    assert published.verify(repair=True).removed == (record_of(A),)
    assert published.verify().sound
    assert records(published).publish(A).created == {A.kernels[0].key}


def test_a_record_whose_unit_is_gone_is_dangling_and_removed(published):
    """verify says which kernel lacks what; with repair its record goes, and with it whatever stands
    in the next build's way.
    """
    oracle.drop(published, *units(published, A))
    report = published.verify()
    assert [name for name, _ in report.dangling] == [A.kernels[0].key]
    assert "2 of 2 units missing" in report.dangling[0][1]
    assert record_of(A) in oracle.raw(published)
    assert published.verify(repair=True).removed == (record_of(A),)
    assert published.verify().sound
    records(published).publish(A)
    assert records(published).look_up([A.kernels[0].key]).missing == ()


def test_a_damaged_unit_takes_its_record_with_it(published):
    """After one repair nothing dangles."""
    unit = min(units(published, A))
    oracle.flip(published, unit)
    assert set(published.verify(repair=True).removed) == {unit, record_of(A)}
    assert published.verify().sound


def test_a_failure_that_cannot_be_read_is_found_and_removed(published):
    """What waiters could make nothing of goes; what they can read stays."""
    backend = oracle.innermost(published)
    records(published).tell_failure(A.kernels[0].key, "no")
    bad = f"{FAILURES}/{B.kernels[0].key}"
    assert backend.swap_ref(bad, None, b"\x00")
    assert [key for key, _ in published.verify().damaged] == [bad]
    assert published.verify(repair=True).removed == (bad,)
    assert backend.read_ref(bad) is None
    assert published.verify().sound
    assert records(published).failure(A.kernels[0].key).message == "no"


def test_prune_keeps_what_a_record_needs_while_the_record_is_in_use(published):
    """A record used lately keeps its units, however old they are; nothing else does."""
    oracle.age(published, 10 * DAYS)
    oracle.age(published, 0, record_of(A))
    report = published.prune()
    assert set(report.removed) == {record_of(B)}
    assert published.verify().sound
    assert records(published).look_up([A.kernels[0].key]).missing == ()


def test_prune_removes_records_by_age_and_size_with_their_units(published):
    """The same rules as for a bundle without a tag: oldest first, the record before its units, what
    a tag reaches stays.
    """
    oracle.age(published, 10 * DAYS)
    mine = units(published, A)
    oracle.age(published, 20 * DAYS, record_of(A), *mine)
    assert published.prune(older_than_s=30 * DAYS).removed == ()
    total = sum(map(len, oracle.raw(published).values()))
    dry = published.prune(max_bytes=total - 1, dry_run=True)
    assert dry.removed == (record_of(A),)
    report = published.prune(older_than_s=15 * DAYS)
    assert report.removed[0] == record_of(A)
    assert set(report.removed) == {record_of(A), *mine}
    assert published.verify().sound
    assert published.prune().removed == (record_of(B),)
    assert units(published, B) <= oracle.raw(published).keys()


def test_a_record_that_is_looked_up_while_a_prune_runs_keeps_its_units(published):
    """The record is spared, being in use, and so is what it names."""
    oracle.age(published, 10 * DAYS)

    class LookedUp(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "delete" and record_of(A) in argument:
                self.inner.touch([record_of(A)])
            return call(argument)

    removed = oracle.wrapped(published, LookedUp).prune().removed
    assert set(removed) == {record_of(B)}
    assert published.verify().sound
