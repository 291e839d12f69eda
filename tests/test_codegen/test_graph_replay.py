# SPDX-License-Identifier: Apache-2.0
"""Repeated calls as graphs, with a stand-in for CUDA graphs that is as unkind as they may be.

A launch of the stand-in writes into the memory of its results, and over the results of every graph
that was captured later, since those may lie where the launch keeps what it needs in between.
`tools.codegen suites` and `models --graphs` judge real graphs on a GPU.
"""

import itertools
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.codegen.torch_backend import triton_bundler  # noqa: E402
from bundler.errors import ConfigError  # noqa: E402
from bundler.runtime.program.graph_replay import GraphRunner  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Input,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    TensorSpec,
)
from bundler.toolchain.torch_memory import TorchGraphs, TorchMemory  # noqa: E402

_devices = itertools.count()
VECTOR = TensorSpec("float32", (4,), (1,))


class Graphs(TorchGraphs):
    """Captures on the CPU: a launch does again what was captured."""

    def __init__(self):
        self._torch, self._use_count = torch, torch._C._storage_Use_Count
        self._reinterpreted = torch._C._dynamo.guards._reinterpret_tensor
        self.device = f"stand-in {next(_devices)}"
        self.now, self.capturing = 7, False
        self.is_capturing = lambda: self.capturing
        self.is_grad_enabled = torch.is_grad_enabled
        self.old = 0
        #: Inputs that a capture must leave as they are.
        self.changed = []
        self._captured = []

    @property
    def age(self):
        return self.old

    def stream(self):
        return self.now

    def wait(self):
        pass

    def captured(self, run):
        assert not torch.is_grad_enabled()
        kept = [tensor.clone() for tensor in self.changed]
        results, again = run(), storages(run())
        for tensor, before in zip(self.changed, kept, strict=True):
            tensor.copy_(before)
        # What lies at the same address in both runs is an input.
        places = [n for n, one in enumerate(storages(results)) if at(one) != at(again[n])]
        mine = [storages(results)[place] for place in places]
        number = len(self._captured)
        self._captured.append(mine)

        def launch():
            found = storages(run())
            for later in itertools.chain(*self._captured[number + 1 :]):
                later.fill_(0x7F)
            for place, storage in zip(places, mine, strict=True):
                storage.copy_(found[place])

        return launch, results


def storages(results):
    return [one.untyped_storage() for one in results if isinstance(one, torch.Tensor)]


def at(storage):
    return storage.data_ptr()


class Memory(TorchMemory):
    """torch's memory of the host, with graphs."""

    def __init__(self, graphs):
        super().__init__("cpu")
        self._graphs = graphs

    def graphs(self):
        return self._graphs


def runner(function, examples, graphs=None, **options):
    """Return what runs a function of operators that are called, by graphs."""
    program = generate(function, examples)
    assert not program.kernels
    memory = Memory(graphs or Graphs())
    return GraphRunner(
        program.plan, None, memory, program.constants, memory.seeds, separate=False, **options
    )


def product(x, w):
    return (torch.mm(torch.mm(x, w), w),)


W = torch.randn(4, 4)


def inputs():
    return torch.randn(3, 4), W


def right(found, *given, function=product):
    for one, other in zip(found, function(*given), strict=True):
        torch.testing.assert_close(one, other)
    return found


def test_calls_that_repeat_are_one_launch_each():
    """Three calls run step by step, the third is captured; then inputs that move are copied, and
    the one that does not is read where it lies.
    """
    run, held = runner(product, inputs()), []
    for _ in range(8):
        x, w = inputs()
        held.append(x)  # so that each lies elsewhere
        right(run(x, w), x, w)
    assert (run.graph_use.captures, run.graph_use.replays) == (1, 5)
    W.add_(1)
    right(run(*(given := inputs())), *given)
    assert run.graph_use.replays == 6


def test_a_result_that_somebody_keeps_is_never_written_over():
    """A call whose graph would write over a result runs step by step; the graph is captured anew,
    and returns copies from then on.
    """
    run, kept = runner(product, inputs()), []
    for _ in range(12):
        x, w = inputs()
        kept.append((x, run(x, w)))
        for before, found in kept:
            right(found, before, w)
    assert run.graph_use.captures == 2
    assert run.graph_use.replays == 12 - 3 - 1


def test_copies_of_lazy_results_are_lazy_too():
    """Their numbers are the negative, or the conjugate, of what lies in memory."""

    def function(x, w):
        found = torch.linalg.solve(w, x.mT)  # called, for complex numbers
        return found.conj(), found.conj().imag, found

    def made(count):
        return torch.randn(3, count, dtype=torch.complex64), torch.eye(count) + 0j

    program = generate(function, made(4))
    graphs = Graphs()
    graphs.why_not = lambda *_: ""
    run = GraphRunner(program.plan, None, Memory(graphs), program.constants, separate=False)
    kept = []
    for _ in range(10):
        x, w = made(4)
        kept.append((x, run(x, w)))
        for before, found in kept:
            right(found, before, w, function=function)
            assert found[0].is_conj()
    assert run.graph_use.replays > 4


def test_results_that_are_stored_nowhere():
    """One without elements, and zeros that torch does not store: torch copies neither's memory."""
    graphs = Graphs()
    nothing, zeros = torch.empty(0, 3), torch._efficientzerotensor(2, 3)
    for found in (graphs.copies([nothing, zeros]), [graphs.same(nothing)(), graphs.same(zeros)()]):
        assert found[0].shape == (0, 3)
        assert torch.equal(found[1], torch.zeros(2, 3))


def test_inputs_of_a_dtype_that_torch_copies_one_by_one():
    """A list of complex32 is refused by the function that copies lists."""
    targets, sources = [torch.zeros(3)], [torch.ones(3)]

    def refusing(*_):
        raise NotImplementedError

    graphs = Graphs()
    graphs._torch = SimpleNamespace(_foreach_copy_=refusing)
    graphs.copy(targets, sources)
    assert torch.equal(targets[0], sources[0])


def test_a_view_of_a_result_keeps_it_too():
    """Who has a part of a result has its memory."""
    run, kept = runner(product, inputs()), []
    for _ in range(8):
        x, w = inputs()
        kept.append((run(x, w)[0][1:].t(), product(x, w)[0][1:].t()))
        for found, expected in kept:
            torch.testing.assert_close(found, expected)


def test_a_result_of_a_later_graph_is_not_written_over_either():
    """Graphs share memory: the first program's launch may write where the second has its results.
    Kept until after the first's next call, as gradients are, they are copies from then on.
    """
    graphs = Graphs()
    first, second = runner(product, inputs(), graphs), runner(product, inputs(), graphs)
    kept = None
    for _ in range(12):
        x, w = inputs()
        (middle,) = right(first(x, w), x, w)
        if kept is not None:
            right(kept[1], kept[0], w)
        kept = (middle.clone(), second(middle, w))
        del middle
        right(kept[1], kept[0], w)
    assert first.graph_use.replays > 5
    assert second.graph_use.replays > 3


def test_results_of_a_graph_that_is_gone_are_kept_as_well():
    """They may lie where an earlier graph writes, and no graph returns copies of them."""
    graphs = Graphs()
    first, second = runner(product, inputs(), graphs), runner(product, inputs(), graphs)
    for _ in range(4):
        x, w = inputs()
        first(x, w)
    for _ in range(4):
        x, w = inputs()
        kept = (x, second(x, w))
    assert second.graph_use.replays == 1
    del second
    for _ in range(4):
        right(first(*(given := inputs())), *given)
        right(kept[1], *(kept[0], W))


def test_an_input_that_moves_is_looked_for():
    """A graph reads an input where it lay; elsewhere, it is captured anew."""
    run = runner(product, inputs())
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    for _ in range(5):
        right(run(x, w), x, w)
    others = [torch.randn(4, 4) for _ in range(4)]
    for other in others * 3:
        right(run(x, other), x, other)
    assert run.graph_use.captures == 2
    assert run.graph_use.replays > 6


def test_an_input_that_comes_to_rest_is_read_in_place():
    """It is copied as long as it moves, and three launches longer."""
    run, copied = runner(product, inputs(), graphs := Graphs()), []
    graphs.copy = lambda targets, sources: (
        copied.append(len(targets)) or TorchGraphs.copy(graphs, targets, sources)
    )
    places = [torch.randn(3, 4) for _ in range(3)]
    for x in (*places, *[torch.randn(3, 4)] * 8):
        right(run(x, W), x, W)
    assert copied == [1, 1]
    assert run.graph_use.captures == 2


def test_an_input_that_moves_every_other_time_ends_up_copied():
    """It is not captured again and again."""
    run, spots = runner(product, inputs()), [torch.randn(3, 4) for _ in range(2)]
    for call in range(60):
        x = spots[call // 3 % 2]
        right(run(x, W), x, W)
    assert run.graph_use.captures < 5
    assert run.graph_use.replays > 30


def test_calls_without_gradients_take_the_short_way():
    """As those of torch.compile are; a list of inputs is emptied, whichever way a call goes."""
    run = runner(product, inputs())
    with torch.no_grad():
        for _ in range(8):
            given = list(inputs())
            expected = product(*given)
            torch.testing.assert_close(run.consume(given), expected)
            assert not given
        right(run(*(given := inputs())), *given)
        with pytest.raises(ConfigError, match="sizes"):
            run(torch.randn(5, 4), W)
        kept = [(x, run.consume([x, W])) for x in (inputs()[0] for _ in range(5))]
    for x, found in kept:
        right(found, x, W)
    assert run.graph_use.replays > 8


@pytest.mark.parametrize("moving", [False, True])
def test_what_a_call_changes_in_place_is_changed_once(moving):
    """Also in the call that is captured, and where the input is copied for the graph."""
    graphs = Graphs()
    step = OperatorStep(
        "aten.add_.Tensor",
        ({"buffer": "state", "spec": None}, {"buffer": "x", "spec": None}),
        {},
        (None,),
        True,
        (None,),
    )
    plan = ProgramPlan(
        (Input("state", VECTOR, changed=True), Input("x", VECTOR)),
        {},
        (step,),
        (Output("state"),),
        {},
    )
    run = GraphRunner(plan, None, Memory(graphs), separate=False)
    state, total, places = torch.zeros(4), torch.zeros(4), []
    for _ in range(8):
        if moving:
            places.append(state)
            state = state.clone()
        graphs.changed = [state]
        x = torch.randn(4)
        (found,) = run(state, x)
        total += x
        torch.testing.assert_close(state, total)
        assert found is state
    assert run.graph_use.replays == 5


def test_another_stream_runs_step_by_step():
    """A graph's memory belongs to the stream that it is launched on."""
    graphs = Graphs()
    run = runner(product, inputs(), graphs)
    for _ in range(4):
        right(run(*(given := inputs())), *given)
    graphs.now = 8
    right(run(*(given := inputs())), *given)
    graphs.now, graphs.capturing = 7, True
    right(run(*(given := inputs())), *given)
    assert run.graph_use.replays == 1


def test_graphs_of_before_a_capture_that_failed_are_captured_anew():
    """torch's generator has another state since, which they know nothing of."""
    graphs = Graphs()
    run = runner(product, inputs(), graphs)
    for call in range(8):
        graphs.old += call == 5
        right(run(*(given := inputs())), *given)
    assert (run.graph_use.captures, run.graph_use.replays) == (2, 4)


def test_inputs_are_checked_as_ever():
    """A graph is of one dtype, size and layout; what differs is refused, or run anew."""
    run = runner(product, inputs())
    for _ in range(5):
        run(*inputs())
    with pytest.raises(ConfigError, match="dtype float32"):
        run(torch.randn(3, 4, dtype=torch.float64), W)
    with pytest.raises(ConfigError, match="sizes"):
        run(torch.randn(5, 4), W)
    with pytest.raises(ConfigError, match="strides"):
        run(torch.randn(4, 3).t(), W)
    with pytest.raises(ConfigError, match="2 inputs"):
        run(W)
    lazy = torch._neg_view(torch.randn(3, 4))
    right(run(lazy, W), lazy, W)


def test_threads_share_a_runner():
    """Each gets the results of its own inputs."""
    run, wrong = runner(product, inputs()), []

    def calls():
        for _ in range(50):
            x = torch.randn(3, 4)
            (found,) = run(x, W)
            if not torch.allclose(found, product(x, W)[0], atol=1e-5):
                wrong.append(x)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert run.graph_use.replays


def test_what_fails_in_a_capture_runs_step_by_step():
    """And its refusal says why."""

    class Failing(Graphs):
        def captured(self, run):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    run = runner(product, inputs(), Failing())
    for _ in range(6):
        right(run(*(given := inputs())), *given)
    assert run.graph_use.replays == 0
    assert run.graph_use.refusal == (
        "RuntimeError: operation not permitted when stream is capturing"
    )


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: (torch.multinomial(x.abs(), 2),), "multinomial.default waits for the GPU"),
        (lambda x, w: (torch.linalg.inv(w),), "waits for the GPU"),
        (lambda x, w: (x.index_put((x[:, 0] > 0,), w[0]),), "waits for the GPU"),
    ],
    ids=["multinomial", "inverse", "mask"],
)
def test_what_waits_for_the_gpu_is_not_captured(function, reason):
    """A failed capture leaves the allocator in doubt, so it is not tried."""
    program = generate(function, inputs())
    run = GraphRunner(program.plan, lambda *_: None, Memory(Graphs()), program.constants)
    assert reason in run.graph_use.refusal


def test_what_writes_over_inputs_is_not_captured():
    """The next launch would read what the last one stored there."""
    plan = ProgramPlan((Input("x", VECTOR),), {}, (Overwrite("x"),), (), {})
    run = GraphRunner(plan, lambda *_: None, Memory(Graphs()))
    assert "writes over inputs" in run.graph_use.refusal


def test_a_memory_without_graphs():
    """Another library's is refused; torch's on the host has none, and runs as ever."""
    program = generate(product, inputs())
    with pytest.raises(
        ConfigError,
        match="expected a memory that has them, as DeviceMemory and TorchMemory, got Simple",
    ):
        GraphRunner(program.plan, None, SimpleNamespace(), program.constants)
    program = generate(product, inputs(), options=GenerateOptions(graphs=True))
    for _ in range(5):
        right(program.run(*(given := inputs())), *given)
    assert program.graph_use.replays == 0
    assert "does not run on a GPU" in program.graph_use.refusal
    assert generate(product, inputs()).graph_use is None


def test_modes_of_torch_compile():
    """`reduce-overhead` asks for graphs; another mode is refused by name."""
    programs = []

    def backend(module, given, **named):
        return triton_bundler(module, given, options={"programs": programs}, **named)

    found = torch.compile(product, backend=backend, mode="reduce-overhead")(*(given := inputs()))
    right(found, *given)
    assert programs[0].options.graphs
    with pytest.raises(ConfigError, match="'lite': expected one of default, reduce-over"):
        triton_bundler(None, [], mode="lite")
    with pytest.raises(ConfigError, match=r"verify, graphs, .*keep, True or False"):
        triton_bundler(None, [], options={"graphs": 1})


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=40))
def test_any_order_of_calls(calls):
    """Three programs, four inputs that come again, results kept or dropped: all stay right."""
    graphs = Graphs()
    runs = [runner(product, inputs(), graphs) for _ in range(3)]
    spots, kept = [torch.randn(3, 4) for _ in range(4)], []
    for number, place, keeps in calls * 2:
        x = spots[place]
        found = right(runs[number](x, W), x, W)
        if keeps:
            kept.append((x, found))
        else:
            kept = kept[1:]
        del found
        for before, one in kept:
            right(one, before, W)
