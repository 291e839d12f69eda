# SPDX-License-Identifier: Apache-2.0
"""Kernels on their way into cache directories: in which order, in which thread, and what stays when something goes wrong."""

import _thread
import errno
import os
import threading

import pytest
import workshop

from bundler.errors import StoreFull
from bundler.lifecycle import cache_directory, kernel_writer, placement_queue
from bundler.lifecycle.cache_directory import CacheDirectory
from bundler.lifecycle.placement_queue import PlacementQueue
from bundler.lifecycle.ready_kernel import ReadyKernel

FILES = {"k.cubin": b"\x7fELF", "k.json": b"{}"}


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    """Let either writer do it."""
    if request.param == "python":
        workshop.write_in_python(monkeypatch)
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
    return PlacementQueue(lambda kernel, outcome: heard.setdefault(kernel.key, []).append(outcome))


def ready(number, files=None):
    return ReadyKernel(f"{number:064x}", files or FILES, b"{}")


def test_every_kernel_is_told_once_and_is_there(way, queue, heard, directory, tmp_path):
    """However many batches it takes, in several directories, each kernel is told once for each and is in place."""
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
    """What waits in memory is bounded in bytes: a batch is handed over before the number is reached."""
    large = {"k.cubin": bytes(placement_queue.BYTES_PER_BATCH), "k.json": b"{}"}
    queue.add(directory, ready(0, large))
    queue.add(directory, ready(1, large))
    assert list(heard) == [f"{0:064x}"]
    queue.finish()


def test_the_caller_goes_on_while_a_batch_is_written(queue, heard, directory, monkeypatch):
    """With the extension a thread writes; the caller waits for it when the next batch is full, and not before."""
    if kernel_writer.compiled_writer() is None:
        pytest.skip("the extension _kernel_writer was not built here")
    real, go, who = cache_directory.write_kernels, threading.Event(), []

    def write(*arguments):
        who.append(threading.get_ident())
        go.wait(20)
        return real(*arguments)

    monkeypatch.setattr(cache_directory, "write_kernels", write)
    for number in range(placement_queue.KERNELS_AT_FIRST + 1):
        queue.add(directory, ready(number))
    assert not heard
    go.set()
    queue.finish()
    assert len(heard) == placement_queue.KERNELS_AT_FIRST + 1
    assert threading.get_ident() not in who


def test_without_another_thread_the_caller_writes(queue, heard, directory, monkeypatch):
    """Where the system gives no thread, a restore is slower and nothing else."""

    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none)
    for number in range(40):
        queue.add(directory, ready(number))
    queue.finish()
    assert len(heard) == 40


def test_an_error_stops_the_queue_and_tells_what_was_placed(way, queue, heard, directory, monkeypatch):
    """The batch that fails raises what the system said; the kernels before it are told, later ones are not begun, nothing half-written
    stays.
    """
    real = cache_directory.write_kernels

    def write(root, kernels, threads):
        if any(int(key, 16) == 70 for _, key, _ in kernels):
            kernels = kernels[:3]
            return [*real(root, kernels, threads), errno.ENOSPC, *[errno.ECANCELED] * 60][:64]
        return real(root, kernels, threads)

    monkeypatch.setattr(cache_directory, "write_kernels", write)
    with pytest.raises(StoreFull, match="No space left on device"):
        for number in range(16 + 32 + 64 + 64):
            queue.add(directory, ready(number))
    queue.close()
    queue.close()
    assert sorted(heard) == sorted(os.listdir(directory.path)) == [f"{number:064x}" for number in range(16 + 32 + 3)]


@pytest.mark.parametrize("moment", ["adding", "starting", "writing"])
def test_an_interrupt_leaves_nothing_half_written(way, queue, heard, directory, monkeypatch, moment):
    """Control-C while kernels are read, while a thread is started, or in the midst of a batch: what is there is whole."""
    if moment == "starting":
        real = _thread.start_new_thread

        def start(*given):
            real(*given)
            raise KeyboardInterrupt

        monkeypatch.setattr(_thread, "start_new_thread", start)
    elif moment == "writing" and way == "python":
        writing = os.write
        monkeypatch.setattr(os, "write", lambda *given: _interrupted() if given[1] == b"last" else writing(*given))
    with pytest.raises(KeyboardInterrupt):
        for number in range(30):
            queue.add(directory, ready(number, {**FILES, "k.cubin": b"last"} if number == 9 else FILES))
            if number == 20:
                raise KeyboardInterrupt
    queue.close()
    assert workshop.temporaries(directory.path) == []
    for key in os.listdir(directory.path):
        assert workshop.is_whole(workshop.Path(directory.path, key))


def _interrupted():
    raise KeyboardInterrupt


def test_a_lost_race_is_settled_for_that_kernel_alone(way, queue, heard, directory, compiled, bundle):
    """A kernel that another process put there after the directory was listed is present; a broken one is replaced."""
    kernels = [kernel for kernel in bundle.kernels if kernel.target.backend == "cuda"][:3]
    workshop.plant(compiled.cache, directory.path, [kernel.key for kernel in kernels[:2]])
    workshop.one(workshop.Path(directory.path, kernels[1].key), ".cubin").write_bytes(b"torn")
    for kernel in kernels:
        files = {artifact.filename: bundle.read(artifact) for artifact in kernel.artifacts}
        queue.add(directory, ReadyKernel(kernel.key, files, files[kernel.metadata.filename]))
    queue.finish()
    assert [heard[kernel.key] for kernel in kernels] == [["present"], ["repaired"], ["restored"]]
    assert workshop.temporaries(directory.path) == []


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
