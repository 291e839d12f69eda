# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import support

import bundler
from bundler.errors import ConfigError, RecordingError
from bundler.lifecycle import directory_pack

pytestmark = [pytest.mark.toolchain, pytest.mark.usefixtures("nobody_listens")]


def keys(bundle):
    return {kernel.key for kernel in bundle.kernels}


def names(bundle):
    return {kernel.name for kernel in bundle.kernels}


@pytest.mark.release
def test_everything_compiled_in_the_block_is_in_the_bundle(kernels, cache):
    """A recording has each kernel that was compiled in its block, whole, and says that each came
    from the listener.
    """
    with bundler.recording() as recording:
        kernels.compile_all(list(support.TARGETS))
    bundle = recording.collect()
    assert keys(bundle) == set(os.listdir(cache))
    assert {f"{k.key}/{a.filename}" for k in bundle.kernels for a in k.artifacts} == {
        name for name in support.tree(cache) if support.GROUP not in name
    }
    report = recording.report
    assert dict(report.sources) == {"listener": 22}
    assert (report.compiles, report.hits, report.left_out, report.errors) == (22, 0, (), 0)
    assert report.compile_seconds > 0
    assert (report.not_portable, report.without_facts) == ((), ())


def test_hits_are_recorded_like_compiles(kernels, cache, compiled):
    """A kernel that Triton found in its cache is in the bundle as well, and counted as a hit."""
    shutil.copytree(compiled.cache, cache, dirs_exist_ok=True)
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        kernels.compile_one("gelu", "cuda:90")
    bundle = recording.collect()
    assert keys(bundle) == set(compiled.keys_of("gelu_kernel"))
    assert (recording.report.hits, recording.report.compiles, recording.report.compile_seconds) == (
        2,
        0,
        0.0,
    )


def test_a_recording_says_what_it_heard(kernels):
    """Its repr is a line: in which state it is, how many compiles and hits it heard."""
    recording = bundler.recording()
    assert repr(recording) == "<Recording not started, 0 compiles and 0 hits heard>"
    with recording:
        kernels.compile_one("gelu", "cuda:90")
        kernels.compile_one("gelu", "cuda:90")
        assert repr(recording) == "<Recording running, 1 compile and 1 hit heard>"
    assert repr(recording) == "<Recording stopped, 1 compile and 1 hit heard>"
    assert repr(recording.collect()).endswith("1 kernel>")


def test_compiles_of_any_thread_are_recorded(kernels):
    """Kernels compiled in eight threads at once are all there, with their facts and proven keys."""
    with bundler.recording() as recording, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: kernels.compile_one(name, "cuda:90"), kernels.RECIPES))
    bundle = recording.collect()
    assert len(bundle.kernels) == 11
    assert all(kernel.parts.proven for kernel in bundle.kernels)
    assert recording.report.without_facts == ()


def test_overlapping_recordings_hear_what_happens_while_they_run(kernels):
    """Two recordings that overlap without nesting each have exactly what was compiled between their
    start and stop.
    """
    first, second = bundler.recording(), bundler.recording()
    first.start()
    kernels.compile_one("gelu", "cuda:90")
    second.start()
    kernels.compile_one("softmax", "cuda:90")
    first.stop()
    kernels.compile_one("row_sum", "cuda:90")
    second.stop()
    assert names(first.collect()) == {"gelu_kernel", "softmax_kernel"}
    assert names(second.collect()) == {"softmax_kernel", "row_sum_kernel"}


def test_recordings_of_two_threads_do_not_disturb_each_other(kernels):
    """A thread that starts and stops recordings leaves the recording of another thread alone."""
    ready, done = threading.Event(), threading.Event()

    def other():
        ready.wait()
        with bundler.recording() as theirs:
            kernels.compile_one("softmax", "cuda:90")
        theirs.collect()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with bundler.recording() as ours:
        kernels.compile_one("gelu", "cuda:90")
        ready.set()
        done.wait()
        kernels.compile_one("row_sum", "cuda:90")
    thread.join()
    assert names(ours.collect()) == {"gelu_kernel", "softmax_kernel", "row_sum_kernel"}


def test_collect_inside_the_block_gives_what_was_recorded_so_far(kernels):
    """collect in the middle of a recording does not end it."""
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        assert names(recording.collect()) == {"gelu_kernel"}
        kernels.compile_one("softmax", "cuda:90")
        assert names(recording.collect()) == {"gelu_kernel", "softmax_kernel"}
    assert names(recording.collect()) == {"gelu_kernel", "softmax_kernel"}


def test_a_second_collect_gives_the_same_bundle(kernels):
    """A recording that is over can be collected as often as one likes, whole or as the
    launch set.
    """
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
    first, second, launch = (
        recording.collect(),
        recording.collect(),
        recording.collect(keep="launch"),
    )
    assert first.digest == second.digest != launch.digest
    assert {a.kind for k in launch.kernels for a in k.artifacts} == {"cubin", "json"}
    assert launch.digest == first.select(keep="launch").digest


def test_a_recording_that_was_never_started_cannot_be_collected():
    """collect before start is a RecordingError that says how to start."""
    with pytest.raises(
        RecordingError, match="never started; use it in a with statement or call start"
    ):
        bundler.recording().collect()


def test_a_recording_is_started_once(kernels):
    """A recording that runs, or is over, cannot be started again: what it would mean is not
    clear.
    """
    recording = bundler.recording()
    with recording:
        with pytest.raises(RecordingError, match="was started before"):
            recording.start()
        kernels.compile_one("gelu", "cuda:90")
    with pytest.raises(RecordingError, match="was started before"):
        recording.start()
    assert names(recording.collect()) == {"gelu_kernel"}


def test_stop_may_be_called_twice(kernels):
    """stop after stop, or without start, does nothing."""
    bundler.recording().stop()
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        recording.stop()
        kernels.compile_one("softmax", "cuda:90")
    assert names(recording.collect()) == {"gelu_kernel"}


def test_a_wrong_keep_is_an_error(cache):
    """keep takes two values, and the error names them."""
    with bundler.recording() as recording:
        pass
    with pytest.raises(ConfigError, match="expected 'all' or 'launch'"):
        recording.collect(keep="some")


def test_an_empty_recording_is_an_empty_bundle(cache):
    """Nothing compiled gives a bundle without kernels, and an empty report."""
    with bundler.recording() as recording:
        pass
    bundle = recording.collect()
    assert (bundle.kernels, bundle.left_out, dict(recording.report.sources)) == ((), (), {})


def test_an_empty_cache_setting_inside_the_block_does_not_hide_the_users_error(
    kernels, monkeypatch
):
    """With TRITON_CACHE_DIR set to nothing Triton fails; the recording keeps what it has and raises
    nothing itself.
    """
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert names(recording.collect()) == {"gelu_kernel"}


def test_kernels_loaded_before_are_found_in_the_jits_memory(jit, cache):
    """A kernel that the JIT had loaded before the recording is in it, with facts, as from the JIT's
    cache.
    """
    jit.gelu()
    with bundler.recording() as recording:
        pass
    bundle = recording.collect()
    assert dict(recording.report.sources) == {"jit-cache": 1}
    (kernel,) = bundle.kernels
    assert kernel.parts.proven
    assert kernel.launch.require_facts().constants
    assert bundle.observed.kernels[kernel.key].devices == (3,)
    assert (recording.report.hits, recording.report.compiles) == (0, 0)


@pytest.mark.release
def test_a_kernel_heard_or_found_in_memory_gives_the_same_bundle(jit):
    """Whether a compile was heard, or found in the JIT's memory afterwards, the digest is
    the same.
    """
    with bundler.recording() as heard:
        jit.gelu()
    with bundler.recording() as found:
        pass
    assert (dict(heard.report.sources), dict(found.report.sources)) == ({}, {})
    assert heard.collect().digest == found.collect().digest
    assert (dict(heard.report.sources), dict(found.report.sources)) == (
        {"listener": 1},
        {"jit-cache": 1},
    )


@pytest.fixture
def jit(kernels, monkeypatch):
    """Compile through the JIT, for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    fake = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 3,
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    driver.set_active(fake)
    pointer = triton.MockTensor if hasattr(triton, "MockTensor") else triton.runtime.jit.MockTensor
    import triton.language as tl

    yield SimpleNamespace(
        gelu=lambda: kernels.gelu_kernel.warmup(
            pointer(tl.float32), pointer(tl.float32), 1024, BLOCK=1024, grid=(1,)
        )
    )
    driver._active = before


def test_directories_that_appear_without_a_word_are_found(cache, compiled, key):
    """A complete kernel directory that somebody puts into the cache during the recording is in the
    bundle.
    """
    other = compiled.keys_of("softmax_kernel")[0]
    support.plant(compiled.cache, cache, [other])
    with bundler.recording() as recording:
        support.plant(compiled.cache, cache, [key])
    bundle = recording.collect()
    assert keys(bundle) == {key}
    assert dict(recording.report.sources) == {"directories": 1}
    assert recording.report.without_facts == (key,)


@pytest.mark.parametrize("there_before", [".", "0", "1"])
def test_directories_of_inductor_that_appear_are_found(
    cache, compiled, key, tmp_path, monkeypatch, there_before
):
    """A kernel that appears in Inductor's cache for device 1 is in the bundle, with that device."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "inductor" / "triton" / there_before).mkdir(parents=True)
    with bundler.recording() as recording:
        support.plant(compiled.cache, tmp_path / "inductor" / "triton" / "1", [key])
    bundle = recording.collect()
    assert keys(bundle) == {key}
    assert bundle.observed.kernels[key].devices == (1,)
    assert bundle.observed.kernels[key].layouts == ("inductor",)


def test_a_cache_that_is_set_aside_during_the_recording_is_still_watched(
    cache, compiled, key, tmp_path, monkeypatch
):
    """What appeared in the cache of the start is found, although the program moved on to another
    cache; what lay in that is not.
    """
    other = support.plant(compiled.cache, tmp_path / "other", compiled.keys_of("softmax_kernel"))
    with bundler.recording() as recording:
        support.plant(compiled.cache, cache, [key])
        monkeypatch.setenv("TRITON_CACHE_DIR", str(other))
    assert keys(recording.collect()) == {key}


def test_a_directory_that_is_not_finished_is_reported(cache, compiled, key):
    """A kernel directory that appears without its group file is left out, and the report
    says why.
    """
    with bundler.recording() as recording:
        support.plant(compiled.cache, cache, [key])
        support.group_of(cache / key).unlink()
    bundle = recording.collect()
    assert bundle.kernels == ()
    assert recording.report.left_out == ((key, "no group file: the compile did not finish"),)


def test_a_deleted_kernel_is_reported_missing(kernels, cache):
    """A kernel whose directory was deleted before collect is in the report, not silently
    dropped.
    """
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        (gone,) = os.listdir(cache)
        kernels.compile_one("softmax", "cuda:90")
        shutil.rmtree(cache / gone)
    assert names(recording.collect()) == {"softmax_kernel"}
    assert recording.report.left_out == ((gone, "the directory is gone"),)
    assert recording.collect().left_out == recording.report.left_out
    assert dict(recording.report.sources) == {"listener": 1}
    assert recording.report.compiles == 2


def test_files_that_are_not_in_the_group_are_reported(kernels, cache):
    """Each other file in a kernel directory is in the report with a reason; the kernel is taken
    without it.
    """
    with bundler.recording() as recording:
        kernels.compile_one("gelu", "cuda:90")
        (key,) = os.listdir(cache)
        (cache / key / "notes.txt").write_text("mine")
        (cache / key / "tmp.pid_1_x").mkdir()
        (cache / key / "helper.so").write_bytes(b"\x7fELF")
    bundle = recording.collect()
    assert dict(recording.report.left_out) == {
        f"{key}/notes.txt": "not listed in the kernel's group file",
        f"{key}/tmp.pid_1_x": "a temporary file of a compile",
    }
    assert [helper.path for helper in bundle.helpers] == [f"{key}/helper.so"]


def test_tuning_results_of_recorded_kernels_are_taken(kernels, cache, compiled):
    """The result file of Triton's tuner travels with its kernel, also when it was there before;
    others do not.
    """
    for number, name in enumerate(("swiglu_kernel", "stranger_kernel")):
        folder = cache / ("A" * 51 + "BC"[number])
        folder.mkdir()
        (folder / f"{name}.autotune.json").write_text("{}")
    with bundler.recording() as recording:
        kernels.compile_one("swiglu", "cuda:90")
    bundle = recording.collect()
    assert [file.path for file in bundle.tuning_files] == [
        "A" * 51 + "B/swiglu_kernel.autotune.json"
    ]
    assert len(bundle.kernels) == 4


def test_constants_without_encoding_are_reported(cache):
    """A constant that no other process could build again is named in the report, and its kernel is
    taken.
    """
    pytest.importorskip("triton")
    test_kernels = support.load(
        support.ROOT / "tests" / "test_toolchain" / "kernels_for_tests.py", "odd_kernels"
    )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    class Odd:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return isinstance(other, Odd)

        def __repr__(self):
            return "Odd()"

    with bundler.recording() as recording:
        source = ASTSource(
            test_kernels.constant, {"out": "*fp32", "VALUE": "constexpr"}, {"VALUE": Odd()}
        )
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    (kernel,) = recording.collect().kernels
    assert recording.report.not_portable == ((kernel.key, "VALUE"),)
    assert recording.report.left_out == ()


def test_no_file_is_in_neither_bundle_nor_report(kernels, cache, compiled):
    """Whatever lies in the cache after a recording is an artifact, a generated group file, or in
    the report.
    """
    with bundler.recording() as recording:
        kernels.compile_all(["cuda:90"])
        for number, case in enumerate(support.BROKEN):
            if case != "a pipe where a file should be":
                support.BROKEN[case][0](
                    sorted(path for path in cache.iterdir() if path.is_dir())[number % 11]
                )
    bundle = recording.collect()
    taken = {f"{k.key}/{a.filename}" for k in bundle.kernels for a in k.artifacts}
    named = {name for name, _ in recording.report.left_out}
    for name in support.tree(cache):
        folder, _, file = name.partition("/")
        assert {name, folder} & (taken | named) or file.startswith(support.GROUP) or not file, name


def test_failures_of_our_listener_are_counted_for_this_recording(kernels, monkeypatch):
    """A failure of our own code while hearing a compile is counted in this report, and in no later
    one.
    """
    from bundler.toolchain.recording import compile_listener

    real = compile_listener._event
    monkeypatch.setattr(compile_listener, "_event", lambda facts: 1 / 0)
    with bundler.recording() as failing:
        kernels.compile_one("gelu", "cuda:90")
    monkeypatch.setattr(compile_listener, "_event", real)
    with bundler.recording() as fine:
        kernels.compile_one("softmax", "cuda:90")
    failing.collect()
    fine.collect()
    assert (failing.report.errors, fine.report.errors) == (1, 0)
    # What was not heard was still seen.
    assert dict(failing.report.sources) == {"directories": 1}


def test_pack_and_recording_agree_on_the_files(kernels, cache):
    """A recorded kernel and the same kernel packed from its directory have the same artifacts."""
    with bundler.recording() as recording:
        kernels.compile_all(["cuda:90"])
    recorded, packed = recording.collect(), directory_pack.pack(cache)
    assert [(k.key, k.artifacts) for k in recorded.kernels] == [
        (k.key, k.artifacts) for k in packed.kernels
    ]
