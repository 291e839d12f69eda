# SPDX-License-Identifier: Apache-2.0
"""Sorting and searching of `bundler.codegen.lib` against torch, in Triton's interpreter;
`test_lib.py` runs these with pytest in a process of their own.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib_kernels import search, sort_rows

NUMBERS = st.sampled_from((0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan)) | st.floats(
    -3, 3, width=16
)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from((torch.int32, torch.int64)),
    st.booleans(),
    st.data(),
)
def test_the_first_of_sorted_integers_are_torchs(bits, rows, dtype, far, data):
    """In rows of a power of two, integers of both ends of the range, whose sums wrap, and equal
    ones: as many of the first as are asked for.
    """
    most = torch.iinfo(dtype).max if far else 3
    number = st.integers(-most - 1, most)
    size = (2**rows, 2**bits)
    drawn = data.draw(st.lists(number, min_size=size[0] * size[1], max_size=size[0] * size[1]))
    keys = torch.tensor(drawn, dtype=dtype).view(size)
    first = data.draw(st.integers(1, size[1]))
    out = torch.zeros_like(keys)
    sort_rows[(1,)](keys, out, FIRST=first, ROWS=size[0], COLUMNS=size[1])
    assert torch.equal(out[:, :first], keys.sort(1).values[:, :first])


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
