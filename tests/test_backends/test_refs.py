# SPDX-License-Identifier: Apache-2.0
"""Refs of the local store when writers sleep at the worst moment: no lost update, and nobody is
told a success that was none.
"""

import threading

import disk
import pytest

from bundler.backends import file_steps, refs
from bundler.backends.local import LocalBackend

MANY = refs.KEPT_NUMBERS + refs.HISTORY + 10


def number(backend):
    """Return the number in the ref of these tests."""
    return int(backend.read_ref("t") or 0)


def add(backend, times=1):
    """Add one to it, so often, undisturbed."""
    for _ in range(times):
        before = backend.read_ref("t")
        assert backend.swap_ref("t", before, b"%d" % (int(before or 0) + 1))


class Sleeper(threading.Thread):
    """Swaps once on a handle of its own, and sleeps before or after taking its number until it is
    woken.
    """

    def __init__(self, root, when, value):
        super().__init__()
        self.backend, self.value, self.result = LocalBackend(str(root)), value, None
        self.asleep, self.awake = threading.Event(), threading.Event()
        self.expected = self.backend.read_ref("t")
        create = self.backend._create

        def sleeping(target, data):
            if when == "before":
                self._sleep()
            taken = create(target, data)
            if when == "after":
                self._sleep()
            return taken

        self.backend._create = sleeping
        self.start()
        assert self.asleep.wait(60)

    def run(self):
        """Swap."""
        self.result = self.backend.swap_ref("t", self.expected, self.value)

    def _sleep(self):
        self.asleep.set()
        assert self.awake.wait(60)

    def wake(self):
        """Let it go on, and return what the swap returned."""
        self.awake.set()
        self.join(60)
        return self.result


@pytest.fixture
def hasty(monkeypatch):
    """Old numbers are cleaned away at once, not after an hour."""
    monkeypatch.setattr(refs, "KEPT_S", -1.0)


@pytest.mark.parametrize("others", [0, 1, refs.KEPT_NUMBERS, refs.KEPT_NUMBERS + 1, MANY])
def test_who_sleeps_after_taking_a_number_has_succeeded(local, root, others):
    """A writer that took its number and then slept is told that it succeeded, however much was
    built on its value.
    """
    add(local, 3)
    sleeper = Sleeper(root, "after", b"100")
    assert number(local) == 100
    add(local, others)
    assert sleeper.wake() is True
    assert number(local) == 100 + others


@pytest.mark.parametrize("others", [1, refs.KEPT_NUMBERS, refs.KEPT_NUMBERS + 1, MANY])
def test_who_sleeps_before_taking_a_number_has_lost(local, root, others):
    """A writer that others overtook while it slept changes nothing, and is told so."""
    add(local, 3)
    sleeper = Sleeper(root, "before", b"100")
    add(local, others)
    assert sleeper.wake() is False
    assert number(local) == 3 + others


@pytest.mark.parametrize("others", [refs.KEPT_NUMBERS, refs.KEPT_NUMBERS + 1, 30, MANY])
def test_a_number_that_was_cleaned_away_can_be_taken_but_counts_for_nothing(
    local, root, hasty, others
):
    """A writer that slept until its number was free again is not told a success, and leaves
    nothing.
    """
    add(local, 3)
    sleeper = Sleeper(root, "before", b"100")
    add(local, others)
    before = disk.generations(root, "t")
    assert (4 in before) == (others < refs.KEPT_NUMBERS + 1)
    assert sleeper.wake() is False
    assert number(local) == 3 + others
    assert disk.generations(root, "t") == before
    add(local)
    assert number(local) == 4 + others


def test_readers_do_not_see_a_number_that_counts_for_nothing(local, root, hasty):
    """While a sleeper's stale number lies there, everybody reads and swaps the current value."""
    add(local, 3)
    early = Sleeper(root, "before", b"100")
    create = early.backend._create
    taken, go_on = threading.Event(), threading.Event()
    real = file_steps.create

    add(local, 20)

    def create_and_wait(temporary, target):
        made = real(temporary, target)
        if threading.current_thread() is early:
            taken.set()
            assert go_on.wait(60)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_steps, "create", create_and_wait)
        early.awake.set()
        assert taken.wait(60)
        assert 4 in disk.generations(root, "t")
        assert number(local) == 23
        add(local, 2)
        assert number(LocalBackend(str(root))) == 25
        go_on.set()
        early.join(60)
    assert create is early.backend._create
    assert early.result is False
    assert (number(local), 4 in disk.generations(root, "t")) == (25, False)


def test_an_hour_of_numbers_decides_for_who_slept_long(local, root):
    """Numbers of the last hour are kept, so that a sleeper finds the one that was built on
    its own.
    """
    sleeper = Sleeper(root, "after", b"1")
    add(local, MANY)
    assert disk.generations(root, "t") == list(range(1, MANY + 2))
    assert sleeper.wake() is True


def test_who_sleeps_too_long_is_never_told_a_false_success(local, root, hasty):
    """Only beyond an hour and the history can a success be taken for a failure; never the other way
    round.
    """
    sleeper = Sleeper(root, "after", b"1")
    add(local, MANY)
    assert sleeper.wake() is False
    assert number(local) == 1 + MANY


def test_two_sleepers_of_one_value_do_not_both_succeed(local, root):
    """Of two that read the same value and woke together one has succeeded."""
    add(local, 3)
    sleepers = [Sleeper(root, "before", b"100"), Sleeper(root, "before", b"200")]
    assert [sleeper.wake() for sleeper in sleepers] == [True, False]
    assert number(local) == 100


def test_reading_survives_the_cleaning_of_what_it_was_about_to_read(
    local, root, hasty, monkeypatch
):
    """A reader whose file is cleaned away between the listing and the reading looks again."""
    add(local, 3)
    reader = LocalBackend(str(root))
    real, turns = file_steps.read, []

    def read(path, *limit):
        if not turns:
            turns.append(path)
            add(local, 20)
        return real(path, *limit)

    monkeypatch.setattr(file_steps, "read", read)
    assert reader.read_ref("t") == b"23"


def test_taking_effect_survives_the_cleaning_of_what_it_was_about_to_read(
    root, local, hasty, monkeypatch
):
    """A writer whose successor's file is cleaned away while it looks, looks again."""
    sleeper = Sleeper(root, "after", b"1")
    add(local, 2)
    real, turns = file_steps.read, []

    def read(path, *limit):
        if threading.current_thread() is sleeper and not turns:
            turns.append(path)
            add(local, 20)
        return real(path, *limit)

    monkeypatch.setattr(file_steps, "read", read)
    assert sleeper.wake() is True
    assert turns
    assert number(local) == 23


@pytest.mark.parametrize("damage", [b"", b"\0", b"\xff\xff\x01"])
def test_a_damaged_ref_counts_as_not_set_and_can_be_set(local, root, damage):
    """A value that a failing disk destroyed is not a value, and does not stand in the way."""
    add(local, 3)
    (root / "refs" / "t" / "+gen" / "0000000003").write_bytes(damage)
    assert local.read_ref("t") is None
    assert list(local.list_refs()) == []
    assert not local.swap_ref("t", b"3", b"4")
    assert local.swap_ref("t", None, b"7")
    assert local.read_ref("t") == b"7"


def test_a_failure_to_clean_does_not_hide_a_success(local, root, hasty, failing):
    """What cannot be cleaned away stays for the next; the swap has succeeded."""
    import errno

    add(local, 12)
    failing("unlink", errno.EACCES, where="+gen")
    add(local)
    assert number(local) == 13
    assert len(disk.generations(root, "t")) == refs.KEPT_NUMBERS + 1


def test_versions_come_back_as_they_were():
    """Encoding keeps number, tokens and value, and no more tokens than the history holds."""
    version = refs.NEVER_SET
    for value in (b"", None, b"x" * 1000, *[b"y"] * refs.HISTORY):
        version = refs.following(version, value)
        assert refs.Version.decode(version.number, version.encode()) == version
    assert len(version.tokens) == refs.HISTORY
    assert len(set(version.tokens)) == refs.HISTORY


def test_deleting_spares_what_is_touched_at_the_last_moment(local, root, monkeypatch):
    """An object that somebody touches between the look and the removal is put back."""
    import os

    local.put({"a": b"1"})
    (stat,) = local.list()
    disk.age(disk.place(root, "a"), 100)
    real = os.rename

    def rename(source, target):
        LocalBackend(str(root)).touch(["a"])
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert local.delete(["a"], unmodified_since_s=stat.modified_s - 50) == frozenset()
    assert local.get(["a"]) == {"a": b"1"}
    assert disk.temporaries(root) == []


def test_deleting_does_not_overwrite_what_is_put_meanwhile(local, root, monkeypatch):
    """An object that is created while another of its key is put aside stays."""
    import os

    local.put({"a": b"1"})
    (stat,) = local.list()
    disk.age(disk.place(root, "a"), 100)
    real = os.rename

    def rename(source, target):
        other = LocalBackend(str(root))
        other.touch(["a"])
        real(source, target)
        assert other.put({"a": b"2"}) == {"a"}

    monkeypatch.setattr(os, "rename", rename)
    assert local.delete(["a"], unmodified_since_s=stat.modified_s - 50) == frozenset()
    assert local.get(["a"]) == {"a": b"2"}
