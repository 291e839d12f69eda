# SPDX-License-Identifier: Apache-2.0
"""`lower`: one operator of a graph becomes tensors of the loop-level form; what cannot be generated
becomes an extern call with the reason.

`lower` calls it for each node, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from bundler.codegen.kernels.operator_support import check_term, check_type
from bundler.codegen.loops.lazy_tensors import GraphBuilder, LazyTensor, variables
from bundler.codegen.loops.loop_nodes import Loop, numel
from bundler.codegen.loops.loop_terms import Term, in_order
from bundler.codegen.lowerings.attention_lowerings import ATTENTIONS
from bundler.codegen.lowerings.indexing_lowerings import INDEXING
from bundler.codegen.lowerings.masked_lowerings import MASKED
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.pointwise_lowerings import POINTWISE
from bundler.codegen.lowerings.pooling_lowerings import POOLS
from bundler.codegen.lowerings.product_lowerings import PRODUCTS, is_product
from bundler.codegen.lowerings.random_lowerings import RANDOM
from bundler.codegen.lowerings.reduction_lowerings import REDUCTIONS_BY_NAME
from bundler.codegen.lowerings.scan_lowerings import SCANS
from bundler.codegen.lowerings.scatter_lowerings import SCATTERING
from bundler.codegen.lowerings.search_lowerings import SEARCHES
from bundler.codegen.lowerings.sort_lowerings import SORTS
from bundler.codegen.lowerings.special_lowerings import SPECIAL
from bundler.codegen.lowerings.view_lowerings import VIEWS, sliced, without
from bundler.errors import UnsupportedOperator

#: Namespace of the operators that take more than tensors and numbers; none is called by name.
HIGHER_ORDER = "higher_order"
_NAMESPACES = frozenset({"aten", "prims", "triton_bundler", HIGHER_ORDER})
Lowered = tuple[LazyTensor | None, ...]
_WITH_SEVERAL = (SPECIAL, REDUCTIONS_BY_NAME, SCANS, SORTS, SEARCHES, MASKED, RANDOM, POOLS)
SPLITS = frozenset({"split", "split_with_sizes", "unbind", "chunk"})


@dataclass(frozen=True)
class RefusedOperator:
    """An operator that is called as it is: its name, why, and the line of the user's program."""

    operator: str
    reason: str
    line: str = ""


def lower(builder: GraphBuilder, call: OperatorCall, fallbacks: list[RefusedOperator]) -> Lowered:
    """Return the results of an operator; appends to `fallbacks` where it is called as it is."""
    before = len(builder.nodes), dict(builder.buffers)
    try:
        found = generated(builder, call)
        # Loops that the lowering added are checked too, while the operator can still be called
        # instead.
        for node in builder.nodes[before[0] :]:
            assert isinstance(node, Loop)
            for root in node.roots:
                _check_terms(root)
    except UnsupportedOperator as error:
        # Writes into a copy are taken back. Buffers that its arguments got on the way stay: they
        # hold what they should, and others may use them.
        realized = [
            node for node in builder.nodes[before[0] :] if isinstance(node, Loop) and node.mode
        ]
        for node in realized:
            builder.nodes.remove(node)
        if call.namespace == HIGHER_ORDER:
            raise
        fallbacks.append(RefusedOperator(call.name, error.message))
        return builder.call(
            call.name,
            call.positional,
            dict(call.keywords),
            call.results,
            error.message,
            single=call.single,
            view=call.view,
            place=call.place,
        )
    return found


def is_elementwise(call: OperatorCall) -> bool:
    """Whether each element of a call's result is computed by itself."""
    return call.operator in POINTWISE


def generated(builder: GraphBuilder, call: OperatorCall) -> Lowered:
    """Return the results of an operator that kernels compute; raises `UnsupportedOperator` where
    they cannot.
    """
    if call.refused:
        raise call.refusal(call.refused)
    try:
        found = _generated(builder, call)
    except TypeError as error:
        # A lowering that needs a plain number fails on a symbol with a TypeError of Python's;
        # without symbols it is a fault of the lowering.
        if not has_symbols([*call.positional, *call.keywords.values()]):
            raise
        raise call.refusal(f"takes a size that changes: {error}") from error
    for tensor in found:
        _check(tensor)
    return found


def _generated(builder: GraphBuilder, call: OperatorCall) -> Lowered:
    name = call.operator
    if call.namespace not in _NAMESPACES:
        raise call.refusal("it is no operator of ATen")
    for layout in call.results:
        if layout is not None:
            check_type(layout.dtype)
    if name == "view" and call.overload == "dtype":
        name = "view_dtype"
    if name in VIEWS or name in SPLITS:
        seen = (
            (VIEWS[name](builder, call.arguments, call.sizes),) if name in VIEWS else _parts(call)
        )
        return tuple(_named(call, tensor) for tensor in seen)
    products, attentions = (PRODUCTS, ATTENTIONS) if call.template else ({}, {})
    for table in (POINTWISE, INDEXING, SCATTERING, products):
        if name in table:
            return (table[name](builder, call),)
    for several in (*_WITH_SEVERAL, attentions):
        if name in several:
            found = several[name](builder, call)
            return found if isinstance(found, tuple) else (found,)
    raise call.refusal(_reason(call))


def _reason(call: OperatorCall) -> str:
    """Return why an operator that no table has is called."""
    if not call.template and is_product(call):
        return (
            "its kernel is a template, which templates='all' generates, and 'where faster' where"
            " that is measured"
        )
    return "no kernel is generated for this operator"


def _named(call: OperatorCall, tensor: LazyTensor) -> LazyTensor:
    """Return the result of a view, which is told as its origin; never the argument itself."""
    return LazyTensor(tensor.sizes, tensor.dtype, tensor.at, tensor.origins | call.origins)


def _parts(call: OperatorCall) -> tuple[LazyTensor, ...]:
    """Return the pieces of a tensor along a dimension."""
    tensor, dim = call.arguments["self"], int(call.arguments.get("dim", 0))
    dim %= len(tensor.sizes)
    pieces, start = [], sympy.Integer(0)
    for layout in call.results:
        assert layout is not None
        if call.operator == "unbind":
            pieces.append(without(tensor, [dim], start))
            start += 1
        else:
            pieces.append(sliced(tensor, dim, start, sympy.Integer(1), layout.sizes[dim]))
            start += layout.sizes[dim]
    return tuple(pieces)


def has_symbols(values: Sequence[Any]) -> bool:
    """Whether some of the arguments of an operator are sizes that change."""
    return any(
        has_symbols(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, sympy.Basic) and bool(value.free_symbols)
        for value in values
    )


def _check(tensor: LazyTensor | None) -> None:
    if tensor is None or numel(tensor.sizes) == 0:
        return
    check_type(tensor.dtype)
    _check_terms(tensor.at(variables("i", tensor.sizes)))


def _check_terms(root: Term) -> None:
    for term in in_order(root):
        check_term(term)
