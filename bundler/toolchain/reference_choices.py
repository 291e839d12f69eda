# SPDX-License-Identifier: Apache-2.0
"""`CHOICES`: operators of which torch leaves open which of equal elements they name, with the
choice that generated kernels promise: the lowest place, of `mode` the last one.

Each takes what the operator takes, and returns the operator's own results, with these numbers.
`reference_graph` runs them in the operators' place, unless a program calls these, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _filled(results: Any, values: Any, places: Any) -> Any:
    """Return the results of an operator, whose layout stays, with other numbers."""
    results[0].copy_(values.reshape(results[0].shape))
    results[1].copy_(places.reshape(results[1].shape))
    return results


def _sort(tensor: Any, dim: int = -1, descending: bool = False) -> Any:
    results = aten.sort.default(tensor, dim, descending)
    return _filled(results, *torch.sort(tensor, dim=dim, descending=descending, stable=True))


def _topk(tensor: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002  # torch's name
    results = aten.topk.default(tensor, k, dim, largest, sorted)
    ordered = torch.sort(tensor, dim=dim, descending=largest, stable=True)
    return _filled(results, *(one.narrow(dim, 0, k) if one.dim() else one for one in ordered))


def _kthvalue(tensor: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    results = aten.kthvalue.default(tensor, k, dim, keepdim)
    ordered = torch.sort(tensor, dim=dim, stable=True)
    return _filled(results, *(one.select(dim, k - 1) if one.dim() else one for one in ordered))


def _mode(tensor: Any, dim: int = -1, keepdim: bool = False) -> Any:
    results = aten.mode.default(tensor, dim, keepdim)
    if not tensor.dim():
        return results
    ordered = torch.sort(tensor.movedim(dim, -1), dim=-1, stable=True)
    place = torch.arange(tensor.shape[dim], device=tensor.device).expand(ordered.values.shape)
    differs = ordered.values[..., 1:] != ordered.values[..., :-1]
    starts = torch.where(torch.nn.functional.pad(differs, (1, 0)), place, 0)
    length = place - starts.cummax(-1).values
    longest = length == length.amax(-1, keepdim=True)
    at = torch.where(longest, place, place.shape[-1]).amin(-1, keepdim=True)
    return _filled(results, *(one.gather(-1, at) for one in ordered))


CHOICES: dict[Any, Callable[..., Any]] = {
    aten.sort.default: _sort,
    aten.topk.default: _topk,
    aten.kthvalue.default: _kthvalue,
    aten.mode.default: _mode,
}
