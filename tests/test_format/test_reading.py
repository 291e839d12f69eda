# SPDX-License-Identifier: Apache-2.0
"""Bundles are read lazily, by many threads, after a fork, and while their file goes away; closing
leaves nothing open.
"""

import os
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bundler.errors import AccessDenied, BundlerError, NotFound
from bundler.format import container
from bundler.format.bundle import Bundle
from bundler.format.container import Container


@pytest.fixture(scope="module")
def wide(build):
    """The bytes of a bundle with several frames of each kind: more than are kept decoded."""
    files = build.Files()
    kernels = [
        files.kernel(
            number,
            f"k{number}",
            extra={f"k{number}.llir": build.noise(number, 3 << 20) + b" " * (3 << 20)},
        )
        for number in range(9)
    ]
    return files.bundle(*kernels, files.opaque("o/x", build.noise(0, 1 << 20))).to_bytes()


@pytest.fixture
def saved(build, tmp_path):
    """A bundle in a file."""
    path = tmp_path / "b.tbundle"
    build.several().save(path)
    return path


def test_opening_reads_header_table_and_manifest_only(build):
    """Opening takes five reads: the magic, the header, the table, content and observations."""
    data = build.several().to_bytes()
    source = build.Counting(data)
    opened = Container(source)
    manifest = [(s.offset, s.stored_bytes) for s in opened.sections if s.kind in {16, 17}]
    table = int.from_bytes(data[24:32], "little")
    assert source.reads == [(0, 8), (0, 72), (table, len(data) - table), *manifest]


def test_a_launch_set_is_read_without_intermediate_code(build):
    """Reading the launch set of every kernel reads the launch section once, and no byte of any
    other.
    """
    source = build.Counting(build.several().to_bytes())
    opened = Container(source)
    source.reads.clear()
    for kernel in opened.content.kernels:
        for artifact in kernel.launch_set:
            opened.read_blob(bytes.fromhex(artifact.digest[7:]))
    launch = opened.sections[0]
    assert (launch.kind, source.reads) == (1, [(launch.offset, launch.stored_bytes)])


def test_one_kernel_is_read_without_decoding_all(build, wide):
    """Reading all files of one kernel reads one section of binaries and the one or two that its
    other files lie in.
    """
    source = build.Counting(wide)
    opened = Container(source)
    source.reads.clear()
    for artifact in opened.content.kernels[4].artifacts:
        opened.read_blob(bytes.fromhex(artifact.digest[7:]))
    kinds = {section.offset: section.kind for section in opened.sections}
    assert sorted(kinds[offset] for offset, _ in source.reads) in ([1, 2], [1, 2, 2])
    assert sum(size for _, size in source.reads) < source.size / 3


def test_few_frames_stay_decoded(build, wide):
    """Reading everything keeps a bounded number of frames, the youngest."""
    opened = Container(build.Counting(wide))
    for digest, _ in opened.content.blobs:
        opened.read_blob(digest)
    assert len(opened.sections) > container.CACHED_FRAMES + 2
    assert len(opened._frames) == container.CACHED_FRAMES
    opened.close()
    assert opened._frames == {}


def test_the_file_may_be_unlinked_while_it_is_open(build, saved):
    """A loaded bundle goes on reading after its file is gone."""
    with Bundle.load(saved) as bundle:
        saved.unlink()
        assert build.read_all(bundle) == build.read_all(build.several())


def test_the_file_may_be_replaced_while_it_is_open(build, saved):
    """A loaded bundle goes on reading its own bytes after another was saved over it."""
    with Bundle.load(saved) as bundle:
        build.one("Z").save(saved)
        assert build.read_all(bundle) == build.read_all(build.several())
        with Bundle.load(saved) as other:
            assert [kernel.key for kernel in other.kernels] == [build.key("Z")]


def test_a_bundle_can_be_saved_over_itself(build, saved):
    """A loaded bundle can be saved to the file that it reads from."""
    before = saved.read_bytes()
    with Bundle.load(saved) as bundle:
        bundle.save(saved)
        assert build.read_all(bundle) == build.read_all(build.several())
    assert saved.read_bytes() == before


def test_eight_threads_read_the_same(build, wide):
    """Eight threads that read everything in different orders get the same bytes."""
    with Bundle.from_bytes(wide) as bundle:
        expected = {digest: bundle.blobs.read_blob(digest) for digest, _ in bundle.content.blobs}
        digests = list(expected)

        def read(number):
            return {d: bundle.blobs.read_blob(d) for d in digests[number:] + digests[:number]}

        with ThreadPoolExecutor(8) as pool:
            assert all(found == expected for found in pool.map(read, range(8)))


def in_child(check):
    """Run a check in a forked child, and return whether it said yes."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # later Pythons warn of forks with threads, which we test
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_parent_and_child_read_the_same_after_a_fork(build, saved):
    """After a fork, parent and child read the same bytes from the same open file, and closing in
    one leaves the other.
    """
    expected = build.read_all(build.several())
    with Bundle.load(saved) as bundle:
        bundle.read(bundle.kernels[0].binary)

        def check():
            good = build.read_all(bundle) == expected
            bundle.close()
            return good

        assert in_child(check)
        assert build.read_all(bundle) == expected


def test_a_fork_amid_reading_threads_does_not_hang_the_child(build, saved):
    """A child that is forked while other threads read can read: no lock of theirs is left
    behind.
    """
    expected = build.read_all(build.several())
    with Bundle.load(saved) as bundle:
        stop = threading.Event()

        def read():
            while not stop.is_set():
                build.read_all(bundle)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            assert all(in_child(lambda: build.read_all(bundle) == expected) for _ in range(20))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_closing_closes_the_file_and_reading_afterwards_is_an_error(build, saved):
    """After `close`, which may come twice, the file is closed, and reading what is not kept decoded
    is a typed error.
    """
    bundle = Bundle.load(saved)
    fd = bundle.blobs._source._fd
    assert Path(f"/proc/self/fd/{fd}").exists() or not Path("/proc/self/fd").exists()
    bundle.close()
    bundle.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(BundlerError, match="cannot read"):
        bundle.read(bundle.kernels[0].binary)


def test_a_file_that_is_refused_is_closed(build, saved):
    """Opening a damaged file leaves no file open, whichever part is damaged."""
    data = saved.read_bytes()
    for position in (0, 10, 45, len(data) - 1, len(data) - 150):
        saved.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        before = sorted(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else []
        with pytest.raises(BundlerError):
            Bundle.load(saved).verify()
        after = sorted(os.listdir("/proc/self/fd")) if before else []
        assert len(after) == len(before)


def test_a_bundle_that_nobody_closes_is_closed_when_it_is_forgotten(saved):
    """A bundle that is dropped without `close` leaves no file open."""
    bundle = Bundle.load(saved)
    fd = bundle.blobs._source._fd
    del bundle
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_missing_file_is_not_found(tmp_path):
    """Loading what is not there is NotFound with the path, also when a file stands where a
    directory should be.
    """
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "none.tbundle", tmp_path / "file" / "b.tbundle"):
        with pytest.raises(NotFound, match="check the path") as caught:
            Bundle.load(path)
        assert caught.value.path == str(path)


def test_a_directory_is_no_bundle(tmp_path):
    """Loading a directory is a typed error that says so."""
    with pytest.raises(BundlerError, match="it is a directory, expected a bundle file"):
        Bundle.load(tmp_path)


def test_a_named_pipe_is_no_bundle(tmp_path):
    """Loading a named pipe, which nobody writes to, is a typed error and does not wait."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundlerError, match="cannot open"):
        Bundle.load(tmp_path / "pipe")


def test_an_unreadable_file_is_access_denied(saved, monkeypatch):
    """A file that the operating system does not let us open is AccessDenied; root may read all, so
    its answer is made up.
    """

    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("bundler.format.bundle_file.os.open", refuse)
    with pytest.raises(
        AccessDenied,
        match=r"cannot open .*b\.tbundle: Permission denied; check its owner and permissions",
    ):
        Bundle.load(saved)


def test_a_disk_that_fails_is_a_typed_error(saved, monkeypatch):
    """An input error while reading is a typed error that names the file."""
    with Bundle.load(saved) as bundle:

        def fail(*args):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("bundler.format.bundle_file.os.pread", fail)
            with pytest.raises(BundlerError, match=r"cannot read .*b\.tbundle: Input/output error"):
                bundle.read(bundle.kernels[0].binary)


def test_short_reads_are_read_on(build, saved, monkeypatch):
    """A file system that gives fewer bytes than asked for is asked again."""
    pread = os.pread
    monkeypatch.setattr(
        "bundler.format.bundle_file.os.pread",
        lambda fd, size, offset: pread(fd, min(size, 7), offset),
    )
    with Bundle.load(saved) as bundle:
        assert build.read_all(bundle) == build.read_all(build.several())


def test_a_real_cache_opens_and_verifies(real_cache, tmp_path):
    """A bundle of a real cache is saved, opened elsewhere and verified, and its digest does not
    depend on the place.
    """
    import bundler

    packed = bundler.pack(real_cache)
    packed.save(tmp_path / "real.tbundle")
    shutil.copytree(real_cache, tmp_path / "copy")
    with Bundle.load(tmp_path / "real.tbundle") as bundle:
        bundle.verify()
        assert bundle.digest == packed.digest
        assert {a.filename for k in bundle.kernels for a in k.artifacts} == {
            a.filename for k in packed.kernels for a in k.artifacts
        }


def test_a_view_lies_in_its_frame_and_is_verified(build):
    """What is only written to disk need not be copied."""
    bundle = build.several()
    opened = Bundle.from_bytes(bundle.to_bytes())
    for artifact in opened.kernels[0].artifacts:
        digest = bytes.fromhex(artifact.digest[7:])
        view = opened.view_blob(digest, artifact.filename)
        assert isinstance(view, memoryview)
        assert view == bundle.view_blob(digest, artifact.filename) == opened.read(artifact)
