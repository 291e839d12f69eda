# SPDX-License-Identifier: Apache-2.0
"""`split`: a reduction of few long rows becomes two, so that more programs than rows work on it.

The first reduces pieces of each row, the second the results of the pieces.  Memory that runs along
the rows is cut so that a piece is one run of it; memory that runs across them so that the rows of
one piece lie beside each other.  A reduction across rows that another kernel reduces anyway is cut
into the blocks of rows of that kernel's programs (`mixed_reductions`), and a sum of everything that
reads what rows were reduced to into these rows, so that it shares their kernel.  `schedule` calls
it before fusion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
# are combined without weights where all pieces have one length.
_PLAIN = frozenset({"sum", "prod", "max", "min", "any", "xor_sum"})
_MOMENTS = frozenset({"welford_mean", "welford_m2"})
# Kinds whose result is a place in the row, and what is reduced to tell which piece it is in.
_PLACES = {"argmax": "max", "argmin": "min"}
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
# Fewer rows keep no device busy; the results of more are too many for the program that adds them.
_LEAST_ROWS, _MOST_ROWS = 2 * _MULTIPROCESSORS, 1 << 15
# Bounds the search for a divisor.
_MAX_DIVISIONS = 65536


# Values and rows -> buffer with the means of their pieces, which mean and squares share.
_Means = dict[tuple[Term, tuple[sympy.Expr, ...]], str]


@dataclass(frozen=True)
class RowPieces:
    """How the rows of a reduction are cut: into how many pieces of which length, and whether memory
    runs across the rows.

    Rows whose length changes from call to call have as many pieces in each.
    """

    count: sympy.Expr
    length: sympy.Expr
    across: bool


def split(
    builder: GraphBuilder,
    nodes: Sequence[Node],
    hints: Mapping[sympy.Symbol, int],
    whole: Collection[str] = (),
) -> list[Node]:
    """Return the nodes with long reductions in two steps.

    Args:
        builder: of the program.
        nodes: of the program, in order.
        hints: symbol of a size -> its value in the example.
        whole: buffers whose loops stay as they are.
    """
    found: list[Node] = []
    means: _Means = {}
    mixed, loops = (
        mixed_orders(nodes, hints),
        {one.buffer: one for one in nodes if isinstance(one, Loop)},
    )
    for node in nodes:
        if not isinstance(node, Loop) or node.buffer in whole:
            found.append(node)
            continue
        rows_each = mixed.get(node.buffer, 0)
        pieces = _blocks_of(node, rows_each) if rows_each else pieces_of(node, hints)
        if pieces is None:
            found.append(node)
            continue
        if not rows_each:
            pieces = _rows_read(node, loops) or pieces
        splitter = _Splitter(builder, node, pieces)
        steps = splitter.mixed(rows_each) if rows_each else splitter.steps(means)
        found += [normalized(builder.pool, step) for step in steps]
    return found


def is_split(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a reduction is done in two steps."""
    return pieces_of(loop, hints) is not None


def pieces_of(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> RowPieces | None:
    """Return how the rows of a reduction are cut; None where one kernel reduces them."""
    whole = numel(loop.reduced_sizes)
    rows, row = (size.subs(dict(hints)) for size in (numel(loop.sizes), whole))
    known = rows.is_Integer and row.is_Integer
    if loop.kind not in _PLAIN | _MOMENTS | _PLACES.keys() or not known:
        return None
    # A split needs to know along which direction memory runs, except of a single row, which only
    # can be cut along it.
    runs = runs_along(loop)
    if rows != 1 and runs is None:
        return None
    across = rows != 1 and not runs
    if across and loop.kind in _PLACES:
        return None
    wanted = _wanted_across(int(rows), int(row)) if across else pieces_along(int(rows), int(row))
    if wanted < 2:  # noqa: PLR2004  # one piece is the row itself
        return None
    # A last piece that is shorter reads the identity beyond the row's end.
    even = _even_count(int(row), wanted) if whole.is_Integer else None
    count = sympy.Integer(wanted if even is None else even)
    return RowPieces(count, FloorDiv(whole + count - 1, count), across)


def _rows_read(loop: Loop, loops: Mapping[str, Loop]) -> RowPieces | None:
    """Return the rows of the same elements that a reduction of everything reads results of."""
    if loop.kind not in _PLAIN or numel(loop.sizes) != 1:
        return None
    for name in sorted(loop.reads & loops.keys()):
        rows, row = (numel(part) for part in (loops[name].sizes, loops[name].reduced_sizes))
        of_rows = loops[name].has_rows and rows * row == numel(loop.reduced_sizes)
        many = rows.is_Integer and _LEAST_ROWS <= rows <= _MOST_ROWS
        if of_rows and many and runs_along(loops[name]):
            return RowPieces(rows, row, across=False)
    return None


def _blocks_of(loop: Loop, rows_each: int) -> RowPieces:
    """Return the blocks of so many rows that a reduction across rows is cut into."""
    count = FloorDiv(numel(loop.reduced_sizes) + rows_each - 1, sympy.Integer(rows_each))
    return RowPieces(count, sympy.Integer(rows_each), across=True)


def pieces_along(rows: int, row: int) -> int:
    """Return how many pieces keep the device busy where memory runs along the rows; 1 where the
    rows do.
    """
    if rows >= _LEAST_ROWS or row <= _SHORT_ROW:
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

    def steps(self, means: _Means) -> list[Loop]:
        """Return the steps of a reduction of any kind."""
        if self._loop.kind in _MOMENTS:
            return self.moments(means)
        return self.places() if self._loop.kind in _PLACES else self.plain()

    def places(self) -> list[Loop]:
        """Return the steps of the place of an extreme: of each piece the extreme and its place, the
        first piece that has the extreme of all, and the place there.

        So the first of equal ones is found, and the first NaN, as in each piece.
        """
        loop, pool = self._loop, self._pool
        extremes, inside = self._first(_PLACES[loop.kind]), self._first(loop.kind, dtype="int64")
        layout = TensorLayout("int64", loop.sizes, contiguous_strides(loop.sizes))
        index = layout.index(loop.variables)
        best = self._over_pieces(
            loop.kind, self._of_piece(extremes), self._builder.new_buffer(layout), index
        )
        piece = pool.load(best.buffer, index, "int64")
        number = pool.indirect(piece, self._pieces.count, wrap=False, check=False)
        there = pool.load(inside.buffer, inside.index.xreplace({self._piece: number}), "int64")
        begins = pool.operate("mul", piece, pool.index(self._pieces.length), dtype="int64")
        value = pool.operate("add", begins, there, dtype="int64")
        last = replace(loop, value=value, kind=POINTWISE, reduced=(), reduced_sizes=())
        return [extremes, inside, best, last]

    def plain(self) -> list[Loop]:
        """Return the steps of a reduction whose pieces are reduced as the rows are."""
        first = self._first(self._loop.kind)
        return [first, self._second(self._loop.kind, first, self._loop.buffer)]

    def mixed(self, rows_each: int) -> list[Loop]:
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
            rows_each=rows_each,
        )
        return [first, self._second(loop.kind, first, loop.buffer)]

    def moments(self, means: _Means) -> list[Loop]:
        """Return the steps of a mean or of squares of deviations.

        The squares around the mean of all are those around the mean of each piece, and the squares
        of the means' deviations, as often as a piece has elements.
        """
        if not self._even:
            return self._uneven_moments(means)
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

    @property
    def _even(self) -> bool:
        """Whether all pieces have one length in every call."""
        row = numel(self._loop.reduced_sizes)
        return bool(sympy.expand(self._pieces.count * self._pieces.length - row) == 0)

    def _uneven_moments(self, means: _Means) -> list[Loop]:
        """Return the steps of `moments` where the last pieces may be shorter, or empty: each counts
        as often as it has elements.
        """
        pool, loop, steps = self._pool, self._loop, list[Loop]()
        key = (loop.value, loop.reduced)
        if key not in means:
            steps += self._uneven_means()
            means[key] = steps[-1].buffer
        first = self._first("sum", means[key])
        dtype = first.value.dtype
        count, row = self._elements(self._within, dtype), numel(loop.reduced_sizes)
        part = pool.operate("truediv", count, pool.constant(row, dtype), dtype=dtype)
        share = pool.operate("mul", self._of_piece(first), part, dtype=dtype)
        if loop.kind == "welford_mean":
            return [*steps, self._over_pieces("sum", share, loop.buffer, loop.index)]
        layout = TensorLayout(dtype, loop.sizes, contiguous_strides(loop.sizes))
        index = layout.index(loop.variables)
        mean = self._over_pieces("sum", share, self._builder.new_buffer(layout), index)
        there = pool.load(first.buffer, first.index, dtype)
        squares = self._first("sum", value=self._square(pool.cast(loop.value, dtype), there))
        apart = self._square(self._of_piece(first), pool.load(mean.buffer, index, dtype))
        spread = self._if_any(count, pool.operate("mul", apart, count, dtype=dtype))
        both = pool.operate("add", self._of_piece(squares), spread, dtype=dtype)
        return [*steps, squares, mean, self._over_pieces("sum", both, loop.buffer, loop.index)]

    def _uneven_means(self) -> tuple[Loop, Loop]:
        """Return the steps of the means of pieces: sums of what elements are above the first one of
        their piece, which are as exact far from zero, and no larger.
        """
        pool, row = self._pool, self._cut("sum", self._loop.value)
        start = substituted(pool, row, lambda expr: expr.xreplace({self._within: sympy.Integer(0)}))
        dtype = start.dtype
        above = pool.operate("sub", pool.cast(self._loop.value, dtype), start, dtype=dtype)
        total = self._first("sum", value=above)
        count = self._elements(self._piece, dtype)
        load = pool.load(total.buffer, total.index, dtype)
        mean = pool.operate(
            "add", start, pool.operate("truediv", load, count, dtype=dtype), dtype=dtype
        )
        layout = self._builder.buffers[total.buffer].layout
        return total, replace(
            total,
            buffer=self._builder.new_buffer(layout),
            value=self._if_any(count, mean),
            kind=POINTWISE,
            reduced=(),
            reduced_sizes=(),
        )

    def _if_any(self, count: Term, value: Term) -> Term:
        """Return a value of a piece that has elements, else 0."""
        nothing = self._pool.constant(0, value.dtype)
        some = self._pool.operate("lt", nothing, count, dtype="bool")
        return self._pool.operate("where", some, value, nothing, dtype=value.dtype)

    def _elements(self, piece: sympy.Symbol, dtype: str) -> Term:
        """Return how many elements a piece has."""
        pool, pieces, row = self._pool, self._pieces, numel(self._loop.reduced_sizes)
        left = pool.index(row - piece * pieces.length)
        some = pool.operate("maximum", left, pool.constant(0, "int64"), dtype="int64")
        length = pool.index(pieces.length)
        return pool.cast(pool.operate("minimum", some, length, dtype="int64"), dtype)

    def _square(self, one: Term, other: Term) -> Term:
        """Return the square of a difference."""
        apart = self._pool.operate("sub", one, other, dtype=one.dtype)
        return self._pool.operate("mul", apart, apart, dtype=one.dtype)

    def _first(
        self,
        kind: str,
        name: str | None = None,
        value: Term | None = None,
        dtype: str | None = None,
    ) -> Loop:
        """Return the loop over pieces of the row's values, or of others; into a new buffer where no
        name of one is given, of the values' dtype where none is.
        """
        loop, pieces = self._loop, self._pieces
        kept, sizes = (self._piece, *loop.variables), (pieces.count, *loop.sizes)
        # The index of the piece is outermost where memory runs across the rows, so that lanes
        # beside each other still read neighbours; else innermost, so that each piece is one run.
        if not pieces.across:
            kept, sizes = (*loop.variables, self._piece), (*loop.sizes, pieces.count)
        value = self._cut(kind, value or self._loop.value)
        layout = TensorLayout(dtype or value.dtype, sizes, contiguous_strides(sizes))
        return Loop(
            name or self._builder.new_buffer(layout),
            kept,
            sizes,
            (self._within,),
            (pieces.length,),
            value,
            kind,
            layout.index(kept),
            origins=loop.origins,
            of_product=loop.of_product,
        )

    def _second(self, kind: str, first: Loop, buffer: str) -> Loop:
        """Return the loop over the results of the pieces."""
        value = self._pool.cast(self._of_piece(first), self._loop.value.dtype)
        return self._over_pieces(kind, value, buffer, self._loop.index)

    def _of_piece(self, first: Loop) -> Term:
        """Return the result of a piece, as a loop over pieces reads it."""
        places = {self._piece: self._within, PROGRAM: self._within}
        return self._pool.load(first.buffer, first.index.xreplace(places), first.value.dtype)

    def _over_pieces(self, kind: str, value: Term, buffer: str, index: sympy.Expr) -> Loop:
        loop = self._loop
        return Loop(
            buffer,
            loop.variables,
            loop.sizes,
            (self._within,),
            (self._pieces.count,),
            value,
            kind,
            index,
            origins=loop.origins,
        )

    def _cut(self, kind: str, value: Term) -> Term:
        """Return a value over a piece and a place within it; beyond the row's end what changes
        nothing.
        """
        loop, pieces = self._loop, self._pieces
        count, length = pieces.count, pieces.length
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
            self._pool, value, lambda expr: ranges.simplified(expr.xreplace(places))
        )
        row = numel(loop.reduced_sizes)
        if count * length != row:
            inside = self._pool.operate(
                "lt", self._pool.index(flat), self._pool.index(row), dtype="bool"
            )
            value = self._pool.masked(
                inside, value, identity_of(_PLACES.get(kind, kind), value.dtype)
            )
        return self._summed(value)

    def _summed(self, value: Term) -> Term:
        """Return a value as pieces have it, whose results go through memory: in 16 bits they would
        be rounded twice.
        """
        halves = {"float16", "bfloat16"}
        return self._pool.cast(value, "float32") if value.dtype in halves else value
