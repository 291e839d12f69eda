# SPDX-License-Identifier: Apache-2.0
"""Sorts: `SORTS` maps operators to functions (builder, call) -> `LazyTensor`s.

A row becomes keys, integers of which each tells value and place (`sort_keys`), and a kernel that
holds the row sorts these. Elements of 64 bits do not fit into a key beside their places: these are
sorted by their lower half, then by the upper one. Of a longer row the first elements alone are
found, those of its pieces before those of what is left.

Every sort is stable, and NaN is the largest number. So where torch leaves open which of equal
elements comes first, or is named, it is the one whose place is lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides, numel
from bundler.codegen.loops.loop_terms import SORT, Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.reduction_lowerings import (
    Lowering,
    Results,
    cast,
    comparable,
    mapped,
    source_of,
)
from bundler.codegen.lowerings.sort_keys import SortKeys, rank_of_float
from bundler.codegen.lowerings.view_lowerings import with_new, without

# The longest row that a program holds to sort it; where a few elements are wanted, of which runs
# are short, the longest that it holds to find these; and the most that are found of a longer one
# piece by piece: each piece has to become far shorter.
_LONGEST_ROW, _LONGEST_OF_FEW, _FEW, _MOST_OF_LONGER = 1024, 4096, 64, 256
# Elements of a 64-bit type are sorted by halves of so many bits.
_HALF = 32
# What is made of a sorted key.
_Reader = Callable[[Term], Term]


class _Rows:
    """The rows of a call.

    Attributes:
        source: what is sorted; comparable.
        dim: along which the rows run.
        length: of a row.
    """

    def __init__(self, builder: GraphBuilder, call: OperatorCall, dim: int) -> None:
        source = source_of(call)
        if data_type(source.dtype).kind is NumberKind.FLOAT8:
            raise call.refusal("a sort of 8-bit floats")
        size = source.sizes[dim]
        if not size.is_Integer:
            raise call.refusal("a sort of rows whose length changes")
        self.builder, self.call, self.dim, self.length = builder, call, dim, int(size)
        self.source = comparable(builder, source)

    def keys_of(self, *, descending: bool) -> tuple[SortKeys, LazyTensor]:
        """Return the keys of the elements, not sorted."""
        pool, source, dim = self.builder.pool, self.source, self.dim
        keys = SortKeys(pool, source.dtype, self.length, descending=descending)

        def key(indices: Indices) -> Term:
            return keys.key(source.at(indices), pool.index(indices[dim], "int32"))

        return keys, self.builder.lazy(source.sizes, keys.dtype, key, source.origins)

    def refuse_longer(self) -> None:
        """Raise where no program holds a row."""
        if self.length > _LONGEST_ROW:
            raise self.call.refusal(f"a sort of rows of more than {_LONGEST_ROW} elements")


def _along(
    rows: _Rows,
    keys: LazyTensor,
    readers: Sequence[tuple[_Reader, TensorLayout]],
    dim: int,
    wanted: int,
) -> tuple[LazyTensor, ...]:
    """Return what readers make of keys in their order.

    Args:
        rows: whose keys they are.
        keys: not sorted.
        readers: each with the layout of its result, which has whole rows or what is wanted of them.
        dim: along which the rows of keys run.
        wanted: how many of the first keys of each row; the others may be any.
    """
    builder = rows.builder

    def made(operands: tuple[Term, ...]) -> list[Term]:
        key = builder.pool.make(SORT, operands, keys.dtype, (wanted,))
        return [builder.pool.cast(read(key), layout.dtype) for read, layout in readers]

    layouts = [layout for _, layout in readers]
    first = None if layouts[0].sizes[dim] == keys.sizes[dim] else wanted
    return builder.along_rows(SORT, [keys], dim, made, layouts, rows.call.origins, first)


def _dense(sizes: Sequence[sympy.Expr], dtype: str) -> TensorLayout:
    return TensorLayout(dtype, tuple(sizes), contiguous_strides(sizes))


def _same(key: Term) -> Term:
    return key


def _number(call: OperatorCall) -> int:
    """Return how many elements, or which of them, a call asks for."""
    number = sympy.sympify(call.arguments["k"])
    if not number.is_Integer:
        raise call.refusal("a number of elements that changes")
    return int(number)


# -------------------------------------------------------------------------------------------- Sorts


def _sort(builder: GraphBuilder, call: OperatorCall) -> Results:
    source = source_of(call)
    if not source.sizes:
        return _as_it_is(builder, call)
    dim = int(call.arguments.get("dim", -1)) % len(source.sizes)
    if source.sizes[dim] == 1 or numel(source.sizes) == 0:
        return _as_it_is(builder, call)
    rows = _Rows(builder, call, dim)
    rows.refuse_longer()
    descending = bool(call.arguments.get("descending", False))
    return _first(rows, rows.length, descending=descending)


def _as_it_is(builder: GraphBuilder, call: OperatorCall) -> tuple[LazyTensor, LazyTensor]:
    """Return rows of one element, and its place in each."""
    source = source_of(call)
    places = mapped(builder, source, "int64", lambda _: builder.pool.constant(0, "int64"))
    return cast(builder, source, call.dtype), places


def _first(rows: _Rows, count: int, *, descending: bool) -> tuple[LazyTensor, LazyTensor]:
    """Return the first elements of sorted rows that one program holds, and their places."""
    keys, given = rows.keys_of(descending=descending)
    if not keys.fit:
        return _by_halves(rows, count, descending=descending)
    return _read(rows, keys, given, count)


def _read(
    rows: _Rows, keys: SortKeys, given: LazyTensor, count: int
) -> tuple[LazyTensor, LazyTensor]:
    """Return the first elements of rows that are sorted by keys, and their places: the results of
    a call.
    """
    values, places = rows.call.results
    assert values is not None
    assert places is not None
    readers = [(keys.element, values), (keys.place, places)]
    value, place = _along(rows, given, readers, rows.dim, count)
    return value, place


def _by_halves(rows: _Rows, count: int, *, descending: bool) -> tuple[LazyTensor, LazyTensor]:
    """Return the first elements of sorted rows whose elements have 64 bits, and their places."""
    builder, call, source, dim = rows.builder, rows.call, rows.source, rows.dim
    pool = builder.pool
    # Elements are read again at the places that the first sort found.
    if builder.strided_view(source) is None:
        builder.realize(source)
    rank = partial(_wide_rank, builder, descending=descending)
    lower = SortKeys(pool, "uint32", rows.length, descending=False)
    upper = SortKeys(pool, "int32", rows.length, descending=False)

    def lower_key(indices: Indices) -> Term:
        half = pool.operate(
            "bitwise_and",
            rank(source.at(indices)),
            pool.constant((1 << _HALF) - 1, "int64"),
            dtype="int64",
        )
        return lower.key(half, pool.index(indices[dim], "int32"))

    given = builder.lazy(source.sizes, lower.dtype, lower_key, source.origins)
    readers = [(lower.place, _dense(source.sizes, "int32"))]
    (found,) = _along(rows, given, readers, dim, rows.length)

    def at_place(tensor: LazyTensor, place: Term, indices: Indices) -> Term:
        where = pool.indirect(place, source.sizes[dim], wrap=False, check=False)
        return tensor.at((*indices[:dim], where, *indices[dim + 1 :]))

    def upper_key(indices: Indices) -> Term:
        whole = rank(at_place(source, found.at(indices), indices))
        half = pool.operate("rshift", whole, pool.constant(_HALF, "int64"), dtype="int64")
        return upper.key(half, pool.index(indices[dim], "int32"))

    given = builder.lazy(source.sizes, upper.dtype, upper_key, source.origins)
    sizes = (*source.sizes[:dim], sympy.Integer(count), *source.sizes[dim + 1 :])
    (order,) = _along(rows, given, [(upper.place, _dense(sizes, "int32"))], dim, count)
    places = builder.lazy(
        sizes, "int32", lambda indices: at_place(found, order.at(indices), indices), call.origins
    )
    values = builder.lazy(
        sizes,
        source.dtype,
        lambda indices: at_place(source, places.at(indices), indices),
        call.origins,
    )
    return cast(builder, values, call.dtype), cast(builder, places, "int64")


def _wide_rank(builder: GraphBuilder, element: Term, *, descending: bool) -> Term:
    """Return an integer of 64 bits that is less where an element comes before another."""
    pool = builder.pool
    if element.dtype == "float64":
        bits = pool.operate("to_dtype_bitcast", element, dtype="int64")
        rank = rank_of_float(pool, bits)
    else:
        rank = pool.cast(element, "int64")
        if element.dtype == "uint64":
            least = pool.constant(-(2**63), "int64")
            rank = pool.operate("bitwise_xor", rank, least, dtype="int64")
    return pool.operate("bitwise_not", rank, dtype="int64") if descending else rank


# ------------------------------------------------------------------------------- The first elements


def _topk(builder: GraphBuilder, call: OperatorCall) -> Results:
    """Write `topk`, whose results are sorted whether that is asked for or not."""
    source, count = source_of(call), _number(call)
    if numel(call.sizes) == 0:
        return _without_elements(builder, call)
    if not source.sizes:
        return _as_it_is(builder, call)
    dim = int(call.arguments.get("dim", -1)) % len(source.sizes)
    if source.sizes[dim] == 1:
        return _as_it_is(builder, call)
    largest = bool(call.arguments.get("largest", True))
    if count == 1 and largest:
        return _largest(builder, call, dim)
    rows = _Rows(builder, call, dim)
    if rows.length > _LONGEST_ROW:
        return _first_of_longer(rows, count, descending=largest)
    return _first(rows, count, descending=largest)


def _largest(builder: GraphBuilder, call: OperatorCall, dim: int) -> tuple[LazyTensor, LazyTensor]:
    """Return the largest element of each row, which NaN is, and its place."""
    source = comparable(builder, source_of(call))
    value = builder.reduce("max", source, [dim], source.dtype, call.origins)
    place = builder.reduce("argmax", source, [dim], "int64", call.origins)
    return cast(builder, with_new(value, [dim]), call.dtype), with_new(place, [dim])


def _without_elements(builder: GraphBuilder, call: OperatorCall) -> tuple[LazyTensor, LazyTensor]:
    def empty(dtype: str) -> LazyTensor:
        zero = builder.pool.constant(0, dtype)
        return builder.lazy(call.sizes, dtype, lambda _: zero, call.origins)

    return empty(call.dtype), empty("int64")


def _first_of_longer(rows: _Rows, count: int, *, descending: bool) -> tuple[LazyTensor, LazyTensor]:
    """Return the first elements of rows that no program sorts: where it does not hold them, those
    of pieces, then those of what is left.
    """
    keys, left = rows.keys_of(descending=descending)
    if count > _MOST_OF_LONGER or not keys.fit:
        raise rows.call.refusal(
            f"{count} elements of {rows.source.dtype} of rows of more than {_LONGEST_ROW}"
        )
    longest = _LONGEST_OF_FEW if count <= _FEW else _LONGEST_ROW
    while int(left.sizes[rows.dim]) > longest:
        left = _first_of_pieces(rows, keys, left, count, longest)
    return _read(rows, keys, left, count)


def _first_of_pieces(
    rows: _Rows, keys: SortKeys, given: LazyTensor, count: int, longest: int
) -> LazyTensor:
    """Return the first keys of each piece of rows, one piece's behind another's."""
    builder, dim, pool = rows.builder, rows.dim, rows.builder.pool
    size, before, behind = given.sizes[dim], given.sizes[:dim], given.sizes[dim + 1 :]
    pieces = -(-int(size) // longest)
    # All of one length, but for the last, whose lanes beyond the row come behind every element.
    length = -(-int(size) // pieces)

    def key(indices: Indices) -> Term:
        flat = indices[dim] * length + indices[dim + 1]
        found = given.at((*indices[:dim], flat, *indices[dim + 2 :]))
        if pieces * length == size:
            return found
        inside = pool.operate("lt", pool.index(flat), pool.index(size), dtype="bool")
        return pool.masked(inside, found, keys.last)

    cut = builder.lazy((*before, pieces, length, *behind), keys.dtype, key, given.origins)
    kept = [*before, sympy.Integer(pieces), sympy.Integer(count), *behind]
    (found,) = _along(rows, cut, [(_same, _dense(kept, keys.dtype))], dim + 1, count)

    def joined(indices: Indices) -> Term:
        piece, place = FloorDiv(indices[dim], count), ModularIndexing(indices[dim], 1, count)
        return found.at((*indices[:dim], piece, place, *indices[dim + 1 :]))

    return builder.lazy((*before, pieces * count, *behind), keys.dtype, joined, found.origins)


# --------------------------------------------------------------------------------- A single element


def _rows_of(builder: GraphBuilder, call: OperatorCall) -> _Rows:
    """Return the rows of a call that finds an element of each."""
    source = source_of(call)
    dim = int(call.arguments.get("dim", -1)) % len(source.sizes)
    if numel(source.sizes) == 0:
        raise call.refusal("rows without an element")
    rows = _Rows(builder, call, dim)
    rows.refuse_longer()
    return rows


def _alone(rows: _Rows, tensor: LazyTensor) -> LazyTensor:
    """Return a tensor without the dimension of the rows, where the call does not keep it."""
    if rows.call.arguments.get("keepdim", False):
        return with_new(tensor, [rows.dim])
    return tensor


def _kthvalue(builder: GraphBuilder, call: OperatorCall) -> Results:
    number = _number(call)
    if not source_of(call).sizes:
        return _as_it_is(builder, call)
    rows, pool = _rows_of(builder, call), builder.pool
    dim = rows.dim
    keys, given = rows.keys_of(descending=False)
    if rows.length == 1 or not keys.fit:
        value, place = (without(one, [dim], sympy.Integer(number - 1)) for one in _ordered(rows))
        return _alone(rows, cast(builder, value, call.dtype)), _alone(rows, place)
    layout = _dense(given.sizes, keys.dtype)
    (ordered,) = _along(rows, given, [(_same, layout)], dim, number)

    def only(indices: Indices) -> Term:
        here, wanted = pool.index(indices[dim], "int32"), pool.constant(number - 1, "int32")
        is_it = pool.operate("eq", here, wanted, dtype="bool")
        other = pool.constant(0, keys.dtype)
        return pool.operate("where", is_it, ordered.at(indices), other, dtype=keys.dtype)

    alone = builder.lazy(ordered.sizes, keys.dtype, only, ordered.origins)
    key = _alone(rows, builder.reduce("sum", alone, [dim], keys.dtype, call.origins))
    value = mapped(builder, key, rows.source.dtype, keys.element)
    place = mapped(builder, key, "int32", keys.place)
    return cast(builder, value, call.dtype), cast(builder, place, "int64")


def _ordered(rows: _Rows) -> tuple[LazyTensor, LazyTensor]:
    """Return whole rows sorted, in memory, and the places that their elements had before."""
    builder, source = rows.builder, rows.source
    keys, given = rows.keys_of(descending=False)
    if rows.length == 1:
        zero = builder.pool.constant(0, "int64")
        return source, mapped(builder, source, "int64", lambda _: zero)
    if not keys.fit:
        return _by_halves(rows, rows.length, descending=False)
    layouts = [_dense(source.sizes, dtype) for dtype in (source.dtype, "int64")]
    readers = list(zip((keys.element, keys.place), layouts, strict=True))
    values, places = _along(rows, given, readers, rows.dim, rows.length)
    return values, places


SORTS: dict[str, Lowering] = {"sort": _sort, "topk": _topk, "kthvalue": _kthvalue}
