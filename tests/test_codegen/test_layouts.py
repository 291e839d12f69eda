# SPDX-License-Identifier: Apache-2.0
"""Layout is a contract: what leaves our kernels has the strides, and shares the memory, that torch
traced.
"""

import dataclasses
import json

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import generate  # noqa: E402
from bundler.errors import ConfigError, UnsupportedOperator  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Input,
    Launch,
    OperatorStep,
    Output,
    ProgramPlan,
    TensorSpec,
)
from bundler.runtime.program.run import ProgramRunner  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402


@pytest.mark.parametrize(
    "part",
    ["trained", *(pytest.param(part, marks=pytest.mark.slow) for part in ("generated", "models"))],
)
def test_functions_and_gradients_are_those_of_torch(interpreted, tmp_path, part):
    """Numbers, dtypes, strides and shared memory are as torch has them, and no result had to be
    copied for it.
    """
    found = json.loads(interpreted("layout_worker.py", tmp_path, part))
    assert {name: case for name, case in found.items() if case != [[], 0]} == {}


def plan_of(function, *inputs, **options):
    return generate(function, inputs, **options).plan


def launched(*_):
    """A launcher that runs nothing."""


def test_an_operator_is_given_the_strides_that_torch_traced():
    """A transposed view of a computed tensor is passed as one; the tensor itself lies as torch
    would have it.
    """
    plan = plan_of(lambda x, y: (x * 2).t() @ y, torch.ones(6, 8), torch.ones(6, 4))
    (call,) = (step for step in plan.steps if isinstance(step, OperatorStep))
    assert call.arguments[0]["spec"] == {
        "dtype": "float32",
        "sizes": (8, 6),
        "strides": (1, 8),
        "offset": 0,
        "device": "",
    }


def test_memory_that_was_taken_over_is_seen_as_the_new_tensor():
    """An operator that reads a buffer in another one's memory is told the shape of the new one."""
    function = lambda x, y: torch.mm((torch.mm(x, x) + 1).reshape(16, 4), y)  # noqa: E731
    plan = plan_of(function, torch.ones(8, 8), torch.ones(4, 3))
    last = [step for step in plan.steps if isinstance(step, OperatorStep)][-1]
    assert last.arguments[0]["spec"]["sizes"] == (16, 4)


def test_a_tensor_in_the_memory_of_one_of_another_shape_is_seen_as_itself():
    """A kernel writes 8 x 1 x 8 numbers where 8 x 8 were: the next operator is told, though the
    tensor is whole and no view.
    """
    function = lambda x, s, y: torch.bmm(torch.mm(x, x)[:, None] * s, y)  # noqa: E731
    plan = plan_of(function, torch.ones(8, 8), torch.ones(8, 1, 8), torch.ones(8, 8, 3))
    first, last = (step for step in plan.steps if isinstance(step, OperatorStep))
    assert last.arguments[0]["buffer"] == first.outputs[0]
    assert last.arguments[0]["spec"]["sizes"] == (8, 1, 8)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"device": "cpu"}])
@pytest.mark.parametrize("second", [lambda x: x, lambda x: x[:], lambda x: x[1:]])
def test_an_example_that_is_given_twice_stands_for_two_inputs(second, options):
    """A call has other tensors there: numbers, and where results lie, are theirs."""
    given = torch.ones(4, 4)
    function = lambda x, y: (torch.mm(y, x), y)  # noqa: E731
    program = generate(function, [given, second(given)], **options)
    one, two = torch.full((4, 4), 2.0), torch.full(second(given).shape, 3.0)
    product, seen = program.runner(TorchMemory("cpu"), launched)(one, two)
    assert product.equal(two @ one)
    assert seen is two


def test_a_number_on_the_host_is_not_written_over():
    """A kernel takes its value, so that its result cannot take its memory, though both have one
    element of the same type.
    """
    plan = plan_of(lambda x: x * x.cpu().sin() + 1, torch.ones(()), device="cuda")
    (call,) = (step for step in plan.steps if isinstance(step, OperatorStep))
    (launch,) = (step for step in plan.steps if isinstance(step, Launch))
    assert call.results[0].device == "host"
    assert f"#{call.outputs[0]}" in launch.arguments
    assert plan.outputs[0].buffer != call.outputs[0]


def test_a_view_is_another_tensor_than_what_it_shows():
    """Also where it shows all of it as it is."""
    runner = generate(lambda x: (x, x.view(8)), [torch.ones(8)]).runner(TorchMemory(), launched)
    given = torch.ones(8)
    itself, view = runner(given)
    assert itself is given
    assert view is not given
    assert view.data_ptr() == given.data_ptr()


def test_a_view_of_another_type_is_no_view_of_the_input():
    """The input's memory is seen with the input's type alone."""
    function = lambda x: (x.add_(1), x.view(torch.int32))[1]  # noqa: E731
    (output,) = plan_of(function, torch.ones(4, 6)).outputs
    assert (output.buffer != "arg0", output.spec.dtype) == (True, "int32")


def test_a_view_of_a_copy_does_not_show_the_original():
    """An operator that returns a view is given memory of the copy's own, though its elements lie in
    the input, too.
    """
    function = lambda x: torch.view_as_complex(x.clone().unflatten(-1, (4, 2)))  # noqa: E731
    plan = plan_of(function, torch.ones(3, 8))
    (call,) = (step for step in plan.steps if isinstance(step, OperatorStep))
    assert call.arguments[0]["buffer"] != "arg0"


SERVED = {
    "another dtype": (torch.ones(4, 6, dtype=torch.float64), "dtype float32, got float64"),
    "other sizes": (torch.ones(4, 7), r"sizes \(4, 6\), got \(4, 7\)"),
    "other sizes, the same strides": (torch.ones(5, 6), r"sizes \(4, 6\), got \(5, 6\)"),
    "more dimensions": (torch.ones(4, 6, 1), "dimensions 2, got 3"),
    "other strides": (torch.ones(6, 4).t(), r"strides \(6, 1\), got \(1, 4\)"),
    "another device": (torch.ones(4, 6, device="meta"), "device cpu, got meta"),
}


@pytest.mark.parametrize(("given", "message"), SERVED.values(), ids=SERVED)
def test_an_input_that_a_program_was_not_generated_for_is_refused(given, message):
    """The error names the input, what was expected and what came, each time that it comes."""
    program = generate(lambda n, x: x * n, [2, torch.ones(4, 6)])
    runner = program.runner(TorchMemory("cpu"), launched)
    runner(2, torch.ones(4, 6))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"input 1 of the program: expected {message}"):
            runner(2, given)


@pytest.mark.parametrize("given", [(2,), (2, torch.ones(4, 6), 1)], ids=["too few", "too many"])
def test_another_number_of_inputs_is_refused(given):
    """The error says how many there are."""
    program = generate(lambda n, x: x * n, [2, torch.ones(4, 6)])
    with pytest.raises(ConfigError, match=f"the program takes 2 inputs, got {len(given)}"):
        program.runner(TorchMemory("cpu"), launched)(*given)


def test_strides_of_dimensions_of_one_element_say_nothing():
    """A row of a matrix is served where the example was a matrix of one row."""
    runner = generate(lambda x: x * 2, [torch.ones(1, 6)]).runner(TorchMemory("cpu"), launched)
    runner(torch.ones(6, 1).t())
    runner(torch.ones(3, 6)[:1])


def test_another_number_than_the_example_is_refused():
    """A number of the example is part of the kernels; 2.0 and True are other numbers than 2
    and 1.
    """
    program = generate(lambda n, x: x * n, [2, torch.ones(8)])
    runner = program.runner(TorchMemory("cpu"), launched)
    for number in (3, 2.0):
        with pytest.raises(ConfigError, match=f"input 0 .* expected the number 2, got {number}"):
            runner(number, torch.ones(8))


def test_inputs_that_share_memory_with_a_changed_one_are_refused():
    """The order of kernels would decide what is read of the other one."""

    def function(x, y):
        x.add_(1)
        return y * 2

    runner = generate(function, [torch.ones(8), torch.ones(8)]).runner(TorchMemory("cpu"), launched)
    shared = torch.ones(12)
    with pytest.raises(ConfigError, match="inputs 0 and 1 of the program share memory"):
        runner(shared[:8], shared[4:])
    runner(torch.ones(8), torch.ones(8))


def test_an_input_at_an_odd_address_is_copied_and_counted():
    """Kernels count on multiples of 16 bytes where the example's tensor had one; a changed input
    gets its numbers back.
    """
    program = generate(lambda x: (x.add_(1), x * 2)[1], [torch.ones(8)])
    seen = []

    def launch(_name, arguments, _sizes):
        seen.append(arguments[0].data_ptr() % 16)
        arguments[0].fill_(7)

    runner = program.runner(TorchMemory("cpu"), launch)
    odd = torch.ones(9)[1:]
    runner(odd)
    assert set(seen) == {0}
    assert odd.eq(7).all()
    assert runner.copies == 1


def test_an_input_at_an_odd_address_is_returned_itself():
    """What a program returns of an input is the caller's tensor, or a view of it, and not the
    aligned copy.
    """
    program = generate(lambda x: (x.add_(1), x[2:]), [torch.ones(8)])
    runner = program.runner(TorchMemory("cpu"), lambda _name, given, _sizes: given[0].fill_(7))
    odd = torch.ones(9)[1:]
    whole, part = runner(odd)
    assert (whole.data_ptr(), part.data_ptr()) == (odd.data_ptr(), odd[2:].data_ptr())
    assert part.eq(7).all()


class Answer(TorchMemory):
    """Memory whose operators answer what the test says."""

    def __init__(self, answer):
        super().__init__("cpu")
        self.answer = answer

    def call(self, operator, arguments, keywords):
        return self.answer(*arguments)


def product():
    return generate(torch.mm, [torch.ones(4, 6), torch.ones(6, 8)])


def test_other_strides_of_a_result_are_copied_and_counted():
    """What follows reads the layout that torch traced, whatever the operator returned."""
    made = torch.arange(32.0).reshape(8, 4).t()
    runner = product().runner(Answer(lambda *_: made), launched)
    (result,) = runner(torch.ones(4, 6), torch.ones(6, 8))
    assert result.stride() == (8, 1)
    assert result.equal(made)
    assert runner.copies == 1


@pytest.mark.parametrize("answer", [torch.ones(4, 9), torch.ones(4, 8, dtype=torch.float64)])
def test_another_size_or_dtype_of_a_result_is_an_error(answer):
    """Nothing is read of a tensor that is not what torch traced."""
    runner = product().runner(Answer(lambda *_: answer), launched)
    with pytest.raises(
        UnsupportedOperator, match=r"aten.mm.default: torch traced .*float32\[4, 8\]"
    ):
        runner(torch.ones(4, 6), torch.ones(6, 8))


def test_a_result_on_another_device_is_an_error_unless_it_is_a_random_state():
    """Attention has its seed on the host, where torch traced the GPU; only operators may be given
    one that lies there.
    """
    elsewhere = torch.ones(4, 8, device="meta")
    runner = product().runner(Answer(lambda *_: elsewhere), launched)
    with pytest.raises(UnsupportedOperator, match="its result is on cpu, and it is on meta"):
        runner(torch.ones(4, 6), torch.ones(6, 8))
    seed = torch.zeros((), dtype=torch.int64, device="meta")
    state = TensorSpec("int64", (), ())
    step = OperatorStep(
        "aten.clone.default", ({"buffer": "seed", "spec": None},), {}, ("made",), True, (state,)
    )
    plan = ProgramPlan((Input("seed", state),), {}, (step,), (Output("made"),), {})
    runner = ProgramRunner(plan, launched, Answer(lambda given: given))
    (result,) = runner(seed)
    assert result.device == seed.device
    launch = Launch("kernel", ("@seed",), {})
    with pytest.raises(ConfigError, match="input 0 of the program: expected device cpu, got meta"):
        ProgramRunner(
            dataclasses.replace(plan, steps=(launch, step)), launched, TorchMemory("cpu")
        )(seed)


def test_a_result_that_nobody_reads_may_be_none():
    """Attention computes no sums of its rows where no gradient needs them, though torch traced
    some.
    """
    plan = generate(lambda x: torch.linalg.eigh(x)[0], [torch.eye(4)]).plan
    (call,) = (step for step in plan.steps if isinstance(step, OperatorStep))
    assert [name is None for name in call.outputs] == [False, True]
    runner = ProgramRunner(plan, launched, Answer(lambda *_: (torch.ones(4), None)))
    (result,) = runner(torch.eye(4))
    assert result.equal(torch.ones(4))


def test_a_result_in_the_memory_of_an_argument_is_copied():
    """An operator that returns its argument, as some do, does not make the result an alias of the
    input.
    """
    program = generate(torch.linalg.matrix_exp, [torch.ones(4, 4)])
    given = torch.ones(4, 4)
    runner = program.runner(Answer(lambda *_: given), launched)
    (result,) = runner(given)
    assert result.data_ptr() != given.data_ptr()
    assert runner.copies == 1


def test_a_result_at_an_odd_address_is_copied():
    """Kernels count on addresses that are multiples of 16 bytes, and an operator may return a part
    of memory of its own.
    """
    program = generate(torch.linalg.matrix_exp, [torch.ones(4, 4)])
    made = torch.ones(17)[1:].view(4, 4)
    runner = program.runner(Answer(lambda *_: made), launched)
    (result,) = runner(torch.ones(4, 4))
    assert result.equal(made)
    assert result.data_ptr() % 16 == 0
    assert runner.copies == 1


def test_a_plan_keeps_what_inputs_and_results_have_to_be():
    """The checks hold for a plan that was read from a bundle."""
    from bundler.runtime.program.program_plan import read_plan

    plan = plan_of(lambda n, x: (x.add_(1), x @ x)[1] * n, 3, torch.ones(4, 4))
    found = read_plan(plan.to_json())
    assert [dataclasses.astuple(item) for item in found.inputs] == [
        dataclasses.astuple(item) for item in plan.inputs
    ]
    assert found.inputs[0].number == 3
    assert found.inputs[1].changed
    assert found.inputs[1].aligned
    calls = [step for step in found.steps if isinstance(step, OperatorStep)]
    assert [call.results[0].strides for call in calls] == [(4, 1)]
