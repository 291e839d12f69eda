# SPDX-License-Identifier: Apache-2.0
"""The text of a product of matrices, as templates of lines: `head` and `sum_of_products`.

A program has a block of rows (y) and one of columns (x) of one matrix of the batch (z), and sums up
blocks of what both operands have in common (r0_). Blocks are numbered along one axis of the grid,
so that no size is too large for it, in groups of `GROUP` rows: programs that run side by side read
the same few rows and columns, which stay in the cache.

`product_kernel` fills them in.
"""

from __future__ import annotations

from collections.abc import Sequence

ACCUMULATOR = "accumulator"
#: Where a load is along what is summed up: of the left operand along its rows, of the right one
#: across its columns.
LEFT_LANES, RIGHT_LANES = "r0_row", "r0_column"
_HEAD = """\
yblocks = tl.cdiv(ynumel, YBLOCK)
xblocks = tl.cdiv(xnumel, XBLOCK)
program = tl.program_id(0)
{batch}\
yblock, xblock = tl.swizzle2d(program // xblocks, program % xblocks, yblocks, xblocks, GROUP)
yindex = yblock{wide} * YBLOCK + tl.arange(0, YBLOCK)[:, None]
xindex = xblock{wide} * XBLOCK + tl.arange(0, XBLOCK)[None, :]
"""
_BATCH = """\
zindex = tl.full([1, 1], program // (yblocks * xblocks), {index})
program = program % (yblocks * xblocks)
"""
_SUM = """\
accumulator = tl.zeros([YBLOCK, XBLOCK], tl.float32)
for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
    r0_index = r0_offset + tl.arange(0, R0_BLOCK){wide}
    r0_row, r0_column = r0_index[None, :], r0_index[:, None]
{computed}\
    left = {left}
    right = {right}
    accumulator = tl.dot(left, right, accumulator{precision})
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


def head(masked: Sequence[str], *, batched: bool, wide: bool) -> list[str]:
    """Return the lines that say which block a program has.

    Args:
        masked: prefixes of the dimensions, of x and y, that some block goes beyond.
        batched: whether there are several matrices.
        wide: whether indices have 64 bits.
    """
    index, cast = ("tl.int64", ".to(tl.int64)") if wide else ("tl.int32", "")
    batch = _BATCH.format(index=index) if batched else ""
    lines = _HEAD.format(batch=batch, wide=cast).splitlines()
    return [*lines, *(f"{prefix}mask = {prefix}index < {prefix}numel" for prefix in masked)]


def sum_of_products(
    operands: tuple[str, str], computed: Sequence[str], precision: str, *, wide: bool
) -> list[str]:
    """Return the lines that compute a block of the product as `ACCUMULATOR`.

    Args:
        operands: texts of a block of each.
        computed: lines in front of them.
        precision: `ieee` or `tf32` of float32, `exact` or `fast` of 8-bit floats, else empty.
        wide: whether indices have 64 bits.
    """
    filled = _SUM.format(
        computed="".join(f"    {line}\n" for line in computed),
        left=operands[0],
        right=operands[1],
        precision=_PRECISIONS[precision],
        wide=".to(tl.int64)" if wide else "",
    )
    return filled.splitlines()
