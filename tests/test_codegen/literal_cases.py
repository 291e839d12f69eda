# SPDX-License-Identifier: Apache-2.0
"""Numbers as text of kernels, in Triton's interpreter; `test_literals.py` runs this with pytest in
a process of its own.
"""

import math

import pytest
import torch
from operator_kernels import HEADER
from operator_worker import loaded

from bundler.codegen.kernels.literals import constant_text, literal_text
from bundler.codegen.loops.data_types import DATA_TYPES, stored_text

FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.5,
    0.1,
    1 / 3,
    1e-30,
    1e-38,
    1e-45,
    5e-324,
    1e30,
    3.4e38,
    1e39,
    -1e300,
    2.0**24 + 1,
    123456789.123,
    math.inf,
    -math.inf,
    math.nan,
    3,
    -7,
    True,
)
INTEGERS = (
    0,
    1,
    -1,
    127,
    128,
    -128,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**63 - 1,
    -(2**63),
    -(2**63) + 1,
    True,
    7.0,
)
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "bool",
)
TEXT = """
@triton.jit
def numbers(zero, out):
{body}
"""


def tried(name):
    """Return the numbers to try for a dtype; the interpreter takes subnormal numbers of bfloat16
    for zero, or not.
    """
    if name == "bfloat16":
        return [number for number in FLOATS if number == 0 or not abs(number) < 1.2e-38]
    return FLOATS if "float" in name else INTEGERS


def right(name, number):
    """Return the number as torch has it in the dtype, through float32 for halves; integers wrap."""
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor(bool(number))
    if dtype.is_floating_point:
        wide = torch.tensor(float(number), dtype=torch.float64)
        return (wide if name == "float64" else wide.to(torch.float32)).to(dtype)
    bits = DATA_TYPES[name].bits
    whole = int(number) % 2**bits
    return torch.tensor(
        whole - 2**bits if "u" not in name and whole >= 2 ** (bits - 1) else whole, dtype=dtype
    )


def same(got, wanted):
    if got.dtype.is_floating_point:
        return bool(
            (got == wanted) & (got.signbit() == wanted.signbit()) | got.isnan() & wanted.isnan()
        )
    return got.item() == wanted.item()


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_has_every_bit_that_torch_gives_it(name):
    """A constant is the nearest number of the dtype: subnormal, negative zero, extreme, infinite,
    NaN; beside a tensor it does not change the sum.
    """
    chosen = tried(name)
    row = DATA_TYPES[name]
    sign = "|" if name == "bool" else "+"
    lines = [
        f"x = {'tl.load(zero) != 0' if name == 'bool' else f'tl.load(zero).to({row.computed})'}"
    ]
    for place, number in enumerate(chosen):
        lines.append(
            f"tl.store(out + {2 * place}, {stored_text(constant_text(number, name), name)})"
        )
        lines.append(
            f"tl.store(out + {2 * place + 1},"
            f" {stored_text(f'(x {sign} {literal_text(number, name)})', name)})"
        )
    text = HEADER + TEXT.format(body="\n".join(f"    {line}" for line in lines))
    dtype = getattr(torch, name)
    zero, out = torch.zeros(1, dtype=dtype), torch.zeros(2 * len(chosen), dtype=dtype)
    loaded(text).numbers[(1,)](zero, out)
    for place, number in enumerate(chosen):
        wanted = right(name, number)
        assert same(out[2 * place], wanted), (number, out[2 * place], wanted)
        total = zero[0] + wanted if dtype.is_floating_point else wanted
        assert same(out[2 * place + 1], total), (number, out[2 * place + 1])
