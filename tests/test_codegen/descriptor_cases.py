# SPDX-License-Identifier: Apache-2.0
"""Programs with tensor descriptors beside the same ones without, bit by bit, in Triton's
interpreter, or on a GPU without `TRITON_INTERPRET=1`; `test_descriptors.py` runs these with pytest
in a process of their own.
"""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.codegen import GenerateOptions, ProgramPolicy, generate

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TILES = GenerateOptions(policy=ProgramPolicy(use_tensor_descriptor=True))
ODD = (math.nan, math.inf, -math.inf, -0.0)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def numbers(*sizes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    made = torch.randn(sizes, generator=generator) * 9
    if dtype.is_floating_point and made.numel() > len(ODD):
        places = torch.randperm(made.numel(), generator=generator)[: len(ODD)]
        made.view(-1)[places] = torch.tensor(ODD)
    return (made if dtype.is_floating_point else made.abs()).to(DEVICE).to(dtype)


def bits(tensors):
    """Return the bytes of what a program returned or changed."""
    found = tensors if isinstance(tensors, (tuple, list)) else [tensors]
    return [one.contiguous().view(-1).view(torch.uint8) for one in found]


def copied(tensor):
    """Return a copy that lies in memory as the tensor does."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return made.copy_(tensor)


def has_descriptors(program):
    return any("make_tensor_descriptor" in source for source in program.sources.values())


def compared(function, *inputs):
    """Return the program of a function with descriptors, whose bits are those without."""
    both = [[copied(one) for one in inputs] for _ in range(2)]
    plain = generate(function, [*inputs])
    tiles = generate(function, [*inputs], options=TILES)
    assert not has_descriptors(plain)
    for right, found in zip(
        bits([*plain.run(*both[0]), *both[0]]), bits([*tiles.run(*both[1]), *both[1]]), strict=True
    ):
        assert torch.equal(right, found)
    return tiles


# Each of two matrices, the second turned; what they have of both is a tile.
FUNCTIONS = {
    "added": lambda a, b: a + b.t(),
    "turned": lambda a, b: a.t().contiguous() * 2,
    "sliced": lambda a, b: a[:, 4:] + b[4:].t(),
    "in place": lambda a, b: a.add_(b.t()),
    "largest": lambda a, b: (a - a.amax(1, keepdim=True), a.amax(0)),
    "smallest": lambda a, b: a.amin(1) + b.amin(0),
    "placed": lambda a, b: (a.argmax(1), a.argmin(0)),
    "any": lambda a, b: (a > 3).any(1),
    "counted": lambda a, b: (a > 3).sum(1),
    "summed": lambda a, b: a + b.t().sum(1, keepdim=True),
    "chosen": lambda a, b: torch.where(a > b.t(), a, b.t()),
}


@settings(max_examples=int(os.environ.get("DESCRIPTOR_EXAMPLES", "12")), deadline=None)
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.sampled_from(DTYPES),
    st.integers(5, 40),
    st.integers(5, 40) | st.sampled_from((16, 32, 48, 64)),
    st.sampled_from((0, 0, 1, 8, 16)),
    st.sampled_from((0, 0, 3, 16)),
)
def test_bits_are_equal_with_and_without(name, dtype, rows, columns, more, first):
    """Of any sizes, strides and dtypes, from any first element."""
    a = numbers(rows, columns + more, dtype=dtype)[:, first : first + columns]
    a = a if a.shape[1] == columns else numbers(rows, columns, dtype=dtype)
    b = numbers(columns, rows + more, dtype=dtype, seed=1)[:, :rows]
    compared(FUNCTIONS[name], a, b)


@settings(max_examples=int(os.environ.get("DESCRIPTOR_EXAMPLES", "4")), deadline=None)
@given(
    st.tuples(*[st.sampled_from((16, 17, 20, 24, 32, 48))] * 3),
    st.permutations(range(3)),
    st.permutations(range(3)),
    st.sampled_from(DTYPES),
)
def test_tiles_of_three_dimensions(sizes, one, other, dtype):
    """Each of two inputs lies in memory in an order of its own."""

    def laid(order, seed):
        back = [order.index(n) for n in range(3)]
        return numbers(*(sizes[n] for n in order), dtype=dtype, seed=seed).permute(back)

    compared(lambda a, b, c: a + b + c, laid([0, 1, 2], 0), laid(one, 1), laid(other, 2))


@pytest.mark.parametrize("columns", [72, 1040])
def test_whole_rows_and_long_ones(columns):
    """A row that is held whole, and one that is looped over, both read again for a result."""
    program = compared(lambda a: a - a.amax(1, keepdim=True), numbers(3, columns))
    assert has_descriptors(program)


def test_the_number_of_rows_may_change():
    """The last block of rows is full, or nearly empty."""

    def function(a):
        return (a + torch.arange(16.0, device=a.device)).amax(1)

    plain, tiles = (
        generate(function, [numbers(12, 16)], dynamic=True, options=options)
        for options in (None, TILES)
    )
    assert has_descriptors(tiles)
    for rows in (2, 8, 17):
        a = numbers(rows, 16)
        assert torch.equal(*(bits(one.run(a))[0] for one in (plain, tiles)))


def test_an_odd_first_element_is_copied_before():
    """A program that counts on aligned inputs gets one that is not."""
    a, b = numbers(32, 64), numbers(64, 32)
    program = generate(FUNCTIONS["added"], [a, b], options=TILES)
    assert has_descriptors(program)
    odd = numbers(32 * 64 + 1)[1:].view(32, 64)
    (found,) = program.run(odd, b)
    assert torch.equal(*bits([found, odd + b.t()]))
