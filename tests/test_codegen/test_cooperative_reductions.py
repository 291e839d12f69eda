# SPDX-License-Identifier: Apache-2.0
"""Reductions of few long rows whose programs share rows and wait for each other: their numbers, and
that none is launched where it could wait for ever, or with counters that another launch has.
"""

import ctypes
import dataclasses
import json
import re
import struct

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import bundler  # noqa: E402
from bundler.codegen import module_decorators  # noqa: E402
from bundler.codegen.emit import device_of  # noqa: E402
from bundler.codegen.program import (  # noqa: E402
    GenerateOptions,
    ProgramPolicy,
    _CheckingLauncher,
    _JitLauncher,
    generate,
)
from bundler.compile.source_modules import source_module  # noqa: E402
from bundler.errors import FormatError  # noqa: E402
from bundler.format.bundle_union import merge  # noqa: E402
from bundler.format.entries import Target  # noqa: E402
from bundler.runtime import DeviceMemory, DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Allocate,
    Cooperation,
    Launch,
    read_plan,
)
from bundler.runtime.program.program_summary import summary_of  # noqa: E402
from bundler.runtime.tuning import autotuned_kernel, tuner  # noqa: E402
from bundler.runtime.tuning.benchmark import GivenClock  # noqa: E402
from bundler.toolchain.torch_counters import TorchCounters  # noqa: E402

ROWS, ROW = 2, 1 << 17
FORCED, MEASURED, FIXED = (
    GenerateOptions(policy=ProgramPolicy(**policy))
    for policy in (
        {"cooperative_reductions": True},
        {"max_autotune": True},
        {"cooperative_reductions": True, "deterministic": True},
    )
)


def total(x):
    return x.sum(1)


def program_of(function=total, sizes=(ROWS, ROW), options=FORCED, **how):
    return generate(
        function, [torch.empty(sizes, device="meta")], device="cuda", options=options, **how
    )


def cooperations(program):
    return [step for step in program.plan.steps if isinstance(step, Cooperation)]


# ------------------------------------------------------------------------------------------ Numbers


@pytest.mark.slow
def test_each_form_has_the_numbers_of_torch(interpreted):
    """One launch by one program a row, and by several that find what the others stored; several
    launches. Rows of odd lengths and of fewer elements than parts, with NaN and infinities.
    """
    found = json.loads(interpreted("cooperative_worker.py"))
    assert len(found) == 12
    assert {name: one["wrong"] for name, one in found.items() if one["wrong"]} == {}
    assert all(one["launches"] > 2 for one in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (total, (4, 4 << 20)),
        (lambda x: torch.softmax(x, -1), (2, 1 << 20)),
        (lambda x: torch.var_mean(x, 1), (8, 500_000)),
        (lambda x: (x.argmax(1), x.amin(1), (x > 4).any(1)), (3, 300_001)),
        (lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]), (2, 1 << 20)),
    ],
    ids=["sum", "softmax", "variance", "extremes", "norm"],
)
def test_programs_that_share_rows_have_equal_bits_in_each_call(function, sizes, graphs):
    """On a GPU: 200 calls, on two streams in turns and at once, and as graphs."""
    x = torch.randn(sizes, device="cuda")
    options = dataclasses.replace(FORCED, graphs=graphs)
    program = generate(function, [x], options=options)
    assert len(cooperations(program)) == 1
    assert program.modules[cooperations(program)[0].launch.kernel].run_at_once(sizes[0])
    leaves = torch.utils._pytree.tree_leaves
    first = [one.clone() for one in leaves(program.run(x))]
    for one, exact in zip(first, leaves(function(x.double())), strict=True):
        torch.testing.assert_close(one.double(), exact.double(), rtol=1e-4, atol=1e-5)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    torch.cuda.synchronize()
    for call in range(200):
        with torch.cuda.stream(streams[call % 3]):
            again = leaves(program.run(x))
        if call % 20 == 0:
            torch.cuda.synchronize()
            assert all(map(torch.equal, again, first))
    torch.cuda.synchronize()


# -------------------------------------------------------------------------------------------- Plans


@pytest.mark.parametrize(
    ("function", "sizes", "options", "shared"),
    [
        (total, (ROWS, ROW), FORCED, 1),
        (total, (ROWS, ROW), MEASURED, 1),
        (total, (ROWS, ROW), FIXED, 1),
        (total, (ROWS, ROW), GenerateOptions(), 0),
        (total, (16, 1 << 21), FORCED, 1),
        (total, (16, 1 << 20), FORCED, 0),
        (total, (17, 1 << 21), FORCED, 0),
        (lambda x: x.sum(0), (ROW, ROWS), FORCED, 0),
        (lambda x: x.sub_(x.sum(1, keepdim=True)), (ROWS, ROW), FORCED, 0),
        (lambda x: torch.softmax(x, -1), (ROWS, ROW), FORCED, 1),
        (lambda x: x.argmax(), (ROWS, ROW), FORCED, 1),
    ],
)
def test_few_long_rows_along_memory_are_shared_where_that_was_asked_for(
    function, sizes, options, shared
):
    """The form of several launches is there too. What changes an input cannot be run again."""
    program = program_of(function, sizes, options)
    assert len(cooperations(program)) == shared
    for step in cooperations(program):
        assert step.measured is (options is MEASURED)
        assert sum(isinstance(one, Launch) for one in step.together) == 1
        assert any(isinstance(one, Launch) for one in step.apart)
    assert read_plan(program.plan.to_json()) == program.plan
    assert summary_of("x", program.plan).launches == sum(
        isinstance(one, Launch) for one in program.plan.apart.steps
    )


def test_programs_that_do_not_wait_reduce_pieces():
    """A maximum, a sum, and a position in two launches each, and what is computed of the former."""
    for function, count in ((lambda x: torch.softmax(x, -1), 5), (lambda x: x.argmax(1), 2)):
        (step,) = cooperations(program_of(function))
        assert sum(isinstance(one, Launch) for one in step.apart) == count


def test_rows_of_changing_length_are_cut_into_pieces():
    """Programs cannot be counted before the call."""
    program = generate(total, [torch.empty(ROWS, ROW)], dynamic=True, options=FORCED)
    assert cooperations(program) == []


def test_norms_of_a_list_still_share_launches():
    """One launch for each tensor would be more than two for all."""
    tensors = [torch.empty(1 << 16, device="meta") for _ in range(6)]
    program = generate(
        lambda *all_: torch._foreach_norm(list(all_)), tensors, device="cuda", options=MEASURED
    )
    assert cooperations(program) == []
    assert sum(isinstance(step, Launch) for step in program.plan.steps) == 2


def test_what_is_computed_around_them_is_part_of_the_one_launch():
    """Row by row, and of each element; what others read is stored by one program of the row."""
    program = program_of(
        lambda x: ((x - x.mean(1, keepdim=True)).relu(), x.exp().sum(1).log(), x.amax(1))
    )
    (step,) = cooperations(program)
    assert [one for one in program.plan.steps if isinstance(one, Launch)] == []
    source = program.sources[step.launch.kernel]
    assert source.count("lib.grid_barrier") == 1
    stores = re.findall(r"tl.store\(out_ptr\d.*", source)
    turns = [re.search(r"tl.program_id\(0\) == (\d) % RSPLIT", one) for one in stores]
    assert sorted(int(turn[1]) for turn in turns if turn) == [0, 1] + [2] * (
        sum(map(bool, turns)) - 2
    )
    assert sum(turn is None for turn in turns) == 1


def broken(data, change):
    steps = data["steps"]
    (place,) = (n for n, (kind, _) in enumerate(steps) if kind == "Cooperation")
    change(steps[place][1], data)


@pytest.mark.parametrize(
    "change",
    [
        lambda step, _: step["together"].append(step["apart"][0]),
        lambda step, _: step["apart"].insert(0, ["Allocate", step["together"][0][1]]),
        lambda step, _: step["together"].pop(),
        lambda step, _: step.update(measured=1),
        lambda step, _: step["together"][1][1].update(count=0),
        lambda step, _: step["apart"].append(["Seeds", {"name": "s", "count": 1}]),
        lambda step, _: step["apart"].append(["Cooperation", step]),
        lambda step, data: data["kernels"][step["together"][2][1]["kernel"]].update(grid="Grid1D"),
        lambda step, _: step["together"][2][1]["sizes"].clear(),
    ],
)
def test_a_plan_whose_forms_cannot_be_is_refused(change):
    """Each leaves what was there, and one launch waits, for as many rows as are known."""
    data = json.loads(program_of().plan.to_json())
    read_plan(json.dumps(data).encode())
    kept = json.loads(json.dumps(data))
    try:
        broken(data, change)
        raw = json.dumps(data)
    except ValueError:  # a step in itself
        (step,) = (one for kind, one in kept["steps"] if kind == "Cooperation")
        step["apart"].append(["Cooperation", json.loads(json.dumps(step))])
        raw = json.dumps(kept)
    with pytest.raises(FormatError):
        read_plan(raw.encode())


# --------------------------------------------------------------------------------------- Candidates


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
@pytest.mark.parametrize(("rows", "row"), [(1, 1 << 24), (3, 1 << 18), (8, 500_000), (16, 1 << 21)])
def test_no_candidate_has_more_programs_than_multiprocessors(target, rows, row):
    """One that did not run would keep the others waiting for ever; parts are as many as a workspace
    has room for.
    """
    program = program_of(sizes=(rows, row))
    (step,) = cooperations(program)
    module = program.modules[step.launch.kernel]
    device = device_of(Target.parse(target))
    configs = module.on(device).configs
    (spec,) = (one.spec for one in step.together if isinstance(one, Allocate))
    for config in configs:
        blocks = config.kwargs
        programs = blocks["RSPLIT"] * -(-rows // blocks["XBLOCK"])
        assert 1 < programs <= device.multiprocessors
        assert rows * blocks["RSPLIT"] <= spec.sizes[0]
    assert module.compile_options["launch_cooperative_grid"]


def test_a_deterministic_program_has_one_candidate():
    """And no measurement decides about its form."""
    (step,) = cooperations(program := program_of(options=FIXED))
    module = program.modules[step.launch.kernel]
    assert len(module.on(device_of(Target.parse("cuda:90"))).configs) == 1
    assert not step.measured


# ----------------------------------------------------------------------------------------- Launches


def measured_program():
    """Return a program in which a measurement decides, of kernels with few candidates."""
    program = program_of()
    steps = [
        dataclasses.replace(step, measured=True) if isinstance(step, Cooperation) else step
        for step in program.plan.steps
    ]
    plan = dataclasses.replace(program.plan, steps=tuple(steps))
    return dataclasses.replace(program, plan=plan)


@pytest.fixture(scope="module")
def built():
    """Programs for both makers."""
    programs = {"forced": program_of(), "measured": measured_program()}
    return {name: one.build(["cuda:90", "hip:gfx942"]) for name, one in programs.items()}


def rows_in(memory):
    return memory.allocate("float32", (ROWS, ROW), (ROW, 1))


def launched(bundle, driver, calls=1):
    """Return the kernels that a replay launched, and check what they were given."""
    memory = DeviceMemory(driver=driver)
    program = load_program(bundle, memory=memory, driver=driver)
    x = rows_in(memory)
    for _ in range(calls):
        program(x)
    return driver.launches


@pytest.mark.toolchain
def test_a_replay_launches_all_programs_at_once_with_counters_of_zeros(built, monkeypatch):
    """In each call anew, in the order of the stream."""
    driver = DryDriver("cuda")
    seen, filled = [], {}
    record = driver.record

    def noted(launch):
        # Pointers come first: input, result, workspace, counters.
        address = struct.unpack_from("<4Q", launch.parameters)[3]
        seen.append((ctypes.string_at(address, 4 * ROWS), filled.get(address)))
        record(launch)

    driver.record = noted
    pool = type(driver.pool(0))
    fill = pool.fill

    def remembered(self, address, byte, size_bytes, stream):
        filled[address] = (byte, size_bytes, stream)
        fill(self, address, byte, size_bytes, stream)

    monkeypatch.setattr(pool, "fill", remembered)
    launches = launched(built["forced"], driver, calls=3)
    assert [launch.plan.cooperative for launch in launches] == [True] * 3
    assert {launch.grid for launch in launches} == {(64, ROWS, 1)}
    assert seen == [(bytes(4 * ROWS), (0, 4 * ROWS, 0))] * 3


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("name", "properties", "backend"),
    [
        ("forced", {"multiprocessors": 114}, "cuda"),
        ("forced", {"cooperative": False}, "cuda"),
        ("forced", {}, "hip"),
        ("measured", {}, "cuda"),
    ],
)
def test_launches_that_do_not_wait_run_elsewhere(built, name, properties, backend):
    """On fewer multiprocessors than programs, where drivers launch none such or nobody tried it,
    and where a measurement was to decide and there is none.
    """
    plain = DryDriver(backend).properties(0)
    driver = DryDriver(backend, properties=dataclasses.replace(plain, **properties))
    launches = launched(built[name], driver)
    assert [launch.plan.cooperative for launch in launches] == [False, False]


@pytest.mark.toolchain
def test_an_allocator_without_counters_runs_launches_that_do_not_wait(built):
    """It may not know how to make some ready."""
    driver = DryDriver("cuda")
    memory = DeviceMemory(driver=driver)

    class Plain:
        allocate, view = staticmethod(memory.allocate), staticmethod(memory.view)

    load_program(built["forced"], memory=Plain(), driver=driver)(rows_in(memory))
    assert len(driver.launches) == 2


def test_a_bundle_for_amd_has_no_kernel_that_waits(built):
    """Nobody has tried it there."""
    for bundle in built.values():
        waiting = [k for k in bundle.kernels if str(k.target) == "hip:gfx942"]
        assert len(waiting) == 2
        assert len(bundle.kernels) == 5


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A GPU that is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    driver = DryDriver("cuda")

    def launch(call, quantiles):
        call()
        return [1.0] * len(quantiles)

    monkeypatch.setattr(module_decorators, "_driver", lambda: driver)
    monkeypatch.setattr(autotuned_kernel, "open_first_driver", lambda _: driver)
    monkeypatch.setattr(tuner, "CudaClock", lambda *_: GivenClock(launch))
    return driver


def run(program, driver, launcher=_JitLauncher):
    """Run a program; returns what it launched behind what a tuner tried."""
    memory = DeviceMemory(driver=driver)
    modules = {}
    for name, text in program.sources.items():
        source = source_module(text)
        source.unload()  # what another test made of it is bound to that test's GPU
        modules[name] = getattr(source.load(), name)
    runner = program.runner(memory, launcher(modules, program.plan.kernels))
    x = rows_in(memory)
    runner(x)
    driver.launches.clear()
    runner(x)
    return [launch.plan.kernel for launch in driver.launches]


@pytest.mark.toolchain
def test_a_program_here_launches_all_programs_at_once(gpu):
    """Not where it looks for NaN in what kernels were given, which a workspace may hold."""
    program = program_of(options=FIXED)
    (step,) = cooperations(program)
    assert run(program, gpu) == [step.launch.kernel]
    assert gpu.launches[0].plan.cooperative
    assert gpu.launches[0].grid == (64, ROWS, 1)
    assert run(program, gpu, _CheckingLauncher) == [*step.kernels[1:]]


@pytest.mark.toolchain
@pytest.mark.parametrize("waiting_is_faster", [True, False])
def test_the_faster_form_is_a_record_that_a_bundle_brings(
    gpu, built, tmp_path, monkeypatch, waiting_is_faster
):
    """The first call measures both; a replay measures nothing."""
    timed = []

    def measured(form, args):
        form(*args)
        timed.append(gpu.launches[-1].plan.kernel)
        return float(gpu.launches[-1].plan.cooperative is not waiting_is_faster)

    monkeypatch.setattr(module_decorators, "_time_in_place", measured)
    program = measured_program()
    (step,) = cooperations(program)
    with bundler.recording() as recording:
        chosen = run(program, gpu)
    expected = [step.launch.kernel] if waiting_is_faster else [*step.kernels[1:]]
    assert chosen == expected
    assert len(timed) == 2
    brought = recording.collect()
    driver = DryDriver("cuda")
    launches = launched(merge([built["measured"], brought]), driver)
    assert [launch.plan.kernel for launch in launches] == expected


# ----------------------------------------------------------------------------------------- Counters


class Streams:
    """Stands for torch: a current stream with a number, which may be captured."""

    int32 = torch.int32

    def __init__(self):
        self.cuda, self.stream_id, self.captured, self.waited = self, 0, False, 0

    def current_stream(self, _device):
        return self

    def is_current_stream_capturing(self):
        return self.captured

    def synchronize(self):
        self.waited += 1

    def zeros(self, count, *, dtype, device):
        return torch.zeros(count, dtype=dtype)


def test_launches_that_may_run_side_by_side_have_counters_of_their_own():
    """One of torch's streams has the same in each launch; a captured launch, and one on a stream of
    another library, has new ones.
    """
    streams = Streams()
    counters, places = TorchCounters(streams, "cuda:0"), []

    def taken(number=0, captured=False, count=4):
        streams.stream_id, streams.captured = number, captured
        found = counters(count)
        assert found.numel() >= count
        assert not found.any()
        assert found.data_ptr() % 16 == 0
        places.append(found)
        return found.data_ptr()

    early = taken(captured=True)
    default, one, other = taken(), taken(3), taken(35)
    assert (taken(), taken(3), taken(35)) == (default, one, other)
    captured = [taken(number, captured=True) for number in (0, 3, 3)]
    foreign = [taken(1 << 20), taken(1 << 20), taken(count=100)]
    everything = [early, default, one, other, *captured, *foreign]
    assert len({*everything}) == len(everything)
    assert streams.waited == 1
    # When there are no more, new ones: never some that another launch has.
    last = [taken(captured=True) for _ in range(1100)]
    assert len({*everything, *last}) == len(everything) + 1100
    assert taken(3) == one
