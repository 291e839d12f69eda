# SPDX-License-Identifier: Apache-2.0
"""Sorts and searches of generated programs against torch, where `scan_cases` runs its own; `test_scans.py` runs
these with pytest in a process of their own.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_cases import DEVICE, compared, numbers

from bundler.codegen import generate
from bundler.codegen.torch_backend import triton_bundler

ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0)


def both(dim, descending=False):
    """Return a function that sorts, with values and places."""
    return lambda a: tuple(torch.sort(a, dim=dim, descending=descending, stable=True))


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from((1, 2, 3, 32, 33, 65, 1000, 1024)),
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
    placed(values, data)
    if turned:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    compared(both(place - len(sizes), descending), values, tolerance=0)
    found = of_program(both(place - len(sizes), descending), values)
    same(found[0], values.gather(place, found[1]))


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


def placed(values, data, most=8):
    """Put some NaN, infinities and zeros of both signs into a tensor."""
    flat = values.view(-1)
    count = flat.numel()
    for where in data.draw(
        st.lists(st.integers(0, max(0, count - 1)), max_size=most if count else 0)
    ):
        flat[where] = data.draw(st.sampled_from(ODD))
    return values


def first_of(values, count, dim, largest):
    """Return what torch's stable sort has first, which is what `topk` is promised to be."""
    found = torch.sort(values, dim=dim, descending=largest, stable=True)
    return found.values.narrow(dim, 0, count), found.indices.narrow(dim, 0, count)


def same(found, right, *, signs=True):
    """Compare bit for bit but for those of NaN, and the signs of zeros where these are open."""
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    if signs:
        assert torch.equal(found.signbit() & (found == found), right.signbit() & (right == right))


def of_program(function, *inputs, dynamic=False):
    program = generate(function, [*inputs], dynamic=dynamic)
    assert program.fallbacks == ()
    return program.run(*inputs)


@settings(max_examples=14, deadline=None)
@given(
    st.sampled_from((1, 2, 5, 32, 64, 129, 1024)),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)),
    st.data(),
)
def test_first_elements_are_torchs(length, others, place, largest, ordered, dtype, data):
    """Any number of them, of rows along memory and across it; of equals the lowest place first."""
    place = min(place, len(others))
    sizes = [*others[:place], length, *others[place:]]
    values = numbers(*sizes).round()
    if dtype.is_floating_point:
        placed(values, data)
    values = values.to(dtype)
    count = data.draw(st.sampled_from(sorted({0, 1, min(8, length), length // 2, length})))
    options = {"dim": place, "largest": largest, "sorted": ordered}
    found = of_program(lambda a: tuple(a.topk(count, **options)), values)
    for one, right in zip(found, first_of(values, count, place, largest), strict=True):
        same(one, right, signs=count != 1 or not largest)  # of the maximum they are open
    theirs = values.topk(count, **{**options, "sorted": True})
    same(found[0], theirs.values, signs=False)
    if count:
        assert [one.stride() for one in found] == [one.stride() for one in theirs]


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from((1025, 2000, 4096, 5000)),
    st.sampled_from((1, 2, 50, 64, 65, 256)),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int32)),
    st.data(),
)
def test_first_elements_of_long_rows_are_torchs(length, count, largest, dtype, data):
    """In pieces, the last of which may be shorter: what lies beyond comes behind NaN."""
    values = numbers(2, length).round()
    if dtype.is_floating_point:
        placed(values, data)
    values = values.to(dtype).t().contiguous().t() if data.draw(st.booleans()) else values.to(dtype)
    found = of_program(lambda a: tuple(a.topk(count, largest=largest)), values)
    for one, right in zip(found, first_of(values, count, 1, largest), strict=True):
        same(one, right, signs=count != 1 or not largest)


def test_rows_of_nothing_but_nan_have_first_elements():
    """Lanes beyond a row's end come behind NaN, and behind the greatest integers, both ways."""
    for values in (
        torch.full((2, 1030), math.nan, device=DEVICE),
        torch.full((2, 33), math.nan, device=DEVICE),
        torch.full((2, 33), 2**31 - 1, dtype=torch.int32, device=DEVICE),
        torch.full((2, 1500), -(2**31), dtype=torch.int32, device=DEVICE),
        torch.full((2, 33), 2**63 - 1, dtype=torch.int64, device=DEVICE),
        torch.full((2, 33), 255, dtype=torch.uint8, device=DEVICE),
    ):
        for largest in (True, False):
            found = of_program(lambda a, up=largest: tuple(a.topk(20, largest=up)), values)
            same(found[0], values[:, :20])
            same(found[1], torch.arange(20, device=DEVICE).expand(2, 20))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from((1, 2, 3, 64, 100, 1024)),
    st.integers(0, 1),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64)),
    st.data(),
)
def test_single_elements_are_torchs(length, dim, kept, dtype, data):
    """The k-th smallest, of equals by the order of their places; the most frequent, which is at the
    place that is named.
    """
    values = numbers(*((length, 3) if dim == 0 else (3, length))).round()
    if dtype.is_floating_point:
        placed(values, data)
    values = values.to(dtype)
    number = data.draw(st.integers(1, length))
    value, place = of_program(lambda a: tuple(a.kthvalue(number, dim, kept)), values)
    same(value, values.kthvalue(number, dim, kept).values, signs=False)
    ordered = torch.sort(values, dim=dim, stable=True)
    for found, all_ in zip((value, place), ordered, strict=True):
        right = all_.narrow(dim, number - 1, 1)
        same(found, right if kept else right.squeeze(dim))


def test_nan_of_both_signs_are_equal():
    """The sign of a NaN says nothing, nor does what else its bits hold: they stay in order.

    So the CPU has it; on an H200, torch 2.11 sorts a NaN with a sign before all numbers.
    """
    bits = [0x7FC00000, 0x3F800000, -0x400000, 0x7F800000, -0x3FFFFF, 0x7FC00001, -0x800000]
    values = torch.tensor([bits], dtype=torch.int32, device=DEVICE).view(torch.float32)
    for dtype in (torch.float32, torch.float64):
        for descending in (False, True):
            found = of_program(both(1, descending), values.to(dtype))
            expected = both(1, descending)(values.to(dtype).cpu())
            for one, right in zip(found, expected, strict=True):
                same(one.cpu(), right)


def test_sorts_by_other_names_and_of_numbers():
    """`msort`, `argsort`, tensors without dimensions; what is chosen may be computed, and read."""
    values = numbers(70, 3)
    compared(torch.msort, values, tolerance=0)
    compared(lambda a: a.argsort(0), values, tolerance=0)
    number = numbers()
    compared(lambda a: (*a.topk(1), *a.kthvalue(1, 0), *a.sort()), number, tolerance=0)

    def routed(a):
        weight, expert = torch.softmax(a, -1).topk(4, -1)
        return weight / weight.sum(-1, keepdim=True), expert

    program = compared(routed, numbers(40, 64))
    assert len(program.kernels) == 2


def test_who_reads_what_is_chosen_in_whole_rows_reads_memory():
    """Lanes behind the first elements of a row hold anything, so no such reader shares the
    kernel.
    """

    def function(a):
        chosen = torch.nn.functional.pad(a.topk(4, -1).values, (0, 4))
        return chosen + a

    program = compared(function, numbers(9, 8), tolerance=0)
    assert len(program.kernels) == 2


def test_gradients_go_to_what_was_chosen():
    """Through torch.compile, forward and backward."""
    values = numbers(6, 40).requires_grad_()

    def function(a):
        chosen = (a * 2).topk(5, -1)
        return (chosen.values * torch.arange(5.0, device=DEVICE)).sum() + a.kthvalue(
            3, 0
        ).values.sum()

    theirs = torch.autograd.grad(function(values), values)
    programs = []
    options = {"programs": programs, "keep": False}
    compiled = torch.compile(function, backend=triton_bundler, options=options)
    torch.testing.assert_close(torch.autograd.grad(compiled(values), values), theirs)
    assert len(programs) == 2
    assert not any(program.fallbacks for program in programs)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from((*ODD, 0.5, 2.0, 3.0)), max_size=9),
    st.booleans(),
    st.sampled_from((torch.int32, torch.int64)),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_searches_are_torchs(bounds, right, place, dtype):
    """Any number of boundaries, sorted or not, with NaN and equals."""
    values = torch.tensor([*ODD, 0.7, 2.0, 4.0], dtype=dtype, device=DEVICE).view(3, 3)
    narrow = place is torch.int32
    compared(
        lambda v, b: torch.bucketize(v, b, right=right, out_int32=narrow) * 2,
        values,
        torch.tensor(bounds, dtype=dtype, device=DEVICE),
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
