# SPDX-License-Identifier: Apache-2.0
"""`row_products`: a product of one row, or one column, with a matrix becomes a sum along the rows
that the matrix has in memory.

Such a product is bound by the memory that the matrix comes from, and matrix units would multiply
padded rows. As a sum it is fused as any reduction: with others that read the same row, with what is
computed of the matrix's elements (a cast, a scale), and with what is computed of the result. Each
product is added in float32, as torch's products are. `schedule` calls it before fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder
from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    Loop,
    Node,
    TensorLayout,
    contiguous_strides,
)
from bundler.codegen.loops.loop_terms import PRODUCT, Term, in_order, loads_of

_MATRICES = len(("row", "column"))
# A thread holds several neighbours of what is converted from 8-bit floats.
_LEAST_OF_FLOAT8 = 64


def row_products(builder: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with products of one row as sums."""
    found: list[Node] = []
    for node in nodes:
        is_row = isinstance(node, Loop) and row_of(node) is not None
        found += _steps(builder, node) if isinstance(node, Loop) and is_row else [node]
    return found


def row_of(loop: Loop) -> Term | None:
    """Return the operand of a product that is a single row or column; None where it is no such
    product, or memory runs across what is summed up.
    """
    if loop.kind != PRODUCT or len(loop.sizes) != _MATRICES:
        return None
    left, right = loop.value.terms
    rows, columns = loop.sizes
    if rows == 1:
        row, matrix, along = left, right, loop.variables[1]
    elif columns == 1:
        row, matrix, along = right, left, loop.variables[0]
    else:
        return None
    (summed,), (length,) = loop.reduced, loop.reduced_sizes
    eights = any(data_type(t.dtype).kind is NumberKind.FLOAT8 for t in in_order(loop.value))
    if eights and not (length.is_Integer and length >= _LEAST_OF_FLOAT8):
        return None
    # What moves with both is nearly all that is read.
    whole = [index for _, index, _ in loads_of(matrix) if index.has(summed) and index.has(along)]
    return row if all(index.coeff(summed) == 1 for index in whole) else None


def is_cheap(term: Term) -> bool:
    """Whether an operand that is a row may be computed again by each program that reads it."""
    return all(item.operator in {"load", "to_dtype"} for item in in_order(term))


def _steps(builder: GraphBuilder, product: Loop) -> list[Loop]:
    """Return the sum in float32, and the loop that stores it in the dtype of the product."""
    pool = builder.pool
    layout = TensorLayout("float32", product.sizes, contiguous_strides(product.sizes))
    sums = builder.new_buffer(layout)
    left, right = (
        # A computed operand has the bits that it would have if it were stored.
        pool.cast(term if term.operator == "load" else pool.rounded(term), "float32")
        for term in product.value.terms
    )
    places = [
        sympy.Integer(0) if size == 1 else variable
        for variable, size in zip(product.variables, product.sizes, strict=True)
    ]
    added = replace(
        product,
        buffer=sums,
        value=pool.operate("mul", left, right, dtype="float32"),
        kind="sum",
        index=sympy.expand(layout.index(places)),
        of_product=True,
    )
    dtype = builder.buffers[product.buffer].layout.dtype
    stored = replace(
        product,
        reduced=(),
        reduced_sizes=(),
        value=pool.cast(pool.load(sums, added.index, "float32"), dtype),
        kind=POINTWISE,
    )
    return [added, stored]
