# SPDX-License-Identifier: Apache-2.0
"""`arrays`: inputs of a program as arrays of numpy with the bits of their dtypes, from the plan and
a name alone.

A process without torch gives them to a program, another makes torch's tensors of the same bits and
runs the function (`mission`).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from bundler.runtime.program.program_plan import ProgramPlan

# So many numbers are drawn; a larger input repeats them.
_DRAWN = 1_000_003
# Indices of all graphs are below the size of their table.
_LARGEST_INTEGER = 1000
_INTEGERS: dict[str, Any] = {
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
}
Array = Any


def arrays(name: str, plan: ProgramPlan) -> list[Array]:
    """Return an array for each input of a program; bfloat16 as uint16."""
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    found = []
    for given in plan.inputs:
        assert given.spec is not None
        shape = tuple(int(size) for size in given.spec.sizes)
        numbers = np.resize(_numbers(chance, given.spec.dtype), int(np.prod(shape))).reshape(shape)
        # Second moments are not negative.
        found.append(np.abs(numbers) if name.startswith("adamw") else numbers)
    return found


def _numbers(chance: np.random.Generator, dtype: str) -> Array:
    if dtype in _INTEGERS:
        return chance.integers(
            0, min(_LARGEST_INTEGER, np.iinfo(_INTEGERS[dtype]).max), _DRAWN, dtype=np.int64
        ).astype(_INTEGERS[dtype])
    if dtype == "bool":
        return chance.random(_DRAWN) < 0.5
    numbers = chance.standard_normal(_DRAWN, dtype=np.float32)
    if dtype == "bfloat16":
        return bfloat16_bits(numbers)
    return numbers.astype(dtype)


def bfloat16_bits(numbers: Array) -> Array:
    """Return the upper halves of float32 numbers, rounded to the nearest, ties to even; none may be
    NaN.
    """
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
