# SPDX-License-Identifier: Apache-2.0
"""Integer and random functions of `bundler.codegen.lib`, in Triton's interpreter; `test_lib.py`
runs these with pytest in a process of their own.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib_kernels import divide, draw, error_function, of_indices, philox

WIDTHS = {torch.int8: 8, torch.int32: 32, torch.int64: 64}


def wrapped(number, bits):
    number %= 2**bits
    return number - 2**bits if number >= 2 ** (bits - 1) else number


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(WIDTHS)), st.data())
def test_integers_are_divided_as_pythons(dtype, data):
    """Quotients and remainders are Python's, or C's; what is left and the quotient make the
    dividend, and division by zero is 0.
    """
    bits = WIDTHS[dtype]
    limit = 2 ** (bits - 1)
    number = (
        st.integers(-limit, limit - 1) | st.integers(-9, 9) | st.sampled_from([-limit, limit - 1])
    )
    a, b = (data.draw(st.lists(number, min_size=8, max_size=8)) for _ in range(2))
    out = torch.zeros(5, 8, dtype=dtype)
    divide[(1,)](torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out, COUNT=8)
    floor, rest, cut, cut_rest, power = out.tolist()
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        assert floor[k] == (wrapped(one // other, bits) if other else 0)
        assert rest[k] == (one % other if other else one)
        assert cut[k] == (
            wrapped((abs(one) // abs(other)) * (1 if (one < 0) == (other < 0) else -1), bits)
            if other
            else 0
        )
        assert wrapped(cut[k] * other + cut_rest[k], bits) == one
        if other >= 0:
            assert power[k] == wrapped(pow(one, other, 2**bits), bits)


def test_index_expressions_mix_numbers_and_tensors():
    """Either side of a division of indices may be a number, and the sides may have different
    widths.
    """
    out = torch.zeros(5, 16, dtype=torch.int64)
    of_indices[(1,)](out, 5, COUNT=16)
    index = range(-8, 8)
    assert out[0].tolist() == [k // 3 for k in index]
    assert out[1].tolist() == [k % 5 for k in index]
    assert out[2].tolist() == [100 // k if k else 0 for k in index]
    assert out[3].tolist() == [k**3 for k in index]
    assert out[4].tolist() == [k % 8 for k in range(16)]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-5, 5), (0, 2**40), (-(2**63), 2**63 - 1), (7, 7)]
)
def test_random_numbers_depend_on_seed_and_offset_alone(low, high):
    """Uniform and normal numbers are Triton's own for the offset as uint32; integers lie in their
    range, and all int64 where it is empty.
    """
    offsets = torch.tensor([0, 1, 2, 3, 5, 2**31, 2**32 - 1, 2**33 + 1])
    uniform, normal, theirs = torch.zeros(8), torch.zeros(8), torch.zeros(2, 8)
    integers = torch.zeros(8, dtype=torch.int64)
    draw[(1,)](
        torch.tensor([1234]),
        offsets,
        torch.tensor([low]),
        torch.tensor([high]),
        uniform,
        normal,
        integers,
        theirs,
        COUNT=8,
    )
    assert torch.equal(uniform, theirs[0])
    assert torch.equal(normal, theirs[1])
    assert ((uniform >= 0) & (uniform < 1)).all()
    assert uniform[7] == uniform[1]
    assert len(set(uniform.tolist())) == 7
    if low < high:
        assert all(low <= number < high for number in integers.tolist())
    else:
        assert max(map(abs, integers.tolist())) > 2**48


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """Philox-4x32-10, which all random numbers come from, gives the words that its authors
    published (Random123, kat_vectors).
    """
    out = torch.zeros(4, dtype=torch.uint32)
    philox[(1,)](
        out, torch.tensor([key], dtype=torch.uint64), torch.tensor(counter, dtype=torch.uint32)
    )
    assert tuple(out.tolist()) == words


def test_one_and_the_error_function_are_summed_up_as_exactly_as_float32_allows():
    """Off by less than three units of the last place of a sum above 1, and close to 0 by a small
    part of itself; what has no limit ends at 0 and 2, and what is no number stays none.
    """
    values = torch.cat([torch.linspace(-12, 12, 2**15), torch.linspace(-1e-3, 1e-3, 2**15)])
    out = torch.empty_like(values)
    error_function[(1,)](values, out, COUNT=2**16)
    expected = torch.special.erfc(-values.double())
    assert (out - expected).abs().max() < 2.8e-7
    near = (values < 0) & (values > -4.2)
    assert (out / expected - 1)[near].abs().max() < 1.6e-4
    assert (out[values <= -4.2] < 3e-9).all()
    ends = torch.tensor([-torch.inf, torch.inf, torch.nan, -1e30, 1e30, 0.0, -0.0, 100.0])
    error_function[(1,)](ends, out, COUNT=8)
    torch.testing.assert_close(
        out[:8], torch.tensor([0, 2, torch.nan, 0, 2, 1, 1, 2.0]), equal_nan=True, rtol=0, atol=0
    )
