# SPDX-License-Identifier: Apache-2.0
import logging
import os
import sys
import threading

import pytest

from bundler.errors import RecordingError
from bundler.toolchain import compile_frames
from bundler.toolchain import events as events_module
from bundler.toolchain.recording.compile_listener import CompileListener, listening

pytest.importorskip("triton")
pytestmark = [pytest.mark.toolchain, pytest.mark.release]


@pytest.fixture(autouse=True)
def own_listener():
    """Each test begins and ends without a listener."""
    from triton import knobs

    compilation = knobs.compilation
    compilation.listener = None
    yield
    assert compilation.listener is None, "a test left a listener behind"


@pytest.fixture
def knob():
    from triton import knobs

    yield knobs.compilation
    knobs.compilation.listener = None


def test_an_event_tells_what_was_compiled(compile_add, cache, events):
    """Key, hash, directory, name, target, options, environment and times of a miss, then of
    a hit.
    """
    kernel = compile_add(target="hip:gfx942")
    compile_add(target="hip:gfx942")
    miss, hit = events
    assert (miss.cache_hit, hit.cache_hit) == (False, True)
    for event in (miss, hit):
        assert event.hash == kernel.hash
        assert event.directory == str(cache / event.key)
        assert event.name == "add"
        assert (str(event.target), event.target.warp_size) == ("hip:gfx942", 64)
        assert event.options.num_warps == 4
        assert event.backend.target.arch == "gfx942"
        assert event.env_vars == {}
        assert event.device is None
        assert event.thread_id == threading.get_ident()
    assert [name for name, _ in miss.stage_times_us] == [
        "ir_initialization",
        "ttir",
        "ttgir",
        "llir",
        "amdgcn",
        "hsaco",
        "store_results",
    ]
    assert [name for name, _ in hit.stage_times_us] == ["ir_initialization", "store_results"]


def test_names_and_hashes_are_each_others_inverse():
    """A directory name gives back the hash it was made from."""
    digest = "0123456789abcdef" * 4
    assert events_module.kernel_hash(events_module.kernel_key(digest)) == digest


def test_options_are_those_of_the_key(compile_add, events):
    """Options are what the compile was asked for, not what passes wrote into the metadata."""
    compile_add(options={"num_warps": 2, "maxnreg": 40})
    assert (events[0].options.num_warps, events[0].options.maxnreg) == (2, 40)


def test_the_jit_gives_the_device(warm_up, fake_driver, events):
    """A compile that a launch caused carries the device it was launched on."""
    fake_driver.device = 6
    warm_up()
    assert [event.device for event in events] == [6]


def test_a_detached_callback_hears_no_more(compile_add):
    """A callback hears each compile until it was detached; detaching it twice is fine."""
    heard = []
    hear = heard.append
    listening.attach(hear)
    compile_add()
    listening.detach(hear)
    compile_add()
    listening.detach(hear)
    assert [event.cache_hit for event in heard] == [False]


def test_a_listener_before_ours_hears_everything(compile_add, knob):
    """The user's listener is called with the same facts, and is back after the last detach."""
    theirs, ours = [], []

    def listener(**facts):
        theirs.append(facts)

    knob.listener = listener
    hear = ours.append
    listening.attach(hear)
    compile_add()
    listening.detach(hear)
    assert knob.listener is listener
    compile_add()
    assert [facts["cache_hit"] for facts in theirs] == [False, True]
    assert set(theirs[0]) == {"src", "metadata", "metadata_group", "times", "cache_hit"}
    assert len(ours) == 1


def test_a_listener_after_ours_keeps_working(compile_add, knob):
    """Somebody who chained us after attaching goes on to hear, and to be heard by others, when we
    are detached.
    """
    before, after, ours = [], [], []
    knob.listener = lambda **facts: before.append(facts)
    hear = ours.append
    listening.attach(hear)
    chained = knob.listener

    def listener(**facts):
        after.append(facts)
        chained(**facts)

    knob.listener = listener
    compile_add()
    listening.detach(hear)
    assert knob.listener is listener
    compile_add()
    assert (len(before), len(after), len(ours)) == (2, 2, 1)
    listening.attach(hear)
    compile_add()
    listening.detach(hear)
    assert (len(before), len(after), len(ours)) == (3, 3, 2)


def test_the_users_listener_may_raise(compile_add, knob):
    """An exception of the user's listener reaches the user, as without us, and we have heard the
    compile.
    """

    def listener(**facts):
        raise ZeroDivisionError("mine")

    knob.listener = listener
    heard = []
    hear = heard.append
    listening.attach(hear)
    try:
        with pytest.raises(ZeroDivisionError, match="mine"):
            compile_add()
    finally:
        listening.detach(hear)
    assert len(heard) == 1


def test_our_errors_do_not_reach_the_user(compile_add, caplog):
    """A failing callback is logged once per cause and counted; the compile and other callbacks go
    on.
    """
    own = CompileListener()
    heard = []

    def fails(event):
        raise ValueError("ours")

    def fails_otherwise(event):
        raise KeyError(event.key)

    hear = heard.append
    for callback in (fails, fails_otherwise, hear):
        own.attach(callback)
    with caplog.at_level(logging.WARNING, "bundler.toolchain"):
        for _ in range(3):
            assert compile_add().hash
    for callback in (fails, fails_otherwise, hear):
        own.detach(callback)
    assert len(heard) == 3
    assert sorted(own.errors.values()) == [3, 3]
    assert len(caplog.records) == 2


def test_a_changed_triton_is_counted_not_raised(compile_add, monkeypatch):
    """If the compile cannot be read at all, it still ends well."""
    own = CompileListener()
    own.attach(print)
    monkeypatch.setattr(compile_frames, "find_compile", lambda: 1 / 0)
    assert compile_add().hash
    own.detach(print)
    assert own.errors == {"reading the compile: ZeroDivisionError": 1}


def test_without_the_compile_frame_the_rest_is_known(compile_add, monkeypatch, events):
    """A Triton whose compile function names its variables otherwise leaves options unknown, and
    nothing else.
    """
    monkeypatch.setattr(compile_frames, "_COMPILE", ("compile", "elsewhere"))
    kernel = compile_add()
    (event,) = events
    assert (event.options, event.backend, event.env_vars, event.stages_key) == (
        None,
        None,
        None,
        None,
    )
    assert (event.hash, event.name, str(event.target)) == (kernel.hash, "add", "cuda:90")


def test_every_thread_is_heard(compile_add, events):
    """Compiles of many threads are all heard, each in its own thread."""
    done = threading.Barrier(8)

    def work(number):
        compile_add(block=2 ** (number + 4))
        done.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({event.key for event in events}) == 8
    assert len({event.thread_id for event in events}) == 8


def test_asynchronous_compiles_are_heard(warm_up, events):
    """Kernels that Triton compiles in a pool of threads are heard, though their compile is not
    called by the JIT.
    """
    from concurrent.futures import ThreadPoolExecutor

    import triton

    with ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool):
        warm_up(n=100)
        warm_up(n=128)
    assert len({event.key for event in events}) == 2
    assert all(event.options is not None for event in events)


def test_hearing_opens_no_file_and_starts_nothing(compile_add):
    """What is done inside the user's compile is bounded: no file is looked at, no process started,
    no library loaded.
    """
    own, heard, seen, watching = CompileListener(), [], [], []
    hear = own.hear

    def watched(facts):
        watching.append(True)
        hear(facts)
        watching.clear()

    own.hear = watched
    sys.addaudithook(lambda event, args: seen.append(event) if watching else None)
    callback = heard.append
    own.attach(callback)
    compile_add()
    compile_add()
    own.detach(callback)
    assert len(heard) == 2
    assert set(seen) <= {
        "sys._getframe",
        "object.__getattr__",
    }  # looking at the caller's frame and its code


def test_a_forked_child_hears_nothing(compile_add, knob):
    """After a fork the child's compiles reach no callback of the parent's, and the user's listener
    still hears them.
    """
    theirs, ours = [], []
    knob.listener = lambda **facts: theirs.append(facts)
    hear = ours.append
    listening.attach(hear)
    compile_add()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            compile_add()
            again = []
            hear_again = again.append
            listening.attach(hear_again)
            compile_add()
            listening.detach(hear_again)
            status = 0 if (len(theirs), len(ours), len(again)) == (3, 1, 1) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    listening.detach(hear)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(ours) == 1


def test_no_jit_hook_is_installed(events):
    """Nothing of ours becomes a JIT hook: with one installed, Triton 3.6 fails on constants it
    cannot serialize.
    """
    from triton import knobs

    assert knobs.runtime.jit_cache_hook is None
    assert knobs.runtime.jit_post_compile_hook is None


def test_without_triton_the_error_says_what_to_do(run_python):
    """Recording without Triton is an error that names the package to install."""
    code = """
import sys
sys.modules["triton"] = None
from bundler.errors import RecordingError
from bundler.toolchain.recording.compile_listener import listening
try:
    listening.attach(print)
except RecordingError as error:
    print(error)
"""
    assert {"'.[triton]'", "'triton-bundler[triton]'"} <= set(run_python(code))


def test_a_triton_without_listener_is_an_error(monkeypatch):
    """A Triton that is too old to have a compilation listener is named as such."""
    from triton import knobs

    monkeypatch.setattr(knobs, "compilation", object())
    with pytest.raises(RecordingError, match="no compilation listener"):
        CompileListener().attach(print)


def test_a_compile_that_nobody_reports_is_an_error_that_says_who_stands_in_the_way(
    compile_add, knob
):
    """Where another program's listener took the place of ours and does not call it, `heard` names
    it instead of failing oddly.
    """
    own = CompileListener()
    own.attach(print)
    try:
        knob.listener = lambda **_facts: None
        with pytest.raises(RecordingError, match=r"knobs\.compilation\.listener"):
            own.heard(lambda: compile_add(target="cuda:90"))
    finally:
        own.detach(print)
    knob.listener = None
    assert own.heard(lambda: compile_add(target="cuda:90")).name == "add"
