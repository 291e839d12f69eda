# SPDX-License-Identifier: Apache-2.0
"""`load_program`: a program of a bundle, its plan read and checked, its kernels launched
statically; `load_programs`: several of one bundle, which share their weights.

    program = bundler.runtime.load_program("model.tbundle", memory=memory)
    (output,) = program(x, weight)

No compiler and no Triton is needed, and no torch unless the memory is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

from bundler.errors import (
    BundlerError,
    CannotLaunchStatically,
    FormatError,
    NotFound,
    OperatorFailed,
    Untrusted,
)
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Opaque
from bundler.format.keyparts import FUNCTIONS_PART
from bundler.format.launch_spec import TuningRecord, joint_source
from bundler.format.opaque_files import is_code_path, program_name
from bundler.runtime.heuristics.launch_grids import (
    COOPERATIVE_GRID,
    LaunchGrid,
    combined_parts,
    open_grid,
)
from bundler.runtime.launch.bundle_kernels import Kernels, load
from bundler.runtime.launch.drivers.driver import COOPERATIVE, Driver, all_at_once
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.runtime.program.allowed_operators import unlisted
from bundler.runtime.program.device_memory import DeviceMemory
from bundler.runtime.program.device_tensors import DeviceTensor, span
from bundler.runtime.program.graph_replay import GraphRunner
from bundler.runtime.program.operator_arguments import ArgumentRefused, check_arguments
from bundler.runtime.program.program_plan import (
    Cooperation,
    KernelChoice,
    KernelEntry,
    OperatorStep,
    ProgramPlan,
    read_plan,
)
from bundler.runtime.program.program_weights import bound_weights
from bundler.runtime.program.run import ProgramMemory, ProgramRunner, SeedStream
from bundler.trust.admission import admit

_SHOWN = 400
_OPTION = "option."


def load_program(
    bundle: Bundle | str | os.PathLike[str],
    *,
    memory: ProgramMemory | None = None,
    name: str | None = None,
    driver: Driver | None = None,
    constants: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    seed: int | None = None,
    trust: Literal["kernels", "code", "signed"] = "kernels",
    graphs: bool = False,
) -> ProgramRunner:
    """Return a program of a bundle, ready to run without a compiler.

    Args:
        bundle: an open bundle, or the path of one.
        memory: where its tensors come from; None makes a `DeviceMemory` of the first GPU.
        name: of the program; None where the bundle has one only.
        driver: which GPUs to use; None takes the memory's, else opens that of the machine.
        constants: tensors that the program holds, by name.
        weights: a file of safetensors, an index of such (`*.index.json`), or several, that has the
            other constants by the names of the module's parameters and buffers; each is copied to
            the device once.  What else is in a file is left alone.
        seed: of its random numbers: equal seeds give equal numbers in the first call, in the
            second, and so on. None: other numbers in each process.
        trust: `code` for a program that calls operators of your own or of other libraries, which
            run on the CPU and do what they like; `signed` where a trusted key has to vouch for
            that.
        graphs: launch repeated calls as one CUDA graph each, where that can be done and nobody has
            results that it would write over; the memory is a `DeviceMemory` or a `TorchMemory`.

    Raises:
        ConfigError: graphs of a memory that has none; a weight has another dtype or shape
            than the program's.
        NotFound: the bundle has no such program, none of its kernels is for the device, no library
            registers an operator that it calls, or a weight is not there.
        FormatError, DigestMismatch: the bundle or the plan in it is damaged.
        Untrusted: it calls operators that need trust in code, or a signature is required that is
            not there.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    memory, driver = _where(memory, driver)
    loading = _Loading(opened, memory, driver, weights, None, seed, trust, graphs)
    return loading.program(name, constants)


def load_programs(
    bundle: Bundle | str | os.PathLike[str],
    names: Sequence[str] | None = None,
    *,
    memory: ProgramMemory | None = None,
    driver: Driver | None = None,
    constants: Mapping[str, Mapping[str, Any]] | None = None,
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    seed: int | None = None,
    trust: Literal["kernels", "code", "signed"] = "kernels",
    graphs: bool | Collection[str] = False,
) -> dict[str, ProgramRunner]:
    """Return several programs of a bundle by name, such as `prefill` and `decode` of a model, which
    have one memory, and one copy of each weight.

    Args:
        bundle: an open bundle, or the path of one.
        names: of the programs; None for all of the bundle.
        memory, driver, seed, trust: as `load_program`.
        constants: of each program, by its name.
        weights: as `load_program`; each tensor of a file is copied to the device once for all.
        graphs: launch repeated calls as CUDA graphs: of all programs, or of those that are named.

    Raises:
        As `load_program`.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    chosen, constants = opened.programs if names is None else tuple(names), constants or {}
    if isinstance(graphs, bool):
        graphs = chosen if graphs else ()
    elif isinstance(graphs, str):
        graphs = (graphs,)
    for name in (*graphs, *constants):
        if name not in chosen:
            raise NotFound(
                f"graphs= and constants= of the program {name!r}: expected one of those that are"
                f" loaded, {', '.join(chosen)}",
                name=name,
            )
    memory, driver = _where(memory, driver)
    made: dict[Any, Any] = {}
    found = {}
    for name in chosen:
        loading = _Loading(opened, memory, driver, weights, made, seed, trust, name in graphs)
        found[name] = loading.program(name, constants.get(name))
    return found


def _where(
    memory: ProgramMemory | None, driver: Driver | None
) -> tuple[ProgramMemory, Driver | None]:
    """Return where tensors come from, and what launches there; None for what the bundle needs."""
    if memory is None:
        memory, driver = DeviceMemory(driver=driver), None
    return memory, driver or getattr(memory, "driver", None)


class _Loading(NamedTuple):
    """How programs of a bundle are loaded: the arguments of `load_program`, and `made`, the weights
    that other programs of several have already.
    """

    bundle: Bundle
    memory: ProgramMemory
    driver: Driver | None
    weights: Any
    made: dict[Any, Any] | None
    seed: int | None
    trust: Literal["kernels", "code", "signed"]
    graphs: bool

    def program(self, name: str | None, constants: Mapping[str, Any] | None) -> ProgramRunner:
        """Return a program; raises as `load_program`."""
        opened, memory = self.bundle, self.memory
        plan, code = self._plan(name)
        _find_operators(plan, memory)
        if self.weights is not None:
            constants = bound_weights(plan, self.weights, memory, constants or {}, self.made)
        checked = CheckedMemory(memory, trusted=code)
        seeds = SeedStream(memory, self.seed)
        runner = GraphRunner if self.graphs else ProgramRunner
        if not plan.kernels:  # it returns inputs, views of them, and what operators give
            admit(opened)
            return runner(plan, _launch_nothing, checked, constants, seeds)
        _refuse_unknown(plan, opened)
        kernels = load(opened, driver=self.driver)
        kernels.leave_out(partial(_is_anothers, plan))
        return runner(
            plan, StaticLauncher(plan, kernels, opened.tuning_records), checked, constants, seeds
        )

    def _plan(self, name: str | None) -> tuple[ProgramPlan, bool]:
        """Return a program's plan, and whether it may run code."""
        entry, code = _plan_of(self.bundle, name)
        if code and admit(self.bundle, self.trust).trust != "code":
            raise Untrusted(
                f"program {program_name(entry.path)!r}: it calls operators that run as code of"
                " their own; pass trust='code' if you know who made the bundle, or trust='signed'"
                " where a key that you trust signed it for code",
                path=entry.path,
            )
        plan = read_plan(self.bundle.read(entry.artifact))
        others = () if code else unlisted(plan)
        if others:
            raise Untrusted(
                f"program {program_name(entry.path)!r}: {', '.join(others[:8])}: expected operators"
                " that any program may call; build the program anew with this version, which marks"
                " it as code",
                operators=others,
            )
        return plan, code


def _is_anothers(plan: ProgramPlan, kernel: Kernel) -> bool:
    """Whether a kernel of a bundle is none of a program: another one may have that name, and take
    the same arguments.
    """
    entry = plan.kernels.get(kernel.name)
    if entry is None:
        return True
    text = _text_of(kernel)
    return bool(entry.functions and text and text != entry.functions)


def _text_of(kernel: Kernel) -> str:
    return "" if kernel.parts is None else dict(kernel.parts.parts).get(FUNCTIONS_PART, "")


def _refuse_unknown(plan: ProgramPlan, bundle: Bundle) -> None:
    """Raise where a bundle has kernels of one name with several texts, and a plan does not say
    which is its own.
    """
    texts: dict[str, str] = {}
    for kernel in bundle.kernels if len(bundle.programs) > 1 else ():
        entry = plan.kernels.get(kernel.name)
        if entry is not None and not entry.functions:
            text = _text_of(kernel)
            if texts.setdefault(kernel.name, text) != text:
                raise CannotLaunchStatically(
                    f"{kernel.name}: several programs of the bundle have kernels of this name, and"
                    " this one does not say which is its own; build it anew with this version",
                    kernel=kernel.name,
                )


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


class CheckedMemory:
    """A `ProgramMemory` for a plan of somebody else: views and operators stay in their tensors, and
    every failure is typed.

    A plan that was made in this process has its memory itself, and so the errors of torch.

    Args:
        memory: that has the tensors.
        trusted: whether operators may be called with whatever arguments the plan has.
    """

    def __init__(self, memory: Any, *, trusted: bool = False) -> None:
        self._memory, self._trusted = memory, trusted
        self.host = bool(getattr(memory, "host", False))
        self.device: Any = getattr(memory, "device", None)
        # Only programs with random numbers ask for the first, those with launches whose programs
        # wait for each other for the second, those that copy tensors for the third.
        self.integers: Any = getattr(memory, "integers", None)
        self.counters: Any = getattr(memory, "counters", None)
        self.copied: Any = getattr(memory, "copied", None)
        self.graphs: Any = getattr(memory, "graphs", None)
        self.workspaces: Any = getattr(memory, "workspaces", None)
        # Of a memory that takes tensors of every library as its own.
        self.tensor: Any = getattr(memory, "tensor", None)
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
            held, reach = _held(tensor), span(sizes, strides)
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
        return span(tensor.shape, tensor.strides)
    return span(tensor.shape, tensor.stride()) if hasattr(tensor, "stride") else None


class StaticLauncher:
    """Launches a plan's kernels from a bundle, each with the candidate for the current device, and
    of several that compute the same the one that a record names.

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
        self._grids = {
            name: open_grid(entry.grid, combined_parts(entry.parameters))
            for name, entry in plan.kernels.items()
        }

    def bound(self, name: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel with the grid of some sizes, given its arguments."""
        current_device = self._driver.device
        known: dict[int, _Found] = {}

        def launch(*arguments: Any) -> None:
            device = current_device()
            found = known.get(device)
            if found is None:
                found = known[device] = self._on(name, device, sizes)
            kernel, grid, keywords, places = found
            if 0 not in grid:
                given = arguments if places is None else [arguments[place] for place in places]
                kernel[grid](*given, **keywords)

        return launch

    def choose(
        self, step: Cooperation, together: Callable[..., None], apart: Callable[..., None]
    ) -> Callable[..., None]:
        """Return what runs one form of a computation: of one launch where all its programs run at
        once on the current device and no record names the other one.
        """
        known: dict[int, Callable[..., None]] = {}

        def run(values: Any) -> None:
            device = self._driver.device()
            found = known.get(device)
            if found is None:
                found = known[device] = together if self._waits(step, device) else apart
            found(values)

        return run

    def _waits(self, step: Cooperation, device: int) -> bool:
        """Whether the launch whose programs wait for each other is run on a device."""
        name, *others = step.kernels
        properties = self._driver.properties(device)
        target = f"{self._driver.backend}:{properties.arch}"
        if not self._entries[name].choices.get(target):
            return False
        known = [(one, self._entries[one].source) for one in step.kernels]
        source = joint_source(known) if all(text for _, text in known) else ""
        records = [one for one in self._records if source and _is_about(one, source, target)]
        chosen = _chosen(records[0]) if records else name if not step.measured else others[0]
        grid = self._on(name, device, {"xnumel": int(step.launch.sizes["xnumel"])}).grid
        return chosen == name and all_at_once(self._driver.backend, properties, [grid])

    def _on(self, name: str, device: int, sizes: Mapping[str, int]) -> _Found:
        """Return the kernel that is launched on a device."""
        target = f"{self._driver.backend}:{self._driver.properties(device).arch}"
        name, places = _fastest(name, self._entries, target, self._records)
        built = partial(_is_built, self._kernels[name], target)
        choice = _choice(name, self._entries[name], target, self._records, built)
        keywords = {
            **choice.blocks,
            "num_warps": choice.num_warps,
            "num_stages": choice.num_stages,
            **choice.options,
        }
        if self._entries[name].grid == COOPERATIVE_GRID:
            keywords[COOPERATIVE] = True
        grid = self._grids[name](choice.blocks, sizes)
        return _Found(self._kernels[name], grid, keywords, places)


class _Found(NamedTuple):
    """A kernel, its grid, its blocks and options, and which of a launch's arguments it gets; None
    for all of them.
    """

    kernel: StaticKernel
    grid: LaunchGrid
    keywords: dict[str, Any]
    places: tuple[int, ...] | None


def _fastest(
    name: str, entries: Mapping[str, KernelEntry], target: str, records: Sequence[TuningRecord]
) -> tuple[str, tuple[int, ...] | None]:
    """Return the kernel that a record of all that compute the same names, and the places of its
    arguments; else the kernel itself.
    """
    others = entries[name].others
    source = joint_source((one, entries[one].source) for one in (name, *others)) if others else ""
    for record in records if others else ():
        chosen = _chosen(record)
        if (
            chosen in others
            and _is_about(record, source, target)
            and entries[chosen].choices.get(target)
        ):
            return chosen, others[chosen]
    return name, None


def _chosen(record: TuningRecord) -> str:
    """Return the kernel that a record of several that compute the same names."""
    return str({key: value.plain() for key, value in record.config}.get("kernel"))


def _is_about(record: TuningRecord, source: str, target: str) -> bool:
    parts = dict(record.parts)
    return parts.get("source") == source and target in parts.get("device", "").split(", ")


def _is_built(kernel: StaticKernel, target: str, choice: KernelChoice) -> bool:
    """Whether a kernel was compiled for a target as a choice says."""
    counts = {"num_warps": choice.num_warps, "num_stages": choice.num_stages, **choice.options}
    for one in kernel.specializations:
        names = [argument.name for argument in one.arguments]
        constants = {names[path[0]]: value.plain() for path, value in one.constants.items()}
        if (
            str(one.target) == target
            and choice.blocks.items() <= constants.items()
            and all(one.option(name, value) == value for name, value in counts.items())
        ):
            return True
    return False


def _choice(
    name: str,
    entry: KernelEntry,
    target: str,
    records: Sequence[TuningRecord],
    built: Callable[[KernelChoice], bool] = lambda _: False,
) -> KernelChoice:
    """Return the candidate that a record of this kernel's source on such a device names, or what a
    search found beyond the candidates where the bundle has it, else the first candidate.

    Args:
        name, entry: of the kernel.
        target: of the device.
        records: of the bundle.
        built: whether the bundle has the kernel as a choice says.
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
        if entry.source and _is_about(record, entry.source, target):
            config = {key: value.plain() for key, value in record.config}
            for choice in choices:
                wanted = {
                    **choice.blocks,
                    "num_warps": choice.num_warps,
                    "num_stages": choice.num_stages,
                }
                wanted |= {f"{_OPTION}{key}": value for key, value in choice.options.items()}
                if all(config.get(key) == value for key, value in wanted.items()):
                    return choice
            found = _beyond(config, choices[0])
            if found is not None and built(found):
                return found
    return choices[0]


def _beyond(config: Mapping[str, Any], like: KernelChoice) -> KernelChoice | None:
    """Return what a record's config says, where it has the blocks of a candidate."""
    blocks = {name: config.get(name) for name in like.blocks}
    warps, stages = config.get("num_warps"), config.get("num_stages")
    if not (isinstance(warps, int) and isinstance(stages, int)):
        return None
    if not all(isinstance(block, int) for block in blocks.values()):
        return None
    options = {k.removeprefix(_OPTION): v for k, v in config.items() if k.startswith(_OPTION)}
    return KernelChoice(blocks, warps, stages, options)
