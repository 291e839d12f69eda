# SPDX-License-Identifier: Apache-2.0
"""`CheckedMemory`: memory for a plan of somebody else: views and operators stay in their tensors.

`load_program` puts it around the memory that a user gives.  What the memory raises becomes a typed
error; a plan that was made in this process has its memory itself, and so the errors of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from bundler.errors import BundlerError, OperatorFailed
from bundler.runtime.program.device_tensors import DeviceTensor
from bundler.runtime.program.operator_arguments import ArgumentRefused, check_arguments

_SHOWN = 400


class CheckedMemory:
    """A `ProgramMemory` whose every failure is typed.

    Args:
        memory: that has the tensors.
        trusted: whether operators may be called with whatever arguments the plan has.
    """

    def __init__(self, memory: Any, *, trusted: bool = False) -> None:
        self._memory, self._trusted = memory, trusted
        self.host = bool(getattr(memory, "host", False))
        self.device: Any = getattr(memory, "device", None)
        # Only programs with random numbers ask for the first, those that copy tensors for the
        # second.
        self.integers: Any = getattr(memory, "integers", None)
        self.copied: Any = getattr(memory, "copied", None)
        self.graphs: Any = getattr(memory, "graphs", None)
        self.current_device: Any = getattr(memory, "current_device", nullcontext)

    def allocate(self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a new tensor.

        Raises:
            OperatorFailed: there is none of such sizes, or not so much memory.
        """
        with _typed("allocate", f"an allocation of {dtype}, sizes {sizes}, strides {strides}"):
            return self._memory.allocate(dtype, sizes, strides)

    def view(
        self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Any:
        """Return a tensor's memory seen in another way.

        Raises:
            OperatorFailed: not all of it is the tensor's.
        """
        with _typed("view", f"a view of sizes {sizes}, strides {strides}, offset {offset}"):
            held, reach = _held(tensor), _reach(sizes, strides)
            if min(offset, 0, *sizes, *strides) < 0:
                raise ArgumentRefused("expected numbers from 0")
            if held is not None and reach and offset + reach > held:
                raise ArgumentRefused(f"expected at most the {held} elements of its tensor")
            return self._memory.view(tensor, sizes, strides, offset)

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call an operator.

        Raises:
            OperatorFailed: its arguments are refused, by us or by torch.
        """
        with _typed(operator, f"operator {operator}", arguments, keywords):
            if not self._trusted:
                self._refuse_missing(operator, arguments, keywords)
                check_arguments(operator, arguments, keywords)
            return self._memory.call(operator, arguments, keywords)

    def _refuse_missing(
        self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        lacking = getattr(self._memory, "lacking", None)
        name = None if lacking is None else lacking(operator, arguments, keywords)
        if name is not None:
            raise ArgumentRefused(f"expected a tensor for {name}, got None")


@contextmanager
def _typed(
    operator: str,
    what: str,
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    try:
        yield
    except BundlerError:
        raise
    # The edge to a user's memory and to torch, whose operators raise whatever they like.
    except Exception as error:
        given = [_shown(item) for item in arguments]
        given += [f"{name}={_shown(item)}" for name, item in (keywords or {}).items()]
        text = f", given {', '.join(given)}"[:_SHOWN] if given else ""
        raise OperatorFailed(
            f"{what}{text}: {type(error).__name__}: {f'{error}':.{_SHOWN}}; "
            "look at the program's inputs, or generate it anew",
            operator=operator,
        ) from error


def _shown(item: Any) -> str:
    if isinstance(item, list):
        return f"[{', '.join(map(_shown, item))}]"
    return f"{item.dtype}{list(item.shape)}" if hasattr(item, "shape") else repr(item)


def _held(tensor: Any) -> int | None:
    """Return how many elements a tensor spans; None where its library does not say."""
    if isinstance(tensor, DeviceTensor):
        return _reach(tensor.shape, tensor.strides)
    return _reach(tensor.shape, tensor.stride()) if hasattr(tensor, "stride") else None


def _reach(sizes: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
