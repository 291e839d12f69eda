# SPDX-License-Identifier: Apache-2.0
"""`split_products`: a product of up to 32 rows, and few columns, becomes a batch of products, each
of a piece of what is summed up, and a reduction that adds up the pieces in a fixed order.

Else few programs would read all of a large matrix. Pieces are stored in float32, and what is
computed of the product joins the reduction as it joins any other. `schedule` calls it before
fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.lazy_tensors import GraphBuilder, variables
from bundler.codegen.loops.loop_nodes import (
    POINTWISE,
    Loop,
    Node,
    TensorLayout,
    contiguous_strides,
)
from bundler.codegen.loops.loop_terms import PRODUCT, substituted
from bundler.runtime.heuristics.block_limits import ceil_div, pow2_down

# The text is for any device, so it counts on one large one.
_MULTIPROCESSORS = 132
# A second launch takes as long as a program needs to sum up so much, so pieces are no shorter than
# half of it, and a multiple of the longest block.
_LEAST_LENGTH, _LEAST_PIECE, _BLOCK = 2048, 512, 128
_MOST_PIECES = 16
# Few rows are bound by memory, which a quarter of the processors keeps busy. More rows gain nothing
# by a second launch: on an H200 the products of 64 to 256 rows that were measured took as long, or
# longer.
_FEW_ROWS, _TILE, _LEAST = 32, 32, 4


def split_products(builder: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with products that would leave most of a device idle in two steps."""
    found: list[Node] = []
    for node in nodes:
        count = pieces_of(node) if isinstance(node, Loop) and node.kind == PRODUCT else 1
        found += _steps(builder, node, count) if isinstance(node, Loop) and count > 1 else [node]
    return found


def pieces_of(product: Loop) -> int:
    """Return in how many pieces a product sums up; 1 where one program sums up all."""
    sizes = (*product.sizes, *product.reduced_sizes)
    if len(product.sizes) > len(("row", "column")) or not all(size.is_Integer for size in sizes):
        return 1
    rows, columns, length = map(int, sizes)
    programs = ceil_div(columns, _TILE)
    wanted = min(_MULTIPROCESSORS // programs, _MOST_PIECES, length // _LEAST_PIECE)
    if rows > _FEW_ROWS or length < _LEAST_LENGTH or wanted < _LEAST:
        return 1
    count = pow2_down(wanted)
    # Pieces of one length, which no block goes beyond.
    while count > 1 and length % (count * _BLOCK):
        count //= 2
    return count


def _steps(builder: GraphBuilder, product: Loop, count: int) -> list[Node]:
    """Return the product of pieces, their sum in float32, and the sum in the dtype that it has."""
    pool, (length,), (summed,) = builder.pool, product.reduced_sizes, product.reduced
    sizes = (sympy.Integer(count), *product.sizes)
    layout = TensorLayout("float32", sizes, contiguous_strides(sizes))
    whole = TensorLayout("float32", product.sizes, contiguous_strides(product.sizes))
    pieces, sums = builder.new_buffer(layout), builder.new_buffer(whole)
    # The piece is a batch, so it comes first.
    (piece,) = variables("p", [sizes[0]])
    places = [
        sympy.Integer(0) if size == 1 else variable
        for variable, size in zip(product.variables, product.sizes, strict=True)
    ]
    index = sympy.expand(layout.index([piece, *places]))
    each = length / count
    value = substituted(
        pool,
        product.value,
        lambda expr: sympy.expand(expr.xreplace({summed: piece * each + summed})),
    )
    first = replace(
        product,
        buffer=pieces,
        variables=(piece, *product.variables),
        sizes=sizes,
        reduced_sizes=(each,),
        value=value,
        index=index,
    )
    added = Loop(
        sums,
        product.variables,
        product.sizes,
        (piece,),
        sizes[:1],
        pool.load(pieces, index, "float32"),
        "sum",
        sympy.expand(whole.index(places)),
        origins=product.origins,
    )
    dtype = builder.buffers[product.buffer].layout.dtype
    stored = pool.cast(pool.load(sums, added.index, "float32"), dtype)
    rounded = Loop(
        product.buffer,
        product.variables,
        product.sizes,
        (),
        (),
        stored,
        POINTWISE,
        product.index,
        origins=product.origins,
    )
    return [first, added, rounded]
