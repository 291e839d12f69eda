# SPDX-License-Identifier: Apache-2.0
"""`write_product`: a product of matrices, with what is computed of each of its elements, becomes
the function of a kernel.

The lines around the sum are `product_text`'s; addresses of both operands, and the loops behind the
product, are written by `BodyWriter` as those of any kernel. Rows are y, columns x, a batch z, and
r0_ is what is summed up. `schedule` calls it in the place of `write_kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from bundler.codegen.loops.data_types import data_type
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer, Loop, numel
from bundler.codegen.loops.loop_terms import Term, TermPool
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.templates.product_text import (
    ACCUMULATOR,
    LEFT_LANES,
    RIGHT_LANES,
    head,
    sum_of_products,
)
from bundler.runtime.heuristics.block_limits import pow2_up
from bundler.runtime.heuristics.product_rules import LARGEST_BLOCKS, LEAST_BLOCK

_BLOCKS = ("YBLOCK", "XBLOCK", "R0_BLOCK", "GROUP")
# One matrix of the batch for each program.
_BATCH = "z"
_SUMMED = "r0_"
# dtypes that have a product -> how rules of candidates name them.
_OPERANDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


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
) -> KernelText:
    """Return the kernel of a product and the loops behind it; arguments as `write_kernel`'s."""
    product = group.product
    assert product is not None
    (length,) = product.reduced_sizes
    space = IterationSpace(group.dimensions)
    bounds = bounds_of_narrow_indices(group, buffers, size_hints, bounded, [length])
    wide = bounds is None
    whole = frozenset(
        prefix for prefix, size in (*group.dimensions, (_SUMMED, length)) if _is_whole(prefix, size)
    )
    shape = KernelShape(
        space, False, whole, wide, removed, asserted, upcast, scalars=frozenset({_BATCH})
    )
    read = {name for loop in group.loops for name in loop.reads}
    written = {loop.buffer for loop in group.loops}
    mutated = {name for name in written & read if buffers[name].source != "node"}
    arguments = KernelArguments(buffers, mutated, {})
    writer = _ProductBody(shape, pool, buffers, arguments)
    body = writer.write(group.loops)
    # The grid counts a batch of one, too.
    batch = () if _BATCH in dict(group.dimensions) else ((_BATCH, sympy.Integer(1)),)
    dimensions = (*batch, *group.dimensions, (_SUMMED, length))
    numels = [numel_parameter(prefix, size, wide=wide) for prefix, size in dimensions]
    sizes = [p if wide else replace(p, type="i32") for p in arguments.sizes]
    parameters = (*arguments.pointers, *arguments.numbers, *sizes, *numels)
    fixed = [f"{prefix}numel = {size}" for prefix, size in dimensions if size.is_Integer]
    masked = [d.prefix for d in space.dimensions if d.prefix not in whole]
    examples = tuple(example_of(p, buffers, size_hints) for p in parameters)
    elements = hint_of(numel([size for _, size in dimensions]), size_hints)
    return KernelText(
        kind="product",
        dimensions=dimensions,
        parameters=parameters,
        blocks=_BLOCKS,
        body=(*fixed, *head(masked, batched=not batch, wide=wide), *body),
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
        facts={"operands": _operands(product)},
    )


def _operands(product: Loop) -> str:
    """Return how rules of candidates name what is multiplied."""
    return (
        "tf32" if _precision(product.value) == "tf32" else _OPERANDS[product.value.terms[0].dtype]
    )


def _precision(product: Term) -> str:
    """Return what float32 is multiplied as; nothing for other dtypes."""
    return str(product.details[0]) if product.terms[0].dtype == "float32" else ""


def _is_whole(prefix: str, size: sympy.Expr) -> bool:
    """Whether no block goes beyond a dimension: a block is a power of two, no larger than its
    limit, nor than the size rounded up.
    """
    if prefix == _BATCH:
        return True
    if not size.is_Integer:
        return False
    most = min(LARGEST_BLOCKS[prefix], max(pow2_up(int(size)), LEAST_BLOCK))
    return bool(size % most == 0)


class _ProductBody(BodyWriter):
    """Writes the loops of a kernel of which one is a product."""

    def _one(self, item: PlacedLoop) -> None:
        if not item.loop.is_product:
            super()._one(item)
            return
        self._tell(item)
        left, right = item.value.terms
        (summed,) = item.loop.reduced
        blocks = (
            self._operand(left, summed, LEFT_LANES, "y", "[YBLOCK, R0_BLOCK]"),
            self._operand(right, summed, RIGHT_LANES, "x", "[R0_BLOCK, XBLOCK]"),
        )
        lines = sum_of_products(blocks, _precision(item.value), wide=self._shape.wide)
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

    def _rounded(self, value: Value, dtype: str) -> Value:
        if not data_type(dtype).is_half:
            return value
        name = self.new_name()
        text = operation_text.render("to_dtype", [value], dtype=dtype, rounded=True).text
        self._outer.lines.append(f"{name} = {text}")
        return Value(name, dtype)

    def _operand(self, load: Term, summed: sympy.Symbol, lanes: str, along: str, block: str) -> str:
        """Return the text of a block of an operand, as it lies in memory, zeros beyond its end.

        Args:
            load: an element.
            summed: the variable that is summed up.
            lanes: what stands for that variable.
            along: the other dimension of the block.
            block: its shape.
        """
        buffer, index, _ = load.details
        self._symbols[summed] = Value(lanes, "int64" if self._shape.wide else "int32")
        address = self._index(index, load, ())
        used = {d.prefix for d in self._space.dimensions_of(index)}
        # Each lane beyond the end has to be zero, so each needs an address.
        if not index.has(summed):
            address = self._spread(address, index, block)
        masks = (
            [f"{along}mask"] if along in used and along not in self._shape.constant_masks else []
        )
        if _SUMMED not in self._shape.constant_masks:
            masks.append(f"({lanes} < r0_numel)")
        self.num_load += 1
        mask = f"{' & '.join(masks)}, other=0.0" if masks else "None"
        text = f"tl.load({self.arguments.read(buffer)} + ({address}), {mask})"
        return text if along in used else f"tl.broadcast_to({text}, {block})"

    def _spread(self, address: str, index: sympy.Expr, block: str) -> str:
        if index.is_Integer:
            return f"tl.full({block}, {address}, {self._index_type})"
        return f"tl.broadcast_to({address}, {block})"
