# SPDX-License-Identifier: Apache-2.0
import os
import sys

import pytest
import support

import bundler
from bundler.errors import RecordingError

pytestmark = pytest.mark.toolchain

# A program that records; argv is the file of kernels and the bundle to write.
_START = """
import importlib.util, json, os, subprocess, sys
import bundler
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

def in_fork(work):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0

def report(recording):
    bundle = recording.collect()
    print(json.dumps({"names": sorted({kernel.name for kernel in bundle.kernels}), "left_out": recording.report.left_out,
                      "sources": dict(recording.report.sources), "without_facts": recording.report.without_facts,
                      "proven": all(kernel.parts and kernel.parts.proven for kernel in bundle.kernels)}))
"""


def program(code, cache, **env):
    """Run a recording program and return what it reported."""
    return support.answer(_START + code, support.KERNELS, env={"TRITON_CACHE_DIR": cache, **env})


@pytest.mark.slow
def test_children_of_every_kind_are_recorded(cache, tmp_path):
    """A program's own kernels, its child program's and its pool worker's are in one bundle, with
    facts and proven keys.
    """
    code = """
with bundler.recording(children=True) as recording:
    subprocess.run([sys.executable, os.path.join(os.path.dirname(sys.argv[1]), "child.py")], check=True,
                   stdout=subprocess.DEVNULL)
    kernels.compile_one("layer_norm", "cuda:90")
assert "TRITON_CACHE_MANAGER" not in os.environ
report(recording)
"""
    found = program(code, cache)
    assert found["names"] == [
        "gelu_kernel",
        "layer_norm_kernel",
        "row_sum_kernel",
        "softmax_kernel",
        "swiglu_kernel",
    ]
    assert found["sources"] == {"children": 7, "listener": 1}
    assert (found["left_out"], found["without_facts"], found["proven"]) == ([], [], True)


def test_without_children_the_directories_tell(cache):
    """Without children=True a child's kernels are found where they appeared, without facts."""
    code = """
with bundler.recording() as recording:
    subprocess.run([sys.executable, os.path.join(os.path.dirname(sys.argv[1]), "child.py"), "--child"], check=True,
                   stdout=subprocess.DEVNULL)
report(recording)
"""
    found = program(code, cache)
    assert found["names"] == ["row_sum_kernel"]
    assert found["sources"] == {"directories": 1}
    assert len(found["without_facts"]) == 1


@pytest.mark.release
def test_a_childs_kernel_has_the_facts_of_a_heard_one(cache, tmp_path):
    """Recorded through the spool or through the listener, the same compiles give the same bundle
    digest.
    """
    code = """
if sys.argv[2] == "child":
    child = "import sys; sys.path.insert(0, sys.argv[1]); import kernels; kernels.compile_one('swiglu', 'cuda:90')"
    with bundler.recording(children=True) as recording:
        subprocess.run([sys.executable, "-P", "-c", child, os.path.dirname(sys.argv[1])], check=True)
else:
    with bundler.recording() as recording:
        kernels.compile_one("swiglu", "cuda:90")
print(json.dumps([recording.collect().digest, dict(recording.report.sources)]))
"""
    one = support.answer(
        _START + code, support.KERNELS, "child", env={"TRITON_CACHE_DIR": tmp_path / "one"}
    )
    two = support.answer(
        _START + code, support.KERNELS, "self", env={"TRITON_CACHE_DIR": tmp_path / "two"}
    )
    assert (one[1], two[1]) == ({"children": 4}, {"listener": 4})
    assert one[0] == two[0]


def test_a_forked_child_does_not_disturb_its_parents_recording(cache):
    """What a forked child compiles, begins, collects and ends leaves the parent's recording as it
    was.
    """
    code = """
bundler.begin_compile()
with bundler.recording() as recording:
    kernels.compile_one("gelu", "cuda:90")
    def child():
        bundler.end_compile()
        try:
            bundler.collect()
        except bundler.BundlerError as error:
            assert type(error).__name__ == "RecordingError", error
        else:
            raise AssertionError("the child collected its parent's recording")
        bundler.begin_compile()
        [kernel] = kernels.compile_one("softmax", "cuda:90")
        [mine] = bundler.collect().kernels
        assert mine.name == "softmax_kernel"
        recording.stop()
    in_fork(child)
    kernels.compile_one("row_sum", "cuda:90")
outer = bundler.collect()
assert {kernel.name for kernel in outer.kernels} == {"gelu_kernel", "softmax_kernel", "row_sum_kernel"}
report(recording)
"""
    found = program(code, cache)
    assert found["names"] == ["gelu_kernel", "row_sum_kernel", "softmax_kernel"]
    assert found["sources"] == {"directories": 1, "listener": 2}


def test_a_forked_child_that_leaves_the_block_takes_nothing_with_it(cache):
    """A forked child that runs on to the end of the block, as after an exception, neither ends the
    parent's recording nor removes the spool of its other children.
    """
    code = """
with bundler.recording(children=True) as recording:
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        child = "import sys; sys.path.insert(0, sys.argv[1]); import kernels; kernels.compile_one('gelu', 'cuda:90')"
        subprocess.run([sys.executable, "-P", "-c", child, os.path.dirname(sys.argv[1])], check=True)
if not pid:
    os._exit(0)
report(recording)
"""
    found = program(code, cache)
    assert (found["names"], found["sources"]) == (["gelu_kernel"], {"children": 1})


def test_a_forked_childs_kernels_are_recorded_through_the_spool(cache):
    """With children=True what a forked child compiles is in the bundle like any child's, also when
    it is killed at once.
    """
    code = """
import signal
with bundler.recording(children=True) as recording:
    kernels.compile_one("gelu", "cuda:90")
    pid = os.fork()
    if not pid:
        kernels.compile_one("softmax", "cuda:90")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
report(recording)
"""
    found = program(code, cache)
    assert (found["names"], found["sources"]) == (
        ["gelu_kernel", "softmax_kernel"],
        {"children": 1, "listener": 1},
    )
    assert found["proven"]


def test_a_fork_while_another_thread_records_does_not_hang_the_child(cache):
    """A child forked while another thread holds the recorder's locks can record and go on."""
    code = """
import threading
from bundler.lifecycle import recorder
with bundler.recording() as recording:
    held, release = threading.Event(), threading.Event()
    def hold():
        with recorder._stack._lock, recording._lock:
            held.set()
            release.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    def child():
        bundler.begin_compile()
        kernels.compile_one("gelu", "cuda:90")
        assert len(bundler.collect().kernels) == 1
        recording.stop()
    in_fork(child)
    release.set()
    thread.join()
report(recording)
"""
    assert program(code, cache)["names"] == ["gelu_kernel"]


def test_an_unreadable_record_of_a_child_is_reported(cache, monkeypatch):
    """A record in the spool that cannot be read is in the report with a reason."""
    pytest.importorskip("triton")
    with bundler.recording(children=True) as recording:
        (spool,) = [value for name, value in os.environ.items() if name == "TRITON_BUNDLER_SPOOL"]
        with open(os.path.join(spool, "00000000000000000001-1-0.record"), "wb") as file:
            file.write(b"\x93\x01")
    assert recording.collect().left_out == recording.report.left_out
    ((name, why),) = recording.report.left_out
    assert name == "00000000000000000001-1-0.record"
    assert why.startswith("a child process's record cannot be read: ")
    assert not os.path.exists(spool)


def test_the_environment_is_given_back(cache, monkeypatch):
    """Whatever happens in the block, variables that recording children sets have their old values
    after it.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:FileCacheManager")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), bundler.recording(children=True):
        assert os.environ["TRITON_CACHE_MANAGER"] != before["TRITON_CACHE_MANAGER"]
        1 / 0  # noqa: B018
    assert dict(os.environ) == before


def test_a_spool_that_cannot_be_made_leaves_no_listener(
    cache, nobody_listens, monkeypatch, tmp_path
):
    """When children cannot be recorded since there is no room for a spool, start fails and nothing
    stays attached.
    """
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "nowhere"))
    recording = bundler.recording(children=True)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        recording.start()
    with pytest.raises(RecordingError):
        recording.collect()
    assert sys.modules["triton.knobs"].compilation.listener is None
