# SPDX-License-Identifier: Apache-2.0
"""How wide indices are: 64 bits wherever a call may need them, and then in every part of an
address.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
ROWS, COLUMNS = 1 << 20, 1 << 12


def only_kernel(program):
    (kernel,) = program.kernels.values()
    return kernel


def numels(kernel):
    return {
        parameter.type for parameter in kernel.text.parameters if parameter.name.endswith("numel")
    }


def test_a_size_that_changes_has_narrow_indices_up_to_a_bound():
    """A program with symbolic sizes has indices of 32 bits, and refuses calls with more elements;
    one that was asked for takes them with 64 bits.
    """
    from bundler.codegen.program import GenerateOptions, generate
    from bundler.errors import ConfigError
    from bundler.runtime.program.program_plan import read_plan

    def function(a):
        return a * 2, a + 1

    given = [torch.zeros(24, 40)]
    still, changing = (generate(function, given, dynamic=dynamic) for dynamic in (False, True))
    asked = generate(function, given, dynamic=True, options=GenerateOptions(wide_indices=True))
    for program in (still, changing):
        assert numels(only_kernel(program)) == {"i32"}
        assert "tl.int64" not in only_kernel(program).source
    assert numels(only_kernel(asked)) == {"i64"}
    assert "tl.program_id(0).to(tl.int64)" in only_kernel(asked).source
    assert still.plan.limits == asked.plan.limits == {}
    limits = {"(ks0 * ks1)": 2**31 - 1, "ks0": 2**31 - 1, "ks1": 2**31 - 1}
    assert read_plan(changing.plan.to_json()).limits == changing.plan.limits == limits

    def refused(*_):
        raise AssertionError("nothing is launched")

    huge = torch.empty(1 << 16, 1 << 15, device="meta")
    with pytest.raises(
        ConfigError,
        match=r"\(ks0 \* ks1\) to be at most 2147483647, got 2147483648; .*wide_indices=True",
    ):
        changing.runner(SimpleNamespace(), refused)(huge)


def test_torch_compiles_anew_where_indices_would_not_fit(monkeypatch):
    """The backend has torch guard the bound: a call beyond it gets a graph of its own, one below it
    does not.
    """
    from bundler.codegen import lower
    from bundler.codegen.torch_backend import triton_bundler

    monkeypatch.setattr(lower, "_LARGEST_NARROW", 2000)
    made = []
    compiled = torch.compile(
        lambda a: a * 2 + 1, backend=triton_bundler, options={"programs": made}, dynamic=True
    )
    counts = []
    for rows in (10, 20, 125, 126, 200):
        compiled(torch.ones(rows, 16))
        counts.append(len(made))
    assert counts == [1, 1, 1, 2, 2]


def test_a_value_of_an_index_is_as_large_as_it_is():
    """What is counted may leave the bits that indices have: it is computed in 64 bits, whatever the
    kernel's addresses need.
    """
    from bundler.codegen.program import generate

    far = only_kernel(
        generate(
            lambda a: a + torch.arange(0, 5 * 2**30, 2**30), [torch.zeros(5, dtype=torch.int64)]
        )
    )
    near = only_kernel(
        generate(lambda a: a + torch.arange(0, 10, 2), [torch.zeros(5, dtype=torch.int64)])
    )
    assert "(1073741824 * x0.to(tl.int64))" in far.source
    assert "(2 * x0).to(tl.int64)" in near.source


def test_a_size_as_a_number_is_an_operand():
    """A size that changes is a number of the kernel where the function computes with it."""
    from bundler.codegen.program import generate

    program = generate(
        lambda a: torch.arange(a.shape[0])[:, None] * a.shape[1], [torch.zeros(6, 7)], dynamic=True
    )
    assert program.fallbacks == ()
    assert "tl.cast(ks0, tl.int64)" in only_kernel(program).source


def test_an_index_that_is_read_is_as_wide_as_the_address():
    """Rows that int32 values choose lie beyond 32 bits: the value becomes 64 bits wide before it is
    multiplied.
    """
    from bundler.codegen.program import generate

    table, rows = (
        torch.empty(ROWS, COLUMNS, device="meta"),
        torch.empty(8, dtype=torch.int32, device="meta"),
    )
    kernel = only_kernel(generate(lambda a, i: a[i], [table, rows]))
    line = next(line for line in kernel.source.splitlines() if "tl.load(in_ptr1" in line)
    assert f"{COLUMNS} * tmp" in line
    assert ".to(tl.int64)" in line


@pytest.mark.parametrize(("size", "expected"), [(1 << 20, "tl.int32"), (1 << 33, "tl.int64")])
def test_a_float_in_an_address_becomes_an_integer_of_its_width(size, expected):
    """What is rounded to an integer has the width of the kernel's indices."""
    import sympy

    from bundler.codegen.loops.index_functions import FUNCTIONS
    from bundler.codegen.loops.lazy_tensors import GraphBuilder
    from bundler.codegen.loops.loop_nodes import Reference, TensorLayout
    from bundler.codegen.schedule import schedule_program

    builder = GraphBuilder()
    layout = TensorLayout("float32", (sympy.Integer(size),), (sympy.Integer(1),))
    tensor = builder.stored("arg0", layout, "input", aligned=True)

    def at(indices):
        half = FUNCTIONS["IntTrueDiv"](indices[0], sympy.Integer(2))
        return tensor.at((FUNCTIONS["TruncToInt"](half),))

    name = builder.realize(builder.lazy(layout.sizes, "float32", at, frozenset({"half"})))
    output = Reference(name, builder.buffers[name].layout)
    kernel = only_kernel(
        schedule_program(
            SimpleNamespace(
                builder=builder,
                inputs=["arg0"],
                outputs=[output],
                changed=frozenset(),
                hints={},
                values={},
                guards=[],
                names={},
                freed=frozenset(),
                donated=frozenset(),
            )
        )
    )
    line = next(line for line in kernel.source.splitlines() if "tl.load(in_ptr0" in line)
    assert f"tl.cast(tl.cast(x0, tl.float64) / 2.0, {expected})" in line


@pytest.mark.parametrize(
    ("target", "refused"), [("cuda:80", True), ("cuda:89", False), ("hip:gfx942", False)]
)
def test_an_8_bit_float_that_a_target_lacks_is_refused_by_name(target, refused):
    """Before anything is compiled, the error says which kernel, which dtype and which target;
    `torch.compile` runs such a graph as it is.
    """
    pytest.importorskip("triton")
    from bundler.codegen.emit import refuse_missing_types
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
    """A program of 8-bit floats is not built for cuda:80, and there the backend of torch.compile
    runs its graph as it is.
    """
    pytest.importorskip("triton")

    from bundler.codegen import torch_backend
    from bundler.codegen.program import Program, generate
    from bundler.codegen.trace import trace
    from bundler.errors import UnsupportedOperator
    from bundler.format.entries import Target

    def function(a):
        return a.to(torch.float8_e4m3fn)

    given = [torch.zeros(64, device="meta")]
    with pytest.raises(UnsupportedOperator, match="cuda:80"):
        generate(function, given).build(["cuda:80"])
    programs = []
    for target in ("cuda:80", "cuda:90"):
        monkeypatch.setattr(
            torch_backend, "current_target", lambda target=target: Target.parse(target)
        )
        torch_backend.compile_graph(trace(function, given), given, programs=programs)
    assert "float8_e4m3fn" in programs[0].reason
    assert isinstance(programs[1], Program)
