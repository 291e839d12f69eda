# SPDX-License-Identifier: Apache-2.0
"""`list_decompositions`: torch's operators on lists of tensors (`_foreach_*`, `_fused_adam`, `_fused_adamw`) taken apart, one tensor after another.  Imports torch.

`decompositions` adds them to its table, so that what an optimizer does to a parameter is fused into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]
# Names whose operator on single tensors is called otherwise.
_SINGLE = {"clamp_min": torch.maximum, "clamp_max": torch.minimum}
_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt sigmoid sign sin sinh sqrt "
    "tan tanh trunc"
)
_BINARY = "add sub mul div pow maximum minimum clamp_min clamp_max"


def _number(operator: str, tensor: torch.Tensor, number: Any, **options: Any) -> torch.Tensor:
    """Compute an operator of a tensor and a number."""
    limits = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
    found: Callable[..., torch.Tensor] = limits.get(operator) or getattr(torch, operator)
    return found(tensor, number, **options)


def _each(
    function: Callable[..., torch.Tensor], tensors: Tensors, *others: Any, **options: Any
) -> list[torch.Tensor]:
    """Apply a function to each tensor, with the element of each other list that is beside it, or with what is no list."""
    count = len(tensors)
    columns = [other if isinstance(other, (list, tuple)) else [other] * count for other in others]
    return [function(*row, **options) for row in zip(tensors, *columns, strict=True)]


def _of_tensor(operator: str) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = _SINGLE.get(operator) or getattr(torch, operator)
    return found


def _with_value(
    operator: str, tensor: torch.Tensor, one: torch.Tensor, other: torch.Tensor, value: Any = 1
) -> Any:
    """Compute addcmul or addcdiv; the value may be a tensor of one element."""
    if isinstance(value, torch.Tensor):
        product = one * other if operator == "addcmul" else one / other
        return tensor + value * product
    return getattr(torch, operator)(tensor, one, other, value=value)


def _with_values(
    operator: str, tensors: Tensors, one: Tensors, other: Tensors, values: Any
) -> list[torch.Tensor]:
    numbers = list(values.unbind()) if isinstance(values, torch.Tensor) else values
    return _each(partial(_with_value, operator), tensors, one, other, numbers)


def _power_of_number(number: Any, exponents: Tensors) -> list[torch.Tensor]:
    return [torch.pow(number, exponent) for exponent in exponents]


def _norms(
    tensors: Tensors, order: Any = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _copied(_targets: Tensors, sources: Tensors, _non_blocking: bool = False) -> list[torch.Tensor]:
    return [
        source.to(target.dtype).expand(target.shape).clone()
        for target, source in zip(_targets, sources, strict=True)
    ]


def _zeroed(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def _adam(
    decoupled: bool, parameters: Tensors, gradients: Tensors, means: Tensors, squares: Tensors, largest: Tensors, steps: Tensors,
    *, lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
    grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Take one step of Adam for each parameter; `steps` are counted already."""
    if grad_scale is not None or found_inf is not None:
        return NotImplemented
    found: list[list[torch.Tensor]] = [[], list(gradients), [], [], []]
    for place, (weight, gradient, mean, square, step) in enumerate(
        zip(parameters, gradients, means, squares, steps, strict=True)
    ):
        slope = -gradient if maximize else gradient
        if weight_decay and not decoupled:
            slope = slope + weight * weight_decay
        decayed = weight - weight * (lr * weight_decay) if weight_decay and decoupled else weight
        first = mean + (slope - mean) * (1 - beta1)
        second = square * beta2 + slope * slope * (1 - beta2)
        highest = torch.maximum(largest[place], second) if amsgrad else second
        correction = 1 - torch.pow(beta1, step.to(torch.float32))
        root = torch.sqrt(1 - torch.pow(beta2, step.to(torch.float32)))
        change = first / (torch.sqrt(highest) / root + eps) * (lr / correction)
        found[0].append((decayed - change).to(weight.dtype))
        found[2].append(first.to(mean.dtype))
        found[3].append(second.to(square.dtype))
        if amsgrad:
            found[4].append(highest.to(square.dtype))
    return tuple(found)


def list_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what takes each of these operators apart, for those that the installed torch has."""
    table: dict[str, Callable[..., Any]] = {}
    for name in _UNARY.split():
        table[f"{name}.default"] = partial(_each, getattr(torch, name))
    for name in _BINARY.split():
        numbers = partial(_each, partial(_number, name))
        table |= {f"{name}.Scalar": numbers, f"{name}.ScalarList": numbers}
        table |= {
            f"{name}.List": partial(_each, _of_tensor(name)),
            f"{name}.Tensor": partial(_each, _of_tensor(name)),
        }
    for name in ("addcmul", "addcdiv"):
        for overload in ("Scalar", "ScalarList", "Tensor"):
            table[f"{name}.{overload}"] = partial(_with_values, name)
        table[f"{name}.Scalar"] = partial(_each, partial(_with_value, name))
    table |= {
        f"lerp.{overload}": partial(_each, torch.lerp)
        for overload in ("List", "Scalar", "ScalarList")
    }
    table |= {
        "pow.ScalarAndTensor": _power_of_number,
        "norm.Scalar": _norms,
        "copy.default": _copied,
        "zero.default": _zeroed,
    }
    found = {
        getattr(
            getattr(aten, f"_foreach_{name.split('.')[0]}", None), name.split(".")[1], None
        ): function
        for name, function in table.items()
    }
    for name, decoupled in (("_fused_adam", False), ("_fused_adamw", True)):
        for overload in ("default", "tensor_lr"):
            found[getattr(getattr(aten, name, None), overload, None)] = partial(_adam, decoupled)
    return {operator: function for operator, function in found.items() if operator is not None}
