# SPDX-License-Identifier: Apache-2.0
"""The store in a directory passes the contract, private and for a group."""

import itertools
import os

import disk
import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from bundler.backends.file_steps import GROUP, PRIVATE
from bundler.backends.local import LocalBackend
from bundler.backends.testing import BackendContract, state_machine


class TestPrivateBackend(BackendContract):
    """The contract, for a directory of one user."""

    permissions = PRIVATE

    @pytest.fixture
    def backend(self, root):
        """A store in a directory that is not there yet; whatever happens, no temporary file is
        left.
        """
        with LocalBackend(str(root), self.permissions) as opened:
            yield opened
        assert disk.temporaries(root) == []

    def reopen(self, backend):
        """Open the directory again."""
        return LocalBackend(backend.root, self.permissions)

    def peek(self, backend, key):
        """Read the file."""
        path = disk.place(backend.root, key)
        return path.read_bytes() if path.exists() else None

    def poke(self, backend, key, data):
        """Write the file."""
        path = disk.place(backend.root, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)


class TestGroupBackend(TestPrivateBackend):
    """The contract, for a directory that a group shares."""

    permissions = GROUP


def test_states(tmp_path):
    """Any sequence of calls does what a dictionary would do."""
    numbers = itertools.count()
    machine = state_machine(lambda: LocalBackend(str(tmp_path / str(next(numbers)))))
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("backends"))


def test_the_layout_on_disk(local, root):
    """Objects lie in shards, refs in numbered files, and nothing else is left."""
    local.put({"v1/u/abc": b"1", "top": b"2"})
    local.swap_ref("v1/t/demo", None, b"x")
    local.swap_ref("v1/t/demo", b"x", b"y")
    found = disk.files(root)
    shards = {name: str(disk.place("", name)) for name in ("v1/u/abc", "top")}
    assert shards["v1/u/abc"].startswith("data/v1/u/+")
    assert found == sorted(
        [*shards.values(), "refs/v1/t/demo/+gen/0000000001", "refs/v1/t/demo/+gen/0000000002"]
    )
    assert (root / shards["v1/u/abc"]).read_bytes() == b"1"


def test_old_values_of_a_ref_are_cleaned_away(local, root):
    """Of a ref that changed often the last eight numbers stay, and those of the last hour."""
    for number in range(30):
        assert local.swap_ref("t", b"%d" % (number - 1) if number else None, b"%d" % number)
    assert disk.generations(root, "t") == list(range(1, 31))
    for path in (root / "refs" / "t" / "+gen").iterdir():
        disk.age(path, 2 * 3600)
    assert local.swap_ref("t", b"29", b"30")
    assert disk.generations(root, "t") == list(range(24, 32))


def test_a_relative_root_stays_where_it_was(tmp_path, monkeypatch):
    """A change of the working directory does not move the store."""
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend("store")
    monkeypatch.chdir("/")
    backend.put({"a": b"1"})
    assert backend.root == str(tmp_path / "store")
    assert disk.place(tmp_path / "store", "a").read_bytes() == b"1"


def test_opening_and_reading_create_nothing(root):
    """Only writing makes the directory; until then it reads as empty."""
    with LocalBackend(str(root)) as backend:
        assert backend.get(["a"]) == {}
        assert (
            backend.exists(["a"])
            == backend.delete(["a"])
            == backend.delete(["a"], 0.0)
            == frozenset()
        )
        assert (list(backend.list()), list(backend.list_refs()), backend.read_ref("t")) == (
            [],
            [],
            None,
        )
        backend.touch(["a"])
        backend.flush()
        assert not root.exists()


def test_a_root_that_appears_later_is_found(root):
    """A handle that was opened first sees what another one writes."""
    with LocalBackend(str(root)) as early, LocalBackend(str(root)) as writer:
        assert early.get(["a"]) == {}
        writer.put({"a": b"1"})
        writer.swap_ref("t", None, b"2")
        assert (early.get(["a"]), early.read_ref("t")) == ({"a": b"1"}, b"2")
        assert early.put({"b": b"3"}) == {"b"}


def test_a_store_that_was_removed_is_made_again(local, root):
    """Somebody empties the directory under a running process; the next write goes on."""
    import shutil

    local.put({"a": b"1"})
    local.swap_ref("t", None, b"2")
    shutil.rmtree(root)
    assert (local.get(["a"]), local.read_ref("t")) == ({}, None)
    assert local.put({"a": b"3"}) == {"a"}
    assert local.swap_ref("t", None, b"4")
    assert (local.get(["a"]), local.read_ref("t")) == ({"a": b"3"}, b"4")
    assert disk.modes(root)["."] == 0o700


def test_other_files_are_nothing_of_ours(local, root):
    """Names that are no keys, as network file systems leave behind, are not listed and disturb
    nobody.
    """
    local.put({"v1/u/a": b"1"})
    local.swap_ref("t", None, b"2")
    disk.place(root, "v1/u/a").with_name(".nfs000000000001").write_bytes(b"silly rename")
    (root / "data" / "README").write_text("hello")
    (root / "refs" / "t" / "+gen" / "note.txt").write_text("hello")
    (root / "refs" / "lost+found").mkdir()
    assert [stat.key for stat in local.list()] == ["v1/u/a"]
    assert (list(local.list_refs()), local.read_ref("t")) == (["t"], b"2")
    assert local.swap_ref("t", b"2", b"3")


def test_reading_does_not_depend_on_the_local_clock(local, monkeypatch):
    """The store's time is the file system's, whatever this machine believes."""
    local.put({"a": b"1"})
    monkeypatch.setattr("time.time", lambda: 12345.0)
    (stat,) = local.list()
    assert abs(local.now_s() - stat.modified_s) < 3600


def test_flushing_reaches_the_file_system(local, monkeypatch):
    """A flush syncs the file system that holds the directory."""
    from bundler.backends import file_steps

    synced = []
    real = file_steps.sync
    monkeypatch.setattr(
        file_steps, "sync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))
    )
    local.put({"a": b"1"})
    local.flush()
    assert synced == [local.root]
