# SPDX-License-Identifier: Apache-2.0
"""The writer of kernels, in C and in Python: whole kernels, the same answers, and nothing left where it fails."""

import errno
import os
import stat
import subprocess
import threading
import time

import pytest

from bundler.lifecycle import kernel_writer

WHOLE = (
    ("k.source", b""),
    ("k.cubin", b"\x7fELF" * 5000),
    ("k.json", memoryview(b"x{}x")[1:3]),
    ("__grp__k.json", b"{}"),
)


@pytest.fixture(params=["compiled", "python"])
def write(request):
    """Each of the two writers."""
    writer = kernel_writer.compiled_writer() if request.param == "compiled" else kernel_writer.write_in_python
    if writer is None:
        pytest.skip("the extension _kernel_writer was not built here")
    return writer


def batch(count, files=WHOLE):
    return tuple((f"tmp.{number}", f"KEY{number}", files) for number in range(count))


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("threads", [1, 2, 4, 100])
def test_every_kernel_of_a_batch_is_there_whole(write, tmp_path, threads):
    """A batch is written to the last byte, and no temporary directory stays."""
    assert write(str(tmp_path), batch(70), threads) == [0] * 70
    assert sorted(os.listdir(tmp_path)) == sorted(f"KEY{number}" for number in range(70))
    for number in range(70):
        assert content(tmp_path / f"KEY{number}") == {name: bytes(data) for name, data in WHOLE}


def test_an_empty_batch_is_nothing(write, tmp_path):
    assert write(str(tmp_path), (), 2) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_umask_decides_about_permissions(write, tmp_path, mask):
    """Files and directories have the permissions that the user's umask leaves, as Triton's own have."""
    before = os.umask(mask)
    try:
        write(str(tmp_path), batch(1), 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "KEY0").st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "KEY0").iterdir()} == {0o666 & ~mask}


def test_a_group_is_inherited_where_the_directory_says_so(write, tmp_path):
    """Below a directory with the group bit, what is made has its group and the bit, as everything there has."""
    other = next((group for group in (*os.getgroups(), 7) if group != os.getegid()), os.getegid())
    try:
        os.chown(tmp_path, -1, other)
    except PermissionError:
        other = os.getegid()
    os.chmod(tmp_path, 0o2775)
    write(str(tmp_path), batch(1), 1)
    made = os.stat(tmp_path / "KEY0")
    assert (made.st_gid, made.st_mode & stat.S_ISGID) == (other, stat.S_ISGID)
    assert {path.stat().st_gid for path in (tmp_path / "KEY0").iterdir()} == {other}


def test_what_is_in_the_place_stays_and_the_new_one_waits_beside_it(write, tmp_path):
    """Where another kernel or a file is in the way the rename is refused, the temporary directory stays whole, and the others are
    written all the same; an empty directory is replaced.
    """
    (tmp_path / "KEY0").mkdir()
    (tmp_path / "KEY1").mkdir()
    (tmp_path / "KEY1" / "k.cubin").write_bytes(b"theirs")
    (tmp_path / "KEY2").write_bytes(b"a file")
    (tmp_path / "KEY3").symlink_to(tmp_path / "nowhere")
    codes = write(str(tmp_path), batch(5), 2)
    assert (codes[0], codes[4]) == (0, 0)
    assert codes[1] in {-errno.ENOTEMPTY, -errno.EEXIST}
    assert codes[2:4] == [-errno.ENOTDIR] * 2
    assert content(tmp_path / "KEY1") == {"k.cubin": b"theirs"}
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("tmp")) == ["tmp.1", "tmp.2", "tmp.3"]
    assert content(tmp_path / "tmp.1") == {name: bytes(data) for name, data in WHOLE}


def test_a_directory_that_is_gone_is_told_for_every_kernel(write, tmp_path):
    codes = write(str(tmp_path / "gone"), batch(3), 2)
    assert codes[0] == errno.ENOENT
    assert set(codes) <= {errno.ENOENT, errno.ECANCELED}


def test_a_kernel_that_fails_leaves_nothing_and_stops_the_batch(write, tmp_path):
    """A file that occurs twice cannot be made the second time: nothing of that kernel stays, and those that were not begun are told
    apart from it.
    """
    twice = (*WHOLE, WHOLE[1])
    kernels = (*batch(2), ("tmp.bad", "BAD", twice), *(("tmp.x", "X", WHOLE),) * 50)
    codes = write(str(tmp_path), kernels, 1)
    assert codes == [0, 0, errno.EEXIST, *[errno.ECANCELED] * 50]
    assert sorted(os.listdir(tmp_path)) == ["KEY0", "KEY1"]


def test_a_temporary_name_that_is_taken_is_left_alone(write, tmp_path):
    """What another process has under that name is neither written into nor removed."""
    (tmp_path / "tmp.0").mkdir()
    (tmp_path / "tmp.0" / "theirs").write_bytes(b"x")
    assert write(str(tmp_path), batch(1), 1) == [errno.EEXIST]
    assert content(tmp_path / "tmp.0") == {"theirs": b"x"}


def test_a_really_full_disk(write, tmp_path):
    """Without room: the error of the system, whole kernels only, and nothing half-written beside them."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small file system to fill up: mount is not permitted")
    try:
        codes = write(str(tmp_path), batch(40), 2)
        assert errno.ENOSPC in codes
        assert set(codes) <= {0, errno.ENOSPC, errno.ECANCELED}
        assert sorted(os.listdir(tmp_path)) == sorted(f"KEY{n}" for n, code in enumerate(codes) if code == 0)
        assert all(content(path) == {name: bytes(data) for name, data in WHOLE} for path in tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0b"])
@pytest.mark.parametrize("place", ["temporary", "key", "file"])
def test_a_name_is_one_component_of_a_path(write, tmp_path, name, place):
    """Whatever a caller took for a name cannot lead elsewhere, and nothing is written."""
    names = {"temporary": "tmp.0", "key": "KEY", "file": "k.json", place: name}
    with pytest.raises(ValueError, match="not the name of a file"):
        write(str(tmp_path), ((names["temporary"], names["key"], ((names["file"], b"x"),)),), 1)
    assert os.listdir(tmp_path) == []


def test_paths_in_any_encoding_are_written_to(write, tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xc3\xa9 \xff")
    root.mkdir()
    assert write(str(root), batch(2), 2) == [0, 0]


def test_the_extension_takes_nothing_but_what_it_declares(tmp_path):
    """Wrong types are errors of Python, not of memory."""
    write = kernel_writer.compiled_writer()
    if write is None:
        pytest.skip("the extension _kernel_writer was not built here")
    root = str(tmp_path)
    wrong = [
        (root, [], 1), (root, (1,), 1), (root, ((),), 1), (root, (("t", "k", []),), 1), (root, (("t", "k", (1,)),), 1),
        (root, (("t", "k", (("n", "text"),)),), 1), (root, ((b"t", "k", ()),), 1), (None, (), 1), (root, (), "1"), (root, ()),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(TypeError):
            write(*arguments)
    with pytest.raises(UnicodeEncodeError):
        write(root, (("t\udcff", "k", ()),), 1)
    assert os.listdir(tmp_path) == []


def test_python_runs_while_the_extension_writes(tmp_path):
    """The interpreter lock is released for the whole batch."""
    write = kernel_writer.compiled_writer()
    if write is None:
        pytest.skip("the extension _kernel_writer was not built here")
    kernels = batch(64, (("big", bytes(1 << 20)), ("k.json", b"{}")))
    steps = []
    running = threading.Event()

    def write_apart():
        running.set()
        write(str(tmp_path), kernels, 1)
        steps.append("written")

    thread = threading.Thread(target=write_apart)
    thread.start()
    running.wait()
    count = 0
    while not steps:
        count += 1
        time.sleep(0)
    thread.join()
    assert count > 10
