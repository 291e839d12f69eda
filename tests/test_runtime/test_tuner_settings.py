# SPDX-License-Identifier: Apache-2.0
"""Every setting that the tuner, or the metadata of a generated kernel, accepts acts, or is
refused.
"""

import json
import logging
import sys
from types import SimpleNamespace

import launch_calls as calls
import pytest

import bundler
from bundler.errors import ConfigError
from bundler.integrations import inductor_kernels as metadata
from bundler.integrations.inductor_kernels import TunerSettings
from bundler.lifecycle.tuning_directory import TuningFolder, tunings_of
from bundler.runtime import BandwidthReport, Config, DryDriver, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Facts, Setting
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.runtime.tuning import tuner_options
from bundler.runtime.tuning.benchmark import GivenClock, Sample
from bundler.runtime.tuning.candidate_compiler import CandidateCompiler
from bundler.runtime.tuning.occupancy import DeviceLimits, Occupancy
from bundler.runtime.tuning.tuner import ArgumentEffects, Search, Trial, rescaled
from bundler.toolchain import tuner_toolchain

X, Y, OUT = calls.X, calls.Y, calls.OUT
H100 = Occupancy("cuda", 9, 65536, 2048, 32, 132)
H200 = Device("cuda", 132, 32, 9, 65536, 2048, 1024)
GRID = (4,)


def function(*parameters):
    """Shaped like a JIT function, for what is decided without compiling."""
    params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in parameters]
    fields = {
        "params": params,
        "arg_names": list(parameters),
        "__name__": "f",
        "__module__": "somewhere",
    }
    return type("JITFunction", (), fields)()


def occupancy(options, driver=None):
    """What a search is told of the device of a kernel with these options."""
    compiler = CandidateCompiler(
        function("x"), {}, driver or DryDriver("cuda"), GRID, Hooks(), workers=1
    )
    return Trial("f", compiler, ArgumentEffects(), None, options)._occupancy()


def reduction(facts=None, options=None, device=H200):
    return heuristics.reduction(
        {"x": 4096, "r0_": 8192}, Setting(device, facts or Facts()), options=options
    )(function("xnumel", "r0_numel", "XBLOCK", "R0_BLOCK"))


# ----------------------------------------------------------------------------- Registers and spills


def test_the_floor_of_the_reduction_block_holds_for_halved_blocks_too():
    """`min_rblock` reaches the rule for registers; as in torch it is a floor of `R0_BLOCK`
    alone.
    """
    assert reduction(Facts(min_rblock=1024)).tuned.options.space.min_blocks["r0_"] == 1024
    assert reduction().tuned.options.space.min_blocks["r0_"] == 1
    hints, config = {"x": 4096, "r0_": 4096}, Config({"XBLOCK": 1, "R0_BLOCK": 2048}, 16)
    assert rescaled(config, 64, hints, H100, 1024).kwargs["R0_BLOCK"] == 1024
    assert rescaled(config, 64, hints, H100, 2048) is None
    two = Config({"XBLOCK": 1, "R0_BLOCK": 4, "R1_BLOCK": 512}, 16)
    assert rescaled(two, 64, hints, H100, 2048).kwargs["R1_BLOCK"] == 256


def test_spills_count_unless_the_user_says_that_the_kernel_is_a_users():
    """Kernels of heuristics, user-written lists among them, are under the rule; those of `autotune`
    are not, as in Triton.
    """
    listed = heuristics.user_autotune([{"BLOCK": 64}], Setting(H200), grid="Grid1D")(
        function("xnumel", "BLOCK")
    )
    assert [kernel.tuned.options.custom for kernel in (reduction(), listed)] == [False, False]
    told = reduction(options=TunerOptions(custom=True))
    assert told.tuned.options.custom is True
    assert metadata.tuner_options_of({}, TunerOptions(), custom=True).custom is True
    assert metadata.tuner_options_of({}, TunerOptions(), custom=False).custom is False
    assert metadata.tuner_options_of({}, TunerOptions(custom=True), custom=False).custom is True


class Made:
    """A candidate that spills."""

    def __init__(self, config, spills):
        self.config, self.key, self.registers, self.spills, self.loaded = (
            config,
            str(config),
            32,
            spills,
            True,
        )

    def close(self):
        self.loaded = False


def search(spills, broken=()):
    """Search among configs that spill so much, of which `broken` do not run; a larger block is
    slower.
    """
    made = [Made(Config({"XBLOCK": 64 * number}), count) for number, count in enumerate(spills, 1)]

    def bench(candidate):
        assert candidate.loaded
        time_ms = (
            float("inf") if candidate in broken_ones else float(candidate.config.kwargs["XBLOCK"])
        )
        return Sample(time_ms, time_ms, time_ms)

    broken_ones = [made[place] for place in broken]
    builder = SimpleNamespace(build=lambda configs: made)
    outcome = Search("f", builder, bench, TunerOptions(kind="pointwise", custom=False)).run(
        [one.config for one in made]
    )
    assert [one for one in made if one.loaded] == [outcome.winner]
    return made.index(outcome.winner), [timing.reason for timing in outcome.timings]


def test_a_kernel_that_runs_only_where_it_spills_is_tuned_all_the_same():
    """Where every config spills, or no other one runs, the fastest of those that spill is taken;
    else none of them is timed.
    """
    assert search([20, 30]) == (0, ["", ""])
    assert search([20, 0, 30])[0] == 1
    assert search([20, 0, 30])[1][2] == "register spilling: 30 words, and 16 are allowed"
    winner, reasons = search([0, 30, 20], broken=[0])
    assert (winner, reasons[1:]) == (1, ["", ""])


def test_limits_are_those_of_the_device_then_those_that_were_declared(monkeypatch):
    """Figures by architecture are for what neither the device of this process nor who declared it
    tells.
    """
    table = occupancy(TunerOptions())
    assert (table.registers, table.threads) == (65536, 2048)
    unknown = occupancy(reduction(device=Device("cuda", 132)).tuned.options)
    assert (unknown.registers, unknown.threads) == (65536, 2048)
    declared = reduction(device=Device("cuda", 132, 32, 9, 131072, 1536)).tuned.options
    assert (occupancy(declared).registers, occupancy(declared).threads) == (131072, 1536)
    said = reduction(options=TunerOptions(limits=DeviceLimits(threads=1024))).tuned.options
    assert said.limits == DeviceLimits(65536, 1024)
    properties = SimpleNamespace(regs_per_multiprocessor=32768, max_threads_per_multi_processor=768)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        get_device_properties=lambda device: properties,
        max_memory_allocated=lambda: 0,
        memory_allocated=lambda: 0,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert (occupancy(declared).registers, occupancy(declared).threads) == (
        32768,
        768,
    )
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    assert occupancy(declared).registers == 131072


# ------------------------------------------------------------------------------------------- Caches


@pytest.fixture
def tuned(tmp_path, monkeypatch, launch_kernels):
    """A function that tunes a vector add with options; returns how its config was found, and how
    often was measured.
    """
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def tune(cache_results=False, **options):
        times = iter([2.0, 1.0, 3.0, 3.0])
        measured = []

        def bench(fn, quantiles):
            measured.append(fn)
            return next(times)

        chosen = TunerOptions(driver=DryDriver(), workers=1, **options)
        configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
        kernel = bundler.autotune(
            configs, ["n"], do_bench=bench, cache_results=cache_results, options=chosen
        )(launch_kernels.add)
        kernel[GRID](X, Y, OUT, 1024)
        (choice,) = kernel.choices.values()
        return choice.how, len(measured), [reason for _, reason in kernel.misses]

    return tune


@pytest.mark.toolchain
def test_records_are_used_as_far_as_the_user_allows(tuned, tmp_path, monkeypatch):
    """`reuse` says whose records count: with `none` nothing is looked up, and told only to files;
    `bundle` passes over the disk.
    """
    with bundler.recording() as recording:
        assert tuned(cache_results=True)[:2] == ("autotune", 2)
    bundle = recording.collect()
    assert tuned()[:2] == ("record", 0)
    assert tuned(reuse="bundle", bundle=bundle)[:2] == ("record", 0)
    how, measured, (reason,) = tuned(reuse="bundle")
    assert (how, measured, "records on disk are switched off" in reason) == ("autotune", 2, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    with bundler.recording() as silent:
        how, measured, (reason,) = tuned(
            reuse="none", record=False, bundle=bundle, cache_results=True
        )
    assert (how, measured, reason) == ("autotune", 2, "add: records are switched off")
    assert len(list(TuningFolder(tmp_path / "cache").records())) == 1
    assert (len(tunings_of(bundle)), tunings_of(silent.collect())) == (1, [])


def test_what_torch_says_of_its_caches_reaches_the_tuner():
    """`force_disable_caches` switches records off altogether, `autotune_local_cache` those of the
    disk; what the user said is kept.
    """

    def options(told=None, **meta):
        found = metadata.tuner_options_of(meta, told or TunerOptions(), custom=False)
        return found.reuse, found.record

    assert options() == ("all", True)
    assert options(force_disable_caches=True) == ("none", False)
    assert options(autotune_local_cache=False) == ("bundle", False)
    assert options(autotune_local_cache=True) == ("all", True)
    assert options(TunerOptions(reuse="none")) == ("none", True)
    assert options(TunerOptions(reuse="none", record=False), autotune_local_cache=False) == (
        "none",
        False,
    )
    assert options(TunerOptions(reuse="bundle"), autotune_local_cache=False) == ("bundle", False)


@pytest.mark.parametrize(
    "wrong", [{"reuse": "disk"}, {"gigabytes": -1}, {"gigabytes": float("nan")}]
)
def test_options_that_cannot_be_are_refused(wrong):
    """Each value is checked when the options are made."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TunerOptions(**wrong)
    assert set(tuner_options.get_args(tuner_options.Reuse)) == {"all", "bundle", "none"}


# -------------------------------------------------------------------------------- Reports and files


def test_a_bandwidth_report_takes_the_kernels_that_match_and_tells_them_at_once(tmp_path, caplog):
    """A pattern filters by the beginning of a name, `lines` writes and logs each kernel when it was
    measured.
    """
    report = BandwidthReport(tmp_path / "b.txt", pattern="triton_(red|per)", lines=True)
    assert [report.wants(name) for name in ("triton_red_0", "triton_poi_0", "a_triton_red")] == [
        True,
        False,
        False,
    ]
    assert BandwidthReport().wants("anything")
    with caplog.at_level(logging.INFO, "bundler.runtime"):
        report.add("triton_red_0", 0.5, 1.0)
    line = "0.500ms\t1.000 GB\t2000.00GB/s\ttriton_red_0"
    assert (tmp_path / "b.txt").read_text() == f"{line}\n"
    assert [record.getMessage() for record in caplog.records] == [line]
    report.write("graph")
    assert (tmp_path / "b.txt").read_text().splitlines()[1].endswith("SUMMARY (graph)")
    with pytest.raises(ConfigError, match="no regular expression"):
        BandwidthReport(pattern="(")


@pytest.mark.toolchain
def test_the_report_has_the_gigabytes_that_were_told_and_no_kernel_that_does_not_match(tuned):
    """`kernel_num_gb` counts in place of the tensors; a kernel outside of the pattern is not
    measured for the report.
    """
    report, other = BandwidthReport(), BandwidthReport(pattern="mul")
    tuned(bandwidth=report, gigabytes=4.0)
    tuned(bandwidth=other)
    assert [(row.name, row.gigabytes, row.gb_per_s) for row in report.rows] == [
        ("add", 4.0, 4000.0)
    ]
    assert other.rows == ()


def test_torchs_settings_for_bandwidth_make_a_report(tmp_path, monkeypatch):
    """Kernels that are loaded together share the report; the user's own comes first; the profiler
    is the clock where torch says so.
    """
    path = str(tmp_path / "b.txt")
    meta = {
        "profile_bandwidth": True,
        "profile_bandwidth_output": path,
        "profile_bandwidth_regex": "triton_red",
        "profile_bandwidth_with_do_bench_using_profiling": True,
        "kernel_num_gb": 0.25,
    }
    told = TunerSettings()
    report = told.report(meta)
    assert (
        report.wants("triton_red_0"),
        report.wants("triton_poi_0"),
        told.report(dict(meta)) is report,
    ) == (
        True,
        False,
        True,
    )
    report.add("triton_red_0", 1.0, 1.0)
    assert "triton_red_0" in (tmp_path / "b.txt").read_text()
    assert told.report({**meta, "profile_bandwidth": False}) is None
    assert told.report({"profile_bandwidth": ""}) is None
    everything = told.report(
        {"profile_bandwidth": True, "profile_bandwidth_output": None, "profile_bandwidth_regex": ""}
    )
    assert everything.wants("anything")
    mine = BandwidthReport()
    assert TunerSettings(TunerOptions(bandwidth=mine)).report(meta) is mine
    assert metadata.tuner_options_of(meta, TunerOptions(), custom=False).gigabytes == 0.25
    assert (
        metadata.tuner_options_of(meta, TunerOptions(gigabytes=1.0), custom=False).gigabytes == 1.0
    )
    asked = []
    monkeypatch.setattr(
        tuner_toolchain,
        "profiler_benchmark",
        lambda *ms: asked.append(ms) or (lambda fn, quantiles: 7.0),
    )
    clock = told.clock_for(meta)()
    assert (clock.sample(lambda: None, lambda: None).median_ms, asked) == (7.0, [(10, 40)])
    assert told.clock_for({**meta, "profile_bandwidth": False}) is None
    assert TunerSettings(clock=GivenClock).clock_for(meta) is GivenClock


@pytest.mark.toolchain
def test_a_chosen_kernel_is_exported_where_the_user_says(tuned, tmp_path):
    """Each chosen kernel's binary and launch parameters are written; `store_cubin` without a place
    is refused.
    """
    tuned(export=tmp_path / "out")
    (parameters,) = (tmp_path / "out").glob("*.json")
    facts = json.loads(parameters.read_bytes())
    assert (facts["kernel"], facts["config"]["kwargs"]) == ("add", {"BLOCK": 128})
    assert (tmp_path / "out" / facts["binary"]).stat().st_size > 0
    with pytest.raises(
        ConfigError, match=r"mine: was generated with store_cubin.*export=DIRECTORY"
    ):
        metadata.tuner_options_of(
            {"store_cubin": True, "kernel_name": "mine"}, TunerOptions(), custom=False
        )
    said = metadata.tuner_options_of(
        {"store_cubin": True}, TunerOptions(export="out"), custom=False
    )
    assert said.export == "out"
    assert (
        metadata.tuner_options_of({"store_cubin": False}, TunerOptions(), custom=False).export
        is None
    )
