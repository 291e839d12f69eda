# SPDX-License-Identifier: Apache-2.0
"""`with_siblings` and `write_siblings`: products that are alike but for their tensors, such as the
query, key and value of a layer, are one launch, where each alone is too small for a large GPU.

The kernel is that of one of them with as many matrices as there are products. In place of where a
matrix lies in memory, a program's number says which tensors it takes::

    program = tl.program_id(0)
    member = program // (yblocks * xblocks)
    program = program % (yblocks * xblocks)
    of_in_ptr1 = in_ptr1
    of_in_ptr1 = tl.where(member == 1, in_ptr3, of_in_ptr1)

A pointer that is chosen so keeps what is known of its alignment. `schedule` calls both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import sympy

from bundler.codegen.kernels.combination_text import (
    SharedParameters,
    lines_that_choose,
    renamed,
)
from bundler.codegen.kernels.kernel_plan import Bounded, KernelText
from bundler.codegen.kernels.memory_traffic import gigabytes
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer
from bundler.codegen.loops.loop_terms import PRODUCT, TermPool
from bundler.codegen.loops.range_trees import IterationSpace
from bundler.codegen.templates.product_kernel import write_product
from bundler.codegen.templates.product_text import MEMBER
from bundler.runtime.heuristics.block_limits import ceil_div

# The text is for any device, so it counts on one large one, and on tiles of a usual size. What has
# more of them than two rounds loses no more by its last one than a launch takes.
_MULTIPROCESSORS, _TILE, _ROUNDS = 132, 128, 2
# Each has tensors of its own, which every program chooses from.
_MOST = 8


def with_siblings(
    groups: Sequence[LoopGroup], are_alike: Callable[[LoopGroup, LoopGroup], bool]
) -> list[LoopGroup]:
    """Return the groups with those that share a launch as one that has them as parts.

    Only neighbours do, so that no result waits in memory for another one.

    Args:
        groups: in an order in which they can run.
        are_alike: whether two small products have one text.
    """
    runs: list[list[LoopGroup]] = []
    for group in groups:
        run = runs[-1] if runs else []
        if (
            0 < len(run) < _MOST
            and all(_is_small(one) for one in (run[0], group))
            and run[0].dimensions == group.dimensions
            and not any(_waits(one, group) for one in run)
            and are_alike(run[0], group)
        ):
            run.append(group)
        else:
            runs.append([group])
    return [run[0] if len(run) == 1 else _together(run) for run in runs]


def _is_small(group: LoopGroup) -> bool:
    """Whether a kernel is a product of two matrices of known sizes in few tiles."""
    product = group.product
    if group.parts or product is None or product.kind != PRODUCT or len(product.sizes) != len("yx"):
        return False
    if not all(size.is_Integer for size in (*product.sizes, *product.reduced_sizes)):
        return False
    tiles = prod(ceil_div(int(size), _TILE) for size in product.sizes)
    return tiles < _ROUNDS * _MULTIPROCESSORS and all(loop.mode is None for loop in group.loops)


def _waits(first: LoopGroup, group: LoopGroup) -> bool:
    """Whether a group must not run beside one in front of it."""
    return bool(group.touched & first.written or first.touched & group.written)


def _together(run: Sequence[LoopGroup]) -> LoopGroup:
    return LoopGroup(tuple(node for group in run for node in group.nodes), (), tuple(run))


def write_siblings(
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
) -> KernelText:
    """Return the kernel of a group whose parts are alike; arguments as `write_product`'s."""
    texts = [
        write_product(
            part,
            pool,
            buffers,
            removed,
            reused,
            size_hints,
            bounded,
            asserted=asserted,
            upcast=upcast,
            siblings=len(group.parts),
        )
        for part in group.parts
    ]
    first, shared, counts = texts[0], SharedParameters(), Counter[str]()
    for text in texts:
        counts.update(text.counts)
    lines, names = lines_that_choose([shared.names(text) for text in texts])
    place = first.body.index(MEMBER) + 1
    sizes = [
        (parameter, example)
        for parameter, example in zip(first.parameters, first.examples, strict=True)
        if parameter.name.endswith("numel")
    ]
    given = [*shared.ordered, *sizes]
    parameters, examples = tuple(one for one, _ in given), tuple(one for _, one in given)
    return replace(
        first,
        parameters=parameters,
        examples=examples,
        body=(
            *first.body[:place],
            *lines,
            *(renamed(line, names) for line in first.body[place:]),
        ),
        changed=tuple(p.name for p in parameters if p.name.startswith("in_out")),
        counts=dict(counts),
        origins=tuple(sorted(frozenset().union(*(text.origins for text in texts)))),
        buffers=tuple(name for text in texts for name in text.buffers),
        gigabytes=gigabytes(
            parameters,
            examples,
            group.loops,
            IterationSpace(group.parts[0].dimensions),
            prod(first.hints.values()),
        ),
    )
