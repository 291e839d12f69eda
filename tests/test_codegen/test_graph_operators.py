# SPDX-License-Identifier: Apache-2.0
"""Operators of graphs: torch's element-wise functions for each dtype, assembly, 8-bit floats, and
what compiles for which GPU.
"""

import json

import pytest

from bundler.errors import UnsupportedOperator

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
# torch's eager kernels alone shift bools; its roots of minus infinity differ.
OPEN = {"shift_2/bool", "shift_back/bool", "power_half/float16"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_function_of_torch_has_a_case_for_every_dtype(interpreted, tmp_path):
    """A program of one function agrees with torch, signs of zeros, infinities and NaN included, or
    torch refuses the dtype; none falls back.
    """
    cells = json.loads(interpreted("graph_operator_worker.py", tmp_path, timeout=280))
    dtypes = {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "bool",
    }
    functions = {cell.split("/")[0] for cell in cells}
    assert cells.keys() == {f"{function}/{dtype}" for function in functions for dtype in dtypes}
    assert len(functions) > 120
    assert [cell for cell, verdict in cells.items() if verdict.startswith("fallback")] == []
    assert {
        cell: v for cell, v in cells.items() if v not in {"", "torch"} and cell not in OPEN
    } == {}
    assert sum(verdict == "" for verdict in cells.values()) > 1150


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_step_of_an_optimizer_is_one_launch_for_all_parameters(interpreted, tmp_path):
    """AdamW and SGD, on lists of tensors and one by one, through torch.compile: eager's numbers, no
    call of an operator; beside them the step's count.
    """
    report = json.loads(interpreted("optimizer_worker.py", tmp_path, timeout=180))
    assert len(report) == 4
    for found in report.values():
        assert found["difference"] < 5e-7
        assert found["fallbacks"] == []
        assert found["kernels"]
        assert max(found["kernels"]) <= 1 + 1


def generated(function, *tensors, **given):
    from bundler.codegen.program import generate

    return generate(function, tensors, **given)


def assembly(a, b):
    from torch._higher_order_ops import inline_asm_elementwise

    options = {"asm_str": "add.f32 $0, $1, $2;", "constraints": "=f,f,f", "dtype": torch.float32}
    return inline_asm_elementwise(a + 1, b, **options) * 2


def test_assembly_of_a_graph_is_fused_and_refused_for_amd():
    """torch's operator for assembly is a part of the kernel around it; a build for a target without
    PTX says what to do.
    """
    program = generated(assembly, torch.randn(8, 16), torch.randn(16))
    assert program.fallbacks == ()
    (source,) = program.sources.values()
    assert (
        "tl.inline_asm_elementwise('add.f32 $0, $1, $2;', '=f,f,f', [tmp2, tmp1], dtype=tl.float32,"
        " is_pure=True, pack=1)" in source
    )
    with pytest.raises(
        UnsupportedOperator,
        match=r"for hip:gfx942: inline_asm_elementwise holds PTX, which only cuda targets have",
    ):
        program.build(["cuda:90", "hip:gfx942"])


def test_assembly_sees_values_as_memory_has_them():
    """A half is in a register of 16 bits, and a bool is a byte."""
    from bundler.codegen.kernels.operation_text import Value, render

    value = render(
        "inline_asm_elementwise",
        [Value("x", "float16")],
        asm="mov.b16 $0, $1;",
        constraints="=h,h",
        dtype="float16",
    )
    assert (
        value.text == "(tl.inline_asm_elementwise('mov.b16 $0, $1;', '=h,h', [x.to(tl.float16)],"
        " dtype=tl.float16, is_pure=True, pack=1)).to(tl.float32)"
    )


@pytest.mark.parametrize(
    ("target", "least"),
    [
        ("float8_e4m3fn", 2),
        ("float8_e4m3fnuz", 2),
        ("float8_e5m2", 4),
        ("float8_e5m2fnuz", 4),
        ("float16", None),
    ],
)
def test_conversions_of_8_bit_floats_tell_the_heuristic(target, least):
    """A thread holds as many neighbours as the conversion packs, in either direction; no other
    kernel says anything.
    """
    forth = generated(lambda a: (a * 2).to(getattr(torch, target)), torch.ones(64))
    back = generated(lambda a: a.to(torch.float32) + 1, torch.ones(64).to(getattr(torch, target)))
    for program in (forth, back):
        assert program.fallbacks == ()
        (source,) = program.sources.values()
        assert (f"min_elem_per_thread={least}," in source) is (least is not None)
        assert least is not None or "min_elem_per_thread" not in source
        ((_, kernel),) = program.modules.items()
        assert kernel.facts.min_elem_per_thread == (least or 0)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_what_8_bit_floats_cannot_is_refused_by_name(dtype):
    """Arithmetic is called as it is, with operator and dtype in the reason; a target that lacks the
    type refuses the build by its name.
    """
    program = generated(torch.neg, torch.ones(64).to(getattr(torch, dtype)))
    (fallback,) = program.fallbacks
    assert "neg" in fallback.reason
    assert dtype in fallback.reason
    converted = generated(lambda a: a.to(torch.float32), torch.ones(64).to(getattr(torch, dtype)))
    lacking = "cuda:80" if dtype != "float8_e5m2" else None
    if lacking:
        with pytest.raises(UnsupportedOperator, match=f"Triton has no {dtype} there"):
            converted.build([lacking])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS)
def test_programs_compile_for_every_target(beside, target):
    """Random numbers, atomics of every dtype, bitcasts between widths, Bessel functions, pools and
    lists of tensors compile without a GPU.
    """
    beside("program_cases")
    cases = beside("function_cases")
    names = (
        "bessel",
        "of_two_integers",
        "bitcasts",
        "added_to_places",
        "extremes_of_places",
        "pools",
        "lists",
        "gradients_of_averages",
        "gradients_of_maxima",
        "representations",
    )
    for name in names:
        function, make, *_ = cases.CASES[name]
        program = generated(function, *make())
        assert len(program.build([target]).kernels) == len(program.kernels)
    drawn = generated(
        lambda a: (
            torch.rand_like(a),
            torch.randn_like(a),
            torch.bernoulli(a),
            torch.randint(0, 9, (64,)),
        ),
        torch.rand(64),
    )
    assert len(drawn.build([target]).kernels) == len(drawn.kernels)
    added = generated(
        lambda a, v, i: a.index_put([i], v, accumulate=True),
        torch.zeros(64, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1, 1, 2]),
    )
    assert len(added.build([target]).kernels) == 2


def test_sizes_that_are_quotients_of_others_have_kernels():
    """Pools and strided slices of sizes that change: a product of such sizes is divided by one of
    them; a size that a graph asks for is no call.
    """
    from bundler.codegen.program import generate

    def pooled(a):
        return torch.nn.functional.avg_pool2d(a, 3, 2, 1), a[:, ::3] * 2, torch.rand(a.shape[0], 3)

    program = generate(pooled, [torch.randn(2, 3, 8, 9)], dynamic=True)
    assert program.fallbacks == ()
    assert len(program.kernels) == 1  # of three parts, which wait for nothing


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradient_of_a_maximum_is_read_from_windows(dynamic):
    """One kernel, which adds without atomics, for sizes that change too; with windows larger than
    those of the pools that are generated, where they do not overlap.
    """
    backward = torch.ops.aten.max_pool2d_with_indices_backward

    def gradient(size, stride):
        def function(g, x, places):
            return backward(g, x, [size] * 2, [stride] * 2, [0, 0], [1, 1], False, places)

        source = torch.randn(2, 3, 15, 16)
        pooled, places = torch.ops.aten.max_pool2d_with_indices(source, [size] * 2, [stride] * 2)
        return generated(function, pooled, source, places, dynamic=dynamic)

    for size, stride in ((3, 2), (7, 7), (5, 1)):
        program = gradient(size, stride)
        assert program.fallbacks == ()
        (kernel,) = program.kernels.values()
        assert "atomic_add(" not in kernel.source
    (called,) = gradient(6, 1).fallbacks
    assert "more than 25 windows around an element" in called.reason


def test_a_tensor_that_an_operator_changes_behind_its_first_argument_is_a_result_of_it():
    """A leaky slope that is drawn is kept in a second tensor, which the operator would change; it
    is generated in its functional form.
    """
    program = generated(
        lambda a: torch.nn.functional.rrelu(a, 0.1, 0.3, training=True), torch.randn(64)
    )
    assert program.fallbacks == ()
