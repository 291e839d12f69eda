# SPDX-License-Identifier: Apache-2.0
"""The text of generated kernels: ten that a reader can follow, parameters and metadata, masks, names, fallbacks."""

import itertools
import re

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.kernel_plan import LARGEST_BLOCK  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting  # noqa: E402
from bundler.runtime.heuristics.persistent_rules import persistent_reduction_configs  # noqa: E402
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs  # noqa: E402
from bundler.runtime.heuristics.reduction_rules import reduction_configs  # noqa: E402


@pytest.fixture
def golden(beside):
    """The module with the ten functions."""
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
    """No block is larger than 4096, nor than the power of two at or above the size: multiples of 4096 and powers of two fill every block."""
    for full in (16384, 3 * 4096, 512):
        assert "xmask" not in text(lambda a: a + 1, torch.zeros(full))
    for other in (16000, 3 * 512):
        assert "xmask = xindex < xnumel" in text(lambda a: a + 1, torch.zeros(other))


@pytest.mark.parametrize(
    "device", [Device("cuda", 132, major=9), Device("cuda", 16, major=12), Device("hip", 304, 64), Device("xpu", 64)]
)
def test_no_candidate_has_a_larger_block_than_masks_count_on(device):
    """Whatever is known of a kernel: blocks are at most the size hint, which is the size itself for a power of two, and 4096 along x."""
    facts = [Facts(num_load=n, num_reduction=n, atomic_add=n > 4, max_xblock=LARGEST_BLOCK["x"]) for n in (1, 12)]
    seen = set()
    for fact, policy in itertools.product(
        facts, (Policy(), Policy(max_autotune=True), Policy(autotune_pointwise=False))
    ):
        setting = Setting(device, fact, policy)
        for x, y in itertools.product((1, 2, 64, 2048, 1 << 26), (1, 8, 512, 1 << 17)):
            found = [
                (hints, pointwise_configs(hints, setting))
                for hints in ({"x": x}, {"x": x, "y": y}, {"x": x, "y": y, "z": 4})
            ]
            for hint in ReductionHint:
                found.append(({"x": x, "r0_": y}, reduction_configs({"x": x, "r0_": y}, setting, hint=hint)))
                if y <= 1024:
                    found.append(
                        ({"x": x, "r0_": y}, persistent_reduction_configs({"x": x, "r0_": y}, setting, hint=hint))
                    )
            for hints, configs in found:
                for config, (axis, hint) in itertools.product(configs, hints.items()):
                    block = config.kwargs.get(f"{axis.upper()}BLOCK", 1)
                    assert block <= min(hint, LARGEST_BLOCK[axis]), (hints, config)
                    seen.add((axis, block))
    assert ("x", 1024) in seen


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
