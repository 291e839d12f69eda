# SPDX-License-Identifier: Apache-2.0
"""Many kernel directories read at once: the same answers as one by one, and nothing that changed
meanwhile.
"""

import hashlib
import os
import threading

import pytest
import support
from msgspec.structs import replace

import bundler
from bundler.format.limits import Limits
from bundler.lifecycle import kernel_directory
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_kernel, read_kernels


@pytest.fixture
def begin():
    """What begins to read."""
    found = kernel_directory.compiled_reader()
    if found is None:
        pytest.skip("the extension _kernel_reader was not built here")
    return found


@pytest.fixture
def reader(begin):
    """Reads from beginning to end, compares the digests, and returns the bytes."""

    def read(*arguments):
        found = begin(*arguments).finish()
        for directory in filter(None, found):
            files, digests = directory
            assert digests == {name: hashlib.sha256(data).digest() for name, data in files.items()}
        return [directory and directory[0] for directory in found]

    return read


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    """With the extension, and as if it had not been built."""
    if request.param == "python":
        monkeypatch.setattr(kernel_directory, "compiled_reader", lambda: None)
    elif kernel_directory.compiled_reader() is None:
        pytest.skip("the extension _kernel_reader was not built here")
    return request.param


def made(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return os.fsencode(folder)


def test_every_kernel_of_a_cache_is_read(way, compiled):
    """Many are what one by one are, in the order that was asked for."""
    directories = [str(compiled.cache / key) for key in reversed(compiled.keys)] * 3
    found = list(read_kernels(directories))
    # One by one nothing is hashed yet.
    assert [replace(kernel, digests={}) for kernel in found] == [
        read_kernel(directory) for directory in directories
    ]
    assert {type(kernel) for kernel in found} == {KernelFiles}
    hashed = [{name: kernel.digests.get(name) for name in kernel.files} for kernel in found]
    if way == "compiled":
        digests = [
            {name: hashlib.sha256(data).digest() for name, data in kernel.files.items()}
            for kernel in found
        ]
        assert hashed == digests


@pytest.mark.parametrize("case", support.BROKEN)
def test_what_is_broken_is_rejected_for_the_same_reason(way, planted, key, case):
    support.BROKEN[case][0](planted / key)
    assert list(read_kernels([str(planted / key)])) == [read_kernel(str(planted / key))]


@pytest.mark.parametrize(
    "limits", [Limits(file_bytes=4000), Limits(kernel_bytes=1000), Limits(files_per_kernel=3)]
)
def test_what_is_too_large_is_rejected_for_the_same_reason(way, planted, key, limits):
    (found,) = read_kernels([str(planted / key)], limits)
    assert found == read_kernel(str(planted / key), limits)
    assert isinstance(found, Rejected)


def test_what_is_not_there_is_missing(way, planted, key, tmp_path):
    """A directory that is gone, and a file in the place of one, among kernels that are there."""
    (tmp_path / "file").write_text("x")
    found = list(read_kernels([str(tmp_path / "gone"), str(planted / key), str(tmp_path / "file")]))
    assert found[0] == Rejected("the directory is gone", missing=True)
    assert isinstance(found[1], KernelFiles)
    assert found[2] == Rejected("not a directory")


def test_both_ways_make_the_same_bundle(full_cache, monkeypatch):
    with bundler.pack(full_cache) as packed:
        ahead = packed.to_bytes()
    monkeypatch.setattr(kernel_directory, "compiled_reader", lambda: None)
    with bundler.pack(full_cache) as packed:
        assert packed.to_bytes() == ahead


@pytest.mark.parametrize("threads", [0, 1, 2, 100])
def test_the_extension_reads_regular_files(reader, tmp_path, threads):
    """Names in any encoding, empty files, empty directories, and files larger than what one call of
    the system brings.
    """
    odd = {os.fsdecode(b"\xff x"): b"odd", "empty": b"", "big": os.urandom(3 << 20)}
    paths = [made(tmp_path / str(number), odd if number % 2 else {}) for number in range(50)]
    found = reader(tuple(paths), 8, 1 << 40, threads)
    assert found == [odd if number % 2 else {} for number in range(50)]


def test_the_extension_leaves_to_python_what_is_out_of_the_ordinary(reader, tmp_path):
    """Links, pipes, folders, too many files or bytes, and what cannot be opened."""
    files = {"a": b"12345", "b": b"12345"}
    linked, piped, nested = (tmp_path / name for name in ("linked", "piped", "nested"))
    paths = [made(folder, files) for folder in (linked, piped, nested, tmp_path / "fine")]
    (linked / "c").symlink_to(linked / "a")
    os.mkfifo(piped / "c")
    (nested / "c").mkdir()
    assert reader(tuple(paths), 3, 1 << 20, 1) == [None, None, None, files]
    assert reader(tuple(paths), 1, 1 << 20, 1) == [None] * 4
    assert reader((paths[3], paths[3], os.fsencode(tmp_path / "gone")), 2, 15, 1) == [
        files,
        None,
        None,
    ]


def test_the_extension_takes_nothing_but_what_it_declares(reader, tmp_path):
    """Wrong types are errors of Python, not of memory."""
    for arguments in (
        ([], 1, 1, 1),
        ((str(tmp_path),), 1, 1, 1),
        ((b"x",), "1", 1, 1),
        ((b"x",), 1, 1),
    ):
        with pytest.raises(TypeError):
            reader(*arguments)
    for arguments in (((b"a\0b",), 1, 1, 1), ((b"x",), -1, 1, 1), ((b"x",), 5000, 1, 1)):
        with pytest.raises(ValueError, match=r"null byte|expected 0 to 4096"):
            reader(*arguments)


def test_the_files_of_one_reading_are_read_while_those_of_the_next_are_listed(begin, tmp_path):
    """`go_on` may be left out or called twice, and `finish` returns the same again."""
    paths = [made(tmp_path / str(number), {"a": b"%d" % number}) for number in range(9)]
    readings = [begin((path,), 4, 100, 2) for path in paths]
    for reading in readings[::3]:
        reading.go_on()
        reading.go_on()
    found = [reading.finish() for reading in readings]
    assert [files["a"] for ((files, _),) in found] == [b"%d" % number for number in range(9)]
    assert [reading.finish() for reading in readings] == found


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_reading_that_nobody_waits_for_leaves_nothing(begin, tmp_path, threads):
    path = made(tmp_path / "k", {"a": b"0"})
    opened = len(os.listdir("/dev/fd"))
    for number in range(200):
        reading = begin((path,) * 8, 4, 100, threads)
        if number % 2:
            reading.go_on()
        del reading
    assert len(os.listdir("/dev/fd")) == opened


@pytest.mark.parametrize("listed", [False, True])
def test_a_forked_child_leaves_what_its_parent_reads_to_python(begin, tmp_path, listed):
    """The threads are the parent's; the child knows nothing of what they did."""
    path = made(tmp_path / "k", {"a": b"0"})
    reading = begin((path,) * 4, 4, 100, 2)
    if listed:
        reading.go_on()
    child = os.fork()
    if not child:
        os._exit(0 if reading.finish() == [None] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [files for files, _ in reading.finish()] == [{"a": b"0"}] * 4


def test_files_that_change_while_they_are_read_are_not_mixed(reader, tmp_path):
    """Another process replaces one file after the other: what the extension returns was there at
    one moment.
    """
    path = made(tmp_path / "k", {"a": b"0", "b": b"0"})
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            for name in ("a", "b"):
                (tmp_path / "new").write_bytes(b"%d" % number)
                os.replace(tmp_path / "new", tmp_path / "k" / name)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [files for _ in range(3000) if (files := reader((path,), 4, 100, 1)[0]) is not None]
    finally:
        stop.set()
        writer.join()
    assert {int(files["a"]) - int(files["b"]) for files in found} <= {0, 1}
