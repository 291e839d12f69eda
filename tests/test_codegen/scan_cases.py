# SPDX-License-Identifier: Apache-2.0
"""Scans of generated programs against torch, in Triton's interpreter, or on a GPU without
`TRITON_INTERPRET=1`; `test_scans.py` runs these with pytest in a process of their own.
"""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.associative_scan import associative_scan_op

from bundler.codegen import generate
from bundler.errors import UnsupportedOperator

# Around the ends of the blocks that hold a row, and of those that a loop goes through: of 2,048.
LENGTHS = (1, 2, 63, 64, 65, 1024, 1025, 2049)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0)


def numbers(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(sizes))
    made = (torch.randn(sizes, generator=generator) * 3).to(DEVICE)
    return made > 0 if dtype is torch.bool else made.to(dtype)


def results(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


def compared(function, *inputs, tolerance=1e-5, program=None, dynamic=False):
    """Return the program of a function, whose results are those of torch."""
    program = program or generate(function, [*inputs], dynamic=dynamic)
    assert program.fallbacks == ()
    for found, right in zip(results(program.run(*inputs)), results(function(*inputs)), strict=True):
        assert (found.dtype, found.shape, found.stride()) == (
            right.dtype,
            right.shape,
            right.stride(),
        )
        finite = right[right.isfinite()].double().abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        torch.testing.assert_close(
            found, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
    return program


FUNCTIONS = {
    "sum": lambda a, dim: a.cumsum(dim),
    "product": lambda a, dim: (1 + a / 2000).cumprod(dim),
    "maximum": lambda a, dim: tuple(a.cummax(dim)),
    "minimum": lambda a, dim: tuple(a.round().cummin(dim)),
    "logarithm": lambda a, dim: a.logcumsumexp(dim),
    "read": lambda a, dim: ((a * 2).cumsum(dim) + 1).relu(),
    "reduced": lambda a, dim: a.cumsum(dim).amax(dim),
    "twice": lambda a, dim: a.cumsum(dim).cumsum(dim),
}
LAYOUTS = {
    "plain": lambda a: a,
    "turned": lambda a: a.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda a: torch.stack([a, a - 1], -1)[..., 0],
}


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.sampled_from(LENGTHS),
    st.lists(st.integers(1, 2), max_size=2),
    st.integers(0, 2),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
)
def test_scans_of_any_rows_are_torchs(name, length, others, place, layout, negative):
    """Along memory and across it, in rows around the ends of blocks, of views."""
    place = min(place, len(others))
    sizes = [*others[:place], length, *others[place:]]
    dim = place - len(sizes) if negative else place
    function = FUNCTIONS[name]
    compared(lambda a: function(a, dim), LAYOUTS[layout](numbers(*sizes)), tolerance=3e-5)


@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2099), st.sampled_from(ODD)), max_size=6))
def test_nan_and_infinities_are_where_torch_has_them(places):
    """Behind a NaN all is NaN, in later blocks of a row too; of equal extremes the last counts."""
    values = numbers(1, 2100).round()
    for place, odd in places:
        values[0, place] = odd
    compared(
        lambda a: (
            *a.cummax(1),
            *a.cummin(1),
            a.cumsum(1),
            a.logcumsumexp(1),
        ),
        values,
    )


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
@pytest.mark.parametrize("length", [40, 2100])
def test_scans_of_other_dtypes_are_torchs(dtype, length):
    """Integers wrap as torch's do; 16-bit floats are added in float32."""
    tolerance = 2e-2 if dtype in {torch.float16, torch.bfloat16} else 1e-5
    values = numbers(1, length, dtype=dtype)
    compared(lambda a: (a.cumsum(1), *a.cummax(1), *a.cummin(-1)), values, tolerance=tolerance)
    if not dtype.is_floating_point:
        compared(
            lambda a: (
                a.cumprod(1),
                a.cumsum(1, dtype=torch.int8),
                (a * 7 + 3).cumprod(1, dtype=torch.int16),
            ),
            values,
        )


def test_rows_without_elements_and_single_numbers():
    """What has nothing to scan, or nothing to scan it with."""
    for values in (numbers(0, 4), numbers(4, 0), numbers(), numbers(1)):
        dim = values.dim() - 1
        compared(lambda a, dim=dim: (a.cumsum(dim), a.logcumsumexp(dim), *a.cummax(dim)), values)


def test_few_long_rows_are_cut():
    """Pieces are scanned side by side, and their ends; also where the last one is shorter."""
    for length in (8200, 8201):
        program = compared(lambda a: (a * 2).cumsum(1) + 1, numbers(1, length), tolerance=1e-4)
        assert len(program.kernels) == 3
    compared(lambda a: tuple(a.cummax(0)), numbers(8201, 1).round())


def test_a_scan_that_waits_for_a_reduction_is_done_again():
    """A later pass over the row needs the running sums, which no memory has."""
    program = compared(
        lambda a: a.cumsum(1) / a.abs().cumsum(1).sum(1, keepdim=True), numbers(1, 2500)
    )
    assert len(program.kernels) == 1


def test_who_reads_a_part_of_a_scan_does_not_change_it():
    """A mask of the reader is none of the elements that are scanned, so one scan serves all."""

    def function(a, b):
        summed = (a.exp() + a).cumsum(1)
        return summed + 1, F.pad(summed[:, 900:], (900, 0)) * b

    for length in (1000, 2100):
        program = compared(function, numbers(2, length), numbers(2, length))
        (source,) = program.sources.values()
        assert source.count("tl.associative_scan(") == 1


def test_sizes_may_change():
    """Rows of any length go through the loop, and so does any number of rows."""
    for make in (numbers, lambda *s: numbers(*s[::-1]).t()):
        program = generate(lambda a: (a.cumsum(1) + 1, *a.cummax(1)), [make(4, 30)], dynamic=True)
        for sizes in ((4, 30), (3, 1025), (2, 2100)):
            compared(lambda a: (a.cumsum(1) + 1, *a.cummax(1)), make(*sizes), program=program)


def test_an_input_is_scanned_in_place():
    """A row is loaded before it is stored, block by block."""

    def function(a):
        a.cumsum_(1)
        return a.sum(1)

    # Sums of whole numbers are exact in whatever order they are added.
    drawn = (numbers(3, 50), numbers(1, 4500), numbers(1500, 3).t().contiguous())
    for values in ((one * 4).round() for one in drawn):
        program = generate(function, [values])
        given, right = values.clone(), values.clone()
        found = results(program.run(given))
        assert torch.equal(found[0], function(right))
        assert torch.equal(given, right)


# ---------------------------------------------------------------------------- The user's function


def gated(keep, added):
    """Return states, of which each keeps a part of the one before it."""

    def combine(a0, a1, b0, b1):
        return [a0 * b0, b0 * a1 + b1]

    sources = [torch.sigmoid(keep).movedim(1, 0), added.movedim(1, 0)]
    _, states = associative_scan_op(combine, sources, ())
    return torch.tanh(states.movedim(0, 1)).contiguous()


@pytest.mark.parametrize(
    ("sizes", "kernels"), [((3, 70), 1), ((1, 2100), 1), ((2, 40, 3), 2), ((2, 100, 3), 2)]
)
def test_a_scan_with_the_users_function_is_torchs(sizes, kernels):
    """Along memory and across it, held and looped, and torch.compile's."""
    keep, added = numbers(*sizes), numbers(*sizes) + 1
    assert len(compared(gated, keep, added).kernels) == kernels
    for dynamic in (False, True):
        programs = []
        compiled = torch.compile(
            gated, backend="triton_bundler", dynamic=dynamic, options={"programs": programs}
        )
        torch.testing.assert_close(compiled(keep, added), gated(keep, added))
        (program,) = programs
        assert program.fallbacks == ()
        assert dynamic or len(program.kernels) == kernels


def test_users_functions_of_other_dtypes():
    """A function gets values of the dtypes that the tensors have, bools too, and sees of a 16-bit
    float what torch does.
    """

    def scan(combine):
        return lambda *given: tuple(
            one.contiguous() for one in associative_scan_op(combine, [*given], ())
        )

    compared(scan(lambda a, b: [a ^ b]), numbers(2100, 1, dtype=torch.bool))
    compared(scan(lambda a, b: [torch.maximum(a, b)]), numbers(70, 2, dtype=torch.int8))
    compared(scan(lambda a, b: [a * b]), numbers(70, 2, dtype=torch.uint8))
    halves = (numbers(90, 2) / 4).half()
    places = torch.arange(180, device=DEVICE).view(90, 2)
    compared(
        scan(lambda a, i, b, j: [torch.where(a >= b, a, b), torch.where(a >= b, i, j)]),
        halves,
        places,
    )


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: [a.flip(0) + b],
        lambda a, b: [a + b.sum()],
        lambda a, b: [a + torch.rand_like(b)],
        lambda a, b: [a + torch.arange(2)],
        lambda a, b: [a @ b],
    ],
)
def test_a_function_of_more_than_two_elements_is_refused(combine):
    """Of neighbours, sums, random numbers, places, products of matrices."""
    with pytest.raises(UnsupportedOperator, match="function"):
        generate(lambda a: associative_scan_op(combine, [a], ()), [numbers(10, 2)])
