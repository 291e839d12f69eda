# SPDX-License-Identifier: Apache-2.0
"""Sorting and searching of `bundler.codegen.lib` against torch, in Triton's interpreter;
`test_lib.py` runs these with pytest in a process of their own.
"""

import math

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from lib_kernels import search, sort_rows

NUMBERS = st.sampled_from((0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan)) | st.floats(
    -3, 3, width=16
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 17), st.booleans(), st.data())
def test_sort_is_torchs_stable_sort(count, descending, data):
    """Values come in torch's order, NaN largest, equal ones (zeros of both signs too) in the order
    they had, and padding after all.
    """
    rows = data.draw(
        st.lists(st.lists(NUMBERS, min_size=count, max_size=count), min_size=2, max_size=2)
    )
    values = torch.tensor(rows)
    out, indices = torch.zeros_like(values), torch.zeros(values.shape, dtype=torch.int64)
    sort_rows[(1,)](
        values,
        out,
        indices,
        count,
        DESCENDING=descending,
        ROWS=2,
        COLUMNS=triton.next_power_of_2(count),
    )
    right = torch.sort(values, dim=1, descending=descending, stable=True)
    assert indices.tolist() == right.indices.tolist()
    assert torch.equal(out.view(torch.int32), values.gather(1, indices).view(torch.int32))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.float64, torch.float16]
)
@pytest.mark.parametrize("descending", [False, True])
def test_other_dtypes_are_sorted_too(dtype, descending):
    """Integers of both ends of the range, and floats of other widths, are sorted."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(0, 9, (2, 13), generator=generator) - 4
    values = numbers.to(dtype)
    if not dtype.is_floating_point:
        values[0, 3], values[1, 7] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    out, indices = torch.zeros_like(values), torch.zeros(values.shape, dtype=torch.int64)
    sort_rows[(1,)](values, out, indices, 13, DESCENDING=descending, ROWS=2, COLUMNS=16)
    right = torch.sort(values, dim=1, descending=descending, stable=True)
    assert out.tolist() == right.values.tolist()
    assert indices.tolist() == right.indices.tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(NUMBERS, min_size=1, max_size=16),
    st.lists(NUMBERS, min_size=0, max_size=17),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_bucketize_is_torchs_searchsorted(values, bounds, right, given_sorted, wide, stride):
    """Each value finds its place among the boundaries, NaN after them all, with strides, any number
    of boundaries, and an order apart.
    """
    values = torch.tensor(values)
    order = torch.sort(torch.tensor(bounds), stable=True)
    bounds = order.values if given_sorted else torch.tensor(bounds)
    sorter = None if given_sorted else order.indices
    expected = torch.searchsorted(bounds, values, right=right, sorter=sorter)
    spread = torch.zeros(len(bounds) * stride + 1)
    spread[:-1:stride] = bounds
    out = torch.zeros(len(values), dtype=torch.int64 if wide else torch.int32)
    search[(1,)](
        values,
        spread,
        order.indices,
        out,
        len(values),
        len(bounds),
        stride,
        RIGHT=right,
        SORTED=given_sorted,
        WIDE=wide,
        BLOCK=16,
    )
    assert out.tolist() == expected.tolist()
