# SPDX-License-Identifier: Apache-2.0
"""Kernels of a program are compiled by workers before its first call, under the keys that a launch
asks for; Triton compiles them for a GPU that is not there.
"""

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen import compile_ahead, module_decorators  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.codegen.torch_backend import triton_bundler  # noqa: E402
from bundler.compile.service import CompileService  # noqa: E402
from bundler.compile.source_modules import source_module  # noqa: E402
from bundler.errors import ConfigError  # noqa: E402
from bundler.lifecycle.tuning_directory import tuning_counters  # noqa: E402
from bundler.runtime import DryDriver, TunerOptions  # noqa: E402
from bundler.runtime.tuning.benchmark import GivenClock  # noqa: E402
from bundler.toolchain import tuner_toolchain  # noqa: E402


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A service of two workers, which `start` takes, for a machine with one GPU that is not
    there.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    driver = DryDriver("cuda")
    monkeypatch.setattr(module_decorators, "_driver", lambda: driver)
    with CompileService(2) as made:
        monkeypatch.setattr(compile_ahead, "_service", lambda workers: made)
        yield made


def two_kernels():
    return generate(
        lambda x: torch.softmax(torch.mm(x.sin(), x.sin()), -1), [torch.ones(64, 64)], device="cuda"
    )


def test_workers_fill_the_cache_that_launches_look_in(service, tmp_path):
    """Each candidate of each kernel is there, and is not compiled a second time."""
    program = two_kernels()
    compile_ahead.wait(started := compile_ahead.start(program, 2))
    assert len(program.kernels) == 2
    found = [future.result() for future in started]
    assert service.counters.compiled == len(found) >= 2
    for one in found:
        (cubin,) = (tmp_path / "triton" / one.key).glob("*.cubin")
        assert cubin.stat().st_size
    assert compile_ahead.start(two_kernels(), 2) == ()
    # The launch that follows asks Triton for these keys.
    names = {kernel.fn.__name__ for kernel in program.modules.values()}
    built = program.build(["cuda:90"])
    assert {kernel.key for kernel in built.kernels} <= {one.key for one in found}
    assert {kernel.name for kernel in built.kernels} == names


def test_a_kernel_of_two_programs_is_one_and_keeps_what_was_tuned(service):
    """Programs share the kernels of equal text: the second finds the first one's."""
    first, second = two_kernels(), two_kernels()
    assert [*first.modules.values()] == [*second.modules.values()]
    compile_ahead.wait(compile_ahead.start(first, 2))
    made = [dict(kernel._made) for kernel in first.modules.values()]
    assert compile_ahead.start(second, 2) == ()
    assert made == [kernel._made for kernel in second.modules.values()]


def test_kernels_of_rows_that_are_longer_than_the_example_s_are_left_for_later(service):
    """Such a row may never come: what holds the example's is compiled."""
    program = generate(
        lambda x, y: (torch.softmax(x, -1), torch.log_softmax(y, -1)),
        [torch.ones(64, 50), torch.ones(70, 40)],
        dynamic=True,
        device="cuda",
    )
    started = compile_ahead.start(program, 2)
    compile_ahead.wait(started)
    ahead = {future.result().key for future in started}
    built = program.build(["cuda:90"])
    later = [kernel.name for kernel in built.kernels if kernel.key not in ahead]
    assert len(built.kernels) == 2 * len(later) == 4
    assert all("_red_" in name for name in later)


class OnTheGpu:
    """What a tensor is to a launch: an address, and where it lies."""

    dtype = torch.float32

    def data_ptr(self):
        return 1 << 40

    def get_device(self):
        return 0


def test_a_second_process_finds_what_was_tuned(service, monkeypatch):
    """In the directory of tuning records: it measures and compiles nothing, whatever text its
    kernels were read from.
    """
    compiles, real = [], tuner_toolchain.compile_call

    def compile_call(*given, **named):
        event = real(*given, **named)
        compiles.append(event.cache_hit)
        return event

    monkeypatch.setattr(tuner_toolchain, "compile_call", compile_call)
    x = OnTheGpu()
    function = lambda x: torch.softmax(x.sin(), -1)  # noqa: E731
    first = generate(function, [torch.empty(64, 4096)], device="cuda")
    (name,) = first.kernels
    for how in ("autotune", "record"):
        # What a process has of a kernel is made of its text alone.
        source = source_module(first.sources[name])
        source.unload()
        module = getattr(source.load(), name)
        driver = module_decorators._driver()
        kernel = module.on(
            module_decorators.current_device(), options=TunerOptions(driver=driver, workers=1)
        )
        assert len(kernel.configs) > 1
        kernel.tuned._make_clock = lambda: GivenClock(lambda call, quantiles: [1.0] * 3)
        before = tuning_counters()
        kernel.run(x, x, 64, 4096)
        (choice,) = kernel.tuned.choices.values()
        assert choice.how == how
        now = tuning_counters()
        assert (now.tuned - before.tuned, now.found - before.found) == (
            (1, 0) if how == "autotune" else (0, 1)
        )
        assert all(compiles) is (how == "record")
        compiles.clear()


def test_a_program_that_ran_before_is_compiled_ahead_where_the_cache_is_gone(monkeypatch, tmp_path):
    """Else its launches find what was compiled then, and nothing is looked for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compile_ahead, "start", lambda *given: given)
    assert compile_ahead.start_again("program", 2) == ("program", 2)
    (tmp_path / "triton").mkdir()
    assert compile_ahead.start_again("program", 2) == ("program", 2)
    (tmp_path / "triton" / "KEY").mkdir()
    assert compile_ahead.start_again("program", 2) == ()


def test_one_worker_compiles_nothing_ahead(service):
    """Then launches compile, in this process."""
    assert compile_ahead.start(two_kernels(), 1) == ()
    assert service.counters.submitted == 0


@pytest.mark.parametrize("workers", [0, "two", 1.5])
def test_another_number_of_workers_is_refused(workers):
    """The option of torch.compile says what it takes."""
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ConfigError, match="expected a number of processes"):
        triton_bundler(graph, [torch.ones(2)], options={"workers": workers})
