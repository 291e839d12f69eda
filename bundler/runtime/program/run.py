# SPDX-License-Identifier: Apache-2.0
"""`ProgramRunner`: runs a `ProgramPlan`; `load_program` takes plan and kernels from a bundle.

    program = bundler.runtime.load_program("model.tbundle", memory=memory)
    (output,) = program(x, weight)

What allocates, views and calls operators is a `ProgramMemory`: torch's where a program has calls of
operators, or whatever the caller's tensors come from. An operator that fails says at which step. No
compiler and no Triton is needed, and no torch unless the memory is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

from bundler.errors import (
    CannotLaunchStatically,
    ConfigError,
    FormatError,
    NotFound,
    Untrusted,
)
from bundler.format.bundle import Bundle
from bundler.format.entries import Opaque
from bundler.format.launch_spec import TuningRecord
from bundler.format.program_paths import is_code_path, program_name
from bundler.runtime.heuristics.launch_grids import LaunchGrid, open_grid
from bundler.runtime.launch.bundle_kernels import Kernels, load
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.runtime.program.allowed_operators import unlisted
from bundler.runtime.program.bound_plan import BoundPlan, Environment, input_place
from bundler.runtime.program.checked_memory import CheckedMemory
from bundler.runtime.program.plan_reading import read_plan
from bundler.runtime.program.program_inputs import (
    ALIGNED_BYTES,
    MOST_SIGNATURES,
    ProgramInputs,
    is_lazy,
)
from bundler.runtime.program.program_plan import (
    KernelChoice,
    KernelEntry,
    OperatorStep,
    ProgramPlan,
)
from bundler.runtime.program.seed_stream import SeedSource, SeedStream
from bundler.trust.admission import admit

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


class BoundLauncher(Protocol):
    """What is asked once for each launch of a plan, and in place of a `Launcher` saves the look at
    the kernel's name in each call.
    """

    def bound(self, kernel: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel with the grid of these sizes, given its arguments by
        position.
        """


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
        )
        self._current_device = getattr(memory, "current_device", nullcontext)
        self._seeds = seeds or SeedStream(memory)
        held = {name: _resolved(tensor, memory) for name, tensor in (constants or {}).items()}
        missing = [name for name in plan.constants if name not in held]
        if missing:
            raise ConfigError(
                f"the program needs the constants {', '.join(missing)}; pass them as constants=",
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
        """
        with self._current_device():
            return self._run(inputs, None, consume=True)

    def _run(
        self, inputs: Sequence[Any], seed: int | None, *, consume: bool = False
    ) -> tuple[Any, ...]:
        taken, signature = self._inputs.taken(inputs)
        if consume:
            assert isinstance(inputs, list)
            inputs.clear()
        if signature.bound is None:
            signature.bound = self._bound_for(signature.sizes)
        bound: BoundPlan = signature.bound
        moved = {number: taken[number] for number in self._inputs.to_copy(taken, signature)}
        for number in moved:
            taken[number] = self._readable(number, taken[number])
        copies = {number: taken[number] for number in moved if self.plan.inputs[number].changed}
        seeds = self._seeds if seed is None else SeedStream(self._environment.memory, seed)
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


def _resolved(tensor: Any, memory: Any) -> Any:
    """Return a tensor that lies as this one does, and whose memory holds its numbers."""
    return memory.copied(tensor, tensor.shape, tensor.stride()) if is_lazy(tensor) else tensor


class _EachTime:
    """A `Launcher` as a `BoundLauncher`."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def bound(self, kernel: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        return lambda *arguments: self._launch(kernel, arguments, sizes)


# From a bundle ----------------------------------------------------------------------------------


def load_program(
    bundle: Bundle | str | os.PathLike[str],
    *,
    memory: ProgramMemory,
    name: str | None = None,
    driver: Driver | None = None,
    constants: Mapping[str, Any] | None = None,
    seed: int | None = None,
    trust: Literal["kernels", "code", "signed"] = "kernels",
) -> ProgramRunner:
    """Return a program of a bundle, ready to run without a compiler.

    Args:
        bundle: an open bundle, or the path of one.
        memory: where its tensors come from.
        name: of the program; None where the bundle has one only.
        driver: which GPUs to use; None opens that of the machine.
        constants: tensors that the program holds, by name.
        seed: of its random numbers: equal seeds give equal numbers in the first call, in the
            second, and so on. None: other numbers in each process.
        trust: `code` for a program that calls operators of your own or of other libraries, which
            run on the CPU and do what they like; `signed` where a trusted key has to vouch for
            that.

    Raises:
        NotFound: the bundle has no such program, none of its kernels is for the device, or no
            library registers an operator that it calls.
        FormatError, DigestMismatch: the bundle or the plan in it is damaged.
        Untrusted: it calls operators that need trust in code, or a signature is required that is
            not there.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    entry, code = _plan_of(opened, name)
    if code and admit(opened, trust).trust != "code":
        raise Untrusted(
            f"program {program_name(entry.path)!r}: it calls operators that run as code of their"
            " own; pass trust='code' if you know who made the bundle, or trust='signed' where a"
            " key that you trust signed it for code",
            path=entry.path,
        )
    plan = read_plan(opened.read(entry.artifact))
    others = () if code else unlisted(plan)
    if others:
        raise Untrusted(
            f"program {program_name(entry.path)!r}: {', '.join(others[:8])}: expected operators"
            " that any program may call; build the program anew with this version, which marks it"
            " as code",
            operators=others,
        )
    _find_operators(plan, memory)
    checked = CheckedMemory(memory, trusted=code)
    seeds = SeedStream(memory, seed)
    if not plan.kernels:  # it returns inputs, views of them, and what operators give
        admit(opened)
        return ProgramRunner(plan, _launch_nothing, checked, constants, seeds)
    launch = StaticLauncher(plan, load(opened, driver=driver), opened.tuning_records)
    return ProgramRunner(plan, launch, checked, constants, seeds)


def _plan_of(bundle: Bundle, name: str | None) -> tuple[Opaque, bool]:
    """Return the file of a program's plan, and whether it is marked as code."""
    plans: dict[str, list[Opaque]] = {}
    for entry in bundle.opaque:
        found = program_name(entry.path)
        if found is not None:
            plans.setdefault(found, []).append(entry)
    chosen = name if name is not None else next(iter(plans)) if len(plans) == 1 else ""
    if chosen not in plans:
        raise NotFound(
            f"no program {name or ''!r} in the bundle; there are"
            f" {', '.join(sorted(plans)) or 'none'}",
            name=name,
        )
    entry, *others = plans[chosen]
    if others:
        raise FormatError(
            f"program {chosen!r}: expected one plan in the bundle, got {entry.path} and "
            f"{others[0].path}",
            path=others[0].path,
        )
    return entry, is_code_path(entry.path)


def _find_operators(plan: ProgramPlan, memory: Any) -> None:
    """Raise `NotFound` where a plan calls an operator that torch does not have now."""
    find = getattr(memory, "operator", None)
    if find is not None:
        for name in dict.fromkeys(s.operator for s in plan.steps if isinstance(s, OperatorStep)):
            find(name)


def _launch_nothing(name: str, _arguments: Sequence[Any], _sizes: Mapping[str, int]) -> None:
    raise NotFound(f"{name}: the program has no kernels", name=name)


class StaticLauncher:
    """Launches a plan's kernels from a bundle, each with the candidate for the current device.

    Args:
        plan: of the program.
        kernels: of the bundle.
        records: of kernels that were tuned, which choose among the candidates that a kernel was
            compiled with; without one for a kernel, and for the current device, the first is
            launched.
    """

    def __init__(
        self, plan: ProgramPlan, kernels: Kernels, records: Sequence[TuningRecord] = ()
    ) -> None:
        self._entries, self._kernels, self._records = plan.kernels, kernels, records
        self._driver = kernels.driver
        self._grids = {name: open_grid(entry.grid, {}) for name, entry in plan.kernels.items()}

    def bound(self, name: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel with the grid of some sizes, given its arguments."""
        current_device = self._driver.device
        known: dict[int, tuple[StaticKernel, LaunchGrid, dict[str, Any]]] = {}

        def launch(*arguments: Any) -> None:
            device = current_device()
            found = known.get(device)
            if found is None:
                found = known[device] = self._on(name, device, sizes)
            kernel, grid, keywords = found
            if 0 not in grid:
                kernel[grid](*arguments, **keywords)

        return launch

    def _on(
        self, name: str, device: int, sizes: Mapping[str, int]
    ) -> tuple[StaticKernel, LaunchGrid, dict[str, Any]]:
        """Return a kernel, its grid, and its blocks and options on a device."""
        target = f"{self._driver.backend}:{self._driver.properties(device).arch}"
        choice = _choice(name, self._entries[name], target, self._records)
        keywords = {
            **choice.blocks,
            "num_warps": choice.num_warps,
            "num_stages": choice.num_stages,
            **choice.options,
        }
        return self._kernels[name], self._grids[name](choice.blocks, sizes), keywords


def _choice(
    name: str, entry: KernelEntry, target: str, records: Sequence[TuningRecord]
) -> KernelChoice:
    """Return the candidate that a record of this kernel's source on such a device names, else the
    first.
    """
    choices = entry.choices.get(target)
    if not choices:
        raise CannotLaunchStatically(
            f"{name}: the program was built for {', '.join(entry.choices) or 'no target'}, not for"
            f" {target}; build it with --target {target}",
            kernel=name,
            target=target,
        )
    for record in records:
        parts = dict(record.parts)
        if (
            entry.source
            and parts.get("source") == entry.source
            and target in parts.get("device", "").split(", ")
        ):
            config = {key: value.plain() for key, value in record.config}
            for choice in choices:
                wanted = {
                    **choice.blocks,
                    "num_warps": choice.num_warps,
                    "num_stages": choice.num_stages,
                }
                wanted |= {f"option.{key}": value for key, value in choice.options.items()}
                if all(config.get(key) == value for key, value in wanted.items()):
                    return choice
    return choices[0]
