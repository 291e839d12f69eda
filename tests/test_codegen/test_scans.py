# SPDX-License-Identifier: Apache-2.0
"""Scans and sorts: their cases run with pytest in a process in which Triton interprets; they compile for GPUs
of both makers, and sorts that no kernel suits are called.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._higher_order_ops.associative_scan import associative_scan_op  # noqa: E402

from bundler.codegen import generate  # noqa: E402  # needs torch
from bundler.runtime.program.program_plan import Launch  # noqa: E402

LIMIT_S = 580


def scanned_by_the_user(*tensors):
    """Return a scan with a function of two operands."""

    def combine(a0, a1, b0, b1):
        return [torch.sigmoid(a0) * b0, torch.where(b0 > a0, b0, a1)]

    return associative_scan_op(combine, [tensor.t() for tensor in tensors], ())


def test_some_scans_and_sorts_are_torchs(passed):
    """Rows without elements, a scan in two passes; what is sorted is computed, and read; places are
    found in rows of boundaries; masks choose.
    """
    some = "(without_elements or waits_for or around or in_rows or too_short) and not many_pieces"
    passed("scan_cases.py sort_cases.py masked_cases.py", "-k", some)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_scans_are_torchs(passed):
    """Each case of the file."""
    passed("scan_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_sorts_are_torchs(passed):
    """Each case of the file."""
    passed("sort_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_that_masks_choose_is_torchs(passed):
    """Each case of the file."""
    passed("masked_cases.py")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("cases", ["scan_cases.py", "sort_cases.py", "masked_cases.py"])
def test_all_are_torchs_on_a_gpu(passed, cases):
    """Compiled kernels combine in the order of a tree, which the interpreter does not."""
    passed(cases, interpreted=False)


@pytest.mark.slow  # Inductor's table is imported
@pytest.mark.parametrize(
    ("name", "function"),
    [("histc", lambda a: a.histc(10, -1, 1) + 1), ("mode", lambda a: a.mode().values + 1)],
)
def test_what_the_reference_calls_is_called(name, function):
    """A histogram needs a kernel of another kind, which Inductor does not have either; of equally
    frequent values a GPU takes another one than a CPU.
    """
    from torch._inductor import config
    from torch._inductor.lowering import fallbacks

    operator = getattr(torch.ops.aten, name).default
    # Newer releases can sort for a mode, and do not unless they are told to.
    assert operator in fallbacks or not getattr(config.triton, "decompose_sort_ops", False)
    program = generate(function, [torch.zeros(100)])
    assert [one.operator for one in program.fallbacks] == [str(operator)]
    assert len(program.kernels) == 1


@pytest.mark.parametrize(
    ("sizes", "dynamic", "launches"),
    [
        ((2, 1024), False, 1),
        ((2, 1025), False, 1),
        ((9000, 1000), False, 1),
        ((2, 100_000), False, 3),
        ((4, 30), True, 1),
        ((2, 100_000), True, 3),
    ],
)
def test_few_long_rows_are_scanned_in_pieces(sizes, dynamic, launches):
    """One program a row would leave a GPU idle; where sizes change, the example's decide."""
    program = generate(lambda a: a.cumsum(1) + 1, [torch.zeros(sizes)], dynamic=dynamic)
    assert program.fallbacks == ()
    assert sum(isinstance(step, Launch) for step in program.plan.steps) == launches


SCANS = [
    lambda a: (a * 2).cumsum(1) + 1,
    lambda a: a.double().cumprod(1),
    lambda a: a.bfloat16().cummax(1),
    lambda a: (a > 0).cummin(1),
    lambda a: a.logcumsumexp(1),
    lambda a: a.long().cumsum(1, dtype=torch.int8),
    lambda a: scanned_by_the_user(a, a.exp()),
]


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        # Each scan and each kind of row once; all pairs are slow.
        pytest.param(function, sizes, marks=[pytest.mark.slow] if (row + scan) % 3 else [])
        for row, sizes in enumerate([(600, 100), (600, 3000), (2, 30_000)])
        for scan, function in enumerate(SCANS)
    ],
)
def test_scans_compile_for_both_makers(function, sizes):
    """Held rows, looped ones, and rows in pieces."""
    program = generate(function, [torch.zeros(sizes)])
    assert not program.fallbacks
    built = program.build(["cuda:90", "hip:gfx942"])
    assert len(built.kernels) == 2 * len(program.kernels)


def test_both_results_of_a_scan_come_from_one():
    """The extreme and its place share a kernel, and the loop in it."""
    program = generate(lambda a: torch.cummax(a * 2, 1), [torch.zeros(300, 3000)])
    (source,) = program.sources.values()
    assert source.count("tl.associative_scan(") == 1
    assert source.count("tl.load(") == 1


def test_functions_that_combine_are_written_once():
    """Two running sums of a kernel share one function, a product beside them has its own."""

    def function(a, b):
        return a.cumsum(1) + b.cumsum(1) + a.cumprod(1)

    program = generate(function, [torch.zeros(300, 100), torch.zeros(300, 100)])
    (source,) = program.sources.values()
    assert source.count("def combine_") == 2
    assert source.count("tl.associative_scan(") == 3


SORTS = {
    "sort": lambda a: torch.sort(a, dim=1, descending=True),
    "topk": lambda a: a.topk(7, 1),
    "first": lambda a: a.topk(1, 1, largest=False),
    "kthvalue": lambda a: a.kthvalue(3, 1),
    "msort": lambda a: a.t().msort(),
}


@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "kernels"),
    [
        ("sort", (3, 1024), torch.float32, 1),
        ("sort", (100_000, 20), torch.bfloat16, 1),
        ("sort", (3, 1025), torch.float32, 0),
        ("sort", (3, 1024), torch.int64, 2),
        ("topk", (3, 64), torch.float16, 1),
        ("topk", (3, 50_000), torch.float32, 2),
        ("topk", (3, 4096), torch.float32, 1),
        ("topk", (3, 3_000_000), torch.float32, 3),
        ("topk", (3, 50_000), torch.int64, 0),
        ("first", (3, 50_000), torch.float32, 2),
        ("kthvalue", (3, 1000), torch.float32, 1),
        ("kthvalue", (3, 1000), torch.float64, 2),
        ("kthvalue", (3, 1025), torch.float32, 0),
        ("msort", (3, 1000), torch.int32, 1),
    ],
)
def test_rows_that_a_program_holds_are_sorted_by_kernels(name, sizes, dtype, kernels):
    """A longer row is called, but for its first elements; elements of 64 bits take two sorts."""
    program = generate(SORTS[name], [torch.zeros(sizes, dtype=dtype)])
    assert len(program.fallbacks) == (0 if kernels else 1)
    assert len(program.kernels) == kernels


def test_the_first_of_all_are_a_reduction_and_too_many_of_a_long_row_are_called():
    """The largest element is a maximum, of rows of any length; half of a long row is no piece's."""
    largest = generate(lambda a: a.topk(1), [torch.zeros(3, 50_000)])
    assert not largest.fallbacks
    assert not any("lib.sort" in source for source in largest.sources.values())
    half = generate(lambda a: a.topk(257), [torch.zeros(3, 50_000)])
    assert [fallback.operator for fallback in half.fallbacks] == ["aten.topk.default"]


def test_only_what_is_wanted_of_a_row_is_sorted_and_stored():
    """Eight of 64 elements: runs of eight are sorted, and eight are stored, beside the softmax."""
    program = generate(lambda a: a.softmax(-1).topk(8), [torch.zeros(256, 64)])
    (source,) = program.sources.values()
    assert source.count("lib.sort(") == 1
    assert "lib.sort(tl.broadcast_to(" in source
    assert "), 8)" in source
    assert source.count("r0_index < 8)") == 2


def test_the_first_elements_compile_for_both_makers():
    """Of rows with a mask, in runs that are shorter than a row."""
    program = generate(SORTS["topk"], [torch.zeros(64, 30)])
    assert len(program.build(["cuda:90", "hip:gfx942"]).kernels) == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("turned", [False, True])
def test_sorts_compile_for_both_makers(dtype, turned):
    """Rows along memory and across it."""

    def function(a):
        rows = a.t() if turned else a
        return tuple(rows.sort()), tuple(rows.topk(9)), rows.flatten().topk(9)[1]

    program = generate(function, [torch.zeros(100, 100, dtype=dtype)])
    built = program.build(["cuda:90", "hip:gfx942"])
    assert len(built.kernels) == 2 * len(program.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sort", "kthvalue"])
def test_long_rows_of_sorts_compile_for_both_makers(name):
    """As long as any that a program holds."""
    program = generate(SORTS[name], [torch.zeros(4096, 1024)])
    built = program.build(["cuda:90", "hip:gfx942"])
    assert len(built.kernels) == 2 * len(program.kernels)


@pytest.mark.slow
def test_what_masks_choose_compiles_for_both_makers():
    """A mask that one program counts, and one that is counted in pieces, with the gradient."""
    backward = torch.ops.aten.masked_scatter_backward

    def function(a, mask, source):
        return a.masked_scatter(mask, source), backward(a, mask, source.shape)

    for sizes in ((30, 20), (300, 200)):
        mask = torch.zeros(sizes, dtype=torch.bool)
        program = generate(function, [torch.zeros(sizes), mask, torch.zeros(70_000)])
        assert not program.fallbacks
        built = program.build(["cuda:90", "hip:gfx942"])
        assert len(built.kernels) == 2 * len(program.kernels)
