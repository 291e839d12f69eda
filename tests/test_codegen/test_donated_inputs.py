# SPDX-License-Identifier: Apache-2.0
"""Kernels of a backward graph write over what was saved for it, where nobody has that any more."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import fx  # noqa: E402
from torch._functorch import config  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from bundler.codegen import autograd_results, schedule  # noqa: E402
from bundler.codegen.autograd_results import _is_donated  # noqa: E402
from bundler.codegen.channels_last import DONATED, FREED  # noqa: E402
from bundler.codegen.donated_inputs import DonatedInputs, is_graph_kept, results_alone  # noqa: E402
from bundler.codegen.graph_key import graph_key  # noqa: E402
from bundler.codegen.loops.fusion import is_extern  # noqa: E402
from bundler.codegen.program import GenerateOptions, program_of_graph  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Allocate,
    Input,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    TensorSpec,
)

SPEC = TensorSpec("float32", (4, 8), (8, 1))


@pytest.mark.slow  # two processes compile models in the interpreter
def test_gradients_are_eager_torchs_and_what_others_have_is_left(interpreted, tmp_path):
    """So they are in another process, by programs that the first one kept."""
    for _ in range(2):
        found = json.loads(interpreted("donated_worker.py", tmp_path))
        for name in (
            "head",
            "twice",
            "not kept",
            "retained",
            "retained, not kept",
            "changing sizes",
        ):
            assert found[name] == [[], [0, 1]], name
        for name in ("head_returned", "head_seen", "head_of_copy", "changed", "outer"):
            assert found[name] == [[], [0, 0]], name
        assert all(found[f"{name} again"] == found[name] for name in ("head", "twice", "changed"))
        assert found["graphs"] == found["not donated"] == [[], [0, 0]]
        for name in ("chain", "chain_of_result"):
            assert found[f"graph {name}"] == [1, [True, True]]
        for name in ("read_later", "elsewhere", "written", "seen", "shown"):
            assert found[f"graph {name}"] == [0, [True, True]]
        assert found["unaligned"] == 0
        for calls, left in found["memory"]:
            assert calls == [[True, True, True]] * 2
            assert left
        assert found["failing"] == [[], ["Program", "FallbackCall"]]
        assert found["several"] == [True] * 3


# ------------------------------------------------------------------------------------ What is alone


def call(operator="aten.mm.default", outputs=("buf1",), **named):
    specs = (SPEC,) * len(outputs)
    return OperatorStep(operator, (), {}, outputs, len(outputs) == 1, specs, **named)


def plan_of(*steps, outputs, inputs=(), constants=()):
    return ProgramPlan(inputs, {}, steps, outputs, {}, constants)


@pytest.mark.parametrize(
    ("plan", "alone"),
    [
        (plan_of(Allocate("buf0", SPEC), outputs=(Output("buf0"),)), {0}),
        (plan_of(call(), outputs=(Output(None, size=3), Output("buf1", SPEC))), {1}),
        (plan_of(Allocate("buf0", SPEC), outputs=(Output("buf0"), Output("buf0", SPEC))), set()),
        (plan_of(inputs=(Input("arg0", SPEC),), outputs=(Output("arg0"),)), set()),
        (plan_of(constants=("constant0",), outputs=(Output("constant0"),)), set()),
        (plan_of(call("mine.kept.default"), outputs=(Output("buf1"),)), set()),
        (plan_of(call(outputs=("buf1", "buf2")), outputs=(Output("buf1"),)), set()),
        (
            plan_of(Allocate("buf0", SPEC), call(view=True), outputs=(Output("buf0"),)),
            set(),
        ),
    ],
    ids=["made", "called", "twice", "input", "constant", "user's", "several", "view"],
)
def test_a_result_is_alone_in_memory_that_the_program_made_for_it(plan, alone):
    assert results_alone(plan) == alone


class Known:
    """What AOTAutograd knows: one result of the caller's, and what is saved."""

    num_forward, num_symints_saved_for_bw = 1, 0

    def __init__(self, donated):
        self.bw_donated_idxs = donated


def marked(donated=(0, 1), steps=("buf0", "buf1", "buf2"), results=None, freed=(0, 1)):
    """Return which of two inputs of a backward graph are marked."""
    graph, values = fx.Graph(), results or [torch.empty(4) for _ in range(3)]
    nodes = [graph.placeholder(f"saved{number}") for number in range(3)]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    graph.output(tuple(nodes))
    known, inputs = Known(list(donated)), DonatedInputs()
    inputs.take(fx.GraphModule({}, graph), known)
    assert known.bw_donated_idxs == []
    made = [Allocate(name, SPEC) for name in steps]
    outputs = tuple(Output(name) for name in ("buf0", "buf1", "buf2"))
    inputs.filled_by(SimpleNamespace(plan=plan_of(*made, outputs=outputs)))
    backward = fx.Graph()
    given = [backward.placeholder(f"saved{number}") for number in (1, 2)]
    for number in freed:
        given[number].meta[FREED] = True
    inputs.mark(given)
    return {number for number, node in enumerate(given) if DONATED in node.meta}


def test_what_torch_donates_is_marked_where_it_is_alone_in_memory():
    """In the forward graph as torch traced it, and in its program."""
    assert marked() == {0, 1}
    assert marked(donated=[1]) == {1}
    assert marked(donated=[]) == set()
    assert marked(steps=("buf0", "buf2")) == {1}
    assert marked(freed=[0]) == {0}
    base = torch.empty(4)
    assert marked(results=[torch.empty(4), base, base.view(2, 2)]) == set()
    with config.patch(donated_buffer=False):
        assert marked() == set()


def test_nothing_is_marked_where_no_program_runs_forward():
    graph = fx.Graph()
    graph.output((graph.placeholder("one"),))
    inputs, known = DonatedInputs(), Known([0])
    inputs.take(fx.GraphModule({}, graph), known)
    node = fx.Graph().placeholder("one")
    node.meta[FREED] = True
    inputs.mark([node])
    assert DONATED not in node.meta


def test_a_graph_is_kept_for_another_pass_and_outside_of_any():
    found = []

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            found.append(is_graph_kept())
            return gradient

    result = Asked.apply(torch.ones(2, requires_grad=True)).sum()
    result.backward(retain_graph=True)
    result.backward()
    assert [*found, is_graph_kept()] == [True, False, True]


def program(plan):
    return SimpleNamespace(plan=plan)


FORWARD = plan_of(Allocate("buf0", SPEC), outputs=(Output("arg0"), Output("buf0"), Output("arg0")))
BACKWARD = plan_of(Overwrite("arg0"), inputs=(Input("arg0", SPEC), Input("arg1", SPEC)), outputs=())
OTHER = replace(BACKWARD, steps=(Overwrite("arg1"),))


def test_two_kept_programs_agree_on_what_is_donated():
    agree = [_is_donated([program(FORWARD), program(one)], Known([])) for one in (BACKWARD, OTHER)]
    assert agree == [True, False]
    assert _is_donated([program(FORWARD)], Known([]))
    symbols = Known([])
    symbols.num_symints_saved_for_bw = 1
    assert not _is_donated([program(FORWARD), program(BACKWARD)], symbols)


@pytest.mark.parametrize(("backward", "taken"), [(BACKWARD, True), (OTHER, False)])
def test_a_kept_result_whose_programs_do_not_agree_is_a_miss(monkeypatch, backward, taken):
    """The backward graph's would write over what somebody else has."""
    codes = [autograd_results.KeptCode(name) for name in ("forward", "backward")]
    parts = [SimpleNamespace(result=code) for code in codes]
    entry = SimpleNamespace(compiled_fw=parts[0], compiled_bw=parts[1], runtime_metadata=Known([]))
    plans = {"forward": FORWARD, "backward": backward}
    monkeypatch.setattr(autograd_results, "_read_entry", lambda _: entry)
    monkeypatch.setattr(autograd_results, "_program", lambda name, _: program(plans[name]))
    found = autograd_results.AutogradResult("0" * 64, None, lambda _: (list, list))
    assert found.look() is taken
    assert len(found.programs) == 2 * taken


def traced():
    def function(saved, other):
        return ((saved * 2) @ other,)

    return make_fx(function, tracing_mode="fake")(torch.empty(8, 8), torch.empty(8, 8))


def test_a_donated_input_is_in_the_key_of_a_program():
    """One that was generated for it writes there."""
    modules = [traced() for _ in range(2)]
    for module in modules:
        next(iter(module.graph.nodes)).meta[FREED] = True
    next(iter(modules[1].graph.nodes)).meta[DONATED] = True
    one, other = (graph_key(module, GenerateOptions()).digest for module in modules)
    assert one != other


def test_the_order_of_launches_knows_what_needs_no_memory(monkeypatch):
    found = []

    def noted(groups, _buffers, _hints, _kept, _freed, takes):
        found.extend(takes(group) for group in groups if not is_extern(group))
        return groups

    monkeypatch.setattr(schedule, "in_less_memory", noted)
    module = traced()
    next(iter(module.graph.nodes)).meta |= {FREED: True, DONATED: True}
    program_of_graph(module)
    assert [list(one.values()) for one in found] == [["arg0"]]
