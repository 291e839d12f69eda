# SPDX-License-Identifier: Apache-2.0
"""What the local store does when the file system fails: typed errors, nothing half-done, nothing
left, and it goes on.
"""

import contextlib
import errno
import logging
import os
import threading
import time

import disk
import pytest

from bundler.backends import file_steps
from bundler.backends import local as local_module
from bundler.backends.backend_errors import BackendError, BackendFull, BackendUnavailable
from bundler.backends.local import FULL_PAUSE_S, STALE_AFTER_S, LocalBackend
from bundler.backends.testing.backend_contract import in_threads

# --------------------------------------------------------------------------------- The disk is full


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(local_module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    """The clock by which writing pauses."""
    return Clock(monkeypatch)


@pytest.fixture
def warned(caplog):
    """Return the texts of the warnings so far."""
    caplog.set_level(logging.WARNING, "bundler.backends")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("number", sorted(file_steps.FULL))
def test_a_full_disk_pauses_writing(local, root, failing, clock, warned, number):
    """After one failure writing stops for a while with one warning; then it is tried again."""
    local.put({"a": b"1"})
    left = failing("write", number, times=1)
    with pytest.raises(BackendFull, match="free some space, or prune the store"):
        local.put({"b": b"2"})
    assert (left, disk.temporaries(root), local.exists(["b"])) == ([0], [], frozenset())
    for change in (
        lambda: local.put({"b": b"2"}),
        lambda: local.swap_ref("t", None, b"3"),
        lambda: local.lease("k", 9),
    ):
        clock.now += FULL_PAUSE_S / 4
        with pytest.raises(BackendFull, match=r"was full; writing is tried again in \d+ s"):
            change()
    assert local.get(["a"]) == {"a": b"1"}
    clock.now += FULL_PAUSE_S
    assert local.put({"b": b"2"}) == {"b"}
    assert warned() == [f"{root} is full; writing pauses for 30 s"]


def test_a_disk_that_stays_full_is_warned_of_once_a_pause(local, failing, clock, warned):
    """Each pause has one warning."""
    failing("write", errno.ENOSPC)
    for turn in range(3):
        clock.now += FULL_PAUSE_S
        with pytest.raises(BackendFull):
            local.put({"a": b"1"})
        with pytest.raises(BackendFull):
            local.put({"a": b"1"})
        assert len(warned()) == turn + 1


def test_threads_that_fill_the_disk_together_warn_once(local, monkeypatch, clock, warned):
    """However many writers find the disk full at once, there is one warning."""
    together = threading.Barrier(8)

    def write(*args):
        together.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    def put(number):
        with pytest.raises(BackendFull):
            local.put({f"k/{number}": b"1"})

    local.put({"a": b"1"})
    monkeypatch.setattr(os, "write", write)
    in_threads([lambda number=number: put(number) for number in range(8)])
    assert len(warned()) == 1


def test_deleting_and_the_time_work_while_writing_pauses(local, failing, clock, monkeypatch):
    """A full store can be pruned: what frees space is not paused, and knows the file
    system's time.
    """
    local.put({"a": b"1"})
    failing("write", errno.ENOSPC)
    with pytest.raises(BackendFull):
        local.put({"b": b"2"})
    (stat,) = local.list()
    monkeypatch.setattr("time.time", lambda: 12345.0)
    assert abs(local.now_s() - stat.modified_s) < 3600
    assert local.delete(["a"], unmodified_since_s=local.now_s() + 60) == {"a"}


def test_a_disk_that_tells_it_is_full_when_a_file_is_closed(local, root, monkeypatch):
    """Network file systems say so at the end; nothing is left then either."""
    local.put({"a": b"1"})
    real = os.close

    def close(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if "/tmp/" in name:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(BackendFull):
        local.put({"b": b"2"})
    monkeypatch.undo()
    assert (disk.temporaries(root), local.exists(["a", "b"])) == ([], {"a"})


def test_a_really_full_file_system(mounted, warned, clock):
    """On a file system of one megabyte writing stops, everything stored before reads, and after a
    delete it goes on.
    """
    place = mounted("small", "size=1m", "mode=700")
    with LocalBackend(str(place / "store")) as backend:
        stored = {}
        with pytest.raises(BackendFull):
            for number in range(100):
                item = {f"k/{number}": os.urandom(50_000)}
                backend.put(item)
                stored |= item
        assert 10 < len(stored) < 21
        assert backend.get(stored) == stored
        assert disk.temporaries(place / "store") == []
        assert backend.now_s() > time.time() - 3600
        backend.delete(list(stored))
        clock.now += FULL_PAUSE_S + 1
        assert backend.put({"again": b"x" * 50_000}) == {"again"}
        assert len(warned()) == 1


# ------------------------------------------------------------------------------------ Failing calls


class Failing:
    """Fails the n-th call of those functions of `os` that write, with an error; `late` after doing
    what was asked.
    """

    NAMES = (
        "open",
        "write",
        "close",
        "link",
        "mkdir",
        "chmod",
        "fchmod",
        "rename",
        "replace",
        "unlink",
        "listdir",
    )

    def __init__(self, patch, at, number, late=()):
        self.at, self.number, self.late, self.calls = at, number, late, []
        for name in self.NAMES:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.calls.append(name)
            if len(self.calls) - 1 != self.at:
                return real(*args, **kwargs)
            if name == "close" or name in self.late:
                real(*args, **kwargs)
            raise OSError(self.number, os.strerror(self.number))

        return call

    @property
    def failed(self):
        """The name of the call that failed; None when there were fewer."""
        return self.calls[self.at] if self.at < len(self.calls) else None


CHANGES = {
    "put": lambda backend: backend.put({"v1/u/new": b"new" * 1000, "v1/u/more": b"more"}),
    "swap_ref": lambda backend: backend.swap_ref("v1/t/demo", b"old", b"new"),
    "remove ref": lambda backend: backend.swap_ref("v1/t/demo", b"old", None),
    "delete": lambda backend: backend.delete(["v1/u/old"], unmodified_since_s=backend.now_s() + 60),
    "lease": lambda backend: backend.lease("k", 0.001),
}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("change", CHANGES)
def test_every_failing_call_is_a_typed_error_and_leaves_nothing(tmp_path, change, number):
    """Whatever call fails, the error is ours, things are as before or as after, no temporary stays,
    and a second try works.
    """
    at, failed = 0, []
    while not failed or failed[-1] is not None:
        root = tmp_path / str(at)
        with LocalBackend(str(root)) as backend:
            backend.put({"v1/u/old": b"old"})
            backend.swap_ref("v1/t/demo", None, b"old")
        with LocalBackend(str(root)) as backend, pytest.MonkeyPatch.context() as patch:
            broken = Failing(patch, at, number)
            with contextlib.suppress(BackendError):
                CHANGES[change](backend)
        failed.append(broken.failed)
        if broken.failed != "unlink":
            assert disk.temporaries(root) == [], broken.calls
        with LocalBackend(str(root)) as backend:
            found = backend.get(["v1/u/old", "v1/u/new", "v1/u/more"])
            whole = {"v1/u/old": b"old", "v1/u/new": b"new" * 1000, "v1/u/more": b"more"}
            assert found == {key: whole[key] for key in found}
            assert ("v1/u/old" in found) or change == "delete"
            assert backend.read_ref("v1/t/demo") in {
                "swap_ref": {b"old", b"new"},
                "remove ref": {b"old", None},
            }.get(change, {b"old"})
            CHANGES[change](backend)
        at += 1
    assert len(failed) > 5


def test_a_file_that_cannot_be_written_whole_is_written_in_pieces(local, monkeypatch):
    """A short write is continued."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data[:7])))
    local.put({"a": b"0123456789" * 10})
    assert local.get(["a"]) == {"a": b"0123456789" * 10}


def test_a_lost_answer_to_a_link_is_no_lost_race(local, monkeypatch):
    """A server that did what was asked, and says on the second asking that the name is taken, has
    given the name to us.
    """
    real = os.link

    def link(*args, **kwargs):
        real(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link)
    assert local.put({"a": b"1"}) == {"a"}
    assert local.put({"a": b"2"}) == frozenset()
    assert local.swap_ref("t", None, b"1")
    assert not local.swap_ref("t", None, b"2")
    assert (local.get(["a"]), local.read_ref("t")) == ({"a": b"1"}, b"1")


@pytest.mark.parametrize("number", sorted(file_steps.NO_LINKS))
def test_file_systems_without_hard_links(local, root, failing, number):
    """Without hard links files are renamed into place, still whole, and what exists stays."""
    failing("link", number)
    assert local.put({"a": b"1"}) == {"a"}
    assert local.put({"a": b"2", "b": b"3"}) == {"b"}
    for turn in range(12):
        assert local.swap_ref("t", b"%d" % (turn - 1) if turn else None, b"%d" % turn)
    assert not local.swap_ref("t", b"0", b"1")
    assert (local.get(["a", "b"]), local.read_ref("t")) == ({"a": b"1", "b": b"3"}, b"11")
    assert local.delete(["a"], unmodified_since_s=local.now_s() + 60) == {"a"}
    assert disk.temporaries(root) == []


@pytest.mark.parametrize("number", sorted(file_steps.PASSING))
def test_what_passes_is_asked_again(local, failing, number):
    """A stale handle or a busy file is read again, and given up after three attempts with a typed
    error.
    """
    local.put({"a": b"1"})
    local.swap_ref("t", None, b"2")
    failing("open", number, where="data/", times=file_steps.ATTEMPTS - 1)
    assert local.get(["a"]) == {"a": b"1"}
    left = failing("open", number, where="data/", times=10)
    with pytest.raises(BackendUnavailable, match=r"cannot read .*; check the file system"):
        local.get(["a"])
    assert left == [10 - file_steps.ATTEMPTS]
    failing("open", number, where="+gen", times=file_steps.ATTEMPTS - 1)
    assert local.read_ref("t") == b"2"


@pytest.mark.parametrize("absent", [errno.ENOENT, errno.ENOTDIR])
def test_what_vanishes_is_absent(local, failing, absent):
    """A file that is gone between two looks is not there; that is no error."""
    local.put({"a": b"1", "b": b"2"})
    failing("open", absent, where="data/", times=1)
    assert local.get(["a", "b"]) == {"b": b"2"}
    failing("utime", absent, times=1)
    local.touch(["a"])
    failing("unlink", absent, where="data/", times=1)
    assert local.delete(["a", "b"]) == {"b"}


def test_what_vanishes_while_it_is_listed_is_left_out(local, failing):
    """An object that is removed during a listing is not listed."""
    local.put({"a": b"1", "b": b"2"})
    failing("lstat", errno.ENOENT, where=str(disk.place("", "a")), times=1)
    assert [stat.key for stat in local.list()] == ["b"]


def test_what_is_swept_while_it_is_put_aside_is_gone(local, failing):
    """A conditional delete whose file somebody else sweeps away has deleted it."""
    local.put({"a": b"1"})
    failing("lstat", errno.ENOENT, where="store/tmp/", times=1)
    assert local.delete(["a"], unmodified_since_s=local.now_s() + 60) == {"a"}
    assert local.exists(["a"]) == frozenset()


@pytest.mark.parametrize("where", ["data", "refs"])
def test_a_listing_is_whole_or_an_error(local, monkeypatch, where):
    """A directory that cannot be listed is not passed over: who prunes by a listing would remove
    too much.
    """
    local.put({"v1/u/a": b"1"})
    local.swap_ref("v1/t/demo", None, b"2")
    real = os.scandir

    def scandir(path):
        if str(path).endswith((f"{where}/v1/u", f"{where}/v1/t")):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BackendUnavailable, match=r"cannot list .*Input/output error"):
        list(local.list() if where == "data" else local.list_refs())


@pytest.mark.parametrize("number", sorted(file_steps.LOST))
def test_bytes_that_did_not_reach_the_disk_are_reported(local, monkeypatch, number):
    """A flush that lost data raises."""

    class Library:
        def __init__(self, *args, **kwargs):
            pass

        def syncfs(self, fd):
            return -1

    local.put({"a": b"1"})
    monkeypatch.setattr(file_steps.ctypes, "CDLL", Library)
    monkeypatch.setattr(file_steps.ctypes, "get_errno", lambda: number)
    with pytest.raises(
        BackendFull if number in file_steps.FULL else BackendUnavailable, match="cannot flush"
    ):
        local.flush()


@pytest.mark.parametrize(
    "library", [type("NoSync", (), {}), type("Refusing", (), {"syncfs": lambda self, fd: -1})]
)
def test_systems_without_syncfs_flush_the_directory(local, monkeypatch, library):
    """Where a whole file system cannot be synced, at least the directory is."""
    synced = []
    local.put({"a": b"1"})
    monkeypatch.setattr(file_steps.ctypes, "CDLL", lambda *args, **kwargs: library())
    monkeypatch.setattr(file_steps.ctypes, "get_errno", lambda: errno.ENOSYS)
    monkeypatch.setattr(os, "fsync", synced.append)
    local.flush()
    assert len(synced) == 1


# ---------------------------------------------------------------------------------------- Leftovers

OLD = STALE_AFTER_S + 600


@pytest.fixture
def leftovers(local, root):
    """Return a function that leaves a temporary file, so many seconds old."""
    local.put({"a": b"1"})

    def leave(name, age_s):
        path = root / "tmp" / name
        path.write_bytes(b"half")
        disk.age(path, age_s)
        return path

    return leave


def test_old_temporaries_are_swept_and_young_ones_stay(root, leftovers):
    """The first write of a handle removes temporaries that are a day old, and never one that could
    be in use.
    """
    leftovers("123.00112233445566aa", OLD)
    leftovers("124.00112233445566ab", STALE_AFTER_S - 600)
    leftovers("125.00112233445566ac", 0)
    with LocalBackend(str(root)) as backend:
        backend.get(["a"])
        assert len(disk.temporaries(root)) == 3
        backend.put({"b": b"2"})
    assert disk.temporaries(root) == ["124.00112233445566ab", "125.00112233445566ac"]


def test_only_our_own_temporaries_are_swept(root, leftovers):
    """Whoever makes a directory with a tmp/ of their own a store keeps their files."""
    (root / "tmp" / "theirs").mkdir()
    leftovers("theirs/123.00112233445566aa", OLD)
    leftovers("notes.txt", OLD)
    leftovers("123.txt", OLD)
    disk.age(root / "tmp" / "theirs", OLD)
    with LocalBackend(str(root)) as backend:
        backend.put({"b": b"2"})
    assert disk.temporaries(root) == ["123.txt", "notes.txt", "theirs"]


def test_the_local_clock_does_not_decide_what_is_old(root, leftovers, monkeypatch):
    """Age is by the file system's own clock: a machine whose clock is days ahead sweeps nothing
    young.
    """
    leftovers("125.00112233445566ac", 0)
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + 10 * STALE_AFTER_S)
    with LocalBackend(str(root)) as backend:
        backend.put({"b": b"2"})
    assert disk.temporaries(root) == ["125.00112233445566ac"]


def test_a_leftover_that_cannot_be_removed_disturbs_nobody(root, leftovers, failing):
    """Sweeping is a courtesy: where it fails the write goes on."""
    leftovers("123.00112233445566aa", OLD)
    failing("unlink", errno.EPERM, where="123.00112233445566aa")
    with LocalBackend(str(root)) as backend:
        assert backend.put({"b": b"2"}) == {"b"}
    assert disk.temporaries(root) == ["123.00112233445566aa"]
