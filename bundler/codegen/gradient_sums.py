# SPDX-License-Identifier: Apache-2.0
"""`running_sums`: which products of matrices are added, by the operator that makes them, to the sum
of those before.  Imports torch.

Layers that share a weight, as all of ALBERT's do, have a gradient each, which backward adds up.  A
kernel that adds many reads each once, but all of them have to be there by then: twelve times a
weight, where two would do.  `addmm` adds a product to what is there already, as TorchInductor has
it do (`add` of a product in torch/_inductor/fx_passes/post_grad.py).  `lower` asks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

aten = torch.ops.aten
_TURNS = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
# Fewer are there at a time anyway, or take so little memory that a launch less counts for more.
_LEAST_PRODUCTS, _LEAST_BYTES = 4, 4 << 20


class RunningSum(NamedTuple):
    """A sum of two, one of which is a product that only this sum reads.

    Attributes:
        product: the node that multiplies.
        shown: the product as the sum reads it, maybe turned.
        before: what it is added to, which is there before the product.
        turned: whether rows of the product are columns of the sum.
    """

    product: fx.Node
    shown: fx.Node
    before: fx.Node
    turned: bool


def running_sums(
    module: fx.GraphModule, apart: Collection[fx.Node] = ()
) -> dict[fx.Node, RunningSum]:
    """Return sums of many large products by their nodes; products of `apart` are none of them."""
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    found: dict[fx.Node, RunningSum] = {}
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        sums = [one for one in _readings(node) if one.product not in apart]
        fits = [one for one in sums if place[one.before] < place[one.product]]
        if fits:
            found[node] = fits[0]
            # A sum that goes on is part of what was counted so far.
            chains[node] = [*chains.pop(fits[0].before, []), node]
    many = {
        node for chain in chains.values() if len(chain) + 1 >= _LEAST_PRODUCTS for node in chain
    }
    return {node: one for node, one in found.items() if node in many}


def _readings(node: fx.Node) -> list[RunningSum]:
    """Return a sum's two terms as a product and what it is added to, in each order that is so."""
    if node.kwargs or not all(
        isinstance(term, fx.Node) and _is_alike(term, node) for term in node.args
    ):
        return []
    first, last = node.args
    pairs = ((last, first), (first, last))
    return [
        RunningSum(made[0], shown, before, made[1])
        for shown, before in pairs
        if shown is not before and len(before.users) == 1 and (made := _product(shown))
    ]


def _is_alike(term: fx.Node, node: fx.Node) -> bool:
    """Whether a term is a large matrix of a sum's own sizes, dtype and device."""
    one, other = term.meta.get("val"), node.meta["val"]
    if not isinstance(one, torch.Tensor) or not one.dtype.is_floating_point:
        return False
    same = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    count = one.numel()
    return same and isinstance(count, int) and count * one.itemsize >= _LEAST_BYTES


def _product(shown: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return the product that a node shows, and whether it is turned, where nothing else reads
    it; backward turns the gradient of a turned weight twice.
    """
    product, turned = shown, False
    while len(product.users) == 1 and product.target in _TURNS:
        if product.args[1:] != _TURNS[product.target]:
            return None
        product, turned = product.args[0], not turned
    is_read_once = len(product.users) == 1 and product.target is aten.mm.default
    return (product, turned) if is_read_once else None
