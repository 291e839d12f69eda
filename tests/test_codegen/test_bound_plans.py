# SPDX-License-Identifier: Apache-2.0
"""A plan is bound once for sizes that come again, and what differs between calls is passed on."""

import gc
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bundler.codegen.program import generate  # noqa: E402
from bundler.errors import OperatorFailed  # noqa: E402
from bundler.runtime.program import run  # noqa: E402
from bundler.runtime.program.bound_plan import BoundPlan  # noqa: E402
from bundler.runtime.program.program_plan import (  # noqa: E402
    Allocate,
    Input,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    TensorSpec,
)
from bundler.runtime.program.run import ProgramRunner  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402

VECTOR = TensorSpec("float32", (4,), (1,))


@pytest.fixture
def bound(monkeypatch):
    """The sizes that plans were bound for."""
    sizes = []

    class Counted(BoundPlan):
        def __init__(self, environment, given):
            sizes.append(dict(given))
            super().__init__(environment, given)

    monkeypatch.setattr(run, "BoundPlan", Counted)
    return sizes


def launches(launched):
    """Return a launcher that notes what it is given."""
    return lambda kernel, arguments, sizes: launched.append((list(arguments), dict(sizes)))


def test_sizes_that_come_again_are_bound_once(bound):
    """Another size is bound anew, and each call's launch has its own grid."""
    program = generate(lambda x: x * 2, [torch.ones(6, 4)], dynamic=True)
    launched = []
    runner = program.runner(TorchMemory(), launches(launched))
    for rows in (6, 9, 6, 9, 9):
        runner(torch.ones(rows, 4))
    assert len(bound) == 2
    assert [sizes["xnumel"] for _, sizes in launched] == [24, 36, 24, 36, 36]


def test_a_float_of_each_call_is_passed_on_without_binding(bound):
    """A learning rate is another number in each step, and decides about no size."""
    scaled = OperatorStep(
        "aten.mul.Scalar",
        ({"buffer": "x", "spec": None}, {"size": "rate"}),
        {},
        ("made",),
        True,
        (VECTOR,),
    )
    raised = OperatorStep(
        "aten.pad.default",
        ({"buffer": "made", "spec": None}, [0, 0], "constant"),
        {"value": {"size": "rate"}},
        ("padded",),
        True,
        (VECTOR,),
    )
    launch = Launch("kernel", ("@padded", "rate"), {"xnumel": 4})
    plan = ProgramPlan(
        (Input("x", VECTOR), Input("rate")),
        {"rate": (1, -1)},
        (scaled, raised, launch),
        (Output("padded"), Output(None, size="rate")),
        {},
    )
    launched = []
    runner = ProgramRunner(plan, launches(launched), TorchMemory())
    for rate in (0.5, 0.25, 3.0):
        assert runner(torch.ones(4), rate)[1] == rate
    assert len(bound) == 1
    assert [arguments[1] for arguments, _ in launched] == [0.5, 0.25, 3.0]
    assert [arguments[0].tolist() for arguments, _ in launched] == [
        [n] * 4 for n in (0.5, 0.25, 3.0)
    ]


def test_ever_new_sizes_do_not_gather(bound, monkeypatch):
    """What was bound for old sizes is forgotten."""
    monkeypatch.setattr(run, "MOST_SIGNATURES", 4)
    program = generate(lambda x: x * 2, [torch.ones(6, 4)], dynamic=True)
    runner = program.runner(TorchMemory(), launches([]))
    for rows in range(3, 40):
        runner(torch.ones(rows, 4))
    assert len(bound) == 37
    assert len(runner._plans) <= 4


def test_a_tensor_that_is_released_is_gone_before_the_next_step(monkeypatch):
    """Neither the call's values nor the view that an operator was given keep its memory."""
    program = generate(
        lambda x, y: torch.mm(torch.mm(torch.mm(x, y).t(), y).t(), y), [torch.ones(4, 4)] * 2
    )
    seen, alive = [], []

    class Watching(TorchMemory):
        def call(self, operator, arguments, keywords):
            gc.collect()
            alive.append(sum(one() is not None for one in seen))
            result = super().call(operator, arguments, keywords)
            seen.append(weakref.ref(result))
            return result

    runner = program.runner(Watching(), launches([]))
    runner(torch.ones(4, 4), torch.ones(4, 4))
    assert alive == [0, 1, 1]


def test_inputs_that_nobody_else_has_are_freed_once_read():
    """As a backward pass has it: the list is empty, and of two saved tensors one is gone while the
    other is read; a result stays.
    """
    program = generate(
        lambda x, y, z: (torch.mm(torch.mm(x, x), y), z.view(16)), [torch.ones(4, 4)] * 3
    )
    given = [torch.ones(4, 4), torch.full((4, 4), 2.0), torch.full((4, 4), 3.0)]
    saved = [weakref.ref(one) for one in given]
    alive = []

    class Watching(TorchMemory):
        def call(self, operator, arguments, keywords):
            gc.collect()
            alive.append([one() is not None for one in saved])
            return super().call(operator, arguments, keywords)

    runner = program.runner(Watching(), launches([]))
    runner(*given)
    alive.clear()
    product, seen = runner.consume(given)
    assert given == []
    assert alive == [[True, True, True], [False, True, True]]
    assert (product == 32).all()
    assert (seen == 3).all()
    assert seen.shape == (16,)


@pytest.mark.parametrize("consume", [True, False])
def test_an_input_is_written_over_where_it_is_consumed_and_copied_otherwise(consume):
    """Where it lies, or as a copy that is made there, and goes with the last who reads it."""
    first = OperatorStep(
        "aten.neg.default", ({"buffer": "other", "spec": None},), {}, ("made",), True, (VECTOR,)
    )
    second = OperatorStep(
        "aten.mul.Tensor",
        ({"buffer": "saved", "spec": None}, {"buffer": "made", "spec": None}),
        {},
        ("result",),
        True,
        (VECTOR,),
    )
    last = replace(first, outputs=("unused",))
    launch = Launch("kernel", ("@saved",), {"xnumel": 4})
    plan = ProgramPlan(
        (Input("saved", VECTOR), Input("other", VECTOR)),
        {},
        (first, Overwrite("saved"), launch, second, Release("made"), last),
        (Output("result"),),
        {"kernel": KernelEntry("Grid1D", ("in_out_ptr0", "xnumel"))},
    )
    written, alive, copies = [], [], []

    class Watching(TorchMemory):
        def call(self, operator, arguments, keywords):
            gc.collect()
            alive.append([one() is not None for one in written])
            return super().call(operator, arguments, keywords)

        def copied(self, tensor, *given):
            copies.append(tensor)
            return super().copied(tensor, *given)

    def launched(_kernel, arguments, _sizes):
        arguments[0].fill_(5)
        written.append(weakref.ref(arguments[0]))

    runner = ProgramRunner(plan, launched, Watching())
    given = [torch.ones(4), torch.full((4,), 2.0)]
    caller = [] if consume else list(given)
    (found,) = runner.consume(given) if consume else runner(*given)
    assert (found == -10).all()
    assert alive == [[], [True], [False]]
    assert (len(copies), runner.copies) == (not consume, 0)
    assert all((one == value).all() for one, value in zip(caller, (1, 2), strict=False))


def test_a_view_beyond_a_tensor_is_refused_by_torch():
    """What is not known to be a tensor's own memory is left to torch, which knows how much there
    is.
    """
    wide = {"dtype": "float32", "sizes": (40,), "strides": (1,), "offset": 0, "device": ""}
    step = OperatorStep(
        "aten.clone.default",
        ({"buffer": "x", "spec": wide},),
        {},
        ("made",),
        True,
        (TensorSpec("float32", (40,), (1,)),),
    )
    plan = ProgramPlan((Input("x", VECTOR),), {}, (step,), (Output("made"),), {})
    with pytest.raises(RuntimeError, match="out of bounds"):
        ProgramRunner(plan, launches([]), TorchMemory())(torch.ones(4))


def test_an_operator_that_returns_too_few_results_is_told_by_its_step():
    """The error names the step, as for a plan that was not bound."""
    step = OperatorStep(
        "aten.max.dim", ({"buffer": "x", "spec": None}, 0), {}, ("a", "b"), False, (VECTOR,) * 2
    )

    class One(TorchMemory):
        def call(self, operator, arguments, keywords):
            return (arguments[0],)

    plan = ProgramPlan((Input("x", VECTOR),), {}, (step,), (Output("a"),), {})
    with pytest.raises(OperatorFailed, match=r"step 0 of the program, aten.max.dim: expected 2"):
        ProgramRunner(plan, launches([]), One())(torch.ones(4))


def test_a_call_computes_what_was_traced_whatever_is_on_around_it():
    """Autocast would multiply in 16 bits; gradients would follow through operators and not through
    kernels, and miss parts without a word.
    """
    program = generate(torch.mm, [torch.ones(4, 4), torch.ones(4, 4)])
    weight = torch.full((4, 4), 1 / 3, requires_grad=True)
    runner = program.runner(TorchMemory(), launches([]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (result,) = runner(torch.ones(4, 4), weight)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert not result.requires_grad
    assert result.equal(torch.ones(4, 4) @ weight.detach())


class Calling(TorchMemory):
    """Notes what operators are given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def call(self, operator, arguments, keywords):
        self.given.append(arguments[1:])
        return torch.ones(4)


def test_equal_constants_of_other_types_and_signs_stay_what_they_are():
    """Each of a call's constants is held once; 1, 1.0 and True are three."""
    constants = [1, 1.0, True, 0.0, -0.0, "1", None, [1, 2], [1.0, 2], [True, 2], 1, [1, 2]]
    step = OperatorStep(
        "aten.relu.default",
        ({"buffer": "x", "spec": None}, *constants),
        {},
        ("y",),
        True,
        (VECTOR,),
    )
    plan = ProgramPlan((Input("x", VECTOR),), {}, (step, step), (Output("y"),), {})
    memory = Calling()
    ProgramRunner(plan, lambda *_: None, memory)(torch.ones(4))
    assert list(map(repr, memory.given)) == [repr(constants)] * 2


class Allocating(TorchMemory):
    """Notes what is made, and how it is shown."""

    def __init__(self):
        super().__init__()
        self.made, self.shown = [], []

    def allocate(self, dtype, sizes, strides):
        self.made.append(sizes)
        return super().allocate(dtype, sizes, strides)

    def view(self, tensor, sizes, strides, offset):
        self.shown.append(sizes)
        return super().view(tensor, sizes, strides, offset)


ROWS = TensorSpec("float32", (2, 2, 3), (6, 3, 1))
SQUARE = TensorSpec("float32", (4, 4), (4, 1))


def shown(sizes, strides, *, dtype="float32", offset=0):
    return {"dtype": dtype, "sizes": sizes, "strides": strides, "offset": offset, "device": ""}


@pytest.mark.parametrize(
    ("one", "other", "returned", "made"),
    [
        (shown((4, 3), (3, 1)), shown((4, 3), (3, 1)), False, (4, 3)),
        (shown((4, 3), (3, 1)), shown((4, 3), (1, 4)), False, (2, 2, 3)),
        (shown((4, 2), (3, 1)), shown((4, 2), (3, 1)), False, (2, 2, 3)),
        (shown((4, 2), (3, 1), offset=1), shown((4, 2), (3, 1), offset=1), False, (2, 2, 3)),
        (
            shown((4, 3), (3, 1), dtype="int32"),
            shown((4, 3), (3, 1), dtype="int32"),
            False,
            ROWS.sizes,
        ),
        (shown((4, 3), (3, 1)), shown((4, 3), (3, 1)), True, (2, 2, 3)),
    ],
    ids=["alike", "unlike", "a part", "a later part", "another type", "a result"],
)
def test_a_buffer_is_made_as_operators_are_given_it(one, other, returned, made):
    """Where all of them see it alike, and whole, nothing shows it to them in another way."""
    memory = Allocating()
    steps = [
        Allocate("rows", ROWS),
        Launch("count", ("@rows",), {"xnumel": 12}),
        *(
            OperatorStep(
                "aten.sum.dim_IntList",
                ({"buffer": "rows", "spec": spec}, [1]),
                {},
                (name,),
                True,
                (TensorSpec("float32", spec["sizes"][:1], (1,)),),
            )
            for name, spec in (("first", one), ("second", other))
        ),
    ]
    outputs = (Output("first"), Output("second"), *([Output("rows", ROWS)] if returned else []))
    plan = ProgramPlan((Input("x", SQUARE),), {}, tuple(steps), outputs, {})

    def launch(_, arguments, __):
        (rows,) = arguments
        rows.set_(torch.arange(12.0).untyped_storage(), 0, rows.shape, rows.stride())

    found = ProgramRunner(plan, launch, memory)(torch.ones(4, 4))
    whole = torch.arange(12.0)
    for got, spec in zip(found, (one, other), strict=False):
        seen = whole.as_strided(spec["sizes"], spec["strides"], spec["offset"])
        assert torch.equal(got, seen.sum(1))
    assert memory.made == [made]
    assert len(memory.shown) == (0 if made == one["sizes"] else 2) + returned
    if returned:
        assert torch.equal(found[2], whole.view(2, 2, 3))
