# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of a tuner, what a launch tells them and torch's profiler, and what look-ups of records
saved.
"""

import json
import os

import launch_calls as calls
import pytest

import bundler
from bundler.errors import BundlerWarning, ConfigError
from bundler.integrations.process_report import Counters, report_of
from bundler.lifecycle.tuning_directory import METER, TuningFolder
from bundler.runtime import BandwidthReport, Config, DryDriver, TunerOptions, TunerPlugin
from bundler.runtime.tuning.benchmark import ProfilerClock

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def tune(launch_kernels, monkeypatch, compiled, tmp_path):
    """A function that makes a tuned vector add, whose second config is the fastest; `measured` are
    the blocks that were timed.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    monkeypatch.setattr(
        "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / "records")
    )

    def make(*plugins, blocks=(64, 128, 256), **options):
        driver = DryDriver("cuda", handle=5)
        measured = []

        def bench(fn, quantiles):
            fn()
            measured.append(driver.launches[-1].grid[0])
            return [1.0 + abs(driver.launches[-1].grid[0] - 8)] * 3

        chosen = TunerOptions(driver=driver, workers=1, plugins=plugins, **options)
        listed = [Config({"BLOCK": block}) for block in blocks]
        kernel = bundler.autotune(listed, ["n"], do_bench=bench, options=chosen)(launch_kernels.add)
        return kernel, driver, measured

    return make


def grid(meta):
    return (-(-meta["n"] // meta["BLOCK"]),)


class Noting(TunerPlugin):
    """Notes what it hears, and answers as it was told."""

    def __init__(self, **answers):
        self.answers, self.heard = answers, []

    def before_compile(self, kernel, configs):
        self.heard.append(("compile", kernel, [config.kwargs["BLOCK"] for config in configs]))
        return self.answers.get("compile")

    def after_compile(self, kernel, config, bundle):
        self.heard.append(
            ("compiled", kernel.key, config.kwargs["BLOCK"], bundle.read(kernel.binary)[:4])
        )

    def before_tuning(self, kernel, configs, parts):
        self.heard.append(("tune", kernel, dict(parts)["device"].partition(",")[0]))
        return self.answers.get("tune")

    def before_launch(self, launch):
        self.heard.append(("launch", launch))
        return self.answers.get("launch", False)


def test_a_plugin_that_answers_nothing_changes_nothing(tune):
    """It hears of every config, of the search, and of each launch with key, grid, stream and
    arguments.
    """
    plugin = Noting()
    kernel, driver, measured = tune(plugin)
    kernel[grid](X, Y, OUT, n=1024)
    assert (measured, driver.launches[-1].grid) == ([16, 8, 4], (8, 1, 1))
    assert [what for what, *_ in plugin.heard] == [
        "compile",
        "tune",
        "compiled",
        "compiled",
        "compiled",
        "launch",
    ]
    assert plugin.heard[:2] == [("compile", "add", [64, 128, 256]), ("tune", "add", "cuda:90")]
    _, key, block, magic = plugin.heard[3]
    launch = plugin.heard[-1][1]
    assert (block, magic) == (128, b"\x7fELF")
    assert (launch.kernel, launch.key, launch.grid, launch.stream, launch.device) == (
        "add",
        key,
        (8, 1, 1),
        5,
        0,
    )
    assert launch.key == kernel.handle(X, Y, OUT, 1024).plan.key
    assert launch.file == kernel.base.fn.__code__.co_filename
    assert (dict(launch.arguments), launch.by_position) == (
        {"x": X, "y": Y, "out": OUT, "n": 1024},
        3,
    )


def test_a_plugin_narrows_the_list(tune, tmp_path):
    """Only its configs are compiled and timed; a record of them is none for the whole list."""
    kernel, _, measured = tune(Noting(compile=[Config({"BLOCK": 64}), Config({"BLOCK": 256})]))
    kernel[grid](X, Y, OUT, 1024)
    assert (measured, kernel.best_config.kwargs) == ([16, 4], {"BLOCK": 256})
    other, _, again = tune()
    other[grid](X, Y, OUT, 1024)
    assert again == [16, 8, 4]
    assert len(list(TuningFolder(tmp_path / "records").records())) == 2
    for answer, words in (
        ([Config({"BLOCK": 512})], "BLOCK=512.*which is not in the list"),
        ([], "returned no config"),
    ):
        with pytest.raises(ConfigError, match=words):
            tune(Noting(compile=answer))[0][grid](X, Y, OUT, 1024)


def test_a_plugin_chooses_where_no_record_does(tune, tmp_path):
    """Nothing is measured or kept; where there is a record, it is not asked."""
    kernel, driver, measured = tune(Noting(tune=Config({"BLOCK": 256})))
    kernel[grid](X, Y, OUT, 1024)
    assert (measured, driver.launches[-1].grid) == ([], (4, 1, 1))
    assert [choice.how for choice in kernel.choices.values()] == ["plugin"]
    assert list(TuningFolder(tmp_path / "records").records()) == []
    tune()[0][grid](X, Y, OUT, 1024)
    plugin = Noting(tune=Config({"BLOCK": 256}))
    found, _, _ = tune(plugin)
    found[grid](X, Y, OUT, 1024)
    assert (
        [choice.how for choice in found.choices.values()],
        "tune" in [what for what, *_ in plugin.heard],
    ) == (
        ["record"],
        False,
    )


def test_a_plugin_takes_launches_over(tune):
    """The first that answers True is the last that is asked."""
    first, second = Noting(launch=True), Noting()
    kernel, driver, _ = tune(first, second, blocks=(64,))
    kernel[grid](X, Y, OUT, 1024)
    assert driver.launches == []
    assert ([what for what, *_ in first.heard][-1], [what for what, *_ in second.heard][-1]) == (
        "launch",
        "compiled",
    )


def test_what_fails_after_a_compile_is_a_warning(tune):
    """The kernel is good; a failure before a launch reaches the caller."""

    class Broken(TunerPlugin):
        def after_compile(self, kernel, config, bundle):
            raise RuntimeError("no room")

    kernel, driver, _ = tune(Broken(), blocks=(64,))
    with pytest.warns(
        BundlerWarning, match=r"add: after_compile of Broken failed: RuntimeError\('no room'\)"
    ):
        kernel[grid](X, Y, OUT, 1024)
    assert len(driver.launches) == 1


def test_a_plugin_that_looks_at_no_launch_costs_none(tune):
    """Where nobody wants to see launches, they are not described."""

    class Quiet(TunerPlugin):
        def before_compile(self, kernel, configs):
            return None

    kernel, _, _ = tune(Quiet(), blocks=(64,))
    assert kernel._watched is False
    assert tune(Noting())[0]._watched is True


def test_torchs_profiler_has_the_whole_record(tune, tmp_path):
    """The trace of the installed torch names kernel, file, key, grid, stream and config of each
    launch.
    """
    torch = pytest.importorskip("torch")
    kernel, _, _ = tune(blocks=(128,), gigabytes=0.25)
    kernel.metadata = {"inductor_meta": {"kernel_flop": 1000.0}}
    x = torch.zeros(1024)
    given = [calls.Tensor(address=x.data_ptr())] * 3
    kernel[grid](*given, 1024)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        kernel[grid](*given, 1024)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (event,) = [
        one
        for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if one.get("name") == "add"
    ]
    wanted = {
        "kernel_name": "add",
        "kernel_backend": "triton",
        "kernel_file": kernel.base.fn.__code__.co_filename,
        "kernel_hash": kernel.handle(*given, 1024).plan.key,
        "grid": "grid(8, 1, 1)",
        "stream": 5,
        "num_warps": 4,
        "num_stages": 3,
        "kernel_kwargs": "BLOCK=128",
        "kernel_num_gb": 0.25,
        "kernel_flop": 1000,
    }
    assert {name: event["args"].get(name) for name in wanted} == wanted


def test_a_report_with_a_clock_of_its_own_measures_by_it(tune):
    """The debug tuner: kernels that match are timed by the profiler, whatever the tuner's clock
    said.
    """
    profiled = []

    def profile(run):
        run()
        profiled.append(len(driver.launches))
        return [("add", 250.0)] * 25

    report = BandwidthReport(pattern="add", clock=lambda: ProfilerClock("add", profile=profile))
    kernel, driver, measured = tune(bandwidth=report, gigabytes=0.5)
    kernel[grid](X, Y, OUT, 1024)
    assert (measured, len(profiled)) == ([16, 8, 4], 1)
    assert [(row.name, row.milliseconds, row.gb_per_s) for row in report.rows] == [
        ("add", 0.25, 2000.0)
    ]


def test_a_lookup_counts_what_its_tuning_took(tune, monkeypatch):
    """One tuned here, one found; a record that tells no times counts, and adds nothing."""
    monkeypatch.setattr(METER, "now", type(METER.now)())
    tune()[0][grid](X, Y, OUT, 1024)
    spent = bundler.tuning_counters()
    assert (spent.tuned, spent.found, spent.seconds_saved) == (1, 0, 0.0)
    assert spent.seconds_spent > 0
    for _ in range(2):
        kernel, _, measured = tune()
        kernel[grid](X, Y, OUT, 1024)
        kernel[grid](X, Y, OUT, 1024)
        assert measured == []
    saved = bundler.tuning_counters()
    assert (saved.tuned, saved.found, saved.untimed) == (1, 2, 0)
    assert saved.seconds_saved == pytest.approx(2 * spent.seconds_spent)
    assert report_of(Counters(), None)["tuning"]["seconds_saved"] == saved.seconds_saved
    METER.found(None)
    assert (bundler.tuning_counters().untimed, bundler.tuning_counters().seconds_saved) == (
        1,
        saved.seconds_saved,
    )


def test_a_forked_child_counts_from_nought(monkeypatch):
    """As sessions do."""
    monkeypatch.setattr(METER, "now", type(METER.now)(found=3))
    child = os.fork()
    if child == 0:
        os._exit(0 if bundler.tuning_counters().found == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bundler.tuning_counters().found == 3
