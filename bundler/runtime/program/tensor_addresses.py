# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie, as each call of a program looks at it.

`misplaced(values, places)` returns those of some places whose tensors begin where kernels do not
expect it.  `is_apart(tensor, values, places)` says whether a tensor begins where kernels expect it,
and at none of the addresses of the tensors at some places, or has no memory.  The compiled half of
the launch room does both several times as fast as Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bundler.runtime.launch.extension import EXTENSION

#: Where kernels expect tensors to begin: at a multiple of so many bytes.
ALIGNED_BYTES = 16


def _misplaced(alignment: int, values: list[Any], places: tuple[int, ...]) -> list[int]:
    return [place for place in places if values[place].data_ptr() % alignment]


def _is_apart(alignment: int, tensor: Any, values: list[Any], places: tuple[int, ...]) -> bool:
    address = tensor.data_ptr()
    if address % alignment:
        return False
    return address == 0 or all(values[place].data_ptr() != address for place in places)


misplaced: Callable[[list[Any], tuple[int, ...]], list[int]] = partial(
    _misplaced if EXTENSION is None else EXTENSION.misplaced, ALIGNED_BYTES
)
is_apart: Callable[[Any, list[Any], tuple[int, ...]], bool] = partial(
    _is_apart if EXTENSION is None else EXTENSION.is_apart, ALIGNED_BYTES
)
