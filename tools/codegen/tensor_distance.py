# SPDX-License-Identifier: Apache-2.0
"""`distance`: how far two tensors are from each other, in tolerances of their type."""

from __future__ import annotations

import torch

# Of torch.testing.assert_close, relative to a tensor's largest number; what is in no list has to be
# equal.
TOLERANCES = {
    torch.float16: 1e-3,
    torch.bfloat16: 1.6e-2,
    torch.float32: 1.3e-6,
    torch.float64: 1e-7,
    torch.float8_e4m3fn: 0.13,
    torch.float8_e5m2: 0.26,
}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two tensors, in tolerances of their type; infinite where
    they have to be equal and are not.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    tolerance = TOLERANCES.get(one.dtype)
    if tolerance is None:
        return 0.0 if torch.equal(one, other) else float("inf")
    left, right = one.double(), other.double()
    same = (left == right) | (left.isnan() & right.isnan())
    if bool(same.all()):
        return 0.0
    off = torch.where(same, 0.0, (left - right).abs())
    # Relative to the largest number, since a sum's error is one of its summands, not of the sum.
    scale = (
        right[right.isfinite()].abs().amax()
        if bool(right.isfinite().any())
        else torch.ones((), dtype=torch.float64)
    )
    worst = float(off.max() / (tolerance * scale.clamp(min=1e-30)))
    return worst if worst == worst else float("inf")  # noqa: PLR0124  # not a number is never close
