# SPDX-License-Identifier: Apache-2.0
"""Leases of one host's processes are kept where no other user can take, forge or block them."""

import os
from pathlib import Path

import pytest

from bundler.backends.backend_errors import BackendError
from bundler.compile.worker_pool import HostLeases
from bundler.errors import BundlerWarning
from bundler.toolchain import private_directory

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a directory to another user"
)


@pytest.fixture
def known(monkeypatch, tmp_path):
    """Return the name that every process of this user knows."""
    monkeypatch.setattr(private_directory, "_own", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"triton-bundler-{os.getuid()}"


def test_leases_hold_among_the_processes_of_a_user(known):
    """Two that ask share one directory, made for the user alone; the second waits."""
    lease = HostLeases().take("a", 60)
    assert lease is not None
    assert HostLeases().take("a", 60) is None
    assert known.stat().st_mode & 0o777 == 0o700
    lease.release()


@pytest.mark.parametrize("kind", ["link", "file", "mode", pytest.param("owner", marks=as_root)])
def test_a_hostile_directory_is_not_used(kind, known, tmp_path):
    """Also when it takes the place of one that was in use: a private directory has the leases, and
    the user is told once.
    """
    leases = HostLeases()
    assert leases.take("before", 60) is not None
    os.rename(known, tmp_path / "aside")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    if kind == "link":
        known.symlink_to(other, target_is_directory=True)
    elif kind == "file":
        known.touch()
    else:
        known.mkdir(mode=0o700)
        known.chmod(0o777) if kind == "mode" else os.chown(known, NOBODY, NOBODY)
    with pytest.warns(BundlerWarning, match=f"{known} .*so this process uses") as warned:
        answers = [leases.take("a", 60) for _ in range(2)]
    assert [answer is None for answer in answers] == [False, True]
    assert len(warned) == 1
    assert list(other.iterdir()) == []
    assert kind == "file" or list(known.iterdir()) == []


def test_no_directory_at_all_is_no_lease(known, monkeypatch):
    """Where no directory can be made, asking says so, and who asks goes on without leases."""
    monkeypatch.setattr("tempfile.tempdir", "/proc/nobody")
    with pytest.raises(BackendError, match="no directory for leases"):
        HostLeases().take("a", 60)
    assert not Path(known).exists()
