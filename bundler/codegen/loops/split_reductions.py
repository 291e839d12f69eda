# SPDX-License-Identifier: Apache-2.0
"""`split`: a reduction of few long rows becomes two, so that more programs than rows work on it.

The first reduces pieces of each row, the second the results of the pieces.  Memory that runs along
the rows is cut so that a piece is one run of it; memory that runs across them so that the rows of
one piece lie beside each other.  A reduction across rows that another kernel reduces anyway is cut
into the blocks of rows of that kernel's programs (`mixed_reductions`).  `schedule` calls it before
fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from bundler.codegen.loops.data_types import identity_of
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.index_ranges import Ranges
from bundler.codegen.loops.lazy_tensors import GraphBuilder
from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    PROGRAM,
    Loop,
    Node,
    TensorLayout,
    contiguous_strides,
    numel,
)
from bundler.codegen.loops.loop_order import normalized
from bundler.codegen.loops.loop_terms import Term, substituted
from bundler.codegen.loops.mixed_reductions import mixed_orders
from bundler.codegen.loops.row_direction import runs_along

# Kinds whose results of pieces are reduced by the same kind; and mean and squared deviations, which
# can be combined without weights only if all pieces have one length.
_PLAIN = frozenset({"sum", "prod", "max", "min", "any", "xor_sum"})
_MOMENTS = frozenset({"welford_mean", "welford_m2"})
# The text is for any device, so it counts on one large one; a device of half the size gets at most
# twice the best number of pieces.
_MULTIPROCESSORS, _THREADS = 132, 2048
# How many elements a thread reduces: fewer do not pay for the thread, more leave others idle.
_LEAST_EACH, _MOST_EACH = 32, 512
_PROGRAM_THREADS = 256
# One program reads a row of this length in the time that a second launch takes.
_SHORT_ROW = 8192
# A program that reduces across rows has so many columns, and so many elements of each in flight.
_COLUMNS, _DEPTH = 128, 4
# With more columns than this, programs keep the device busy without a split.
_MOST_COLUMNS = 64 * _MULTIPROCESSORS
# Pieces of one length need no mask, which is worth so many times more or fewer pieces.
_SAME_LENGTHS = 1.5
# Bounds the search for a divisor.
_MAX_DIVISIONS = 65536


@dataclass(frozen=True)
class RowPieces:
    """How the rows of a reduction are cut: into how many pieces of which length, and whether memory
    runs across the rows.
    """

    count: sympy.Expr
    length: int
    across: bool


def split(
    builder: GraphBuilder, nodes: Sequence[Node], hints: Mapping[sympy.Symbol, int]
) -> list[Node]:
    """Return the nodes with long reductions in two steps.

    Args:
        builder: of the program.
        nodes: of the program, in order.
        hints: symbol of a size -> its value in the example.
    """
    found: list[Node] = []
    means: dict[tuple[Term, tuple[sympy.Expr, ...]], str] = {}
    mixed = mixed_orders(nodes, hints)
    for node in nodes:
        if not isinstance(node, Loop):
            found.append(node)
            continue
        rows_each = mixed.get(node.buffer, 0)
        pieces = _blocks_of(node, rows_each) if rows_each else pieces_of(node)
        if pieces is None:
            found.append(node)
            continue
        splitter = _Splitter(builder, node, pieces)
        if rows_each:
            steps = splitter.mixed()
        else:
            steps = splitter.moments(means) if node.kind in _MOMENTS else splitter.plain()
        found += [normalized(builder.pool, step) for step in steps]
    return found


def is_split(loop: Loop) -> bool:
    """Whether a reduction is done in two steps."""
    return pieces_of(loop) is not None


def pieces_of(loop: Loop) -> RowPieces | None:
    """Return how the rows of a reduction are cut; None where one kernel reduces them."""
    rows, row = numel(loop.sizes), numel(loop.reduced_sizes)
    if loop.kind not in _PLAIN | _MOMENTS or not (rows.is_Integer and row.is_Integer):
        return None
    # A split needs to know along which direction memory runs, except of a single row, which only
    # can be cut along it.
    runs = runs_along(loop)
    if rows != 1 and runs is None:
        return None
    across = rows != 1 and not runs
    wanted = _wanted_across(int(rows), int(row)) if across else pieces_along(int(rows), int(row))
    count = _even_count(int(row), wanted)
    # A last piece that is shorter reads the identity beyond the row's end.
    if count is None and loop.kind in _PLAIN:
        count = wanted
    if wanted < 2 or count is None or count < 2:  # noqa: PLR2004  # one piece is the row itself
        return None
    return RowPieces(sympy.Integer(count), _ceil(int(row), count), across)


def _blocks_of(loop: Loop, rows_each: int) -> RowPieces:
    """Return the blocks of so many rows that a reduction across rows is cut into."""
    count = FloorDiv(numel(loop.reduced_sizes) + rows_each - 1, sympy.Integer(rows_each))
    return RowPieces(count, rows_each, across=True)


def pieces_along(rows: int, row: int) -> int:
    """Return how many pieces keep the device busy where memory runs along the rows; 1 where the
    rows do.
    """
    if rows >= 2 * _MULTIPROCESSORS or row <= _SHORT_ROW:
        return 1
    work, threads = rows * row, _MULTIPROCESSORS * _THREADS
    if work <= _LEAST_EACH * threads:
        each = _LEAST_EACH
    elif work >= _MOST_EACH * threads:
        each = _MOST_EACH
    else:
        # In between, as many programs as half of the device's threads make, shared by the rows.
        programs = _ceil(threads // (2 * _PROGRAM_THREADS), rows)
        each = _ceil(row, _PROGRAM_THREADS * programs)
    return _ceil(row, each * _PROGRAM_THREADS)


def _wanted_across(rows: int, row: int) -> int:
    """Return the same where memory runs across the rows, which programs share by columns."""
    if rows >= _MOST_COLUMNS or row <= _LEAST_EACH:
        return 1
    work, threads = rows * row, _MULTIPROCESSORS * _THREADS
    if work < _LEAST_EACH * threads:
        each = _LEAST_EACH
    elif work >= _MOST_EACH * threads:
        each = _MOST_EACH
    else:
        programs = _ceil(threads // _PROGRAM_THREADS, _ceil(rows, _COLUMNS))
        each = _ceil(row, _DEPTH * programs)
    return _ceil(row, each * _DEPTH)


def _even_count(row: int, wanted: int) -> int | None:
    """Return the number of pieces of one length that is nearest to what is wanted; None where none
    is near.
    """
    near = [
        count
        for count in range(
            max(2, int(wanted / _SAME_LENGTHS)),
            min(int(wanted * _SAME_LENGTHS), _MAX_DIVISIONS) + 1,
        )
        if row % count == 0
    ]
    return min(near, key=lambda count: (abs(count - wanted), count), default=None)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


class _Splitter:
    """Writes the two steps of one reduction."""

    def __init__(self, builder: GraphBuilder, loop: Loop, pieces: RowPieces) -> None:
        self._builder, self._pool, self._loop, self._pieces = builder, builder.pool, loop, pieces
        self._piece, self._within = (
            sympy.Symbol(name, integer=True, nonnegative=True) for name in ("i90", "r90")
        )

    def plain(self) -> list[Loop]:
        """Return the steps of a reduction whose pieces are reduced as the rows are."""
        first = self._first(self._loop.kind)
        return [first, self._second(self._loop.kind, first, self._loop.buffer)]

    def mixed(self) -> list[Loop]:
        """Return the steps of a reduction across rows whose first is for a kernel of rows: each of
        its programs reduces a block of rows.
        """
        loop, pieces = self._loop, self._pieces
        value = self._summed(loop.value)
        sizes = (pieces.count, *loop.sizes)
        layout = TensorLayout(value.dtype, sizes, contiguous_strides(sizes))
        first = replace(
            loop,
            buffer=self._builder.new_buffer(layout),
            variables=loop.reduced,
            sizes=loop.reduced_sizes,
            reduced=loop.variables,
            reduced_sizes=loop.sizes,
            value=value,
            index=layout.index((PROGRAM, *loop.variables)),
            rows_each=pieces.length,
        )
        return [first, self._second(loop.kind, first, loop.buffer)]

    def moments(self, means: dict[tuple[Term, tuple[sympy.Expr, ...]], str]) -> list[Loop]:
        """Return the steps of a mean or of squares of deviations, of pieces of one length.

        The squares around the mean of all are those around the mean of each piece, and the squares
        of the means' deviations, as often as a piece has elements.

        Args:
            means: values and rows -> buffer with the means of their pieces, which mean and squares
                share.
        """
        loop = self._loop
        steps: list[Loop] = []
        key = (loop.value, loop.reduced)
        if key not in means:
            # Mean and squared deviations of one value share the means of their pieces.
            steps.append(self._first("welford_mean"))
            means[key] = steps[0].buffer
        mean = self._first("welford_mean", means[key])
        if loop.kind == "welford_mean":
            return [*steps, self._second("welford_mean", mean, loop.buffer)]
        squares = self._first("welford_m2")
        dtype, sizes = loop.value.dtype, loop.sizes
        parts = [
            self._builder.new_buffer(TensorLayout(dtype, sizes, contiguous_strides(sizes)))
            for _ in range(2)
        ]
        index = TensorLayout(dtype, sizes, contiguous_strides(sizes)).index(loop.variables)
        added, spread = (
            replace(self._second(kind, of, name), index=index)
            for kind, of, name in (("sum", squares, parts[0]), ("welford_m2", mean, parts[1]))
        )
        one, other = (self._pool.load(name, index, dtype) for name in parts)
        scaled = self._pool.operate(
            "mul", other, self._pool.constant(self._pieces.length, dtype), dtype=dtype
        )
        total = self._pool.operate("add", one, scaled, dtype=dtype)
        last = replace(loop, value=total, kind=POINTWISE, reduced=(), reduced_sizes=())
        return [*steps, squares, added, spread, last]

    def _first(self, kind: str, name: str | None = None) -> Loop:
        """Return the loop over pieces; into a new buffer where no name of one is given."""
        loop, pieces = self._loop, self._pieces
        kept, sizes = (self._piece, *loop.variables), (pieces.count, *loop.sizes)
        # The index of the piece is outermost where memory runs across the rows, so that lanes
        # beside each other still read neighbours; else innermost, so that each piece is one run.
        if not pieces.across:
            kept, sizes = (*loop.variables, self._piece), (*loop.sizes, pieces.count)
        value = self._cut(kind)
        layout = TensorLayout(value.dtype, sizes, contiguous_strides(sizes))
        return Loop(
            name or self._builder.new_buffer(layout),
            kept,
            sizes,
            (self._within,),
            (sympy.Integer(pieces.length),),
            value,
            kind,
            layout.index(kept),
            origins=loop.origins,
        )

    def _second(self, kind: str, first: Loop, buffer: str) -> Loop:
        """Return the loop over the results of the pieces."""
        loop, dtype = self._loop, first.value.dtype
        read = self._pool.load(
            first.buffer,
            first.index.xreplace({self._piece: self._within, PROGRAM: self._within}),
            dtype,
        )
        return Loop(
            buffer,
            loop.variables,
            loop.sizes,
            (self._within,),
            (self._pieces.count,),
            self._pool.cast(read, loop.value.dtype),
            kind,
            loop.index,
            origins=loop.origins,
        )

    def _cut(self, kind: str) -> Term:
        """Return the value over a piece and a place within it; beyond the row's end what changes
        nothing.
        """
        loop, pieces = self._loop, self._pieces
        count, length = pieces.count, sympy.Integer(pieces.length)
        # The row is cut as one flat run, whatever dimensions it has.
        flat, places = self._piece * length + self._within, {}
        strides = contiguous_strides(loop.reduced_sizes)
        for number, (variable, size, stride) in enumerate(
            zip(loop.reduced, loop.reduced_sizes, strides, strict=True)
        ):
            places[variable] = (
                FloorDiv(flat, stride) if number == 0 else ModularIndexing(flat, stride, size)
            )
        ranges = Ranges(
            dict(zip(loop.variables, loop.sizes, strict=True))
            | {self._piece: count, self._within: length}
        )
        value = substituted(
            self._pool, loop.value, lambda expr: ranges.simplified(expr.xreplace(places))
        )
        row = numel(loop.reduced_sizes)
        if count * length != row:
            inside = self._pool.operate(
                "lt", self._pool.index(flat), self._pool.index(row), dtype="bool"
            )
            value = self._pool.masked(inside, value, identity_of(kind, value.dtype))
        return self._summed(value)

    def _summed(self, value: Term) -> Term:
        """Return a value as pieces have it, whose results go through memory: in 16 bits they would
        be rounded twice.
        """
        halves = {"float16", "bfloat16"}
        return self._pool.cast(value, "float32") if value.dtype in halves else value
