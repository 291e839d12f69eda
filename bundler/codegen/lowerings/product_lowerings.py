# SPDX-License-Identifier: Apache-2.0
"""Products of matrices as kernels: mm, bmm, those that add to one (addmm, baddbmm, addbmm), those
of 8-bit floats with scales, and convolutions whose windows do not overlap.

Floats of 8, 16 and 32 bits become a node of its own kind, whose kernel is a template; integers and
float64, which have few products, a sum along rows. `PRODUCTS` maps names to functions (builder,
call) -> `LazyTensor`; `operator_lowerings` calls them where the graph is lowered with templates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import (
    GraphBuilder,
    Indices,
    LazyTensor,
    are_same_strides,
)
from bundler.codegen.loops.loop_nodes import TensorLayout, contiguous_strides, numel
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import broadcast, permuted, reshaped, sliced

Lowering = Callable[[GraphBuilder, OperatorCall], LazyTensor]
_MATRIX_UNITS = frozenset({"float16", "bfloat16", "float32"})
_SCALED = frozenset({"float8_e4m3fn", "float8_e4m3fnuz"})
_BATCH_AND_CHANNELS = 2


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
    product = _multiplied(builder, call, left, right, _dense(computed, call.sizes))
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


def _dense(dtype: str, sizes: tuple[sympy.Expr, ...]) -> TensorLayout:
    return TensorLayout(dtype, sizes, contiguous_strides(sizes))


def _scaled(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Return a product of 8-bit floats, scaled as a whole or by rows and columns, with a bias,
    rounded once.
    """
    pool, given = builder.pool, call.arguments
    left, right, bias = given["self"], given["mat2"], given.get("bias")
    if {left.dtype, right.dtype} not in ({one} for one in _SCALED) or left.sizes[1] == 0:
        raise call.refusal(f"a product of {left.dtype} and {right.dtype}")
    if given.get("scale_result") is not None or call.dtype not in _MATRIX_UNITS:
        raise call.refusal(f"a result in {call.dtype}")
    rows, columns = call.sizes
    scales = [
        _scale(call, given["scale_a"], (rows, sympy.Integer(1))),
        _scale(call, given["scale_b"], (sympy.Integer(1), columns)),
    ]
    how = "fast" if given.get("use_fast_accum") else "exact"
    product = builder.multiply(left, right, _dense("float32", call.sizes), call.origins, how)
    added = None if bias is None else broadcast(bias, call.sizes)

    def at(indices: Indices) -> Term:
        value = product.at(indices)
        for scale in scales:
            factor = broadcast(scale, call.sizes).at(indices)
            value = pool.operate("mul", value, factor, dtype="float32")
        if added is not None:
            other = pool.cast(added.at(indices), "float32")
            value = pool.operate("add", value, other, dtype="float32")
        return pool.cast(value, call.dtype)

    found = builder.lazy(call.sizes, call.dtype, at, call.origins)
    found.strides = call.result.strides
    builder.realize(found)
    return found


def _scale(call: OperatorCall, scale: LazyTensor, sizes: tuple[sympy.Expr, ...]) -> LazyTensor:
    """Return a scale as a matrix: of one element, or one for each row or column."""
    if scale.dtype == "float32" and all(size == 1 for size in scale.sizes):
        return reshaped(scale, (sympy.Integer(1), sympy.Integer(1)))
    if scale.dtype != "float32" or scale.sizes != sizes:
        raise call.refusal(f"scales in {scale.dtype} of sizes {list(map(str, scale.sizes))}")
    return scale


def is_product(call: OperatorCall) -> bool:
    """Whether an operator becomes a product of matrices where the graph is lowered with
    templates.
    """
    return call.operator in PRODUCTS and (call.operator != "convolution" or is_patches(call))


def is_patches(call: OperatorCall) -> bool:
    """Whether a call is a convolution each of whose windows begins where the one before ends."""
    if call.operator != "convolution":
        return False
    given = call.arguments
    images, kernel = given["input"], given["weight"].sizes[_BATCH_AND_CHANNELS:]
    ones, zeros = ([number] * len(kernel) for number in (1, 0))
    return (
        images.dtype in _MATRIX_UNITS
        and len(images.sizes) == len(kernel) + _BATCH_AND_CHANNELS
        and not given["transposed"]
        and given["groups"] == 1
        and _every(given["padding"], zeros)
        and _every(given["dilation"], ones)
        and _every(given["stride"], kernel)
        and all(size != 0 for size in images.sizes)
    )


def _every(values: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether values, of which one may stand for all, are those that are wanted."""
    several = list(values) * len(wanted) if len(values) == 1 else list(values)
    return len(several) == len(wanted) and all(map(operator.eq, several, wanted))


def _patches(builder: GraphBuilder, call: OperatorCall) -> LazyTensor:
    """Return a convolution of patches as a product: in memory's order of its result, whose rows are
    channels, or patches where channels are innermost.
    """
    if not is_patches(call):
        raise call.refusal(
            "a kernel is generated where windows do not overlap: the kernel as large as the"
            " stride, without padding, dilation and groups"
        )
    images, weight, bias = (call.arguments.get(name) for name in ("input", "weight", "bias"))
    assert isinstance(images, LazyTensor)
    assert isinstance(weight, LazyTensor)
    count, channels, *kernel = (images.sizes[0], *weight.sizes[1:])
    numbers = call.sizes[_BATCH_AND_CHANNELS:]
    for place, (number, size) in enumerate(zip(numbers, kernel, strict=True), _BATCH_AND_CHANNELS):
        images = sliced(images, place, sympy.Integer(0), sympy.Integer(1), number * size)
    pairs = [size for pair in zip(numbers, kernel, strict=True) for size in pair]
    parts = reshaped(images, (count, channels, *pairs))
    outer = range(_BATCH_AND_CHANNELS, len(parts.sizes), 2)
    inner = [place + 1 for place in outer]
    made, length = weight.sizes[0], numel([channels, *kernel])
    filters = reshaped(weight, (made, length))
    if are_same_strides(call.sizes, call.result.strides, contiguous_strides(call.sizes)):
        pixels = numel(numbers)
        left = broadcast(filters, (count, made, length))
        right = reshaped(permuted(parts, (0, 1, *inner, *outer)), (count, length, pixels))
        shift = None if bias is None else reshaped(bias, (made, sympy.Integer(1)))
        found = _shifted(builder, call, left, right, shift)
        seen = reshaped(found, call.sizes)
    else:
        rows = numel([count, *numbers])
        left = reshaped(permuted(parts, (0, *outer, 1, *inner)), (rows, length))
        found = _shifted(builder, call, left, permuted(filters, (1, 0)), bias)
        last = len(kernel) + 1
        seen = permuted(reshaped(found, (count, *numbers, made)), (0, last, *range(1, last)))
    return builder.lazy(call.sizes, call.dtype, seen.at, call.origins)


def _shifted(
    builder: GraphBuilder,
    call: OperatorCall,
    left: LazyTensor,
    right: LazyTensor,
    shift: LazyTensor | None,
) -> LazyTensor:
    """Return a product in the dtype of a call, with what is added to it, if anything."""
    layout = _dense(call.dtype, (*left.sizes[:-1], right.sizes[-1]))
    given = replace(call, arguments={"self": shift}, results=(layout,))
    if shift is None:
        return _multiplied(builder, given, left, right, layout)
    return _sum(builder, given, left, right)


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
    "_scaled_mm": _scaled,
    "convolution": _patches,
}
