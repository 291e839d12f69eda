# SPDX-License-Identifier: Apache-2.0
"""Views: operators whose result has the same elements at other indices.  Each becomes a function
from new indices to old ones.

`VIEWS` maps names of operators to functions (builder, arguments, sizes of the result) ->
`LazyTensor`; `lowerings` calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from bundler.codegen.loops.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides, numel

Sizes = tuple[sympy.Expr, ...]
Reindex = Callable[[Indices], Sequence[sympy.Expr]]
_ZERO, _ONE = sympy.Integer(0), sympy.Integer(1)


def viewed(tensor: LazyTensor, sizes: Sequence[sympy.Expr], reindex: Reindex) -> LazyTensor:
    """Return a tensor whose element at some indices is that of another tensor at those that
    `reindex` returns.
    """
    return LazyTensor(
        tuple(sizes),
        tensor.dtype,
        lambda indices: tensor.at(tuple(reindex(indices))),
        tensor.origins,
        base=tensor,
    )


def reshaped(tensor: LazyTensor, sizes: Sequence[sympy.Expr]) -> LazyTensor:
    """Return a tensor with the same elements in the same order in other sizes."""
    if tuple(sizes) == tensor.sizes:
        return tensor
    # Only dimensions that really merge or split get divisions; the others keep their index.
    pairs = _matching_groups(tensor.sizes, tuple(sizes))

    def reindex(indices: Indices) -> list[sympy.Expr]:
        result: list[sympy.Expr] = [_ZERO] * len(tensor.sizes)
        for old, new in pairs:
            flat = _flat([indices[n] for n in new], [sizes[n] for n in new])
            for dim, index in zip(
                old, unravelled(flat, [tensor.sizes[n] for n in old]), strict=True
            ):
                result[dim] = index
        return result

    return viewed(tensor, sizes, reindex)


def _matching_groups(old: Sizes, new: Sizes) -> list[tuple[list[int], list[int]]]:
    """Return runs of dimensions of both, from the right, that hold equally many elements, as short
    as possible.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i, j = len(old) - 1, len(new) - 1
    while i >= 0 or j >= 0:
        left, right = ([i] if i >= 0 else []), ([j] if j >= 0 else [])
        a, b = (old[i] if i >= 0 else _ONE), (new[j] if j >= 0 else _ONE)
        i, j = i - 1, j - 1
        while sympy.expand(a - b) != 0:
            # The side that holds fewer elements takes one more dimension.
            grow_left = i >= 0 and (j < 0 or _smaller(a, b))
            if grow_left:
                a, left, i = a * old[i], [i, *left], i - 1
            elif j >= 0:
                b, right, j = b * new[j], [j, *right], j - 1
            else:
                break
        groups.append((left, right))
    return groups


def _smaller(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Whether the left side of a comparison of products has to grow first; of symbols, the one that
    the other is a multiple of.
    """
    if a.is_Integer and b.is_Integer:
        return bool(a < b)
    return bool(sympy.cancel(b / a).as_numer_denom()[1] == 1)


def _flat(indices: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    return sum((i * s for i, s in zip(indices, contiguous_strides(sizes), strict=True)), _ZERO)


def unravelled(flat: sympy.Expr, sizes: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """Return the indices of the element with a number."""
    found = []
    for number, (size, stride) in enumerate(zip(sizes, contiguous_strides(sizes), strict=True)):
        if size == 1:
            found.append(_ZERO)
        # The outermost index needs no remainder.
        elif number == 0 or all(before == 1 for before in sizes[:number]):
            found.append(FloorDiv(flat, stride))
        else:
            found.append(ModularIndexing(flat, stride, size))
    return found


def permuted(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """Return a tensor with its dimensions in another order."""
    # `back` turns the question round: where in the result does a dimension of the argument come
    # from.
    order = [dim % len(tensor.sizes) for dim in dims]
    back = {old: new for new, old in enumerate(order)}
    return viewed(
        tensor,
        [tensor.sizes[dim] for dim in order],
        lambda indices: [indices[back[n]] for n in range(len(order))],
    )


def broadcast(tensor: LazyTensor, sizes: Sequence[sympy.Expr]) -> LazyTensor:
    """Return a tensor repeated along dimensions of size 1 and new ones in front; -1 keeps a
    size.
    """
    extra = len(sizes) - len(tensor.sizes)
    kept = [tensor.sizes[n - extra] if size == -1 else size for n, size in enumerate(sizes)]
    if tuple(kept) == tensor.sizes:
        return tensor
    return viewed(tensor, kept, lambda indices: indices[extra:])


def sliced(
    tensor: LazyTensor, dim: int, start: sympy.Expr, step: sympy.Expr, size: sympy.Expr
) -> LazyTensor:
    """Return each `step`-th element along a dimension, `size` of them from `start` on."""
    sizes = [size if number == dim else old for number, old in enumerate(tensor.sizes)]
    return viewed(
        tensor,
        sizes,
        lambda indices: [i * step + start if n == dim else i for n, i in enumerate(indices)],
    )


def without(tensor: LazyTensor, dims: Sequence[int], index: sympy.Expr = _ZERO) -> LazyTensor:
    """Return a tensor without dimensions, at one index of them."""
    kept = [n for n in range(len(tensor.sizes)) if n not in dims]
    place = {old: new for new, old in enumerate(kept)}
    return viewed(
        tensor,
        [tensor.sizes[n] for n in kept],
        lambda indices: [
            indices[place[n]] if n in place else index for n in range(len(tensor.sizes))
        ],
    )


def with_new(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """Return a tensor with new dimensions of size 1 at these places of the result."""
    rank = len(tensor.sizes) + len(dims)
    rest = iter(tensor.sizes)
    sizes = [_ONE if n in dims else next(rest) for n in range(rank)]
    return viewed(
        tensor, sizes, lambda indices: [i for n, i in enumerate(indices) if n not in dims]
    )


def flipped(tensor: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """Return a tensor with the order along dimensions reversed."""
    chosen = {dim % len(tensor.sizes) for dim in dims if tensor.sizes}
    return viewed(
        tensor,
        tensor.sizes,
        lambda indices: [
            tensor.sizes[n] - 1 - i if n in chosen else i for n, i in enumerate(indices)
        ],
    )


# ------------------------ One function for each operator: (builder, arguments, sizes of the result)

View = Callable[[GraphBuilder, Mapping[str, Any], Sizes], LazyTensor]


def _dim(tensor: LazyTensor, dim: int, extra: int = 0) -> int:
    rank = len(tensor.sizes) + extra
    return dim % rank if rank else 0


def _slice(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor, dim = given["self"], _dim(given["self"], given.get("dim", 0))
    start = beginning(given, tensor.sizes[dim], sizes[dim])
    return sliced(tensor, dim, start, sympy.sympify(given.get("step", 1)), sizes[dim])


def beginning(given: Mapping[str, Any], length: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
    """Return where a slice of a dimension begins, clamped as in Python; one that begins beyond the
    end has no elements.

    Args:
        given: arguments of `slice` or `slice_scatter`.
        length: of the dimension.
        size: of the slice along it.
    """
    start = sympy.sympify(given.get("start") or 0)
    if start.is_Integer and length.is_Integer:
        return sympy.Integer(min(max(int(from_end(start, length)), 0), int(length)))
    if start.is_nonnegative:
        return start
    # torch's guards have simplified the size already: no minimum or maximum, mostly.
    if given.get("step", 1) == 1 and reaches_end(given, length):
        return length - size
    return sympy.Max(from_end(start, length), 0)


def reaches_end(given: Mapping[str, Any], length: sympy.Expr) -> bool:
    """Whether a slice is known to go on to the end of a dimension, where it does not begin
    beyond.
    """
    end = given.get("end")
    return end is None or end == length or (sympy.sympify(end).is_Integer and end >= sys.maxsize)


def from_end(index: sympy.Expr, length: sympy.Expr) -> sympy.Expr:
    """Return an index that is counted from the end where it is negative."""
    if index.is_nonnegative:
        return index
    # The factor is 1 for a negative integer, 0 for others.
    return index + length * sympy.Min(1, sympy.Max(0, -index))


def _select(_builder: GraphBuilder, given: Mapping[str, Any], _sizes: Sizes) -> LazyTensor:
    tensor, dim = given["self"], _dim(given["self"], given["dim"])
    return without(tensor, [dim], from_end(sympy.sympify(given["index"]), tensor.sizes[dim]))


def _squeeze(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor = given["self"]
    asked = given.get("dim", given.get("dimensions"))
    dims = (
        range(len(tensor.sizes))
        if asked is None
        else asked
        if isinstance(asked, (list, tuple))
        else [asked]
    )
    gone = [
        _dim(tensor, dim) for dim in dims if tensor.sizes and tensor.sizes[_dim(tensor, dim)] == 1
    ]
    assert len(sizes) == len(tensor.sizes) - len(set(gone))
    return without(tensor, gone)


def _as_strided(builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor, offset = given["self"], given.get("storage_offset")
    base = builder.reference(tensor)
    # torch counts the offset from the beginning of the storage, buffers from their first element.
    start = (
        base.layout.offset
        if offset is None
        else sympy.sympify(offset) - tensor.storage_offset + base.layout.offset
    )
    asked = TensorLayout(
        base.layout.dtype, sizes, tuple(sympy.sympify(s) for s in given["stride"]), start
    )
    return builder.lazy(
        sizes,
        tensor.dtype,
        lambda i: builder.pool.load(base.buffer, asked.index(i), tensor.dtype),
        tensor.origins,
    )


def _repeat(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor = given["self"]
    extra = len(sizes) - len(tensor.sizes)
    return viewed(
        tensor,
        sizes,
        lambda indices: [
            _ZERO if size == 1 else i if size == new else ModularIndexing(i, _ONE, size)
            for i, size, new in zip(indices[extra:], tensor.sizes, sizes[extra:], strict=True)
        ],
    )


def _diagonal(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor, offset = given["self"], sympy.sympify(given.get("offset", 0))
    first, second = _dim(tensor, given.get("dim1", 0)), _dim(tensor, given.get("dim2", 1))
    # A diagonal below the main one begins further down, one above it further right.
    down, right = sympy.Max(-offset, 0), sympy.Max(offset, 0)

    def reindex(indices: Indices) -> list[sympy.Expr]:
        rest = iter(indices[:-1])
        moved = {first: indices[-1] + down, second: indices[-1] + right}
        return [moved[n] if n in moved else next(rest) for n in range(len(tensor.sizes))]

    return viewed(tensor, sizes, reindex)


def _broadcast_in_dim(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor, dims = given["a"], given["broadcast_dimensions"]
    return viewed(tensor, sizes, lambda indices: [indices[dim] for dim in dims])


def _transpose(_builder: GraphBuilder, given: Mapping[str, Any], _sizes: Sizes) -> LazyTensor:
    tensor = given["self"]
    order = list(range(len(tensor.sizes)))
    if order:
        a, b = _dim(tensor, given.get("dim0", 0)), _dim(tensor, given.get("dim1", -1))
        order[a], order[b] = order[b], order[a]
    return permuted(tensor, order)


def _reshape(_builder: GraphBuilder, given: Mapping[str, Any], sizes: Sizes) -> LazyTensor:
    tensor = given.get("self", given.get("a"))
    assert isinstance(tensor, LazyTensor)
    # Without elements sizes need not match; no index is ever read.
    if numel(tensor.sizes) == 0:
        return viewed(tensor, sizes, lambda _indices: [_ZERO] * len(tensor.sizes))
    return reshaped(tensor, sizes)


VIEWS: dict[str, View] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "_reshape_alias", "view_of"), _reshape
    ),
    **dict.fromkeys(
        ("expand", "broadcast_to"), lambda _b, given, sizes: broadcast(given["self"], sizes)
    ),
    "permute": lambda _b, given, _sizes: permuted(given["self"], given["dims"]),
    "transpose": _transpose,
    "t": _transpose,
    "unsqueeze": lambda _b, given, _sizes: with_new(
        given["self"], [_dim(given["self"], given["dim"], 1)]
    ),
    "squeeze": _squeeze,
    "slice": _slice,
    "select": _select,
    "as_strided": _as_strided,
    "repeat": _repeat,
    "flip": lambda _b, given, _sizes: flipped(given["self"], given["dims"]),
    "diagonal": _diagonal,
    "broadcast_in_dim": _broadcast_in_dim,
}
