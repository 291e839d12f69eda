# SPDX-License-Identifier: Apache-2.0
"""Our own directory on this host: where it is, and that nobody else could have put kernels or notes
into it.
"""

import os
from pathlib import Path

import pytest

import bundler
from bundler.integrations.miss_notes import MissNotes, read_misses
from bundler.integrations.user_directories import LocalDirectory, UserDirectories
from bundler.toolchain import private_directory
from bundler.toolchain.private_directory import is_ours

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a directory to another user"
)
UNWRITABLE = "/proc/nobody/cache"


@pytest.fixture(autouse=True)
def no_private_directory(monkeypatch):
    monkeypatch.setattr(private_directory, "_own", {})


@pytest.fixture
def told():
    return []


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Leave the temporary directory alone, as for a user without a home; return the known name
    there.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return temporary / f"triton-bundler-cache-{os.getuid()}"


def make_hostile(path, kind, elsewhere):
    if kind == "link":
        path.symlink_to(elsewhere, target_is_directory=True)
    elif kind == "file":
        path.touch()
    else:
        path.mkdir(mode=0o700)
        (path / "misses").mkdir()
        path.chmod(0o777) if kind == "mode" else os.chown(path, NOBODY, NOBODY)


KINDS = ["link", "file", "mode", pytest.param("owner", marks=as_root)]


def test_the_users_cache_comes_first(told, monkeypatch, tmp_path):
    """Kernels and notes go to the user's cache directory, which is made for the user alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = LocalDirectory(None, told.append)
    assert local.base(make=False) is None
    assert local.kernels() == str(tmp_path / "cache" / "triton-bundler" / "kernels")
    assert (
        local.notes("misses", make=True)
        == local.notes("misses", make=False)
        == str(tmp_path / "cache" / "triton-bundler" / "misses")
    )
    assert is_ours(tmp_path / "cache" / "triton-bundler")
    assert told == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_cache_directory_is_told_of(kind, told, monkeypatch, tmp_path, homeless):
    """The user's cache directory is not used when others could write there; the temporary place is,
    and the user is told.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hostile = tmp_path / "cache" / "triton-bundler"
    hostile.parent.mkdir()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    make_hostile(hostile, kind, open_to_all)
    local = LocalDirectory(None, told.append)
    assert [local.base(make=True) for _ in range(2)] == [str(homeless)] * 2
    # A file is in the way of everybody, and nothing that others could have filled.
    assert [f"{hostile} " in sentence for sentence in told] == ([] if kind == "file" else [True])


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_temporary_directory_is_not_used(kind, told, tmp_path, homeless):
    """Kernels and notes go to a private directory, in which nothing of the hostile one is read, and
    the user is told once.
    """
    make_hostile(homeless, kind, tmp_path)
    local = LocalDirectory(None, told.append)
    directories = UserDirectories(local, lambda *_: None)
    home = directories.writable(UNWRITABLE)
    assert directories.writable(UNWRITABLE) == home
    private = Path(home).parent
    assert private != homeless
    assert is_ours(private)
    assert local.notes("misses", make=True) == str(private / "misses")
    (sentence,) = told
    assert f"{homeless} " in sentence
    assert f"this process uses {private}" in sentence
    assert list(read_misses(LocalDirectory(None, told.append))) == []
    assert "nothing is read from it" in told[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_each_use_looks_again(kind, told, tmp_path, homeless):
    """A place that became hostile between two kernels, or two notes, is not used for the second."""
    moved = []
    local = LocalDirectory(None, told.append)
    directories = UserDirectories(local, lambda *pair: moved.append(pair))
    assert directories.writable(UNWRITABLE) == str(homeless / "kernels")
    assert local.notes("misses", make=True) == str(homeless / "misses")
    os.rename(homeless, tmp_path / "aside")
    make_hostile(homeless, kind, tmp_path)
    second = directories.writable(UNWRITABLE)
    assert Path(second).parent != homeless
    assert moved == [(UNWRITABLE, str(homeless / "kernels")), (UNWRITABLE, second)]
    assert Path(local.notes("misses", make=True)).parent == Path(second).parent


def test_a_file_in_place_of_the_notes(told, tmp_path):
    """Where notes would be, a file means that none are written; no error reaches the caller."""
    (tmp_path / "misses").touch()
    local = LocalDirectory(str(tmp_path), told.append)
    assert local.notes("misses", make=True) is None
    MissNotes(local).write([object()])
    assert list(read_misses(local)) == []


def test_a_session_warns_and_counts(homeless, tmp_path):
    """The warning reaches the user, and the counters have a number."""
    make_hostile(homeless, "mode", tmp_path)
    with bundler.install("memory:") as session:
        with pytest.warns(
            bundler.BundlerWarning, match=f"{homeless} is open to others: mode 0777"
        ) as warnings:
            places = {session._engine._notes._local.notes("misses", make=True) for _ in range(3)}
        assert len(places) == 1
        assert len(warnings) == 1
        assert session.counters.errors == {"unsafe-directory": 1}
