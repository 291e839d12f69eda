# SPDX-License-Identifier: Apache-2.0
"""`ProgramPlan`: what a generated program does, as data: allocations, launches, calls of operators
by name.  Nothing of it is executed as code.

::

    inputs  ->  steps: Seeds | Allocate | Launch | OperatorStep | Release, in order  ->  outputs

Sizes are numbers, or texts over the names of sizes, which `heuristics.launch_expressions`
evaluates.  The generator writes a plan, a bundle holds it as JSON, which `plan_reading` decodes,
and `run` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 1
MAX_PLAN_BYTES = 64 << 20
BUFFER_MARK = "@"
NUMBER_MARK = "#"
HOST = "host"
MAX_SEEDS = 1 << 20
Size = int | str


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: dtype, in elements sizes, strides and offset, and `HOST` where it lies there and
    not on the program's device.
    """

    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0
    device: str = ""


@dataclass(frozen=True)
class Input:
    """One argument of the program.

    Attributes:
        name: of the buffer or size; empty for an argument that is not used.
        spec: of a tensor; None for a size.
        aligned: kernels count on its first element being at a multiple of 16 bytes.
        changed: the program writes to it.
        number: what the argument has to be, a number that the program was generated for.
    """

    name: str
    spec: TensorSpec | None = None
    aligned: bool = False
    changed: bool = False
    number: bool | int | float | None = None


@dataclass(frozen=True)
class Allocate:
    """New memory for a buffer."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class Seeds:
    """New seeds of random numbers.

    Attributes:
        name: of a buffer of int64.
        count: how many.
    """

    name: str
    count: int


@dataclass(frozen=True)
class Release:
    """Nobody uses a buffer from here on."""

    name: str


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: its name.
        arguments: in the order of the kernel's parameters, names of buffers, prefixed by `@`, names
            of buffers of one element whose number is passed, prefixed by `#`, sizes and names of
            `values`.
        sizes: `xnumel` and so on -> size, which the grid is made of.
    """

    kernel: str
    arguments: tuple[Size, ...]
    sizes: Mapping[str, Size]


@dataclass(frozen=True)
class OperatorStep:
    """One call of an ATen operator.

    Attributes:
        operator: its name, as `aten.mm.default`.
        arguments, keywords: plain values, and mappings `{"buffer": name, "spec": ...}`, `{"size":
            text}`, `{"dtype": name}`, ...; the device `HOST` is the host, any other one the
            program's.
        outputs: name of the buffer for each result; None for one that is not used.
        single: whether the operator returns one tensor instead of a tuple.
        results: what each buffer of `outputs` has to be; a result with other strides is copied.
        view: whether its results may share memory with its arguments.
    """

    operator: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[str | None, ...]
    single: bool
    results: tuple[TensorSpec | None, ...] = ()
    view: bool = False


Step = Seeds | Allocate | Launch | OperatorStep | Release


@dataclass(frozen=True)
class KernelChoice:
    """How a kernel is launched on one target: the blocks that it was compiled with, and the options
    that are not the same for every kernel.
    """

    blocks: Mapping[str, Any]
    num_warps: int
    num_stages: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelEntry:
    """What launches of a kernel need to know beside its arguments.

    Attributes:
        grid: kind of its grid.
        parameters: names of what a launch passes, in order.
        choices: target -> how it was compiled, in the order of its heuristic.
        source: names its text, as tuning records have it; empty where no record was looked for.
    """

    grid: str
    parameters: tuple[str, ...]
    choices: Mapping[str, tuple[KernelChoice, ...]] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Output:
    """One result: a buffer seen through a spec, or a fresh copy of it, a size, or nothing."""

    buffer: str | None
    spec: TensorSpec | None = None
    size: Size | None = None
    fresh: bool = False


@dataclass(frozen=True)
class ProgramPlan:
    """A program.

    Attributes:
        inputs: its arguments.
        sizes: name of a size -> (number of the input, place) where it is read: a dimension, rank +
            dimension for its stride, -1 for an input that is a number.
        steps: what it does, in order.
        outputs: what it returns.
        kernels: by name.
        constants: names of buffers that the program itself holds.
        limits: a size, as text -> what it is at most in every call, since kernels count on it.
        values: name -> expression over sizes, as `host_values` evaluates it, once in each call:
            floats, and integers that are made of floats.
        guards: conditions on sizes that hold in every call the program was generated for.
    """

    inputs: tuple[Input, ...]
    sizes: Mapping[str, tuple[int, int]]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    kernels: Mapping[str, KernelEntry]
    constants: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    guards: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the plan as canonical JSON."""
        data = asdict(self) | {"version": VERSION}
        data["steps"] = [[type(step).__name__, asdict(step)] for step in self.steps]
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
