# SPDX-License-Identifier: Apache-2.0
"""`ProgramInputs`: whether a program may be run with some inputs, looked at once for each
signature.

A program is generated for the dtypes, strides and alignment of its example's tensors, and reads
wrong memory for others.  `run` asks before each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.heuristics.launch_expressions import evaluate
from bundler.runtime.program.device_tensors import device_tensor, host_tensor, item_bytes, span
from bundler.runtime.program.host_values import host_value
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    HOST,
    Input,
    Launch,
    ProgramPlan,
    TensorSpec,
)
from bundler.runtime.program.tensor_addresses import misplaced

# Calls with ever new shapes forget the old ones together.
MOST_SIGNATURES = 256
# How often what recognizes a signature is made: inputs that differ in what no program looks at, as
# in whether gradients follow, are looked at one by one then.
_MOST_RECOGNIZERS = 4
# What says whether tensors have the types, dtypes, sizes, strides, devices and marks of some.
RecognizerMaker = Callable[[Sequence[Any]], Callable[..., bool] | None]
# Of what keeps the random numbers of attention for its gradient.
_STATE_TYPES, _MOST_STATE = frozenset({"int64", "uint64"}), 2


@dataclass(eq=False, slots=True)
class Signature:
    """What is known of calls whose inputs look alike.

    Attributes:
        sizes: that the inputs give, and the plan's values.
        lazy: numbers of inputs whose memory does not hold their numbers: see `is_lazy`.
        bound: what runs them, which the runner keeps here.
        graph: what runs them as a CUDA graph, likewise.
        recognizer: tells such calls quickly, None until one came twice.
        recognizers: how many were made.
    """

    sizes: dict[str, Any]
    lazy: tuple[int, ...] = ()
    bound: Any = None
    graph: Any = None
    recognizer: InputRecognizer | None = None
    recognizers: int = 0


class InputRecognizer:
    """Tells quickly whether inputs look like those of an earlier call; what it does not know may
    look like them, too.

    Args:
        inputs: of the plan.
        values: of the earlier call.
        make: the memory's.
    """

    def __init__(
        self, inputs: Sequence[Input], values: Sequence[Any], make: RecognizerMaker
    ) -> None:
        self._count = len(inputs)
        self._tensors = [n for n, item in enumerate(inputs) if item.spec is not None]
        self._numbers = [(n, item) for n, item in enumerate(inputs) if item.spec is None]
        self._given = self._numbers_of(values)
        self._check = make([values[n] for n in self._tensors]) if self._tensors else None

    def _numbers_of(self, values: Sequence[Any]) -> list[Any]:
        return [_number(item, values[n]) for n, item in self._numbers]

    def knows(self, values: Sequence[Any]) -> bool:
        """Whether a call's inputs look like those."""
        if self._check is None or len(values) != self._count:
            return False
        if not self._numbers:
            return self._check(*values)
        if self._numbers_of(values) != self._given:
            return False
        return self._check(*[values[n] for n in self._tensors])


class ProgramInputs:
    """Checks inputs, and reads sizes from them.

    Threads may share one: a signature that two of them look at is looked at twice.

    Args:
        plan: of the program.
        host: take tensors of the host.
        device: where tensors have to be, as their `device` says; None looks at no device.
        separate: refuse inputs that share memory with one that the program changes.
        take: makes a tensor as launches take it of one of any library; None for `device_tensor`,
            which takes torch's as they are.
        recognizer: the memory's, of torch's tensors; None for one without.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        *,
        host: bool,
        device: Any = None,
        separate: bool = True,
        take: Callable[[Any], Any] | None = None,
        recognizer: RecognizerMaker | None = None,
    ) -> None:
        self._inputs, self._places, self._limits = plan.inputs, plan.sizes, plan.limits
        self._guards, self._values = plan.guards, plan.values
        self._device, self._is_torchs = device, take is None
        self._take = take or partial(device_tensor, host=host)
        self._read = frozenset(read_by_kernels(plan))
        self._tensors = [number for number, item in enumerate(plan.inputs) if item.spec is not None]
        self._aligned = tuple(n for n in self._tensors if plan.inputs[n].aligned)
        changed = [n for n in self._tensors if plan.inputs[n].changed]
        self._apart = changed if separate and len(self._tensors) > 1 else []
        #: Whether addresses decide that a call may be run, too, which every call looks at then.
        self.looks_at_addresses = bool(self._apart)
        self._known: dict[Any, Signature] = {}
        self._recognizer_of = recognizer if take is None else None
        self._latest = Signature({})

    def taken(self, inputs: Sequence[Any]) -> tuple[list[Any], Signature]:
        """Return inputs as launches take them, and what is known of calls like this one.

        Raises:
            ConfigError: too many or too few, or one that the program was not generated for.
        """
        if len(inputs) != len(self._inputs):
            raise ConfigError(
                f"the program takes {len(self._inputs)} inputs, got {len(inputs)}", got=len(inputs)
            )
        values, known = list(inputs), self._latest
        if known.recognizer is None or not known.recognizer.knows(inputs):
            values, known = self._looked_at(inputs)
        if self._apart:
            self._check_apart(values)
        return values, known

    def _looked_at(self, inputs: Sequence[Any]) -> tuple[list[Any], Signature]:
        """Return the same as `taken` of inputs that are not known to look like the latest."""
        known = None
        if self._is_torchs:
            try:
                known = self._known.get(self._key(inputs))
            except AttributeError:  # one is no tensor of torch, which alone are taken as they are
                known = None
        if known is None:
            return self._met(inputs)
        came_again = known is self._latest or known.recognizer is None
        if came_again and self._recognizer_of and known.recognizers < _MOST_RECOGNIZERS:
            known.recognizer = InputRecognizer(self._inputs, inputs, self._recognizer_of)
            known.recognizers += 1
        self._latest = known
        return list(inputs), known

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what tells calls with torch's tensors apart."""
        return tuple(
            [
                (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.device,
                    value.is_neg() or value.is_conj(),
                )
                if item.spec is not None
                else _number(item, value)
                for item, value in zip(self._inputs, inputs, strict=True)
            ]
        )

    def _met(self, inputs: Sequence[Any]) -> tuple[list[Any], Signature]:
        """Return the same as `taken` of inputs of any library."""
        values = [
            value if item.spec is None else self._tensor(item.spec, value)
            for item, value in zip(self._inputs, inputs, strict=True)
        ]
        key = tuple(
            [
                _signature(value) if item.spec is not None else _number(item, value)
                for item, value in zip(self._inputs, values, strict=True)
            ]
        )
        known = self._known.get(key)
        if known is None:
            lazy = tuple(number for number in self._tensors if is_lazy(values[number]))
            known = Signature(self._checked(values), lazy)
            if len(self._known) >= MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = known
        return values, known

    def _tensor(self, spec: TensorSpec, value: Any) -> Any:
        return host_tensor(value) if spec.device == HOST else self._take(value)

    def may_be_anywhere(self, name: str, dtype: str, sizes: Sequence[int]) -> bool:
        """Whether a tensor may lie on another device than traced.

        Attention hands its seed and its offset to its gradient: torch traces these on the GPU, and
        has them on the host unless a CUDA graph is captured.
        """
        small = dtype in _STATE_TYPES and math.prod(sizes) <= _MOST_STATE
        return small and name not in self._read

    def to_copy(self, values: list[Any], signature: Signature) -> list[int]:
        """Return the numbers of inputs that kernels cannot read where they lie: they begin at no
        multiple of 16 bytes, where kernels count on it, or are lazy.
        """
        odd = misplaced(values, self._aligned)
        return [*{*odd, *signature.lazy}] if signature.lazy else odd

    def _checked(self, values: Sequence[Any]) -> dict[str, Any]:
        for number in self._tensors:
            spec, rank = self._inputs[number].spec, len(values[number].shape)
            if spec is not None and rank != len(spec.sizes):
                raise _refusal(number, "dimensions", len(spec.sizes), rank)
        sizes = {name: _size_at(values[n], place) for name, (n, place) in self._places.items()}
        for text in self._guards:
            if not host_value(text, sizes):
                raise ConfigError(
                    f"the program holds for sizes with {text}, got {sizes}; generate it for an"
                    " example with these",
                    expected=text,
                    got=sizes,
                )
        sizes |= {name: host_value(text, sizes) for name, text in self._values.items()}
        for number, (item, value) in enumerate(zip(self._inputs, values, strict=True)):
            if item.spec is not None:
                self._check_tensor(number, item.name, item.spec, value, sizes)
            elif item.number is not None and _number(item, value) != _number(item, item.number):
                raise _refusal(number, "the number", item.number, value)
        self._check_limits(sizes)
        return sizes

    def _check_tensor(
        self, number: int, name: str, spec: TensorSpec, value: Any, sizes: Mapping[str, int]
    ) -> None:
        dtype = dtype_of(value)
        if dtype != spec.dtype:
            raise _refusal(number, "dtype", spec.dtype, dtype)
        expected = tuple(evaluate(size, sizes) for size in spec.sizes)
        got = tuple(int(size) for size in value.shape)
        if got != expected:
            raise _refusal(number, "sizes", expected, got, ", or with dynamic=True")
        strides = tuple(evaluate(stride, sizes) for stride in spec.strides)
        if not same_strides(expected, strides, strides_of(value)):
            raise _refusal(number, "strides", strides, strides_of(value))
        device = getattr(value, "device", None)
        if spec.device == HOST or self.may_be_anywhere(name, dtype, got):
            return
        if self._device is not None and device is not None and device != self._device:
            raise _refusal(number, "device", str(self._device), str(device))

    def _check_limits(self, sizes: Mapping[str, int]) -> None:
        for text, most in self._limits.items():
            found = evaluate(text, sizes)
            if found > most:
                raise ConfigError(
                    f"the program's indices have 32 bits: expected {text} to be at most {most}, "
                    f"got {found}; generate it with GenerateOptions(wide_indices=True)",
                    expected=most,
                    got=found,
                )

    def _check_apart(self, values: Sequence[Any]) -> None:
        """Raise where an input that the program changes overlaps another: what is read of that one
        would depend on the order of kernels.
        """
        spans = sorted((*_span(values[n]), n) for n in self._tensors)
        reach, owner = 0, -1
        for first, last, number in spans:
            if first < reach and (number in self._apart or owner in self._apart):
                one, other = sorted((owner, number))
                raise ConfigError(
                    f"inputs {one} and {other} of the program share memory, and it changes one of "
                    "them: expected tensors apart; pass a clone of one",
                    got=(one, other),
                )
            if last > reach:
                reach, owner = last, number


def read_by_kernels(plan: ProgramPlan) -> Iterator[str]:
    """Yield the names of the tensors that kernels are given."""
    for step in plan.every_step:
        if isinstance(step, Launch):
            for item in step.arguments:
                if isinstance(item, str) and item.startswith(BUFFER_MARK):
                    yield item.removeprefix(BUFFER_MARK)


def _size_at(value: Any, place: int) -> Any:
    """Return what stands at a place of an input: see `ProgramPlan.sizes`."""
    if place < 0:
        return value if type(value) in {int, float, bool} else int(value)
    rank = len(value.shape)
    return int(value.shape[place] if place < rank else strides_of(value)[place - rank])


def dtype_of(value: Any) -> str:
    """Return a tensor's dtype by torch's name."""
    return str(value.dtype).removeprefix("torch.")


def strides_of(value: Any) -> tuple[int, ...]:
    """Return a tensor's strides in elements."""
    return tuple(value.stride() if hasattr(value, "stride") else value.strides)


def same_strides(sizes: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> bool:
    """Whether every element is at the same place: strides of dimensions of one element say
    nothing.
    """
    if tuple(expected) == tuple(got) or 0 in sizes:
        return True
    return all(a == b for size, a, b in zip(sizes, expected, got, strict=True) if size != 1)


def is_lazy(tensor: Any) -> bool:
    """Whether a tensor of torch is the negative, or the conjugate, of what lies in its memory, as
    `x.conj().imag` is.
    """
    return hasattr(tensor, "is_neg") and bool(tensor.is_neg() or tensor.is_conj())


def _signature(tensor: Any) -> Any:
    if hasattr(tensor, "stride"):  # as `_key` has it
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_lazy(tensor)
    return tensor.shape, tensor.strides, tensor.dtype


def _number(item: Input, value: Any) -> Any:
    """Return a number with its type, since 1, 1.0 and True are equal, and a float by its digits,
    since 0.0 and -0.0 are; None for an argument that nobody reads.
    """
    if not item.name and item.number is None:
        return None
    return type(value), value.hex() if type(value) is float else value


def _span(value: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    first = value.data_ptr()
    return first, first + span(value.shape, strides_of(value)) * item_bytes(dtype_of(value))


def _refusal(number: int, what: str, expected: Any, got: Any, more: str = "") -> ConfigError:
    return ConfigError(
        f"input {number} of the program: expected {what} {expected}, got {got}; "
        f"generate the program for these{more}",
        input=number,
        expected=expected,
        got=got,
    )
