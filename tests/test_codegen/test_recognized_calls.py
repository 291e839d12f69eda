# SPDX-License-Identifier: Apache-2.0
"""Inputs and results that look like those of an earlier call are recognized quickly; all others are
looked at, read as they are, or refused.
"""

import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bundler.errors import ConfigError, OperatorFailed, UnsupportedOperator  # noqa: E402
from bundler.runtime.launch.extension import EXTENSION  # noqa: E402
from bundler.runtime.program.program_inputs import ProgramInputs  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Allocate,
    Input,
    Launch,
    OperatorStep,
    Output,
    ProgramPlan,
    Release,
    TensorSpec,
)
from bundler.runtime.program.run import ProgramRunner  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402

SQUARE = TensorSpec("float32", (4, 4), (4, 1))
GIVEN = torch.arange(16.0).view(4, 4)
X, Y = ({"buffer": name, "spec": None} for name in "xy")


class Tagged(torch.Tensor):
    """A class of the user's."""


def nothing(*_):
    """Launches nothing."""


MADE = (Output("made"),)


def made(step, *inputs, outputs=MADE, memory=None):
    plan = ProgramPlan(inputs, {}, (step,), outputs, {})
    return ProgramRunner(plan, nothing, memory or TorchMemory())


def product():
    """Return a program of a product of two squares, which begin at multiples of 16 bytes."""
    step = OperatorStep("aten.mm.default", (X, Y), {}, ("made",), True, (SQUARE,))
    return made(step, *(Input(name, SQUARE, aligned=True) for name in "xy"))


@pytest.fixture
def keys(monkeypatch):
    """A list with an entry for each call whose inputs were looked at one by one."""
    looked, key = [], ProgramInputs._key

    def noted(self, inputs):
        looked.append(len(inputs))
        return key(self, inputs)

    monkeypatch.setattr(ProgramInputs, "_key", noted)
    return looked


class Returning(TorchMemory):
    """Returns what it is told to, whatever is called."""

    def __init__(self):
        super().__init__()
        self.next = None

    def call(self, operator, arguments, keywords):
        return arguments[0] if self.next is Returning else self.next


def returning(*, view=False):
    """Return a program of one operator, which returned what was traced twice, and its memory."""
    memory = Returning()
    step = OperatorStep("aten.relu.default", (X,), {}, ("made",), True, (SQUARE,), view=view)
    runner = made(step, Input("x", SQUARE), memory=memory)
    for _ in range(2):
        memory.next = GIVEN.clone()
        assert runner(GIVEN)[0] is memory.next
    assert runner.copies == 0
    return runner, memory


ODD = torch.zeros(17)[1:].copy_(torch.arange(16.0)).view(4, 4)


@pytest.mark.parametrize(
    ("result", "copies"),
    [
        (GIVEN.clone(), 0),
        (GIVEN.t().contiguous().t(), 1),
        (torch._neg_view(-GIVEN), 1),
        (Returning, 1),
        (ODD, 1),
        (GIVEN.clone().as_subclass(Tagged), 0),
        (torch.nn.Parameter(GIVEN.clone(), requires_grad=False), 0),
    ],
    ids=["alike", "transposed", "negative", "argument", "odd", "subclass", "parameter"],
)
def test_a_result_is_read_as_it_is_whatever_the_ones_before_were(result, copies):
    """Numbers and strides are those of the trace, in memory of its own, in this and the next
    call.
    """
    runner, memory = returning()
    memory.next = result
    for _ in range(2):
        (got,) = runner(GIVEN)
        assert torch.equal(got, GIVEN)
        assert got.stride() == (4, 1)
        assert got.data_ptr() != GIVEN.data_ptr()
        assert got.data_ptr() % 16 == 0
        assert not got.is_neg()
    assert runner.copies == 2 * copies


@pytest.mark.parametrize(
    ("result", "error", "said"),
    [
        (GIVEN.double(), UnsupportedOperator, "returned float64"),
        (GIVEN.view(2, 8), UnsupportedOperator, r"returned float32\[2, 8\]"),
        (GIVEN.to("meta"), UnsupportedOperator, "it is on meta"),
        (None, OperatorFailed, "expected a tensor for made"),
        (3, OperatorFailed, "expected a tensor for made"),
    ],
)
def test_a_result_that_was_not_traced_is_refused_whatever_the_ones_before_were(result, error, said):
    """The rule of the operator is wrong, which the error says."""
    runner, memory = returning()
    memory.next = result
    for _ in range(2):
        with pytest.raises(error, match=said):
            runner(GIVEN)
    memory.next = GIVEN.clone()
    assert runner(GIVEN)[0] is memory.next


def test_an_operator_that_is_a_view_may_return_its_argument():
    """Its result lies where the argument does, and is not copied for that."""
    runner, memory = returning(view=True)
    memory.next = Returning
    assert runner(GIVEN)[0] is GIVEN
    assert runner.copies == 0


def test_inputs_that_come_again_are_not_looked_at_one_by_one(keys):
    """The third call and all after it are recognized, with whatever numbers."""
    runner = product()
    for call in range(6):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert torch.equal(runner(x, y)[0], x @ y)
        assert len(keys) == min(call + 1, 2)


@pytest.mark.parametrize(
    ("other", "copies"),
    [
        (torch._neg_view(GIVEN), 1),
        (ODD, 1),
        (torch.nn.Parameter(GIVEN.clone()), 0),
        (GIVEN.clone().as_subclass(Tagged), 0),
        (GIVEN.clone().requires_grad_(), 0),
    ],
    ids=["negative", "odd", "parameter", "subclass", "followed"],
)
def test_inputs_that_differ_in_a_mark_are_read_as_they_are(other, copies):
    """As in a first call, whatever was recognized before, and again; what kernels cannot read where
    it lies is copied.
    """
    runner = product()
    for x, y in [(GIVEN, GIVEN + 1)] * 3 + [(other, GIVEN + 1), (GIVEN + 1, other)] * 3:
        expected = x.detach().resolve_neg() @ y.detach().resolve_neg()
        assert torch.equal(runner(x, y)[0], expected)
    assert runner.copies == 6 * copies


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((GIVEN,), "takes 2 inputs"),
        ((GIVEN, GIVEN, GIVEN), "takes 2 inputs"),
        ((GIVEN, GIVEN.double()), "expected dtype float32"),
        ((GIVEN, GIVEN.view(2, 8)), "expected sizes"),
        ((GIVEN, GIVEN.view(16)), "expected dimensions 2"),
        ((GIVEN, GIVEN.t()), "expected strides"),
        ((GIVEN, GIVEN.to("meta")), "expected device"),
    ],
)
def test_inputs_that_a_program_was_not_generated_for_are_refused_behind_others(inputs, said):
    """A recognized call makes nothing of the next one right."""
    runner = product()
    for _ in range(4):
        runner(GIVEN, GIVEN + 1)
    for _ in range(3):
        with pytest.raises(ConfigError, match=said):
            runner(*inputs)
    assert torch.equal(runner(GIVEN, GIVEN)[0], GIVEN @ GIVEN)


def test_what_recognizes_a_call_keeps_none_of_its_tensors():
    """Inputs and results of recognized calls are freed as those of the first."""
    runner = product()
    for _ in range(4):
        x, y = GIVEN.clone(), GIVEN.clone()
        (result,) = runner(x, y)
    seen = list(map(weakref.ref, (x, y, result)))
    del x, y, result
    assert [one() for one in seen] == [None] * 3


def test_one_tensor_for_two_inputs_is_right_in_every_call():
    """Guards of torch never recognize that; it costs time alone."""
    runner = product()
    for _ in range(12):
        assert torch.equal(runner(GIVEN, GIVEN)[0], GIVEN @ GIVEN)


def test_numbers_of_a_call_are_its_own_with_their_types_and_signs(keys):
    """1, True and 1.0 are equal, as are both zeros, and no call takes those of another."""
    step = OperatorStep("aten.mul.Scalar", (X, {"size": "rate"}), {}, ("made",), True, (SQUARE,))
    plan = ProgramPlan(
        (Input("x", SQUARE), Input("rate")),
        {"rate": (1, -1)},
        (step,),
        (*MADE, Output(None, size="rate")),
        {},
    )
    runner = ProgramRunner(plan, nothing, TorchMemory())
    for rate in (2.0, 2.0, 2.0, 0.0, 0.0, 0.0, -0.0, -0.0, 0.5, 2.0, 2.0, 2.0):
        product, got = runner(GIVEN, rate)
        assert (type(got), got.hex()) == (float, rate.hex())
        assert torch.equal(torch.signbit(product), torch.signbit(GIVEN * rate))
        assert torch.equal(product, GIVEN * rate)
    assert len(keys) < 12


def test_a_result_alone_in_its_memory_is_no_view_and_two_in_one_are():
    """What is written to one of two results is known to have changed the other, which a gradient
    looks at.
    """
    step = OperatorStep("aten.relu.default", (X,), {}, ("made",), True, (SQUARE,))
    turned = TensorSpec("float32", (4, 4), (1, 4))
    (alone,) = made(step, Input("x", SQUARE), outputs=(Output("made", turned),))(GIVEN)
    assert torch.equal(alone, GIVEN.t())
    assert not alone._is_view()
    one, two = made(
        step, Input("x", SQUARE), outputs=(Output("made", turned), Output("made", SQUARE))
    )(GIVEN)
    before = two._version
    one.add_(1)
    assert two._version > before
    assert torch.equal(two, one.t())


def test_functions_that_a_mode_has_in_place_of_torchs_are_not_called():
    """A call computes what was traced: operators are torch's own."""

    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            return result * 2 if function is torch.mm else result

    runner = product()
    with Doubling():
        assert torch.equal(torch.mm(GIVEN, GIVEN), 2 * runner(GIVEN, GIVEN)[0])
    assert torch.equal(torch.mm(GIVEN, GIVEN), runner(GIVEN, GIVEN)[0])


def _entered(run):
    """Return how many functions of Python a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code))
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.skipif(EXTENSION is None, reason="the extension is not built")
def test_steps_of_a_call_enter_no_function_of_python():
    """Launches, allocations, views, operators whose results are recognized, and releases: a call
    of a hundred times as many enters as many functions as one of a few.
    """

    class Again:
        start, count = 1, 1
        launch = {}.setdefault  # of C, with the numbers and a tensor

    class Kernel:
        tuned = SimpleNamespace(again=Again())
        arguments = ("x", "xnumel")

        def __call__(self, *_):
            raise AssertionError("launched by its own call")

    def runner(times):
        steps = []
        for _ in range(times):
            shown = {"buffer": "made", "spec": {"sizes": [4, 4], "strides": [1, 4], "offset": 0}}
            steps += [
                Allocate("made", SQUARE),
                Launch("kernel", ("@made", 16), {"xnumel": 16}),
                OperatorStep("aten.mm.default", (X, shown), {}, ("product",), True, (SQUARE,)),
                Release("made"),
                Release("product"),
            ]
        plan = ProgramPlan((Input("x", SQUARE),), {}, tuple(steps), (Output("x"),), {})
        launcher = SimpleNamespace(bound=lambda *_: Kernel())
        return ProgramRunner(plan, launcher, TorchMemory())

    counts = []
    for times in (1, 100):
        run = partial(runner(times), GIVEN)
        for _ in range(3):
            run()
        counts.append(_entered(run))
    assert counts[0] == counts[1]
