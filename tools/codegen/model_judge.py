# SPDX-License-Identifier: Apache-2.0
"""`wrong`: whether results are as good as eager mode's, by the rule of TorchInductor's dashboard,
which torch has as `torch._dynamo.utils.same`.

A tensor is the float64 reference rounded to its type, or close within a tolerance, or its distance
from a float64 reference is no more than twice or three times eager's own.  In one way this is
stricter than the dashboard: the tolerance is absolute there, so gradients under 0.01 pass whatever
they are.  Here a small tensor is divided by its own scale first: down to a power of two, since
any other division rounds, and may round the two sides apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._dynamo.utils import same

Tensors = dict[str, torch.Tensor]
# What is smaller than this part of the largest result is judged on that scale: it may be a sum that
# is zero but for rounding, e.g. the gradient of a key's bias.
_LEAST_SCALE = 1e-4


def wrong(
    ours: Tensors, eager: Tensors, exact: Tensors, tolerance: float, *, larger: bool = False
) -> list[str]:
    """Return what is wrong, a line for each result; nothing where all are right.

    Args:
        ours, eager, exact: the same results by name: ours, those of eager mode, and those of eager
            mode in float64.
        tolerance: the dashboard's for this model.
        larger: whether the dashboard lets small tensors of this model be ten times as far off.
    """
    if ours.keys() != eager.keys():
        return [f"results {sorted(ours.keys() ^ eager.keys())} are not on both sides"]
    largest = max((_scale(one) for one in exact.values()), default=0.0)
    found = []
    for name, expected in eager.items():
        problem = _problem(
            ours[name], expected, exact[name], largest * _LEAST_SCALE, tolerance, larger
        )
        if problem:
            found.append(f"{name}: {problem}")
    return found


def wrong_beside_all(
    lines: list[str],
    ours: Tensors,
    others: Iterable[Tensors],
    exact: Tensors,
    tolerance: float,
    *,
    larger: bool = False,
) -> list[str]:
    """Return the lines of `wrong` about results that are wrong beside other runs of eager mode,
    too.

    Where numbers are ill-conditioned, as gradients through many a norm and step, one run of eager
    mode does not show how far off it can be: runs with weights that differ in the last bit do.
    """
    for other in others:
        if not lines:
            break
        found = wrong(ours, other, exact, tolerance, larger=larger)
        names = {line.partition(":")[0] for line in found}
        lines = [line for line in lines if line.partition(":")[0] in names]
    return lines


def _problem(
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    least: float,
    tolerance: float,
    larger: bool,
) -> str:
    if (ours.shape, ours.dtype, ours.device) != (eager.shape, eager.dtype, eager.device):
        return (
            f"{ours.dtype} {tuple(ours.shape)} on {ours.device} is not {eager.dtype}"
            f" {tuple(eager.shape)} on {eager.device}"
        )
    if not eager.is_floating_point():
        return "" if torch.equal(ours, eager) else "integers differ"
    if torch.equal(ours, exact.to(ours.dtype)):
        # no number of this type is nearer; a scalar of eager mode may be there by luck, and leave
        # others no room
        return ""
    scale = 2.0 ** math.floor(math.log2(min(1.0, max(_scale(exact), least)) or 1.0))
    messages: list[str] = []
    close = same(
        eager / scale,
        ours / scale,
        exact.double() / scale,
        tol=tolerance,
        equal_nan=False,
        use_larger_multiplier_for_smaller_tensor=larger,
        log_error=lambda text, *values: messages.append(text % values if values else text),
    )
    if close:
        return ""
    return (
        f"{'; '.join(messages)}, off by {relative(ours, exact):.2g} of its size, eager by"
        f" {relative(eager, exact):.2g}"
    )


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the length of a difference beside that of the float64 reference."""
    distance = (found.double() - exact.double()).norm()
    return float(distance / exact.double().norm().clamp_min(1e-300))


def _scale(tensor: torch.Tensor) -> float:
    """Return the root of the mean square; 0 for what has no finite one."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    found = float(tensor.double().square().mean().sqrt())
    return found if found < float("inf") else 0.0


def flat(value: Any, name: str = "") -> Tensors:
    """Return the tensors of nested tuples and dictionaries, named by where they are."""
    if isinstance(value, torch.Tensor):
        return {name or "result": value.detach()}
    if isinstance(value, Mapping):
        parts = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, (tuple, list)):
        parts = [(str(number), one) for number, one in enumerate(value)]
    else:
        return {}
    found: Tensors = {}
    for key, one in parts:
        found |= flat(one, f"{name}.{key}" if name else key)
    return found
