# SPDX-License-Identifier: Apache-2.0
"""`with_prologues`: an operand of a product that is computed element by element of other tensors,
such as a cast, a scale or a gate, is computed where the product loads it, and never stored.

Only where nobody else reads it, and where that takes no longer than storing it first would: a
product loads each operand once for each block of the other one. What is computed goes through
registers, so no block of it is copied to shared memory ahead, and matrix units wait for each: a
norm in the operand of a product of 16 x 6144 x 4096 made it 34 us on an H200, and 15 beside it. So
computed is what has fewer bytes than would be stored, as 8-bit weights, or is summed up in one
step, with a few instructions for an element; else what is computed once, in few steps, or of so
many lines that storing them takes longer. `schedule` calls it before fusion; `product_kernel`
writes what is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder
from bundler.codegen.loops.loop_nodes import POINTWISE, SEEDS, Loop, Node, numel
from bundler.codegen.loops.loop_terms import PRODUCT, STRUCTURAL, Term, in_order, loads_of
from bundler.codegen.templates.row_products import is_cheap, row_of
from bundler.runtime.heuristics.block_limits import ceil_div
from bundler.runtime.program.device_tensors import item_bytes

# More operators than this take longer than storing their result.
_MOST_OPERATORS = 30
# What has other numbers, or another effect, where it is computed several times or at other lanes.
_ONCE = frozenset({"rand", "randn", "randint64", "inline_asm_elementwise", "device_assert_then"})
# Rows or columns of a large block of the other operand, for each of which an operand is loaded.
_BLOCK = 128
# What takes an instruction or two for an element.
_QUICK = frozenset(
    {
        "add",
        "bitwise_and",
        "bitwise_left_shift",
        "bitwise_or",
        "bitwise_right_shift",
        "constant",
        "load",
        "mul",
        "sub",
        "to_dtype",
    }
)
# A product waits for each step along what is summed up, 0.3 to 1.4 us on an H200, which so few take
# about as long as a launch; what storing so many lines takes is more than that.
_FEW_STEPS, _MANY_LINES = 4, 4096
# A thread holds several neighbours of what is converted from 8-bit floats; shorter blocks have too
# few of them.
_LEAST_OF_FLOAT8 = 64


def with_prologues(
    builder: GraphBuilder,
    nodes: Sequence[Node],
    outputs: Collection[str],
    hints: Mapping[sympy.Symbol, int],
) -> list[Node]:
    """Return the nodes, without those whose results products compute by themselves.

    Args:
        builder: of the program.
        nodes: of the program, in order, none of which is dead.
        outputs: buffers that leave the program.
        hints: symbol of a size -> its value in the example.
    """
    return _Prologues(builder, nodes, outputs, hints).run()


class _Prologues:
    def __init__(
        self,
        builder: GraphBuilder,
        nodes: Sequence[Node],
        outputs: Collection[str],
        hints: Mapping[sympy.Symbol, int],
    ) -> None:
        self._builder, self._nodes, self._hints = builder, nodes, dict(hints)
        self._outputs = outputs
        self._loads = Counter(name for node in nodes for name in _read_by(node))
        self._writers: dict[str, list[int]] = {}
        for number, node in enumerate(nodes):
            for name in node.writes:
                self._writers.setdefault(name, []).append(number)

    def run(self) -> list[Node]:
        """Return the nodes that are left."""
        found: list[Node] = []
        gone: set[int] = set()
        for number, node in enumerate(self._nodes):
            # A single candidate has to have room for its operands, and does for those it loads.
            if not isinstance(node, Loop) or node.kind != PRODUCT or not node.measured:
                found.append(node)
                continue
            left, right = node.value.terms
            writers = [
                self._writer(node, number, left, right),
                self._writer(node, number, right, left),
            ]
            operands = tuple(
                load if writer is None else self._builder.operands[load]
                for load, writer in zip((left, right), writers, strict=True)
            )
            value = self._builder.pool.make(PRODUCT, operands, node.value.dtype, node.value.details)
            taken = [writer for writer in writers if writer is not None]
            origins = node.origins.union(*(self._loop(writer).origins for writer in taken))
            found.append(replace(node, value=value, origins=origins))
            gone.update(taken)
        return [node for number, node in enumerate(found) if number not in gone]

    def _loop(self, number: int) -> Loop:
        found = self._nodes[number]
        assert isinstance(found, Loop)
        return found

    def _writer(self, product: Loop, number: int, load: Term, other: Term) -> int | None:
        """Return which node stores an operand that the product is to compute by itself; None where
        it loads it.
        """
        term, name = self._builder.operands.get(load), load.details[0]
        if term is None or name in self._outputs or self._loads[name] != 1:
            return None
        writers = self._writers.get(name, [])
        if len(writers) != 1 or not self._is_fit(product, term):
            return None
        (writer,) = writers
        node = self._nodes[writer]
        if not isinstance(node, Loop) or node.kind != POINTWISE or node.mode is not None:
            return None
        # What it is computed of must not have changed meanwhile.
        read = {buffer for buffer, _, _ in loads_of(term)}
        if any(not read.isdisjoint(node.writes) for node in self._nodes[writer:number]):
            return None
        # Each program reads all of a single row, so it would compute all of it.
        if load is row_of(product):
            return writer if is_cheap(term) else None
        return writer if self._is_worth_it(product, load, term, other) else None

    def _is_fit(self, product: Loop, term: Term) -> bool:
        """Whether a kernel of a product can compute an operand."""
        buffers, every = self._builder.buffers, list(in_order(term))
        if len(every) > _MOST_OPERATORS:
            return False
        for item in every:
            if item.operator == "load":
                name = item.details[0]
                if item.arguments or name == SEEDS or buffers[name].by_value:
                    return False
            elif item.operator in _ONCE or (
                item.operator in STRUCTURAL and item.operator != "constant"
            ):
                return False
        if data_type(term.dtype).kind is NumberKind.FLOAT8:
            return False
        (length,) = product.reduced_sizes
        long = length.is_Integer and length >= _LEAST_OF_FLOAT8
        return bool(long) or all(
            data_type(item.dtype).kind is not NumberKind.FLOAT8 for item in every
        )

    def _is_worth_it(self, product: Loop, load: Term, term: Term, other: Term) -> bool:
        """Whether computing an operand anew for each block of the other one takes no longer than
        storing it does, and loading that for each.
        """
        # The row or column of the result that runs along the other operand alone.
        symbols = other.details[1].free_symbols - load.details[1].free_symbols
        blocks = ceil_div(self._lines(product, sympy.Add(*symbols)), _BLOCK)
        steps = ceil_div(self._known(product.reduced_sizes[0]), _BLOCK)
        read = sum(self._bytes(product, *one) for one in {one[:2] for one in loads_of(term)})
        stored = self._bytes(product, *load.details[:2])
        is_quick = blocks == 1 or all(_is_quick(item, product) for item in in_order(term))
        if is_quick and (read < stored or steps == 1):
            return blocks * read <= read + stored * (1 + blocks)
        many = self._lines(product, load.details[1]) >= _MANY_LINES
        return blocks == 1 and (many or steps <= _FEW_STEPS)

    def _lines(self, product: Loop, index: sympy.Expr) -> int:
        """Return how many rows or columns of a product an address goes through."""
        pairs = zip(product.variables, product.sizes, strict=True)
        return self._known(numel([size for name, size in pairs if name in index.free_symbols]))

    def _bytes(self, product: Loop, buffer: str, index: sympy.Expr) -> int:
        """Return how much memory a load reads, of all elements once."""
        named = dict(
            zip(
                (*product.variables, *product.reduced),
                (*product.sizes, *product.reduced_sizes),
                strict=True,
            )
        )
        layout = self._builder.buffers[buffer].layout
        elements = self._known(numel([named[s] for s in named if index.has(s)]))
        return min(elements, self._known(layout.storage)) * item_bytes(layout.dtype)

    def _known(self, size: sympy.Expr) -> int:
        known = size.subs(self._hints)
        # A size without an example counts as a single block.
        return int(known) if known.is_Integer else 1


def _is_quick(term: Term, product: Loop) -> bool:
    """Whether a term takes little time for each element of an operand; one of a row, such as a
    norm's scale, takes none.
    """
    along = product.reduced
    return term.operator in _QUICK or not any(
        index.has(symbol) for _, index, _ in loads_of(term) for symbol in along
    )


def _read_by(node: Node) -> list[str]:
    """Return the buffers that a node reads, a product's as often as it has operands there."""
    if not isinstance(node, Loop) or node.kind != PRODUCT:
        return list(node.reads)
    return [name for name, _, _ in node.loads] + [
        load.details[0] for load in node.value.terms[:1] if load is node.value.terms[1]
    ]
