# SPDX-License-Identifier: Apache-2.0
"""`split_products`: a product of few tiles and a long sum becomes a batch of products, each of a
piece of what is summed up, and a loop that adds up the pieces in a fixed order.

Else few programs would read all of a large matrix. Pieces are stored in float32, and what is
computed of the product joins the loop as it joins any other. `schedule` calls it before fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

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
# Few rows are bound by memory, which a quarter of the processors keeps busy.
_FEW_ROWS, _COLUMNS, _LEAST = 32, 32, 4
# More rows gain nothing by a second launch: on an H200 the products of 64 to 4,096 rows that were
# measured took as long, or longer. A reduction that reads the sum is launched anyway, and adds up
# a few pieces: 4 of tiles that are as large save more than it takes longer, unless the matrix is so
# large that memory bounds the product.
_TILE, _FEW_PIECES, _LARGE = (64, 128), 4, 1 << 23


def split_products(builder: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with products that would leave most of a device idle in two steps."""
    reduced = _reduced(nodes)
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop) and node.kind == PRODUCT:
            count = pieces_of(node, reduced=node.buffer in reduced)
            found += _steps(builder, node, count) if count > 1 else [node]
        else:
            found.append(node)
    return found


def _reduced(nodes: Sequence[Node]) -> set[str]:
    """Return the buffers that reductions read, or what is computed of each of their elements."""
    found: set[str] = set()
    for node in reversed(nodes):
        if not isinstance(node, Loop):
            continue
        if node.is_reduction or (node.kind == POINTWISE and node.buffer in found):
            found.update(node.reads)
    return found


def pieces_of(product: Loop, *, reduced: bool) -> int:
    """Return in how many pieces a product sums up; 1 where one program sums up all.

    Args:
        product: of matrices.
        reduced: whether a reduction reads what is computed of it.
    """
    sizes = (*product.sizes, *product.reduced_sizes)
    if len(product.sizes) > len(("row", "column")) or not all(size.is_Integer for size in sizes):
        return 1
    rows, columns, length = map(int, sizes)
    if rows <= _FEW_ROWS:
        programs, most = ceil_div(columns, _COLUMNS), _MOST_PIECES
    elif reduced and columns * length <= _LARGE:
        programs, most = ceil_div(rows, _TILE[0]) * ceil_div(columns, _TILE[1]), _FEW_PIECES
    else:
        return 1
    wanted = min(_MULTIPROCESSORS // programs, most, length // _LEAST_PIECE)
    if length < _LEAST_LENGTH or wanted < _LEAST:
        return 1
    count = pow2_down(wanted)
    # Pieces of one length, which no block goes beyond.
    while count > 1 and length % (count * _BLOCK):
        count //= 2
    return count


def _steps(builder: GraphBuilder, product: Loop, count: int) -> list[Node]:
    """Return the product of pieces, and what adds them up in float32 and stores the sum in the
    dtype of the product.
    """
    pool, (length,), (summed,) = builder.pool, product.reduced_sizes, product.reduced
    sizes = (sympy.Integer(count), *product.sizes)
    layout = TensorLayout("float32", sizes, contiguous_strides(sizes))
    pieces = builder.new_buffer(layout)
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
    stored = replace(product, reduced=(), reduced_sizes=(), kind=POINTWISE)
    dtype = builder.buffers[product.buffer].layout.dtype
    if count <= _FEW_PIECES:
        loads = (
            pool.load(pieces, sympy.expand(index.xreplace({piece: sympy.Integer(one)})), "float32")
            for one in range(count)
        )
        total = reduce(lambda a, b: pool.operate("add", a, b, dtype="float32"), loads)
        return [first, replace(stored, value=pool.cast(total, dtype))]
    whole = TensorLayout("float32", product.sizes, contiguous_strides(product.sizes))
    sums = builder.new_buffer(whole)
    added = replace(
        product,
        buffer=sums,
        reduced=(piece,),
        reduced_sizes=sizes[:1],
        value=pool.load(pieces, index, "float32"),
        kind="sum",
        index=sympy.expand(whole.index(places)),
    )
    total = pool.load(sums, added.index, "float32")
    return [first, added, replace(stored, value=pool.cast(total, dtype))]
