# SPDX-License-Identifier: Apache-2.0
"""`ProgramRunner`: runs a `ProgramPlan`, step by step; `load_program` takes plan and kernels from a
bundle.

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
    OperatorFailed,
    UnsupportedOperator,
    Untrusted,
)
from bundler.format.bundle import Bundle
from bundler.format.entries import Opaque
from bundler.format.launch_spec import TuningRecord
from bundler.format.program_paths import is_code_path, program_name
from bundler.runtime.heuristics.launch_expressions import evaluate
from bundler.runtime.heuristics.launch_grids import open_grid
from bundler.runtime.launch.bundle_kernels import Kernels, load
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.program.allowed_operators import unlisted
from bundler.runtime.program.checked_memory import CheckedMemory
from bundler.runtime.program.device_tensors import host_number
from bundler.runtime.program.plan_reading import read_plan
from bundler.runtime.program.program_inputs import (
    ALIGNED_BYTES,
    ProgramInputs,
    dtype_of,
    same_strides,
    strides_of,
)
from bundler.runtime.program.program_plan import (
    BUFFER_MARK,
    HOST,
    NUMBER_MARK,
    Allocate,
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
        launch: Launcher,
        memory: ProgramMemory,
        constants: Mapping[str, Any] | None = None,
        seeds: SeedSource | None = None,
        *,
        separate: bool = True,
    ) -> None:
        self.plan, self._launch, self._memory = plan, launch, memory
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
        self._constants = dict(constants or {})
        missing = [name for name in plan.constants if name not in self._constants]
        if missing:
            raise ConfigError(
                f"the program needs the constants {', '.join(missing)}; pass them as constants=",
                missing=missing,
            )

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

    def _run(self, inputs: Sequence[Any], seed: int | None) -> tuple[Any, ...]:
        taken, sizes = self._inputs.taken(inputs)
        moved = {number: taken[number] for number in self._inputs.misaligned(taken)}
        for number in moved:
            taken[number] = self._aligned(number, taken[number])
        values: dict[str, Any] = dict(self._constants)
        given = zip(self.plan.inputs, taken, strict=True)
        values |= {item.name: value for item, value in given if item.spec}
        for step in self.plan.steps:
            match step:
                case Launch():
                    arguments = [self._argument(item, values, sizes) for item in step.arguments]
                    self._launch(
                        step.kernel,
                        arguments,
                        {n: evaluate(s, sizes) for n, s in step.sizes.items()},
                    )
                case Seeds(name, count):
                    source = self._seeds if seed is None else SeedStream(self._memory, seed)
                    values[name] = source(count)
                case Allocate(name, spec):
                    values[name] = self._memory.allocate(spec.dtype, *_shape(spec, sizes))
                case OperatorStep():
                    self._call(step, values, sizes)
                case Release(name):
                    values.pop(name, None)
        for number, value in moved.items():
            item = self.plan.inputs[number]
            if item.changed:
                value.copy_(taken[number])
            values[item.name] = (
                value  # a result that is the input, or a view of it, is the caller's
            )
        return tuple(self._result(output, values, sizes) for output in self.plan.outputs)

    def _aligned(self, number: int, value: Any) -> Any:
        """Return an input's elements at a multiple of 16 bytes, which the kernels count on."""
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
        copied = getattr(self._memory, "copied", None)
        if copied is None:
            raise ConfigError(
                "the program has to copy a tensor of torch: expected a memory with a method "
                f"`copied`, as TorchMemory, got {type(self._memory).__name__}",
                got=type(self._memory).__name__,
            )
        self.copies += 1
        return copied(value, sizes, strides)

    def _argument(self, item: Size, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if isinstance(item, str) and item.startswith(BUFFER_MARK):
            return values[item.removeprefix(BUFFER_MARK)]
        if isinstance(item, str) and item.startswith(NUMBER_MARK):
            number = host_number(values[item.removeprefix(NUMBER_MARK)])
            return int(number) if isinstance(number, bool) else number
        return _number(item, sizes)

    def _call(self, step: OperatorStep, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        named, given = _call_step(
            self._memory, self.plan, step, lambda item: self._decoded(item, values, sizes)
        )
        places = None if step.view else _addresses(given)
        for name, spec in zip(step.outputs, step.results, strict=True):
            if name is not None and spec is not None:
                self._check_device(step.operator, name, named[name], spec)
                values[name] = self._as_traced(step.operator, named[name], spec, sizes, places)

    def _as_traced(
        self,
        operator: str,
        value: Any,
        spec: TensorSpec,
        sizes: Mapping[str, int],
        places: set[int] | None,
    ) -> Any:
        """Return a result of an operator in the layout that torch traced, in which the program
        reads it.

        Args:
            operator: its name.
            value: what it returned.
            spec: what torch traced.
            sizes: of this call.
            places: addresses of its arguments, none of which a new tensor may have; None for a
                view.

        Raises:
            UnsupportedOperator: it has another dtype or other sizes than torch traced.
        """
        shape, strides = _shape(spec, sizes)
        if tuple(value.shape) != shape or dtype_of(value) != spec.dtype:
            raise UnsupportedOperator(
                f"{operator}: torch traced that it returns {spec.dtype}{list(shape)}, and it "
                f"returned {dtype_of(value)}{list(value.shape)}; its rule for fake tensors is"
                " wrong",
                operator=operator,
                expected=shape,
                got=tuple(value.shape),
            )
        fits = same_strides(shape, strides, strides_of(value))
        if fits and (places is None or _is_new(value, places)):
            return value
        return self._copied(value, shape, strides)

    def _check_device(self, operator: str, name: str, value: Any, spec: TensorSpec) -> None:
        expected, got = getattr(self._memory, "device", None), getattr(value, "device", None)
        if spec.device == HOST or None in {expected, got} or got == expected:
            return
        if not self._inputs.may_be_anywhere(name, spec.dtype, value.shape):
            raise UnsupportedOperator(
                f"{operator}: torch traced that its result is on {expected}, and it is on {got}; "
                "its rule for fake tensors is wrong",
                operator=operator,
                expected=str(expected),
                got=str(got),
            )

    def _decoded(self, item: Any, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if isinstance(item, list):
            return [self._decoded(part, values, sizes) for part in item]
        if not isinstance(item, dict):
            return item
        if "buffer" in item:
            tensor, spec = values[item["buffer"]], item["spec"]
            if spec is None:
                return tensor
            seen = [
                tuple(evaluate(size, sizes) for size in spec[name]) for name in ("sizes", "strides")
            ]
            return self._memory.view(tensor, seen[0], seen[1], evaluate(spec["offset"], sizes))
        return _number(item["size"], sizes) if "size" in item else item

    def _result(self, output: Output, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
        if output.buffer is not None:
            tensor = values[output.buffer]
            if output.spec is None:
                return tensor
            shape, strides = _shape(output.spec, sizes)
            if output.fresh:
                return self._copied(tensor, shape, strides)
            return self._memory.view(tensor, shape, strides, evaluate(output.spec.offset, sizes))
        return None if output.size is None else _number(output.size, sizes)


def _number(size: Size, sizes: Mapping[str, Any]) -> Any:
    """Return a size, or one of the plan's values, which may be a float."""
    return sizes[size] if isinstance(size, str) and size in sizes else evaluate(size, sizes)


def _addresses(arguments: Any) -> set[int]:
    """Return the addresses of the tensors among some arguments."""
    if isinstance(arguments, (list, tuple)):
        return {place for item in arguments for place in _addresses(item)}
    if isinstance(arguments, dict):
        return _addresses(list(arguments.values()))
    return {arguments.data_ptr()} if hasattr(arguments, "data_ptr") else set()


def _is_new(value: Any, places: set[int]) -> bool:
    """Whether a result has memory of its own, aligned as kernels expect: some operators return an
    argument.
    """
    address = value.data_ptr()
    return address % ALIGNED_BYTES == 0 and (address == 0 or address not in places)


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(evaluate(s, sizes) for s in spec.sizes), tuple(
        evaluate(s, sizes) for s in spec.strides
    )


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
    launch = static_launcher(plan, load(opened, driver=driver), opened.tuning_records)
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


def static_launcher(
    plan: ProgramPlan, kernels: Kernels, records: Sequence[TuningRecord] = ()
) -> Launcher:
    """Return what launches a plan's kernels from a bundle.

    Args:
        plan: of the program.
        kernels: of the bundle.
        records: of kernels that were tuned, which choose among the candidates that a kernel was
            compiled with; without one for a kernel, and for the current device, the first is
            launched.
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
            options = {
                "num_warps": choice.num_warps,
                "num_stages": choice.num_stages,
                **choice.options,
            }
            kernels[name][grid](*arguments, **choice.blocks, **options)

    return launch


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


def _call_step(
    memory: Any, plan: ProgramPlan, step: OperatorStep, decoded: Callable[[Any], Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Call the operator of a step.

    Args:
        memory: a `ProgramMemory`.
        plan: whose step it is.
        step: one of its steps.
        decoded: makes an argument of what stands in the step.

    Returns:
        Its results, by the names of their buffers, and what it was given.

    Raises:
        OperatorFailed: it returned other results than the plan counts on, or a `CheckedMemory`
            refused the call.
    """
    try:
        arguments = [decoded(item) for item in step.arguments]
        keywords = {name: decoded(item) for name, item in step.keywords.items()}
        result = memory.call(step.operator, arguments, keywords)
    except OperatorFailed as error:
        raise _failed(plan, step, error.message) from error.__cause__
    if step.single:
        results = (result,)
    elif isinstance(result, (list, tuple)):
        results = tuple(result)
    else:
        raise _failed(plan, step, f"expected a tuple of results, got {type(result).__name__}")
    if len(results) != len(step.outputs):
        raise _failed(plan, step, f"expected {len(step.outputs)} results, got {len(results)}")
    named = {
        name: value for name, value in zip(step.outputs, results, strict=True) if name is not None
    }
    for name, value in named.items():
        if not hasattr(value, "shape"):
            raise _failed(plan, step, f"expected a tensor for {name}, got {type(value).__name__}")
    return named, [arguments, keywords]


def _failed(plan: ProgramPlan, step: OperatorStep, reason: str) -> OperatorFailed:
    number = next(place for place, other in enumerate(plan.steps) if other is step)
    return OperatorFailed(
        f"step {number} of the program, {step.operator}: {reason}",
        operator=step.operator,
        step=number,
    )
