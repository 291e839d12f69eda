# SPDX-License-Identifier: Apache-2.0
"""`summary_of`: what somebody who runs a generated program has to know: inputs, constants, memory,
operators that need torch, targets.

`generate`, `inspect` and `report` print it; `programs_of` reads it from a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.opaque_files import is_code_path, program_name
from bundler.runtime.program.device_tensors import item_bytes
from bundler.runtime.program.program_plan import (
    HOST,
    Allocate,
    Cooperation,
    GridCounters,
    Input,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    Seeds,
    Size,
    TensorSpec,
    reach,
    read_plan,
)

_SEED_BYTES, _COUNTER_BYTES = 8, 4


@dataclass(frozen=True)
class ValueSummary:
    """An input, or a result.

    Attributes:
        type: such as `float32[16, n]`, `size` for a whole number that decides sizes, `number` for
            one that has to be as given, or `unused`.
        strides: in elements, where they are not those of a tensor that lies row by row; else None.
        number: what an input has to be, where its type is `number`, as Python writes it.
        host: whether the tensor lies on the host.
        changed: whether the program writes to the input.
    """

    type: str
    strides: tuple[Size, ...] | None = None
    number: str | None = None
    host: bool = False
    changed: bool = False

    def __str__(self) -> str:
        """Return it as a person reads it."""
        told = f"{self.type} {self.number}" if self.type == "number" else self.type
        strides = self.strides and f" with strides [{', '.join(map(str, self.strides))}]"
        return f"{told}{strides or ''}{' on the host' * self.host}{', changed' * self.changed}"


@dataclass(frozen=True)
class ProgramSummary:
    """What is known of a program before it runs.

    Attributes:
        name: of the program.
        inputs, results: in their order.
        constants: names of other tensors that it has to be given.
        sizes: size that changes from call to call -> the input that it is read from, and what is
            known of it.
        memory_bytes: what it allocates at its peak, beside inputs and constants; None where sizes
            change.
        kernels, launches: how many.
        operators: that it calls by torch, each once.
        random: whether it draws random numbers.
        code: whether it calls operators that need trust in code.
        targets: that all of its kernels were compiled for.
        problem: why nothing is known: the plan is damaged.
        weights: parameters and buffers of the module: name there -> type.
        weight_bytes: of these.
    """

    name: str
    inputs: tuple[ValueSummary, ...] = ()
    results: tuple[ValueSummary, ...] = ()
    constants: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    kernels: int = 0
    launches: int = 0
    operators: tuple[str, ...] = ()
    random: bool = False
    code: bool = False
    targets: tuple[str, ...] = ()
    problem: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    weight_bytes: int = 0


def programs_of(bundle: Bundle) -> list[ProgramSummary]:
    """Return what is known of each program in a bundle, by name; a damaged one has a `problem`."""
    found = []
    for entry in bundle.opaque:
        name = program_name(entry.path)
        if name is None:
            continue
        code = is_code_path(entry.path)
        try:
            plan = read_plan(bundle.read(entry.artifact))
            found.append(replace(summary_of(name, plan), code=code))
        except BundlerError as error:
            found.append(ProgramSummary(name, code=code, problem=error.message))
    return sorted(found, key=lambda one: (one.name, one.code))


def summary_of(name: str, plan: ProgramPlan) -> ProgramSummary:
    """Return what a valid plan says.

    Args:
        name: of the program.
        plan: which need not have been built for any target.
    """
    calls = [step.operator for step in plan.steps if isinstance(step, OperatorStep)]
    # A target may lack kernels whose programs wait for each other.
    spare = {step.launch.kernel for step in plan.steps if isinstance(step, Cooperation)}
    built = [set(entry.choices) for name, entry in plan.kernels.items() if name not in spare]
    named = {constant: one for constant, one in plan.weights.items() if one.names}
    return ProgramSummary(
        name,
        tuple(_input(plan, number, item) for number, item in enumerate(plan.inputs)),
        _results(plan),
        tuple(name for name in plan.constants if name not in named),
        {size: _place(plan, size) for size in plan.sizes},
        _memory_bytes(plan),
        len(plan.kernels),
        sum(isinstance(step, Launch) for step in plan.apart.steps),
        tuple(sorted(set(calls))),
        any(isinstance(step, Seeds) for step in plan.steps),
        targets=tuple(sorted(set.intersection(*built))) if built else (),
        weights={one.names[0]: str(_tensor(one.spec)) for one in named.values()},
        weight_bytes=sum(_bytes(one.spec) or 0 for one in named.values()),
    )


def _input(plan: ProgramPlan, number: int, item: Input) -> ValueSummary:
    if item.spec is not None:
        return _tensor(item.spec, changed=item.changed)
    if item.number is not None:
        return ValueSummary("number", number=repr(item.number))
    is_size = any(place == (number, -1) for place in plan.sizes.values())
    return ValueSummary("size" if is_size else "unused")


def _tensor(spec: TensorSpec, *, changed: bool = False) -> ValueSummary:
    row_by_row: list[Size] = []
    step: Size | None = 1
    for size in reversed(spec.sizes):
        row_by_row.insert(0, step if step is not None else "?")
        step = step * size if isinstance(step, int) and isinstance(size, int) else None
    plain = all(
        size == 1 or expected in {stride, "?"}
        for size, stride, expected in zip(spec.sizes, spec.strides, row_by_row, strict=True)
    )
    shape = ", ".join(map(str, spec.sizes))
    strides = None if plain else spec.strides
    return ValueSummary(
        f"{spec.dtype}[{shape}]", strides, host=spec.device == HOST, changed=changed
    )


def _results(plan: ProgramPlan) -> tuple[ValueSummary, ...]:
    specs = {item.name: item.spec for item in plan.inputs if item.spec is not None}
    for step in plan.steps:
        match step:
            case Allocate(name, spec):
                specs[name] = spec
            case OperatorStep():
                made = zip(step.outputs, step.results, strict=True)
                specs |= {name: spec for name, spec in made if name is not None and spec}
    return tuple(_result(output, specs) for output in plan.outputs)


def _result(output: Output, specs: Mapping[str, TensorSpec]) -> ValueSummary:
    if output.buffer is None:
        return ValueSummary("nothing" if output.size is None else "size")
    spec = output.spec or specs.get(output.buffer)
    return ValueSummary(f"constant {output.buffer}") if spec is None else _tensor(spec)


def _place(plan: ProgramPlan, size: str) -> str:
    """Return which part of which input a size is."""
    number, place = plan.sizes[size]
    spec = plan.inputs[number].spec
    if spec is None:
        return f"input {number}"
    rank = len(spec.sizes)
    part = f"dimension {place}" if place < rank else f"stride {place - rank}"
    return f"{part} of input {number}"


def _memory_bytes(plan: ProgramPlan) -> int | None:
    """Return the most bytes of buffers that are there at once; what operators need meanwhile is
    torch's.
    """
    inputs = {item.name: item.spec for item in plan.inputs if item.spec is not None}
    held: dict[str, int] = {}
    now = most = 0
    for step in plan.every_step:
        match step:
            case Release(name):
                now -= held.pop(name, 0)
                continue
            case Allocate(name, spec):
                new = {name: _bytes(spec)}
            case Overwrite(name):
                new = {name: _bytes(inputs[name])}
            case Seeds(name, count):
                new = {name: _SEED_BYTES * count}
            case GridCounters(name, count):
                new = {name: _COUNTER_BYTES * count}
            case OperatorStep(view=False):
                made = zip(step.outputs, step.results, strict=True)
                new = {name: _bytes(spec) for name, spec in made if name is not None and spec}
            case _:
                continue
        for name, size_bytes in new.items():
            if size_bytes is None:
                return None
            now += size_bytes - held.get(name, 0)
            held[name] = size_bytes
        most = max(most, now)
    return most


def _bytes(spec: TensorSpec) -> int | None:
    """Return how much memory a tensor spans; None where its sizes change."""
    elements = reach(spec)
    return None if elements is None else elements * item_bytes(spec.dtype)
