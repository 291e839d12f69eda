# SPDX-License-Identifier: Apache-2.0
"""Kernels that reduce rows and across rows: gradients of norms in two launches, as near to float64
as eager torch's; where one kernel cannot have both, or does not gain by it, it does not.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F  # noqa: E402

from bundler.codegen import generate  # noqa: E402  # needs torch
from bundler.runtime.program.program_plan import Launch  # noqa: E402

TARGETS = ["cuda:90", "hip:gfx942"]
#: Name -> launches, and kernels that also reduce across rows, at few rows.
CASES = {
    "layer_norm": (2, 1),
    "rms_norm": (2, 1),
    "chained": (2, 1),
    "extremes": (2, 1),
    "softmax": (3, 1),
    "behind_columns": (4, 0),
    "beside_a_scan": (2, 1),
    "in_place": (2, 1),
}


def layer_norm(x, w, b, g):
    _, backward = torch.func.vjp(lambda *a: F.layer_norm(a[0], (x.shape[-1],), a[1], a[2]), x, w, b)
    return backward(g)


def rms_norm(x, w, b, g):
    _, backward = torch.func.vjp(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), x, w)
    return *backward(g), b + 1


def empty(rows, columns, dtype=torch.float32):
    wide, long = torch.empty(rows, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
    return [wide, long, torch.empty_like(long), torch.empty_like(wide)]


def launched(program):
    return [step.kernel for step in program.plan.steps if isinstance(step, Launch)]


def mixed(program):
    """Return the kernels that also reduce across rows."""
    return [source for source in program.sources.values() if "rsplit_size" in source]


def wrong(outcomes):
    """Return the cases whose results are too far from float64."""
    return {name: found for name, (_, _, found) in outcomes.items() if found}


def test_each_is_as_near_to_exact_numbers_as_torch(interpreted):
    """With a last block of rows that is not full; also where an input changes, a scan is of the
    same rows, and rows have to wait for all columns.
    """
    outcomes = json.loads(interpreted("mixed_worker.py", *CASES))
    assert not wrong(outcomes)
    assert [tuple(found[:2]) for found in outcomes.values()] == list(CASES.values())


@pytest.mark.slow
def test_one_program_takes_any_number_of_rows(interpreted):
    """Fewer and more than those that it was generated for."""
    assert json.loads(interpreted("mixed_worker.py", "changing")) == [1, []]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_sizes_and_dtypes_are_as_near_to_exact_numbers_as_torch(interpreted):
    """Drawn ones."""
    assert not wrong(json.loads(interpreted("mixed_worker.py", "random", "40", timeout=580)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8192, 768), (16384, 4096)])
@pytest.mark.parametrize(("function", "norm"), [(layer_norm, 2), (rms_norm, 3)])
def test_the_gradients_of_a_norm_are_two_launches(function, norm, sizes, dtype):
    """One kernel has the values of all rows; the second adds what its programs have. `b + 1` of the
    other function is one more.
    """
    program = generate(function, empty(*sizes, dtype))
    assert (len(launched(program)), len(mixed(program))) == (norm, 1)
    (source,) = mixed(program)
    # Each input is read once.
    assert source.count("4096 * x0") + source.count("768 * x0") == 3


@pytest.mark.parametrize("sizes", [(4096, 1024), (2048, 4096), (6000, 3500), (200_000, 32)])
def test_small_or_wide_ones_are_three_launches(sizes):
    """What is in the cache is read again sooner than programs could share it out."""
    program = generate(layer_norm, empty(*sizes))
    assert (len(launched(program)), len(mixed(program))) == (3, 0)


def test_rows_that_wait_for_columns_are_another_kernel():
    """They would have to wait for all programs."""

    def function(x):
        return (x * x.sum(0)).sum(1)

    assert not mixed(generate(function, [torch.empty(16384, 512)]))


def test_columns_of_other_values_are_another_kernel():
    """Without a common input nothing is saved."""
    wide = torch.empty(16384, 512)
    assert not mixed(generate(lambda a, b: (a.sum(1), b.sum(0)), [wide, wide.clone()]))
    assert mixed(generate(lambda a, b: (a.sum(1), (a * b).sum(0)), [wide, wide.clone()]))


def test_a_kernel_has_a_mask_where_its_last_rows_are_not_full():
    """A program takes a fixed number of rows, of which any block is a part."""
    sources = [mixed(generate(layer_norm, empty(rows, 512)))[0] for rows in (16384, 16380)]
    assert ["xmask" in source for source in sources] == [False, True]
    assert all("rsplit_size=16," in source for source in sources)


def test_few_rows_are_loaded_ahead_where_they_fit_in_shared_memory():
    """Every GPU has as much; longer rows are loaded when they are needed."""
    sources = [mixed(generate(layer_norm, empty(16384, n)))[0] for n in (1024, 4096)]
    assert ["allow_multi_stages=True" in source for source in sources] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((16384, 4096), torch.bfloat16),
        ((20001, 300), torch.float32),
        ((70000, 8192), torch.float16),
        ((4_200_000, 512), torch.float32),
    ],
)
def test_mixed_kernels_compile_for_both_makers(function, sizes, dtype):
    """Blocks that are held and loaded ahead, with masks and without, and indices of 64 bits."""
    program = generate(function, empty(*sizes, dtype))
    bundle = program.build(TARGETS)
    assert mixed(program)
    assert len(bundle.kernels) == len(TARGETS) * len(program.kernels)
