# SPDX-License-Identifier: Apache-2.0
"""Launches of heuristic kernels after the first: the same as the first, as cheap as a tuned
kernel's, on any stream.
"""

import contextlib
import statistics
import sys
import time
from types import ModuleType, SimpleNamespace

import launch_calls as calls
import pytest

import bundler
from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.runtime import Config, DryDriver, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Setting
from bundler.runtime.heuristics.launch_grids import FixedGrid
from bundler.runtime.tuning import heuristic_kernel
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT
SETTING = Setting(Device("cuda", 132))
# By how much a launch of a heuristic kernel may cost more than one of a tuned kernel, whose grid is
# a function too.
MOST = 1.3


def by_blocks(blocks, sizes):
    return (-(-sizes["n"] // blocks["BLOCK"]), 1, 1)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(params=["python", "compiled"])
def make(launch_kernels, monkeypatch, compiled, request):
    """A function that makes a heuristic kernel on a GPU that is not there, and the driver; by each
    kind of dispatcher.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    if request.param == "compiled":
        kind = request.getfixturevalue("dispatcher_type")
        monkeypatch.setattr(
            "bundler.runtime.launch.compiled_dispatch.dispatcher_type", lambda: kind
        )

    def make(configs=({"BLOCK": 64}, {"BLOCK": 128}), grid=by_blocks, **launch):
        driver = DryDriver("cuda", handle=5)
        driver.launch_path = "compiled" if request.param == "compiled" else "dry"
        kernel = heuristics.user_autotune(
            list(configs),
            SETTING,
            grid=grid,
            options=TunerOptions(driver=driver, workers=1, record=False),
            clock=lambda: GivenClock(lambda fn, quantiles: [1.0] * 3),
            **launch,
        )(launch_kernels.add)
        return kernel, driver

    return make


@pytest.fixture
def repeated(make, monkeypatch):
    """A kernel whose grid follows from a size, its driver, and the calls that Python launched; two
    are made.
    """
    kernel, driver = make(grid=FixedGrid(("-(-n // 64)", 1, 1)))
    seen, real = [], HeuristicKernel._launch_known

    def launch_known(self, args, stream):
        seen.append(args)
        return real(self, args, stream)

    monkeypatch.setattr(HeuristicKernel, "_launch_known", launch_known)
    for _ in range(3):
        kernel.run(X, Y, OUT, 1024, stream=5)
    del driver.launches[:], seen[:]
    return kernel, driver, seen


compiled_only = pytest.mark.parametrize("make", ["compiled"], indirect=True)


@pytest.fixture
def bound(monkeypatch):
    """The calls whose arguments were bound by name, which takes longer than a launch."""
    heard, real = [], HeuristicKernel.bind

    def bind(self, *args, **kwargs):
        heard.append((args, kwargs))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(HeuristicKernel, "bind", bind)
    return heard


def grids(driver):
    return [launch.grid[0] for launch in driver.launches]


def test_later_calls_launch_as_the_first_without_binding_names(make, bound):
    """Positional calls go straight to the kernel that was chosen; others are bound, and launch the
    same.
    """
    kernel, driver = make()
    kernel.run(X, Y, OUT, 1024)
    assert len(bound) == 1
    kernel.run(X, Y, OUT, 1024, stream=5)
    kernel.run(X, Y, OUT, 512)
    kernel.run(X, Y, OUT, 0)
    assert (len(bound), grids(driver)) == (1, [16, 16, 8])
    kernel.run(X, Y, out=OUT, n=1024)
    assert (len(bound), grids(driver)) == (2, [16, 16, 8, 16])
    assert len({launch.plan.key for launch in driver.launches}) == 1
    assert len({launch.parameters for launch in driver.launches if launch.grid[0] == 16}) == 1
    assert kernel.tuned.best_config == Config({"BLOCK": 64})
    with pytest.raises(ConfigError, match="missing n"):
        kernel.run(X, Y, OUT)
    with pytest.raises(ConfigError, match="takes 4 arguments"):
        kernel.run(X, Y, OUT, 1024, 7)


@compiled_only
def test_calls_of_one_form_are_launched_without_python(repeated):
    """Other tensors, sizes and streams that are the current one; what reaches the driver is what a
    new kernel's launches are.
    """
    kernel, driver, seen = repeated
    other = calls.Tensor(address=calls.ADDRESS + 4096)
    for args in ((X, Y, OUT, 1024), (other, Y, OUT, 2048), (X, Y, other, 64), (X, Y, OUT, 0)):
        kernel.run(*args)
        kernel.run(*args, stream=5)
    assert seen == []
    assert grids(driver) == [16, 16, 32, 32, 1, 1]
    assert [launch.parameters[:8] for launch in driver.launches[2:4]] == [
        other.address.to_bytes(8, "little")
    ] * 2
    assert {launch.stream for launch in driver.launches} == {5}
    assert kernel.tuned.best_config == Config({"BLOCK": 64})


@compiled_only
def test_a_call_of_another_kind_is_learned_once_and_a_size_of_one_leaves_a_gap(repeated):
    """An unaligned tensor, an odd size, and a size that is compiled in; each is launched by Python
    once.
    """
    kernel, driver, seen = repeated
    odd = calls.Tensor(address=calls.ADDRESS + 4)
    kinds = ((odd, Y, OUT, 1024), (X, Y, OUT, 1001), (X, Y, OUT, 1))
    for args in (*kinds, *kinds, *kinds):
        kernel.run(*args)
    assert len(seen) == len(kinds)
    assert grids(driver) == [16, 16, 1] * 3
    for first, *later in (driver.launches[number::3] for number in range(3)):
        assert {(launch.plan.key, launch.parameters) for launch in later} == {
            (first.plan.key, first.parameters)
        }


@compiled_only
def test_hooks_profilers_and_other_streams_are_served_by_python(repeated, monkeypatch):
    """A hook is called, a profiler gets its range, and another stream is launched on, after any
    number of quick launches.
    """
    kernel, driver, seen = repeated
    heard = []
    kernel.tuned.hooks.enter.append(lambda facts: heard.append(facts["grid"]))
    kernel.run(X, Y, OUT, 1024)
    kernel.tuned.hooks.enter.clear()
    assert (heard, len(seen)) == ([(16, 1, 1)], 1)
    recording = SimpleNamespace(_is_profiler_enabled=True)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", recording)
    ranges = []
    monkeypatch.setattr(
        "bundler.runtime.tuning.tuner_reports.launch_range",
        lambda launch, *_: ranges.append(launch.kernel) or contextlib.nullcontext(),
    )
    kernel.run(X, Y, OUT, 1024)
    monkeypatch.undo()
    assert ranges == ["add"]
    kernel.run(X, Y, OUT, 1024, stream=42)
    assert [launch.stream for launch in driver.launches] == [5, 5, 42]
    assert {launch.grid for launch in driver.launches} == {(16, 1, 1)}


@compiled_only
@pytest.mark.parametrize(("flag", "through_python"), [(True, 1), (False, 0), (None, 0)])
def test_a_profiler_that_records_is_seen_without_python(
    repeated, monkeypatch, flag, through_python
):
    """The flag is looked up at each launch, in whatever module torch has it."""
    kernel, driver, seen = repeated
    profiler = ModuleType("torch.autograd.profiler")
    if flag is not None:
        profiler._is_profiler_enabled = flag
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", profiler)
    kernel.tuned.hooks.enter.clear()
    monkeypatch.setattr(
        "bundler.runtime.tuning.tuner_reports.launch_range",
        lambda *_: contextlib.nullcontext(),
    )
    kernel.run(X, Y, OUT, 1024)
    assert (len(seen), len(driver.launches)) == (through_python, 1)


@compiled_only
def test_a_second_choice_and_a_forgotten_one_end_the_quick_launches(repeated):
    """With two choices each call tells which was launched; after `forget` nothing that was loaded
    is used again.
    """
    kernel, driver, seen = repeated
    half = calls.Tensor("float16")
    kernel.run(half, half, half, 1024)
    kernel.run(X, Y, OUT, 1024)
    kernel.run(X, Y, OUT, 1024)
    assert len(kernel.tuned.choices) == 2
    assert len(seen) >= 2
    before = driver.modules[:]
    kernel.tuned.forget()
    kernel.run(X, Y, OUT, 1024)
    kernel.run(X, Y, OUT, 1024)
    assert {module.loaded for module in before} == {False}
    assert driver.launches[-1].grid == (16, 1, 1)


@compiled_only
def test_what_is_wrong_with_a_call_is_said_after_quick_launches_too(repeated):
    """A tensor elsewhere, too few and too many arguments, a size that is none, a grid too large."""
    kernel, driver, _ = repeated
    for args, error in (
        ((calls.Tensor(index=1), Y, OUT, 1024), CannotLaunchStatically),
        ((X, Y, OUT), ConfigError),
        ((X, Y, OUT, 1024, 7), ConfigError),
        ((X, Y, OUT, True), ConfigError),
        ((X, Y, OUT, 2**50), CannotLaunchStatically),
    ):
        for _ in range(2):
            with pytest.raises(error):
                kernel.run(*args)
    assert driver.launches == []


def test_other_types_are_tuned_and_other_alignments_compiled_as_by_the_first(make):
    """A call of other element types is chosen for anew; one of another alignment gets its own
    kernel.
    """
    kernel, driver = make()
    kernel.run(X, Y, OUT, 1024)
    half = calls.Tensor("float16")
    kernel.run(half, half, half, 1024)
    kernel.run(X, Y, OUT, 1000)
    kernel.run(X, Y, OUT, 1024)
    assert len(kernel.tuned.choices) == 2
    assert len({launch.plan.key for launch in driver.launches}) == 3
    assert driver.launches[0].plan.key == driver.launches[-1].plan.key


def test_constants_options_and_arguments_of_the_grid_are_given_as_in_the_first(make):
    """What stands between the arguments by position is what it was; an argument of the grid alone
    never reaches the kernel.
    """
    kernel, driver = make(
        grid=FixedGrid(("a", "b", 1)),
        extra_arguments=["a", "b"],
        compile_options={"enable_fp_fusion": False},
    )
    for a in (3, 3, 4):
        kernel.run(X, Y, OUT, 1024, a, 2)
    assert [launch.grid for launch in driver.launches] == [(3, 2, 1), (3, 2, 1), (4, 2, 1)]
    assert len({launch.plan.key for launch in driver.launches}) == 1


def test_grids_that_repeat_are_worked_out_once_and_a_users_function_each_time(make, monkeypatch):
    """Sizes repeat; a function of the user's may look at anything, so its grids are never kept."""
    asked = []
    kernel, driver = make(
        grid=lambda blocks, sizes: asked.append(sizes["n"]) or (sizes["n"] // 64 + len(asked), 1, 1)
    )
    for _ in range(3):
        kernel.run(X, Y, OUT, 1024)
    assert len(set(grids(driver))) == 3
    fixed, driver = make(grid=FixedGrid(("n // 64", 1, 1)))
    worked, real = [], fixed._worked_out
    monkeypatch.setattr(fixed, "_worked_out", lambda *blocks: worked.append(1) or real(*blocks))
    monkeypatch.setattr(heuristic_kernel, "MAX_KNOWN", 2)
    for n in (64, 64, 128, 64, 192, 256, 64, 0):
        fixed.run(X, Y, OUT, n)
    # The first call of all is tuned; the sizes that follow are worked out once, until there are
    # more than are kept.
    assert len(worked) < 8
    assert grids(driver) == [1, 1, 2, 1, 3, 4, 1]
    with pytest.raises(CannotLaunchStatically, match="along x"):
        fixed.run(X, Y, OUT, 2**50)
    fixed.run(X, Y, OUT, 1)
    for wrong in (True, 1.0, "1"):  # equal to a size that is known, and none
        with pytest.raises(ConfigError, match="needs the size 'n' as a whole number"):
            fixed.run(X, Y, OUT, wrong)


def test_a_launch_goes_to_the_stream_that_is_named(make):
    """Any stream, at the first call and later; the next call without one is on the current stream
    again; hooks see it.
    """
    kernel, driver = make()
    for stream in (42, None, 42, 5, 7, None):
        kernel.run(X, Y, OUT, 1024, stream=stream)
    assert [launch.stream for launch in driver.launches] == [42, 5, 42, 5, 7, 5]
    assert (
        len({(launch.plan.key, launch.grid, launch.parameters) for launch in driver.launches}) == 1
    )
    seen = []
    kernel.tuned.hooks.enter.append(lambda facts: seen.append((facts["stream"], facts["grid"])))
    kernel.run(X, Y, OUT, 1024, stream=9)
    kernel.run(X, Y, out=OUT, n=0, stream=9)
    assert (seen, len(driver.launches)) == ([(9, (16, 1, 1))], 7)


def test_where_torch_uses_the_gpu_the_stream_is_torchs_current_one_meanwhile(make, monkeypatch):
    """The driver asks torch, and so do Triton's own launches and allocators; afterwards it is as it
    was.
    """
    kernel, driver = make()
    kernel.run(X, Y, OUT, 1024)

    @contextlib.contextmanager
    def on(stream):
        before, driver.handle = driver.handle, stream
        yield
        driver.handle = before

    cuda = SimpleNamespace(
        is_initialized=lambda: True, stream=on, ExternalStream=lambda stream, device: stream
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    kernel.run(X, Y, OUT, 1024, stream=77)
    kernel.run(X, Y, OUT, 1024)
    assert [launch.stream for launch in driver.launches] == [5, 77, 5]


def test_a_kernel_that_only_triton_launches_is_not_put_on_a_stream_that_triton_does_not_know(
    make, monkeypatch
):
    """Without torch nobody could tell Triton of the stream, so it is an error and not the wrong
    stream.
    """
    kernel, _ = make(configs=[{"BLOCK": 64}])
    kernel.run(X, Y, OUT, 1024)
    state = kernel.tuned._state
    state.through_triton.add(kernel.tuned.best_config)
    with pytest.raises(ConfigError, match=r"only Triton can launch it.*0x2a"):
        kernel.run(X, Y, OUT, 1024, stream=42)


@pytest.mark.slow
def test_a_launch_costs_at_most_three_tenths_more_than_a_tuned_one(make, launch_kernels):
    """Both work their grid out by a function; CPU time, in turns, the best of each, so that other
    programs do not count.
    """
    kernel, _ = make()
    driver = DryDriver("cuda")
    tuned = bundler.autotune(
        [Config({"BLOCK": 64}), Config({"BLOCK": 128})],
        ["n"],
        do_bench=lambda fn, quantiles: [1.0] * 3,
        options=TunerOptions(driver=driver, workers=1, record=False),
    )(launch_kernels.add)

    def spent(launch, rounds=1000):
        started = time.process_time()
        for _ in range(rounds):
            launch()
        return time.process_time() - started

    launches = (
        lambda: kernel.run(X, Y, OUT, 1024, stream=5),
        lambda: tuned[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](X, Y, OUT, 1024),
    )
    for launch in launches:
        spent(launch, 20)
    pairs = [(spent(launches[0]), spent(launches[1])) for _ in range(7)]
    assert statistics.median(ours / theirs for ours, theirs in pairs) <= MOST
