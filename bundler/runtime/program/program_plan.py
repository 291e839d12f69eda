# SPDX-License-Identifier: Apache-2.0
"""`ProgramPlan`: what a generated program does, as data: allocations, launches, calls of operators
by name.  Nothing of it is executed as code.

::

    inputs  ->  steps: Seeds | Allocate | Overwrite | Launch | OperatorStep | Release
                       | GridCounters | Cooperation, in order  ->  outputs

Sizes are numbers, or texts over the names of sizes, which `heuristics.launch_expressions`
evaluates.  The generator writes a plan, a bundle holds it as JSON, which `read_plan` decodes, and
`run` runs it.

A plan in a bundle may come from anybody, so one that does what no generated program does is refused
before anything of it runs (`_PlanCheck`): every buffer has to be there when it is used, every
expression is over sizes that the inputs have, and every view lies within its buffer as far as
numbers say.  Which operators a plan may call is `allowed_operators`' to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from msgspec import ValidationError, convert

from bundler.errors import ConfigError, FormatError, UnsupportedVersion
from bundler.runtime.heuristics.launch_expressions import names_in
from bundler.runtime.heuristics.launch_grids import (
    COOPERATIVE_GRID,
    PROGRAMS,
    combined_parts,
    open_grid,
)
from bundler.runtime.program.device_tensors import DTYPES, span
from bundler.runtime.program.host_values import value_names

# The second has kernels that take only some numbers, the third overwrites inputs; a reader of an
# earlier one knows nothing of these.
_PLAIN_VERSION, _BOUNDED_VERSION, VERSION = 1, 2, 3
MAX_PLAN_BYTES = 64 << 20
BUFFER_MARK = "@"
NUMBER_MARK = "#"
HOST = "host"
MAX_SEEDS, MAX_COUNTERS = 1 << 20, 1 << 16
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
class Overwrite:
    """An input's memory becomes that of what the next launch stores.

    A call that consumes its inputs stores there, any other one in a copy, which is made here.
    """

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


@dataclass(frozen=True)
class GridCounters:
    """Counters by which programs of a launch wait for each other: 0, or as the last launch on the
    stream that was given them left them; no other launch uses them meanwhile.

    Attributes:
        name: of a buffer of int32.
        count: how many.
    """

    name: str
    count: int


PlainStep = Seeds | Allocate | Overwrite | Launch | OperatorStep | Release | GridCounters


@dataclass(frozen=True)
class Cooperation:
    """One of two forms of a computation, which fill buffers that are there before.

    Attributes:
        together: one launch, whose programs wait for each other, with the memory that it needs;
            only where all of them run at once.
        apart: several launches.
        measured: whether a measurement, or a record of one, decides; else `together` is run
            wherever it can be.
    """

    together: tuple[Step, ...]
    apart: tuple[Step, ...]
    measured: bool = False

    @property
    def launch(self) -> Launch:
        """The launch whose programs wait for each other."""
        (found,) = (step for step in self.together if isinstance(step, Launch))
        return found

    @property
    def kernels(self) -> tuple[str, ...]:
        """All kernels that either form launches, that whose programs wait first."""
        launches = [step.kernel for step in self.apart if isinstance(step, Launch)]
        return tuple(dict.fromkeys((self.launch.kernel, *launches)))


Step = PlainStep | Cooperation


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
        others: kernels that compute the same, of which a tuning record may name one -> the places
            of their arguments among those of a launch.
        functions: names its text as key parts have it, so that a bundle may hold another program's
            kernel of that name; empty where it is not known.
        most: parameter -> the largest number that it takes; of any number where it is not named.
        beyond: where there is such a parameter, the kernel that computes the same of any numbers
            and is launched in the place of this one where a number is larger -> the places of its
            arguments.
    """

    grid: str
    parameters: tuple[str, ...]
    choices: Mapping[str, tuple[KernelChoice, ...]] = field(default_factory=dict)
    source: str = ""
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    functions: str = ""
    most: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """One result: a buffer seen through a spec, or a fresh copy of it, a size, or nothing."""

    buffer: str | None
    spec: TensorSpec | None = None
    size: Size | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Weight:
    """What a constant is.

    Attributes:
        spec: dtype, sizes and strides, all of them numbers.
        names: of the parameter or buffer in the module, more than one where it is shared; none of
            another tensor.
    """

    spec: TensorSpec
    names: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides."""
        return tuple(map(int, self.spec.sizes)), tuple(map(int, self.spec.strides))


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
        weights: constant -> what it is.
        numbers: parameter or buffer of a module -> digest of its bytes, where the function reads
            its numbers in Python, so that they are in the program.
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
    weights: Mapping[str, Weight] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the plan as canonical JSON."""
        bounded = any(entry.most for entry in self.kernels.values())
        data = asdict(self) | {"version": _BOUNDED_VERSION if bounded else _PLAIN_VERSION}
        if self.overwritten:
            data["version"] = VERSION
        # A plan without them is as it was before there were any.
        for kernel in data["kernels"].values():
            for name in ("others", "functions", "most", "beyond"):
                if not kernel[name]:
                    del kernel[name]
        data["steps"] = _encoded(self.steps)
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    @property
    def every_step(self) -> Iterator[Step]:
        """The steps of both forms of a computation, one after the other."""
        for step in self.steps:
            yield from (*step.together, *step.apart) if isinstance(step, Cooperation) else (step,)

    @property
    def overwritten(self) -> frozenset[str]:
        """Names of the inputs whose memory a call that consumes them writes over."""
        return frozenset(step.name for step in self.steps if isinstance(step, Overwrite))

    @property
    def apart(self) -> ProgramPlan:
        """The plan as it runs where no programs wait for each other."""
        found: list[Step] = []
        for step in self.steps:
            found += step.apart if isinstance(step, Cooperation) else (step,)
        return replace(self, steps=tuple(found))


def _encoded(steps: Iterable[Step]) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    for step in steps:
        if isinstance(step, Cooperation):
            forms = {name: _encoded(getattr(step, name)) for name in _FORMS}
            found.append((type(step).__name__, {**forms, "measured": step.measured}))
        else:
            found.append((type(step).__name__, asdict(step)))
    return found


# ----------------------------------------------------------------------------------------- Reading

_STEPS: Mapping[str, type[PlainStep]] = {
    one.__name__: one
    for one in (Allocate, GridCounters, Launch, OperatorStep, Overwrite, Release, Seeds)
}
_FORMS = ("together", "apart")
# What a form of a computation does; it may be run again, and another one in its place.
_OF_FORMS = (Allocate, GridCounters, Launch, Release)
_OTHERS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_MAX_STEPS, _MAX_RANK, _MAX_ELEMENTS = 1 << 20, 64, 1 << 48
_MOST_DEEP = 16
_LONGEST_WEIGHT = 1024
_LARGEST = 2**63 - 1
_MOST_BLOCK, _MOST_WARPS, _MOST_STAGES = 1 << 20, 64, 64
_OPTIONS = frozenset({"waves_per_eu"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_OPERATOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z0-9_]+")
# Values of an argument that torch alone has: kind -> the names that it may have, or a pattern.
_TORCH_NAMES: Mapping[str, re.Pattern[str]] = {
    "dtype": re.compile("|".join(sorted(DTYPES))),
    "device": re.compile(r"[a-z]{1,16}(?::[0-9]{1,3})?"),
    "memory_format": re.compile("contiguous_format|preserve_format|channels_last|channels_last_3d"),
    "layout": re.compile("strided"),
}


def read_plan(data: bytes) -> ProgramPlan:
    """Return the plan that some bytes are.

    Raises:
        FormatError: it is anything else, or does what no generated program does.
        UnsupportedVersion: a newer version wrote it.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise FormatError(
            f"a program's plan: expected at most {MAX_PLAN_BYTES} bytes, got {len(data)}",
            got=len(data),
        )
    try:
        found = json.loads(data)
        version = found.pop("version")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"a program's plan: not what `to_json` writes: {error}") from error
    if version not in (_PLAIN_VERSION, _BOUNDED_VERSION, VERSION):
        raise UnsupportedVersion(
            f"a program's plan: expected a version up to {VERSION}, got {version!r}; update bundler",
            got=version,
        )
    try:
        plan = _plan(found)
        _PlanCheck(plan).run()
        return plan
    except FormatError:
        raise
    except (*_OTHERS, ValidationError) as error:
        raise FormatError(f"a program's plan: {type(error).__name__}: {error}") from error


def _plan(data: Mapping[str, Any]) -> ProgramPlan:
    return ProgramPlan(
        convert(data["inputs"], tuple[Input, ...]),
        convert(data["sizes"], dict[str, tuple[int, int]]),
        tuple(_step(kind, item) for kind, item in data["steps"]),
        convert(data["outputs"], tuple[Output, ...]),
        convert(data["kernels"], dict[str, KernelEntry]),
        convert(data["constants"], tuple[str, ...]),
        convert(data.get("limits", {}), dict[str, int]),
        convert(data.get("values", {}), dict[str, str]),
        convert(data.get("guards", ()), tuple[str, ...]),
        convert(data.get("weights", {}), dict[str, Weight]),
        convert(data.get("numbers", {}), dict[str, str]),
    )


def _step(kind: str, data: Any) -> Step:
    if kind == Cooperation.__name__:
        forms = {name: tuple(_plain(*one) for one in data[name]) for name in _FORMS}
        return Cooperation(**forms, measured=convert(data["measured"], bool))
    return _plain(kind, data)


def _plain(kind: str, data: Any) -> PlainStep:
    if kind not in _STEPS:
        raise ValueError(f"a step is one of {', '.join(sorted(_STEPS))}, got {kind!r:.80}")
    return convert(data, _STEPS[kind])


class _PlanCheck:
    """Raises `FormatError` unless a plan is one that a generator could have written."""

    def __init__(self, plan: ProgramPlan) -> None:
        self._plan = plan
        self._sizes = frozenset({*plan.sizes, *plan.values})
        self._live: dict[str, TensorSpec | None] = {}
        # Inputs that may still be overwritten; those that were.
        self._unchanged = {
            item.name
            for item in plan.inputs
            if item.spec is not None and not item.changed and item.spec.device != HOST
        }
        self._overwritten: set[str] = set()
        self._where = "inputs"

    def run(self) -> None:
        plan = self._plan
        self._sizes_are_read()
        for number, item in enumerate(plan.inputs):
            self._where = f"input {number}"
            self._input(item)
        self._where = "constants"
        for name in plan.constants:
            self._begin(name, None)
        self._weights()
        for name, entry in plan.kernels.items():
            self._where = f"kernel {name!r:.80}"
            self._kernel(name, entry)
        self._where = "values"
        for name, text in plan.values.items():
            self._name(name)
            self._demand(name not in plan.sizes, "another name than a size's", name)
            self._value(text)
        self._where = "guards"
        for text in plan.guards:
            self._value(text)
        self._where = "limits"
        for text, most in plan.limits.items():
            self._expression(text)
            self._whole(most, 0, _LARGEST)
        self._demand(len(plan.steps) <= _MAX_STEPS, f"at most {_MAX_STEPS} steps", len(plan.steps))
        for number, step in enumerate(plan.steps):
            self._where = f"step {number}"
            self._step(step)
        for number, output in enumerate(plan.outputs):
            self._where = f"output {number}"
            self._output(output)

    # ---------------------------------------------------------------------------------------- Parts

    def _sizes_are_read(self) -> None:
        for name, (number, dim) in self._plan.sizes.items():
            self._where = f"size {name!r:.80}"
            self._name(name)
            self._demand(0 <= number < len(self._plan.inputs), "one of the inputs", number)
            spec = self._plan.inputs[number].spec
            fits = dim == -1 if spec is None else 0 <= dim < 2 * len(spec.sizes)
            self._demand(fits, "a dimension of the input, or -1 for an input that is a number", dim)

    def _input(self, item: Input) -> None:
        if item.spec is not None:
            self._spec(item.spec)
            self._begin(item.name, item.spec)
        elif item.name:
            self._name(item.name)

    def _weights(self) -> None:
        for name, weight in self._plan.weights.items():
            self._demand(name in self._plan.constants, "one of the constants", name)
            self._spec(weight.spec)
            self._demand(reach(weight.spec) is not None, "sizes that are numbers", weight.spec)
            for called in weight.names:
                self._weight_name(called)
        for name in self._plan.numbers:
            self._weight_name(name)

    def _weight_name(self, name: str) -> None:
        told = 0 < len(name) <= _LONGEST_WEIGHT and name.isprintable()
        self._demand(told, "the name of a parameter or buffer", name)

    def _step(self, step: Any) -> None:
        match step:
            case Allocate(name, spec):
                self._spec(spec)
                self._begin(name, spec)
            case Seeds(name, count):
                self._demand(
                    0 < count <= MAX_SEEDS, f"a number of seeds from 1 to {MAX_SEEDS}", count
                )
                self._begin(name, TensorSpec("int64", (count,), (1,)))
            case Release(name):
                self._used(name)
                del self._live[name]
            case Overwrite(name):
                self._used(name)
                free = name in self._unchanged - self._overwritten
                self._demand(free, "an input that is neither changed nor overwritten", name)
                self._overwritten.add(name)
            case Launch():
                self._launch(step)
            case OperatorStep():
                self._call(step)
            case GridCounters(name, count):
                self._whole(count, 1, MAX_COUNTERS)
                self._begin(name, TensorSpec("int32", (count,), (1,)))
            case Cooperation():
                self._cooperation(step)

    def _cooperation(self, step: Cooperation) -> None:
        waiting = [one for one in step.together if isinstance(one, Launch)]
        self._demand(len(waiting) == 1, "one launch whose programs wait", len(waiting))
        before = dict(self._live)
        for form in (step.together, step.apart):
            for one in form:
                self._demand(isinstance(one, _OF_FORMS), "memory and launches", type(one).__name__)
                self._step(one)
            self._demand(self._live == before, "a form that leaves what was there", form)
        entry, sizes = self._plan.kernels[step.launch.kernel], step.launch.sizes
        self._demand(entry.grid == COOPERATIVE_GRID, "a grid of rows that are shared", entry.grid)
        self._demand(type(sizes.get("xnumel")) is int, "a number of rows", dict(sizes))

    def _launch(self, step: Launch) -> None:
        entry = self._plan.kernels.get(step.kernel)
        if entry is None:
            raise self._refusal("one of the plan's kernels", step.kernel)
        self._demand(
            len(step.arguments) == len(entry.parameters),
            f"{len(entry.parameters)} arguments",
            len(step.arguments),
        )
        for item in step.arguments:
            if isinstance(item, str) and not _is_size(item):
                self._used(item[1:])
            else:
                self._expression(item, least=-_LARGEST - 1)
        for name in entry.most:
            given = step.arguments[entry.parameters.index(name)]
            self._demand(_is_size(given), "a size for what has a largest number", given)
        for name, size in step.sizes.items():
            self._name(name)
            self._expression(size)

    def _call(self, step: OperatorStep) -> None:
        operator = step.operator
        self._demand(
            bool(_OPERATOR.fullmatch(operator)),
            "a namespace, an operator and its overload",
            operator,
        )
        for item in (*step.arguments, *step.keywords.values()):
            self._argument(item, _MOST_DEEP)
        for name in step.keywords:
            self._name(name)
        count = len(step.outputs)
        self._demand(len(step.results) == count, f"{count} specs of results", len(step.results))
        for output, spec in zip(step.outputs, step.results, strict=True):
            if output is not None:
                self._demand(spec is not None, "a spec for each result that is used", spec)
            if spec is not None:
                self._spec(spec)
            if output is not None:
                self._begin(output, spec)

    def _argument(self, item: Any, depth: int) -> None:
        self._demand(depth > 0, f"lists in at most {_MOST_DEEP} lists", "more")
        if isinstance(item, list):
            for part in item:
                self._argument(part, depth - 1)
        elif isinstance(item, dict):
            self._reference(item)
        else:
            self._demand(
                item is None or isinstance(item, (bool, int, float, str)), "a plain value", item
            )

    def _reference(self, item: Mapping[str, Any]) -> None:
        kind = next(iter(item), "")
        if "buffer" in item:
            self._demand(set(item) == {"buffer", "spec"}, "a buffer and how it is seen", item)
            base, given = self._used(item["buffer"]), item["spec"]
            if given is not None:
                self._view(base, self._given_spec(given))
        elif kind == "size" and len(item) == 1:
            self._expression(item["size"], least=-_LARGEST - 1)
        else:
            pattern = _TORCH_NAMES.get(kind)
            named = len(item) == 1 and pattern is not None and isinstance(item[kind], str)
            holds = named and pattern is not None and bool(pattern.fullmatch(item[kind]))
            self._demand(holds, "a buffer, a size or a name of torch's", item)

    def _given_spec(self, given: Any) -> TensorSpec:
        try:
            return TensorSpec(
                given["dtype"],
                tuple(given["sizes"]),
                tuple(given["strides"]),
                given["offset"],
                given.get("device", ""),
            )
        except (TypeError, KeyError) as error:
            raise self._refusal("dtype, sizes, strides and offset of a view", given) from error

    def _output(self, output: Output) -> None:
        if output.buffer is not None:
            base = self._used(output.buffer)
            own = output.buffer not in self._overwritten
            self._demand(own, "no input that was overwritten", output.buffer)
            if output.spec is not None:
                self._view(base, output.spec)
            self._demand(
                output.spec is not None or not output.fresh, "the spec of a copy", output.spec
            )
        elif output.size is not None:
            self._expression(output.size, least=-_LARGEST - 1)

    def _kernel(self, name: str, entry: KernelEntry) -> None:
        self._name(name)
        try:
            open_grid(entry.grid, combined_parts(entry.parameters))
        except (ConfigError, KeyError, TypeError) as error:
            raise self._refusal("a kind of grid", entry.grid) from error
        for parameter in entry.parameters:
            self._name(parameter)
        for other, places in (*entry.others.items(), *entry.beyond.items()):
            known = self._plan.kernels.get(other)
            self._demand(known is not None and other != name, "another kernel", other)
            assert known is not None
            self._demand(not known.most, "a kernel that takes any number", other)
            self._demand(
                len(places) == len(known.parameters)
                and all(0 <= place < len(entry.parameters) for place in places),
                "a place of an argument for each parameter",
                places,
            )
        self._demand(
            len(entry.beyond) == bool(entry.most),
            "one kernel beyond, where there is a largest number",
            entry.beyond,
        )
        for parameter, most in entry.most.items():
            self._demand(parameter in entry.parameters, "one of the parameters", parameter)
            self._whole(most, 1, _LARGEST)
        for choices in entry.choices.values():
            self._demand(bool(choices), "a choice for each target", choices)
            for choice in choices:
                self._choice(choice)

    def _choice(self, choice: KernelChoice) -> None:
        for name, block in choice.blocks.items():
            self._name(name)
            if name == PROGRAMS:
                self._whole(block, 0, _MOST_BLOCK)
                continue
            self._whole(block, 1, _MOST_BLOCK)
            self._demand(block & (block - 1) == 0, "a power of two for a block", block)
        self._whole(choice.num_warps, 1, _MOST_WARPS)
        self._whole(choice.num_stages, 0, _MOST_STAGES)
        for name, value in choice.options.items():
            self._demand(name in _OPTIONS, f"an option of {', '.join(sorted(_OPTIONS))}", name)
            self._whole(value, 0, _MOST_WARPS)

    # -------------------------------------------------------------------------------------- Tensors

    def _spec(self, spec: TensorSpec) -> None:
        self._demand(spec.dtype in DTYPES, "a dtype", spec.dtype)
        self._demand(
            len(spec.sizes) == len(spec.strides) <= _MAX_RANK,
            f"a stride for each of up to {_MAX_RANK} sizes",
            len(spec.sizes),
        )
        for part in (*spec.sizes, *spec.strides, spec.offset):
            self._expression(part)
        self._demand(spec.device in {"", HOST}, f"the program's device or {HOST!r}", spec.device)
        extent = reach(spec)
        self._demand(
            extent is None or extent <= _MAX_ELEMENTS,
            f"a tensor of at most {_MAX_ELEMENTS} elements",
            extent,
        )

    def _view(self, base: TensorSpec | None, spec: TensorSpec) -> None:
        self._spec(spec)
        held, extent = None if base is None else reach(base), reach(spec)
        fits = held is None or extent is None or extent <= held
        self._demand(fits, f"a view of at most the {held} elements of its buffer", extent)

    def _begin(self, name: Any, spec: TensorSpec | None) -> None:
        self._name(name)
        self._demand(name not in self._live, "a new name for a buffer", name)
        self._live[name] = spec

    def _used(self, name: Any) -> TensorSpec | None:
        if not isinstance(name, str) or name not in self._live:
            raise self._refusal("a buffer that is there", name)
        return self._live[name]

    # --------------------------------------------------------------------------------------- Values

    def _expression(self, size: Size, *, least: int = 0) -> None:
        if not isinstance(size, str):
            self._whole(size, least, _LARGEST)
            return
        try:
            unknown = sorted(set(names_in(size)) - self._sizes)
        except ConfigError as error:
            raise self._refusal("a number, or an expression over sizes", size) from error
        self._demand(not unknown, f"an expression over {_listed(self._sizes)}", size)

    def _value(self, text: str) -> None:
        try:
            unknown = sorted(value_names(text) - set(self._plan.sizes))
        except ConfigError as error:
            raise self._refusal("an expression over sizes", text) from error
        self._demand(not unknown, f"an expression over {_listed(self._plan.sizes)}", text)

    def _whole(self, value: Any, least: int, most: int) -> None:
        self._demand(
            type(value) is int and least <= value <= most,
            f"a whole number from {least} to {most}",
            value,
        )

    def _name(self, name: Any) -> None:
        self._demand(isinstance(name, str) and bool(_NAME.fullmatch(name)), "a plain name", name)

    def _demand(self, holds: bool, expected: str, got: Any) -> None:
        if not holds:
            raise self._refusal(expected, got)

    def _refusal(self, expected: str, got: Any) -> FormatError:
        return FormatError(
            f"a program's plan: {self._where}: expected {expected}, got {got!r:.80}; generate the"
            " program anew",
            got=repr(got)[:80],
        )


def _is_size(argument: Size) -> bool:
    """Whether an argument of a launch is no buffer."""
    return not (isinstance(argument, str) and argument.startswith((BUFFER_MARK, NUMBER_MARK)))


def reach(spec: TensorSpec) -> int | None:
    """Return how many elements of memory a tensor spans; None where sizes that change decide."""
    if not all(type(part) is int for part in (*spec.sizes, *spec.strides, spec.offset)):
        return None
    spanned = span([*map(int, spec.sizes)], [*map(int, spec.strides)])
    return spanned and int(spec.offset) + spanned


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no sizes"
