# SPDX-License-Identifier: Apache-2.0
"""The text of attention, as templates of lines: `head` and `weighted_sum`.

A program has a block of queries (y) of one head of the batch (z), and all columns of the result
(x). It runs through blocks of keys (r0_), and keeps of each row the largest score so far, the sum
of the powers relative to it, and the sum of values by these weights (online softmax: Milakov and
Gimelshein 2018, Dao et al. 2022). Scores, products of queries and keys along r1_, are powers of 2,
not of e, which costs one factor. What is masked is told in blocks of keys of its own, so that most
blocks compare nothing.

Where keys are split, so many programs have a part of them each, and another kernel adds up what
they found; `attention_kernel` fills the lines in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

ACCUMULATOR = "accumulator"
#: The logarithm, to the base 2, of each row's sum of powers.
ROW_LOGARITHM = "top + tl.log2(total)"
#: Where a load is along queries' and keys' elements, and along keys: across its columns, its rows.
HEAD_ROW, HEAD_COLUMN, KEY_ROW, KEY_COLUMN = "r1_row", "r1_column", "r0_row", "r0_column"
#: log2(e): what makes powers of 2 of those of e.
LOG2_E = 1.4426950408889634
_HEAD = """\
yblocks = tl.cdiv(ynumel, YBLOCK)
program = tl.program_id(0)
{blocks}\
zindex = tl.full([1, 1], zblock, {index})
yindex = yblock{wide} * YBLOCK + tl.arange(0, YBLOCK)[:, None]
xindex = tl.arange(0, XBLOCK)[None, :]{wide}
r1_index = tl.arange(0, {length}){wide}
r1_row, r1_column = r1_index[None, :], r1_index[:, None]
"""
_IN_TURN = """\
zblock = program // yblocks
yblock = program % yblocks
"""
# Of 16 heads at once, whose keys the cache holds: so the last programs are short ones.
_LONGEST_FIRST = """\
zblock, yblock = program // yblocks, program % yblocks
zblock, yblock = tl.swizzle2d(zblock, yblock, znumel, yblocks, 16)
yblock = yblocks - 1 - yblock
"""
_BEGIN = """\
query = {query}
top = tl.full([YBLOCK, 1], float('-inf'), tl.float32)
total = tl.zeros([YBLOCK, 1], tl.float32)
accumulator = tl.zeros([YBLOCK, XBLOCK], tl.float32)
"""
_ALL_KEYS = "first, last = 0, r0_numel\n"
_PART_OF_KEYS = """\
part = tl.cdiv(tl.cdiv(r0_numel, {splits}), R0_BLOCK) * R0_BLOCK
first = tl.minimum(zblock % {splits} * part, r0_numel)
last = tl.minimum(first + part, r0_numel)
"""
# No row of the block sees a key behind its own number.
_CAUSAL = """\
first = 0
whole = tl.minimum(yblock * YBLOCK + 1, r0_numel) // R0_BLOCK * R0_BLOCK
last = tl.minimum((yblock + 1) * YBLOCK, r0_numel)
"""
_WHOLE = "whole = first + (last - first) // R0_BLOCK * R0_BLOCK\n"
_BLOCKS = """\
for r0_offset in tl.range({first}, {last}, R0_BLOCK):
    r0_index = r0_offset + tl.arange(0, R0_BLOCK){wide}
    r0_row, r0_column = r0_index[None, :], r0_index[:, None]
    keys = {keys}
    scores = tl.dot(query, keys{precision})
{masked}\
    above = tl.maximum(top, tl.max(scores, 1)[:, None]{scale})
    base = tl.where(above == float('-inf'), 0.0, above)
    weights = tl.exp2(scores{scale} - base)
    factor = tl.exp2(top - base)
    total = total * factor + tl.sum(weights, 1)[:, None]
    values = {values}
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * factor{precision})
    top = above
"""
# A row that sees no key is 0, as torch has it.
_END = "accumulator = accumulator / tl.where(total == 0.0, 1.0, total)\n"
# How a block of a head is called in the text, and the names of what lies behind it.
_COLUMNS, _REST, _SCORES = "XBLOCK", "_rest", "scores = tl.dot("
_WORD = re.compile(r"\b[a-z]\w*\b")
# The least of float32 that keeps its digits.
_LEAST_SCALE = 2.0**-126
# What `tl.dot` is told of float32; it is tf32 where the device has that, else float32.
_PRECISIONS = {"": "", "ieee": ", input_precision='ieee'", "tf32": ", allow_tf32=True"}


class Blocks(NamedTuple):
    """Texts of the loads of a block of keys, of values and of a mask, which is empty where there
    is none.
    """

    keys: str
    values: str
    mask: str = ""


class Attention(NamedTuple):
    """What decides the lines of a kernel.

    Attributes:
        query: text of the load of its block.
        full: loads of a block that all keys of it have.
        last: of one that goes beyond the last key; None where no block does.
        mask: `bool` of masks of what is seen, `float` of what is added to scores, else empty.
        causal: whether a row sees no key behind its own number.
        scale: of the scores, powers of 2.
        precision: `ieee` or `tf32` of float32, else empty.
        splits: how many programs share the keys of a row.
        wide: whether indices have 64 bits.
    """

    query: str
    full: Blocks
    last: Blocks | None
    mask: str
    causal: bool
    scale: float
    precision: str
    splits: int
    wide: bool


def head(length: int | str, masks: list[str], *, causal: bool, wide: bool) -> list[str]:
    """Return the lines that say which block a program has.

    Args:
        length: of the block that holds the elements of a query.
        masks: prefixes of the dimensions, of x and y, that some block goes beyond.
        causal: have the blocks with most keys come first, of some heads, so that none is left for
            the end.
        wide: whether indices have 64 bits.
    """
    index, cast = ("tl.int64", ".to(tl.int64)") if wide else ("tl.int32", "")
    blocks = _LONGEST_FIRST if causal else _IN_TURN
    lines = _HEAD.format(index=index, blocks=blocks, wide=cast, length=length).splitlines()
    return [*lines, *(f"{prefix}mask = {prefix}index < {prefix}numel" for prefix in masks)]


def in_two_parts(lines: Sequence[str], whole: int, rest: int) -> list[str]:
    """Return the lines of a kernel for heads of `whole` and `rest` elements, powers of two, of whose
    sum a power of two would be much larger.

    What differs along a head, from `XBLOCK` on, is there twice, the second time under other names.
    Only scores are the sum of both.
    """
    found: list[str] = []
    names: set[str] = set()
    for line in lines:
        other = _WORD.sub(lambda word: f"{word[0]}{_REST}" if word[0] in names else word[0], line)
        found.append(line.replace(_COLUMNS, str(whole)))
        if other == line and _COLUMNS not in line:
            continue
        if line.lstrip().startswith(_SCORES):
            other = f"{other.removesuffix(')')}, scores)"
        elif " = " in line:
            assigned = line.partition(" = ")[0]
            names.update(_WORD.findall(assigned))
            told = _WORD.sub(lambda word: f"{word[0].removesuffix(_REST)}{_REST}", assigned)
            other = told + other[other.index(" = ") :]
        other = other.replace(f"tl.arange(0, {_COLUMNS})", f"({whole} + tl.arange(0, {rest}))")
        found.append(other.replace(_COLUMNS, str(rest)))
    return found


def weighted_sum(given: Attention) -> list[str]:
    """Return the lines that compute a block of the result as `ACCUMULATOR`."""
    text = _BEGIN.format(query=given.query)
    if given.causal:
        text += _CAUSAL
    else:
        text += _PART_OF_KEYS.format(splits=given.splits) if given.splits > 1 else _ALL_KEYS
        text += _WHOLE if given.last is not None else ""
    if given.causal or given.last is not None:
        text += _blocks(given, given.full, "first", "whole", "")
        text += _blocks(given, given.last or given.full, "whole", "last", _seen(given))
    else:
        text += _blocks(given, given.full, "first", "last", "")
    return (text + _END).splitlines()


def _seen(given: Attention) -> str:
    """Return the text of which keys a row sees in a block that not all of them are seen of."""
    conditions = ["(r0_row < r0_numel)"] if given.last is not None else []
    conditions += ["(r0_row <= yindex)"] if given.causal else []
    return " & ".join(conditions)


def _blocks(given: Attention, loads: Blocks, first: str, last: str, seen: str) -> str:
    # A positive scale keeps their order, and is one operation with the difference to the largest.
    late = not given.mask and given.scale >= _LEAST_SCALE
    scale = f" * {given.scale!r}"
    masked = "" if late else f"    scores = scores{scale}\n"
    masked += {
        "": "",
        # Added, as torch does, so that what is no number stays none.
        "bool": f"    scores += tl.where({loads.mask}, 0.0, float('-inf'))\n",
        "float": f"    scores += {loads.mask} * {LOG2_E!r}\n",
    }[given.mask]
    if seen:
        masked += f"    scores = tl.where({seen}, scores, float('-inf'))\n"
    return _BLOCKS.format(
        first=first,
        last=last,
        keys=loads.keys,
        values=loads.values,
        masked=masked,
        scale=scale if late else "",
        precision=_PRECISIONS[given.precision],
        wide=".to(tl.int64)" if given.wide else "",
    )
