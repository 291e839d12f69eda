# SPDX-License-Identifier: Apache-2.0
"""`write_kernel`: one group of loops becomes the function of a kernel, with what its launch and its
heuristic need to know.

It decides dimensions and tiling (`tiled`), whether rows are held whole, which masks are constant
and how wide indices are; `kernel_body` writes the lines. `schedule` calls it for each group,
`module_text` puts the function into a module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from bundler.codegen.kernels.descriptor_text import orders_nothing
from bundler.codegen.kernels.kernel_arguments import (
    KernelArguments,
    KernelParameter,
    numel_parameter,
)
from bundler.codegen.kernels.kernel_body import BodyWriter
from bundler.codegen.kernels.kernel_shape import KernelShape, block_name
from bundler.codegen.kernels.memory_traffic import gigabytes
from bundler.codegen.kernels.shared_row_text import SHARE, SHARES
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer, Loop, TensorLayout, numel
from bundler.codegen.loops.loop_terms import SORT, TermPool, loads_of
from bundler.codegen.loops.range_trees import Dimension, IterationSpace
from bundler.codegen.loops.row_direction import runs_along
from bundler.runtime.heuristics.block_limits import pow2_up
from bundler.runtime.heuristics.reduction_rules import rows_at_once

# A row of up to so many elements is held whole: where memory runs along it, and where it runs
# across, so that a block also has to span neighbouring rows.
_WHOLE_ROW_INNER, _WHOLE_ROW_OUTER = 1024, 64
# Kernels in which each thread reads one boundary after the other gain by few elements of a thread.
_SEARCHES = frozenset({"bucketize", "searchsorted"})
# Where a measurement tells, rows of so many times that length may be held whole, as in torch.
_MEASURED_ROWS = 16
# Masks are left out on the strength of this: no candidate has larger blocks, nor larger ones than
# the power of two at or above a size.
LARGEST_BLOCK = {"x": 4096, "y": 1024, "z": 1024, "r0_": 65536}
_MOST_Y_PROGRAMS = 65535
# A row of fewer elements than AMD's warp has lanes keeps its mask: without it, lanes were seen to
# read beyond the row.
_SHORT_ROW = 64
LARGEST_NARROW = 2**31 - 1
# What a size counts as that has no example.
_UNKNOWN_SIZE = 8192
_GRID_AXES = {"x": 0, "y": 1, "z": 2}
# Rows of these lengths are offered to the tuner as blocks that hold them whole, though the kernel
# loops over rows, where looping reads at least so many times as much memory.
_HELD_BY_A_BLOCK, _WORTH_HOLDING = (2048, 32768), 1.3
# What a program loads ahead of the rows that it computes lies in shared memory, of which every GPU
# has more than so much; heuristics have at most so many stages.
_SHARED_BYTES, _MOST_STAGES = 49152, 3
_GRID_SIZE = re.compile(r"[xyz]numel(?:_[0-9]+)?")
Bounded = Callable[[sympy.Expr], bool]
_Dimensions = tuple[tuple[str, sympy.Expr], ...]
# A dimension of one element gains nothing by a block of its own.
_LEAST_LENGTH = 2
# Three blocks are short; each still has to be as long as what memory brings at once.
_LEAST_OF_THREE = 16


@dataclass(frozen=True)
class KernelText:
    """A kernel without its name.

    Attributes:
        kind: `pointwise`, `reduction`, `persistent_reduction`, `product` or `attention`.
        dimensions: (prefix, numel), as the signature has them.
        parameters: what a launch passes, in order.
        blocks: constexpr parameters behind them.
        descriptors: what `host_descriptors` reads as a default, behind the blocks; else nothing.
        body: lines of the function.
        hints: prefix -> power of two at or above the number of elements.
        reduction_hint: `INNER`, `OUTER` or `DEFAULT`.
        changed: parameters whose buffers the kernel changes.
        counts: `num_load`, `num_store`, `num_reduction`.
        atomic: whether it adds atomically.
        origins: names of the operators that it computes.
        buffers: what it writes, for comments.
        bounds: sizes that are at most `LARGEST_NARROW` in every call, since its indices have 32
            bits.
        asserts: whether it asserts that indices which it reads are in range.
        examples: for each parameter dtype, sizes and strides of a tensor, or a number, as the
            example's.
        facts: what else heuristics look at, by the names of the decorator's arguments; none that
            says nothing.
        elements: how many neighbouring elements a thread has to hold.
        functions: texts of functions that the body calls.
        gigabytes: how much memory a launch moves, for the example's sizes.
        workspaces: of a kernel whose programs share rows, memory that a launch needs for itself, by
            what its parameters call it; the counters have to be ready for a barrier.
        parts: the kernels that a combination runs side by side, each once; else none.
        in_turn: whether the programs of a combination take its parts in turn.
        repeated: how many times as much memory it moves as a kernel that holds its rows whole.
        most: parameter -> the largest number that the kernel takes.
    """

    kind: str
    dimensions: tuple[tuple[str, sympy.Expr], ...]
    parameters: tuple[KernelParameter, ...]
    blocks: tuple[str, ...]
    body: tuple[str, ...]
    hints: Mapping[str, int]
    reduction_hint: str
    changed: tuple[str, ...]
    counts: Mapping[str, int]
    atomic: bool
    origins: tuple[str, ...]
    buffers: tuple[str, ...]
    bounds: tuple[sympy.Expr, ...] = ()
    asserts: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[Any, ...] = ()
    elements: int = 1
    functions: tuple[str, ...] = ()
    gigabytes: float = 0.0
    workspaces: Mapping[str, TensorLayout] = field(default_factory=dict)
    parts: tuple[KernelText, ...] = ()
    in_turn: bool = False
    repeated: float = 1.0
    most: Mapping[str, int] = field(default_factory=dict)
    descriptors: tuple[Any, ...] = ()

    @property
    def grid_sizes(self) -> dict[str, sympy.Expr]:
        """The sizes that the grid is made of, by the names of their parameters."""
        # A program takes whole rows, so the grid has no axis for the reduced dimension.
        return {
            p.name: p.outer
            for p in self.parameters
            if _GRID_SIZE.fullmatch(p.name) and not isinstance(p.outer, str)
        }


def write_kernel(
    group: LoopGroup,
    pool: TermPool,
    buffers: Mapping[str, Buffer],
    removed: frozenset[str],
    reused: Mapping[str, str],
    size_hints: Mapping[sympy.Symbol, int],
    bounded: Bounded | None = None,
    *,
    asserted: bool = True,
    upcast: bool = True,
    held: bool | None = None,
    descriptors: bool = False,
    shared: bool = False,
) -> KernelText:
    """Return the kernel of a group of loops.

    Args:
        group: what to compute.
        pool: that the loops' terms are of.
        buffers: of the program.
        removed: buffers that nothing outside the group reads.
        reused: buffer that is written -> buffer whose memory it takes.
        size_hints: symbol of a size -> its value in the example.
        bounded: whether a size, whose example fits in 32 bits, may be counted on to do so in every
            call; None where none may.
        asserted: whether indices that are read are asserted to be in range.
        upcast: as `KernelShape` has it.
        held: whether rows are held whole; None for what their length suggests.
        descriptors: whether tensor descriptors address tiles, where no bit can tell.
        shared: whether programs share rows, as `shared_rows` chose it.
    """
    reduces = any(loop.has_rows for loop in group.loops)
    # Rows fix the dimensions of a reduction; a pointwise kernel may be cut as its addresses ask.
    dimensions = group.dimensions if reduces else tiled(group, size_hints)
    space = IterationSpace(dimensions)
    direction = _direction(group) if reduces else "DEFAULT"
    inner = direction == "INNER"
    columns = direction == "OUTER" and all(
        loop.is_reduction for loop in group.loops if loop.has_rows
    )
    rows_each = max(loop.rows_each for loop in group.loops)
    held = True if holds_rows(group) else False if shared else held
    persistent = reduces and (_is_short(space, direction) if held is None else held)
    bounds = bounds_of_narrow_indices(group, buffers, size_hints, bounded)
    wide = bounds is None
    atomic = any(loop.mode == "atomic_add" for loop in group.loops)
    shape = KernelShape(
        space,
        persistent,
        _constant_masks(space, persistent=persistent, atomic=atomic, rows_each=rows_each),
        wide,
        removed,
        asserted,
        upcast,
        rows_each=rows_each,
        descriptors=descriptors and not wide and orders_nothing(group.loops),
        shared=shared,
        columns=columns,
    )
    written = {loop.buffer for loop in group.loops}
    read = {name for loop in group.loops for name in loop.reads}
    # A buffer that held something before is one parameter, for reading and writing; results of this
    # kernel alone are passed as outputs, though later loops read them from registers.
    mutated = {
        n for n in written if (n in read and buffers[n].source != "node") or _is_added_to(group, n)
    }
    arguments = KernelArguments(buffers, mutated, reused)
    writer = BodyWriter(shape, pool, buffers, arguments)
    body = writer.write(group.loops)
    hints = {d.prefix: pow2_up(hint_of(d.numel, size_hints)) for d in space.dimensions}
    head = [line for dimension in space.dimensions for line in _header(dimension, shape, hints)]
    # Sizes have the width of the indices that they are multiplied with, so that nothing overflows.
    sizes = [p if wide else replace(p, type="i32") for p in arguments.sizes]
    numels = [numel_parameter(d.prefix, d.numel, wide=wide) for d in space.dimensions]
    workspaces = arguments.workspaces(numel([d.numel for d in space.kept]))
    buffers = {**buffers, **{name: Buffer(name, layout) for name, layout in workspaces.items()}}
    parameters = (
        *arguments.pointers,
        *arguments.numbers,
        *sizes,
        *arguments.exchanged,
        *numels,
    )
    examples = tuple(example_of(p, buffers, size_hints) for p in parameters)
    origins = frozenset().union(*(loop.origins for loop in group.loops))
    elements = hint_of(numel([d.numel for d in space.dimensions]), size_hints)
    return KernelText(
        kind="pointwise" if not reduces else "persistent_reduction" if persistent else "reduction",
        dimensions=tuple((d.prefix, d.numel) for d in space.dimensions),
        parameters=parameters,
        blocks=(
            *(block_name(d) for d in space.dimensions if not (d.is_reduced and persistent)),
            *(("RSPLIT_SIZE", "NUM_STAGES") if rows_each else ()),
            *((SHARES,) if shared else ()),
        ),
        body=(*head, *body),
        hints=hints,
        reduction_hint=direction,
        changed=arguments.changed,
        counts={
            "num_load": writer.num_load,
            "num_store": writer.num_store,
            "num_reduction": writer.num_reduction,
        },
        atomic=writer.atomic,
        elements=writer.elements,
        functions=writer.functions,
        origins=tuple(sorted(origins)),
        buffers=tuple(loop.buffer for loop in group.loops),
        bounds=bounds or (),
        asserts=writer.num_assert > 0,
        examples=examples,
        workspaces=workspaces,
        gigabytes=gigabytes(parameters, examples, group.loops, space, elements),
        facts={
            **(
                _mixed_facts(space, rows_each, writer.row_bytes)
                if rows_each
                else _facts(space, writer.repeated, inner=inner and not persistent)
            ),
            **({"column_tiles": True} if columns and not rows_each else {}),
            **({"one_element_per_thread": True} if origins & _SEARCHES and not reduces else {}),
            **({"tma_min_blocks": dict(writer.least_blocks)} if writer.least_blocks else {}),
            **({"row_products": True} if inner and any(p.of_product for p in group.loops) else {}),
        },
        repeated=writer.repeated,
        most={
            f"{d.prefix}numel": hints[d.prefix]
            for d in space.dimensions
            if persistent and d.is_reduced and not d.numel.is_Integer
        },
    )


def holds_rows(group: LoopGroup) -> bool:
    """Whether a program has to hold whole rows: it sorts them, or also reduces across them."""
    return any(loop.kind == SORT or loop.rows_each for loop in group.loops)


def has_descriptors(text: KernelText) -> bool:
    """Whether tensor descriptors address some of a kernel's tiles."""
    return "tma_min_blocks" in text.facts


def rows_change(group: LoopGroup) -> bool:
    """Whether a kernel goes through rows whose length changes from call to call."""
    return any(
        loop.has_rows and not loop.is_product and not numel(loop.reduced_sizes).is_Integer
        for loop in group.loops
    )


def is_worth_holding(text: KernelText) -> bool:
    """Whether a kernel that loops over rows of a changing length reads so much again that rows as
    long as the example's are to be held whole.
    """
    row = text.hints["r0_"]
    return text.repeated >= _WORTH_HOLDING and row <= _longest_held(text.reduction_hint)


def has_two_forms(text: KernelText) -> bool:
    """Whether a kernel could as well hold its rows whole as loop over them, so that a measurement
    may tell.
    """
    if text.kind in {"product", "attention"}:
        return False
    row = next((size for prefix, size in text.dimensions if prefix.startswith("r")), None)
    limit = _longest_held(text.reduction_hint) * _MEASURED_ROWS
    return row is not None and bool(row.is_Integer and row <= limit)


def _longest_held(direction: str) -> int:
    return _WHOLE_ROW_INNER if direction == "INNER" else _WHOLE_ROW_OUTER


def _is_added_to(group: LoopGroup, buffer: str) -> bool:
    """Whether a loop writes only some places of a buffer, or adds to it, so what it held before
    counts.
    """
    return any(loop.buffer == buffer and loop.mode is not None for loop in group.loops)


def hint_of(size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return what a size is in the example."""
    known = size.subs(dict(hints))
    return int(known) if known.is_Integer else _UNKNOWN_SIZE


def example_of(
    parameter: KernelParameter, buffers: Mapping[str, Buffer], hints: Mapping[sympy.Symbol, int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]] | int:
    """Return dtype, sizes and strides of a parameter in the example, or its number."""
    if not isinstance(parameter.outer, str):
        return hint_of(parameter.outer, hints)
    if not parameter.type.startswith("*"):
        return 1
    layout = buffers[parameter.outer].layout
    sizes, strides = (
        tuple(hint_of(part, hints) for part in parts) for parts in (layout.sizes, layout.strides)
    )
    return layout.dtype, sizes, strides


# ---------------------------------------------------------------------------------------- Decisions


def _is_short(space: IterationSpace, direction: str) -> bool:
    reduced = space.reduced
    assert reduced is not None
    # A row of any length has a block of its size only beside a kernel that loops over longer ones.
    return bool(reduced.numel.is_Integer and reduced.numel <= _longest_held(direction))


def _direction(group: LoopGroup) -> str:
    """Return how memory runs beside the rows of the reductions, as heuristics name it: along most
    of them, across all of them, or neither.
    """
    # One reduction along its rows decides: reading it across would be far slower than the reverse.
    # A reduction to one number counts as along.
    found = [runs_along(loop) for loop in group.loops if loop.has_rows]
    if any(found) or not any(loop.variables for loop in group.loops):
        return "INNER"
    return "OUTER" if found and all(along is False for along in found) else "DEFAULT"


def bounds_of_narrow_indices(
    group: LoopGroup,
    buffers: Mapping[str, Buffer],
    hints: Mapping[sympy.Symbol, int],
    bounded: Bounded | None,
    more: Sequence[sympy.Expr] = (),
) -> tuple[sympy.Expr, ...] | None:
    """Return the sizes that have to fit in 32 bits for the indices to have as many, those alone
    that may change; None where some index has 64.

    Args:
        group, buffers, hints, bounded: as `write_kernel` has them.
        more: sizes beside those of the group and of its buffers.
    """
    # The number of elements of the kernel, and the span of each buffer; then no index within them
    # overflows. Sizes themselves are passed as parameters of that width.
    sizes = {
        numel([size for _, size in group.dimensions]),
        *(buffers[name].layout.storage for name in group.touched),
        *more,
    }
    sizes |= frozenset().union(*(size.free_symbols for size in sizes))
    examples = {size: size.subs(dict(hints)) for size in sizes}
    if not all(example.is_Integer and example <= LARGEST_NARROW for example in examples.values()):
        return None
    changing = tuple(sorted((size for size in sizes if not size.is_Integer), key=str))
    return (
        changing if not changing or (bounded is not None and all(map(bounded, changing))) else None
    )


def _constant_masks(
    space: IterationSpace, *, persistent: bool, atomic: bool, rows_each: int
) -> frozenset[str]:
    """Return the dimensions whose mask is always true: every block is full, or its lanes all do the
    same.
    """
    found = set()
    for dimension in space.dimensions:
        size = dimension.numel
        if not size.is_Integer:
            continue
        if dimension.is_reduced and persistent:
            full = pow2_up(int(size)) == size and size >= _SHORT_ROW
        elif rows_each:
            # A program's rows are a multiple of any block.
            full = size % rows_each == 0
        elif size == 1:
            # Lanes that repeat a store write the same value; lanes that repeat a sum add it again.
            full = not atomic
        else:
            # Any block is a power of two up to this, so it divides the size.
            full = size % min(
                LARGEST_BLOCK[dimension.prefix], pow2_up(int(size))
            ) == 0 and not _overflows(dimension, space)
        if full:
            found.add(dimension.prefix)
    return frozenset(found)


def _overflows(dimension: Dimension, space: IterationSpace) -> bool:
    """Whether y may have more programs than the grid has along it, so that they go on along z."""
    if dimension.prefix != "y" or any(other.prefix == "z" for other in space.dimensions):
        return False
    return not (dimension.numel.is_Integer and dimension.numel <= _MOST_Y_PROGRAMS)


def _facts(space: IterationSpace, repeated: float, *, inner: bool) -> dict[str, Any]:
    """Return what heuristics are told beside counts."""
    reduced, (low, high) = space.reduced, _HELD_BY_A_BLOCK
    long = (
        inner
        and reduced is not None
        and bool(reduced.numel.is_Integer and low < reduced.numel <= high)
    )
    return {"add_persistent_rblock": True} if long and repeated >= _WORTH_HOLDING else {}


def _mixed_facts(space: IterationSpace, rows_each: int, row_bytes: int) -> dict[str, Any]:
    """Return what heuristics are told of a kernel that also reduces across rows.

    Args:
        space: of the kernel.
        rows_each: how many rows a program takes.
        row_bytes: what a program loads for each element of a row.
    """
    reduced = space.reduced
    assert reduced is not None
    row = pow2_up(int(reduced.numel))
    ahead = _MOST_STAGES * rows_at_once(rows_each, row) * row * row_bytes
    return {"rsplit_size": rows_each, "allow_multi_stages": ahead <= _SHARED_BYTES}


# -------------------------------------------------------------------------------------------- Lines


def _header(dimension: Dimension, shape: KernelShape, hints: Mapping[str, int]) -> Sequence[str]:
    """Return the lines that define numel, offset, index and mask of a dimension.

    Args:
        dimension: of the kernel.
        shape: of the kernel.
        hints: prefix -> power of two, the block of a row that is held whole.
    """
    prefix, size = dimension.prefix, dimension.numel
    lines = [f"{prefix}numel = {size}"] if size.is_Integer else []
    place = shape.space.dimensions.index(dimension)
    subscript = "".join(
        (
            "[",
            ", ".join(":" if n == place else "None" for n in range(len(shape.space.dimensions))),
            "]",
        )
    )
    # Each dimension's lanes lie along an axis of their own, and are broadcast along the others.
    lanes = f"tl.arange(0, {block_name(dimension)}){subscript}"
    lanes = f"{lanes}.to(tl.int64)" if shape.wide else lanes
    mask = (
        [] if prefix in shape.constant_masks else [f"{prefix}mask = {prefix}index < {prefix}numel"]
    )
    if dimension is shape.loop and not dimension.is_reduced:
        first = f"{_program(dimension, shape)} * RSPLIT_SIZE"
        return [
            *lines,
            f"{prefix}first = {first}",
            f"{prefix}end = tl.minimum({prefix}first + RSPLIT_SIZE, {prefix}numel)",
            f"{prefix}base = {lanes}",
        ]
    if not dimension.is_reduced:
        return [
            *lines,
            f"{prefix}offset = {_program(dimension, shape)} * {block_name(dimension)}",
            f"{prefix}index = {prefix}offset + {lanes}",
            *mask,
        ]
    # The loop over the row adds its offset to these lanes.
    if shape.shared:
        # A part is a whole number of blocks, so that no block has elements of two.
        block = block_name(dimension)
        share = f"{SHARE}.to(tl.int64)" if shape.wide else SHARE
        return [
            *lines,
            f"{prefix}share = tl.cdiv(tl.cdiv({prefix}numel, {SHARES}), {block}) * {block}",
            f"{prefix}first = {share} * {prefix}share",
            f"{prefix}end = tl.minimum({prefix}first + {prefix}share, {prefix}numel)",
            f"{prefix}base = {lanes}",
        ]
    if not shape.persistent:
        return [*lines, f"{prefix}base = {lanes}"]
    lines.append(f"{block_name(dimension)}: tl.constexpr = {hints[prefix]}")
    return [*lines, f"{prefix}index = {lanes}", *mask]


def _program(dimension: Dimension, shape: KernelShape) -> str:
    axis = _GRID_AXES[dimension.prefix] + shape.shared
    text = f"tl.program_id({axis})"
    if _overflows(dimension, shape.space):
        text = f"({text} + tl.program_id({axis + 1}) * tl.num_programs({axis}))"
    return f"{text}.to(tl.int64)" if shape.wide else text


def tiled(group: LoopGroup, hints: Mapping[sympy.Symbol, int]) -> _Dimensions:
    """Return the dimensions of a pointwise kernel that suit the addresses through which most
    elements go.

    Args:
        group: of the kernel.
        hints: symbol of a size -> its value in the example.
    """
    votes: dict[_Dimensions, int] = {}
    for loop in group.loops:
        for split, elements in _splits_of(loop, hints).items():
            votes[split] = votes.get(split, 0) + elements
    order = sorted(votes, key=lambda found: (-votes[found], str(found)))
    fitting = [split for split in order if _fits_all(group, split)]
    # Where another split fits beside the best one, three dimensions serve both.
    for split in fitting[1:]:
        together = _three_dimensions(fitting[0], split)
        if together is not None and _fits_all(group, together):
            return together
    return fitting[0] if fitting else group.dimensions


def _fits_all(group: LoopGroup, dimensions: _Dimensions) -> bool:
    space = IterationSpace(dimensions)
    return all(space.place(loop) is not None for loop in group.loops)


def _splits_of(loop: Loop, hints: Mapping[sympy.Symbol, int]) -> dict[_Dimensions, int]:
    """Return a split for each address that memory runs along in another than the last variable,
    behind that variable, and how many elements go through it.
    """
    found: dict[_Dimensions, int] = {}
    for index in {loop.index, *(index for root in loop.roots for _, index, _ in loads_of(root))}:
        for place, variable in enumerate(loop.variables[:-1]):
            if index.coeff(variable) != 1 or not any(
                index.has(later) for later in loop.variables[place + 1 :]
            ):
                # Either memory runs along another variable here, or no later variable moves the
                # address, and then it is read once for all of them.
                continue
            outer, inner = numel(loop.sizes[: place + 1]), numel(loop.sizes[place + 1 :])
            if _is_long(outer, _LEAST_LENGTH) and _is_long(inner, _LEAST_LENGTH):
                touched = numel(
                    [s for v, s in zip(loop.variables, loop.sizes, strict=True) if index.has(v)]
                )
                known = touched.subs(dict(hints))
                split = (("y", outer), ("x", inner))
                found[split] = found.get(split, 0) + (
                    int(known) if known.is_Integer else _UNKNOWN_SIZE
                )
    return found


def _three_dimensions(one: _Dimensions, other: _Dimensions) -> _Dimensions | None:
    """Return three dimensions that have the ends of both splits; None where one of them would be
    short.
    """
    # The ends of both splits cut the elements into three, if one is a multiple of the other.
    (_, near), (_, far) = sorted((one[0], other[0]), key=lambda found: str(found[1]))
    for first, second in ((near, far), (far, near)):
        middle = sympy.cancel(second / first)
        if middle.is_integer and middle.as_numer_denom()[1] == 1 and middle != 1:
            inner = (one if one[0][1] == second else other)[1][1]
            parts = (first, middle, inner)
            if all(_is_long(size, _LEAST_OF_THREE) for size in parts):
                return (("z", first), ("y", middle), ("x", inner))
    return None


def _is_long(size: sympy.Expr, least: int) -> bool:
    return not size.is_Integer or bool(size >= least)
