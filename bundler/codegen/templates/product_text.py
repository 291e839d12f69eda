# SPDX-License-Identifier: Apache-2.0
"""The text of a product of matrices, as templates of lines: `head` and `sum_of_products`.

A program has a block of rows (y) and one of columns (x) of one matrix of the batch (z), and sums up
blocks of what both operands have in common (r0_). Blocks are numbered along one axis of the grid,
so that no size is too large for it, in groups of `GROUP` rows: programs that run side by side read
the same few rows and columns, which stay in the cache.

Where tensor descriptors reach both operands, a kernel has a second form, which `PROGRAMS` chooses:
so many programs take block after block, and the engine for bulk copies (TMA) brings the operands of
the next one while a program computes of the last one what follows the sum. 0 stands for the first
form, a program for each block, with pointers. The host makes the descriptors where all that they
say is known beforehand: a launch passes them in the place of the pointers, and each saves a program
most of a microsecond.

`product_kernel` fills them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bundler.format.host_descriptors import HostDescriptor

ACCUMULATOR = "accumulator"
#: Where a load is along what is summed up: of the left operand along its rows, of the right one
#: across its columns.
LEFT_LANES, RIGHT_LANES = "r0_row", "r0_column"
_COUNTS = """\
yblocks = tl.cdiv(ynumel, YBLOCK)
xblocks = tl.cdiv(xnumel, XBLOCK)
"""
_TURNS = """\
if PROGRAMS:
    desc0 = {left}
    desc1 = {right}
turns = tl.cdiv({batches}yblocks * xblocks - tl.program_id(0), PROGRAMS) if PROGRAMS else 1
for turn in tl.range(0, turns, flatten=True):
"""
_ONE, _TURN = "program = tl.program_id(0)", "program = tl.program_id(0) + turn * PROGRAMS"
_HEAD = """\
{program}
{batch}\
yblock, xblock = tl.swizzle2d(program // xblocks, program % xblocks, yblocks, xblocks, GROUP)
yindex = yblock{wide} * YBLOCK + tl.arange(0, YBLOCK)[:, None]
xindex = xblock{wide} * XBLOCK + tl.arange(0, XBLOCK)[None, :]
"""
_BATCH = """\
zindex = tl.full([1, 1], program // (yblocks * xblocks), {index})
program = program % (yblocks * xblocks)
"""
#: The line that says which of several products a program works for.
MEMBER = "member = program // (yblocks * xblocks)"
_MEMBERS = f"{MEMBER}\nprogram = program % (yblocks * xblocks)\n"
_SUM = """\
accumulator = tl.zeros([YBLOCK, XBLOCK], tl.float32)
for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
    r0_index = r0_offset + tl.arange(0, R0_BLOCK){wide}
    r0_row, r0_column = r0_index[None, :], r0_index[:, None]
{computed}\
{operands}\
    accumulator = tl.dot(left, right, accumulator{precision})
"""
_OPERANDS = """\
    left = {left}
    right = {right}
"""
_TILES = """\
    if PROGRAMS:
        left = {left_tile}
        right = {right_tile}
    else:
        left = {left}
        right = {right}
"""
# What `tl.dot` is told of float32, which is tf32 where the device has that, else float32; and of
# 8-bit floats, whose sums Hopper's matrix units keep in fewer bits than float32 has: a block's sum
# alone, as cuBLAS does, or that of all blocks.
_PRECISIONS = {
    "": "",
    "ieee": ", input_precision='ieee'",
    "tf32": ", allow_tf32=True",
    "exact": ", max_num_imprecise_acc=R0_BLOCK",
    "fast": "",
}


class TiledOperand(NamedTuple):
    """An operand as a descriptor reaches it.

    Attributes:
        descriptor: text of it.
        load: text that loads a block by it, with a place for its name.
        by_host: what the host makes it of, where it does.
    """

    descriptor: str
    load: str
    by_host: HostDescriptor | None = None


def head(
    masked: Sequence[str], *, batched: bool, wide: bool, turns: bool, siblings: bool = False
) -> list[str]:
    """Return the lines that say which block a program has, or has in a turn.

    Args:
        masked: prefixes of the dimensions, of x and y, that some block goes beyond.
        batched: whether there are several matrices.
        wide: whether indices have 64 bits.
        turns: whether a program may have one block after the other.
        siblings: whether there are several products, each of one matrix.
    """
    index, cast = ("tl.int64", ".to(tl.int64)") if wide else ("tl.int32", "")
    batch = _BATCH.format(index=index) if batched else _MEMBERS if siblings else ""
    if batched and turns:
        batch = f"zblock = program // (yblocks * xblocks)\n{batch}"
    lines = _HEAD.format(program=_TURN if turns else _ONE, batch=batch, wide=cast).splitlines()
    return [*lines, *(f"{prefix}mask = {prefix}index < {prefix}numel" for prefix in masked)]


def whole_body(
    head: Sequence[str], body: Sequence[str], tiles: Sequence[TiledOperand], *, batched: bool
) -> list[str]:
    """Return the lines of a kernel, behind its sizes.

    Args:
        head: of a block.
        body: what is computed of it.
        tiles: of both operands; none where descriptors do not reach them.
        batched: whether there are several matrices.
    """
    counts = _COUNTS.splitlines()
    if not tiles:
        return [*counts, *head, *body]
    left, right = (tile.descriptor for tile in tiles)
    batches = "znumel * " if batched else ""
    turns = _TURNS.format(left=left, right=right, batches=batches).splitlines()
    return [*counts, *turns, *(f"    {line}" for line in (*head, *body))]


def sum_of_products(
    operands: tuple[str, str],
    computed: Sequence[str],
    precision: str,
    tiles: Sequence[TiledOperand],
    *,
    wide: bool,
) -> list[str]:
    """Return the lines that compute a block of the product as `ACCUMULATOR`.

    Args:
        operands: texts of a block of each.
        computed: lines in front of them.
        precision: `ieee` or `tf32` of float32, `exact` or `fast` of 8-bit floats, else empty.
        tiles: as `whole_body` has them.
        wide: whether indices have 64 bits.
    """
    texts = {"left": operands[0], "right": operands[1]}
    if tiles:
        names = ("left_tile", tiles[0]), ("right_tile", tiles[1])
        texts |= {name: tile.load.format(f"desc{n}") for n, (name, tile) in enumerate(names)}
    filled = _SUM.format(
        computed="".join(f"    {line}\n" for line in computed),
        operands=(_TILES if tiles else _OPERANDS).format(**texts),
        precision=_PRECISIONS[precision],
        wide=".to(tl.int64)" if wide else "",
    )
    return filled.splitlines()
