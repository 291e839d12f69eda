# SPDX-License-Identifier: Apache-2.0
"""Random functions of tensors: generated kernels compute what torch computes; how the functions are
drawn, compared and made smaller.
"""

import json
from collections import Counter

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")


@pytest.fixture
def graphs(beside):
    """The module that draws."""
    return beside("random_graphs")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), [(0, 125), (125, 125), (250, 125), (375, 125)])
def test_kernels_of_random_functions_compute_what_torch_computes(
    interpreted, tmp_path, first, count
):
    """Floats are off by no more than twice what torch's are, and all else is exact, in Triton's
    interpreter; what fails is shown as small as it gets.
    """
    report = json.loads(interpreted("random_graph_worker.py", tmp_path, first, count, timeout=280))
    assert report["found"] == {}
    assert report["counts"]["graphs"] == count
    assert report["counts"]["kernels"] >= count // 2
    # The variance of nothing is torch's own.
    assert {name for name in report["counts"] if name.startswith("fallback ")} <= {
        "fallback aten.var.correction",
        "fallback aten.var_mean.correction",
    }


def test_a_seed_draws_one_function(graphs):
    """The same seed draws the same description, which torch computes, with the same numbers."""
    for seed in range(20):
        description = graphs.drawn(seed)
        assert description == graphs.drawn(seed)
        assert eval(repr(description), vars(graphs)) == description
        given = graphs.inputs(description)
        results = graphs.function(description)(*given)
        assert len(results) == len(description.outputs)
        assert graphs.checked(description, results) == ""


def test_what_is_drawn_covers_operators_sizes_layouts_and_dtypes(graphs):
    """A few hundred seeds draw every operator, dtype and layout, sizes around powers of two, and
    empty tensors.
    """
    drawn = [graphs.drawn(seed) for seed in range(400)]
    operators = Counter(step.operator for description in drawn for step in description.steps)
    assert {*graphs.COMPUTE, "cast"} - set(operators) <= {
        "bitwise_not",
        "fmod",
        "trunc_divide",
        "logical_not",
    }
    given = [tensor for description in drawn for tensor in description.inputs]
    assert {tensor.dtype for tensor in given} >= {*graphs.FLOATS, *graphs.INTEGERS, "bool"}
    assert {tensor.layout for tensor in given} == set(graphs.LAYOUTS)
    assert {size for tensor in given for size in tensor.shape} >= {0, 1, 15, 16, 17, 31, 32, 33}
    assert any(tensor.special for tensor in given)


def test_a_wrong_result_is_seen(graphs):
    """A float that is off, an integer, a dtype, a shape, and a number in place of NaN are each
    found.
    """
    description = graphs.Description(
        (graphs.Input((64,), "float32", special=True), graphs.Input((64,), "int32")),
        (graphs.Step("sin", (0,)), graphs.Step("add_number", (1,), (1,))),
        (2, 3),
    )
    right = graphs.function(description)(*graphs.inputs(description))
    assert right[0].isnan().any()
    finite = right[0].isfinite()
    wrong = [
        (torch.where(finite, right[0] + 1e-4, right[0]), right[1]),
        (right[0], right[1] + 1),
        (right[0].double(), right[1]),
        (right[0][:63], right[1]),
        (right[0].nan_to_num(0.0), right[1]),
        (torch.where(finite, float("inf"), right[0]), right[1]),
    ]
    assert graphs.checked(description, right) == ""
    assert [bool(graphs.checked(description, results)) for results in wrong] == [True] * len(wrong)


def test_a_failing_function_is_made_as_small_as_it_gets(graphs):
    """Steps, outputs, layouts and sizes that have nothing to do with a failure are taken away."""
    description = graphs.Description(
        (
            graphs.Input((31, 8), "float16", "transposed", special=True),
            graphs.Input((8,), "float32", "sliced"),
        ),
        (
            graphs.Step("sin", (0,)),
            graphs.Step("add", (2, 1)),
            graphs.Step("tanh", (3,)),
            graphs.Step("sum", (4,), (1, False)),
            graphs.Step("cos", (3,)),
        ),
        (5, 6),
    )
    least = graphs.smaller(
        description, lambda found: any(step.operator == "tanh" for step in found.steps)
    )
    assert [step.operator for step in least.steps] == ["tanh"]
    assert len(least.outputs) == 1
    assert {size for given in least.inputs for size in given.shape} == {1}
    assert {given.layout for given in least.inputs} == {"contiguous"}


def test_the_program_for_a_gpu_draws_the_same_functions_at_other_sizes():
    """`tools/codegen/random_sides.py` has a copy of the module that draws for each scale; large
    sizes and the rows of both are drawn.
    """
    from tools.codegen import random_sides

    large, small = random_sides._graphs("large"), random_sides._graphs("small")
    assert (large.SIZES, large.LARGEST) == (random_sides.SIZES, random_sides.LARGEST)
    assert max(small.SIZES) < 100
    sizes = {
        size for seed in range(12) for given in large.drawn(seed).inputs for size in given.shape
    }
    assert max(sizes) >= 1000
    assert sizes <= {*random_sides.SIZES, 0}


def test_a_tensor_is_moved_with_its_strides():
    """What is sliced, turned or expanded has the same strides and offset in the memory that it is
    copied to.
    """
    from tools.codegen import random_sides

    for tensor in (
        torch.arange(12.0).reshape(3, 4)[:, 1::2],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(1, 4).expand(3, 4),
        torch.ones(0, 4),
    ):
        moved = random_sides._moved(tensor, "meta")
        assert (moved.shape, moved.stride(), moved.storage_offset()) == (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
        )
