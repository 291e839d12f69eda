# SPDX-License-Identifier: Apache-2.0
"""`TileDescriptors`: tensor descriptors as the addressing mode of loads and stores, which addresses
they reach, and their text.

A kernel makes a descriptor of a pointer, sizes and strides, so a launch passes what it passes
without.  On NVIDIA's GPUs from compute capability 9.0 on, the engine for bulk copies (TMA) moves
such a tile, and the descriptor takes 128 bytes of a program's scratch memory; for other GPUs Triton
makes pointers and masks of it.

Lanes beyond the sizes read zero, as they do in a masked load, and store nothing.  But Triton lays
the lanes of such a tile over a program's threads in another way, so what depends on the order in
which lanes are combined would have other bits: `orders_nothing` says which kernels may have
descriptors.

`kernel_plan` asks whether a kernel may, `kernel_body` writes the loads and stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import sympy

from bundler.codegen.kernels.kernel_shape import KernelShape, block_name
from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.loop_nodes import Buffer, Loop
from bundler.codegen.loops.range_trees import Dimension
from bundler.runtime.program.device_tensors import item_bytes

# What the engine asks of addresses, of strides, and of the innermost side of a tile.
_BYTES = 16
# Fewer axes are one run of memory, which pointers read as well.
_LEAST_AXES = 2
# Equal in any order, whatever the numbers are.
_IN_ANY_ORDER = frozenset({"pointwise", "max", "min", "any", "xor_sum", "argmax", "argmin"})
# Equal in any order where numbers are integers, which wrap around.
_OF_INTEGERS = frozenset({"sum", "prod"})


def orders_nothing(loops: Iterable[Loop]) -> bool:
    """Whether the results of a kernel are the same bits, in whatever order it combines lanes."""
    return all(
        not loop.rows_each
        and loop.mode is None
        and (
            loop.kind in _IN_ANY_ORDER
            or (
                loop.kind in _OF_INTEGERS
                and data_type(loop.value.dtype).kind not in {NumberKind.FLOAT, NumberKind.FLOAT8}
            )
        )
        for loop in loops
    )


@dataclass(frozen=True)
class Tile:
    """What of a buffer the blocks of a kernel cover, as a descriptor has it.

    Attributes:
        offset: elements in front of it.
        axes: (stride, dimension), the largest stride first; the last one is 1.
        least: the smallest block along the last axis.
    """

    offset: int
    axes: tuple[tuple[int, Dimension], ...]
    least: int

    @property
    def dimensions(self) -> list[Dimension]:
        """The dimensions, in the order of memory."""
        return [dimension for _, dimension in self.axes]


class TileDescriptors:
    """The descriptors of one kernel.

    Attributes:
        least_blocks: block parameter -> the least size that they need.
    """

    def __init__(self, shape: KernelShape, buffers: Mapping[str, Buffer]) -> None:
        self._shape, self._buffers = shape, buffers
        self.least_blocks: dict[str, int] = {}
        self._names: dict[tuple[str, Tile], str] = {}

    def tile(self, buffer: str, index: sympy.Expr) -> Tile | None:
        """Return the tile at an address of a buffer; None where a descriptor does not reach it, or
        the kernel has none.
        """
        found, size = self._buffers[buffer], item_bytes(self._buffers[buffer].layout.dtype)
        # A bool has one bit for Triton.
        if not self._shape.descriptors or not found.aligned or found.layout.dtype == "bool":
            return None
        offset, moved = sympy.expand(index).as_coeff_Add()
        axes = self._axes(moved)
        if axes is None or len(axes) < _LEAST_AXES:
            return None
        *outer, (inner_stride, inner) = axes
        places = [offset, *(stride for stride, _ in outer)]
        if (
            inner_stride != 1
            or not all(p.is_Integer and p >= 0 and p * size % _BYTES == 0 for p in places)
            or not _nested(axes)
            or inner.numel * size < _BYTES
        ):
            return None
        return Tile(int(offset), tuple((int(stride), d) for stride, d in axes), _BYTES // size)

    def _axes(self, moved: sympy.Expr) -> list[tuple[sympy.Integer, Dimension]] | None:
        """Return the strides of an address along dimensions, the largest first; None where it is no
        sum of whole dimensions times numbers above zero.
        """
        found = []
        for symbol in moved.free_symbols:
            at, stride = self._shape.space.part_of(symbol), moved.coeff(symbol)
            if at is None or not stride.is_Integer or stride <= 0:
                return None
            dimension, part = at
            if part.divisor != 1 or sympy.expand(part.length - dimension.numel) != 0:
                return None
            found.append((stride, dimension, symbol))
        if sympy.expand(moved - sum(stride * symbol for stride, _, symbol in found)) != 0:
            return None
        found.sort(key=lambda axis: (-axis[0], axis[1].prefix))
        return [(stride, dimension) for stride, dimension, _ in found]

    def load(self, pointer: str, tile: Tile, lines: list[str]) -> str:
        """Return the text of a load, with an axis for each dimension of the kernel; what it needs
        in front is written at the end of `lines`.
        """
        text = f"{self._name(pointer, tile, lines)}.load({self._offsets(tile)})"
        memory, block = tile.dimensions, self._in_block(tile)
        if memory != block:
            text = f"tl.permute({text}, {[memory.index(d) for d in block]})"
        if len(block) < len(self._shape.space.dimensions):
            text = f"tl.reshape({text}, {self._shape.shape_of(block)})"
        return text

    def store(self, pointer: str, tile: Tile, value: str, lines: list[str]) -> str:
        """Return the line of a store of a value, which may be smaller than a block; as `load`."""
        memory, block = tile.dimensions, self._in_block(tile)
        text = f"tl.broadcast_to({value}, {self._shape.shape_of(block)})"
        if len(block) < len(self._shape.space.dimensions):
            text = f"tl.reshape({text}, {_blocks(block)})"
        if memory != block:
            text = f"tl.permute({text}, {[block.index(d) for d in memory]})"
        return f"{self._name(pointer, tile, lines)}.store({self._offsets(tile)}, {text})"

    def _in_block(self, tile: Tile) -> list[Dimension]:
        return [d for d in self._shape.space.dimensions if d in tile.dimensions]

    def _name(self, pointer: str, tile: Tile, lines: list[str]) -> str:
        """Return the variable of a descriptor, which is made once."""
        found = self._names.get((pointer, tile))
        if found is None:
            found = self._names[pointer, tile] = f"desc{len(self._names)}"
            inner = block_name(tile.dimensions[-1])
            self.least_blocks[inner] = max(tile.least, self.least_blocks.get(inner, 1))
            base = f"{pointer} + {tile.offset}" if tile.offset else pointer
            sizes = ", ".join(f"{d.prefix}numel" for d in tile.dimensions)
            strides = [stride for stride, _ in tile.axes]
            lines.append(
                f"{found} = tl.make_tensor_descriptor({base}, [{sizes}], {strides},"
                f" {_blocks(tile.dimensions)})"
            )
        return found

    def _offsets(self, tile: Tile) -> str:
        # A row that is held whole begins at its first element.
        return (
            "["
            + ", ".join(
                "0" if d.is_reduced and self._shape.persistent else f"{d.prefix}offset"
                for d in tile.dimensions
            )
            + "]"
        )


def _blocks(dimensions: Iterable[Dimension]) -> str:
    return f"[{', '.join(map(block_name, dimensions))}]"


def _nested(axes: list[tuple[sympy.Integer, Dimension]]) -> bool:
    """Whether each stride is a multiple of the next, and goes beyond all that lies along it."""
    return all(
        stride % inner_stride == 0
        and inner.numel.is_Integer
        and stride >= inner_stride * inner.numel
        for (stride, _), (inner_stride, inner) in pairwise(axes)
    )
