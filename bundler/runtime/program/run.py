# SPDX-License-Identifier: Apache-2.0
"""`ProgramRunner`: runs a `ProgramPlan`.

What allocates, views and calls operators is a `ProgramMemory`: torch's where a program has calls of
operators, or whatever the caller's tensors come from. An operator that fails says at which step. No
compiler and no Triton is needed, and no torch unless the memory is torch's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from bundler.errors import ConfigError
from bundler.format.digest import sha256
from bundler.runtime.program.bound_plan import BoundPlan, Environment, input_place
from bundler.runtime.program.device_tensors import host_tensor
from bundler.runtime.program.program_inputs import (
    MOST_SIGNATURES,
    ProgramInputs,
    Signature,
    is_lazy,
)
from bundler.runtime.program.program_plan import HOST, Cooperation, ProgramPlan
from bundler.runtime.program.tensor_addresses import ALIGNED_BYTES

# From how many seeds to a tensor that holds them.
SeedSource = Callable[[int], Any]
_SEED_BYTES = 8
# Of a kernel, its arguments by position, and the sizes of its grid.
Launcher = Callable[[str, Sequence[Any], Mapping[str, int]], None]


class ProgramMemory(Protocol):
    """Where tensors of a program come from.

    Sizes are numbers here.  One whose `host` is true has tensors of the host, for launchers that no
    GPU is behind.  One with a `current_device()` makes its device the current one while a program
    runs in the context that it returns.
    """

    def allocate(self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a new tensor, whose elements may be anything."""

    def view(
        self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> Any:
        """Return a tensor's memory seen in another way."""

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call an ATen operator."""

    def integers(self, numbers: Sequence[int]) -> Any:
        """Return a new int64 tensor that holds these numbers; asked for by programs with random
        numbers alone.
        """

    def counters(self, count: int) -> Any:
        """Return an int32 tensor that no other launch uses meanwhile, of zeros, or as the last
        launch on the current stream left it; a memory without it runs no launches whose programs
        wait for each other.
        """


class BoundLauncher(Protocol):
    """What is asked once for each launch of a plan, and in place of a `Launcher` saves the look at
    the kernel's name in each call.
    """

    def bound(self, kernel: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel with the grid of these sizes, given its arguments by
        position.
        """

    def choose(
        self, step: Cooperation, together: Callable[..., None], apart: Callable[..., None]
    ) -> Callable[..., None]:
        """Return what runs one of two forms of a computation; a launcher without it runs the one
        that needs several launches.
        """


class SeedStream:
    """Returns other seeds in each call, and the same ones in the same order for the same seed.

    One seed decides all random numbers of a program, by SHA-256 of the seed, the number of the call
    and the place, so that a program that is replayed without torch draws the same numbers in every
    process.  A program that torch runs has torch's generator in its place.

    Args:
        memory: where they are put.
        seed: any integer; None takes one from the operating system.
    """

    def __init__(self, memory: Any, seed: int | None = None) -> None:
        self._memory = memory
        self._seed = int.from_bytes(os.urandom(_SEED_BYTES), "little") if seed is None else seed
        self._calls = itertools.count()

    def __call__(self, count: int) -> Any:
        """Return a tensor of `count` seeds.

        Raises:
            ConfigError: the memory has no `integers`.
        """
        integers = getattr(self._memory, "integers", None)
        if integers is None:
            raise ConfigError(
                "the program draws random numbers: expected a memory with a method integers, got"
                f" {type(self._memory).__name__}",
                got=type(self._memory).__name__,
            )
        return integers(seed_numbers(self._seed, next(self._calls), count))


def seed_numbers(seed: int, call: int, count: int) -> list[int]:
    """Return the seeds of one call, as int64."""
    texts = (f"{seed}:{call}:{place}".encode() for place in range(count))
    return [int.from_bytes(sha256(text)[:_SEED_BYTES], "little", signed=True) for text in texts]


class ProgramRunner:
    """Runs a program; a call takes its inputs by position, and returns a tuple.

    Args:
        plan: what to do.
        launch: launches a kernel.
        memory: where tensors come from.
        constants: tensors that the program holds, by name.
        seeds: what random numbers come from; None for another stream in each process.
        separate: refuse inputs that share memory with one that the program changes; torch.compile
            sees to that by itself.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        launch: Launcher | BoundLauncher,
        memory: ProgramMemory,
        constants: Mapping[str, Any] | None = None,
        seeds: SeedSource | None = None,
        *,
        separate: bool = True,
    ) -> None:
        self.plan = plan
        #: How often an input or a result of an operator was copied, since it lay elsewhere than
        #: traced.
        self.copies = 0
        self._inputs = ProgramInputs(
            plan,
            host=bool(getattr(memory, "host", False)),
            device=getattr(memory, "device", None),
            separate=separate,
            take=getattr(memory, "tensor", None),
            recognizer=getattr(memory, "recognizer", None),
        )
        self._current_device = getattr(memory, "current_device", nullcontext)
        #: Where seeds of random numbers come from.
        self.seeds = seeds or SeedStream(memory)
        held = {name: _held(plan, name, one, memory) for name, one in (constants or {}).items()}
        missing = [name for name in plan.constants if name not in held]
        if missing:
            raise ConfigError(
                f"the program needs the constants {', '.join(missing)}; pass them as constants=, or"
                " a file that has them as weights=",
                missing=missing,
            )
        launcher: Any = launch if hasattr(launch, "bound") else _EachTime(launch)
        self._environment = Environment(
            plan,
            memory,
            held,
            launcher.bound,
            self._copied,
            self._inputs.may_be_anywhere,
            getattr(launcher, "choose", None),
        )
        # Sizes -> the plan, bound for them.
        self._plans: dict[Any, BoundPlan] = {}

    def __call__(self, *inputs: Any, seed: int | None = None) -> tuple[Any, ...]:
        """Run the program.

        Args:
            *inputs: tensors and numbers, as the example's.
            seed: decides the random numbers of this call; None takes the next ones of the runner's
                stream.

        Raises:
            ConfigError: too many or too few inputs, or one with a dtype, sizes, strides or a device
                that the program was not generated for.
            UnsupportedOperator: an operator returned other sizes or another dtype than torch
                traced.
        """
        with self._current_device():
            return self._run(inputs, seed)

    def consume(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the program as a call does, and empty the list: tensors that nobody else has are
        freed as soon as they were read, so that what a backward pass has is not held to its end.

        Inputs that the plan says are written over hold other numbers then.
        """
        with self._current_device():
            return self._run(inputs, None, consume=True)

    def _run(
        self, inputs: Sequence[Any], seed: int | None, *, consume: bool = False
    ) -> tuple[Any, ...]:
        taken, signature = self._inputs.taken(inputs)
        return self._called(taken, signature, seed, inputs if consume else None)

    def _called(
        self, taken: list[Any], signature: Signature, seed: int | None, emptied: Any = None
    ) -> tuple[Any, ...]:
        """Run all steps.

        Args:
            taken: the inputs, checked.
            signature: of them.
            seed: of the call.
            emptied: a list of the inputs that is emptied, so that they are freed once read.
        """
        consume = emptied is not None
        if consume:
            emptied.clear()
        if signature.bound is None:
            signature.bound = self._bound_for(signature.sizes)
        bound: BoundPlan = signature.bound
        moved = {number: taken[number] for number in self._inputs.to_copy(taken, signature)}
        for number in moved:
            taken[number] = self._readable(number, taken[number])
        copies = {number: taken[number] for number in moved if self.plan.inputs[number].changed}
        seeds = self.seeds if seed is None else SeedStream(self._environment.memory, seed)
        values = bound.run(taken, signature.sizes, seeds, consume=consume)
        for number, value in moved.items():
            if number in copies:
                value.copy_(copies[number])
            # A result that is the input, or a view of it, is the caller's.
            values[input_place(number)] = value
        return bound.results(values)

    def _bound_for(self, sizes: Mapping[str, Any]) -> BoundPlan:
        # A float is passed on, and decides nothing.
        key = tuple((n, type(size), size) for n, size in sizes.items() if type(size) is not float)
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= MOST_SIGNATURES:
                self._plans.clear()
            found = self._plans[key] = BoundPlan(self._environment, sizes)
        return found

    def _readable(self, number: int, value: Any) -> Any:
        """Return an input's elements as they are, and at a multiple of 16 bytes, which the kernels
        count on.
        """
        if not hasattr(value, "stride"):
            raise ConfigError(
                f"input {number} of the program: expected an address that is a multiple of "
                f"{ALIGNED_BYTES} bytes, as the example's, got {value.data_ptr():#x}; "
                "pass a copy of it",
                input=number,
                got=value.data_ptr(),
            )
        return self._copied(value, value.shape, value.stride())

    def _copied(self, value: Any, sizes: Sequence[int], strides: Sequence[int]) -> Any:
        memory = self._environment.memory
        copied = getattr(memory, "copied", None)
        if copied is None:
            raise ConfigError(
                "the program has to copy a tensor of torch: expected a memory with a method "
                f"`copied`, as TorchMemory, got {type(memory).__name__}",
                got=type(memory).__name__,
            )
        self.copies += 1
        return copied(value, sizes, strides)


def _held(plan: ProgramPlan, name: str, tensor: Any, memory: Any) -> Any:
    """Return a constant as launches take it."""
    take = getattr(memory, "tensor", None)
    if take is None:
        return _resolved(tensor, memory)
    weight = plan.weights.get(name)
    on_host = weight is not None and weight.spec.device == HOST
    return host_tensor(tensor) if on_host else take(tensor)


def _resolved(tensor: Any, memory: Any) -> Any:
    """Return a tensor that lies as this one does, and whose memory holds its numbers."""
    return memory.copied(tensor, tensor.shape, tensor.stride()) if is_lazy(tensor) else tensor


class _EachTime:
    """A `Launcher` as a `BoundLauncher`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def bound(self, kernel: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        return lambda *arguments: self._launch(kernel, arguments, sizes)
