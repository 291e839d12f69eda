# SPDX-License-Identifier: Apache-2.0
"""`in_channels_last`: which nodes of a graph lie in channels last, because its convolutions run
faster so.  Imports torch.

Whether they do is decided for a graph as a whole, by the rules that TorchInductor measured
(`decide_layout_opt` in torch/_inductor/graph.py). `lower` asks, and sees to it that whatever leaves
the graph, and every operator but the convolutions, still has the strides that torch traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
#: Key of a graph's `meta`: of a forward graph, how many results the caller sees; those behind them
#: are for backward, which is told their strides.
CALLERS_RESULTS = "callers_results"
#: Key of an input's `meta`: its strides, where they are others than torch traced.
STORED_STRIDES = "stored_strides"
#: Key of an input's `meta`: nobody has the input any more when the graph read it.
FREED = "freed"
#: Key of an input's `meta`, beside `FREED`: the program may write over it.
DONATED = "donated"
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
# Gains and losses of time in inference by the kind of convolution, and how many nodes a graph may
# have for each one: all Inductor's.
_GROUPED, _SMALL, _NARROWING, _OTHER = 1.358, 0.783, 0.725, 0.823
_MOST_NODES = 300
_SMALL_CHANNELS = 64
# Views that keep the order of dimensions; any other one ends what lies in channels last.
_ORDERED_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)
_RANK = 4
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def in_channels_last(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes whose four-dimensional results lie in channels last; none where a graph's
    convolutions are better left as they are.

    These are the convolutions, and what is computed before and behind them element by element, in
    windows, or along channels, up to a view that has the dimensions in another order.
    """
    convolutions = [node for node in module.graph.nodes if is_convolution(node)]
    if not convolutions or not _is_faster(module, convolutions):
        return frozenset()
    found = dict.fromkeys(convolutions)
    rest = list(convolutions)
    while rest:
        for other in _neighbours(rest.pop()):
            if other not in found:
                found[other] = None
                rest.append(other)
    return frozenset(found)


def is_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution of images that kernels can lay out, or its gradients."""
    if node.target not in {_FORWARD, _BACKWARD}:
        return False
    values = [one.meta["val"] for one in _operands(node)]
    return all(value.dim() == _RANK and value.dtype in _FLOATS for value in values)


def has_one_channel(node: fx.Node) -> bool:
    """Whether the images of a convolution have one channel, so that they lie in channels last and
    in rows at once.
    """
    return bool(_operands(node)[0].meta["val"].shape[1] == 1)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the images and the weights of a convolution, or of that whose gradients these are."""
    first = 1 if node.target is _BACKWARD else 0
    return node.args[first], node.args[first + 1]


def _is_faster(module: fx.GraphModule, convolutions: list[fx.Node]) -> bool:
    if torch.version.hip is not None or not torch.backends.cudnn.enabled:
        return False
    shapes = [one.meta["val"].shape for node in convolutions for one in _operands(node)]
    if len(module.graph.nodes) >= _MOST_NODES * len(convolutions) or not all(
        isinstance(size, int) for shape in shapes for size in shape
    ):
        return False
    forward = [node for node in convolutions if node.target is _FORWARD]
    if not forward:
        # A backward graph goes on in the layout that its forward graph had.
        return any(
            STORED_STRIDES in node.meta for node in module.graph.find_nodes(op="placeholder")
        )
    is_training = CALLERS_RESULTS in module.meta or len(forward) < len(convolutions)
    kinds = [(node, _kind(node)) for node in forward]
    if is_training:
        return not any(kind in {_GROUPED, _NARROWING} for _, kind in kinds) and not all(
            _is_small(node) for node in forward
        )
    work = [(_products(node), kind) for node, kind in kinds]
    return sum(count * kind for count, kind in work) <= sum(count for count, _ in work)


def _kind(node: fx.Node) -> float:
    weight = _operands(node)[1].meta["val"].shape
    if node.args[-1] > 1 and weight[1] > 1:
        return _GROUPED
    if _is_small(node):
        return _SMALL
    return _NARROWING if weight[0] * 2 <= weight[1] and weight[2] > 1 else _OTHER


def _is_small(node: fx.Node) -> bool:
    """Whether a convolution has few channels on both sides."""
    return bool(max(_operands(node)[1].meta["val"].shape[:2]) <= _SMALL_CHANNELS)


def _products(node: fx.Node) -> int:
    """Return how many products a convolution computes."""
    given, weight = (one.meta["val"].shape for one in _operands(node))
    is_transposed = node.args[6]
    made = given if is_transposed else node.meta["val"].shape
    return int(made[0] * math.prod(made[2:]) * math.prod(weight))


def _neighbours(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a node reads, and who reads it, in the same order of dimensions."""
    if _keeps_order(node):
        yield from (one for one in node.all_input_nodes if _lies_alike(one, node))
    yield from (user for user in node.users if _keeps_order(user) and _lies_alike(user, node))


def _keeps_order(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema  # noqa: SLF001  # torch shows a schema nowhere else
    is_view = any(result.alias_info is not None for result in schema.returns)
    return node.target in _ORDERED_VIEWS or not is_view


def _lies_alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether both have images, of the same number or of one that all share."""
    counts = [
        [value.shape[0] for value in tree_leaves(node.meta.get("val")) if has_images(value)]
        for node in (one, other)
    ]
    return any(count in counts[1] for count in counts[0])


def has_images(value: Any) -> bool:
    """Whether a value of torch's is a dense tensor of four dimensions whose sizes are known."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == _RANK
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    )
