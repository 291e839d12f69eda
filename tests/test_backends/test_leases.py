# SPDX-License-Identifier: Apache-2.0
"""File leases when their files, the clock or the lock misbehave; the contract holds what they
promise otherwise.
"""

import errno
import os

import disk
import filelock
import pytest

from bundler.backends import local as local_store
from bundler.backends.backend_errors import BackendDenied, BackendFull


@pytest.fixture
def lease(local):
    """A lease that is held for long."""
    return local.lease("v1/k", 600)


def lease_files(root):
    """Return the names in the folder of leases, without locks."""
    return [path for path in (root / "leases").iterdir() if path.suffix != ".lock"]


def test_a_lease_is_one_small_file_that_goes_with_it(root, lease):
    """A held lease is a file with a token, which says whose it is, and a time; released it
    is gone.
    """
    (path,) = lease_files(root)
    token, expiry = path.read_text().split()
    digits, holder, *key = token.split("@")
    assert (len(digits), float(expiry) > 0) == (32, True)
    assert holder.endswith(f":{os.getpid()}")
    assert len(key) == 1
    assert lease.release()
    assert lease_files(root) == []


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"token", b"token soon", b"token nan"])
def test_a_damaged_lease_is_nobodys(local, root, lease, damage):
    """A file that cannot be read stands in nobody's way, and is not the former holder's."""
    (path,) = lease_files(root)
    path.write_bytes(damage)
    assert not lease.renew(60)
    mine = local.lease("v1/k", 60)
    assert mine is not None
    assert not lease.release()
    assert mine.release()


def test_who_cannot_get_the_lock_goes_on_without_the_lease(local, root, lease, monkeypatch):
    """A stuck lock costs a moment, not the program: no lease, and nothing prolonged or
    given back.
    """
    monkeypatch.setattr(local_store, "LOCK_TIMEOUT_S", 0.01)
    (path,) = lease_files(root)
    with filelock.FileLock(f"{path}.lock"):
        assert local.lease("v1/k", 60) is None
        assert [lease.renew(60), lease.release()] == [False, False]
    assert lease.release()


def test_what_a_killed_holder_left_half_written_is_replaced(local, root, lease):
    """A process that was killed while it wrote its lease leaves a file that the next one takes
    over.
    """
    (path,) = lease_files(root)
    path.with_name(path.name + ".new").write_bytes(b"half")
    assert lease.renew(60)
    assert lease_files(root) == [path]
    assert lease.release()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, BackendFull), (errno.EACCES, BackendDenied)]
)
def test_failures_are_this_packages(local, root, lease, failing, number, kind):
    """Renewing on a full or forbidden disk raises a typed error, and the lease stays as it was."""
    failing("open", number, where=".new")
    with pytest.raises(kind, match="cannot change"):
        lease.renew(60)
    with pytest.raises(kind):
        local.lease("v1/other", 60)
    assert local.lease("v1/k", 60) is None if kind is BackendDenied else True
    assert lease.release()


def test_leases_and_objects_of_a_store_are_apart(local, root, lease):
    """Leases are no objects, no refs and no temporaries."""
    assert (list(local.list()), list(local.list_refs()), disk.temporaries(root)) == ([], [], [])
    assert os.listdir(root) == ["leases"]
    assert lease.release()
