# SPDX-License-Identifier: Apache-2.0
"""Compiler options that a config gives as keywords: they reach the compiler that has them, and the
others say that they do not.
"""

import json

import launch_calls as calls
import pytest

import bundler
from bundler.errors import ConfigError
from bundler.lifecycle.tuning_directory import TuningFolder
from bundler.runtime import Config, DryDriver, LookupTable, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Setting
from bundler.runtime.tuning.benchmark import GivenClock

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT
AMD = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16, "kpack": 2}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def triton(compiled, monkeypatch, tmp_path):
    """Triton with a cache of this file's own; records go to a directory of the test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    monkeypatch.setattr(
        "bundler.runtime.tuning.result_lookup.triton_cache_dir", lambda: str(tmp_path / "records")
    )
    return pytest.importorskip("triton")


class Bench:
    """Says that each config is a little slower than the one before; counts."""

    def __init__(self):
        self.times = 0

    def __call__(self, fn, quantiles):
        self.times += 1
        fn()
        return [float(self.times)] * 3


def tuned(launch_kernels, given, backend, **more):
    bench, options = Bench(), more.pop("options", {})
    chosen = TunerOptions(driver=DryDriver(backend), workers=1, **options)
    return (
        bundler.autotune(given, ["n"], do_bench=bench, options=chosen, **more)(launch_kernels.add),
        bench,
    )


def launched(kernel, compiled):
    """Launch a tuned kernel; returns what Triton wrote about the binary that ran."""
    kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](X, Y, OUT, 1024)
    key = kernel.handle(X, Y, OUT, 1024).plan.key
    assert kernel.options.driver.launches[-1].plan.key == key
    return json.loads((compiled / key / "add.json").read_bytes())


def only_choice(kernel):
    return next(iter(kernel.choices.values()))


@pytest.mark.parametrize("ours", [False, True])
def test_options_given_as_keywords_reach_the_compiler(triton, launch_kernels, compiled, ours):
    """Triton's Config has no field for them, so its users write them among the parameters; ours
    takes them there and as options.
    """
    make = (
        (lambda block: Config({"BLOCK": block}, options=AMD))
        if ours
        else lambda b: triton.Config({"BLOCK": b, **AMD})
    )
    kernel, bench = tuned(launch_kernels, [make(64), make(128)], "hip")
    metadata = launched(kernel, compiled)
    assert {name: metadata[name] for name in AMD} == AMD
    assert (kernel.best_config.kwargs, kernel.best_config.options) == ({"BLOCK": 64}, AMD)
    assert (bench.times, only_choice(kernel).ignored) == (2, ())
    again, bench = tuned(launch_kernels, [make(64), make(128)], "hip")
    assert launched(again, compiled) == metadata
    assert (bench.times, only_choice(again).how) == (0, "record")


def test_options_of_the_other_backend_are_ignored_and_named(
    triton, launch_kernels, compiled, tmp_path
):
    """On CUDA nothing is done with AMD's options, and the choice names them; configs that differ in
    nothing else are one.
    """
    given = [triton.Config({"BLOCK": 64, "waves_per_eu": waves}) for waves in (1, 2)]
    kernel, bench = tuned(launch_kernels, [*given, triton.Config({"BLOCK": 128})], "cuda")
    metadata = launched(kernel, compiled)
    assert ("waves_per_eu" in metadata, only_choice(kernel).ignored) == (False, ("waves_per_eu",))
    assert (bench.times, kernel.best_config.options) == (2, {"waves_per_eu": 1})
    ((_, tuning),) = TuningFolder(tmp_path / "records").records()
    reasons = [timing.reason for timing in tuning.timings]
    assert [reason for reason in reasons if reason] == [
        (
            "here it is the same as BLOCK=64, num_warps=4, num_stages=3, waves_per_eu=1: cuda has no"
            " waves_per_eu"
        )
    ]


def test_a_register_limit_is_ignored_where_the_compiler_has_none(triton, launch_kernels, compiled):
    """AMD's compiler has no `maxnreg`, and Triton's JIT would refuse it; CUDA's gets it."""
    given = [Config({"BLOCK": 64}, maxnreg=96)]
    amd, _ = tuned(launch_kernels, given, "hip")
    assert launched(amd, compiled)["num_warps"] == 4
    assert only_choice(amd).ignored == ("maxnreg",)
    nvidia, _ = tuned(launch_kernels, given, "cuda")
    assert launched(nvidia, compiled)["maxnreg"] == 96
    assert only_choice(nvidia).ignored == ()


def test_what_is_neither_a_parameter_nor_an_option_is_refused(triton, launch_kernels):
    """A misspelled option is an error when the kernel is declared, and names what is possible."""
    with pytest.raises(
        ConfigError, match="'waves_per_uu', which is no parameter of the kernel, and no option"
    ):
        tuned(launch_kernels, [triton.Config({"BLOCK": 64, "waves_per_uu": 2})], "hip")


def test_a_pruned_list_keeps_its_options(triton, launch_kernels, compiled):
    """What a user's pruning leaves over is read as the list was."""
    given = [triton.Config({"BLOCK": block, "waves_per_eu": 2}) for block in (64, 128)]
    prune = {"early_config_prune": lambda configs, named, **more: configs[1:]}
    kernel, _ = tuned(launch_kernels, given, "hip", prune_configs_by=prune)
    assert launched(kernel, compiled)["waves_per_eu"] == 2
    assert kernel.best_config == Config({"BLOCK": 128}, options={"waves_per_eu": 2})


def test_tritons_result_files_have_options_where_triton_has_them(
    triton, launch_kernels, compiled, tmp_path
):
    """In Triton's own files options stand among the parameters; a file with them is written, and
    found again.
    """
    given = [triton.Config({"BLOCK": block, "kpack": 2}) for block in (64, 128)]
    kernel, _ = tuned(launch_kernels, given, "hip", cache_results=True, options={"record": True})
    launched(kernel, compiled)
    (path,) = compiled.rglob("add.autotune.json")
    rows = json.loads(path.read_bytes())["configs_timings"]
    assert [config["kwargs"] for config, _ in rows] == [
        {"BLOCK": 64, "kpack": 2},
        {"BLOCK": 128, "kpack": 2},
    ]
    for record in (tmp_path / "records").rglob("*"):
        if record.is_file():
            record.unlink()
    assert list(TuningFolder(tmp_path / "records").records()) == []
    again, bench = tuned(launch_kernels, given, "hip", cache_results=True)
    assert launched(again, compiled)["kpack"] == 2
    assert (bench.times, only_choice(again).how) == (0, "results")


def test_a_table_may_name_options_as_triton_does(triton, launch_kernels, compiled):
    """An entry of a lookup table is somebody's config too."""
    entry = {
        "kernel": "add",
        "config": {"kwargs": {"BLOCK": 32, "waves_per_eu": 4}, "num_warps": 2},
    }
    kernel, bench = tuned(
        launch_kernels, [Config({"BLOCK": 64})], "hip", options={"table": LookupTable([entry])}
    )
    metadata = launched(kernel, compiled)
    assert (metadata["waves_per_eu"], metadata["num_warps"], bench.times) == (4, 2, 0)


@pytest.mark.parametrize("decorator", ["user_autotune", "fixed_config"])
def test_heuristics_hand_options_on(triton, launch_kernels, compiled, decorator):
    """`user_autotune` and `fixed_config` take flat dictionaries, in which options stand beside
    parameters.
    """
    driver, flat = DryDriver("hip"), {"BLOCK": 64, "waves_per_eu": 3, "num_warps": 2}
    kernel = getattr(heuristics, decorator)(
        [flat] if decorator == "user_autotune" else flat,
        Setting(Device("hip", 304, 64)),
        grid=lambda blocks, sizes: (-(-sizes["n"] // blocks["BLOCK"]), 1, 1),
        options=TunerOptions(driver=driver, workers=1),
        clock=lambda: GivenClock(Bench()),
    )(launch_kernels.add)
    assert kernel.arguments == ("x", "y", "out", "n")
    kernel.run(X, Y, OUT, 1024)
    metadata = json.loads((compiled / driver.launches[-1].plan.key / "add.json").read_bytes())
    assert (metadata["waves_per_eu"], driver.launches[-1].grid) == (3, (16, 1, 1))


def test_a_build_for_each_target_takes_the_options_that_it_has(triton, launch_kernels):
    """A kernel with AMD's options is planned for CUDA without them, and for AMD with them."""
    from bundler.format.entries import Target
    from bundler.toolchain.jit_specialization import specialize

    kernel, _ = tuned(launch_kernels, [triton.Config({"BLOCK": 64, "waves_per_eu": 2})], "cuda")
    arguments = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
    options = {}
    for target in (Target("cuda", "90", 32), Target("hip", "gfx942", 64)):
        (found,) = specialize(kernel, arguments, {}, target)
        options[target.backend] = {name: value.plain() for name, value in found.options}
    assert "waves_per_eu" not in options["cuda"]
    assert options["hip"]["waves_per_eu"] == 2
