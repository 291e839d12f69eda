# SPDX-License-Identifier: Apache-2.0
"""Candidates are made of real compiles: which failures are left out, that every option arrives, and
who launches.
"""

import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import launch_calls as calls
import pytest
import triton_stand_in

import bundler
from bundler.errors import CompileFailed, NoValidConfig, WorkerDied
from bundler.format.entries import Target
from bundler.runtime import BandwidthReport, Config, DryDriver, TunerOptions
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.runtime.tuning.candidate_compiler import (
    CandidateCompiler,
    importable,
    make,
)
from bundler.toolchain import tuner_toolchain as toolchain

pytestmark = pytest.mark.toolchain
X, Y, OUT = calls.X, calls.Y, calls.OUT
CALL = {"x": X, "y": Y, "out": OUT, "n": 1024}


@pytest.fixture
def triton(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return pytest.importorskip("triton")


@pytest.fixture
def compiler(triton, launch_kernels):
    """Return candidates for a call of the vector add."""
    driver = DryDriver()
    return CandidateCompiler(launch_kernels.add, CALL, driver, (4,), Hooks(), workers=1)


@pytest.mark.release
def test_every_option_of_a_config_reaches_the_compiler(compiler):
    """Register limit, cluster, stages, and options that only the backend knows."""
    config = Config({"BLOCK": 64}, 2, 5, 2, 64, {"enable_fp_fusion": False})
    (candidate,) = compiler.build([config])
    options = {name: value.plain() for name, value in candidate.made.kernel.launch.facts.options}
    expected = {
        "num_warps": 2,
        "num_stages": 5,
        "num_ctas": 2,
        "maxnreg": 64,
        "enable_fp_fusion": False,
    }
    assert {name: options[name] for name in expected} == expected
    assert candidate.made.kernel.spec.num_ctas == 2
    assert candidate.registers <= 64


def test_configs_that_differ_only_in_what_others_ignore_are_two_kernels(compiler):
    """A register limit makes another binary, so it is another candidate."""
    one, two = compiler.build([Config({"BLOCK": 64}), Config({"BLOCK": 64}, maxnreg=32)])
    assert one.key != two.key


def test_an_assembler_that_refuses_is_a_reason_and_not_the_end(
    triton, launch_kernels, monkeypatch, tmp_path
):
    """When it refuses every config, the one error has each reason."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for name, variable in (
        ("ptxas", "TRITON_PTXAS_PATH"),
        ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"),
    ):
        wrapper = tmp_path / name
        real = os.environ.get(variable, str(tools / name))
        wrapper.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then exec {real} --version; fi\necho no'
            " >&2\nexit 1\n"
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv(variable, str(wrapper))
    options = TunerOptions(driver=DryDriver(), workers=1)
    kernel = bundler.autotune(
        [Config({"BLOCK": 64}), Config({"BLOCK": 128})], ["n"], do_bench=max, options=options
    )
    with pytest.raises(NoValidConfig) as caught:
        kernel(launch_kernels.add)[(4,)](X, Y, OUT, 1024)
    assert [reason for _, reason in caught.value.reasons] == ["PTXASError: no"] * 2


@pytest.mark.parametrize("failing", [(1,), (1, 2)])
def test_a_pass_that_fails_is_a_reason_and_not_the_end(
    triton, launch_kernels, monkeypatch, failing
):
    """Triton's passes raise without a word of why: another config is taken, and when none is left,
    the one error has each reason.
    """
    compiled = triton.compile

    def passed(source, *, target, options):
        if options["num_warps"] in failing:
            raise RuntimeError("PassManager::run failed")
        return compiled(source, target=target, options=options)

    monkeypatch.setattr(triton, "compile", passed)
    options = TunerOptions(driver=DryDriver(), workers=1)
    configs = [Config({"BLOCK": 64}, num_warps=warps) for warps in (1, 2)]
    kernel = bundler.autotune(configs, ["n"], do_bench=max, options=options)(launch_kernels.add)
    if len(failing) == 1:
        kernel[(4,)](X, Y, OUT, 1024)
        assert kernel.best_config == configs[1]
        return
    with pytest.raises(NoValidConfig) as caught:
        kernel[(4,)](X, Y, OUT, 1024)
    reasons = [reason for _, reason in caught.value.reasons]
    assert reasons == ["RuntimeError: PassManager::run failed"] * 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CompileFailed("", reason="OutOfResources: shared memory"), True),
        (CompileFailed("", reason="PTXASError: no"), True),
        (CompileFailed("", reason="CompileTimeAssertionFailure: no"), True),
        (CompileFailed("", reason="RuntimeError: PassManager::run failed: error: no"), True),
        (CompileFailed("", reason="RuntimeError: no"), False),
        (CompileFailed("", reason="CompilationError: no"), False),
        (CompileFailed("", reason="NameError: OutOfResources"), False),
        (WorkerDied("", reason="SIGSEGV"), True),
    ],
)
def test_only_what_another_config_can_mend_is_tolerated(error, expected):
    """Too large, refused by a pass or the assembler, or deadly for a worker; a mistake in the
    kernel is none of these.
    """
    assert toolchain.tolerated(error) == expected


def test_who_can_be_imported_is_compiled_elsewhere(triton, launch_kernels):
    """A kernel of a module file; not one of a script, a closure, or one that its module does not
    hold under its name.
    """
    source = importable(launch_kernels.add)
    assert (source.kind, source.function, Path(source.path).name) == (
        "module",
        "add",
        "launch_kernels.py",
    )
    hidden = SimpleNamespace(
        __module__="launch_kernels", fn=SimpleNamespace(__qualname__="f.<locals>.add")
    )
    absent = SimpleNamespace(
        __module__="launch_kernels", fn=SimpleNamespace(__qualname__="nowhere")
    )
    script = SimpleNamespace(__module__="__main__", fn=SimpleNamespace(__qualname__="add"))
    assert [importable(other) for other in (hidden, absent, script)] == [None, None, None]


def test_what_the_caches_of_amd_say_is_found_too(triton, launch_kernels):
    """A candidate for another vendor: its registers, its spills, its launch."""
    driver = DryDriver("hip")
    compiler = CandidateCompiler(launch_kernels.add, CALL, driver, (4,), Hooks(), workers=1)
    (candidate,) = compiler.build([Config({"BLOCK": 64}, options={"waves_per_eu": 2})])
    assert candidate.registers > 0
    assert candidate.spills == 0
    candidate.prepare({})()
    assert driver.launches[0].plan.target == Target("hip", "gfx942", 64)
    candidate.close()
    assert not driver.modules[0].loaded


@pytest.fixture
def triton_driver(triton):
    from triton.runtime.driver import driver

    before, fake = driver._active, triton_stand_in.TritonDriver(lambda metadata: metadata.num_warps)
    driver.set_active(fake)
    yield fake
    driver._active = before


def test_what_only_triton_can_launch_is_tuned_and_launched_by_triton(
    triton, triton_driver, launch_kernels
):
    """An eight-bit float by value: measured through Triton, and launched through it from
    then on.
    """
    function = launch_kernels.eighth
    function.device_caches.clear()
    dry = DryDriver()

    def bench(fn, quantiles):
        fn()
        return float(triton_driver.launches[-1][0])

    configs = [triton.Config({}, num_warps=warps) for warps in (8, 2, 4)]
    kernel = bundler.autotune(
        configs, [], do_bench=bench, options=TunerOptions(driver=dry, workers=1)
    )(function)
    for _ in range(2):
        kernel[(3,)](X, 1.5)
    assert [warps for warps, _ in triton_driver.launches] == [8, 2, 4, 2, 2]
    assert triton_driver.launches[-1][1] == (3, 1, 1)
    assert dry.launches == []
    function.device_caches.clear()


def test_the_active_driver_is_used_where_it_is_for_the_same_target(triton_driver):
    """Nobody who launches in another thread finds a driver that is only declared."""
    from triton.runtime.driver import driver

    with toolchain.for_target(Target("cuda", "90")):
        assert driver._active is triton_driver
    with toolchain.for_target(Target("cuda", "80")):
        assert driver._active is not triton_driver
    assert driver._active is triton_driver


def test_comments_and_places_do_not_change_what_a_kernel_is(triton, tmp_path):
    """Another line, another module, a comment above: the same source part; another constant, helper
    or text: another.
    """
    head = "import triton\nimport triton.language as tl\n"
    helper = (
        "\nFACTOR = tl.constexpr({factor})\n\n@triton.jit\ndef scale(v):\n    return v * {number} *"
        " FACTOR\n"
    )
    body = "\n@triton.jit\ndef kernel(x):\n    tl.store(x, scale(tl.load(x)))\n"

    def part(name, comment="", factor=2, number=3, text=body):
        from importlib.util import module_from_spec, spec_from_file_location

        path = tmp_path / f"{name}.py"
        path.write_text(head + comment + helper.format(factor=factor, number=number) + text)
        spec = spec_from_file_location(name, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return toolchain.source_part(module.kernel)

    same = part("one")
    assert part("two", comment="# a remark\n\n\n") == same
    assert (
        len(
            {
                same,
                part("three", factor=5),
                part("four", number=5),
                part("five", text=body.replace("load(x)", "load(x + 1)")),
            }
        )
        == 4
    )


def test_the_bandwidth_of_a_kernel_is_reported_once_a_key(triton, launch_kernels, tmp_path):
    """The measured time, and the bytes of its tensors; what came from a record is measured for the
    report.
    """

    class Tensor(calls.Tensor):
        def numel(self):
            return 1_000_000

    monkey = {"record": False, "workers": 1}
    report = BandwidthReport(tmp_path / "b.txt")
    driver = DryDriver()

    def bench(fn, quantiles):
        fn()
        return 2.0

    given = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    options = TunerOptions(driver=driver, bandwidth=report, **monkey)
    kernel = bundler.autotune(given, ["n"], do_bench=bench, options=options)(launch_kernels.add)
    for _ in range(2):
        kernel[(4,)](Tensor(), Tensor(), Tensor(), 1024)
    (row,) = report.rows
    assert (row.name, row.milliseconds, row.gigabytes, row.gb_per_s) == ("add", 2.0, 0.012, 6.0)
    single = bundler.autotune(given[:1], ["n"], do_bench=bench, options=options)(launch_kernels.add)
    single[(4,)](Tensor(), Tensor(), Tensor(), 1024)
    assert len(report.rows) == 2


def test_a_compile_says_where_its_kernel_is(triton, launch_kernels):
    """One kernel in a bundle of its own, with facts and parts; a mistake in the call is a typed
    error.
    """
    made = make(launch_kernels.add, {**CALL, "BLOCK": 64}, Target("cuda", "90"))
    assert (made.reason, made.kernel.parts.proven, len(made.bundle.kernels)) == (None, True, 1)
    with pytest.raises(CompileFailed, match="add does not compile"):
        make(launch_kernels.add, {**CALL, "BLOCK": 64, "block": 3}, Target("cuda", "90"))


def test_a_launch_asks_for_no_lines_of_the_source(triton, launch_kernels):
    """All else that tells kernels apart is there."""
    given = launch_kernels.add, {**CALL, "BLOCK": 64}, Target("cuda", "90")
    whole, launched = make(*given), make(*given, lines=False)
    assert launched.kernel.parts.proven
    lacking = dict(whole.kernel.parts.parts).keys() - dict(launched.kernel.parts.parts).keys()
    assert lacking == {"source.functions", "source.lines"}
    assert launched.kernel.facts_bytes == whole.kernel.facts_bytes


def test_a_kernel_that_two_processes_left_mixed_is_compiled_anew(
    triton, launch_kernels, monkeypatch, tmp_path
):
    """Its texts name two files: such a kernel is in no bundle, and a launch gets one of its own;
    the cache stays as it is.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = {**CALL, "BLOCK": 32}
    whole = make(launch_kernels.add, call, Target("cuda", "90"))
    (text,) = tmp_path.glob("*/add.ttgir")
    mixed = re.sub(
        rb'"[^"]*launch_kernels.py"', b'"/elsewhere/launch_kernels.py"', text.read_bytes()
    )
    assert mixed != text.read_bytes()
    text.write_bytes(mixed)
    again = make(launch_kernels.add, call, Target("cuda", "90"))
    assert (again.kernel.key, again.image) == (whole.kernel.key, whole.image)
    assert text.read_bytes() == mixed
