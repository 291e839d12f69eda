# SPDX-License-Identifier: Apache-2.0
"""`reusable`: which buffers that a kernel writes may take the memory of buffers that it is the last to read.

Each element has to be read where it is written: at the same address, in the same order.  `schedule` asks for each kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sympy

from bundler.codegen.data_types import store_type
from bundler.codegen.fusion import LoopGroup
from bundler.codegen.loop_nodes import Buffer, TensorLayout
from bundler.codegen.loop_terms import loads_of
from bundler.codegen.range_trees import IterationSpace


def reusable(
    group: LoopGroup,
    buffers: Mapping[str, Buffer],
    written: Collection[str],
    dying: Collection[str],
) -> dict[str, str]:
    """Return buffer that is written -> buffer whose memory it may take.

    Args:
        group: of the kernel.
        buffers: of the program.
        written: buffers that the kernel stores.
        dying: buffers that nobody reads after it.
    """
    if any(loop.is_reduction for loop in group.loops):
        return {}  # a row may be read again after part of it was written
    space = IterationSpace(group.dimensions)
    reads: dict[str, set[sympy.Expr]] = {}
    stores: dict[str, sympy.Expr] = {}
    for loop in group.loops:
        place = space.place(loop)
        assert place is not None
        for root in loop.roots:
            for name, index, _ in loads_of(root):
                reads.setdefault(name, set()).add(place(index))
        stores[loop.buffer] = place(loop.index)
    found: dict[str, str] = {}
    for new in sorted(written):
        for old in sorted(set(dying) - set(found.values())):
            if (
                not buffers[old].shared
                and reads.get(old) == {stores[new]}
                and _same_memory(buffers[new].layout, buffers[old].layout)
            ):
                found[new] = old
                break
    return found


def _same_memory(one: TensorLayout, other: TensorLayout) -> bool:
    same_type = one.dtype == other.dtype and store_type(one.dtype) == store_type(other.dtype)
    return (
        same_type
        and one.device == other.device
        and bool(sympy.expand(one.storage - other.storage) == 0)
        and one.offset == other.offset
    )
