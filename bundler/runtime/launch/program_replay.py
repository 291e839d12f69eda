# SPDX-License-Identifier: Apache-2.0
"""`ProgramRunner`: runs a `ProgramPlan`, step by step; `load_program` takes plan and kernels from a bundle.

    program = bundler.runtime.load_program("model.tbundle", memory=memory)
    (output,) = program(x, weight)

What allocates, views and calls operators is a `ProgramMemory`: torch's where a program has calls of operators, or whatever the caller's tensors come
from.  No compiler and no Triton is needed, and no torch unless the memory is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bundler.errors import CannotLaunchStatically, ConfigError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.launch_spec import TuningRecord
from bundler.format.program_paths import program_name
from bundler.runtime.heuristics.launch_expressions import evaluate
from bundler.runtime.heuristics.launch_grids import open_grid
from bundler.runtime.launch.bundle_kernels import Kernels, load
from bundler.runtime.launch.device_tensors import device_tensor
from bundler.runtime.launch.driver import Driver
from bundler.runtime.launch.plan_reading import read_plan
from bundler.runtime.launch.program_plan import (
    BUFFER_MARK,
    Allocate,
    Input,
    KernelChoice,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    TensorSpec,
)
from bundler.runtime.launch.seed_stream import SeedSource, SeedStream
from bundler.trust.admission import admit

# Of a kernel, its arguments by position, and the sizes of its grid.
Launcher = Callable[[str, Sequence[Any], Mapping[str, int]], None]


class ProgramMemory(Protocol):
    """Where tensors of a program come from.

    Sizes are numbers here.  One whose `host` is true has tensors of the host, for launchers that no GPU is behind.
    """

    def allocate(self, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a new tensor, whose elements may be anything."""

    def view(self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        """Return a tensor's memory seen in another way."""

    def call(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Call an ATen operator."""

    def integers(self, numbers: Sequence[int]) -> Any:
        """Return a new int64 tensor that holds these numbers; asked for by programs with random numbers alone."""


class ProgramRunner:
    """Runs a program; a call takes its inputs by position, and returns a tuple.

    Args:
        plan: what to do.
        launch: launches a kernel.
        memory: where tensors come from.
        constants: tensors that the program holds, by name.
        seeds: what random numbers come from; None for another stream in each process.
    """

    def __init__(
        self, plan: ProgramPlan, launch: Launcher, memory: ProgramMemory, constants: Mapping[str, Any] | None = None,
        seeds: SeedSource | None = None,
    ) -> None:  # fmt: skip
        self.plan, self._launch, self._memory = plan, launch, memory
        self._host = bool(getattr(memory, "host", False))
        self._seeds = seeds or SeedStream(memory)
        self._constants = dict(constants or {})
        missing = [name for name in plan.constants if name not in self._constants]
        if missing:
            raise ConfigError(
                f"the program needs the constants {', '.join(missing)}; pass them as constants=", missing=missing
            )

    def __call__(self, *inputs: Any, seed: int | None = None) -> tuple[Any, ...]:
        """Run the program.

        Args:
            *inputs: tensors and numbers, as the example's.
            seed: decides the random numbers of this call; None takes the next ones of the runner's stream.

        Raises:
            ConfigError: too many or too few inputs, or a shape that the program was not generated for.
        """
        sizes = self._sizes(inputs)
        self._check_limits(sizes)
        values: dict[str, Any] = dict(self._constants)
        given = zip(self.plan.inputs, inputs, strict=True)
        values |= {item.name: device_tensor(value, host=self._host) for item, value in given if item.spec}
        for step in self.plan.steps:
            match step:
                case Launch():
                    arguments = [self._argument(item, values, sizes) for item in step.arguments]
                    self._launch(step.kernel, arguments, {n: evaluate(s, sizes) for n, s in step.sizes.items()})
                case Seeds(name, count):
                    source = self._seeds if seed is None else SeedStream(self._memory, seed)
                    values[name] = source(count)
                case Allocate(name, spec):
                    values[name] = self._memory.allocate(spec.dtype, *_shape(spec, sizes))
                case OperatorStep():
                    self._call(step, values, sizes)
                case Release(name):
                    values.pop(name, None)
        return tuple(self._result(output, values, sizes) for output in self.plan.outputs)

    def _sizes(self, inputs: Sequence[Any]) -> dict[str, int]:
        if len(inputs) != len(self.plan.inputs):
            raise ConfigError(f"the program takes {len(self.plan.inputs)} inputs, got {len(inputs)}", got=len(inputs))
        sizes = {name: int(inputs[number].shape[dim]) for name, (number, dim) in self.plan.sizes.items() if dim >= 0}
        sizes |= {name: int(inputs[number]) for name, (number, dim) in self.plan.sizes.items() if dim < 0}
        for number, (given, value) in enumerate(zip(self.plan.inputs, inputs, strict=True)):
            _check_shape(number, given, value, sizes)
        return sizes

    def _check_limits(self, sizes: Mapping[str, int]) -> None:
        for text, most in self.plan.limits.items():
            found = evaluate(text, sizes)
            if found > most:
                raise ConfigError(
                    f"the program's indices have 32 bits: expected {text} to be at most {most}, got {found}; "
                    "generate it with GenerateOptions(wide_indices=True)",
                    expected=most,
                    got=found,
                )

    def _argument(self, item: Size, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if isinstance(item, str) and item.startswith(BUFFER_MARK):
            return values[item.removeprefix(BUFFER_MARK)]
        return evaluate(item, sizes)

    def _call(self, step: OperatorStep, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        arguments = [self._decoded(item, values, sizes) for item in step.arguments]
        keywords = {name: self._decoded(item, values, sizes) for name, item in step.keywords.items()}
        result = self._memory.call(step.operator, arguments, keywords)
        results = (result,) if step.single else tuple(result)
        values |= {name: value for name, value in zip(step.outputs, results, strict=True) if name is not None}

    def _decoded(self, item: Any, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if isinstance(item, list):
            return [self._decoded(part, values, sizes) for part in item]
        if not isinstance(item, dict):
            return item
        if "buffer" in item:
            tensor, spec = values[item["buffer"]], item["spec"]
            if spec is None:
                return tensor
            seen = [tuple(evaluate(size, sizes) for size in spec[name]) for name in ("sizes", "strides")]
            return self._memory.view(tensor, seen[0], seen[1], evaluate(spec["offset"], sizes))
        return evaluate(item["size"], sizes) if "size" in item else item

    def _result(self, output: Output, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if output.buffer is not None:
            tensor = values[output.buffer]
            if output.spec is None:
                return tensor
            shape, strides = _shape(output.spec, sizes)
            return self._memory.view(tensor, shape, strides, evaluate(output.spec.offset, sizes))
        return None if output.size is None else evaluate(output.size, sizes)


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(evaluate(s, sizes) for s in spec.sizes), tuple(evaluate(s, sizes) for s in spec.strides)


def _check_shape(number: int, given: Input, value: Any, sizes: Mapping[str, int]) -> None:
    """Raise where an input has another shape than the program was generated for."""
    if given.spec is None:
        return
    expected = _shape(given.spec, sizes)[0]
    got = tuple(int(size) for size in value.shape)
    if got != expected:
        raise ConfigError(
            f"input {number} of the program: expected sizes {expected}, got {got}; generate the program for these, or with dynamic=True",
            expected=expected,
            got=got,
        )


# From a bundle ----------------------------------------------------------------------------------------------------------


def load_program(
    bundle: Bundle | str | os.PathLike[str], *, memory: ProgramMemory, name: str | None = None, driver: Driver | None = None,
    constants: Mapping[str, Any] | None = None, seed: int | None = None,
) -> ProgramRunner:  # fmt: skip
    """Return a program of a bundle, ready to run without a compiler.

    Args:
        bundle: an open bundle, or the path of one.
        memory: where its tensors come from.
        name: of the program; None where the bundle has one only.
        driver: which GPUs to use; None opens that of the machine.
        constants: tensors that the program holds, by name.
        seed: of its random numbers: equal seeds give equal numbers in the first call, in the second, and so on. None: other numbers in each
            process.

    Raises:
        NotFound: the bundle has no such program, or none of its kernels is for the device.
        FormatError, DigestMismatch: the bundle or the plan in it is damaged.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    named = ((program_name(entry.path), entry) for entry in opened.opaque)
    plans = {found: entry for found, entry in named if found is not None}
    chosen = name if name is not None else next(iter(plans)) if len(plans) == 1 else ""
    if chosen not in plans:
        raise NotFound(
            f"no program {name or ''!r} in the bundle; there are {', '.join(sorted(plans)) or 'none'}", name=name
        )
    plan = read_plan(opened.read(plans[chosen].artifact))
    seeds = SeedStream(memory, seed)
    if not plan.kernels:  # it returns inputs, views of them, and what operators give
        admit(opened)
        return ProgramRunner(plan, _launch_nothing, memory, constants, seeds)
    launch = static_launcher(plan, load(opened, driver=driver), opened.tuning_records)
    return ProgramRunner(plan, launch, memory, constants, seeds)


def _launch_nothing(name: str, _arguments: Sequence[Any], _sizes: Mapping[str, int]) -> None:
    raise NotFound(f"{name}: the program has no kernels", name=name)


def static_launcher(plan: ProgramPlan, kernels: Kernels, records: Sequence[TuningRecord] = ()) -> Launcher:
    """Return what launches a plan's kernels from a bundle.

    Args:
        plan: of the program.
        kernels: of the bundle.
        records: of kernels that were tuned, which choose among the candidates that a kernel was compiled with; without one for a kernel, and for
            the current device, the first is launched.
    """
    driver = kernels.driver
    grids = {name: open_grid(entry.grid, {}) for name, entry in plan.kernels.items()}
    chosen: dict[tuple[str, str], KernelChoice] = {}

    def launch(name: str, arguments: Sequence[Any], sizes: Mapping[str, int]) -> None:
        target = f"{driver.backend}:{driver.properties(driver.device()).arch}"
        choice = chosen.get((name, target))
        if choice is None:
            choice = chosen[name, target] = _choice(name, plan.kernels[name], target, records)
        grid = grids[name](choice.blocks, sizes)
        if 0 not in grid:
            options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages, **choice.options}
            kernels[name][grid](*arguments, **choice.blocks, **options)

    return launch


def _choice(name: str, entry: KernelEntry, target: str, records: Sequence[TuningRecord]) -> KernelChoice:
    """Return the candidate that a record of this kernel's source on such a device names, else the first."""
    choices = entry.choices.get(target)
    if not choices:
        raise CannotLaunchStatically(
            f"{name}: the program was built for {', '.join(entry.choices) or 'no target'}, not for {target}; "
            f"build it with --target {target}",
            kernel=name,
            target=target,
        )
    for record in records:
        parts = dict(record.parts)
        if entry.source and parts.get("source") == entry.source and target in parts.get("device", "").split(", "):
            config = {key: value.plain() for key, value in record.config}
            for choice in choices:
                wanted = {**choice.blocks, "num_warps": choice.num_warps, "num_stages": choice.num_stages}
                wanted |= {f"option.{key}": value for key, value in choice.options.items()}
                if all(config.get(key) == value for key, value in wanted.items()):
                    return choice
    return choices[0]
