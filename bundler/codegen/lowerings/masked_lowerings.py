# SPDX-License-Identifier: Apache-2.0
"""Operators that take elements one after another where a mask holds: `MASKED` maps them to
functions (builder, call) -> `LazyTensor`.

How many elements of a mask hold up to each one is a scan, and tells which element of the source
belongs there; which element of the mask is the n-th that holds is found by a search in that.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides, numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.reduction_lowerings import Lowering, cast
from bundler.codegen.lowerings.scan_lowerings import scanned
from bundler.codegen.lowerings.search_lowerings import searched
from bundler.codegen.lowerings.view_lowerings import broadcast, reshaped

# Counts of more elements than this need 64 bits.
_MOST_NARROW = 1 << 30


def _counted(builder: GraphBuilder, call: OperatorCall, mask: LazyTensor) -> LazyTensor:
    """Return for each element of a mask of one dimension how many hold up to it."""
    pool, (size,) = builder.pool, mask.sizes
    if mask.dtype != "bool":
        raise call.refusal(f"a mask of {mask.dtype}")
    dtype = "int32" if size.is_Integer and size <= _MOST_NARROW else "int64"

    def plus(left: Sequence[Term], right: Sequence[Term]) -> Sequence[Term]:
        return [pool.operate("add", left[0], right[0], dtype=dtype)]

    layout = TensorLayout(dtype, mask.sizes, contiguous_strides(mask.sizes))
    (found,) = scanned(builder, call, [cast(builder, mask, dtype)], 0, plus, [layout])
    return found


def _flat(tensor: LazyTensor) -> LazyTensor:
    return reshaped(tensor, (numel(tensor.sizes),))


def _masked_scatter(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Write `masked_scatter`; a mask that holds for more elements than the source has is an assert
    of the kernel's, as on a GPU.
    """
    pool, given = builder.pool, call.arguments
    target, mask = (broadcast(given[name], call.sizes) for name in ("self", "mask"))
    source = _flat(given["source"])
    if numel(call.sizes) == 0:
        return target
    if source.sizes[0] == 0:
        raise call.refusal("a source without elements")
    counts = reshaped(_counted(builder, call, _flat(mask)), call.sizes)

    def at(indices: Indices) -> Term:
        count, condition = counts.at(indices), mask.at(indices)
        one = pool.constant(1, count.dtype)
        place = pool.operate("sub", count, one, dtype=count.dtype)
        taken = source.at((pool.indirect(place, source.sizes[0], wrap=False),))
        value = pool.masked(condition, pool.cast(taken, call.dtype), 0)
        return pool.operate("where", condition, value, target.at(indices), dtype=call.dtype)

    origins = call.origins.union(target.origins, mask.origins, source.origins)
    return builder.lazy(call.sizes, call.dtype, at, origins)


def _masked_scatter_backward(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Return the elements of a gradient where a mask holds, one after another, then zeros."""
    pool, given = builder.pool, call.arguments
    gradient = given["grad_output"]
    if numel(call.sizes) == 0 or numel(gradient.sizes) == 0:
        zero = pool.constant(0, call.dtype)
        return builder.lazy(call.sizes, call.dtype, lambda _: zero, call.origins)
    counts = _counted(builder, call, _flat(broadcast(given["mask"], gradient.sizes)))
    (size,), flat = counts.sizes, _flat(gradient)
    wanted = builder.lazy(
        (numel(call.sizes),),
        counts.dtype,
        lambda indices: pool.index(indices[0] + 1, counts.dtype),
        call.origins,
    )
    # The first of the elements up to which so many hold.
    places = searched(builder, call, counts, wanted, counts.dtype, right=False)

    def at(indices: Indices) -> Term:
        place = places.at(indices)
        inside = pool.operate("lt", place, pool.index(size, place.dtype), dtype="bool")
        taken = flat.at((pool.indirect(place, size, wrap=False, check=False),))
        return pool.masked(inside, pool.cast(taken, call.dtype), 0)

    found = builder.lazy(wanted.sizes, call.dtype, at, call.origins | flat.origins)
    return reshaped(found, call.sizes)


MASKED: dict[str, Lowering] = {
    "masked_scatter": _masked_scatter,
    "masked_scatter_backward": _masked_scatter_backward,
}
