# SPDX-License-Identifier: Apache-2.0
"""The text of every operator compiles for each kind of GPU, without one: a kernel for each dtype
computes all of them.
"""

import pytest

# 8-bit floats that Triton has for a target; what it lacks there is loaded and stored as bytes.
EIGHTS = {
    "cuda:80": ("float8_e5m2",),
    "cuda:90": ("float8_e4m3fn", "float8_e5m2"),
    "cuda:100": ("float8_e4m3fn", "float8_e5m2"),
    "hip:gfx942": ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}
DTYPES = (
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
)
# The text is one for all of CUDA.  NVIDIA's compilers lower halves, and these alone, otherwise for
# each generation: what else compiles for one compiles for all.
EVERYWHERE = ("float16", "bfloat16")
COMPILED = [
    (dtype, target)
    for dtype in DTYPES
    for target in EIGHTS
    if dtype in EVERYWHERE or target in {"cuda:90", "hip:gfx942"}
]
BLOCK = 512


@pytest.fixture
def check(compile_for, beside, tmp_path):
    """Compile all operators for a dtype and a target."""
    kernels = beside("operator_kernels")

    def compile_all(dtype, target):
        text, pointers = kernels.whole_kernel(
            "whole_kernel", dtype, target.split(":")[0], EIGHTS[target]
        )
        (tmp_path / "whole.py").write_text(kernels.HEADER + text)
        types = {name: kernels.pointer_type(pointed) for name, pointed in pointers.items()}
        assert compile_for(tmp_path / "whole.py", "whole_kernel", types, {"BLOCK": BLOCK}, target)

    return compile_all


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "target"), COMPILED)
def test_every_operator_compiles_for_every_target(check, dtype, target):
    """Every operator that a dtype has compiles for the GPU."""
    check(dtype, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype"), [(target, dtype) for target, dtypes in EIGHTS.items() for dtype in dtypes]
)
def test_conversions_of_8_bit_floats_compile(check, target, dtype):
    """What the generator does with an 8-bit float compiles where Triton has that float."""
    check(dtype, target)


def test_inline_assembly_compiles(beside, compile_for, tmp_path):
    """Assembly stands in the text with a register for each value, and the compiled kernel
    holds it.
    """
    kernels = beside("operator_kernels")
    from bundler.codegen.kernels.operation_text import Value, render

    value = render(
        "inline_asm_elementwise",
        [Value("x", "int32"), Value("y", "int32")],
        asm="and.b32 $0, $1, $2;",
        dtype="int32",
    )
    assert value == Value(
        "tl.inline_asm_elementwise('and.b32 $0, $1, $2;', '=r, r, r', [x, y], dtype=tl.int32,"
        " is_pure=True, pack=1)",
        "int32",
    )
    body = (
        "index = tl.arange(0, BLOCK)\n    x = tl.load(out + index)\n    y = x + 1\n   "
        f" tl.store(out + index, {value.text})"
    )
    (tmp_path / "assembly.py").write_text(
        f"{kernels.HEADER}\n@triton.jit\ndef assembly(out, BLOCK: tl.constexpr):\n    {body}\n"
    )
    assert compile_for(
        tmp_path / "assembly.py", "assembly", {"out": "*i32"}, {"BLOCK": 128}, "cuda:90"
    )
