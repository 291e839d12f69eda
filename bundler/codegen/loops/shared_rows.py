# SPDX-License-Identifier: Apache-2.0
"""`shareable`, `can_share`: which reductions of few long rows may be one launch, in which several
programs share a row and wait for each other, and what is computed of the row behind it is shared by
the same programs.

Where programs cannot wait, the same loops are cut into pieces (`split_reductions`), so both forms
are written. `schedule` asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer, Loop, Node, numel
from bundler.codegen.loops.loop_terms import ALONG_ROWS, in_order_of
from bundler.codegen.loops.row_direction import runs_along

# Rows up to so many -> how long each has to be at least, as TorchInductor has it: of more or of
# shorter rows, programs that have rows of their own keep a device as busy.
_FEW_ROWS, _LONG_ROW_EACH = 8, 1 << 15
_MORE_ROWS, _LONG_ROW = 16, 1 << 21
# The place where the last program begins fits in 32 bits, with a block of the row to spare.
_LONGEST_ROW = 1 << 30


def shareable(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the buffers whose loops reduce few long rows, along which memory runs, of known
    sizes.
    """
    return frozenset(
        node.buffer
        for node in nodes
        if isinstance(node, Loop) and node.is_reduction and _has_few_long_rows(node)
    )


def _has_few_long_rows(loop: Loop) -> bool:
    rows, row = numel(loop.sizes), numel(loop.reduced_sizes)
    if not (rows.is_Integer and row.is_Integer) or row > _LONGEST_ROW or loop.rows_each:
        return False
    few = rows <= _FEW_ROWS and row >= _LONG_ROW_EACH * rows
    along = rows == 1 or runs_along(loop) is True
    return bool(along and (few or (rows <= _MORE_ROWS and row >= _LONG_ROW)))


def can_share(
    group: LoopGroup, buffers: Mapping[str, Buffer], sizes: Mapping[sympy.Symbol, int]
) -> bool:
    """Whether the programs of a kernel may share its rows: each element is written once, to memory
    that nothing else of the kernel reads, so that the kernel may run again; and rows are reduced
    alone.

    Args:
        group: of the kernel.
        buffers: of the program.
        sizes: symbols of sizes that change from call to call.
    """
    changing = frozenset(sizes)
    for loop in group.loops:
        along = any(term.operator in ALONG_ROWS for term in in_order_of(loop.roots))
        own = buffers[loop.buffer].source == "node" and loop.mode is None
        if along or not own or loop.rows_each or (loop.has_rows and not loop.is_reduction):
            return False
        if any(expr.free_symbols & changing for expr in (*loop.sizes, *loop.reduced_sizes)):
            return False
    return True
