# SPDX-License-Identifier: Apache-2.0
"""A kernel under a heuristic takes its arguments and nothing else: blocks and grid follow; a GPU
that is not there is enough.
"""

import sys
from types import SimpleNamespace

import pytest

from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.runtime import DryDriver, heuristics
from bundler.runtime.heuristics.combo_rules import SubKernel
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.tuner_options import TunerOptions

H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
SETTING = Setting(H200)


def function(name, *parameters, constexpr=()):
    """Shaped like a JIT function, for what is decided without compiling."""
    params = [
        SimpleNamespace(name=parameter, is_constexpr=parameter in constexpr)
        for parameter in parameters
    ]
    fields = {
        "params": params,
        "arg_names": list(parameters),
        "__name__": name,
        "__module__": "somewhere",
    }
    return type("JITFunction", (), fields)()


def scale(*more, **launch):
    fn = function(
        "scale", "in_ptr0", "out_ptr0", "xnumel", "XBLOCK", *more, constexpr=("XBLOCK", *more)
    )
    return heuristics.pointwise({"x": 1024}, SETTING, **launch)(fn)


def test_arguments_are_what_no_config_decides():
    """A call gives neither blocks nor known constants; what only the grid needs comes last."""
    assert scale().arguments == ("in_ptr0", "out_ptr0", "xnumel")
    assert scale().bind(1, 2, xnumel=3) == {"in_ptr0": 1, "out_ptr0": 2, "xnumel": 3}
    known = scale("KIND", constants={"KIND": 7, "xnumel": 1})
    assert known.arguments == ("in_ptr0", "out_ptr0", "xnumel")
    assert known.constants == {"KIND": 7}
    assert scale("KIND").arguments == ("in_ptr0", "out_ptr0", "xnumel", "KIND")
    assert scale(extra_arguments=["_grid_0"]).arguments == (
        "in_ptr0",
        "out_ptr0",
        "xnumel",
        "_grid_0",
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, 2), {}, "missing xnumel"),
        (
            (1, 2, 3, 4),
            {},
            r"takes 3 arguments \(in_ptr0, out_ptr0, xnumel\), got 4; give the stream as stream=",
        ),
        ((1, 2, 3), {"xnumel": 3}, "'xnumel' is given twice"),
        ((1, 2, 3), {"XBLOCK": 64}, "'XBLOCK'"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(args, kwargs, words):
    """Missing, unknown and doubled arguments are named."""
    with pytest.raises(ConfigError, match=words):
        scale().run(*args, **kwargs)


def test_the_grid_follows_from_arguments_and_config():
    """Each candidate has its grid; zero is zero, and over the limits is an error."""
    kernel = scale()
    assert [kernel.grid_of(config, {"xnumel": 1000}) for config in kernel.configs] == [
        (4, 1, 1),
        (8, 1, 1),
    ]
    assert kernel.grid_of(kernel.configs[0], {"xnumel": 0}) == (0, 1, 1)
    with pytest.raises(CannotLaunchStatically, match="along x"):
        kernel.grid_of(kernel.configs[0], {"xnumel": 2**50})
    with pytest.raises(ConfigError, match="'xnumel'"):
        kernel.grid_of(kernel.configs[0], {})
    fixed = scale(grid=lambda blocks, sizes: (blocks["num_warps"], sizes["xnumel"], 1))
    assert fixed.grid_of(fixed.configs[0], {"xnumel": 5}) == (4, 5, 1)


def test_a_kernel_without_an_x_block_has_none_to_tune():
    """Where the function has no XBLOCK, it is one in every candidate and taken out; a candidate
    with more is an error.
    """
    fn = function(
        "row_sum", "in_ptr0", "out_ptr0", "xnumel", "r0_numel", "R0_BLOCK", constexpr=("R0_BLOCK",)
    )
    hints = {"x": 4096, "r0_": 8192}
    kernel = heuristics.reduction(hints, Setting(H200, Facts(no_x_dim=True)))(fn)
    assert all(set(config.kwargs) == {"R0_BLOCK"} for config in kernel.configs)
    assert len(set(kernel.configs)) == len(kernel.configs)
    with pytest.raises(ConfigError, match="has no XBLOCK"):
        heuristics.reduction(hints, SETTING)(fn)


def test_candidates_that_do_not_fit_the_function_are_refused():
    """A candidate for a parameter that is not there, an unknown grid, and a grid kind without its
    metadata.
    """
    with pytest.raises(ConfigError, match="has a value for 'YBLOCK', which is no parameter"):
        heuristics.pointwise({"x": 64, "y": 64}, SETTING)(
            function("f", "xnumel", "ynumel", "XBLOCK")
        )
    with pytest.raises(ConfigError, match="no kind 'Grid7D'"):
        heuristics.pointwise({"x": 64}, SETTING, grid="Grid7D")
    with pytest.raises(ConfigError, match="incomplete"):
        heuristics.fixed_config({"XBLOCK": 1}, SETTING, grid="PrecomputedGrid")


def test_a_config_that_is_listed_twice_counts_once():
    """Equal configs are one, in whatever order their values stand; those that differ in any count
    are not.
    """
    listed = [
        {"BLOCK": 64, "A": 1},
        {"A": 1, "BLOCK": 64, "num_warps": 4},
        {"BLOCK": 64, "A": 1, "num_ctas": 2},
    ]
    kernel = heuristics.user_autotune(listed, SETTING, grid="Grid1D")(
        function("f", "xnumel", "BLOCK", "A")
    )
    assert [config.num_ctas for config in kernel.configs] == [1, 2]


def test_what_the_tuner_is_told_follows_from_the_heuristic():
    """Kind, limits and determinism reach the tuner, and so does what the caller says."""
    fn = function("f", "xnumel", "r0_numel", "XBLOCK", "R0_BLOCK")
    hints = {"x": 4096, "r0_": 8192}
    facts = Facts(min_xblock=2)
    kernel = heuristics.reduction(
        hints, Setting(H200, facts, Policy(deterministic=True)), options=TunerOptions(workers=1)
    )(fn)
    told = kernel.tuned.options
    assert (told.kind, told.workers, told.deterministic) == ("reduction", 1, True)
    assert told.space.size_hints == hints
    assert told.space.max_blocks == {"x": 4096, "r0_": 65536}
    assert told.space.min_blocks == {"x": 2, "r0_": 1}
    assert told.space.max_warps == 32
    plain = heuristics.pointwise({"x": 64}, Setting(H200, policy=Policy(deterministic=True)))(
        function("g", "XBLOCK")
    )
    assert not plain.tuned.options.deterministic
    parts = [SubKernel("pointwise", {"x": 64}), SubKernel("pointwise", {"x": 256})]
    both = heuristics.combo("pointwise", parts, SETTING, grid="Grid1D")(
        function("h", "XBLOCK_0", "XBLOCK_1")
    )
    assert both.space().first == ("XBLOCK_1", "XBLOCK_0")
    assert both.space().size_hints == {"XBLOCK_0": 64, "XBLOCK_1": 256}


def test_cooperative_kernels_are_launched_so_that_all_programs_run():
    """Programs that wait for each other are launched cooperatively on CUDA."""
    fn = function("f", "xnumel", "r0_numel", "XBLOCK", "R0_BLOCK", "RSPLIT")
    hint, hints = ReductionHint.INNER, {"x": 1, "r0_": 2**20}
    kernel = heuristics.cooperative_reduction(hints, SETTING, hint=hint)(fn)
    assert kernel.compile_options == {"launch_cooperative_grid": True}
    amd = Setting(Device("hip", 304, 64))
    assert heuristics.cooperative_reduction(hints, amd, hint=hint)(fn).compile_options == {}


@pytest.mark.toolchain
def test_the_fastest_candidate_is_launched_with_its_own_grid(launch_kernels, tmp_path, monkeypatch):
    """The first call with work measures the candidates, each with its grid, and launches the
    winner; the next only launches.
    """
    calls = sys.modules["launch_calls"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver, times = DryDriver("cuda"), {2: 5.0, 4: 1.0, 8: 3.0}

    def do_bench(fn, quantiles):
        fn()
        return [times[driver.launches[-1].grid[0]]] * 3

    kernel = heuristics.user_autotune(
        [{"BLOCK": 512}, {"BLOCK": 256, "num_warps": 2}, {"BLOCK": 128}],
        SETTING,
        grid=lambda blocks, sizes: (-(-sizes["n"] // blocks["BLOCK"]), 1, sizes["deep"]),
        extra_arguments=["deep"],
        compile_options={"enable_fp_fusion": False},
        options=TunerOptions(driver=driver, workers=1),
        clock=lambda: GivenClock(do_bench),
    )(launch_kernels.add)
    assert kernel.arguments == ("x", "y", "out", "n", "deep")
    kernel.run(calls.X, calls.Y, calls.OUT, 0, 2)
    assert kernel.tuned.best_config is None
    kernel.run(calls.X, calls.Y, calls.OUT, 1000, 2)
    assert [launch.grid for launch in driver.launches] == [
        (2, 1, 2),
        (4, 1, 2),
        (8, 1, 2),
        (4, 1, 2),
    ]
    assert kernel.tuned.best_config.kwargs == {"BLOCK": 256}
    assert driver.launches[-1].plan.block_threads == 64
    kernel.run(calls.X, calls.Y, out=calls.OUT, n=500, deep=1, stream=0)
    assert [launch.grid for launch in driver.launches[4:]] == [(2, 1, 1)]
    kernel.run(calls.X, calls.Y, calls.OUT, 0, 1)
    assert len(driver.launches) == 5
