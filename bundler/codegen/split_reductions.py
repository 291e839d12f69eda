# SPDX-License-Identifier: Apache-2.0
"""`split`: a reduction of few long rows becomes two, so that more programs than rows work on it.

The first reduces pieces of each row, the second the results of the pieces.  `program_builder` calls it before fusion.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from bundler.codegen.index_functions import FloorDiv, ModularIndexing
from bundler.codegen.index_ranges import Ranges
from bundler.codegen.lazy_tensors import GraphBuilder
from bundler.codegen.loop_nodes import Loop, Node, TensorLayout, contiguous_strides, numel
from bundler.codegen.loop_order import normalized
from bundler.codegen.loop_terms import substituted

# Kinds whose pieces are reduced by the same kind.
_SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "xor_sum"})
# A row of at least this many elements is split where there are fewer rows than programs that a device runs at once.
_LEAST_ROW, _MOST_ROWS = 8192, 256
_PIECE = 2048


def split(builder: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with long reductions in two steps."""
    found: list[Node] = []
    for node in nodes:
        pieces = _pieces(node) if isinstance(node, Loop) else 0
        if pieces:
            assert isinstance(node, Loop)
            found += _two_steps(builder, node, pieces)
        else:
            found.append(node)
    return found


def is_split(loop: Loop) -> bool:
    """Whether a reduction is done in two steps."""
    return _pieces(loop) > 0


def _pieces(loop: Loop) -> int:
    """Return into how many pieces each row is cut; 0 for none."""
    rows, row = numel(loop.sizes), numel(loop.reduced_sizes)
    if (
        loop.kind not in _SPLITTABLE
        or not (rows.is_Integer and row.is_Integer)
        or rows > _MOST_ROWS
        or row < _LEAST_ROW
    ):
        return 0
    length = int(row)
    # A piece is a divisor of the row near the wanted length, so that no piece is shorter than the others.
    best = min(
        (abs(piece - _PIECE), piece)
        for piece in range(_PIECE // 4, _PIECE * 4)
        if length % piece == 0 or piece == _PIECE
    )
    return length // best[1] if length % best[1] == 0 else 0


def _two_steps(builder: GraphBuilder, loop: Loop, pieces: int) -> list[Node]:
    length = sympy.sympify(numel(loop.reduced_sizes) / pieces)
    piece, within = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("i90", "r90"))
    flat = piece * length + within
    places, sizes = (
        {},
        dict(zip(loop.variables, loop.sizes, strict=True)) | {piece: sympy.Integer(pieces), within: length},
    )
    strides = contiguous_strides(loop.reduced_sizes)
    for number, (variable, size, stride) in enumerate(zip(loop.reduced, loop.reduced_sizes, strides, strict=True)):
        places[variable] = FloorDiv(flat, stride) if number == 0 else ModularIndexing(flat, stride, size)
    ranges = Ranges(sizes)
    value = substituted(builder.pool, loop.value, lambda expr: ranges.simplified(expr.xreplace(places)))
    kept = (*loop.sizes, sympy.Integer(pieces))
    dtype = loop.value.dtype if loop.value.dtype not in {"float16", "bfloat16"} else "float32"
    layout = TensorLayout(dtype, kept, contiguous_strides(kept))
    name = builder.new_buffer(layout)
    first = Loop(
        name, (*loop.variables, piece), kept, (within,), (length,), builder.pool.cast(value, dtype), loop.kind,
        layout.index((*loop.variables, piece)), origins=loop.origins,
    )  # fmt: skip
    read = builder.pool.load(name, layout.index((*loop.variables, within)), dtype)
    second = Loop(
        loop.buffer, loop.variables, loop.sizes, (within,), (sympy.Integer(pieces),), builder.pool.cast(read, loop.value.dtype),
        loop.kind, loop.index, origins=loop.origins,
    )  # fmt: skip
    return [normalized(builder.pool, first), normalized(builder.pool, second)]
