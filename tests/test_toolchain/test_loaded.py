# SPDX-License-Identifier: Apache-2.0
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bundler.toolchain import instances
from bundler.toolchain.recording import compile_listener

pytest.importorskip("triton")
pytestmark = [pytest.mark.toolchain, pytest.mark.release]


def found_in(cache):
    """Kernels of this test; others of this process live in other directories."""
    return sorted(
        (e for e in compile_listener.loaded_kernels() if e.directory.startswith(str(cache))),
        key=lambda e: e.key,
    )


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_loaded_kernels_are_found_with_proven_keys(
    warm_up, fake_driver, cache, parts_of, target, monkeypatch
):
    """Each kernel of the JIT's caches is found with its device, and its rebuilt options give its
    key.
    """
    monkeypatch.setenv(
        "AMDGCN_USE_BUFFER_OPS", "0"
    )  # with buffer operations the AMD driver asks torch about each tensor
    fake_driver.target = target
    warm_up(n=100)
    warm_up(n=128, num_warps=8)
    events = found_in(cache)
    assert len(events) == 2
    assert {event.device for event in events} == {3}
    assert {str(event.target) for event in events} == {target}
    assert {event.name for event in events} == {"add"}
    assert [event.directory for event in events] == [str(cache / event.key) for event in events]
    assert sorted(event.options.num_warps for event in events) == [4, 8]
    assert all(parts_of(event).proven for event in events)
    assert all(event.cache_hit and event.stage_times_us == () for event in events)


def test_the_environment_of_the_compile_is_kept(warm_up, cache, parts_of, monkeypatch):
    """Environment that was part of the key then proves it now, although it changed since."""
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    warm_up()
    monkeypatch.delenv("DISABLE_LLVM_OPT")
    (event,) = found_in(cache)
    assert list(event.env_vars) == ["DISABLE_LLVM_OPT"]
    assert parts_of(event).proven


def test_each_device_is_told(warm_up, fake_driver, cache):
    """One kernel loaded on two devices is found once for each."""
    warm_up()
    fake_driver.device = 1
    warm_up()
    events = found_in(cache)
    assert len({event.key for event in events}) == 1
    assert sorted(event.device for event in events) == [1, 3]


def test_a_redefined_function_is_found_too(load_kernels, cache, fake_driver):
    """Kernels of a function are found although another of the same name was defined since, as in a
    notebook.
    """
    from triton.runtime.jit import MockTensor

    instances.note_from_now_on()
    tensor = MockTensor("float32")
    modules = [load_kernels(), load_kernels()]
    for module, block in zip(modules, (64, 128), strict=True):
        module.add.warmup(tensor, tensor, tensor, 1, BLOCK=block, grid=(1,))
    assert len(found_in(cache)) == 2


def test_unfinished_kernels_are_skipped(warm_up, cache):
    """A kernel that is still compiling in Triton's asynchronous mode is left out without waiting;
    later it is found.
    """
    import triton

    release = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(release.wait)
        with triton.AsyncCompileMode(pool):
            try:
                warm_up()
                assert found_in(cache) == []
            finally:
                release.set()
    assert len(found_in(cache)) == 1


def test_finished_but_uncollected_kernels_are_found(warm_up, cache):
    """A kernel whose asynchronous compile has ended is found before anybody asked for its result,
    where Triton lists it.
    """
    import triton
    from triton.runtime import jit

    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool):
        warm_up()
        pool.submit(int).result()
        assert len(found_in(cache)) == hasattr(jit, "_triton_jit_function_registry")


def test_a_strange_kernel_object_is_left_out(kernels, cache, warm_up, caplog):
    """An object of another shape in the JIT's cache is left out with a log line; the others are
    found.
    """
    warm_up()
    kernels.add.device_caches[3][0]["strange"] = object()
    assert len(found_in(cache)) == 1
    assert "cannot be recorded" in caplog.text


def test_nothing_without_triton(run_python):
    """Where Triton is not imported nothing is loaded, and looking does not import it."""
    code = """
import sys
from bundler.toolchain.recording.compile_listener import loaded_kernels
assert list(loaded_kernels()) == []
assert "triton" not in sys.modules
"""
    run_python(code)
