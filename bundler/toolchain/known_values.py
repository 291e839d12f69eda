# SPDX-License-Identifier: Apache-2.0
"""`KnownValues`: what small integer tensors of a captured program hold, although its tensors have no memory.

::

    cu_seqlens = torch.tensor([0, 100, 256], device="cuda")     a fake tensor; its value is known
    lengths = cu_seqlens.diff().tolist()                        computed for real, on the CPU: [100, 156]

Shapes of a program often follow from such tensors: offsets of sequences, indices of chunks.  Each operation whose inputs are known
is done for real beside the fake one, with views of the same memory, so that a write to one is seen by all.
Used by `fake_tensors.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

# Tensors of indices and offsets are this small; computing larger ones would take as long as the program itself.
LARGEST = 1 << 16
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass
class KnownValue:
    """What a tensor holds.

    Attributes:
        real: the value, on the CPU.
        sampled: it came of random numbers, or a kernel that did not run may have written to the tensor: one value of many.
    """

    real: Any
    sampled: bool


class _Unknown(Exception):
    """An input is not known."""


class KnownValues:
    """The values of one captured program.  Guarantees: `real` is what the operations gave on the CPU.  Not thread-safe."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()

    def of(self, tensor: Any) -> KnownValue | None:
        """Return what a fake tensor holds; None when that is not known."""
        found: KnownValue | None = self._values.get(tensor)
        return found

    def may_be_written(self, tensor: Any) -> None:
        """Note that a kernel got a tensor, and may write to it."""
        known = self.of(tensor) if isinstance(tensor, FakeTensor) else None
        if known is not None:
            known.sampled = True

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Do for real what was done with fake tensors, where its inputs are known and its result is small."""
        mutates = function._schema.is_mutable  # noqa: SLF001  # torch's own description of an operation
        small = [item for item in _tensors(result) if _is_small(item)]
        if not small and not mutates:
            return
        computed = self.compute(function, args, kwargs)
        if computed is None:
            if mutates:
                self._forget(_tensors((args, kwargs)))
            return
        for fake, real in zip(_tensors(result), _tensors(computed.real), strict=False):
            if _is_small(fake):
                self._values[fake] = KnownValue(real, computed.sampled)

    def compute(self, function: Any, args: Any, kwargs: Any) -> KnownValue | None:
        """Return what an operation gives for real; None when an input is not known or the CPU cannot do it."""
        name = str(function)
        tensors = _tensors((args, kwargs))
        if not tensors and "empty" in name:
            return None
        sampled = torch.Tag.nondeterministic_seeded in function.tags

        def known(tensor: Any) -> Any:
            nonlocal sampled
            if not isinstance(tensor, FakeTensor):
                return tensor
            value = self.of(tensor)
            if value is None:
                raise _Unknown
            sampled = sampled or value.sampled
            return value.real

        with contextlib.suppress(_Unknown, *_FAILURES):
            real_args, real_kwargs = tree_map_only(torch.Tensor, known, (args, kwargs))
            cpu = torch.device("cpu")
            real_args, real_kwargs = tree_map_only(
                torch.device, lambda _: cpu, (real_args, real_kwargs)
            )
            with no_dispatch():
                return KnownValue(function(*real_args, **real_kwargs), sampled)
        return None

    def remember(self, tensor: Any, value: KnownValue) -> None:
        """Note what a tensor holds."""
        if _is_small(tensor):
            self._values[tensor] = value

    def _forget(self, tensors: list[Any]) -> None:
        """Forget every value that shares memory with one of these tensors, since one of them was written to."""
        known = [self.of(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)]
        written = {value.real.untyped_storage().data_ptr() for value in known if value is not None}
        if not written:
            return
        for tensor, value in list(self._values.items()):
            if value.real.untyped_storage().data_ptr() in written:
                del self._values[tensor]


def _is_small(tensor: Any) -> bool:
    return (
        not tensor.dtype.is_floating_point
        and not tensor.dtype.is_complex
        and tensor.numel() <= LARGEST
    )


def _tensors(tree: Any) -> list[Any]:
    return list(_each_tensor(tree))


def _each_tensor(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _each_tensor(item)
    elif isinstance(tree, dict):
        yield from _each_tensor(list(tree.values()))
