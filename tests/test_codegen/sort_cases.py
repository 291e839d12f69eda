# SPDX-License-Identifier: Apache-2.0
"""Sorts and searches of generated programs against torch, where `scan_cases` runs its own; `test_scans.py` runs
these with pytest in a process of their own.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_cases import compared, numbers

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0)


def both(dim, descending=False):
    """Return a function that sorts, with values and places."""
    return lambda a: tuple(torch.sort(a, dim=dim, descending=descending, stable=True))


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from((1, 2, 3, 32, 33, 65)),
    st.lists(st.integers(1, 2), max_size=2),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_stable_sorts_are_torchs(length, others, place, descending, turned, data):
    """Along memory and across it; equals, NaN, infinities and zeros of both signs keep their
    order.
    """
    place = min(place, len(others))
    sizes = [*others[:place], length, *others[place:]]
    values = numbers(*sizes).round()
    flat = values.view(-1)
    for where in data.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=8)):
        flat[where] = data.draw(st.sampled_from(ODD))
    if turned:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    compared(both(place - len(sizes), descending), values, tolerance=0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float64,
        torch.float16,
        torch.bfloat16,
    ],
)
def test_sorts_of_other_dtypes_are_torchs(dtype):
    """Integers of both ends of their range, and 16-bit floats by the bits that torch has."""
    values = numbers(2, 40, dtype=dtype)
    if not dtype.is_floating_point and dtype is not torch.bool:
        values[0, 3], values[1, 7] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    compared(both(1), values, tolerance=0)
    compared(both(0, descending=True), values, tolerance=0)
    if dtype.is_floating_point:
        compared(lambda a: both(1)(a * 2)[1], values)


def test_what_is_around_a_sort():
    """What is sorted may be computed, and who reads it shares its kernel; rows may have no
    element, or be a number.
    """
    values = numbers(3, 50)
    compared(lambda a: both(1)(torch.softmax(a, 1) * 2)[0] + 1, values)
    compared(lambda a: a.argsort(dim=0, stable=True) * 2, values)
    compared(lambda a: a.gather(1, a.argsort(dim=1, stable=True)), values)
    for empty in (numbers(0, 4), numbers(4, 0), numbers(), numbers(4, 1)):
        compared(both(-1), empty)


def test_any_number_of_rows_is_sorted():
    """Sizes other than that of the row may change."""

    def function(a):
        return both(1)(torch.stack([a, a - 1, a * 2], 1))

    program = compared(function, numbers(37), dynamic=True)
    compared(function, numbers(5), program=program)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from((*ODD, 0.5, 2.0, 3.0)), max_size=9),
    st.booleans(),
    st.sampled_from((torch.int32, torch.int64)),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_searches_are_torchs(bounds, right, place, dtype):
    """Any number of boundaries, sorted or not, with NaN and equals."""
    values = torch.tensor([*ODD, 0.7, 2.0, 4.0], dtype=dtype).view(3, 3)
    narrow = place is torch.int32
    compared(
        lambda v, b: torch.bucketize(v, b, right=right, out_int32=narrow) * 2,
        values,
        torch.tensor(bounds, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float16])
def test_searches_in_rows_are_torchs(dtype):
    """Each row of values in boundaries of its own, which may be computed or in an order apart."""
    values, bounds = numbers(4, 5, dtype=dtype).abs(), numbers(4, 33, dtype=dtype).abs()
    ordered = bounds.sort(-1)
    compared(lambda v, b: torch.searchsorted(b, v, side="right"), values, ordered.values)
    compared(lambda v, b, s: torch.searchsorted(b, v, sorter=s), values, bounds, ordered.indices)
    compared(lambda v, b: torch.searchsorted(b + b, v + v).sum(-1), values, ordered.values)
    compared(lambda v, b: torch.searchsorted(b, v), values[0, 0], ordered.values[0])
