# SPDX-License-Identifier: Apache-2.0
"""Products of matrices as kernels: mm, bmm, and those that add to one: addmm, baddbmm, addbmm.

Floats of 16 and 32 bits become a node of its own kind, whose kernel is a template; integers and
float64, which have few products, a sum along rows. `PRODUCTS` maps names to functions (builder,
call) -> `LazyTensor`; `operator_lowerings` calls them where the graph is lowered with templates.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import broadcast, permuted, reshaped

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]
_MATRIX_UNITS = frozenset({"float16", "bfloat16", "float32"})


def _product(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    left, right = call.arguments["self"], call.arguments["mat2"]
    return _multiplied(builder, call, left, right, call.result)


def _factors(call: OperatorCall, left: str, right: str) -> tuple[LazyTensor, LazyTensor]:
    return call.arguments[left], call.arguments[right]


def _added_batch(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Add the products of all matrices of a batch: one product whose rows run through all."""
    one, other = call.arguments["batch1"], call.arguments["batch2"]
    count, rows, length = one.sizes
    left = reshaped(permuted(one, (1, 0, 2)), (rows, sympy.expand(count * length)))
    right = reshaped(other, (sympy.expand(count * length), other.sizes[2]))
    return _sum(builder, call, left, right)


def _sum(
    builder: GraphBuilder, call: OperatorCall, left: LazyTensor, right: LazyTensor
) -> LazyTensor:
    """Return `beta * self + alpha * product`, rounded once, in memory as a called one is."""
    pool, dtype = builder.pool, call.dtype
    computed = "float32" if data_type(dtype).is_half else dtype
    layout = TensorLayout(computed, call.sizes, contiguous_strides(call.sizes))
    product = _multiplied(builder, call, left, right, layout)
    added = broadcast(call.arguments["self"], call.sizes)
    beta, alpha = call.arguments.get("beta", 1), call.arguments.get("alpha", 1)

    def scaled(term: Term, factor: float | sympy.Expr) -> Term:
        if factor == 1:
            return term
        number = pool.constant(factor, computed)
        return pool.operate("mul", term, number, dtype=computed)

    def at(indices: Indices) -> Term:
        value = scaled(product.at(indices), alpha)
        # With a beta of 0 torch does not look at what is added, NaN or not.
        if beta != 0:
            other = scaled(pool.cast(added.at(indices), computed), beta)
            value = pool.operate("add", value, other, dtype=computed)
        return pool.cast(value, dtype)

    found = builder.lazy(call.sizes, dtype, at, call.origins | added.origins)
    found.strides = call.result.strides
    # A reader that is no part of the product's kernel must not add again, to what was rounded.
    builder.realize(found)
    return found


def _multiplied(
    builder: GraphBuilder,
    call: OperatorCall,
    left: LazyTensor,
    right: LazyTensor,
    layout: TensorLayout,
) -> LazyTensor:
    """Return the product of two matrices, or of each of a batch, in a layout."""
    length, dtype = left.sizes[-1], left.dtype
    if dtype != right.dtype:
        raise call.refusal(f"a product of {dtype} and {right.dtype}")
    if length == 0:
        zero = builder.pool.constant(0, layout.dtype)
        return builder.lazy(layout.sizes, layout.dtype, lambda _: zero, call.origins)
    if dtype in _MATRIX_UNITS:
        return builder.multiply(left, right, layout, call.origins)
    if data_type(dtype).kind is NumberKind.BOOL or layout.dtype != dtype:
        raise call.refusal(f"a product of {dtype} as {layout.dtype}")
    return _summed_up(builder, call, left, right)


def _summed_up(
    builder: GraphBuilder, call: OperatorCall, left: LazyTensor, right: LazyTensor
) -> LazyTensor:
    """Return a product as sums along rows, in its own dtype."""
    pool, dtype = builder.pool, left.dtype

    def at(indices: Indices) -> Term:
        *batch, row, column, place = indices
        one, other = left.at((*batch, row, place)), right.at((*batch, place, column))
        return pool.operate("mul", one, other, dtype=dtype)

    sizes = (*left.sizes[:-1], right.sizes[-1], left.sizes[-1])
    terms = builder.lazy(sizes, dtype, at, left.origins | right.origins)
    return builder.reduce("sum", terms, [len(sizes) - 1], dtype, call.origins)


PRODUCTS: dict[str, Lowering] = {
    "mm": _product,
    "bmm": _product,
    "addmm": lambda builder, call: _sum(builder, call, *_factors(call, "mat1", "mat2")),
    "baddbmm": lambda builder, call: _sum(builder, call, *_factors(call, "batch1", "batch2")),
    "addbmm": _added_batch,
}
