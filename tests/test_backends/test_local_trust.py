# SPDX-License-Identifier: Apache-2.0
"""Who may write to a local store: permissions of what it creates, directories it refuses, and
reading what it may not write.
"""

import os
import stat

import disk
import pytest

from bundler.backends import file_steps
from bundler.backends.backend_errors import BackendDenied, BackendUnavailable, UntrustedRoot
from bundler.backends.file_steps import GROUP, PRIVATE
from bundler.backends.local import LocalBackend

MODES = {"private": (PRIVATE, 0o700, 0o600), "group": (GROUP, 0o2770, 0o660)}


@pytest.fixture(params=[0o077, 0o022, 0o000], ids=oct)
def umask(request):
    """The process's umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_created_has_the_permissions_of_the_mode(root, umask, mode):
    """Directories and files are the owner's, or the group's, whatever the umask says."""
    permissions, directory, file = MODES[mode]
    with LocalBackend(str(root), permissions) as backend:
        backend.put({"v1/u/a": b"1"})
        backend.swap_ref("v1/t/demo", None, b"2")
        lease = backend.lease("k", 60)
        found = disk.modes(root)
        assert lease.release()
    wrong = {
        name: oct(m)
        for name, m in found.items()
        if m != (directory if (root / name).is_dir() else file)
    }
    assert {name: m for name, m in wrong.items() if not name.endswith((".lock", ".new"))} == {}
    assert len(found) > 10


@pytest.mark.parametrize("mode", MODES)
def test_directories_above_the_root_follow_the_umask(tmp_path, mode):
    """What lies above the store is made like any directory of the user."""
    before = os.umask(0o022)
    try:
        with LocalBackend(str(tmp_path / "a" / "b" / "store"), MODES[mode][0]) as backend:
            backend.put({"a": b"1"})
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / place).stat().st_mode) for place in ("a", "a/b")] == [
        0o755,
        0o755,
    ]


def test_a_new_directory_is_never_open_to_others(root, umask, monkeypatch):
    """Between making a directory and setting its permissions nobody else can write to it."""
    seen = []
    real = os.chmod
    monkeypatch.setattr(
        os,
        "chmod",
        lambda path, mode: (seen.append(os.stat(path).st_mode & 0o022), real(path, mode)),
    )
    with LocalBackend(str(root)) as backend:
        backend.put({"a": b"1"})
    assert len(seen) > 2
    assert set(seen) == {0}


def test_a_directory_that_was_left_without_its_permissions_gets_them(root):
    """A writer that was killed between making a directory and opening it to the group shuts nobody
    out for long.
    """
    with LocalBackend(str(root), GROUP) as backend:
        backend.put({"v1/u/a": b"1"})
    for name in ("tmp", "data/v1"):
        (root / name).chmod(0o750)
    with LocalBackend(str(root), GROUP) as backend:
        backend.put({"v1/m/b": b"2"})
    assert {name: disk.modes(root)[name] for name in ("tmp", "data/v1", "data/v1/m")} == {
        "tmp": 0o2770,
        "data/v1": 0o2770,
        "data/v1/m": 0o2770,
    }


@pytest.mark.parametrize(
    ("bits", "permissions", "reason"),
    [
        (0o707, PRIVATE, "everyone may write to it"),
        (0o1777, PRIVATE, "everyone may write to it"),
        (0o777, GROUP, "everyone may write to it"),
        (0o770, PRIVATE, "its group may write to it"),
    ],
)
def test_a_directory_that_others_may_write_is_refused(root, bits, permissions, reason):
    """Kernels that anybody could have put there are not trusted, and the message says the fix."""
    root.mkdir()
    root.chmod(bits)
    with pytest.raises(UntrustedRoot, match=f"{reason}.*chmod"):
        LocalBackend(str(root), permissions)


@pytest.mark.parametrize(
    ("bits", "permissions"), [(0o755, PRIVATE), (0o700, GROUP), (0o2775, GROUP), (0o770, GROUP)]
)
def test_a_directory_that_others_may_read_is_taken(root, bits, permissions):
    """Reading harms nobody, and a group store may be written by its group."""
    root.mkdir()
    root.chmod(bits)
    with LocalBackend(str(root), permissions) as backend:
        assert backend.put({"a": b"1"}) == {"a"}


@pytest.fixture
def owned(monkeypatch):
    """Return a function that gives a directory another owner and group, as far as `os.stat`
    tells.
    """

    def pretend(place, uid, gid):
        real = os.stat

        def call(path, *args, **kwargs):
            found = real(path, *args, **kwargs)
            if str(path) != str(place):
                return found
            return os.stat_result((*found[:4], uid, gid, *found[6:]))

        monkeypatch.setattr(os, "stat", call)

    return pretend


STRANGER = 54321


@pytest.mark.parametrize(
    ("uid", "in_group", "permissions", "trusted"),
    [
        (STRANGER, False, PRIVATE, False),
        (STRANGER, True, PRIVATE, False),
        (STRANGER, False, GROUP, False),
        (STRANGER, True, GROUP, True),
        (0, False, PRIVATE, True),
        (0, False, GROUP, True),
    ],
)
def test_a_directory_of_another_user(root, owned, uid, in_group, permissions, trusted):
    """Another user's directory is trusted if that is root, or for a group store if it belongs to a
    group of ours.
    """
    root.mkdir(mode=0o750)
    owned(root, uid, os.getegid() if in_group else STRANGER)
    if trusted:
        LocalBackend(str(root), permissions).close()
        return
    with pytest.raises(UntrustedRoot, match=f"it belongs to user {STRANGER}"):
        LocalBackend(str(root), permissions)


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.get(["a"]),
        lambda b: b.put({"a": b"1"}),
        lambda b: b.exists(["a"]),
        lambda b: b.read_ref("t"),
        lambda b: b.swap_ref("t", None, b"1"),
        lambda b: list(b.list()),
        lambda b: list(b.list_refs()),
        lambda b: b.lease("k", 60),
        lambda b: b.touch(["a"]),
        lambda b: b.delete(["a"]),
    ],
    ids=[
        "get",
        "put",
        "exists",
        "read_ref",
        "swap_ref",
        "list",
        "list_refs",
        "lease",
        "touch",
        "delete",
    ],
)
def test_a_directory_that_somebody_else_makes_later_is_refused(root, use):
    """Where there was nothing when the store was opened, nobody can slip in a directory of
    theirs.
    """
    with LocalBackend(str(root)) as backend:
        root.mkdir()
        root.chmod(0o777)
        with pytest.raises(UntrustedRoot):
            use(backend)


@pytest.mark.parametrize("where", ["store", "store/below"])
def test_a_file_is_no_store(root, where, tmp_path):
    """A path that is a file, or below one, is refused with a sentence."""
    root.write_text("not a directory")
    with pytest.raises(BackendUnavailable, match=r"not a directory|Not a directory"):
        LocalBackend(str(tmp_path / where))


def test_a_directory_that_cannot_be_looked_at_is_denied(root, failing):
    """The operating system's refusal is this package's."""
    import errno

    failing("stat", errno.EACCES, where="store")
    with pytest.raises(BackendDenied, match=r"cannot open .*: Permission denied"):
        LocalBackend(str(root))


def _fill(path):
    with LocalBackend(path) as backend:
        backend.put({"v1/u/a": b"1", "b": b"2"})
        backend.swap_ref("t", None, b"3")


def test_a_read_only_directory_works_for_reading(read_only):
    """On a read-only file system everything reads, and touching is nobody's fault."""
    path = read_only(_fill)
    with LocalBackend(path) as backend:
        assert backend.get(["v1/u/a", "b", "c"]) == {"v1/u/a": b"1", "b": b"2"}
        assert backend.exists(["b", "c"]) == {"b"}
        assert sorted(stat.key for stat in backend.list()) == ["b", "v1/u/a"]
        assert (backend.read_ref("t"), list(backend.list_refs())) == (b"3", ["t"])
        backend.touch(["b"])
        backend.flush()
        assert backend.now_s() > 0


def test_a_read_only_directory_denies_writing(read_only):
    """On a read-only file system each change is denied, and none is done."""
    path = read_only(_fill)
    with LocalBackend(path) as backend:
        for change in (
            lambda: backend.put({"c": b"4"}),
            lambda: backend.delete(["b"]),
            lambda: backend.delete(["b"], backend.now_s() + 60),
            lambda: backend.swap_ref("t", b"3", b"4"),
            lambda: backend.lease("k", 60),
        ):
            with pytest.raises(
                BackendDenied, match="check owner and permissions, or open it for reading only"
            ):
                change()
        assert (backend.get(["b", "c"]), backend.read_ref("t")) == ({"b": b"2"}, b"3")


@pytest.mark.parametrize("number", sorted(file_steps.DENIED))
def test_what_the_system_forbids_is_denied(local, failing, number):
    """Each way in which a system forbids writing is `BackendDenied`, and leaves nothing behind."""
    local.put({"a": b"1"})
    failing("open", number, where="store/tmp/")
    with pytest.raises(BackendDenied):
        local.put({"b": b"2"})
    with pytest.raises(BackendDenied):
        local.swap_ref("t", None, b"2")
    assert local.get(["a", "b"]) == {"a": b"1"}
    assert local.read_ref("t") is None


def test_touching_what_belongs_to_others_is_left_alone(local, failing):
    """Where the system forbids setting a time, a touch does nothing."""
    import errno

    local.put({"a": b"1"})
    failing("utime", errno.EPERM)
    local.touch(["a"])
    assert local.get(["a"]) == {"a": b"1"}


def test_a_symbolic_link_is_no_object(local, root, tmp_path):
    """A link in the store is neither followed nor overwritten, and its target is not touched."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"not yours")
    disk.age(secret, 1000)
    before = secret.stat().st_mtime
    path = disk.place(root, "a")
    path.parent.mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    path.symlink_to(secret)
    (found,) = local.get(["a"]).values()
    assert (found, found.why) == (b"", f"{path} is a symbolic link, expected a file")
    assert local.put({"a": b"1"}) == frozenset()
    local.touch(["a"])
    assert (path.is_symlink(), secret.read_bytes(), secret.stat().st_mtime) == (
        True,
        b"not yours",
        before,
    )
    assert local.delete(["a"]) == {"a"}
    assert secret.exists()
    assert local.put({"a": b"1"}) == {"a"}
