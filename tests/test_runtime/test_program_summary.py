# SPDX-License-Identifier: Apache-2.0
"""What a program needs is told from its plan: inputs, constants, memory, operators that need torch,
targets.
"""

import pytest

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Opaque
from bundler.format.manifest import Content, Observed
from bundler.runtime.program.program_plan import (
    HOST,
    Allocate,
    Input,
    KernelChoice,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    Seeds,
    TensorSpec,
)
from bundler.runtime.program.program_summary import programs_of, summary_of

ROW = TensorSpec("float32", (4, 8), (8, 1))
ACROSS = TensorSpec("float16", (4, 8), (1, 4))


def kernel(*targets):
    return KernelEntry("Grid1D", ("a",), {name: (KernelChoice({}, 4, 1),) for name in targets})


def plan(**more):
    """A plan of one input; a test states what else it has."""
    return ProgramPlan(
        **{"inputs": (Input("x", ROW),), "sizes": {}, "steps": (), "outputs": (), "kernels": {}}
        | more
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Input("x", ROW), "float32[4, 8]"),
        (Input("x", ACROSS, changed=True), "float16[4, 8] with strides [1, 4], changed"),
        (Input("x", TensorSpec("int64", (), (), device=HOST)), "int64[] on the host"),
        (Input("x", TensorSpec("int8", (1, 3), (99, 1))), "int8[1, 3]"),
        (Input("", None, number=3), "number 3"),
        (Input("", None, number=float("nan")), "number nan"),
        (Input("", None), "unused"),
    ],
)
def test_an_input_is_told_as_it_has_to_be(given, told):
    """Dtype, sizes, and what is out of the ordinary: strides, a place on the host, that it is
    changed, a number.
    """
    assert [str(one) for one in summary_of("p", plan(inputs=(given,))).inputs] == [told]


def test_sizes_that_change_are_told_with_where_they_are_read():
    """A size has the name that the types have; memory is not known where sizes change."""
    free = TensorSpec("float32", ("s0", "s1"), ("s1", 1))
    found = summary_of(
        "p",
        plan(
            inputs=(Input("x", free), Input("n", None)),
            sizes={"s0": (0, 0), "s1": (0, 3), "n": (1, -1)},
            steps=(Allocate("y", free),),
            outputs=(Output("y"), Output(None, size="s0"), Output(None)),
        ),
    )
    assert [str(one) for one in found.inputs] == ["float32[s0, s1]", "size"]
    assert found.sizes == {
        "s0": "dimension 0 of input 0",
        "s1": "stride 1 of input 0",
        "n": "input 1",
    }
    assert [str(one) for one in found.results] == ["float32[s0, s1]", "size", "nothing"]
    assert found.memory_bytes is None


def test_memory_is_the_peak_of_what_is_there_at_once():
    """Buffers, seeds and results of operators count until they are released; a view has no memory
    of its own.
    """
    steps = (
        Allocate("a", ROW),  # 128 bytes
        Release("a"),
        Seeds("s", 2),  # 16
        Allocate("b", ACROSS),  # 64
        OperatorStep(
            "aten.mm.default",
            (),
            {},
            ("c", None),
            False,
            (TensorSpec("complex64", (2,), (1,)), None),
        ),  # 16
        OperatorStep("aten.view.default", (), {}, ("d",), True, (ROW,), view=True),
        OperatorStep("aten.mm.default", (), {}, (None,), True, (ROW,)),
    )
    found = summary_of("p", plan(steps=steps))
    assert (found.memory_bytes, found.random) == (128, True)
    assert found.operators == ("aten.mm.default", "aten.view.default")
    assert summary_of("p", plan(steps=steps[2:])).memory_bytes == 96


def test_memory_has_copies_of_inputs_that_are_written_over():
    """A call of a bundle's program leaves them to the caller."""
    inputs = (Input("x", ROW),)
    found = summary_of("p", plan(inputs=inputs, steps=(Overwrite("x"), Allocate("b", ACROSS))))
    assert found.memory_bytes == 192


def test_targets_are_those_of_every_kernel():
    """A program runs where all of its kernels were compiled for."""
    steps = tuple(Launch(name, (), {}) for name in ("k", "l", "k"))
    kernels = {"k": kernel("cuda:90", "cuda:80"), "l": kernel("cuda:90")}
    found = summary_of("p", plan(kernels=kernels, steps=steps))
    assert (found.targets, found.kernels, found.launches) == (("cuda:90",), 2, 3)


def bundle_of(**programs):
    """Return a bundle with plans, or with what is none."""
    blobs = {sha256(data): data for data in programs.values()}
    entries = []
    for name, data in programs.items():
        artifact = Artifact(f"{name}.program.json", digest_text(sha256(data)), len(data))
        entries.append(Opaque(f"programs/{name}.program.json", artifact))
    return Bundle(Content.of(entries), Observed(), MemoryBlobs(blobs))


def test_the_programs_of_a_bundle_by_name_and_a_damaged_one_with_its_problem():
    """What is no plan is said of that program alone."""
    sound = plan(outputs=(Output("x"),), constants=("w",)).to_json()
    bundle = bundle_of(good=sound, bad=b"{}", worse=sound.replace(b'"float32"', b'"floaty"'))
    bad, good, worse = programs_of(bundle)
    assert (good.name, good.constants, good.problem) == ("good", ("w",), None)
    assert "a program's plan" in bad.problem
    assert "floaty" in worse.problem
