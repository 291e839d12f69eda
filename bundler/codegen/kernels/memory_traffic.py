# SPDX-License-Identifier: Apache-2.0
"""`gigabytes`: how much memory a launch reads and writes, as its metadata tells profilers
(`kernel_num_gb`).

It is an estimate from below: each tensor counts once, and a slice by what is read of it.
`kernel_plan` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import sympy

from bundler.codegen.kernels.kernel_arguments import KernelParameter
from bundler.codegen.loops.loop_nodes import Loop
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.runtime.program.device_tensors import item_bytes

_BYTES = 1e9
_IN_PLACE = "in_out"


def gigabytes(
    parameters: Sequence[KernelParameter],
    examples: Sequence[Any],
    loops: Sequence[Loop],
    space: IterationSpace,
    elements: int,
) -> float:
    """Return how much memory a launch moves: each tensor once, and twice where it is changed in
    place.

    Args:
        parameters, loops, space: of the kernel.
        examples: of each parameter dtype, sizes and strides, or a number.
        elements: that the kernel goes through.
    """
    total = 0
    for parameter, example in zip(parameters, examples, strict=True):
        if isinstance(example, int):
            continue
        dtype, sizes, strides = example
        # Along a stride of 0 the same elements are read again.
        number = prod(size for size, stride in zip(sizes, strides, strict=True) if stride)
        if number > elements:
            # A slice, or several: each address brings as many elements as the kernel has.
            number = min(number, len(_addresses(parameter.outer, loops, space)) * elements)
        total += number * item_bytes(dtype) * (1 + parameter.name.startswith(_IN_PLACE))
    return total / _BYTES


def _addresses(
    buffer: str | sympy.Expr, loops: Iterable[Loop], space: IterationSpace
) -> set[sympy.Expr]:
    """Return the different addresses at which a kernel reads or writes a buffer."""
    found = set()
    for loop in loops:
        indices = {index for name, index, _ in loop.loads if name == buffer}
        indices |= {loop.index} if loop.buffer == buffer else set()
        place = space.place(loop) if indices else None
        found |= {index if place is None else place(index) for index in indices}
    return found
