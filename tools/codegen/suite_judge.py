# SPDX-License-Identifier: Apache-2.0
"""What `suites` calls right: `difference`, `strides` and `aliasing` of what a function did eagerly
and what its program did.

Whole numbers and bools are equal.  Floats are judged as TorchInductor's dashboard judges models:
close within op_db's own tolerance, or no further from a float64 reference than k times what eager
torch is, by root mean square; `suite_sides` judges what is further once more, beside eager runs
with inputs that are off by their last bit.  Sizes, dtype, device, strides where a dimension has
more than one element, and aliasing are eager's: which outputs are inputs, and which tensors share
memory.  Which of equal elements `topk`, `kthvalue` and `mode` name is judged by `suite_ties`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.testing._comparison import default_tolerances

# Of the dashboard: how much further from float64 than eager torch a result may be, and where it may
# be more.
_FACTOR, _WIDE_FACTOR, _FEW_ELEMENTS, _WIDE_TOLERANCE = 2.0, 3.0, 1000, 2e-2
# Random numbers may lie outside of those that eager torch drew by so many times their spread, where
# it drew so many.
_SPREAD, _DRAWN = 4.0, 16
# What is compared of numbers.
Compared = Literal["numbers", "range", "nothing"]


@dataclass(frozen=True)
class Tolerance:
    """How far apart close numbers are."""

    relative: float
    absolute: float


@dataclass(frozen=True)
class Outcome:
    """What a call did.

    Attributes:
        inputs: the tensors that it was given, afterwards.
        outputs: the leaves of what it returned.
        gradients: of the inputs that need one, None where there is none.
    """

    inputs: list[Any]
    outputs: list[Any]
    gradients: list[Any]


def difference(
    expected: Outcome,
    got: Outcome,
    exact: Outcome | None,
    tolerance: Tolerance,
    compared: Compared = "numbers",
) -> str:
    """Return what is wrong with the tensors and numbers that a program made or changed; nothing
    where they are right.

    Args:
        expected: what eager torch did.
        got: what the program did.
        exact: what eager torch did in float64; None where it cannot.
        tolerance: of the operator and the dtype.
        compared: numbers; their range where they are drawn; or nothing of them where they are
            memory as it was found.
    """
    for part in ("inputs", "outputs", "gradients"):
        theirs, ours = getattr(expected, part), getattr(got, part)
        if len(theirs) != len(ours):
            return f"{part}: expected {len(theirs)}, got {len(ours)}"
        references = getattr(exact, part) if exact is not None else [None] * len(theirs)
        if len(references) != len(theirs):
            references = [None] * len(theirs)
        for number, (one, other, wide) in enumerate(zip(theirs, ours, references, strict=True)):
            found = _leaf(one, other, wide, tolerance, compared)
            if found:
                return f"{part[:-1]} {number}: {found}"
    return ""


def strides(expected: Outcome, got: Outcome) -> str:
    """Return which outputs have other strides than eager torch gives them; those of dimensions of
    one element say nothing.
    """
    found = []
    for number, (one, other) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        if _strided(one) and _strided(other):
            mine, theirs = significant_strides(other), significant_strides(one)
            if mine != theirs:
                found.append(
                    f"output {number}: strides of {tuple(one.shape)}: expected {one.stride()}, got"
                    f" {other.stride()}"
                )
    return "; ".join(found)


def significant_strides(tensor: Any) -> tuple[int, ...]:
    """Return the strides that say where an element lies."""
    if tensor.numel() == 0:
        return ()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _leaf(one: Any, other: Any, exact: Any, tolerance: Tolerance, compared: Compared) -> str:
    if not isinstance(one, torch.Tensor):
        same = type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124  # NaN
        return (
            "" if same or compared != "numbers" else f"expected {one!r:.100}, got {_shown(other)}"
        )
    if not isinstance(other, torch.Tensor):
        return f"expected {_shown(one)}, got {_shown(other)}"
    # Not whether it is lazily negative or conjugated: AOTAutograd itself returns an input's view
    # without that, and the numbers are compared.
    for name in ("layout", "dtype", "shape", "device", "requires_grad"):
        theirs, ours = getattr(one, name), getattr(other, name)
        if theirs != ours:
            return f"{name}: expected {_words(theirs)}, got {_words(ours)}"
    with torch.no_grad():
        one, other = (_plain(tensor) for tensor in (one, other))
        exact = _plain(exact) if isinstance(exact, torch.Tensor) else None
        if compared != "numbers":
            return _range(one, other) if compared == "range" else ""
        return _numbers(one, other, exact, tolerance)


def _words(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of {tuple(value.shape)}"
    return f"{value!r:.100}"


def _plain(tensor: Any) -> Any:
    """Return a tensor's numbers as a dense tensor of real ones."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _numbers(one: Any, other: Any, exact: Any, tolerance: Tolerance) -> str:
    if not one.is_floating_point():
        different = one != other
        count = int(different.sum())
        return _first(different, one, other, count) if count else ""
    if one.element_size() == 1:
        one, other = one.float(), other.float()
    tolerance = _for_result(tolerance, one.dtype)
    close = torch.isclose(
        other, one, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True
    )
    if bool(close.all()):
        return ""
    count = int((~close).sum())
    # Floats that were made of whole numbers are of float32 there too.
    if exact is None or exact.shape != one.shape or exact.dtype != torch.float64:
        return _first(~close, one, other, count) + "; torch has no float64 reference"
    return _far(one, other, exact, tolerance, ~close, count)


def _for_result(tolerance: Tolerance, dtype: Any) -> Tolerance:
    """Return a tolerance that is no narrower than torch's own for the dtype of a result, as where
    floats are made of whole numbers.
    """
    relative, absolute = default_tolerances(dtype)
    return Tolerance(max(relative, tolerance.relative), max(absolute, tolerance.absolute))


def _far(one: Any, other: Any, exact: Any, tolerance: Tolerance, apart: Any, count: int) -> str:
    """Return what is wrong where numbers are not close: they are further from float64 than eager's
    by more than the formula allows.
    """
    rounded = exact.to(one.dtype)
    special = ~(torch.isfinite(one) & torch.isfinite(other))
    # A number that is too large, or none, has to be so for eager torch or for the reference.
    same = [
        torch.isclose(other, right, rtol=0.0, atol=0.0, equal_nan=True) for right in (one, rounded)
    ]
    unlike = special & ~(same[0] | same[1])
    if bool(unlike.any()):
        return _first(unlike, one, other, int(unlike.sum()), rounded)
    keep = ~special & torch.isfinite(exact)
    ours, theirs = (_rms(exact[keep] - tensor[keep].double()) for tensor in (other, one))
    tol = max(tolerance.relative, tolerance.absolute)
    wide = (
        one.dtype in {torch.float16, torch.bfloat16}
        or one.numel() < _FEW_ELEMENTS
        or tol >= _WIDE_TOLERANCE
    )
    most = (_WIDE_FACTOR if wide else _FACTOR) * theirs + tol / 10
    if ours <= most:
        return ""
    return (
        f"{_first(apart, one, other, count, rounded)}; RMSE to float64 {ours:.3g}, eager's"
        f" {theirs:.3g}, most {most:.3g}"
    )


def _rms(values: Any) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _first(different: Any, one: Any, other: Any, count: int, exact: Any = None) -> str:
    place = tuple(int(index) for index in different.nonzero()[0])
    right = "" if exact is None else f", float64 {exact[place].item():.9g}"
    return (
        f"{count} of {one.numel()} numbers differ, at {list(place)}: expected {one[place].item()}, "
        f"got {other[place].item()}{right}"
    )


def _range(one: Any, other: Any) -> str:
    """Return what is wrong with random numbers: far outside of the range that eager torch drew
    from, or no numbers.
    """
    if not one.numel():
        return ""
    one, other = one.double(), other.double()
    if bool(torch.isfinite(one).all()) and not bool(torch.isfinite(other).all()):
        return "random numbers: expected finite ones"
    if one.numel() < _DRAWN:
        return ""
    least, most = float(one.min()), float(one.max())
    spread = _SPREAD * max(most - least, 1.0)
    if float(other.min()) < least - spread or float(other.max()) > most + spread:
        return (
            f"random numbers: expected some from {least} to {most}, got {float(other.min())} to"
            f" {float(other.max())}"
        )
    return ""


# ----------------------------------------------------------------------------------------- Aliasing


def aliasing(expected: Outcome, got: Outcome) -> str:
    """Return which output is an input, or shares memory, where eager torch's does not, or the other
    way round.
    """
    theirs, ours = (_relations(outcome) for outcome in (expected, got))
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if one != other:
            return f"output {number}: expected {one}, got {other}"
    return ""


def _relations(outcome: Outcome) -> list[str]:
    """Return in words, for each output, which tensor before it it is, or shares memory with."""
    known: list[tuple[str, Any]] = [
        (f"input {number}", tensor) for number, tensor in enumerate(outcome.inputs)
    ]
    found = []
    for number, output in enumerate(outcome.outputs):
        if _strided(output):
            found.append(_relation(output, known))
            known.append((f"output {number}", output))
        else:
            found.append("")
    return found


def _relation(output: Any, known: Sequence[tuple[str, Any]]) -> str:
    for name, tensor in known:
        if output is tensor:
            return f"{name} itself"
    for name, tensor in known:
        if _strided(tensor) and _share(output, tensor):
            return f"a view of {name}, {_offset(output, tensor)} elements from its first"
    return "memory of its own"


def _share(one: Any, other: Any) -> bool:
    # Tensors without elements have no memory that anybody could see.
    return bool(
        one.numel()
        and other.numel()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _offset(one: Any, other: Any) -> float:
    return float(one.data_ptr() - other.data_ptr()) / int(other.element_size())
