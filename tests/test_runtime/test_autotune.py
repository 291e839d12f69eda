# SPDX-License-Identifier: Apache-2.0
"""`bundler.autotune`: real compiles for a GPU that is not there, a clock that is told what to say,
and the next process.
"""

import inspect
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import launch_calls as calls
import pytest

import bundler
from bundler.errors import CompileFailed, ConfigError, FormatError, NoValidConfig
from bundler.lifecycle.tuning_directory import TuningFolder
from bundler.runtime import (
    Config,
    DeviceProperties,
    DryDriver,
    LaunchDump,
    LookupTable,
    TunerOptions,
)
from bundler.runtime.tuning.tuning_winners import named_of

pytestmark = pytest.mark.toolchain
ROOT = Path(__file__).resolve().parents[2]
X, Y, OUT = calls.X, calls.Y, calls.OUT
KEY = (1024, "torch.float32", "torch.float32", "torch.float32")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache directory that keeps kernels for the tests of this file; records are another
    matter.
    """
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def triton(compiled, monkeypatch, tmp_path):
    """Triton, with the shared cache; records go to a directory of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    monkeypatch.setattr(
        "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / "records")
    )
    return pytest.importorskip("triton")


def configs(triton, *blocks):
    return [triton.Config({"BLOCK": block}) for block in blocks or (64, 128, 256)]


class Bench:
    """Says that a kernel is the faster, the nearer its grid is to `best` blocks; counts."""

    def __init__(self, driver, best=8):
        self.driver, self.best, self.times = driver, best, 0

    def __call__(self, fn, quantiles):
        self.times += 1
        fn()
        return [1.0 + abs(self.driver.launches[-1].grid[0] - self.best)] * 3


def tuned(launch_kernels, given, driver=None, best=8, options=None, **more):
    """Return an autotuned vector add, its driver and its benchmark."""
    driver = driver or DryDriver()
    bench = Bench(driver, best)
    chosen = TunerOptions(driver=driver, workers=1, **(options or {}))
    kernel = bundler.autotune(given, ["n"], do_bench=bench, options=chosen, **more)(
        launch_kernels.add
    )
    return kernel, driver, bench


def grid(meta):
    return (-(-meta["n"] // meta["BLOCK"]),)


def test_it_takes_every_parameter_of_tritons_decorator(triton):
    """Names, order, kinds and defaults are those of the installed Triton; ours is one more, by
    name.
    """
    theirs = inspect.signature(triton.autotune).parameters
    ours = inspect.signature(bundler.autotune).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert list(ours)[len(theirs) :] == ["options"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name


def test_the_fastest_config_is_found_launched_and_remembered(triton, launch_kernels, tmp_path):
    """Each config is measured once; the winner is launched without Triton, the losers' modules are
    released.
    """
    kernel, driver, bench = tuned(launch_kernels, configs(triton))
    kernel[grid](X, Y, OUT, 1024)
    assert (bench.times, kernel.best_config.kwargs["BLOCK"]) == (3, 128)
    assert driver.launches[-1].grid == (8, 1, 1)
    assert sum(module.loaded for module in driver.modules) == 1
    assert kernel.misses == [(KEY, "add: no record of this kernel")]
    kernel[grid](X, Y, OUT, 1024)
    assert (bench.times, len(driver.launches)) == (3, 5)
    kernel[grid](X, Y, OUT, 4096)
    assert bench.times == 6
    records = list(TuningFolder(tmp_path / "records").records())
    assert sorted(dict(record.parts)["arguments"][:4] for record, _ in records) == ["1024", "4096"]


def test_the_next_process_neither_compiles_nor_measures(
    triton, launch_kernels, tmp_path, monkeypatch
):
    """From the bundle alone, with empty directories, the first call launches the winner: one launch
    in all.
    """
    kernel, _, _ = tuned(launch_kernels, configs(triton))
    with bundler.recording() as recording:
        kernel[grid](X, Y, OUT, 1024)
    bundle = bundler.winners_only(recording.collect(keep="launch"))
    assert [k.key for k in bundle.kernels] == [kernel.handle(X, Y, OUT, 1024).plan.key]
    bundle.save(tmp_path / "t.tbundle")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    with bundler.Bundle.load(tmp_path / "t.tbundle") as loaded:
        again, driver, bench = tuned(launch_kernels, configs(triton), options={"bundle": loaded})
        again[grid](X, Y, OUT, 1024)
        assert (bench.times, [launch.grid for launch in driver.launches], again.misses) == (
            0,
            [(8, 1, 1)],
            [],
        )
        assert [choice.how for choice in again.choices.values()] == ["record"]
        assert again.handle(X, Y, OUT, 1024).plan.key == bundle.kernels[0].key
    assert not (tmp_path / "empty").exists()


def test_a_restored_directory_has_the_records_too(triton, launch_kernels, tmp_path, monkeypatch):
    """After a restore no config is measured, and Triton finds the winner's kernel; a second restore
    writes nothing.
    """
    kernel, _, _ = tuned(launch_kernels, configs(triton))
    with bundler.recording() as recording:
        kernel[grid](X, Y, OUT, 1024)
    bundle = recording.collect()
    monkeypatch.setattr(
        "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / "restored")
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "restored"))
    assert bundler.restore(bundle).tuned == 1
    again, driver, bench = tuned(launch_kernels, configs(triton))
    with bundler.recording() as second:
        again[grid](X, Y, OUT, 1024)
    collected = second.collect()
    assert (bench.times, len(driver.launches)) == (0, 1)
    assert (second.report.compiles, second.report.hits) == (0, 1)
    assert collected.tuning_records == bundle.tuning_records
    assert bundler.restore(bundle).tuned == 0
    assert bundler.pack(tmp_path / "restored").tuning_records == bundle.tuning_records


def test_records_of_other_processes_are_taken_with_their_kernels(
    triton, launch_kernels, tmp_path, monkeypatch
):
    """A recording that sees a winner's kernel, found in the cache, takes the record that lies
    beside it.
    """
    monkeypatch.setattr(
        "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / "cache")
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    with bundler.recording() as recording:
        kernel.warmup(X, Y, OUT, 1024)
    assert [record.kernel for record in recording.collect().tuning_records] == ["add"]
    with bundler.recording() as recording:
        tuned(launch_kernels, configs(triton, 64))[0].warmup(X, Y, OUT, 1024)
    assert recording.collect().tuning_records == (), "only the loser was seen"


def test_a_record_of_something_else_is_a_miss_that_says_what_differs(triton, launch_kernels):
    """Another list of configs, another device: tuned anew, with the reason."""
    first, _, _ = tuned(launch_kernels, configs(triton))
    first[grid](X, Y, OUT, 1024)
    fewer, _, bench = tuned(launch_kernels, configs(triton, 64, 128))
    fewer[grid](X, Y, OUT, 1024)
    assert bench.times == 2
    assert "the closest differs in configs: recorded" in fewer.misses[0][1]
    smaller = DryDriver("cuda", DeviceProperties("90", 1024, 227 * 1024, 32, 78, True))
    other, _, bench = tuned(launch_kernels, configs(triton), driver=smaller)
    other[grid](X, Y, OUT, 1024)
    assert bench.times == 3
    assert "device: recorded cuda:90, 132 multiprocessors" in other.misses[0][1]
    assert "here cuda:90, 78 multiprocessors" in other.misses[0][1]


def test_the_order_of_the_configs_does_not_matter(triton, launch_kernels):
    """The same set in another order has the same record, and equal configs count once."""
    first, _, _ = tuned(launch_kernels, configs(triton))
    first[grid](X, Y, OUT, 1024)
    turned, _, bench = tuned(launch_kernels, configs(triton, 256, 64, 128, 64))
    turned[grid](X, Y, OUT, 1024)
    assert (bench.times, turned.misses, len(turned.configs)) == (0, [], 3)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_record_is_a_miss_with_the_reason(triton, launch_kernels, tmp_path, damage):
    """Whatever is in the file, the kernel is tuned anew and the record replaced."""
    first, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    first[grid](X, Y, OUT, 1024)
    (path,) = (tmp_path / "records" / "bundler-tuning").iterdir()
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-3],
            "flip": data[:40] + b"\xff" + data[41:],
            "empty": b"",
            "other": b"x" * 90,
        }[damage]
    )
    again, _, bench = tuned(launch_kernels, configs(triton, 64, 128))
    again[grid](X, Y, OUT, 1024)
    assert bench.times == 2
    assert "cannot be used: tuning record" in again.misses[0][1]
    assert path.read_bytes()[32:60] == data[32:60]


def test_alignment_is_specialized_within_one_tuning_key(triton, launch_kernels):
    """An unaligned tensor needs another kernel of the same config, and no further measurement."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    kernel[grid](X, calls.ODD, OUT, 1024)
    assert bench.times == 2
    assert len({launch.plan.key for launch in driver.launches[-2:]}) == 2


def test_threads_that_call_at_once_tune_once(triton, launch_kernels):
    """The others wait for the first."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton))
    threads = [threading.Thread(target=lambda: kernel[grid](X, Y, OUT, 1024)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (bench.times, len(driver.launches)) == (3, 7)


def test_configs_are_compiled_in_other_processes_where_the_module_can_be_imported(
    triton, launch_kernels, tmp_path, monkeypatch
):
    """The workers fill the cache, and this process only finds what they left."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    driver = DryDriver()
    options = TunerOptions(driver=driver, workers=2)
    kernel = bundler.autotune(
        configs(triton, 16, 32, 64, 128), ["n"], do_bench=Bench(driver), options=options
    )
    with bundler.recording() as recording:
        kernel(launch_kernels.add)[grid](X, Y, OUT, 1024)
    recording.collect()
    assert (recording.report.compiles, recording.report.hits) == (0, 4)
    assert recording.report.without_facts == ()


def test_a_config_that_needs_too_much_is_left_out(triton, launch_kernels):
    """What the device cannot run is a reason in the record; what is left is measured."""
    small = DryDriver("cuda", DeviceProperties("90", 128, 227 * 1024, 32, 132, True))
    given = [triton.Config({"BLOCK": 64}, num_warps=8), *configs(triton, 64, 128)]
    kernel, _, bench = tuned(launch_kernels, given, driver=small)
    with bundler.recording() as recording:
        kernel[grid](X, Y, OUT, 1024)
    assert bench.times == 2
    (tuning,) = recording.collect().observed.tunings
    assert "needs 256 threads a block" in tuning.timings[0].reason
    none, _, bench = tuned(
        launch_kernels, [given[0], triton.Config({"BLOCK": 128}, num_warps=8)], driver=small
    )
    with pytest.raises(NoValidConfig, match="needs 256 threads a block"):
        none[grid](X, Y, OUT, 1024)
    assert (bench.times, none.choices) == (0, {})


def test_when_all_fail_nothing_is_saved(triton, launch_kernels, tmp_path):
    """An infinite time for each is no winner, and leaves no record."""
    driver = DryDriver()
    kernel = bundler.autotune(
        configs(triton, 64, 128),
        ["n"],
        do_bench=lambda fn, quantiles: [float("inf")] * 3,
        options=TunerOptions(driver=driver, workers=1),
    )(launch_kernels.add)
    with pytest.raises(NoValidConfig, match="returned no time"):
        kernel[grid](X, Y, OUT, 1024)
    assert not (tmp_path / "records").exists()
    assert not any(module.loaded for module in driver.modules)


def test_a_size_that_is_no_power_of_two_is_an_error_of_the_compiler(triton, launch_kernels):
    """It is no matter of resources, so it is not passed over; the error names kernel and config."""
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 96))
    with pytest.raises(CompileFailed, match="power of 2") as caught:
        kernel[grid](X, Y, OUT, 1024)
    assert "BLOCK=96" in caught.value.config


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "the list is empty"),
        ("BLOCK", "expected a list of configs"),
        ([{"BLOCK": 64}], "expected a Config"),
        ([Config({"BLOCK": 64}, pre_hook=print)], "pre_hook"),
        ([Config({"BLOCK": object()})], "cannot travel"),
        ([Config({"BLOK": 64})], "'BLOK', which is no parameter"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused_when_the_kernel_is_declared(
    triton, launch_kernels, wrong, words
):
    """Empty, no configs, hooks that cannot travel, values that cannot, names that are none."""
    with pytest.raises(ConfigError, match=words):
        bundler.autotune(wrong, ["n"])(launch_kernels.add)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": ["size"]},
        {"reset_to_zero": ["o"]},
        {"restore_value": ["z"]},
        {"rep": 0},
        {"warmup": -1},
        {"prune_configs_by": {"best": 1}},
        {"prune_configs_by": {"top_k": "two"}},
        {"prune_configs_by": {"top_k": 2.5}},
    ],
)
def test_other_arguments_that_cannot_be_used_are_refused_too(triton, launch_kernels, wrong):
    """Names that are no arguments, times that are none, unknown or odd pruning."""
    with pytest.raises(ConfigError):
        bundler.autotune(configs(triton), **{"key": ["n"], **wrong})(launch_kernels.add)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k: k[grid](X, Y, OUT, 1024, BLOCK=64), "chosen by the tuner"),
        (lambda k: k[grid](X, Y, OUT, 1024, num_warps=8), "chosen by the tuner"),
        (lambda k: k[grid](X, Y, OUT, 1024, 64, 1), "takes 5 arguments, got 6"),
        (lambda k: k.handle(X, Y, OUT, 1024), "give a grid"),
    ],
)
def test_a_call_that_does_not_fit_is_a_typed_error(triton, launch_kernels, call, words):
    """What the tuner chooses cannot be given, and a handle needs a config first."""
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    with pytest.raises(ConfigError, match=words):
        call(kernel)


def test_what_the_tuner_chooses_cannot_be_given_later_either(triton, launch_kernels):
    """Also when the config is known already; and a key that cannot be compared is a typed error."""
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    with pytest.raises(ConfigError, match="chosen by the tuner"):
        kernel[grid](X, Y, OUT, 1024, num_warps=8)
    with pytest.raises(ConfigError, match="cannot be compared"):
        kernel[grid](X, Y, OUT, [1024])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Config({"BLOCK": 64}, options={"ir_override": "/etc/passwd"}),
            "has the option 'ir_override'",
        ),
        (Config({"BLOK": 64}), "has other parameters"),
    ],
)
def test_a_record_cannot_bring_in_what_the_list_does_not_have(
    triton, launch_kernels, tmp_path, config, words
):
    """A record is data of somebody else: neither options nor parameters that nobody here named."""
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    folder = TuningFolder(tmp_path / "records")
    ((record, _),) = folder.records()
    folder.put(replace(record, config=named_of(config)), None)
    again, _, bench = tuned(launch_kernels, configs(triton, 64, 128))
    again[grid](X, Y, OUT, 1024)
    assert bench.times == 2
    assert words in again.misses[0][1]


def test_a_key_that_is_a_tensor_is_refused(triton, launch_kernels):
    """Each tensor would be tuned for by itself."""
    kernel = bundler.autotune(configs(triton), ["x"], options=TunerOptions(driver=DryDriver()))(
        launch_kernels.add
    )
    with pytest.raises(ConfigError, match="which is a tensor"):
        kernel[grid](X, Y, OUT, 1024)


def test_pruning_decides_what_is_measured(triton, launch_kernels):
    """A function chooses among the user's own objects, a model prices them, and the cheapest part
    is measured.
    """
    given = configs(triton, 32, 64, 128, 256)
    seen = []

    def early(candidates, named, **keywords):
        seen.append((candidates, named["n"]))
        return candidates[1:]

    pruning = {"early_config_prune": early, "perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 2}
    kernel, _, bench = tuned(launch_kernels, given, prune_configs_by=pruning)
    kernel[grid](X, Y, OUT, 1024)
    assert seen == [(given, 1024)]
    assert (bench.times, kernel.best_config.kwargs["BLOCK"]) == (2, 128)
    half, _, bench = tuned(
        launch_kernels,
        given,
        prune_configs_by={**pruning, "early_config_prune": None, "top_k": 0.5},
    )
    half[grid](X, Y, OUT, 1024)
    assert bench.times == 0, "of the same configs there is a record"
    none, _, _ = tuned(
        launch_kernels, given, prune_configs_by={"early_config_prune": lambda *_, **__: []}
    )
    with pytest.raises(ConfigError, match="left no config"):
        none[grid](X, Y, OUT, 1024)


def test_a_lookup_table_takes_the_place_of_the_list(triton, launch_kernels, tmp_path):
    """By kernel name, by source, for one key or for all; nothing is measured, and the most
    particular entry counts.
    """
    table = LookupTable(
        [
            {"kernel": "add", "config": {"kwargs": {"BLOCK": 32}}},
            {
                "kernel": "add",
                "arguments": ", ".join(map(str, KEY)),
                "config": {"kwargs": {"BLOCK": 512}, "num_warps": 2},
            },
        ]
    )
    kernel, driver, bench = tuned(launch_kernels, configs(triton), options={"table": table})
    kernel[grid](X, Y, OUT, 1024)
    kernel[grid](X, Y, OUT, 64)
    assert (bench.times, [launch.grid[0] for launch in driver.launches]) == (0, [2, 2])
    assert driver.launches[0].plan.block_threads == 64
    (tmp_path / "bad.json").write_text('{"tuning": 3}')
    with pytest.raises(FormatError, match="no lookup table"):
        LookupTable.load(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="needs a config"):
        LookupTable([{"config": {}}])


def test_hooks_of_the_user_run_around_each_measured_launch(triton, launch_kernels):
    """Before and after each, with all arguments, and once at the end to reset; never for the launch
    itself.
    """
    heard = []
    kernel, _, bench = tuned(
        launch_kernels,
        configs(triton, 64, 128),
        pre_hook=lambda arguments, reset_only=False: heard.append(
            ("before", arguments["BLOCK"], reset_only)
        ),
        post_hook=lambda arguments, exception: heard.append(
            ("after", arguments["BLOCK"], exception)
        ),
    )
    kernel[grid](X, Y, OUT, 1024)
    assert heard == [
        ("before", 64, False),
        ("after", 64, None),
        ("before", 128, False),
        ("after", 128, None),
        ("before", 128, True),
    ]
    kernel[grid](X, Y, OUT, 1024)
    assert (bench.times, len(heard)) == (2, 5)


@pytest.mark.parametrize("empty", [(0,), (4, 0), 0, lambda meta: (meta["n"] // meta["BLOCK"],)])
def test_a_first_call_without_a_program_is_neither_tuned_nor_launched(
    triton, launch_kernels, empty
):
    """Nothing would be measured; the next call with something to do is the one that is tuned."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[empty](X, Y, OUT, 32)
    assert (bench.times, driver.launches, kernel.choices) == (0, [], {})
    kernel[grid](X, Y, OUT, 32)
    launched = len(driver.launches)
    kernel[empty](X, Y, OUT, 32)
    assert (bench.times, launched, len(driver.launches)) == (2, 3, 3)


def test_without_a_choice_no_clock_is_needed(triton, launch_kernels):
    """Where one of two configs is left, nothing is measured, also on a machine that could not."""
    small = DryDriver("cuda", DeviceProperties("90", 128, 227 * 1024, 32, 132, True))
    given = [triton.Config({"BLOCK": 64}, num_warps=8), *configs(triton, 64)]
    kernel = bundler.autotune(given, ["n"], options=TunerOptions(driver=small, workers=1))(
        launch_kernels.add
    )
    kernel[grid](X, Y, OUT, 1024)
    assert [launch.grid for launch in small.launches] == [(16, 1, 1)]


def test_launch_hooks_hear_the_benchmark_and_the_launch(triton, launch_kernels):
    """Whoever counts launches counts those of the benchmark."""
    kernel, driver, _ = tuned(launch_kernels, configs(triton, 64, 128))
    heard = []
    kernel.hooks.enter.append(lambda facts: heard.append(facts["grid"]))
    kernel[grid](X, Y, OUT, 1024)
    assert (
        heard == [launch.grid for launch in driver.launches] == [(16, 1, 1), (8, 1, 1), (8, 1, 1)]
    )


def test_heuristics_of_triton_between_tuner_and_kernel_are_asked(triton, launch_kernels):
    """What they compute from the config goes into the compile and the launch."""
    wrapped = triton.heuristics({"BLOCK": lambda call: call["num_warps"] * 32})(launch_kernels.add)
    driver = DryDriver()
    given = [triton.Config({}, num_warps=warps) for warps in (2, 4)]
    kernel = bundler.autotune(
        given, ["n"], do_bench=Bench(driver), options=TunerOptions(driver=driver, workers=1)
    )(wrapped)
    kernel[grid](X, Y, OUT, 1024)
    assert kernel.best_config.num_warps == 4
    assert driver.launches[-1].grid == (8, 1, 1)


def test_launches_are_written_down_where_that_is_asked_for(triton, launch_kernels, tmp_path):
    """A line a launch: numbers as they are, everything else a T, then the config, then the grid."""
    dump = LaunchDump(tmp_path / "launches.txt")
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64), options={"dump": dump})
    kernel[(16,)](X, Y, OUT, n=1024)
    expected = "add | T T T n=1024 BLOCK=64 num_warps=4 num_ctas=1 num_stages=3 | (16, 1, 1)\n"
    assert (tmp_path / "launches.txt").read_text() == expected


def test_the_chosen_kernel_can_be_exported(triton, launch_kernels, tmp_path):
    """A binary that its digest names, and how to launch it: parameters with offsets, threads,
    shared memory, config.
    """
    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    exported = kernel.export(tmp_path / "out", X, Y, OUT, 1024)
    facts = json.loads(exported.parameters.read_text())
    assert exported.binary.read_bytes()[:4] == b"\x7fELF"
    assert (facts["entry"], facts["target"], facts["config"]["kwargs"]) == (
        "add",
        "cuda:90",
        {"BLOCK": 128},
    )
    assert [(p["name"], p["kind"], p["offset"]) for p in facts["parameters"]][:4] == [
        ("x", "pointer", 0),
        ("y", "pointer", 8),
        ("out", "pointer", 16),
        ("n", "i32", 24),
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        exported.binary.name,
        exported.header.name,
        exported.parameters.name,
        *(exported.stages[kind].name for kind in ("llir", "ptx", "source", "ttgir", "ttir")),
    ]


def test_warmup_compiles_everything_and_launches_nothing(triton, launch_kernels):
    """One key a config."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton))
    assert len(set(kernel.warmup(X, Y, OUT, 1024))) == 3
    assert (driver.launches, bench.times) == ([], 0)
    kernel.run(X, Y, OUT, 1024, grid=grid, warmup=True)
    kernel.run(X, Y, OUT, 1024, grid=grid)
    assert bench.times == 3


def test_an_ahead_of_time_build_sees_every_config(triton, launch_kernels):
    """`triton-bundler build` takes such a kernel as it takes Triton's autotuned ones: a compile for
    each config.
    """
    from bundler.format.entries import Target
    from bundler.toolchain import jit_specialization

    kernel, _, _ = tuned(launch_kernels, configs(triton, 64, 128))
    assert jit_specialization.is_kernel(kernel)
    arguments = {"x": "*fp32:16", "y": "*fp32:16", "out": "*fp32:16", "n": "i32:16"}
    found = list(jit_specialization.specialize(kernel, arguments, {}, Target("cuda", "90")))
    assert [dict(one.constants)[4,].plain() for one in found] == [64, 128]
    assert {key for one in found for key, _ in one.keys} == set(kernel.warmup(X, Y, OUT, 1024))


def test_in_deterministic_mode_the_first_config_is_taken(triton, launch_kernels):
    """Without a measurement, and with one launch."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton), options={"deterministic": True})
    kernel[grid](X, Y, OUT, 1024)
    assert (bench.times, [launch.grid for launch in driver.launches]) == (0, [(16, 1, 1)])


def test_forgetting_lets_go_of_everything(triton, launch_kernels):
    """Modules are unloaded; the next call finds the record."""
    kernel, driver, bench = tuned(launch_kernels, configs(triton, 64, 128))
    kernel[grid](X, Y, OUT, 1024)
    kernel.forget()
    assert not any(module.loaded for module in driver.modules)
    kernel[grid](X, Y, OUT, 1024)
    assert bench.times == 2


def test_tritons_result_files_are_written_and_read(triton, launch_kernels, monkeypatch, tmp_path):
    """With `cache_results` the file lies where Triton's own tuner looks, infinite times and all,
    and is enough for us.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    small = DryDriver("cuda", DeviceProperties("90", 128, 227 * 1024, 32, 132, True))
    given = [triton.Config({"BLOCK": 64}, num_warps=8), *configs(triton, 64, 128)]
    kernel, _, _ = tuned(launch_kernels, given, driver=small, cache_results=True)
    kernel[grid](X, Y, OUT, 1024)
    (path,) = (tmp_path / "cache").glob("*/add.autotune.json")
    document = json.loads(path.read_text())
    assert document["key"] == list(KEY)
    assert [times for _, times in document["configs_timings"]] == [
        [float("inf")] * 3,
        [9.0] * 3,
        [1.0] * 3,
    ]
    assert triton.Config(**document["configs_timings"][2][0]) == given[2]
    for record in (tmp_path / "records" / "bundler-tuning").iterdir():
        record.unlink()
    again, _, bench = tuned(launch_kernels, given, driver=small, cache_results=True)
    again[grid](X, Y, OUT, 1024)
    assert (bench.times, [choice.how for choice in again.choices.values()]) == (0, ["results"])
    path.write_text('{"key": [], "configs_timings": [[{"kwargs": {}}, "soon"]]}')
    third, _, bench = tuned(launch_kernels, given, driver=small, cache_results=True)
    third[grid](X, Y, OUT, 1024)
    assert bench.times == 2
    assert "not a result file of Triton's tuner" in third.misses[0][1]


@pytest.mark.slow
def test_the_interpreter_gives_right_numbers(triton, tmp_path):
    """Under TRITON_INTERPRET=1 the kernel runs on the CPU with its first config, and nothing is
    compiled or measured.
    """
    pytest.importorskip("torch")
    program = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import bundler, triton, launch_kernels
kernel = bundler.autotune([triton.Config({"BLOCK": 16}, num_warps=8), triton.Config({"BLOCK": 32})], ["n"])(launch_kernels.add)
x, y, out = torch.arange(50.0), torch.ones(50), torch.zeros(50)
kernel[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](x, y, out, 50)
print(torch.equal(out, x + y), kernel.best_config)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "TRITON_CACHE_DIR": str(tmp_path / "none"),
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.stdout.strip() == "True BLOCK=16, num_warps=8, num_stages=3", done.stderr
    assert not (tmp_path / "none").exists()
