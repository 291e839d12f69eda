# SPDX-License-Identifier: Apache-2.0
"""`write_product`: a product of matrices, with what is computed of each of its elements, becomes
the function of a kernel.

The lines around the sum are `product_text`'s; addresses of both operands, and the loops behind the
product, are written by `BodyWriter` as those of any kernel. Rows are y, columns x, a batch z, and
r0_ is what is summed up. `schedule` calls it in the place of `write_kernel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy

from bundler.codegen.kernels import operation_text
from bundler.codegen.kernels.kernel_arguments import KernelArguments, numel_parameter
from bundler.codegen.kernels.kernel_body import BodyWriter
from bundler.codegen.kernels.kernel_plan import (
    Bounded,
    KernelText,
    bounds_of_narrow_indices,
    example_of,
    hint_of,
)
from bundler.codegen.kernels.kernel_shape import KernelShape, Masks, PlacedLoop, Scope
from bundler.codegen.kernels.memory_traffic import gigabytes
from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.loops.data_types import NumberKind, data_type, loaded_text, stored_text
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer, Loop, numel
from bundler.codegen.loops.loop_terms import Term, TermPool, loads_of
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.templates.product_text import (
    ACCUMULATOR,
    LEFT_LANES,
    RIGHT_LANES,
    TiledOperand,
    head,
    sum_of_products,
    whole_body,
)
from bundler.format.host_descriptors import HostDescriptor
from bundler.runtime.heuristics.block_limits import MIN_DOT_EDGE
from bundler.runtime.heuristics.launch_grids import PROGRAMS
from bundler.runtime.heuristics.product_rules import largest_block
from bundler.runtime.program.device_tensors import item_bytes

_BLOCKS = ("YBLOCK", "XBLOCK", "R0_BLOCK", "GROUP")
# One matrix of the batch for each program.
_BATCH = "z"
_SUMMED = "r0_"
# dtypes that have a product -> how rules of candidates name them.
_OPERANDS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
}
# Those that descriptors bring: matrix units take them as they lie in shared memory.
_TILED = frozenset({"float16", "bfloat16", "float8_e4m3fn"})
_MATRIX = ("rows", "columns")
_NARROW = 2
# What the engine for bulk copies asks of addresses and strides.
_BYTES = 16


def write_product(
    group: LoopGroup,
    pool: TermPool,
    buffers: Mapping[str, Buffer],
    removed: frozenset[str],
    _reused: Mapping[str, str],
    size_hints: Mapping[sympy.Symbol, int],
    bounded: Bounded | None = None,
    *,
    asserted: bool = True,
    upcast: bool = True,
    siblings: int = 1,
) -> KernelText:
    """Return the kernel of a product and the loops behind it; arguments as `write_kernel`'s, and
    how many such products of one matrix share it, for each of which it is the same.
    """
    product = group.product
    assert product is not None
    (length,) = product.reduced_sizes
    space = IterationSpace(group.dimensions)
    bounds = bounds_of_narrow_indices(group, buffers, size_hints, bounded, [length])
    wide = bounds is None
    operands = _operands(product)
    whole = frozenset(
        prefix
        for prefix, size in (*group.dimensions, (_SUMMED, length))
        if _is_whole(prefix, size, operands)
    )
    shape = KernelShape(
        space, False, whole, wide, removed, asserted, upcast, scalars=frozenset({_BATCH})
    )
    read = {name for loop in group.loops for name in loop.reads}
    written = {loop.buffer for loop in group.loops}
    mutated = {name for name in written & read if buffers[name].source != "node"}
    arguments = KernelArguments(buffers, mutated, {})
    writer = _ProductBody(shape, pool, buffers, arguments)
    # A descriptor would have to change from turn to turn.
    turns = siblings == 1 and product.measured
    writer.takes_turns = turns and _takes_turns(group, buffers, removed)
    writer.read_once = _read_once(group)
    writer.is_narrow = item_bytes(product.value.terms[0].dtype) <= _NARROW
    body = writer.write(group.loops)
    # The grid counts a batch of one, too.
    batch = () if _BATCH in dict(group.dimensions) else ((_BATCH, sympy.Integer(siblings)),)
    dimensions = (*batch, *group.dimensions, (_SUMMED, length))
    numels = [numel_parameter(prefix, size, wide=wide) for prefix, size in dimensions]
    sizes = [p if wide else replace(p, type="i32") for p in arguments.sizes]
    parameters = (*arguments.pointers, *arguments.numbers, *sizes, *numels)
    fixed = [f"{prefix}numel = {size}" for prefix, size in dimensions if size.is_Integer]
    masked = [d.prefix for d in space.dimensions if d.prefix not in whole]
    block = head(
        masked, batched=not batch, wide=wide, turns=bool(writer.tiles), siblings=siblings > 1
    )
    examples = tuple(example_of(p, buffers, size_hints) for p in parameters)
    elements = hint_of(numel([size for _, size in dimensions]), size_hints)
    return KernelText(
        kind="product",
        dimensions=dimensions,
        parameters=parameters,
        blocks=(*_BLOCKS, *([PROGRAMS] if writer.tiles else [])),
        descriptors=_by_host(writer.tiles),
        body=(*fixed, *whole_body(block, body, writer.tiles, batched=not batch)),
        hints={prefix: max(1, hint_of(size, size_hints)) for prefix, size in dimensions},
        reduction_hint="DEFAULT",
        changed=arguments.changed,
        counts={
            "num_load": writer.num_load,
            "num_store": writer.num_store,
            "num_reduction": writer.num_reduction,
        },
        atomic=False,
        elements=writer.elements,
        functions=writer.functions,
        origins=tuple(sorted(frozenset().union(*(loop.origins for loop in group.loops)))),
        buffers=tuple(loop.buffer for loop in group.loops),
        bounds=bounds or (),
        asserts=writer.num_assert > 0,
        examples=examples,
        gigabytes=gigabytes(parameters, examples, group.loops, space, elements),
        facts={
            "operands": operands,
            **({} if product.measured else {"unmeasured": True}),
            **({"tma_min_blocks": {"R0_BLOCK": MIN_DOT_EDGE}} if writer.tiles else {}),
        },
    )


def _by_host(tiles: Sequence[TiledOperand]) -> tuple[Any, ...]:
    """Return what a kernel says of the descriptors that the host makes."""
    made = [tuple(tile.by_host) for tile in tiles if tile.by_host]
    return (PROGRAMS, *made) if made else ()


def _operands(product: Loop) -> str:
    """Return how rules of candidates name what is multiplied."""
    return (
        "tf32" if _precision(product.value) == "tf32" else _OPERANDS[product.value.terms[0].dtype]
    )


def _precision(product: Term) -> str:
    """Return how exactly float32 or 8-bit floats are multiplied; nothing for other dtypes."""
    dtype, asked = product.terms[0].dtype, str(product.details[0])
    if data_type(dtype).kind is NumberKind.FLOAT8:
        return "fast" if asked == "fast" else "exact"
    return asked if dtype == "float32" else ""


def _is_whole(prefix: str, size: sympy.Expr, operands: str) -> bool:
    """Whether no block goes beyond a dimension."""
    if prefix == _BATCH:
        return True
    return bool(size.is_Integer and size % largest_block(prefix, int(size), operands) == 0)


def _takes_turns(group: LoopGroup, buffers: Mapping[str, Buffer], removed: frozenset[str]) -> bool:
    """Whether there is room for the next block's operands beside what is computed of a block: it
    goes through shared memory where it meets other elements than of 8 and 16 bits.
    """
    elements = numel([size for _, size in group.dimensions])
    every = [buffers[name].layout for name in group.touched - removed]
    wide = [layout.storage for layout in every if item_bytes(layout.dtype) > _NARROW]
    return all(size.is_Integer and elements.is_Integer and size < elements for size in wide)


def _read_once(group: LoopGroup) -> frozenset[str]:
    """Return the buffers that a group reads in one place and does not write: their pointers may be
    descriptors.
    """
    reads = Counter(name for loop in group.loops for name, _, _ in loads_of(loop.value))
    written = {loop.buffer for loop in group.loops}
    return frozenset(name for name, count in reads.items() if count == 1) - written


class _Side(NamedTuple):
    """An operand that is written: what stands for the summed variable, the prefix of the other
    dimension of its blocks, and their shape.
    """

    lanes: str
    along: str
    block: str


_LEFT = _Side(LEFT_LANES, "y", "[YBLOCK, R0_BLOCK]")
_RIGHT = _Side(RIGHT_LANES, "x", "[R0_BLOCK, XBLOCK]")


class _ProductBody(BodyWriter):
    """Writes the loops of a kernel of which one is a product."""

    # Its registers hold a tile of sums until the last of them is stored.
    loads_first = False
    # The operand that is written, and the variable that is summed up.
    _side: _Side | None = None
    _summed: sympy.Symbol
    _length: sympy.Expr
    # Of both operands, where descriptors reach them.
    tiles: tuple[TiledOperand, ...] = ()
    # Whether the kernel may have the form with descriptors.
    takes_turns = False
    # Buffers whose pointer may be a descriptor.
    read_once: frozenset[str] = frozenset()
    # Whether operands have fewer bits than float32.
    is_narrow = False

    def _one(self, item: PlacedLoop) -> None:
        if not item.loop.is_product:
            super()._one(item)
            return
        self._tell(item)
        left, right = item.value.terms
        (self._summed,), (self._length,) = item.loop.reduced, item.loop.reduced_sizes
        computed: list[str] = []
        blocks = (
            self._operand(left, _LEFT, computed),
            self._operand(right, _RIGHT, computed),
        )
        precision = _precision(item.value)
        tiles = [self._tile(left, _LEFT), self._tile(right, _RIGHT)]
        if self.takes_turns and all(tiles):
            self.tiles = tuple(tile for tile in tiles if tile)
        lines = sum_of_products(blocks, computed, precision, self.tiles, wide=self._shape.wide)
        self._outer.lines += lines
        self.num_reduction += 1
        result, dtype = Value(ACCUMULATOR, "float32"), self._buffers[item.loop.buffer].layout.dtype
        stored = item.loop.buffer not in self._shape.removed
        if stored:
            self._store(item, result)
        # Who reads it elsewhere reads what is stored, so that all have the same bits.
        if stored or not self._shape.upcast:
            result = self._rounded(result, dtype)
        self._results[item.loop.buffer, item.index] = result

    def _needed(self, term: Term) -> Sequence[Term]:
        error = self._error_function(term)
        return super()._needed(term) if error is None else error.terms

    def _made(self, term: Term, masks: Masks) -> Value:
        error = self._error_function(term)
        if error is None:
            return super()._made(term, masks)
        (argument,) = error.terms
        value = self._value(argument, masks)
        return self._line(term, masks, Value(f"lib.one_plus_erf({value.text})", term.dtype))

    def _error_function(self, term: Term) -> Term | None:
        """Return the erf that 1 is added to, as GELU does, behind a product of 16 or 8 bits; None of
        another term. An operand has the bits that another kernel would store.
        """
        is_behind = self.is_narrow and self._side is None
        if term.operator != "add" or term.dtype != "float32" or not is_behind:
            return None
        found = [item for item in term.terms if item.operator == "erf"]
        others = [item for item in term.terms if item.operator == "constant"]
        known = found and others and others[0].details[0] == 1.0
        return found[0] if known else None

    def _rounded(self, value: Value, dtype: str) -> Value:
        if not data_type(dtype).is_half:
            return value
        name = self.new_name()
        text = operation_text.render("to_dtype", [value], dtype=dtype, rounded=True).text
        self._outer.lines.append(f"{name} = {text}")
        return Value(name, dtype)

    def _tile(self, term: Term, side: _Side) -> TiledOperand | None:
        """Return an operand as a descriptor reaches it; None where none does."""
        if term.operator != "load" or term.dtype not in _TILED or self._shape.wide:
            return None
        buffer, index, _ = term.details
        offset, rest = sympy.expand(index).as_coeff_Add()
        # Prefix -> how far memory goes along it, and how many elements.
        axes: dict[str, tuple[sympy.Expr, sympy.Expr]] = {}
        parts = [(d.prefix, p.symbol, p.length) for d in self._space.dimensions for p in d.whole]
        for prefix, symbol, length in (*parts, (_SUMMED, self._summed, self._length)):
            if rest.has(symbol):
                axes[prefix] = rest.coeff(symbol), length
                rest = sympy.expand(rest - axes[prefix][0] * symbol)
        inner = next((prefix for prefix, (stride, _) in axes.items() if stride == 1), _BATCH)
        outer = [prefix for prefix in axes if prefix != inner]
        if (
            rest != 0
            or axes.keys() | {_BATCH} != {_BATCH, side.along, _SUMMED}
            or inner == _BATCH
            or not self._buffers[buffer].aligned
        ):
            return None
        lanes = _BYTES // item_bytes(term.dtype)
        steps = [offset, *(axes[prefix][0] for prefix in outer)]
        if not all(step.is_Integer and step >= 0 and step % lanes == 0 for step in steps):
            return None
        # Rows do not lie over each other.
        if not axes[inner][1].is_Integer or steps[-1] < axes[inner][1]:
            return None
        return self._descriptor(buffer, offset, [(p, *axes[p]) for p in (*outer, inner)], side)

    def _descriptor(
        self,
        buffer: str,
        offset: sympy.Expr,
        axes: Sequence[tuple[str, sympy.Expr, sympy.Expr]],
        side: _Side,
    ) -> TiledOperand:
        """Return an operand as the descriptor with these axes reaches it: prefixes, strides, and
        how many elements.
        """
        pointer = self.arguments.read(buffer)
        blocks = ["1" if p == _BATCH else f"{p.upper()}BLOCK" for p, *_ in axes]
        places = {
            _BATCH: "zblock",
            side.along: f"{side.along}block * {side.along.upper()}BLOCK",
            _SUMMED: "r0_offset",
        }
        load = f"{{}}.load([{', '.join(places[prefix] for prefix, *_ in axes)}])"
        if len(blocks) > len(_MATRIX):
            load = f"tl.reshape({load}, [{', '.join(blocks[1:])}])"
        # Rows of the left operand, and columns of the right one, are the last axis of its block.
        if (axes[-1][0] == _SUMMED) != (side is _LEFT):
            load = f"tl.trans({load})"
        strides = [int(stride) for _, stride, _ in axes]
        if buffer in self.read_once and not offset and all(n.is_Integer for *_, n in axes):
            shape = tuple(int(length) for *_, length in axes)
            block = tuple(1 if text == "1" else text for text in blocks)
            found = HostDescriptor(pointer, shape, tuple(strides), block)
            return TiledOperand(pointer, load, found)
        base = f"{pointer} + {offset}" if offset else pointer
        sizes = ", ".join(f"{prefix}numel" for prefix, *_ in axes)
        text = f"tl.make_tensor_descriptor({base}, [{sizes}], {strides}, [{', '.join(blocks)}])"
        return TiledOperand(text, load)

    def _operand(self, term: Term, side: _Side, computed: list[str]) -> str:
        """Return the text of a block of an operand, zeros beyond its end; adds the lines that
        compute it.
        """
        self._symbols[self._summed] = Value(side.lanes, "int64" if self._shape.wide else "int32")
        if term.operator == "load":
            return self._block(term, side)
        self._side, self._inner = side, Scope()
        value = self._value(term, ())
        computed += self._inner.lines
        self._side = self._inner = None
        text = value.text
        if _SUMMED not in self._shape.constant_masks:
            # Of zeros something else may have been computed.
            text = f"tl.where({side.lanes} < r0_numel, {text}, 0.0)"
        text = stored_text(text, term.dtype)
        indices = [index for _, index, _ in loads_of(term)]
        along = {d.prefix for index in indices for d in self._space.dimensions_of(index)}
        whole = side.along in along and any(index.has(self._summed) for index in indices)
        return text if whole else f"tl.broadcast_to({text}, {side.block})"

    def _scope_of(self, term: Term, masks: Masks) -> Scope:
        if self._side is None or self._inner is None:
            return super()._scope_of(term, masks)
        # What is the same for all that is summed up is computed in front of the loop.
        inside = any(index.has(self._summed) for _, index, _ in loads_of(term))
        return self._inner if inside else self._outer

    def _fetched(self, term: Term, masks: Masks, other: float) -> Value:
        if self._side is None:
            return super()._fetched(term, masks, other)
        dtype = self._buffers[term.details[0]].layout.dtype
        text = loaded_text(self._loaded_block(term, self._side, spread=False), dtype)
        return self._line(term, masks, Value(text, dtype))

    def _block(self, load: Term, side: _Side) -> str:
        """Return the text of a block of an operand as it lies in memory."""
        text = self._loaded_block(load, side, spread=True)
        used = {d.prefix for d in self._space.dimensions_of(load.details[1])}
        return text if side.along in used else f"tl.broadcast_to({text}, {side.block})"

    def _loaded_block(self, load: Term, side: _Side, *, spread: bool) -> str:
        """Return the text of a load, zeros beyond the end.

        Args:
            load: an element.
            side: which operand it is of.
            spread: whether each lane has an address, also where it moves along nothing.
        """
        buffer, index, _ = load.details
        address = self._index(index, load, ())
        used = {d.prefix for d in self._space.dimensions_of(index)}
        summed = index.has(self._summed)
        # Each lane beyond the end has to be zero, so each needs an address.
        if index.is_Integer:
            shape = side.block if spread else "[1, 1]"
            address = f"tl.full({shape}, {address}, {self._index_type})"
        elif spread and not summed:
            address = f"tl.broadcast_to({address}, {side.block})"
        constant = self._shape.constant_masks
        masks = [f"{side.along}mask"] if side.along in used and side.along not in constant else []
        if (summed or spread) and _SUMMED not in constant:
            masks.append(f"({side.lanes} < r0_numel)")
        self.num_load += 1
        mask = f"{' & '.join(masks)}, other=0.0" if masks else "None"
        return f"tl.load({self.arguments.read(buffer)} + ({address}), {mask})"
