# SPDX-License-Identifier: Apache-2.0
"""`mixed_orders`: reductions across rows that a kernel which reduces the rows does beside its own,
since it has the values already.

The gradients of layer norm and RMS norm need both: sums of each row for the input, sums over all
rows for weight and bias.  Each program of such a kernel takes a block of rows, one after the other,
and keeps what they come to in each column; a second kernel reduces what the programs have.
`split_reductions` writes the two steps, and `fusion` puts the first of them into the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.loop_nodes import Loop, Node, numel
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.loops.row_direction import runs_along
from bundler.runtime.heuristics.facts import Device
from bundler.runtime.heuristics.reduction_rules import choose_rsplit_size, rows_at_once

_KINDS = frozenset({"sum", "prod", "max", "min"})
# Where torch's Inductor found that it pays: what is smaller is in the cache when it is read again,
# and fewer rows leave programs without work.
_LEAST_ELEMENTS, _LEAST_ROWS, _ROWS_FOR_A_COLUMN = 5 * 2**20, 4096, 2
# A program holds a whole row, and as much for each reduction across rows.
_LEAST_COLUMNS, _MOST_COLUMNS = 64, 8192
# More elements than this, held at once for each of several values, spill registers; rows longer
# than that are held one by one.
_MOST_AT_ONCE = 8192
# The text is for any device, so blocks of rows are those of a large one.
_DEVICE = Device("cuda", multiprocessors=132, major=9)

_Sizes = tuple[sympy.Expr, sympy.Expr]
_Places = set[tuple[str, sympy.Expr]]


def mixed_orders(nodes: Sequence[Node], hints: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    """Return buffer of a reduction across rows -> how many rows each program of a kernel of rows
    should reduce for it; without those that no such kernel has the values of.

    The number of rows may change from call to call: any is right, that of the example decides.

    Args:
        nodes: of the program, in order.
        hints: symbol of a size -> its value in the example.
    """
    loops = [node for node in nodes if isinstance(node, Loop)]
    across = [loop for loop in loops if _is_across(loop, hints)]
    if not across:
        return {}
    order = _NodeOrder(nodes)
    found = {}
    for loop in across:
        rows, columns = numel(loop.reduced_sizes), numel(loop.sizes)
        along = [other for other in loops if _is_along(other, (rows, columns))]
        space = IterationSpace((("x", rows), ("r0_", columns)))
        read = _whole_reads(_turned(loop), space)
        if any(
            not read.isdisjoint(_whole_touches(other, order, space))
            and not order.depends(other, loop)
            for other in along
        ):
            found[loop.buffer] = _rows_each(int(rows.subs(dict(hints))), int(columns))
    return found


def _rows_each(rows: int, columns: int) -> int:
    """Return how many rows a program takes."""
    each = choose_rsplit_size(rows, _DEVICE)
    # Fewer where a step would take several long ones.
    while rows_at_once(each, columns) > 1 and rows_at_once(each, columns) * columns > _MOST_AT_ONCE:
        each //= 2
    return each


def _is_across(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a loop reduces across rows, of which there are so many that it is worth a block of
    them for each program.
    """
    rows, columns = numel(loop.reduced_sizes).subs(dict(hints)), numel(loop.sizes)
    return (
        loop.kind in _KINDS
        and bool(rows.is_Integer and columns.is_Integer)
        and _LEAST_COLUMNS <= columns <= _MOST_COLUMNS
        and rows >= max(_LEAST_ROWS, _ROWS_FOR_A_COLUMN * columns)
        and rows * columns >= _LEAST_ELEMENTS
        and runs_along(loop) is False
    )


def _is_along(loop: Loop, sizes: _Sizes) -> bool:
    """Whether a loop reduces rows of these numbers, along memory."""
    return (
        loop.is_reduction
        and (numel(loop.sizes), numel(loop.reduced_sizes)) == sizes
        and runs_along(loop) is True
    )


def _turned(loop: Loop) -> Loop:
    """Return a reduction across rows as a loop over rows and columns."""
    return replace(
        loop,
        variables=loop.reduced,
        sizes=loop.reduced_sizes,
        reduced=loop.variables,
        reduced_sizes=loop.sizes,
    )


def _whole_reads(loop: Loop, space: IterationSpace) -> _Places:
    """Return where a loop reads an element of its own for each row and column."""
    place = space.place(loop)
    if place is None:
        return set()
    found = {(buffer, place(index)) for buffer, index, _ in loop.loads}
    return set(_moving(found, space))


def _whole_touches(loop: Loop, order: _NodeOrder, space: IterationSpace) -> _Places:
    """Return the same of a reduction of rows, with what its kernel computes of its results for each
    row and column.
    """
    found = _whole_reads(loop, space)
    for reader in order.readers(loop.buffer):
        place = None if reader.has_rows else space.place(reader)
        if place is not None:
            found |= set(_moving([(reader.buffer, place(reader.index))], space))
    return found


def _moving(
    places: Iterable[tuple[str, sympy.Expr]], space: IterationSpace
) -> Iterator[tuple[str, sympy.Expr]]:
    for buffer, index in places:
        if len(space.dimensions_of(index)) == len(space.dimensions):
            yield buffer, index


class _NodeOrder:
    """Who reads and writes what in a program."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._writers: dict[str, list[int]] = {}
        self._readers: dict[str, list[Loop]] = {}
        for number, node in enumerate(nodes):
            for name in node.writes:
                self._writers.setdefault(name, []).append(number)
            if isinstance(node, Loop):
                for name in node.reads:
                    self._readers.setdefault(name, []).append(node)

    def readers(self, buffer: str) -> Sequence[Loop]:
        """Return the loops that read a buffer."""
        return self._readers.get(buffer, ())

    def depends(self, loop: Loop, other: Loop) -> bool:
        """Whether a loop needs what another one computes, maybe by way of others."""
        seen: set[int] = set()
        # What stands before the other one cannot need it.
        first = self._writers[other.buffer][0]
        stack = [loop.reads]
        while stack:
            for name in stack.pop():
                if name == other.buffer:
                    return True
                for number in self._writers.get(name, ()):
                    if number > first and number not in seen:
                        seen.add(number)
                        stack.append(self._nodes[number].reads)
        return False
