# SPDX-License-Identifier: Apache-2.0
"""Repeated calls on a `DeviceMemory` as graphs of the driver: a plan of two kernels, which numpy
computes in the memory of a `DryDriver`.
"""

import ctypes
import gc
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import ConfigError, DriverError
from bundler.runtime import DeviceMemory, DryDriver
from bundler.runtime.program.bound_plan import BoundPlan
from bundler.runtime.program.bundle_programs import CheckedMemory
from bundler.runtime.program.graph_replay import GraphRunner
from bundler.runtime.program.program_plan import (
    Allocate,
    Input,
    KernelEntry,
    Launch,
    Output,
    ProgramPlan,
    Release,
    TensorSpec,
)
from bundler.runtime.program.workspace import Workspace

ROW = TensorSpec("float32", (64,), (1,))
TAIL = TensorSpec("float32", (60,), (1,), 4)


def plan(steps, outputs, inputs=(("x", False), ("state", True))):
    """Return a plan over rows of numbers."""
    return ProgramPlan(
        tuple(Input(name, ROW, changed=changed, aligned=True) for name, changed in inputs),
        {},
        steps,
        tuple(outputs),
        {"add": KernelEntry("Grid1D", ("a", "b", "out", "xnumel"))},
        (),
    )


# state += x; twice = state + state, of which the results are all and a part.
STEPS = (
    Launch("add", ("@x", "@state", "@state", 64), {}),
    Allocate("twice", ROW),
    Allocate("first", ROW),
    Launch("add", ("@state", "@state", "@first", 64), {}),
    Allocate("second", ROW),
    Launch("add", ("@first", "@x", "@second", 64), {}),
    Release("first"),
    Launch("add", ("@second", "@x", "@twice", 64), {}),
    Release("second"),
)
PLAN = plan(STEPS, [Output("twice"), Output("twice", TAIL), Output("state")])


class Launcher:
    """Adds, once the stream comes to it; an address is all that it is given, as kernels are."""

    def __init__(self, memory):
        self.memory, self.launches, self.refusal = memory, 0, None

    def bound(self, _name, _sizes):
        def launch(*arguments):
            *tensors, _ = arguments
            if self.refusal and self.memory.stream != 7:
                raise self.refusal
            addresses = [one.data_ptr() for one in tensors]
            self.memory.pool.given(self.memory.stream, partial(add, addresses))

        def add(addresses):
            self.launches += 1
            a, b, out = ((ctypes.c_float * 64).from_address(one) for one in addresses)
            out[:] = [one + other for one, other in zip(a, b, strict=True)]

        return launch


@pytest.fixture
def memory():
    return DeviceMemory(driver=DryDriver(), stream=7)


def runner(memory, of=PLAN):
    launcher = Launcher(memory)
    return GraphRunner(of, launcher, CheckedMemory(memory)), launcher


PLACES = np.arange(64, dtype="float32")


def row(memory, number):
    return memory.put(number * PLACES)


def right(memory, results, x, state):
    """Compare with what numpy says; returns the state that comes next."""
    state = state + x
    expected = (2 * state + 2 * x) * PLACES
    assert memory.array(results[0]).tolist() == expected.tolist()
    assert memory.array(results[1]).tolist() == expected[4:].tolist()
    assert memory.array(results[2]).tolist() == (state * PLACES).tolist()
    return state


def test_repeated_calls_are_one_launch_of_a_graph(memory):
    """With inputs at rest nothing is allocated or copied; the state is changed in place."""
    run, launcher = runner(memory)
    x, state, known = row(memory, 1), row(memory, 0), 0
    for _ in range(8):
        results = run(x, state)
        assert results[2].address == state.address
        known = right(memory, results, 1, known)
        del results
    assert (run.graph_use.captures, run.graph_use.replays, run.graph_use.refusal) == (1, 5, "")
    assert launcher.launches == 8 * 4
    before = memory.pool.allocations
    results = run(x, state)
    assert memory.pool.allocations == before
    right(memory, results, 1, known)


def test_results_are_the_callers_for_as_long_as_it_has_them(memory):
    """A result that is kept, or a view of it, is not written over: copies are returned then."""
    run, _ = runner(memory)
    x, state, kept, known = row(memory, 1), row(memory, 0), [], 0
    for number in range(12):
        results = run(x, state)
        known = right(memory, results, 1, known)
        kept.append((results[number % 2], (2 * known + 2) * PLACES[4 * (number % 2) :]))
        del results
    for result, expected in kept:
        assert memory.array(result).tolist() == expected.tolist()
    assert run.graph_use.replays >= 6
    assert run.graph_use.captures == 2


def test_inputs_that_move_are_copied_and_written_back(memory):
    """Until one comes to rest; what the program changes is changed where the caller has it."""
    run, _ = runner(memory)
    held = []
    for number in range(12):
        x, state = row(memory, number), row(memory, 10 * number)
        held.append((x, state))  # so that each lies elsewhere
        right(memory, run(x, state), number, 10 * number)
        assert memory.array(state)[63] == 63 * 11 * number
        assert memory.array(x)[2] == 2 * number
    assert (run.graph_use.captures, run.graph_use.replays) == (1, 9)


def test_what_a_graph_was_not_captured_for_is_refused(memory):
    """An input with other sizes at the same address, and one of another kind."""
    run, _ = runner(memory)
    x, state, known = row(memory, 1), row(memory, 0), 0
    for _ in range(5):
        known = right(memory, run(x, state), 1, known)
    for wrong in (memory.view(x, (32,), (1,), 0), memory.view(x, (64,), (0,), 0)):
        with pytest.raises(ConfigError, match="input 0 of the program"):
            run(wrong, state)
    there = np.ones(64, "float32")
    results = run(there, state)
    assert memory.array(results[2]).tolist() == (known * PLACES + 1).tolist()


def test_everything_is_given_back(memory):
    """Graphs, their memory, and the streams that they were captured on; a result outlives its
    graph.
    """
    pool, known = memory.pool, 0
    run, launcher = runner(memory)
    x, state = row(memory, 1), row(memory, 0)
    for _ in range(6):
        results = None
        results = run(x, state)
        known = right(memory, results, 1, known)
    assert (len(pool.graphs), run.graph_use.captures) == (1, 1)
    del run, launcher
    gc.collect()
    assert not pool.graphs
    assert memory.array(results[1])[7] == 11 * (2 * known + 2)
    assert len(pool.live) > 2
    del results
    assert set(pool.live) == {x.address, state.address}
    assert not pool.streams


def test_what_cannot_be_captured_runs_step_by_step(memory):
    """The call that is captured has its results all the same, and the capture has ended."""
    run, launcher = runner(memory)
    launcher.refusal = DriverError("no such thing in a graph")
    x, state, known = row(memory, 1), row(memory, 0), 0
    for _ in range(5):
        known = right(memory, run(x, state), 1, known)
    assert (run.graph_use.captures, run.graph_use.replays) == (0, 0)
    assert run.graph_use.refusal == "DriverError: no such thing in a graph"
    assert not memory.pool.graphs
    assert memory.stream == 7


def test_a_capture_of_somebody_else_is_left_alone(memory):
    """While another library captures the stream, calls are a part of its graph."""
    run, _ = runner(memory)
    x, state, known = row(memory, 1), row(memory, 0), 0
    for _ in range(5):
        known = right(memory, run(x, state), 1, known)
    memory.pool.begin_capture(7)
    results = run(x, state)
    graph = memory.pool.end_capture(7)
    assert memory.array(state)[1] == known
    memory.pool.launch_graph(graph, 7)
    right(memory, results, 1, known)
    assert run.graph_use.replays == 2


def test_buffers_between_steps_lie_in_one_allocation(memory):
    """Those that are not there at once have one place, and results none."""
    found = Workspace(PLAN, memory, lambda spec: (spec.sizes, spec.strides))
    assert (found.buffers, found.size_bytes) == (["first", "second"], 512)
    held, (first, second) = found.taken()
    assert {first.address, second.address} == {held.address, held.address + 256}
    later = plan(
        (*STEPS[:4], Release("first"), Allocate("second", ROW), *STEPS[7:]), [Output("twice")]
    )
    assert Workspace(later, memory, lambda spec: (spec.sizes, spec.strides)).size_bytes == 256


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12), st.data())
def test_buffers_that_are_there_at_once_do_not_overlap(drawn, data):
    """Whatever is allocated and released when; and no more is taken than without reuse."""
    steps, live = [], []
    for number, (count, releases) in enumerate(drawn):
        spec = TensorSpec("float32", (count,), (1,))
        steps.append(Allocate(f"b{number}", spec))
        live.append(f"b{number}")
        if releases:
            steps.append(Release(live.pop(data.draw(st.integers(0, len(live) - 1)))))
    memory = DeviceMemory(driver=DryDriver())
    found = Workspace(plan(steps, []), memory, lambda spec: (spec.sizes, spec.strides))
    held, tensors = found.taken()
    lies = dict(zip(found.buffers, tensors, strict=True))
    there: dict[str, range] = {}
    most = 0
    for step in steps:
        if isinstance(step, Release):
            del there[step.name]
            continue
        start = lies[step.name].address - held.address
        here = range(start, start + 4 * lies[step.name].shape[0])
        assert start % 256 == 0
        assert here.stop <= found.size_bytes
        assert all(max(here.start, o.start) >= min(here.stop, o.stop) for o in there.values())
        there[step.name] = here
        most = max(most, sum(len(one) for one in there.values()))
    assert most <= found.size_bytes <= sum(-(-4 * count // 256) * 256 for count, _ in drawn)


def test_what_small_buffers_leave_a_large_one_takes(memory):
    """Two that are gone make room for one that is as large as both."""
    large = TensorSpec("float32", (128,), (1,))
    steps = [Allocate("a", ROW), Allocate("b", ROW), Release("a"), Release("b")]
    found = Workspace(
        plan([*steps, Allocate("c", large)], []), memory, lambda spec: (spec.sizes, spec.strides)
    )
    assert found.size_bytes == 512


def test_threads_that_run_one_plan_have_buffers_of_their_own(memory):
    """A call that begins while another runs allocates its own."""
    run, _ = runner(memory)
    bound = BoundPlan(run._environment, {})
    x, state = row(memory, 1), row(memory, 0)
    (one, mine), (other, theirs) = bound._workspace.taken(), bound._workspace.taken()
    assert one.address != other.address
    assert [each.address for each in theirs] == [other.address, other.address + 256]
    assert [each.address for each in mine] == [one.address, one.address + 256]
    values = bound.run([x, state], {}, None)
    assert memory.array(bound.results(values)[0])[3] == 12
