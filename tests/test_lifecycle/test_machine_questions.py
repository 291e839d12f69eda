# SPDX-License-Identifier: Apache-2.0
"""What takes long to find out about a machine is asked while kernels are read: a restore does not
wait for a slow driver first.
"""

import os
import threading
import time

import pytest

import bundler
from bundler.errors import BundlerError
from bundler.format.entries import Target
from bundler.lifecycle import compatibility, restoration
from bundler.lifecycle.compatibility import Questions
from bundler.toolchain import ptxas, targets

PATIENCE_S = 20.0


class SlowLibrary:
    """A stand-in for libnvidia-ml with one GPU, of which the first call, and the last if it is so
    wished, returns when it is told to.
    """

    def __init__(self, capability=(9, 0)):
        self.capability = capability
        self.asked, self.may_answer, self.may_end = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.may_end.set()
        self.calls, self.ended = [], []

    def nvmlInit_v2(self):
        self.calls.append(threading.get_ident())
        self.asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.capability
        return 0

    def nvmlDeviceGetUUID(self, handle, uuid, size):
        uuid.value = b"GPU-1"
        return 0

    def nvmlShutdown(self):
        assert self.may_end.wait(PATIENCE_S)
        self.ended.append(threading.get_ident())
        return 0


@pytest.fixture
def driver(monkeypatch):
    """A machine where the driver of an H200 is slow to answer."""
    library = SlowLibrary()
    monkeypatch.setattr(targets, "_NVIDIA_DEVICES", (os.devnull,))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(targets, "_initialized_cuda", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    targets._from_drivers.cache_clear()
    yield library
    library.may_answer.set()
    library.may_end.set()
    targets.wait_for_drivers()
    targets._from_drivers.cache_clear()


@pytest.fixture
def reading(monkeypatch):
    """Keys of the kernels that were read, a few at a time, as they are; `then` is called after
    these.
    """
    keys, plain = [], restoration.read

    def read(source, wanted):
        keys.extend(one.key for one in wanted)
        keys.then()
        return plain(source, wanted)

    class Keys(list):
        then = staticmethod(lambda: None)

    keys = Keys()
    monkeypatch.setattr(restoration, "read", read)
    return keys


def test_kernels_are_read_while_a_slow_driver_is_asked(
    bundle, tmp_path, driver, reading, monkeypatch
):
    """The driver answers only when a kernel was read, and nothing is written before it has."""
    there = tmp_path / "there"
    written_early = []

    def answer():
        assert driver.asked.wait(PATIENCE_S)
        written_early.extend(os.listdir(there) if there.exists() else [])
        driver.may_answer.set()

    monkeypatch.setattr(reading, "then", answer)
    report = bundler.restore(bundle, there)
    assert len(report.restored) == 11
    assert {why for _, why in report.skipped} == {
        "compiled for hip:gfx942; the GPUs here are cuda:90"
    }
    assert written_early == []
    assert driver.calls != [threading.get_ident()]
    assert len(driver.calls) == 1


def test_each_kernel_is_read_once(bundle, tmp_path, driver, reading):
    """What was read meanwhile is what is placed."""
    threading.Timer(0.2, driver.may_answer.set).start()
    report = bundler.restore(bundle, tmp_path / "there")
    assert sorted(set(reading)) == sorted(reading)
    assert set(report.restored) <= set(reading)


def test_a_kernel_that_is_of_no_use_is_left_out_though_it_was_read(
    bundle, tmp_path, driver, reading
):
    """The GPUs decide, whenever they are known; the directory is not even made."""
    driver.capability = (8, 0)
    threading.Timer(0.2, driver.may_answer.set).start()
    with pytest.warns(bundler.BundlerWarning, match="the GPUs here are cuda:80"):
        report = bundler.restore(bundle, tmp_path / "there")
    assert reading
    assert report.restored == ()
    assert not (tmp_path / "there").exists()


def test_damage_in_a_kernel_of_no_use_is_not_told(bundle, tmp_path, driver, monkeypatch):
    """As if it had not been read: a report tells what was met on the way to what is of use."""

    def damaged(source, wanted):
        raise restoration.DigestMismatch("damaged", what=wanted[0].key)

    monkeypatch.setattr(restoration, "read", damaged)
    threading.Timer(0.2, driver.may_answer.set).start()
    with pytest.warns(bundler.BundlerWarning):
        report = bundler.restore(bundle, tmp_path / "there")
    of_use = {kernel.key for kernel in bundle.kernels if kernel.target.backend == "cuda"}
    assert set(report.damaged) == of_use


def test_what_waits_for_the_driver_is_bounded(bundle, tmp_path, driver, reading, monkeypatch):
    """Where the driver takes very long, a few kernels are in memory and no more."""
    monkeypatch.setattr(restoration, "BYTES_READ_MEANWHILE", 0)
    monkeypatch.setattr("bundler.lifecycle.restore_plan.KERNELS_PER_RUN", 1)
    monkeypatch.setattr(restoration, "RUNS_BETWEEN_WAITS", 1)
    before = []
    threading.Timer(0.5, lambda: (before.extend(reading), driver.may_answer.set())).start()
    report = bundler.restore(bundle, tmp_path / "there")
    assert len(before) == 1
    assert len(report.restored) == 11


def test_an_interrupted_restore_leaves_nobody_asking(
    bundle, tmp_path, driver, reading, monkeypatch
):
    """The question is answered, or was never asked, when the error arrives."""

    def interrupt():
        threading.Timer(0.2, driver.may_answer.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "then", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bundler.restore(bundle, tmp_path / "there")
    assert not driver.asked.is_set() or driver.may_answer.is_set()


def test_the_driver_is_not_asked_where_everything_is_restored(bundle, tmp_path, driver):
    """only='all' does not depend on this machine."""
    assert len(bundler.restore(bundle, tmp_path / "there", only="all").restored) == len(
        bundle.kernels
    )
    assert driver.calls == []


def test_a_store_is_read_while_the_driver_is_asked(bundle, tmp_path, driver):
    """The tag and its manifest come meanwhile."""
    with bundler.open_store("memory:") as store:
        store.push(bundle, "one")
        plain = store._references.find

        def find(tag):
            assert driver.asked.wait(PATIENCE_S)
            driver.may_answer.set()
            return plain(tag)

        store._references.find = find
        assert len(store.restore("one", cache_dir=tmp_path / "there").restored) == 11


def test_ptxas_is_asked_for_the_first_kernel(bundle, monkeypatch):
    """Where there are processors to spare; a kernel of AMD's needs none."""
    asked = []
    monkeypatch.setattr(ptxas, "begin_asking", asked.append)
    cuda = [kernel for kernel in bundle.kernels if kernel.target.backend == "cuda"]
    hip = [kernel for kernel in bundle.kernels if kernel.target.backend == "hip"]
    for kernels in (cuda, hip, []):
        with Questions() as questions:
            questions.ask_for_ptxas(kernels)
            assert _answered(questions)
    assert asked == [90]


def test_kernels_are_written_while_the_driver_is_left(bundle, tmp_path, driver):
    """Taking a driver's library down takes as long as writing a hundred kernels; a restore returns
    when both are done.
    """
    driver.may_answer.set()
    driver.may_end.clear()
    there, reports = tmp_path / "there", []
    thread = threading.Thread(target=lambda: reports.append(bundler.restore(bundle, there)))
    thread.start()
    ends = time.monotonic() + PATIENCE_S
    while not (
        there.is_dir() and sum(not name.startswith("tmp.") for name in os.listdir(there)) == 11
    ):
        assert time.monotonic() < ends
        time.sleep(0.001)
    thread.join(0.05)
    assert (thread.is_alive(), driver.ended, reports) == (True, [], [])
    driver.may_end.set()
    thread.join()
    assert len(reports[0].restored) == 11
    assert len(driver.ended) == 1


@pytest.mark.parametrize("ask", ["targets", "check"])
def test_nobody_returns_before_the_driver_is_left(bundle, tmp_path, driver, ask):
    """Whoever forks then has no child that hangs in the driver's library."""
    driver.may_answer.set()
    driver.may_end.clear()
    threading.Timer(0.05, driver.may_end.set).start()
    if ask == "targets":
        assert targets.visible_targets() == (Target("cuda", "90"),)
    else:
        bundler.check(bundle, tmp_path)
    assert len(driver.ended) == 1


def test_a_child_that_was_forked_meanwhile_waits_for_no_thread_of_its_parent(driver):
    driver.may_answer.set()
    driver.may_end.clear()
    assert targets.listed_targets() == (Target("cuda", "90"),)
    child = os.fork()
    if child == 0:
        targets.wait_for_drivers()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    driver.may_end.set()
    targets.wait_for_drivers()
    assert len(driver.ended) == 1


def test_a_driver_that_fails_decides_nothing(monkeypatch):
    """A question that raises is asked again by who needs the answer, in its own thread."""

    def broken():
        raise BundlerError("no")

    monkeypatch.setattr(targets, "asking_takes_long", lambda: True)
    monkeypatch.setattr(targets, "listed_targets", broken)
    with Questions() as questions:
        questions.ask_for_gpus()
    with pytest.raises(BundlerError):
        _ = compatibility.Machine().targets
    monkeypatch.setattr(targets, "listed_targets", lambda: (Target("cuda", "90"),))
    assert compatibility.Machine().targets == (Target("cuda", "90"),)


def _answered(questions):
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if questions.answered(0.01):
            return True
    return False
