# SPDX-License-Identifier: Apache-2.0
"""Reductions of `bundler.codegen.lib` against torch, in Triton's interpreter; `test_lib.py` runs
these with pytest in a process of their own.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib_kernels import arguments_of_extremes, extremes, moments, of_bits, online_softmax

ROWS, COLUMNS = 4, 16
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan)


def blocks(elements, dtype):
    """Lists of numbers for one block."""
    size = ROWS * COLUMNS
    return st.lists(elements, min_size=size, max_size=size).map(
        lambda numbers: torch.tensor(numbers, dtype=dtype).reshape(ROWS, COLUMNS)
    )


FLOATS = st.sampled_from(SPECIAL) | st.floats(-4, 4, width=32)


def same(got, right):
    return bool(((got == right) | (got.isnan() & right.isnan())).all())


@settings(max_examples=25, deadline=None)
@given(blocks(FLOATS, torch.float32))
def test_extremes_propagate_nan(values):
    """The maximum, minimum and product of floats are torch's, NaN where a value is NaN."""
    out = torch.zeros(3, ROWS)
    extremes[(1,)](values, out, ROWS=ROWS, COLUMNS=COLUMNS)
    assert same(out[0], values.amax(1))
    assert same(out[1], values.amin(1))
    torch.testing.assert_close(
        out[2], values.double().prod(1).float(), equal_nan=True, rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_extremes_of_integers_are_exact(dtype):
    """The maximum and minimum of integers are exact, at both ends of the range, and the product
    wraps.
    """
    limits = torch.iinfo(dtype)
    values = torch.tensor(
        [limits.min, limits.max, 0, 3] * (ROWS * COLUMNS // 4), dtype=dtype
    ).reshape(ROWS, COLUMNS)
    values[1] = 3
    out = torch.zeros(3, ROWS, dtype=dtype)
    extremes[(1,)](values, out, ROWS=ROWS, COLUMNS=COLUMNS)
    assert out[0].tolist() == values.amax(1).tolist()
    assert out[1].tolist() == values.amin(1).tolist()
    assert out[2].tolist() == values.prod(1, dtype=torch.int64).to(dtype).tolist()


@settings(max_examples=25, deadline=None)
@given(
    blocks(st.sampled_from(SPECIAL), torch.float32),
    st.sampled_from([torch.float32, torch.float64, torch.int32]),
)
def test_arguments_of_extremes_are_the_lowest_and_nan_wins(values, dtype):
    """Of equal values the first counts, and the first NaN before any number."""
    values = (
        values.to(dtype)
        if dtype != torch.int32
        else torch.nan_to_num(values, nan=7, posinf=2**31 - 1, neginf=-(2**31))
        .double()
        .clamp(-(2**31), 2**31 - 1)
        .to(dtype)
    )
    out, indices = torch.zeros(2, ROWS, dtype=dtype), torch.zeros(2, ROWS, dtype=torch.int32)
    arguments_of_extremes[(1,)](values, out, indices, ROWS=ROWS, COLUMNS=COLUMNS)
    wide = values.double().numpy()
    # NumPy's arguments of extremes are the first NaN, else the first extreme.
    assert indices.tolist() == [np.argmax(wide, 1).tolist(), np.argmin(wide, 1).tolist()]
    assert same(out[0].double(), torch.from_numpy(wide.max(1)))
    assert same(out[1].double(), torch.from_numpy(wide.min(1)))


@settings(max_examples=10, deadline=None)
@given(
    blocks(st.integers(-(2**31), 2**31 - 1), torch.int32),
    blocks(st.sampled_from([False, False, False, False, True]), torch.bool),
)
def test_bits_are_combined_exactly(values, flags):
    """The exclusive or of integers and whether any bool is true are exact."""
    flags[0] = False
    out, out_flags = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int8)
    of_bits[(1,)](values, flags, out, out_flags, ROWS=ROWS, COLUMNS=COLUMNS)
    assert out.tolist() == np.bitwise_xor.reduce(values.numpy(), 1).tolist()
    assert out_flags.tolist() == flags.any(1).int().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("count", "loop"),
    [
        (1, True),
        (15, True),
        (16, True),
        (17, True),
        (70, True),
        (1, False),
        (15, False),
        (16, False),
    ],
)
def test_moments_are_torchs(count, loop, dtype):
    """Mean, squared deviations and weight are those of the values, in groups that are full, empty
    or cut off, far from zero too.
    """
    values = (
        torch.linspace(-3, 5, ROWS * count, dtype=dtype).reshape(ROWS, count)
        * torch.tensor([1, -7, 0, 1e-3], dtype=dtype)[:, None]
    )
    values = values + torch.tensor([0, 1000, -5, 2], dtype=dtype)[:, None]
    out = torch.zeros(3, ROWS, dtype=dtype)
    moments[(1,)](values, out, count, LOOP=loop, ROWS=ROWS, COLUMNS=COLUMNS)
    wide = values.double()
    close = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out[0].double(), wide.mean(1), rtol=close, atol=close)
    torch.testing.assert_close(
        out[1].double(), wide.var(1, correction=0) * count, rtol=close * 10, atol=close * 10
    )
    assert out[2].tolist() == [count] * ROWS


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_online_softmax_is_that_of_two_passes(count, random):
    """Maximum and sum of exponentials are those of the whole row, rows and groups of minus infinity
    included.
    """
    values = torch.tensor(
        [
            [
                random.choice([-math.inf, random.uniform(-90, 90), random.uniform(-1, 1)])
                for _ in range(count)
            ]
            for _ in range(ROWS)
        ]
    )
    values[0] = -math.inf
    out = torch.zeros(2, ROWS)
    online_softmax[(1,)](values, out, count, ROWS=ROWS, COLUMNS=COLUMNS)
    top = values.amax(1)
    shifted = torch.where(top[:, None] == -math.inf, -math.inf, values - top[:, None])
    assert same(out[0], top)
    torch.testing.assert_close(out[1], shifted.double().exp().sum(1).float(), rtol=1e-5, atol=0)
