# SPDX-License-Identifier: Apache-2.0
"""`verify=True` compares a program with eager torch; what the generator cannot do, or fails at,
ends in a typed error or in torch's own run.
"""

import importlib
import json
import logging

import pytest

from bundler.codegen.graph_errors import user_line
from bundler.codegen.program import FallbackCall, GenerateOptions, Program, generate
from bundler.errors import ConfigError, UnsupportedOperator, WrongResult

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

# These import torch.
torch_backend = importlib.import_module("bundler.codegen.torch_backend")
trace = importlib.import_module("bundler.codegen.trace").trace
reference_graph = importlib.import_module("bundler.toolchain.reference_graph")
ReferenceGraph, difference = reference_graph.ReferenceGraph, reference_graph.difference
HERE = __file__


def sine(x):
    y = x + 1
    return torch.sin(y)  # the line


def compiled(function, *inputs, **options):
    """Return what a function gives through the backend, and the programs."""
    torch._dynamo.reset()
    programs = []
    called = torch.compile(
        function, backend=torch_backend.triton_bundler, options={"programs": programs, **options}
    )
    return called(*inputs), programs


@pytest.fixture
def broken(monkeypatch):
    """The lowering of the sine fails as nobody foresaw."""
    from bundler.codegen.lowerings import pointwise_lowerings

    def fail(*_):
        raise KeyError("spec")

    monkeypatch.setitem(pointwise_lowerings.POINTWISE, "sin", fail)


# --------------------------------------------------------------------- What the generator cannot do


def test_a_fault_of_a_lowering_is_an_error_with_operator_and_line(broken, caplog):
    """`generate` raises one of our errors, which says that it is internal; the log has the
    traceback.
    """
    with (
        caplog.at_level(logging.DEBUG, "bundler.codegen"),
        pytest.raises(
            UnsupportedOperator, match="internal error of the generator: KeyError: 'spec'"
        ) as found,
    ):
        generate(sine, [torch.ones(3)])
    assert found.value.operator == "aten.sin.default"
    assert found.value.internal
    assert found.value.line.startswith(f"{HERE}:")
    assert found.value.line.endswith("return torch.sin(y)  # the line")
    assert any(record.exc_info and record.exc_info[0] is KeyError for record in caplog.records)


def test_torch_compile_runs_a_graph_as_torch_has_it_after_a_fault(broken, caplog):
    """The result is eager torch's, there is one warning, and the reason is among the programs."""
    x = torch.randn(5)
    with caplog.at_level(logging.WARNING, "bundler.codegen"):
        result, programs = compiled(sine, x)
    assert torch.equal(result, sine(x))
    (only,) = programs
    assert isinstance(only, FallbackCall)
    assert "internal error of the generator: KeyError: 'spec'" in only.reason
    assert "return torch.sin(y)  # the line" in only.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("place", ["schedule_program", "modules"])
def test_faults_after_lowering_end_in_torchs_run_too(monkeypatch, place):
    """A schedule that fails an assertion, and text that Python refuses, are reasons."""

    def fail(*_, **__):
        raise AssertionError("no such loop")

    if place == "modules":
        monkeypatch.setattr(Program, "modules", property(fail))
    else:
        monkeypatch.setattr("bundler.codegen.program.schedule_program", fail)
        with pytest.raises(UnsupportedOperator, match=r"AssertionError: no such loop \(test_"):
            generate(sine, [torch.ones(3)])
    result, (only,) = compiled(sine, torch.ones(3))
    assert torch.equal(result, sine(torch.ones(3)))
    assert "AssertionError: no such loop" in only.reason


def test_a_graph_that_torch_cannot_take_apart_runs_as_it_is(monkeypatch):
    """What AOTAutograd raises is a reason, too."""

    def fail(*_, **__):
        def refuse(*_):
            raise RuntimeError("Please convert all Tensors to FakeTensors first")

        return refuse

    monkeypatch.setattr(torch_backend, "aot_autograd", fail)
    x = torch.ones(3, requires_grad=True)
    result, (only,) = compiled(sine, x)
    result.sum().backward()
    assert torch.equal(result, sine(x))
    assert torch.equal(x.grad, torch.cos(x.detach() + 1))
    assert only.reason.startswith("torch cannot take it apart: RuntimeError: Please convert")


def test_a_function_that_cannot_be_traced_is_an_error_with_its_line():
    """Control flow by values is named with its line; what the function raises itself stays what it
    is.
    """

    def branches(x):
        if x.sum() > 0:
            return x
        return -x

    def raises(x):
        raise LookupError("mine")

    with pytest.raises(UnsupportedOperator, match="torch cannot trace it") as found:
        generate(branches, [torch.ones(3)])
    assert found.value.line.startswith(f"{HERE}:")
    assert found.value.line.endswith("if x.sum() > 0:")
    with pytest.raises(LookupError, match="mine"):
        generate(raises, [torch.ones(3)])


@pytest.mark.parametrize("dynamic", [False, True])
def test_nodes_of_a_traced_function_have_its_lines(dynamic):
    """Each operator names the line that called it, within a function that another one calls."""
    lines = {
        node.name: user_line(node)
        for node in trace(sine, [torch.ones(3)], dynamic=dynamic).graph.nodes
    }
    assert lines["add"].endswith(": y = x + 1")
    assert lines["sin"].endswith(": return torch.sin(y)  # the line")


def test_another_value_of_the_switch_is_refused():
    """`verify` is True or False, and the error of the backend says so."""
    with pytest.raises(Exception, match="verify='yes'") as found:
        compiled(sine, torch.ones(3), verify="yes")
    assert isinstance(found.value.__cause__ or found.value.inner_exception, ConfigError)


# --------------------------------------------------------------------------------- What is compared


def test_each_fact_of_a_result_is_compared():
    """Another dtype, other sizes, strides, another device and other numbers are found; strides of
    single elements do not count.
    """
    right = torch.arange(12.0).reshape(3, 4)
    facts = {
        "dtype": right.double(),
        "sizes": right[:2],
        "strides": right.t().contiguous().t(),
        "device": right.to("meta"),
        "numbers": right + 0.1,
        "value": 3,
    }
    assert {
        fact: found.fact for fact, wrong in facts.items() if (found := difference(wrong, right))
    } == {fact: fact for fact in facts}
    assert difference(right.clone(), right, right.double()) is None
    assert difference(right[:1].as_strided((1, 4), (9, 1)), right[:1]) is None
    assert difference(facts["strides"], right, traced=facts["strides"]) is None
    assert difference(right + 0.1, right, numbers=False) is None
    largest = difference(right + torch.tensor([0.1, 0.5, 0.1, 0.1]), right)
    assert largest.largest == pytest.approx(0.5)
    assert largest.place == (0, 1)


def test_numbers_pass_by_their_distance_from_float64():
    """Rounding passes, as far as eager's own goes, and a small gradient that is wrong does not."""
    wide = torch.randn(4000, dtype=torch.float64)
    eager = wide.float()
    assert difference(eager * (1 + 1e-5), eager, wide) is None
    assert difference(eager * 1.01, eager, wide).fact == "numbers"
    # Eager is as far off.
    assert difference(eager * 0.99, eager * 1.01, wide) is None
    assert difference(eager * 1e-5, eager * 1.1e-5, wide * 1.1e-5).fact == "numbers"
    half = wide.bfloat16()
    assert difference(half + half * 2**-7, half, wide) is None
    assert difference(half * 1.5, half, wide).fact == "numbers"
    nothing = eager.clone()
    nothing[7] = float("nan")
    found = difference(nothing, eager, wide)
    assert (found.place, found.largest) == ((7,), float("inf"))
    assert difference(nothing, nothing.clone(), wide) is None


def test_whole_numbers_are_equal_but_where_rounding_decides():
    """An index may differ from eager's where eager's differs from float64's."""
    right = torch.arange(10)
    other = right.clone()
    other[3] = 9
    assert difference(other, right, right).fact == "numbers"
    assert difference(other, right).fact == "numbers"
    assert difference(right, other, right) is None


def test_what_is_random_or_unwritten_is_named(monkeypatch):
    """Outputs that come of random numbers are unchecked, and so are those of memory that nobody
    wrote; attention without dropout is neither.
    """

    def function(x):
        noise = torch.rand(4)
        attended = torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3)
        return x * 2, noise + x, torch.empty(4), attended, noise.shape[0]

    graph = ReferenceGraph(trace(function, [torch.ones(4)]))
    assert graph.unchecked == {1: "it is random", 2: "nobody wrote it"}


def test_nothing_is_changed_by_the_run_of_eager_torch():
    """Inputs that the graph changes are copied with those that share their memory, and the
    generator is put back.
    """

    def function(x, y):
        x.add_(1)
        return y * 2 + torch.rand(4)

    memory = torch.arange(8.0)
    x, y = memory[:4], memory[2:6]
    graph = ReferenceGraph(trace(function, [x.clone(), y.clone()]))
    before, state = memory.clone(), torch.get_rng_state()
    expected = graph.run([x, y])
    assert torch.equal(memory, before)
    assert torch.equal(torch.get_rng_state(), state)
    (changed,) = expected.changed.values()
    assert torch.equal(changed, before[:4] + 1)
    assert changed.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
    assert expected.wide[0].dtype == torch.float64


def test_a_called_operator_that_goes_wrong_is_named():
    """A program of operators alone is compared too, and the error names the operator, output and
    line.
    """

    def function(x):
        return x @ x

    program = generate(function, [torch.ones(3, 3)], options=GenerateOptions(verify=True))
    runner = vars(program)["_runner"] = lambda *inputs, seed=None: (inputs[0] @ inputs[0] + 1,)
    assert runner
    with pytest.raises(WrongResult, match=r"expected 3.0 at \[0, 0\], got 4.0") as found:
        program.run(torch.ones(3, 3))
    assert found.value.kernel == "aten.mm.default"
    assert found.value.output == "output 0 (mm)"
    assert found.value.line.endswith(": return x @ x")
    assert found.value.largest == 1.0


def test_verified_programs_in_the_interpreter(interpreted, tmp_path):
    """What is right passes with the numbers of a call without the switch; a lowering that was
    broken is found by each way in.
    """
    report = json.loads(interpreted("verification_worker.py", tmp_path))
    assert report["right"] == {
        "runs": 1,
        "checked": ["output 0 (exp)", "output 1 (add)"],
        "float64": True,
    }
    assert report["changed"] == [[2.0] * 4, [6.0] * 4, [8.0] * 4]
    assert [name for name in report["changes checked"][0] if name.startswith("changed")] != []
    assert report["same numbers"]
    assert report["unchecked"] == {"output 0 (add)": "it is random"}
    assert report["choices"] == 6
    assert report["choices called"] == ["aten.topk.default"]
    assert report["training"] == [True, True]
    assert report["silent"]
    for way in ("wrong", "wrong again", "wrong compiled"):
        assert report[way]["output"].startswith("output 1")
        assert report[way]["kernel"].startswith("triton_")
        assert report[way]["line"].endswith("return first, x.sin() + 1")
    assert report["wrong change"]["output"].startswith("changed input")
