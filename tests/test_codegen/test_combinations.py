# SPDX-License-Identifier: Apache-2.0
"""Kernels that share a launch: which do, that nothing is computed in another way, that they compile
for GPUs of both makers, and that a bundle launches them with the grid that they need.

`combination_cases` has the functions that run in Triton's interpreter.
"""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sympy  # noqa: E402

from bundler.codegen.loops import combination  # noqa: E402
from bundler.codegen.loops.fusion import LoopGroup  # noqa: E402
from bundler.codegen.loops.loop_nodes import Buffer, ExternCall, Loop, TensorLayout  # noqa: E402
from bundler.codegen.loops.loop_terms import TermPool  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.errors import FormatError  # noqa: E402
from bundler.runtime.launch.drivers.dry_driver import DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.device_tensors import DeviceTensor  # noqa: E402
from bundler.runtime.program.program_plan import Launch, read_plan  # noqa: E402

LIMIT_S = 280


def launched(function, *shapes, dynamic=False):
    """Return the kernels that a function's program launches on a GPU, in order."""
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return launches_of(generate(function, tensors, dynamic=dynamic))


def launches_of(program):
    return [program.kernels[s.kernel] for s in program.plan.steps if isinstance(s, Launch)]


# ------------------------------------------------------------------------------------------ Numbers


@pytest.fixture
def unchanged(beside, interpreted, tmp_path):
    """Assert that cases have the bytes of kernels by themselves, and torch's numbers, in as few
    launches as expected.
    """
    cases = beside("combination_cases").CASES

    def check(*names):
        said = interpreted("combination_worker.py", tmp_path, *names, timeout=LIMIT_S)
        report = json.loads(said)
        assert report.keys() == set(names or cases)
        for name, found in report.items():
            _, _, _, together, apart = cases[name]
            assert found == {"launches": [together, apart], "equal": True, "near": True}, name

    return check


@pytest.mark.timeout(LIMIT_S + 20)
def test_sharing_a_launch_changes_no_bit(unchanged):
    """Gradient clipping, whose rows are held, looped over and cut into pieces; tensors of equal
    sizes; memory that a part could take over and another one reads.
    """
    unchanged("clipped", "changed", "read_by_both")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_no_case_changes_a_bit(unchanged):
    """Also norms, an optimizer's step, random numbers, 16-bit floats."""
    unchanged()


# ----------------------------------------------------------------------------- What shares a launch


def clipped(*gradients):
    parameters = [torch.empty_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@pytest.mark.parametrize(
    "shapes",
    [
        [(1024, 1024), (1024,), (4096, 1024), (300,)],
        [(512, 512)] * 4,
        [(100 + n % 9,) for n in range(60)],
    ],
)
def test_gradients_are_clipped_in_three_launches(shapes):
    """The pieces of all norms, the norms, and what they scale; the norm of norms has no launch of
    its own where it is one of few.
    """
    assert len(launched(clipped, *shapes)) == 3


def test_equal_kernels_are_one_part():
    """The text does not grow with the tensors of a shape: the program chooses its tensors."""
    (few,) = launched(lambda *given: torch._foreach_mul(given, 2), (50,), (50,), (7,))
    (many,) = launched(lambda *given: torch._foreach_mul(given, 2), *[(50,)] * 20, (7,))
    assert [len(kernel.text.parts) for kernel in (few, many)] == [2, 2]
    sizes = {name: int(size) for name, size in many.text.grid_sizes.items()}
    assert sizes == {"xnumel_0": 50, "ynumel_0": 20, "xnumel_1": 7}


def test_different_kernels_of_a_launch_are_bounded():
    """Each is compiled, so a list of many shapes is several launches."""
    kernels = launched(lambda *given: torch._foreach_neg(given), *[(n,) for n in range(9, 59)])
    assert [len(kernel.text.parts) for kernel in kernels] == [combination._MOST_KINDS, 18]


def test_what_fills_a_gpu_by_itself_stays_apart():
    """No launch has more elements than pay for it, and what has more by itself shares none."""
    limit = combination._MOST_ELEMENTS
    kernels = launched(lambda *given: torch._foreach_neg(given), (limit + 1,), (60,), (70,))
    assert sorted(len(kernel.text.parts) for kernel in kernels) == [0, 2]
    # Reductions have a launch of their own where there is more than a little to do.
    kernels = launched(
        lambda *given: [*torch._foreach_norm(given[:2]), *torch._foreach_neg(given[2:])],
        *((600,), (700,), (combination._FEW_ELEMENTS,), (50,)),
    )
    assert [kernel.text.kind for kernel in kernels] == ["reduction", "pointwise"]
    half = limit // 2
    kernels = launched(
        lambda *given: torch._foreach_neg(given), (half,), (half - 1,), (half - 2,), (half - 3,)
    )
    assert [len(kernel.text.parts) for kernel in kernels] == [2, 2]


def test_a_launch_has_no_more_arguments_than_drivers_take():
    """Many tensors are several launches."""
    kernels = launched(lambda *given: torch._foreach_neg(given), *[(9,)] * 200)
    counts = [len(kernel.text.parameters) for kernel in kernels]
    assert len(counts) == 2
    assert max(counts) <= combination._MOST_ARGUMENTS


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: ((a + 1).sort().values, b * 2), ((2000,), (9,))),  # around a call
        (lambda a, b: (a + 1, (a + 1).sum() + b), ((9,), (12,))),  # one waits for the other
        (lambda a, b: (a.cumsum(0), b.cumsum(0)), ((9,), (12,))),
        (lambda a, b: (a + a.t(), b + b.t()), ((48, 48), (50, 50))),  # tiles
        (lambda a, b: (a.sum(1), b.sum(1)), ((48, 90), (50, 100))),  # rows
    ],
)
def test_other_kernels_are_left_as_they_are(function, shapes):
    """Kernels on both sides of a call, that wait for each other, that scan, have tiles or reduce
    rows.
    """
    kernels = launched(function, *shapes)
    assert len(kernels) > 1
    assert not any(kernel.text.parts for kernel in kernels)


def test_sizes_that_change_share_a_launch():
    """The kernel is told the lengths; of one length there is one part."""
    (kernel,) = launched(
        lambda *given: torch._foreach_neg(given), (9,), (12,), (9,), (12,), dynamic=True
    )
    sizes = {name: str(size) for name, size in kernel.text.grid_sizes.items()}
    assert len(kernel.text.parts) == 2
    assert sizes.keys() == {"xnumel_0", "ynumel_0", "xnumel_1", "ynumel_1"}
    assert sizes["xnumel_0"] != sizes["xnumel_1"]
    assert "xnumel_0 = " not in "".join(kernel.text.body)


# ------------------------------------------------------------------------------- The rule by itself


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_only_what_does_not_wait_shares_a_launch(data):
    """For any order of reads and writes, and of calls between: every group runs once, behind all
    that it waits for, and no part of a launch waits for another one, on whatever way.
    """
    names = [f"buf{n}" for n in range(5)]
    layout = TensorLayout("float32", (sympy.Integer(8),), (sympy.Integer(1),))
    buffers = {name: Buffer(name, layout, "input") for name in names}
    pool, groups = TermPool(), []
    for _ in range(data.draw(st.integers(1, 12))):
        read, written = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
        if data.draw(st.integers(0, 5)) == 0:
            call = ExternCall("aten.x.default", (), (), (None,), "", mutated=(written,))
            groups.append(LoopGroup((call,), ()))
            continue
        i, size = sympy.Symbol("i", integer=True), sympy.Integer(data.draw(st.integers(1, 3)))
        term = pool.load(read, i, "float32")
        loop = Loop(written, (i,), (size,), (), (), term, "pointwise", i)
        groups.append(LoopGroup((loop,), (("x", size),)))
    units = combination.combined(groups, buffers, {}, lambda _: True)
    parts = [unit.parts or (unit,) for unit in units]
    place = {id(part): n for n, unit in enumerate(parts) for part in unit}
    assert sorted(place) == sorted(map(id, groups))
    for later, group in enumerate(groups):
        for earlier in groups[:later]:
            touch = earlier.written & group.touched or earlier.touched & group.written
            assert not touch or place[id(earlier)] < place[id(group)]


# ------------------------------------------------------------------------------- Builds and bundles


@pytest.fixture(scope="module")
def built():
    """A program of lists, and its bundle: parts that are elements, held rows, looped rows, and two
    of equal sizes.
    """

    def function(*given):
        return torch._foreach_mul(given, torch.stack(torch._foreach_norm(given)).sum())

    tensors = [torch.empty(shape, device="meta") for shape in ((5000,), (60,), (60,), (9, 9))]
    program = generate(function, tensors)
    return program, program.build(["cuda:90", "hip:gfx942"])


def test_a_combination_is_built_for_every_target(built):
    """Each kernel for each target, with the blocks of each part."""
    program, bundle = built
    assert all(kernel.text.parts for kernel in launches_of(program))
    assert len(bundle.kernels) == 2 * len(program.kernels)


class Memory:
    """Gives out addresses."""

    def __init__(self):
        self.given = 0

    def allocate(self, dtype, sizes, strides):
        self.given += 1
        return DeviceTensor(0x1000_0000 + 0x10000 * self.given, dtype, sizes, strides)


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_bundle_launches_as_many_programs_as_the_parts_need(built, backend):
    """The grid is the sum over parts of blocks and tensors."""
    program, bundle = built
    driver = DryDriver(backend)
    runner = load_program(bundle, memory=Memory(), driver=driver)
    runner(
        *(Memory().allocate("float32", i.spec.sizes, i.spec.strides) for i in program.plan.inputs)
    )
    assert len(driver.launches) == len(launches_of(program)) == 2
    for launch, step in zip(
        driver.launches, [s for s in program.plan.steps if isinstance(s, Launch)], strict=True
    ):
        choices = runner.plan.kernels[step.kernel].choices
        (blocks,) = [c[0].blocks for target, c in choices.items() if target.startswith(backend)]
        programs = sum(
            math.ceil(size / blocks[f"XBLOCK_{name.rpartition('_')[2]}"])
            * step.sizes.get(name.replace("x", "y", 1), 1)
            for name, size in step.sizes.items()
            if name.startswith("x")
        )
        assert launch.grid == (programs, 1, 1)


def test_a_plan_whose_combination_has_no_parts_is_refused(built):
    """The grid of a launch is known from its parameters."""
    program, _ = built
    text = program.plan.to_json().decode()
    assert read_plan(text.encode()) == program.plan
    odd = re.sub(r'"[xy]numel_(\d)"', r'"length\1"', text)
    with pytest.raises(FormatError, match="a kind of grid"):
        read_plan(odd.encode())
