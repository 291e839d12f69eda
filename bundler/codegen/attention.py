# SPDX-License-Identifier: Apache-2.0
"""`with_attention`: attention that a model writes as two products and a softmax becomes torch's
attention, which is called whole.

Imports torch. `softmax(q @ k.transpose(-2, -1) * scale + mask) @ v`, as Dynamo traces it, in front
of AOTAutograd, so that backward is the attention's too.  Dropout stays, whose numbers the attention
would draw in another order, and so does a mask that has a gradient.  Where a mask of -inf leaves
nothing of a row, the products have NaN, and torch's attention may have 0.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

_PRODUCTS = {torch.bmm, torch.matmul, operator.matmul, "bmm", "matmul"}
_SOFTMAX = {torch.softmax, functional.softmax, "softmax"}
_TRANSPOSED = {torch.transpose, "transpose"}
_TIMES = {operator.mul, torch.mul, "mul"}
_OVER = {operator.truediv, torch.div, "div"}
_PLUS = {operator.add, torch.add, "add"}
_VIEWS = {"view", "reshape"}
_SCORES = {*_PRODUCTS, *_TIMES, *_OVER, *_VIEWS}
_PARTS = {*_SCORES, *_SOFTMAX, *_TRANSPOSED, *_PLUS, functional.dropout, "to"}
# Operators in place whose names do not end as torch's do, and what changes how torch computes.
_CHANGES = (
    "setitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
    " set_grad_enabled enter_autocast exit_autocast"
)
_OPAQUE = (HigherOrderOperator, OpOverload, OpOverloadPacket)
# Dimensions of a product of batches without heads.
_FLAT = 3
# torch's fused attention wants rows of whole vectors.
_VECTOR = 8


def with_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module, or a copy in which attention is called."""
    found = [node for node in module.graph.nodes if _attention(node) is not None]
    if not found or torch.are_deterministic_algorithms_enabled():
        return module
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph(owning_module=module)
    graph.output(graph.graph_copy(module.graph, nodes))
    for node in found:
        _replace(graph, nodes[node])
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


class _Attention(NamedTuple):
    """What an attention takes; where its products have batch and heads in one dimension, `batch`
    are the two.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    mask: fx.Node | None
    batch: tuple[Any, ...] = ()


def _replace(graph: fx.Graph, product: fx.Node) -> None:
    found = _attention(product)
    assert found is not None
    with graph.inserting_before(product):
        heads = list(found[:3])
        if found.batch:
            heads = [graph.call_method("unflatten", (one, 0, found.batch)) for one in heads]
        result = graph.call_function(
            functional.scaled_dot_product_attention,
            tuple(heads),
            {"attn_mask": found.mask, "scale": found.scale},
        )
        if found.batch:
            result = graph.call_method("flatten", (result, 0, 1))
        if found.batch or not all(_turns_heads(user) for user in product.users):
            # A product's result is dense, and `view` may rely on it.
            result = graph.call_method("contiguous", (result,))
    result.meta = dict(product.meta)
    product.replace_all_uses_with(result)
    _erase(graph, product)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a part of the products that nobody reads any more.

    No other node goes: to torch.fx a `counter.add_(1)` that nobody reads is dead code, too.
    """
    if not node.users and node.target in _PARTS:
        sources = node.all_input_nodes
        graph.erase_node(node)
        for source in sources:
            _erase(graph, source)


def _turns_heads(node: fx.Node) -> bool:
    """Whether a node exchanges heads and rows: torch's attention may have written them so."""
    return node.target in _TRANSPOSED and {*node.args[1:]} == {1, 2}


def _attention(product: fx.Node) -> _Attention | None:
    """Return what a node multiplies, where it is the second product of an attention whose parts
    nobody else reads.
    """
    weights, value = _two(product, _PRODUCTS)
    scores = _of_softmax(_without_cast(_without_dropout(weights)))
    scores, mask, batch = _masked(scores)
    scores, scale = _scaled(scores)
    query, turned = _two(scores, _PRODUCTS)
    key = _of_transposed(turned)
    if not (query and key and value) or not _are_alike(query, key, value):
        return None
    if _value(product).dtype != _value(query).dtype or not _is_mask(mask, query):
        return None
    # What is read at the first product would be read at the second.
    if any(map(_may_change, _between(scores, product))):
        return None
    if _value(query).dim() == _FLAT and not batch:
        # A product of three dimensions is one of many batches of one head.
        batch = (-1, 1)
    return _Attention(query, key, value, scale, mask, batch)


def _between(first: fx.Node | None, last: fx.Node) -> Iterator[fx.Node]:
    """Return the nodes behind one and before another."""
    nodes = itertools.dropwhile(lambda node: node is not first, last.graph.nodes)
    return itertools.takewhile(lambda node: node is not last, itertools.islice(nodes, 1, None))


def _may_change(node: fx.Node) -> bool:
    """Whether a node may change a tensor in place, or how torch computes from there on; graphs of
    Dynamo show it by names and flags alone, and not at all for operators of the user's.
    """
    if node.op == "call_module" or isinstance(node.target, _OPAQUE):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    # `and_` and `not_` of numbers have their line for another reason.
    in_place = name.strip("_") in _CHANGES.split() or (
        name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)
    )
    flags = *node.args, node.kwargs.get("inplace")
    return in_place or any(flag is True for flag in flags) or node.kwargs.get("out") is not None


def _two(node: fx.Node | None, targets: set[Any]) -> tuple[fx.Node | None, fx.Node | None]:
    """Return the operands of a node that calls one of the targets with two of them."""
    if node is not None and node.target in targets and not node.kwargs:
        match node.args:
            case (fx.Node() as first, fx.Node() as second):
                return first, second
    return None, None


def _once(node: Any) -> fx.Node | None:
    """Return a node whose elements one other reads; models check the sizes of scores, too."""
    if not isinstance(node, fx.Node):
        return None
    return node if sum(user.target != "size" for user in node.users) == 1 else None


def _without_dropout(node: fx.Node | None) -> fx.Node | None:
    node = _once(node)
    if node is None or node.target is not functional.dropout:
        return node
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    nothing = given.get("p", 0.5) == 0 or given.get("training", True) is False
    return _once(given["input"]) if nothing else None


def _without_cast(node: fx.Node | None) -> fx.Node | None:
    """Return what a softmax in float32 gave before it was cast back, as torch's attention does."""
    if node is not None and node.target == "to" and not node.kwargs:
        match node.args:
            case (source, torch.dtype()):
                return _once(source)
    return node


def _of_softmax(node: fx.Node | None) -> fx.Node | None:
    if node is None or node.target not in _SOFTMAX:
        return None
    given = dict(zip(("input", "dim"), node.args, strict=False)) | node.kwargs
    last = given.get("dim") in {-1, _value(node).dim() - 1}
    wide = given.get("dtype") in {None, torch.float32}
    return _once(given["input"]) if last and wide else None


def _masked(
    node: fx.Node | None,
) -> tuple[fx.Node | None, fx.Node | None, tuple[Any, ...]]:
    """Return scores, what is added to them, and batch and heads where they were viewed so for
    that sum.
    """
    shape = [] if node is None else _sizes_of_view(node)
    total = node if not shape else _once(node.args[0])  # type: ignore[union-attr]
    scores, mask = _summands(total)
    if mask is None or scores is None or not _same_sizes(_value(scores).shape, _value(total).shape):
        return (None if shape else node), None, ()
    if not shape:
        return scores, mask, ()
    batch = tuple(_sizes_of_view(scores)[:2])
    source = _once(scores.args[0])
    flat = source is not None and _value(source).dim() == _value(node).dim() == _FLAT
    return (source, mask, batch) if flat and len(batch) == 2 else (None, None, ())  # noqa: PLR2004


def _same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether it is known without another guard."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in pairs)


def _summands(node: fx.Node | None) -> tuple[fx.Node | None, fx.Node | None]:
    """Return scores and mask of a sum."""
    first, second = _two(node, _PLUS)
    for scores, mask in ((first, second), (second, first)):
        if _once(scores) is not None and scores.target in _SCORES:  # type: ignore[union-attr]
            return scores, mask
    return None, None


def _sizes_of_view(node: fx.Node) -> list[Any]:
    """Return the sizes that a node views a tensor with; empty for any other."""
    if node.target not in _VIEWS or node.kwargs:
        return []
    match node.args[1:]:
        case (tuple() | list() as sizes,):
            return [*sizes]
        case sizes:
            return [*sizes]


def _is_mask(mask: fx.Node | None, query: fx.Node) -> bool:
    """Whether torch's attention takes a mask, and no gradient of it is asked for."""
    if mask is None:
        return True
    found = _value(mask)
    return (
        isinstance(found, torch.Tensor)
        and found.dtype == _value(query).dtype
        and found.dim() in {2, _FLAT + 1}
        and not found.requires_grad
    )


def _scaled(node: fx.Node | None) -> tuple[fx.Node | None, float]:
    """Return what a node multiplies by a number, and the number."""
    if node is not None and not node.kwargs:
        match node.target in _TIMES, node.target in _OVER, node.args:
            case (True, _, (scores, float() | int() as scale) | (float() | int() as scale, scores)):
                return _once(scores), float(scale)
            case (_, True, (scores, float() | int() as divisor)) if divisor:
                return _once(scores), 1.0 / divisor
    return node, 1.0


def _of_transposed(node: fx.Node | None) -> fx.Node | None:
    if node is not None and node.target in _TRANSPOSED:
        match node.args:
            case (fx.Node() as source, int() as one, int() as other):
                rank = _value(node).dim()
                return source if {one % rank, other % rank} == {rank - 2, rank - 1} else None
    return None


def _are_alike(*tensors: fx.Node) -> bool:
    """Whether torch has a fused attention for them, that no batch is repeated in."""
    query, key, value = map(_value, tensors)
    if not all(isinstance(one, torch.Tensor) for one in (query, key, value)):
        return False
    one_type = query.dtype == key.dtype == value.dtype and query.dtype.is_floating_point
    if not one_type or query.dim() not in {_FLAT, _FLAT + 1}:
        return False
    batches = [one.shape[:-2] for one in (query, key, value)]
    return all(_same_sizes(batches[0], one) for one in batches) and all(
        statically_known_true(one.shape[-1] % _VECTOR == 0) for one in (query, value)
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")
