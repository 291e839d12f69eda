# SPDX-License-Identifier: Apache-2.0
"""`write_attention`: attention, with what is computed of each element of its result, becomes the
function of a kernel.

The lines around the sum are `attention_text`'s; addresses, and the loops behind it, are written by
`BodyWriter` as those of any kernel. z is heads and batch, and parts of the keys where these are
split; y is queries, x columns of the result, r0_ keys, and r1_ elements of a query. `schedule`
calls it in the place of `write_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from bundler.codegen.kernels.kernel_shape import KernelShape, PlacedLoop
from bundler.codegen.kernels.memory_traffic import gigabytes
from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.loops.data_types import data_type, loaded_text
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer, Loop, numel
from bundler.codegen.loops.loop_terms import AttentionDetails, Term, TermPool
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.templates.attention_text import (
    ACCUMULATOR,
    HEAD_COLUMN,
    HEAD_ROW,
    KEY_COLUMN,
    KEY_ROW,
    ROW_LOGARITHM,
    Attention,
    Blocks,
    head,
    in_two_parts,
    weighted_sum,
)
from bundler.runtime.heuristics.attention_rules import LARGEST_BLOCKS, LEAST_BLOCK
from bundler.runtime.heuristics.block_limits import pow2_down, pow2_up
from bundler.runtime.program.device_tensors import item_bytes

_BLOCKS = ("YBLOCK", "XBLOCK", "R0_BLOCK")
_BATCH, _KEYS, _HEAD = "z", "r0_", "r1_"
# Bytes of operands, and the least power of two that a head is divided behind.
_HALF, _LEAST_PART = 2, 64
# dtypes that have a product -> how rules of candidates name them.
_OPERANDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def write_attention(
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
) -> KernelText:
    """Return the kernel of attention and the loops behind it; arguments as `write_kernel`'s."""
    attention = group.product
    assert attention is not None
    keys, length = attention.reduced_sizes
    details = AttentionDetails(*attention.value.details)
    space = IterationSpace(group.dimensions)
    bounds = bounds_of_narrow_indices(group, buffers, size_hints, bounded, [keys])
    wide = bounds is None
    dimensions = (*group.dimensions, (_KEYS, keys), (_HEAD, length))
    rest = _rest(attention, group.dimensions)
    parts = {"x", _HEAD} if rest else set()
    whole = frozenset(p for p, size in dimensions if p in parts or _is_whole(p, size))
    shape = KernelShape(
        space, False, whole, wide, removed, asserted, upcast, scalars=frozenset({_BATCH})
    )
    read = {name for loop in group.loops for name in loop.reads}
    written = {loop.buffer for loop in group.loops}
    mutated = {name for name in written & read if buffers[name].source != "node"}
    arguments = KernelArguments(buffers, mutated, {})
    writer = _AttentionBody(shape, pool, buffers, arguments)
    writer.block = "XBLOCK" if rest else str(_block(length))
    body = writer.write(group.loops)
    numels = [numel_parameter(prefix, size, wide=wide) for prefix, size in dimensions]
    sizes = [p if wide else replace(p, type="i32") for p in arguments.sizes]
    parameters = (*arguments.pointers, *arguments.numbers, *sizes, *numels)
    fixed = [f"{prefix}numel = {size}" for prefix, size in dimensions if size.is_Integer]
    masks = [d.prefix for d in space.dimensions if d.prefix not in whole]
    body = [*head(writer.block, masks, causal=details.causal, wide=wide), *body]
    if rest:
        body = in_two_parts(body, int(length) - rest, rest)
    examples = tuple(example_of(p, buffers, size_hints) for p in parameters)
    elements = hint_of(numel([size for _, size in dimensions]), size_hints)
    return KernelText(
        kind="attention",
        dimensions=dimensions,
        parameters=parameters,
        blocks=_BLOCKS,
        body=(*fixed, *body),
        hints={prefix: pow2_up(hint_of(size, size_hints)) for prefix, size in dimensions},
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
        facts={"operands": _operands(attention)},
    )


def _operands(attention: Loop) -> str:
    """Return how rules of candidates name what is multiplied."""
    kind = _OPERANDS[attention.value.terms[0].dtype]
    return "tf32" if kind == "fp32" and attention.value.details[2] == "tf32" else kind


def _rest(attention: Loop, dimensions: Sequence[tuple[str, sympy.Expr]]) -> int:
    """Return how many elements of a head are behind the largest power of two, where these are a
    smaller one, so that a block of each leaves none over; else 0.
    """
    size = attention.reduced_sizes[1]
    halves = item_bytes(attention.value.terms[0].dtype) == _HALF
    if not halves or not size.is_Integer or dict(dimensions).get("x") != size:
        return 0
    part = pow2_down(int(size))
    rest = int(size) - part
    known = part >= _LEAST_PART and rest >= LEAST_BLOCK
    return rest if known and rest == pow2_down(rest) else 0


def _is_whole(prefix: str, size: sympy.Expr) -> bool:
    """Whether no block goes beyond a dimension: a block is a power of two, no larger than its
    limit, nor than the size rounded up, which is what it is along x and r1_.
    """
    if prefix == _BATCH:
        return True
    if not size.is_Integer:
        return False
    block = max(pow2_up(int(size)), LEAST_BLOCK)
    return bool(size % min(LARGEST_BLOCKS.get(prefix, block), block) == 0)


class _AttentionBody(BodyWriter):
    """Writes the loops of a kernel of which one is attention.

    Attributes:
        block: text of the edge of the block that holds the elements of a query.
    """

    block = ""

    # Its registers hold a tile of sums until the last of them is stored.
    loads_first = False

    def _one(self, item: PlacedLoop) -> None:
        if not item.loop.is_product:
            super()._one(item)
            return
        self._tell(item)
        details = AttentionDetails(*item.value.details)
        dtype = self._buffers[item.loop.buffer].layout.dtype
        self._outer.lines += weighted_sum(self._filled(item, details))
        self.num_reduction += 1
        result = Value(ACCUMULATOR, "float32")
        stored = item.loop.buffer not in self._shape.removed
        if stored:
            self._store(item, result)
            if details.logarithms:
                self._store_logarithms(item)
        # Who reads it elsewhere reads what is stored, so that all have the same bits.
        if stored or not self._shape.upcast:
            result = self._rounded(result, dtype)
        self._results[item.loop.buffer, item.index] = result

    def _rounded(self, value: Value, dtype: str) -> Value:
        if not data_type(dtype).is_half:
            return value
        name = self.new_name()
        text = operation_text.render("to_dtype", [value], dtype=dtype, rounded=True).text
        self._outer.lines.append(f"{name} = {text}")
        return Value(name, dtype)

    def _filled(self, item: PlacedLoop, details: AttentionDetails) -> Attention:
        query = item.value.terms[0]
        last = None if _KEYS in self._shape.constant_masks else self._blocks(item, details, _KEYS)
        block = f"[YBLOCK, {self.block}]"
        lanes = {item.loop.reduced[1]: HEAD_ROW}
        kind = "bool" if item.value.terms[-1].dtype == "bool" else "float"
        return Attention(
            query=self._load(query, lanes, {"y": "ymask", _HEAD: HEAD_ROW}, block),
            full=self._blocks(item, details, ""),
            last=last,
            mask=kind if details.masked else "",
            causal=details.causal,
            scale=details.scale,
            precision=details.precision if query.dtype == "float32" else "",
            splits=details.splits,
            wide=self._shape.wide,
        )

    def _blocks(self, item: PlacedLoop, details: AttentionDetails, beyond: str) -> Blocks:
        """Return the loads of a block of keys.

        Args:
            item: the attention.
            details: of it.
            beyond: the prefix of keys, where the block may go beyond the last one, else empty.
        """
        _, keys, values, *others = item.value.terms
        key, element = item.loop.reduced
        mask = ""
        if details.masked:
            (load,) = others[-1:]
            mask = self._load(load, {key: KEY_ROW}, {"y": "ymask", beyond: KEY_ROW}, "")
            mask = loaded_text(mask, load.dtype)
        return Blocks(
            keys=self._load(
                keys,
                {key: KEY_ROW, element: HEAD_COLUMN},
                {_HEAD: HEAD_COLUMN, beyond: KEY_ROW},
                f"[{self.block}, R0_BLOCK]",
            ),
            values=self._load(
                values,
                {key: KEY_COLUMN},
                {beyond: KEY_COLUMN, "x": "xmask"},
                "[R0_BLOCK, XBLOCK]",
            ),
            mask=mask,
        )

    def _load(
        self,
        load: Term,
        lanes: Mapping[sympy.Symbol, str],
        bounds: Mapping[str, str],
        block: str,
    ) -> str:
        """Return the text of a block of an operand, as it lies in memory, zeros beyond its end.

        Args:
            load: an element.
            lanes: what stands for the variables that are summed up.
            bounds: what may go beyond the end: a mask by its name, else lanes; by prefix.
            block: its shape; empty for a mask, which may be any that it is repeated to.
        """
        buffer, index, _ = load.details
        kind = "int64" if self._shape.wide else "int32"
        self._symbols |= {variable: Value(text, kind) for variable, text in lanes.items()}
        used = {d.prefix for d in self._space.dimensions_of(index)}
        moving = {lane for variable, lane in lanes.items() if index.has(variable)}
        # Each lane beyond the end has to be zero, so each needs an address.
        complete = len(moving) == len(lanes) and all(p in used for p in bounds if p in {"x", "y"})
        # What is the same for all keys is added to the pointer first, once for all blocks.
        keys = [variable for variable, lane in lanes.items() if lane in {KEY_ROW, KEY_COLUMN}]
        fixed, rest = 0, index
        if keys and block and complete:
            fixed, rest = index.as_independent(*keys, as_Add=True)
        address = self._index(rest, load, ())
        if index.is_Integer:
            address = f"tl.full({block or '[1, 1]'}, {address}, {self._index_type})"
        elif block and not complete:
            address = f"tl.broadcast_to({address}, {block})"
        active = [
            text if text.endswith("mask") else f"({text} < {prefix}numel)"
            for prefix, text in bounds.items()
            if prefix
            and prefix not in self._shape.constant_masks
            and (block or prefix in used or text in moving)
        ]
        self.num_load += 1
        other = "other=0.0" if block else "other=0"
        mask = f"{' & '.join(active)}, {other}" if active else "None"
        pointer = self.arguments.read(buffer)
        if fixed != 0:
            pointer = f"{pointer} + ({self._index(fixed, load, ())})"
        return f"tl.load({pointer} + ({address}), {mask})"

    def _store_logarithms(self, item: PlacedLoop) -> None:
        place = item.value.terms[3]
        index = sympy.sympify(place.details[0])
        address = f"tl.broadcast_to({self._index(index, place, ())}, [YBLOCK, 1])"
        if index.is_Integer:
            address = f"tl.full([YBLOCK, 1], {index}, {self._index_type})"
        mask = "None" if "y" in self._shape.constant_masks else "ymask"
        pointer = self.arguments.write(item.loop.buffer)
        self.num_store += 1
        self._outer.stores.append(f"tl.store({pointer} + ({address}), {ROW_LOGARITHM}, {mask})")


def _block(length: sympy.Expr) -> int:
    """Return the edge of the block that holds the elements of a query."""
    return max(pow2_up(int(length)), LEAST_BLOCK)
