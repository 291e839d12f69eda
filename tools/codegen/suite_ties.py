# SPDX-License-Identifier: Apache-2.0
"""`among_equals`: what a program did, as eager torch would have named it where torch leaves open
which of several equal elements an operator names.

A program and eager mode may name different ones. Its places are taken for eager's where they are
within the row, name no element twice, and hold elements equal to eager's values; its gradient, in
the order of eager's among the elements that are equal. Whatever else it did is left as it is, so it
is judged as any other result.  Imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tools.codegen.suite_judge import Outcome

#: Operators of which torch says which values they return, and not which of equal elements.
CHOOSING = frozenset({"topk", "kthvalue"})


def among_equals(operator: str, expected: Outcome, got: Outcome) -> Outcome:
    """Return an outcome with eager's choice in the place of one that is as right."""
    if operator not in CHOOSING or len(expected.outputs) != len(got.outputs):
        return got
    source, (values, theirs), ours = expected.inputs[0], expected.outputs, got.outputs[1]
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        return got
    source, values = source.detach(), values.detach()
    dim = next((dim for dim in range(source.dim()) if _names(source, dim, values, ours)), None)
    if dim is None or torch.equal(theirs, ours):
        return got
    gradients = [
        one if one is None or other is None else _in_order_of(source, dim, other, one)
        for one, other in zip(got.gradients, expected.gradients, strict=True)
    ]
    return replace(got, outputs=[got.outputs[0], theirs], gradients=gradients)


def _names(source: Any, dim: int, values: Any, places: Any) -> bool:
    """Whether places along a dimension hold some values, and none is named twice."""
    if places.dim() == source.dim() - 1:
        values, places = values.unsqueeze(dim), places.unsqueeze(dim)
    sizes = [size for number, size in enumerate(source.shape) if number != dim]
    if [size for number, size in enumerate(places.shape) if number != dim] != sizes:
        return False
    if bool(((places < 0) | (places >= source.shape[dim])).any()):
        return False
    found = source.gather(dim, places)
    same = (found == values) | ((found != found) & (values != values))  # noqa: PLR0124  # NaN
    return bool(same.all()) and not bool((places.sort(dim).values.diff(dim=dim) == 0).any())


def _in_order_of(source: Any, dim: int, theirs: Any, ours: Any) -> Any:
    """Return a gradient that is moved among equal elements of a row so that it is in the order that
    eager's has there.
    """

    def order(gradient: Any) -> Any:
        inner = gradient.sort(dim=dim, stable=True).indices
        outer = source.gather(dim, inner).sort(dim=dim, stable=True).indices
        return inner.gather(dim, outer)

    return torch.empty_like(ours).scatter_(dim, order(theirs), ours.gather(dim, order(ours)))
