# SPDX-License-Identifier: Apache-2.0
"""Sizes that change from call to call, and what is made of them: floats, comparisons, rounded
integers; what no program can know is refused.
"""

import itertools
import json

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
sympy = pytest.importorskip("sympy")

from bundler.codegen.loops.size_text import size_text  # noqa: E402
from bundler.codegen.lowerings.view_lowerings import beginning, from_end  # noqa: E402
from bundler.codegen.program import generate  # noqa: E402
from bundler.errors import ConfigError, UnsupportedOperator  # noqa: E402
from bundler.runtime.heuristics.launch_expressions import evaluate  # noqa: E402


@pytest.mark.slow
def test_functions_of_sizes_have_eager_s_numbers_for_every_size(interpreted, tmp_path):
    """By torch.compile and by `generate`, floats made of sizes with 64 bits; no graph runs as torch
    has it.
    """
    result = json.loads(interpreted("changing_sizes_worker.py", tmp_path, timeout=400))
    assert (result["wrong"], result["whole"], result["scatters"]) == ({}, [], [])
    assert result["cases"] >= 14


@pytest.mark.parametrize(
    "case",
    ["one of each", *(pytest.param(c, marks=pytest.mark.slow) for c in ("written", "squared"))],
)
def test_slices_that_begin_at_numbers_of_either_sign_have_eager_s_numbers(
    interpreted, tmp_path, case
):
    """Also in front of the tensor or beyond it, written and read, backward; nothing is called."""
    result = json.loads(interpreted("slice_worker.py", tmp_path, case))
    assert result == {"wrong": [], "called": [], "whole": []}


@pytest.mark.parametrize("known", [{}, {"nonnegative": True}, {"negative": True}])
@pytest.mark.parametrize("end", [None, 4, -2])
@pytest.mark.parametrize("step", [1, 3])
def test_a_slice_begins_where_python_s_does(known, end, step):
    """Whatever is known of the number's sign; where a slice has no elements it may begin
    anywhere.
    """
    start = sympy.Symbol("start", integer=True, **known)
    length, size = sympy.symbols("length size", integer=True, nonnegative=True)
    found = beginning({"start": start, "end": end, "step": step}, length, size)
    for number, count in itertools.product(range(-9, 10), range(8)):
        expected = range(count)[number:end:step]
        values = {start: number, length: count, size: len(expected)}
        fits = number < 0 if "negative" in known else number >= 0 or not known
        if fits and len(expected):
            assert found.subs(values) == expected[0]
        if fits and -count <= number < count:
            assert from_end(start, length).subs(values) == range(count)[number]


def test_a_float_of_sizes_is_a_number_that_the_host_computes():
    """It is an argument of the kernel with 64 bits, computed once in a call, and the kernels
    compile.
    """
    program = generate(
        lambda x: (x * (1.0 / x.shape[0]), x * x.shape[0] ** 0.5),
        [torch.ones(6, 5, dtype=torch.float64)],
        dynamic=True,
    )
    assert sorted(program.plan.values.values()) == ["(1.0 / float(ks0))", "(float(ks0) ** 0.5)"]
    (source,) = program.sources.values()
    assert "in_number0: tl.float64" in source
    assert len(program.build(["cuda:90"]).kernels) == 1


def test_a_call_with_sizes_that_the_graph_is_not_for_is_refused():
    """The function branches on a size, so the program holds on one side alone; sizes of 1
    broadcast, so they are another graph.
    """
    program = generate(
        lambda x: x + 1 if x.shape[0] > 5 else x - 1, [torch.ones(8, 3)], dynamic=True
    )
    for rows in (4, 1):
        with pytest.raises(ConfigError, match="holds for sizes with"):
            program.run(torch.ones(rows, 3))


def test_a_size_that_values_decide_is_refused():
    """The error names the operator."""
    for function in (lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x * x.sum().item()):
        for dynamic in (False, True):
            with pytest.raises(UnsupportedOperator):
                generate(function, [torch.ones(6)], dynamic=dynamic)


def test_a_number_of_the_call_may_be_negative():
    """A size is positive, a number that is given is not: what follows from its sign is not
    simplified.
    """
    program = generate(lambda x, n: x * max(n, 0) + n, [torch.ones(6), 3], dynamic=True)
    assert "max" in str(program.plan.to_json()) or program.plan.guards


def test_a_constant_that_is_read_on_the_host_is_compiled():
    """torch.compile's fake tensors are active while a graph is lowered; its constants are real."""
    compiled = torch.compile(
        lambda x: x.cos() / torch.tensor(64.0), backend="triton_bundler", fullgraph=True
    )
    x = torch.randn(5)
    torch.testing.assert_close(compiled(x), x.cos() / 64)


def test_a_product_of_sizes_that_are_sums_is_written_as_a_product():
    """Expanded it has hundreds of terms, and would be longer than a plan's texts may be."""
    names = sympy.symbols("ks0:12", integer=True, positive=True)
    sums = [sympy.Add(1, *names[n : n + 6]) for n in (0, 3, 6)]
    text = size_text(sympy.expand(sums[0] * sums[1] * sums[2]))
    assert len(text) < 200
    values = {str(name): place + 2 for place, name in enumerate(names)}
    right = 1
    for one in sums:
        right *= int(one.subs({name: values[str(name)] for name in names}))
    assert evaluate(text, values) == right


def test_a_size_with_a_longer_text_than_plans_have_is_refused():
    """Where the sum is no product it stays long: the graph runs as torch has it, and no
    call fails.
    """
    names = sympy.symbols("ks0:40", integer=True, positive=True)
    size = sum(one * other for one, other in itertools.combinations(names, 2)) + 7
    with pytest.raises(UnsupportedOperator, match="a text of up to 4096 characters"):
        size_text(size)
