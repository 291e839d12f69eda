# SPDX-License-Identifier: Apache-2.0
"""A directory that two clients of a misbehaving file system share: two FUSE mounts, where they can
be had.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.backends.local import LocalBackend
from bundler.lifecycle.kernel_writer import make_directories
from tools.shared_fs.network_layer import KINDS
from tools.shared_fs.race import clients

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mountable():
    """Skip aloud where there is no /dev/fuse, or no right to mount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        pytest.skip("two mounts need /dev/fuse and the right to mount")


def test_two_clients_see_one_store(mountable, tmp_path):
    """On two mounts that keep names and attributes: one creates, the other's attempt is told so,
    and reads the same bytes.
    """
    with clients("nfs", tmp_path, seed=7) as places:
        here, there = (LocalBackend(str(place / "store")) for place in places)
        assert here.put({"u/a": b"first"}) == {"u/a"}
        assert there.put({"u/a": b"second"}) == frozenset()
        assert there.get(["u/a"]) in ({"u/a": b"first"}, {})
        assert here.swap_ref("t", None, b"1")
        assert not there.swap_ref("t", None, b"2")
        assert there.swap_ref("t", b"1", b"2") or there.read_ref("t") == b"1"
    on_the_server = LocalBackend(str(tmp_path / "server" / "store"))
    assert on_the_server.get(["u/a"]) == {"u/a": b"first"}
    assert on_the_server.read_ref("t") in {b"1", b"2"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_race_on_two_mounts(mountable, kind, tmp_path):
    """Nothing wrong is read, no error is none of ours, and no count is lost."""
    line = [
        sys.executable,
        "-m",
        "tools.shared_fs",
        "race",
        "--seconds",
        "4",
        "--kinds",
        kind,
        "--processes",
        "2",
    ]
    done = subprocess.run(
        [*line, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    found = json.loads((tmp_path / "shared-fs.json").read_text())["kinds"][kind]
    assert (done.returncode, found["wrong"]) == (0, []), done.stderr
    assert sum(found["done"].values()) > 20
    assert found["counted"] > 0


def test_a_directory_that_is_there_and_missing_is_asked_for_again(monkeypatch, tmp_path):
    """A file system that says of a name first that it is taken, and then that nothing is there, is
    given time.
    """
    target, real, answers = tmp_path / "a" / "b", os.mkdir, [True, False]
    tmp_path.joinpath("a").mkdir()

    def mkdir(path, mode=0o777):
        if os.fspath(path) == os.fspath(target) and answers.pop():
            raise FileExistsError(17, "File exists", path)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    answers.reverse()
    make_directories(str(target))
    assert target.is_dir()
    assert answers == []


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path):
    """What is really something else is said at once."""
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError):
        make_directories(str(tmp_path / "a"))
