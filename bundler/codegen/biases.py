# SPDX-License-Identifier: Apache-2.0
"""`added_behind`: which products of matrices leave their bias to the kernels that read them.
Imports torch.

A kernel that reads a product adds the bias for nothing, while cuBLAS's kernels of single and double
precision take longer with one than without.  The rule is TorchInductor's
(`unfuse_bias_add_to_pointwise` in torch/_inductor/fx_passes/post_grad.py): halves, which would be
rounded once more, stay whole, and so does what is read by more than operators of elements.  `lower`
asks.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
# By its schema the result is new memory; in fact it shares that of its argument.
_UNSAFE_VIEW = aten._unsafe_view.default  # noqa: SLF001  # torch names it so
_EXACT = frozenset({torch.float32, torch.float64})


def added_behind(module: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the products with a bias that are called without it."""
    products = module.graph.find_nodes(op="call_function", target=aten.addmm.default)
    return frozenset(node for node in products if _is_plain(node) and _is_read_by_element(node))


def _is_plain(node: fx.Node) -> bool:
    """Whether a product and its bias are added as they are, without another rounding."""
    return node.meta["val"].dtype in _EXACT and not node.kwargs


def _is_read_by_element(node: fx.Node) -> bool:
    """Whether all that read a node, or a view of it, compute element by element."""
    return bool(node.users) and all(map(_is_by_element, node.users))


def _is_by_element(user: fx.Node) -> bool:
    if user.target is operator.getitem:
        return _is_read_by_element(user)
    if not isinstance(user.target, OpOverload):
        return False
    schema = user.target._schema  # noqa: SLF001  # torch shows a schema nowhere else
    if user.target is _UNSAFE_VIEW or any(found.alias_info is not None for found in schema.returns):
        return _is_read_by_element(user)
    return torch.Tag.pointwise in user.target.tags
