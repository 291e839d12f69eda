# SPDX-License-Identifier: Apache-2.0
"""What shares a kernel or a launch where a measurement decides: numbers are right either way, a
decision is a record that travels, and nothing is measured twice.

`fusion_choice_worker` runs what is decided in each way in Triton's interpreter.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402

import bundler  # noqa: E402
from bundler.codegen import measured_choices, measured_fusion, module_decorators  # noqa: E402
from bundler.codegen.graph_key import graph_key  # noqa: E402
from bundler.codegen.measured_fusion import FusionMeasurements  # noqa: E402
from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate  # noqa: E402
from bundler.codegen.torch_backend import triton_bundler  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402
from bundler.errors import ConfigError  # noqa: E402
from bundler.runtime import DryDriver  # noqa: E402
from bundler.runtime.program.program_plan import Launch  # noqa: E402
from bundler.runtime.tuning import autotuned_kernel, tuner  # noqa: E402
from bundler.runtime.tuning.benchmark import GivenClock  # noqa: E402
from bundler.runtime.tuning.occupancy import Usage  # noqa: E402

MEASURED = GenerateOptions(policy=ProgramPolicy(measured_fusion=True))
LIMIT_S = 280
ROWS = [torch.empty(64, 2048)]
LISTS = [torch.empty(size) for size in (3000, 5000, 4000)]


def both(a):
    return a + 1, a.sum(1)


def unlike(a, b, c):
    return a + 1, b * 2, c.sin()


# ------------------------------------------------------------------------------------------ Numbers


@pytest.mark.timeout(LIMIT_S + 20)
def test_either_decision_has_torchs_numbers(interpreted, tmp_path):
    """Random graphs, with every fusion undone and with some; lists, whose bytes are the same in
    every order of programs.
    """
    found = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "graphs", 0, 8))
    assert found["wrong"] == {}
    assert min(found["counts"]["apart"], found["counts"]["together"]) > 5
    lists = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "lists", "unlike"))
    assert lists == {"unlike": [[1, 1, 3], True, True]}


@pytest.mark.timeout(LIMIT_S + 20)
def test_torch_compile_measures_with_tensors_that_have_memory(interpreted, tmp_path):
    """While torch traces, in forward and backward; the program's random numbers are not drawn."""
    found = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "compiled"))
    assert found == [2, True, True, True, True]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_many_graphs_have_torchs_numbers(interpreted, tmp_path):
    """Also norms, an optimizer's step, rows that are long, and sums along and across them."""
    limit = {"timeout": 2 * LIMIT_S}
    graphs = interpreted("fusion_choice_worker.py", tmp_path, "graphs", 8, 40, **limit)
    assert json.loads(graphs)["wrong"] == {}
    lists = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "lists", **limit))
    assert all(equal for _, _, equal in lists.values())
    rows = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "rows", **limit))
    assert rows == []


@pytest.mark.timeout(LIMIT_S + 20)
def test_sizes_that_change_share_a_launch(interpreted, tmp_path):
    """One program for all sizes, in both orders of its programs; what has tiles stays apart."""
    found = json.loads(interpreted("fusion_choice_worker.py", tmp_path, "sizes"))
    assert found == {
        f"{name} {order}": [launches, parts, True]
        for name, launches, parts in (("sums", 1, 2), ("products", 2, 0), ("several", 1, 2))
        for order in ("together", "in turn")
    }


# ---------------------------------------------------------------------------------------- Decisions


class OnTheGpu:
    """What a tensor is to a launch: an address, and where it lies."""

    def __init__(self, dtype):
        self.dtype = getattr(torch, dtype)

    def data_ptr(self):
        return 1 << 40

    def get_device(self):
        return 0


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Generate a program for a GPU that is not there, on which launches take as long as a function
    of how many there are says; returns it, and the kernels that were timed.
    """

    def generated(machine, time, function, inputs, *, backend="cuda"):
        timed = []
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / machine))
        driver = None if backend is None else DryDriver(backend)

        def bench(call, quantiles):
            before = len(driver.launches)
            call()
            names = [launch.plan.kernel for launch in driver.launches[before:]]
            timed.append(names)
            return [float(time(names))] * len(quantiles)

        def given(examples, _device):
            return tuple(one if isinstance(one, int) else OnTheGpu(one[0]) for one in examples)

        monkeypatch.setattr(module_decorators, "_driver", lambda: driver)
        monkeypatch.setattr(autotuned_kernel, "open_first_driver", lambda _: driver)
        monkeypatch.setattr(tuner, "CudaClock", lambda *_: GivenClock(lambda call, quantiles: 1.0))
        monkeypatch.setattr(measured_fusion, "random_arguments", given)

        def here(_device, policy, sources):
            return FusionMeasurements("cpu", policy, driver, lambda: GivenClock(bench), sources)

        monkeypatch.setattr(FusionMeasurements, "here", here)
        program = generate(function, inputs, device="cuda", options=MEASURED)
        return program, timed

    return generated


def never(names):
    raise AssertionError(f"{names} were timed")


def launches_of(program):
    return sum(isinstance(step, Launch) for step in program.plan.steps)


@pytest.mark.toolchain
@pytest.mark.parametrize(("time", "launches"), [(len, 1), (lambda names: 9 - len(names), 2)])
def test_a_decision_is_a_record_that_a_bundle_brings(measured, time, launches):
    """Another machine with such a device measures nothing, nor does one without a device; another
    device does.
    """
    with bundler.recording() as recording:
        program, timed = measured("first", time, both, ROWS)
    assert launches_of(program) == launches
    assert timed
    bundle = program.build(["cuda:90"])
    records = [record for record, _ in program.decisions]
    assert {record.found_by for record in records} == {"fusion"}
    for brought in (bundle, recording.collect()):
        assert {*records} <= {*brought.tuning_records}
    # Without the records the rule decides where no device is.
    bare, _ = measured("bare", never, both, ROWS, backend=None)
    assert (launches_of(bare), bare.decisions) == (1, ())
    for machine, backend in (("second", "cuda"), ("third", None)):
        measured(machine, never, lambda a: a + 1, ROWS, backend=backend)
        bundler.restore(bundle)
        again, timed = measured(machine, never, both, ROWS, backend=backend)
        assert again.sources == program.sources
        assert timed == []
        assert {record for record, _ in again.decisions} == {*records}
    _, timed = measured("second", time, both, ROWS, backend="hip")
    assert timed


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("preferred", "launches", "turned"), [("apart", 3, False), ("together", 1, False), (1, 1, True)]
)
def test_a_shared_launch_is_measured_in_both_orders(measured, preferred, launches, turned):
    """And each kernel by itself; the form that takes least time is launched."""
    order = ["apart", "together", 1]
    left = list(order)
    program, _ = measured("x", lambda _: 1.0 if left.pop(0) == preferred else 2.0, unlike, LISTS)
    assert (launches_of(program), left) == (launches, [])
    assert any(kernel.text.in_turn for kernel in program.kernels.values()) is turned


@pytest.mark.toolchain
def test_a_kernel_that_spills_registers_is_not_launched(measured, monkeypatch):
    """Though it would be faster; the record says why it has no time."""
    monkeypatch.setattr(measured_fusion, "usage_of", lambda *_: Usage(255, 9))
    program, timed = measured("x", len, both, ROWS)
    assert launches_of(program) == 2
    assert all(len(names) > 1 for names in timed)
    reasons = {t.reason for _, tuning in program.decisions for t in tuning.timings if t.reason}
    assert all("register spilling: 9 words, expected at most 8" in one for one in reasons)
    assert reasons
    monkeypatch.setattr(measured_fusion, "usage_of", lambda *_: Usage(255, 8))
    assert launches_of(measured("y", len, both, ROWS)[0]) == 1


@pytest.mark.toolchain
def test_so_many_are_measured_and_what_asserts_is_not(measured, monkeypatch):
    """The rule decides the others: an index computed of random numbers could be none."""
    monkeypatch.setattr(measured_choices, "_MOST_MEASURED", 1)
    program, _ = measured("x", len, lambda a, b: (*both(a), *both(b.exp())), [*ROWS, *ROWS])
    assert len(program.decisions) == 1
    program, timed = measured(
        "y",
        never,
        lambda table, at: both(table[at].exp()),
        [torch.empty(50, 2000), torch.zeros(64, dtype=torch.int64)],
    )
    assert (timed, program.decisions) == ([], ())
    assert "device_assert" in "".join(program.sources.values())


# --------------------------------------------------------------------------------------- The policy


def test_the_setting_is_part_of_a_graphs_key_and_of_no_kernel(monkeypatch):
    """A kernel is the same however it was decided; a graph's program is of the device."""
    module = trace(both, ROWS, dynamic=False, device="cuda")
    module.meta.clear()
    keys = {graph_key(module, one).digest for one in (GenerateOptions(), MEASURED)}
    monkeypatch.setattr(measured_choices, "open_first_driver", lambda _: DryDriver("cuda"))
    keys.add(graph_key(module, MEASURED).digest)
    assert len(keys) == 3
    assert graph_key(module, GenerateOptions()).digest in keys
    assert generate(both, ROWS, options=MEASURED).sources == generate(both, ROWS).sources


def test_nothing_is_measured_for_a_deterministic_program():
    """It is refused beside the policy, and left out after torch's own switch."""
    with pytest.raises(ConfigError, match="measured_fusion asks for one"):
        ProgramPolicy(deterministic=True, measured_fusion=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"benchmark_fusion": True}, True),
        ({"benchmark_combo_kernel": True}, True),
        ({"benchmark_combo_kernel": False, "benchmark_fusion": True}, True),
        ({"measured_fusion": True}, True),
        ({"benchmark_fusion": False}, False),
    ],
)
def test_torchs_names_of_the_setting(monkeypatch, options, expected):
    """Both of torch's settings are one here."""
    seen = []

    def compiled(module, inputs, *, options, **_):
        seen.append(options.policy.measured_fusion)
        return make_boxed_func(module.forward)

    monkeypatch.setattr("bundler.codegen.torch_backend.compile_graph", compiled)
    torch._dynamo.reset()
    torch.compile(lambda a: a + 1, backend="triton_bundler", options=options)(torch.zeros(8))
    assert seen == [expected]


def test_a_value_that_is_none_is_refused():
    """As of every other setting."""
    with pytest.raises(ConfigError, match="benchmark_fusion=1"):
        triton_bundler(None, [], options={"benchmark_fusion": 1})


# -------------------------------------------------------------------------------------------- A GPU


@pytest.mark.gpu
def test_a_gpu_decides_and_a_second_time_nothing_is_measured(tmp_path, monkeypatch):
    """Numbers are eager torch's; records have times of both forms."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    rows = torch.randn(4096, 4096, device="cuda")
    lists = [torch.randn(size, device="cuda") for size in (3000, 5000, 4000)]

    def function(a, *given):
        return torch.softmax(a, -1), a.sum(0), *unlike(*given)

    program = generate(function, [rows, *lists], options=MEASURED)
    for result, expected in zip(program.run(rows, *lists), function(rows, *lists), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
    assert program.decisions
    assert all(
        sum(t.time_ns is not None for t in tuning.timings) > 1 for _, tuning in program.decisions
    )
    monkeypatch.setattr(measured_choices, "CudaClock", never)
    again = generate(function, [rows, *lists], options=MEASURED)
    assert again.sources == program.sources
