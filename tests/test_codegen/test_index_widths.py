# SPDX-License-Identifier: Apache-2.0
"""How wide indices are: 64 bits wherever a call may need them, and then in every part of an address."""

import importlib.util
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
ROWS, COLUMNS = 1 << 20, 1 << 12


def only_kernel(program):
    (kernel,) = program.kernels.values()
    return kernel


def numels(kernel):
    return {parameter.type for parameter in kernel.text.parameters if parameter.name.endswith("numel")}


def test_a_size_that_changes_needs_wide_indices():
    """A program with symbolic sizes is called with larger ones than the example's, so its indices have 64 bits."""
    import torch

    from bundler.codegen.program import generate

    def function(a):
        return a * 2, a.t() + 1

    given = [torch.zeros(24, 40)]
    still = only_kernel(generate(function, given))
    changing = only_kernel(generate(function, given, dynamic=True))
    assert numels(still) == {"i32"}
    assert "tl.int64" not in still.source
    assert numels(changing) == {"i64"}
    assert "tl.program_id(0).to(tl.int64)" in changing.source


def test_an_index_that_is_read_is_as_wide_as_the_address():
    """Rows that int32 values choose lie beyond 32 bits: the value becomes 64 bits wide before it is multiplied."""
    import torch

    from bundler.codegen.program import generate

    table, rows = torch.empty(ROWS, COLUMNS, device="meta"), torch.empty(8, dtype=torch.int32, device="meta")
    kernel = only_kernel(generate(lambda a, i: a[i], [table, rows]))
    line = next(line for line in kernel.source.splitlines() if "tl.load(in_ptr1" in line)
    assert f"{COLUMNS} * tmp" in line
    assert ".to(tl.int64)" in line


@pytest.mark.parametrize(("size", "expected"), [(1 << 20, "tl.int32"), (1 << 33, "tl.int64")])
def test_a_float_in_an_address_becomes_an_integer_of_its_width(size, expected):
    """What is rounded to an integer has the width of the kernel's indices."""
    import sympy

    from bundler.codegen.index_functions import FUNCTIONS
    from bundler.codegen.lazy_tensors import GraphBuilder
    from bundler.codegen.loop_nodes import Reference, TensorLayout
    from bundler.codegen.program_builder import build_program

    builder = GraphBuilder()
    layout = TensorLayout("float32", (sympy.Integer(size),), (sympy.Integer(1),))
    tensor = builder.stored("arg0", layout, "input", aligned=True)

    def at(indices):
        half = FUNCTIONS["IntTrueDiv"](indices[0], sympy.Integer(2))
        return tensor.at((FUNCTIONS["TruncToInt"](half),))

    name = builder.realize(builder.lazy(layout.sizes, "float32", at, frozenset({"half"})))
    output = Reference(name, builder.buffers[name].layout)
    kernel = only_kernel(build_program(SimpleNamespace(builder=builder, inputs=["arg0"], outputs=[output], hints={})))
    line = next(line for line in kernel.source.splitlines() if "tl.load(in_ptr0" in line)
    assert f"tl.cast(tl.cast(x0, tl.float64) / 2.0, {expected})" in line


@pytest.mark.parametrize(("target", "refused"), [("cuda:80", True), ("cuda:89", False), ("hip:gfx942", False)])
def test_an_8_bit_float_that_a_target_lacks_is_refused_by_name(target, refused):
    """Before anything is compiled, the error says which kernel, which dtype and which target; `torch.compile` runs such a graph as it is."""
    pytest.importorskip("triton")
    from bundler.codegen.program_build import refuse_missing_types
    from bundler.errors import UnsupportedOperator
    from bundler.format.entries import Target

    sources = {"plain": "tl.float32", "narrow": "tmp1 = tmp0.to(tl.float8e4nv)"}
    if not refused:
        refuse_missing_types(sources, Target.parse(target))
        return
    with pytest.raises(
        UnsupportedOperator, match=rf"narrow for {target}: .* float8_e4m3fn .* float8_e5m2; build"
    ) as caught:
        refuse_missing_types(sources, Target.parse(target))
    assert caught.value.dtypes == ("float8_e4m3fn",)


def test_a_build_and_torch_compile_know_what_a_target_lacks(monkeypatch):
    """A program of 8-bit floats is not built for cuda:80, and there the backend of torch.compile runs its graph as it is."""
    pytest.importorskip("triton")
    import torch

    from bundler.codegen import torch_backend
    from bundler.codegen.graph_tracing import trace
    from bundler.codegen.program import Program, generate
    from bundler.errors import UnsupportedOperator
    from bundler.format.entries import Target

    def function(a):
        return a.to(torch.float8_e4m3fn)

    given = [torch.zeros(64, device="meta")]
    with pytest.raises(UnsupportedOperator, match="cuda:80"):
        generate(function, given).build(["cuda:80"])
    programs = []
    for target in ("cuda:80", "cuda:90"):
        monkeypatch.setattr(torch_backend, "current_target", lambda target=target: Target.parse(target))
        torch_backend.compile_graph(trace(function, given), given, programs=programs)
    assert "float8_e4m3fn" in programs[0].reason
    assert isinstance(programs[1], Program)
