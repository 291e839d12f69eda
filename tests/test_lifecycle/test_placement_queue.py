# SPDX-License-Identifier: Apache-2.0
"""Kernels on their way into cache directories: in which order, in which thread, and what stays when
something goes wrong.
"""

import errno
import os
import time

import pytest
import support

from bundler.errors import StoreFull
from bundler.format.bundle import MemoryBlobs
from bundler.lifecycle import cache_directory, kernel_writer
from bundler.lifecycle.cache_directory import CacheDirectory, PlacementQueue
from bundler.lifecycle.kernel_placement import Placement

FILES = {"k.cubin": b"\x7fELF", "k.json": b"{}"}


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    """Let either writer do it."""
    if request.param == "python":
        support.write_in_python(monkeypatch)
    elif kernel_writer.compiled_writer() is None:
        pytest.skip("the extension _kernel_writer was not built here")
    return request.param


@pytest.fixture
def directory(tmp_path):
    return CacheDirectory(str(tmp_path / "there"))


@pytest.fixture
def heard():
    """What the queue told, by key."""
    return {}


@pytest.fixture
def queue(heard):
    class Told(PlacementQueue):
        def placed(self, kernels, outcome):
            for kernel in kernels:
                heard.setdefault(kernel.key, []).append(outcome)

    return Told(MemoryBlobs({}))


def ready(number, files=FILES):
    return ready_of(f"{number:064x}", files, b"{}")


def ready_of(key, files, metadata):
    return Placement(
        key,
        tuple(files),
        (),
        sum(map(len, files.values())),
        contents=tuple(files.values()),
        stored_metadata=metadata,
        compared=True,
        checked=True,
    )


def test_every_kernel_is_told_once_and_is_there(way, queue, heard, directory, tmp_path):
    """However many batches it takes, in several directories, each kernel is told once for each and
    is in place.
    """
    other = CacheDirectory(str(tmp_path / "other"))
    for number in range(200):
        queue.add(directory, ready(number))
        queue.add(other, ready(number))
    queue.finish()
    queue.close()
    assert heard == {f"{number:064x}": ["restored", "restored"] for number in range(200)}
    for place in (directory, other):
        assert sorted(os.listdir(place.path)) == sorted(heard)


def test_a_large_kernel_does_not_wait_for_others(way, queue, heard, directory):
    """What waits in memory is bounded in bytes: a batch is handed over before the number is
    reached.
    """
    large = {"k.cubin": bytes(cache_directory.BYTES_PER_BATCH), "k.json": b"{}"}
    queue.add(directory, ready(0, large))
    queue.add(directory, ready(1, large))
    deadline = time.monotonic() + 20
    while f"{0:064x}" not in os.listdir(directory.path):
        assert time.monotonic() < deadline
    queue.finish()
    assert len(heard) == 2


def test_the_caller_goes_on_while_a_batch_is_written(queue, heard, directory, monkeypatch):
    """With the extension threads write that nobody has to wait for; the caller does when the next
    batch is full, and not before.
    """
    if kernel_writer.compiled_writer() is None:
        pytest.skip("the extension _kernel_writer was not built here")
    real, waited = cache_directory.begin_writing, []

    def begin(*arguments):
        finish = real(*arguments)
        return lambda: waited.append(1) or finish()

    monkeypatch.setattr(cache_directory, "begin_writing", begin)
    for number in range(cache_directory.KERNELS_AT_FIRST + 1):
        queue.add(directory, ready(number))
    deadline = time.monotonic() + 20
    while (
        sum(not name.startswith("tmp.") for name in os.listdir(directory.path))
        < cache_directory.KERNELS_AT_FIRST
    ):
        assert time.monotonic() < deadline
    assert not waited
    assert not heard
    queue.finish()
    assert len(heard) == cache_directory.KERNELS_AT_FIRST + 1
    assert len(waited) == 2


def test_an_error_stops_the_queue_and_tells_what_was_placed(
    way, queue, heard, directory, monkeypatch
):
    """The batch that fails raises what the system said; the kernels before it are told, and of
    later ones those that were being written already; nothing half-written stays.
    """
    real = cache_directory.begin_writing

    def begin(root, kernels, threads):
        if any(int(key, 16) == 70 for _, key, *_ in kernels):
            finish = real(root, kernels[:3], threads)
            return lambda: [*finish(), errno.ENOSPC, *[errno.ECANCELED] * 60][:64]
        return real(root, kernels, threads)

    monkeypatch.setattr(cache_directory, "begin_writing", begin)
    with pytest.raises(StoreFull, match="No space left on device"):
        for number in range(16 + 32 + 64 + 64):
            queue.add(directory, ready(number))
        queue.finish()
    queue.close()
    queue.close()
    under_way = range(16 + 32 + 64, 16 + 32 + 64 + 64) if way == "compiled" else ()
    placed = [f"{number:064x}" for number in (*range(16 + 32 + 3), *under_way)]
    assert sorted(heard) == sorted(os.listdir(directory.path)) == placed


@pytest.mark.parametrize("moment", ["adding", "starting", "writing"])
def test_an_interrupt_leaves_nothing_half_written(
    way, queue, heard, directory, monkeypatch, moment
):
    """Control-C while kernels are read, while a batch is begun, or in the midst of a batch: what is
    there is whole.
    """
    if moment == "starting":
        real = cache_directory.begin_writing

        def begin(*given):
            real(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(cache_directory, "begin_writing", begin)
    elif moment == "writing" and way == "python":
        writing = os.write
        monkeypatch.setattr(
            os, "write", lambda *given: _interrupted() if given[1] == b"last" else writing(*given)
        )
    with pytest.raises(KeyboardInterrupt):
        for number in range(30):
            queue.add(
                directory, ready(number, {**FILES, "k.cubin": b"last"} if number == 9 else FILES)
            )
            if number == 20:
                raise KeyboardInterrupt
    queue.close()
    assert support.temporaries(directory.path) == []
    for key in os.listdir(directory.path):
        assert support.is_whole(support.Path(directory.path, key))


def _interrupted():
    raise KeyboardInterrupt


def test_a_lost_race_is_settled_for_that_kernel_alone(
    way, queue, heard, directory, compiled, bundle
):
    """A kernel that another process put there after the directory was listed is present; a broken
    one is replaced.
    """
    kernels = [kernel for kernel in bundle.kernels if kernel.target.backend == "cuda"][:3]
    support.plant(compiled.cache, directory.path, [kernel.key for kernel in kernels[:2]])
    support.one(support.Path(directory.path, kernels[1].key), ".cubin").write_bytes(b"torn")
    for kernel in kernels:
        files = {artifact.filename: bundle.read(artifact) for artifact in kernel.artifacts}
        queue.add(directory, ready_of(kernel.key, files, files[kernel.metadata.filename]))
    queue.finish()
    assert [heard[kernel.key] for kernel in kernels] == [["present"], ["repaired"], ["restored"]]
    assert support.temporaries(directory.path) == []


def test_a_cache_that_is_removed_meanwhile_is_made_again(way, queue, heard, directory):
    """The program may remove its whole cache between two batches."""
    for number in range(16):
        queue.add(directory, ready(number))
    queue.finish()
    os.rename(directory.path, directory.path + ".away")
    for number in range(16, 20):
        queue.add(directory, ready(number))
    queue.finish()
    assert len(heard) == 20
    assert len(os.listdir(directory.path)) == 4
