# SPDX-License-Identifier: Apache-2.0
"""Candidates of several kernels are compiled in workers before the first call; the call then finds
every one of them.
"""

import importlib.util
import sys
from concurrent.futures import Future

import launch_calls as calls
import pytest

from bundler.compile.service import CompileService
from bundler.compile.source_modules import source_module
from bundler.errors import CompileFailed, ConfigError, NoValidConfig
from bundler.format.entries import Target
from bundler.runtime import DryDriver, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Setting
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.multi_kernel import MultiKernel, multi_kernel_future
from bundler.toolchain import tuner_toolchain

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT
CUDA = Target("cuda", "90", 32)
SETTING = Setting(Device("cuda", 132))
ARGUMENTS = {"x": "*fp32:16", "y": "*fp32:16", "out": "*fp32:16", "n": "i32:16"}
WAIT_S = 60
# Before Triton 3.9 a function has two hashes where one that it calls uses a constant of its module.
_TWO_KEYS = """import triton
import triton.language as tl

FACTOR = tl.constexpr(3)


@triton.jit
def times(value):
    return value * FACTOR


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, times(tl.load(x + i, i < n)) + tl.load(y + i, i < n), i < n)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch):
    """Whether each compile that is asked for in this process was there already."""
    heard, real = [], tuner_toolchain.compile_call

    def compile_call(*args, **options):
        event = real(*args, **options)
        heard.append(event.cache_hit)
        return event

    monkeypatch.setattr(tuner_toolchain, "compile_call", compile_call)
    return heard


def kernel_of(function, *configs, driver=None, **more):
    return heuristics.user_autotune(
        [{"BLOCK": 64}, {"BLOCK": 128, "num_warps": 2}, *configs],
        SETTING,
        grid=lambda blocks, sizes: (-(-sizes["n"] // blocks["BLOCK"]), 1, 1),
        options=TunerOptions(driver=driver or DryDriver("cuda"), workers=1),
        clock=lambda: GivenClock(lambda fn, quantiles: [1.0] * 3),
        **more,
    )(function)


@pytest.mark.slow
def test_a_first_call_finds_what_workers_compiled(cache, compiles, launch_kernels):
    """Kernels of one module and of another are compiled side by side; `wait` gives them back, and
    calls compile nothing.
    """
    text_kernel = kernel_of(
        source_module(_TWO_KEYS).load().add, compile_options={"enable_fp_fusion": False}
    )
    with CompileService(2, isolate=True) as service:
        scope = {
            "plain": kernel_of(launch_kernels.add).compile_in(service, ARGUMENTS, CUDA),
            "of_text": text_kernel.compile_in(service, ARGUMENTS, CUDA),
        }
        service.wait(scope, timeout_s=WAIT_S)
        assert (service.counters.compiled, compiles) == (4, [])
    assert scope["of_text"] is text_kernel
    for kernel in scope.values():
        kernel.run(X, Y, OUT, 1024)
    assert compiles == [True] * 4


def test_a_tuner_with_a_service_compiles_two_candidates_in_it(cache, compiles, launch_kernels):
    """Workers that stand ready are used for as few as two configs; those that the user has to wait
    for are started for four.
    """
    with CompileService(2, isolate=True) as service:
        kernel = kernel_of(launch_kernels.add)
        kernel.tuned.options = TunerOptions(driver=DryDriver("cuda"), service=service)
        kernel.run(X, Y, OUT, 1024)
        assert (service.counters.compiled, compiles) == (2, [True, True])


def test_candidates_that_are_too_large_are_no_failure_of_the_kernel(
    cache, launch_kernels, monkeypatch
):
    """The tuner leaves them out later; when all are, or one has another fault, the future names the
    kernel and the reason.
    """
    with CompileService(1) as service:
        wrong = kernel_of(launch_kernels.add, {"BLOCK": 96})
        with pytest.raises(CompileFailed, match=r"add.*power of 2"):
            wrong.compile_in(service, ARGUMENTS, CUDA).result(WAIT_S)
        real = tuner_toolchain.tolerated
        monkeypatch.setattr(
            tuner_toolchain, "tolerated", lambda error: "power of 2" in error.message or real(error)
        )
        assert wrong.compile_in(service, ARGUMENTS, CUDA).result(WAIT_S) is wrong
        alone = heuristics.fixed_config({"BLOCK": 96}, SETTING, grid="Grid1D")(launch_kernels.add)
        with pytest.raises(CompileFailed, match="power of 2"):
            alone.compile_in(service, ARGUMENTS, CUDA).result(WAIT_S)


def test_options_of_another_backend_make_no_second_job(cache, launch_kernels):
    """Configs that differ only in what the target does not have are compiled once."""
    given = [{"BLOCK": 64, "waves_per_eu": waves} for waves in (1, 2)]
    kernel = heuristics.user_autotune(given, SETTING, grid="Grid1D")(launch_kernels.add)
    with CompileService(1) as service:
        kernel.compile_in(service, ARGUMENTS, CUDA).result(WAIT_S)
        kernel.compile_in(service, ARGUMENTS, Target("hip", "gfx942", 64)).result(WAIT_S)
        assert service.counters.compiled == 3


def test_a_function_that_no_other_process_can_import_is_refused(cache, tmp_path):
    """A worker would have nowhere to take it from; the message says what to do."""
    path = tmp_path / "gone.py"
    path.write_text(_TWO_KEYS)
    spec = importlib.util.spec_from_file_location("gone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "gone" not in sys.modules
    with (
        CompileService(1) as service,
        pytest.raises(ConfigError, match="add: no other process can import it"),
    ):
        kernel_of(module.add).compile_in(service, ARGUMENTS, CUDA)


@pytest.mark.slow
def test_a_failure_in_a_worker_that_is_not_about_size_is_tried_again_here(
    cache, compiles, launch_kernels
):
    """A worker that cannot import the function leaves the compile to this process, which can."""
    from bundler.compile.compile_job import SourceRef

    with CompileService(2, isolate=True) as service:
        kernel = kernel_of(
            launch_kernels.add, source=SourceRef("text", "add", "no_such_module:importer", data=b"")
        )
        kernel.tuned.options = TunerOptions(driver=DryDriver("cuda"), service=service)
        kernel.run(X, Y, OUT, 1024)
        assert (service.counters.failed, compiles) == (2, [False, False])


# ------------------------------------------------------------------------- Multi-kernels of futures


def settled(value):
    future = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


@pytest.mark.slow
def test_a_multi_kernel_of_futures_has_those_that_compile(cache, launch_kernels):
    """Kernels of a heuristic and plain functions; one that does not compile is left out with its
    reason.
    """
    driver, ran = DryDriver("cuda"), []
    with CompileService(2, isolate=True) as service:
        looped = kernel_of(launch_kernels.add, driver=driver).compile_in(service, ARGUMENTS, CUDA)
        other = settled(lambda *args: ran.append(args))
        broken = settled(CompileFailed("tiled: too large", name="tiled", reason="too large"))
        times = iter([2.0, 1.0])
        future = multi_kernel_future(
            "sum",
            {"looped": looped, "tiled": broken, "other": other},
            lambda kernel, args: next(times),
        )
        scope = {"sum": future}
        service.wait(scope, timeout_s=WAIT_S)
    both = scope["sum"]
    assert isinstance(both, MultiKernel)
    both(X, Y, OUT, 1024)
    assert (both.choice, ran, dict(both.times_ms)) == (
        "other",
        [(X, Y, OUT, 1024)],
        {"looped": 2.0, "other": 1.0},
    )
    assert both.reasons == {"tiled": "tiled: too large"}
    both.choose("looped")
    both(X, Y, OUT, 1024)
    assert driver.launches[-1].grid in {(16, 1, 1), (8, 1, 1)}


def test_a_multi_kernel_of_nothing_is_an_error():
    """Without futures there is nothing to choose from; when none compiles, the error has every
    reason.
    """
    with pytest.raises(ConfigError, match="expected kernels"):
        multi_kernel_future("sum", {}, lambda kernel, args: 1.0)
    kernels = {
        name: settled(CompileFailed(f"{name}: refused", name=name)) for name in ("one", "two")
    }
    with pytest.raises(
        NoValidConfig, match="sum: none of 2 kernels compiles: one: one: refused; two: two: refused"
    ) as caught:
        multi_kernel_future("sum", kernels, lambda kernel, args: 1.0).result(1)
    assert caught.value.reasons == (("one", "one: refused"), ("two", "two: refused"))
