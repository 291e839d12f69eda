# SPDX-License-Identifier: Apache-2.0
"""Saving is atomic: a reader sees the old bundle or the new one, and trouble leaves the old one and
no temporary file.
"""

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.errors import AccessDenied, BundlerError, ConfigError, NotFound, StoreFull
from bundler.format import bundle_file as file_module
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import replace_file


@pytest.fixture
def old(build, tmp_path):
    """A file that holds a bundle already; whatever a test does, it stays sound, and alone in its
    folder.
    """
    path = tmp_path / "old" / "b.tbundle"
    path.parent.mkdir()
    build.one("A").save(path)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["b.tbundle"]


class Failing:
    """A file that fails after some bytes."""

    def __init__(self, real, error, after):
        self.real, self.error, self.left = real, error, after

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            raise self.error
        return self.real.write(data)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.real.close()


@pytest.fixture
def failing(monkeypatch):
    """Make files that we write fail after some bytes."""

    def after(size, error):
        def open_failing(*arguments):
            return Failing(open(*arguments), error, size)  # its caller closes it

        monkeypatch.setattr(file_module, "open", open_failing, raising=False)

    return after


@pytest.mark.parametrize("after", [0, 71, 72, 500, 900])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, BundlerError)],
)
def test_a_full_disk_leaves_the_old_file(build, old, failing, after, number, kind):
    """When the disk is full, or fails, at any point of writing, a typed error says so and the old
    file stays.
    """
    failing(after, OSError(number, os.strerror(number)))
    with pytest.raises(kind, match=f"cannot write .*b.tbundle: {os.strerror(number)}") as caught:
        build.several().save(old)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("error", [RuntimeError("trouble"), KeyboardInterrupt(), MemoryError()])
def test_any_exception_leaves_the_old_file(build, old, failing, error):
    """An exception in the middle of writing, an interrupt among them, passes through, and the old
    file stays.
    """
    failing(100, error)
    with pytest.raises(type(error)):
        build.several().save(old)


@pytest.mark.parametrize("call", ["fsync"])
def test_trouble_at_the_end_leaves_the_old_file(build, old, monkeypatch, call):
    """When the last step before renaming fails, the old file stays: what is not on disk does not
    replace anything.
    """

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_module.os, call, fail)
    with pytest.raises(BundlerError, match="cannot write"):
        build.several().save(old)


def test_a_source_that_fails_leaves_the_old_file(build, old, tmp_path_factory):
    """When the bundle that is being saved turns out to be damaged, its error passes through and the
    old file stays.
    """
    parts = build.Parts.of(build.several().to_bytes())
    parts.sections[0].digest = b"\0" * 32
    other = tmp_path_factory.mktemp("other") / "bad.tbundle"
    other.write_bytes(parts.join())
    with Bundle.load(other) as bundle, pytest.raises(BundlerError) as caught:
        bundle.save(old)
    assert caught.value.code == "digest-mismatch"


def test_saving_replaces_the_old_file(build, tmp_path):
    """Saving over a bundle replaces it, leaves no temporary file, and a reader of the old one goes
    on.
    """
    path = tmp_path / "b.tbundle"
    build.one("A").save(path)
    with Bundle.load(path) as before:
        build.several().save(path)
        assert before.read(before.kernels[0].binary)
    with Bundle.load(path) as bundle:
        assert bundle.digest == build.several().digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.tbundle"]


def test_a_saved_bundle_has_ordinary_permissions(build, tmp_path):
    """A saved bundle has the permissions that the user's umask gives to any new file."""
    before = os.umask(0o027)
    try:
        build.one().save(tmp_path / "b.tbundle")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b.tbundle").stat().st_mode) == 0o640


def test_saving_twice_gives_the_same_bytes(build, tmp_path):
    """The same bundle saved twice gives the same bytes, which are those of `to_bytes`."""
    bundle = build.several()
    for name in ("a", "b"):
        bundle.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == bundle.to_bytes()


@pytest.mark.parametrize("level", [1, 3, 22])
def test_a_level_changes_the_file_and_not_the_bundle(build, tmp_path, level):
    """Whatever the level of compression, the bundle is the same, and `to_bytes` gives what `save`
    writes.
    """
    bundle = build.several()
    bundle.save(tmp_path / "b.tbundle", level=level)
    assert (tmp_path / "b.tbundle").read_bytes() == bundle.to_bytes(level=level)
    with Bundle.load(tmp_path / "b.tbundle") as loaded:
        loaded.verify()
        assert loaded.digest == bundle.digest
    assert bundle.to_bytes(level=9) == bundle.to_bytes()


@pytest.mark.parametrize("level", [0, 23, -1, True, 3.0, "9", None])
def test_a_level_that_there_is_not_is_refused(build, tmp_path, level):
    """A wrong level is an error of the caller, which writes nothing."""
    for save in (
        lambda: build.one().save(tmp_path / "b.tbundle", level=level),
        lambda: build.one().to_bytes(level=level),
    ):
        with pytest.raises(ConfigError, match="expected a whole number from 1, the fastest, to 22"):
            save()
    assert list(tmp_path.iterdir()) == []


def test_saving_over_a_directory_is_refused(build, tmp_path):
    """Saving over a directory is a typed error, and what is in the directory stays."""
    folder = tmp_path / "b.tbundle"
    folder.mkdir()
    (folder / "x").write_text("x")
    with pytest.raises(BundlerError, match="it is a directory, expected a bundle file"):
        build.one().save(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["b.tbundle", "x"]


def test_saving_over_what_is_no_file_is_refused(build, tmp_path):
    """A device or pipe is not replaced by a bundle: saving to /dev/null must not remove it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        BundlerError, match="it is a device, pipe or socket, expected a bundle file"
    ):
        build.one().save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_saving_into_a_missing_directory_is_not_found(build, tmp_path):
    """Saving into a directory that is not there, or is a file, is NotFound with the path."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none" / "b.tbundle", tmp_path / "file" / "b.tbundle"):
        with pytest.raises(NotFound, match=r"cannot write .*; check the path") as caught:
            build.one().save(path)
        assert caught.value.path == str(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_saving_into_a_read_only_directory_is_access_denied(build, old, monkeypatch, number):
    """Where the operating system refuses a new file, saving is AccessDenied and says what to check;
    its answer is made up.
    """

    def refuse(*args, **more):
        raise OSError(number, os.strerror(number))

    with (
        monkeypatch.context() as patch,
        pytest.raises(AccessDenied, match="check its owner and permissions") as caught,
    ):
        patch.setattr(file_module.os, "open", refuse)
        build.several().save(old)
    assert isinstance(caught.value, PermissionError)


@contextlib.contextmanager
def mounted(folder, *options):
    """Mount something on a folder, or skip aloud where that is not permitted."""
    done = None
    if shutil.which("mount") and os.geteuid() == 0:
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done is None or done.returncode != 0:
        pytest.skip(
            "mounting is not permitted here:"
            f" {done.stderr.strip() if done else 'not root, or no mount'}"
        )
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_really_read_only_directory_is_access_denied(build, tmp_path):
    """On a file system that is mounted read-only, saving is AccessDenied and loading works."""
    folder = tmp_path / "ro"
    folder.mkdir()
    with mounted(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        build.one("A").save(folder / "b.tbundle")
        done = subprocess.run(
            ["mount", "-o", "remount,ro", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"remounting is not permitted here: {done.stderr.strip()}")
        with pytest.raises(AccessDenied, match="Read-only file system"):
            build.several().save(folder / "b.tbundle")
        with Bundle.load(folder / "b.tbundle") as bundle:
            assert [kernel.key for kernel in bundle.kernels] == [build.key("A")]


def test_a_really_full_file_system_leaves_the_old_file(build, tmp_path):
    """On a tiny file system that fills up, saving is StoreFull, the old file stays, and no
    temporary file is left.
    """
    folder = tmp_path / "full"
    folder.mkdir()
    files = build.Files()
    large = files.bundle(files.kernel("B", extra={"k.llir": build.noise("large", 200_000)}))
    with mounted(folder, "-t", "tmpfs", "-o", "size=64k", "tmpfs"):
        build.one("A").save(folder / "b.tbundle")
        with pytest.raises(StoreFull, match="free some space"):
            large.save(folder / "b.tbundle")
        assert [path.name for path in folder.iterdir()] == ["b.tbundle"]
        with Bundle.load(folder / "b.tbundle") as bundle:
            assert [kernel.key for kernel in bundle.kernels] == [build.key("A")]


def test_a_file_size_limit_is_a_typed_error(build, tmp_path):
    """When the process may not write files that large, saving is a typed error, and nothing is
    left.
    """
    code = (
        "import resource, signal, sys\n"
        "from bundler.errors import BundlerError\n"
        "from bundler.format.bundle import Bundle\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "bundle = Bundle.load(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "try:\n"
        "    bundle.save(sys.argv[2])\n"
        "except BundlerError as error:\n"
        "    print(error)\n"
    )
    source = tmp_path / "b.tbundle"
    build.several().save(source)
    path = os.pathsep.join([str(Path(file_module.__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(source), str(tmp_path / "new.tbundle")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot write" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.tbundle"]


def test_a_long_file_name_can_be_saved(build, tmp_path):
    """A file name of the longest length that file systems allow can be saved: the temporary name is
    shorter.
    """
    path = tmp_path / ("n" * 255)
    build.one().save(path)
    with pytest.raises(BundlerError, match="cannot write"):
        build.one().save(tmp_path / ("n" * 256))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_readers_see_the_old_or_the_new_file(tmp_path):
    """While a file is being written, what was there is what readers find."""
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write(out):
        out.write(b"new")
        out.flush()
        assert path.read_bytes() == b"old"

    replace_file(path, write)
    assert path.read_bytes() == b"new"
