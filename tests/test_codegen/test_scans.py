# SPDX-License-Identifier: Apache-2.0
"""Scans and sorts: their cases run with pytest in a process in which Triton interprets; they compile for GPUs
of both makers, and rows that no kernel suits are called.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._higher_order_ops.associative_scan import associative_scan_op  # noqa: E402

from bundler.codegen import generate  # noqa: E402  # needs torch

HERE = Path(__file__).parent
LIMIT_S = 580


def scanned_by_the_user(*tensors):
    """Return a scan with a function of two operands."""

    def combine(a0, a1, b0, b1):
        return [torch.sigmoid(a0) * b0, torch.where(b0 > a0, b0, a1)]

    return associative_scan_op(combine, [tensor.t() for tensor in tensors], ())


def passed(tmp_path, cases, *arguments, interpreted="1"):
    """Run cases in Triton's interpreter, or on a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    files = [HERE / name for name in cases.split()]
    command += [f"--rootdir={tmp_path}", "-c", os.devnull, *files, *arguments]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "TRITON_INTERPRET": interpreted,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_some_scans_and_sorts_are_torchs(tmp_path):
    """Rows without elements, a scan in two passes, one behind a mask; what is sorted is computed,
    and read; places are found in rows of boundaries.
    """
    some = "without_elements or waits_for or who_reads or around or in_rows"
    passed(tmp_path, "scan_cases.py sort_cases.py", "-k", some)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_scans_are_torchs(tmp_path):
    """Each case of the file."""
    passed(tmp_path, "scan_cases.py")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_all_sorts_are_torchs(tmp_path):
    """Each case of the file."""
    passed(tmp_path, "sort_cases.py")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("cases", ["scan_cases.py", "sort_cases.py"])
def test_all_are_torchs_on_a_gpu(tmp_path, cases):
    """Compiled kernels combine in the order of a tree, which the interpreter does not."""
    passed(tmp_path, cases, interpreted="0")


@pytest.mark.parametrize(
    ("sizes", "dynamic", "expected"),
    [
        ((2, 1024), False, []),
        ((2, 1025), False, []),
        ((9000, 1000), False, []),
        ((2, 100_000), False, []),
        ((4, 30), True, []),
        ((2, 100_000), True, ["aten.cumsum.default"]),
    ],
)
def test_few_long_rows_whose_sizes_change_are_called(sizes, dynamic, expected):
    """One program a row would be far slower than torch, and no number of pieces suits every
    call.
    """
    program = generate(lambda a: a.cumsum(1) + 1, [torch.zeros(sizes)], dynamic=dynamic)
    assert [fallback.operator for fallback in program.fallbacks] == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a * 2).cumsum(1) + 1,
        lambda a: a.double().cumprod(1),
        lambda a: a.bfloat16().cummax(1),
        lambda a: (a > 0).cummin(1),
        lambda a: a.logcumsumexp(1),
        lambda a: a.long().cumsum(1, dtype=torch.int8),
        lambda a: scanned_by_the_user(a, a.exp()),
    ],
)
@pytest.mark.parametrize("sizes", [(600, 100), (600, 3000), (2, 30_000)])
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


@pytest.mark.parametrize(
    ("sizes", "stable", "called"),
    [
        ((3, 128), True, 0),
        ((3, 129), True, 1),
        ((3, 20), True, 0),
        ((3, 33), False, 0),
        ((3, 32), False, 1),
        ((100_000, 100), True, 1),
    ],
)
def test_short_rows_are_sorted_by_kernels(sizes, stable, called):
    """A long row has too many pairs; of a short one torch has an order of equals of its own, unless
    that was asked for.
    """
    program = generate(lambda a: torch.sort(a, dim=1, stable=stable), [torch.zeros(sizes)])
    assert len(program.fallbacks) == called
    assert len(program.kernels) == (0 if called else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_sorts_compile_for_both_makers(dtype):
    """Rows along memory and across it."""
    for dim in (0, 1):
        program = generate(
            lambda a, dim=dim: torch.sort(a, dim=dim, stable=True),
            [torch.zeros(100, 100, dtype=dtype)],
        )
        assert len(program.build(["cuda:90", "hip:gfx942"]).kernels) == 4
