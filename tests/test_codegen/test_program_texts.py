# SPDX-License-Identifier: Apache-2.0
"""The text of generated kernels: eleven that a reader can follow, parameters and metadata, masks, names, fallbacks."""

import re

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.program import generate  # noqa: E402


@pytest.fixture
def golden(beside):
    """The module with the eleven functions."""
    return beside("golden_programs")


@pytest.mark.parametrize(
    "name",
    [
        "add_relu",
        "broadcast",
        "transpose",
        "half_gate",
        "embedding",
        "padding",
        "row_sum",
        "softmax",
        "long_layer_norm",
        "argmax",
    ],
)
def test_the_text_of_a_kernel_is_the_one_that_was_read(golden, name):
    """A change of the text is seen: `python tests/test_codegen/golden_programs.py` writes it anew, to be read."""
    assert golden.text_of(name) == (golden.GOLDEN / f"{name}.txt").read_text()


def text(function, *inputs, **options):
    return "\n".join(generate(function, inputs, **options).sources.values())


def test_a_mask_that_is_always_true_is_left_out():
    """No block is larger than 8192, so a multiple of that fills every block; another size does not."""
    assert "xmask" not in text(lambda a: a + 1, torch.zeros(16384))
    assert "xmask = xindex < xnumel" in text(lambda a: a + 1, torch.zeros(16000))


def test_a_long_softmax_runs_over_its_row_twice():
    """Maximum and sum of exponentials in one pass, the results in another; a short row is held whole."""
    assert text(lambda a: torch.softmax(a, -1), torch.zeros(300, 2000)).count("for r0_offset") == 2
    assert "for " not in text(lambda a: torch.softmax(a, -1), torch.zeros(300, 200))


def test_equal_kernels_are_one():
    """Two kernels that differ in nothing but their names are launched under one."""
    program = generate(lambda a, b: (a.t() @ a + 1, b.t() @ b + 1), [torch.zeros(8, 8), torch.zeros(8, 8)])
    assert len(program.kernels) == 1
    assert sum(1 for step in program.plan.steps if type(step).__name__ == "Launch") == 2


def test_the_signature_says_types_alignment_and_what_changes():
    """Pointers come first, then numels; multiples of 16 are marked; an input that is changed is an in-out pointer."""

    def function(x, y):
        x.add_(y)
        return x * 2

    (kernel,) = generate(function, [torch.zeros(32), torch.zeros(32)]).kernels.values()
    assert [(p.name, p.type) for p in kernel.text.parameters] == [
        ("in_out_ptr0", "*fp32"), ("in_ptr0", "*fp32"), ("out_ptr0", "*fp32"), ("xnumel", "i32"),
    ]  # fmt: skip
    assert "'mutated_arg_names': ['in_out_ptr0']" in kernel.source
    assert kernel.source.count("['tt.divisibility', 16]") == 4
    assert re.fullmatch(r"triton_poi_fused_add_mul_0", kernel.name)


def test_what_is_not_generated_is_called_and_listed():
    """A product of matrices, a sort and a mask as an index are calls of the wrapper, each with its reason."""

    def function(a, b):
        return torch.sort(a @ b).values + 1

    program = generate(function, [torch.zeros(4, 8), torch.zeros(8, 5)])
    assert [fallback.operator for fallback in program.fallbacks] == ["aten.mm.default", "aten.sort.default"]
    assert all(fallback.reason for fallback in program.fallbacks)
    assert len(program.kernels) == 1


def test_the_text_needs_no_torch():
    """No generated module names torch."""
    assert "torch" not in text(lambda a: torch.softmax(a, -1).to(torch.bfloat16), torch.zeros(4, 30)).replace(
        "torch_", ""
    )


def test_memory_that_nobody_reads_again_is_written_over():
    """What a call returned is taken by the kernel that reads it last."""
    program = generate(lambda a, b: (a @ b).relu(), [torch.zeros(4, 8), torch.zeros(8, 4)])
    (kernel,) = program.kernels.values()
    assert [parameter.name for parameter in kernel.text.parameters] == ["in_out_ptr0", "xnumel"]


def test_a_row_wise_result_does_not_join_a_sum_of_columns():
    """A sum of columns that is done in pieces has as many elements as the input; what reads the input along its rows is a kernel of its own."""

    def function(a, g):
        return (a * g).sum(0), a + 1

    program = generate(function, [torch.empty(4096, 1024), torch.empty(4096, 1024)])
    reducing = [source for source in program.sources.values() if "tl.sum(" in source]
    assert not any("fused_add" in source for source in reducing)
    assert len(program.kernels) > len(reducing)
