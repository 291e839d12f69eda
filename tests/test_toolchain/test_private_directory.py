# SPDX-License-Identifier: Apache-2.0
"""A directory under a name that anybody can take is used only while nobody else could have put
something into it.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.toolchain import private_directory
from bundler.toolchain.private_directory import TemporaryPlace, is_ours, why_not_ours

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a directory to another user"
)


@pytest.fixture
def told():
    return []


@pytest.fixture
def place(told, monkeypatch):
    monkeypatch.setattr(private_directory, "_own", {})
    return TemporaryPlace("some-cache", told.append)


def link(path, tmp_path):
    path.symlink_to(tmp_path, target_is_directory=True)


def dangling(path, tmp_path):
    path.symlink_to(tmp_path / "absent")


def open_to_others(path, tmp_path):
    path.mkdir()
    path.chmod(0o777)


def readable(path, tmp_path):
    path.mkdir()
    path.chmod(0o750)


def file(path, tmp_path):
    path.write_bytes(b"")


def of_another_user(path, tmp_path):
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


HOSTILE = [
    pytest.param(link, "is a symbolic link", id="link"),
    pytest.param(dangling, "is a symbolic link", id="dangling link"),
    pytest.param(open_to_others, "is open to others: mode 0777, expected 0700", id="mode"),
    pytest.param(readable, "is open to others: mode 0750, expected 0700", id="readable"),
    pytest.param(file, "is not a directory", id="file"),
    pytest.param(
        of_another_user, f"belongs to user {NOBODY}, not to user 0", id="owner", marks=as_root
    ),
]


def test_it_is_made_for_this_user_alone(place, told):
    """Where nothing is in the way the known name is used, with mode 0700, by each process of the
    user.
    """
    path = Path(place.made())
    assert path.name == f"some-cache-{os.getuid()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (TemporaryPlace("some-cache", told.append).made(), place.found(), told) == (
        str(path),
        str(path),
        [],
    )


@pytest.mark.parametrize(("hostile", "reason"), HOSTILE)
def test_what_others_could_have_made_is_not_used(place, told, tmp_path, hostile, reason):
    """A private directory takes its place, the user is told once, and what was there is left as it
    was.
    """
    known = Path(place.path)
    hostile(known, tmp_path)
    before = os.lstat(known)
    private = place.made()
    assert private == place.made()
    assert private != str(known)
    assert is_ours(private)
    (sentence,) = told
    assert f"{known} {reason}, so this process uses {private}" in sentence
    after = os.lstat(known)
    assert (after.st_mode, after.st_uid, after.st_ino) == (
        before.st_mode,
        before.st_uid,
        before.st_ino,
    )
    assert place.found() is None
    assert f"{known} {reason}, so nothing is read from it" in told[1]


@pytest.mark.parametrize(("hostile", "reason"), HOSTILE)
def test_it_is_looked_at_before_each_use(place, told, tmp_path, hostile, reason):
    """A directory that was fine at first and was replaced later is not used any more; when it is
    fine again, it is.
    """
    known = place.made()
    os.rmdir(known)
    hostile(Path(known), tmp_path)
    assert place.made() != known
    assert len(told) == 1
    os.rename(known, tmp_path / "aside")
    assert place.made() == known


@pytest.mark.parametrize(("hostile", "reason"), HOSTILE)
def test_the_private_directory_is_looked_at_too(place, tmp_path, hostile, reason):
    """When something else is in place of the private directory itself, another one is made."""
    Path(place.path).touch()
    private = place.made()
    os.rmdir(private)
    hostile(Path(private), tmp_path)
    assert is_ours(place.made())
    assert place.made() != private


def test_a_users_own_link_may_be_allowed(tmp_path):
    """In the user's own cache directory a link is the user's; what it leads to has to be ours."""
    (tmp_path / "disk").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert why_not_ours(tmp_path / "link", private_directory.OTHERS_WRITE, links=True) is None
    (tmp_path / "disk").chmod(0o775)
    assert "mode 0775, expected 0755" in why_not_ours(
        tmp_path / "link", private_directory.OTHERS_WRITE, links=True
    )


def test_the_private_directory_goes_with_its_process(tmp_path):
    """The process that made it removes it; its forked child, which uses it too, does not."""
    code = """
import os, sys
from bundler.toolchain.private_directory import TemporaryPlace
place = TemporaryPlace("some-cache", lambda sentence: None)
open(place.path, "w").close()
private = place.made()
pid = os.fork()
if pid == 0:
    assert place.made() == private
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert os.path.isdir(private)
"""
    env = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"some-cache-{os.getuid()}"]
