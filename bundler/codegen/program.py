# SPDX-License-Identifier: Apache-2.0
"""`generate` and `Program`: from a PyTorch function to kernels, built for any GPU, and a plan that
runs them.

    program = bundler.codegen.generate(function, [x, weight])
    bundle = program.build(["cuda:90", "hip:gfx942"])
    (result,) = program.run(x, weight)

Users call it, the command `generate`, and the backend of torch.compile.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_letters, digits
from typing import Any, Literal

from bundler.codegen.emit import Buildable, emit_bundle
from bundler.codegen.graph_errors import check_call, refusals, refuse_called, untraceable
from bundler.codegen.kept_launches import KeptLaunches, keep_launches, program_name
from bundler.codegen.kept_programs import KeptProgram, ProgramFile
from bundler.codegen.kernels.module_text import KernelModules, ProgramKernel
from bundler.codegen.loops.loop_nodes import Reference
from bundler.codegen.measured_fusion import FusionMeasurements
from bundler.codegen.module_decorators import current_driver
from bundler.codegen.program_policy import (
    ALL,
    BY_RULE,
    NONE,
    TEMPLATES,
    WHERE_FASTER,
    ProgramPolicy,
)
from bundler.codegen.schedule import schedule_program
from bundler.codegen.verification import Verifier
from bundler.compile.source_modules import source_module
from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.format.cached_properties import cached_property
from bundler.lifecycle.tuning_directory import Pair, with_tunings
from bundler.runtime.program.graph_replay import GraphRunner, GraphUse
from bundler.runtime.program.program_plan import Cooperation, KernelEntry, ProgramPlan
from bundler.runtime.program.run import Launcher, ProgramRunner, SeedSource
from bundler.toolchain.torch_memory import TorchMemory, unusual_numbers

# Name of a program whose graph comes from no function.
_UNNAMED = "program"


@dataclass(frozen=True)
class GenerateOptions:
    """How programs are generated.

    Attributes:
        name: of the program in a bundle; empty for that of the function.
        sources: directory for modules that are imported; None takes the user's cache directory.
        wide_indices: give indices 64 bits wherever sizes may change from call to call; else they
            have 32, and a call with more elements is refused.
        assert_indices: let kernels assert that indices which they read from tensors are in range,
            as torch does, unless that is known.
        benchmark_harness: end each kernel's module with a benchmark, which runs where the module is
            run as a program.
        nan_checks: look after each launch of `Program.run` whether a tensor of floats that the
            kernel was given has a NaN or an infinity.
        verify: run the graph by eager torch beside the first call of `Program.run`, in float64,
            too, and raise where results differ.
        templates: which operators of torch that a called library computes become kernels: `none`;
            `all`: products of matrices do, convolutions of patches among them, and attention, and a
            program that would still call some operator is refused; `where faster`: those products
            and attentions that were measured to be faster so on the program's device, here or where
            a tuning record is from, and none that nothing was measured of; or `by rule`: those
            products that cuBLAS is known to be slow at (`uneven_results`), or whose launch takes
            longer than they do (`small_products`).
        graphs: launch repeated calls of `Program.run` as one CUDA graph each, where that can be
            done and nobody has results that it would write over; not with `nan_checks`.
        upcast: compute float16 and bfloat16 in float32 inside of a kernel; else each operator's
            result is rounded, as eager torch rounds it.
        policy: how kernels get their configurations.
    """

    name: str = ""
    sources: str | None = None
    wide_indices: bool = False
    assert_indices: bool = True
    benchmark_harness: bool = False
    nan_checks: bool = False
    verify: bool = False
    graphs: bool = False
    upcast: bool = True
    policy: ProgramPolicy = field(default_factory=ProgramPolicy)
    templates: str = NONE

    def __post_init__(self) -> None:
        if self.templates not in TEMPLATES:
            raise ConfigError(
                f"templates={self.templates!r}: expected one of {', '.join(map(repr, TEMPLATES))}",
                got=self.templates,
            )


@dataclass(frozen=True)
class FallbackCall:
    """An operator that the program calls as it is, and why no kernel was generated."""

    operator: str
    reason: str


@dataclass(frozen=True, eq=False)
class Program:
    """Kernels and the plan that runs them.

    Attributes:
        kernels: by name, in the order in which they are first launched.
        plan: what the program does, as data.
        fallbacks: operators that are called as they are.
        constants: tensors that the graph holds, by name.
        device: where its tensors lie in this process, as torch names it.
        options: as it was generated.
        guarded: whether torch's guards see to it that inputs are such as the example's.
        verifier: compares the first call with eager torch, where the options ask for that; its
            `verification` says what was compared.
        host_constants: names of those that lie on the host, beside the device; `run` takes the
            others to the device.
        result_strides: of each result, None where it is no tensor or they change.
        comments: kernel -> for each launch the lines of a comment that says which nodes of the
            graph and lines of the user's program it computes; none where another process generated
            the program.
        decisions: records of what was measured to decide which kernels there are; a build takes
            them along.
        kept_as: the digest of the graph's key, under which the program is kept; None where it is
            not.
    """

    kernels: Mapping[str, ProgramKernel]
    plan: ProgramPlan
    fallbacks: tuple[FallbackCall, ...]
    constants: Mapping[str, Any] = field(repr=False)
    device: str = "cpu"
    options: GenerateOptions = field(default_factory=GenerateOptions)
    guarded: bool = False
    verifier: Verifier | None = None
    host_constants: frozenset[str] = frozenset()
    result_strides: tuple[tuple[int, ...] | None, ...] = field(default=(), repr=False)
    comments: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict, repr=False)
    decisions: tuple[Pair, ...] = field(default=(), repr=False)
    kept_as: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What the program is called in a bundle."""
        return self.options.name or _UNNAMED

    @property
    def sources(self) -> dict[str, str]:
        """The text of each kernel's module, by the kernel's name."""
        return {name: kernel.source for name, kernel in self.kernels.items()}

    def build(
        self,
        targets: Sequence[str],
        *,
        workers: int | None = 1,
        candidates: int | Literal["all"] = 1,
    ) -> Bundle:
        """Compile the kernels for targets, without a GPU, into a bundle that also holds the plan.

        Args:
            targets: such as `cuda:90`.
            workers: processes that compile; None for one a core, 1 compiles in this process.
            candidates: how many candidates of each kernel, or `all`; more of one that spills
                registers.  A replay takes the one that a tuning record in the bundle names, else
                the first that does not spill.

        Raises:
            CompileFailed: a kernel does not compile for a target; the first one's message.
            UnsupportedOperator: a kernel has an 8-bit float that a target lacks.
            ConfigError: a target is none, or a number of candidates.
        """
        return build_programs([self], targets, workers=workers, candidates=candidates)

    def run(self, *inputs: Any, seed: int | None = None) -> tuple[Any, ...]:
        """Run the program in this process, by Triton's JIT, or its interpreter where that is
        switched on.

        Args:
            *inputs: tensors and numbers, as the example's.
            seed: decides the random numbers of this call; None draws from torch's generator, which
                `torch.manual_seed` sets.

        Raises:
            FloatingPointError: a NaN or an infinity, where the program was generated with
                `nan_checks`.
            WrongResult: a result of the first call is not eager torch's, where the program was
                generated with `verify`.

        Returns:
            The tensors that the function returns, in order, whatever tuples and lists it has them
            in.
        """
        if self.verifier is None:
            return self._runner(*inputs, seed=seed)
        return self.verifier(inputs, partial(self._runner, *inputs, seed=seed))

    def consume(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the program as `run` does, and empty the list of inputs, so that each is freed as
        soon as it was read, unless somebody else has it; those of `plan.overwritten` hold other
        numbers then.
        """
        if self.verifier is None:
            return self._runner.consume(inputs)
        given = list(inputs)
        inputs.clear()
        return self.run(*given)

    def runner(
        self, memory: Any, launch: Launcher, seeds: SeedSource | None = None
    ) -> ProgramRunner:
        """Return what runs the plan with other memory, another launcher, or seeds from
        elsewhere.
        """
        return ProgramRunner(
            self.plan, launch, memory, self.constants, seeds, separate=not self.guarded
        )

    @property
    def copies(self) -> int:
        """How often `run` copied a tensor so far.

        A tensor is copied that lies elsewhere than torch traced: an input at no multiple of 16
        bytes, or the result of a called operator with other strides, or in an argument's memory.
        So is a constant on the host that is a result.
        """
        return self._runner.copies

    @property
    def graph_use(self) -> GraphUse | None:
        """How often `run` launched a CUDA graph so far, and why not; None unless the options ask
        for graphs.
        """
        return self._runner.graph_use if isinstance(self._runner, GraphRunner) else None

    @cached_property
    def modules(self) -> Mapping[str, Any]:
        """The kernels: name -> `ModuleKernel`; one is imported when it is first asked for, which
        runs the generated text.
        """
        return _Modules(self.kernels, self.options.sources)

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernels run in Triton's interpreter, on the CPU; importing them runs the
        generated text.
        """
        if self.kept_launches is not None:
            return False
        return all(kernel.is_interpreted for kernel in self.modules.values())

    @property
    def _keeps_launches(self) -> bool:
        looked_at = self.options.nan_checks or self.verifier is not None
        return self.kept_as is not None and self.device != "cpu" and not looked_at

    @cached_property
    def kept_launches(self) -> KeptLaunches | None:
        """What an earlier process launched on the program's device, ready to be launched; None
        where nothing is kept, or Triton has to be asked.
        """
        if self.kept_as is None or not (self.kernels and self._keeps_launches):
            return None
        with TorchMemory(self.device).current_device():
            name = program_name(self.kept_as, self.sources)
            return KeptLaunches.find(name, self.plan, current_driver())

    def keep_launches(self) -> None:
        """Keep what was launched so far for the next process, unless an earlier one did."""
        if self.kept_as is None or self.kept_launches is not None or not self._keeps_launches:
            return
        with TorchMemory(self.device).current_device():
            name = program_name(self.kept_as, self.sources)
            keep_launches(name, self.plan, current_driver(), self.modules)

    @cached_property
    def _runner(self) -> ProgramRunner:
        memory = TorchMemory(self.device)
        constants = {
            name: tensor if name in self.host_constants else memory.placed(tensor)
            for name, tensor in self.constants.items()
        }
        checks = self.options.nan_checks
        launch: Any = (_CheckingLauncher if checks else _JitLauncher)(
            self.modules, self.plan.kernels
        )
        if self.kept_launches is not None:
            launch = _KeptLauncher(self.kept_launches, launch)
        runner = GraphRunner if self.options.graphs and not checks else ProgramRunner
        return runner(
            self.plan,
            launch,
            memory,
            constants,
            memory.seeds,
            separate=not self.guarded,
        )


def build_programs(
    programs: Sequence[Program],
    targets: Sequence[str],
    *,
    workers: int | None = 1,
    candidates: int | Literal["all"] = 1,
) -> Bundle:
    """Compile the kernels of several programs, such as `prefill` and `decode` of a model, into one
    bundle; what they have in common is compiled once.  `bundler.runtime.load_programs` loads them.

    Args:
        programs: each with a name of its own.
        targets, workers, candidates: as `Program.build`.

    Raises:
        ConfigError: two programs have one name, or there is none.
        CompileFailed, UnsupportedOperator: as `Program.build`.
    """
    names = [program.name for program in programs]
    if not names or len({*names}) < len(names):
        raise ConfigError(
            f"programs of one bundle: expected names of their own, got {', '.join(names) or 'none'};"
            " generate each with GenerateOptions(name=)",
            got=tuple(names),
        )
    built = [Buildable(one.name, one.sources, one.modules, one.plan) for one in programs]
    decisions = itertools.chain.from_iterable(one.decisions for one in programs)
    return with_tunings(emit_bundle(built, targets, workers, candidates), decisions)


class _Modules(Mapping[str, Any]):
    """Kernels by name, each imported when it is first asked for."""

    def __init__(self, kernels: Mapping[str, ProgramKernel], directory: str | None) -> None:
        self._kernels, self._directory = kernels, directory
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        found = self._loaded.get(name)
        if found is None:
            module = source_module(self._kernels[name].source, self._directory).load()
            found = self._loaded[name] = getattr(module, name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)


class _JitLauncher:
    """Launches the kernels of modules by Triton's JIT, or its interpreter."""

    def __init__(self, modules: Mapping[str, Any], entries: Mapping[str, KernelEntry]) -> None:
        self._modules, self._entries = modules, entries

    def bound(self, name: str, _sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel, whose grid follows from its arguments."""
        others = {
            other: (self._modules[other], places)
            for other, places in self._entries[name].others.items()
        }
        found: Callable[..., None] = self._modules[name].bound_among(others)
        return found

    def choose(
        self, step: Cooperation, together: Callable[..., None], apart: Callable[..., None]
    ) -> Callable[..., None]:
        """Return what runs one form of a computation: of one launch where all its programs run at
        once, and, where that is to be measured, it is faster.
        """
        name, *others = step.kernels
        kernel = self._modules[name]
        if not kernel.run_at_once(int(step.launch.sizes["xnumel"])):
            return apart
        if not step.measured:
            return together
        forms = {name: together, others[0]: apart}
        launched = {one: self._modules[one] for one in step.kernels}
        found: Callable[..., None] = kernel.fastest(forms, launched)
        return found


class _KeptLauncher:
    """Launches what an earlier process launched, and the rest by Triton's JIT."""

    def __init__(self, kept: KeptLaunches, jit: _JitLauncher) -> None:
        self._kept, self._jit, self.choose = kept, jit, jit.choose

    def bound(self, name: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel."""
        return self._kept.bound(name, sizes, partial(self._jit.bound, name, sizes))


class _CheckingLauncher(_JitLauncher):
    """Looks after each launch for a NaN or an infinity, so that the kernel that made it is
    named.
    """

    def bound(self, name: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel and looks at its arguments."""
        launch = super().bound(name, sizes)

        def checking(*arguments: Any) -> None:
            launch(*arguments)
            wrong = unusual_numbers(arguments)
            if wrong:
                raise FloatingPointError(
                    f"{name}: after its launch {wrong}: expected finite numbers; look at what the"
                    " function computes there, or leave nan_checks out"
                )

        return checking

    def choose(
        self, _step: Cooperation, _together: Callable[..., None], apart: Callable[..., None]
    ) -> Callable[..., None]:
        """Return the form without workspaces, in which programs have what is no result."""
        return apart


def generate(
    function: Any,
    example_inputs: Sequence[Any],
    *,
    dynamic: bool = False,
    device: str | None = None,
    options: GenerateOptions | None = None,
) -> Program:
    """Generate the kernels of a function.

    Args:
        function: of tensors, or a `torch.export.ExportedProgram`, whose parameters and buffers are
            the first inputs of the program, and whose changed buffers its first outputs; backward
            steps that a function takes are part of the program.
        example_inputs: one tensor or number for each argument; their values do not matter.
        dynamic: let sizes change from call to call, where torch finds that they may.
        device: that the program is for, such as `cuda`, which need not be here: the example's
            tensors, and those of a module, are taken to lie there.  None takes that of the example.
        options: see `GenerateOptions`.

    Returns:
        The program.  An operator that has no kernel is called as it is, and listed in `fallbacks`.

    Raises:
        ConfigError: the function cannot be called with so many inputs, or is a class, or there is
            no such device.
        UnsupportedOperator: the function cannot be traced, the graph has something that is no ATen
            operator or tensors on two devices beside the CPU, or the generator failed; `operator`
            and `line` say where in the user's program.
    """
    tracing = importlib.import_module("bundler.codegen.trace")
    if not tracing.is_exported(function):
        check_call(function, example_inputs)
    options = options or GenerateOptions()
    try:
        traced = tracing.trace(
            function,
            example_inputs,
            dynamic=dynamic,
            device=device,
            templates=options.templates == ALL,
        )
    except Exception as error:
        refusal = untraceable(error)
        if refusal is None:
            raise
        raise refusal from error
    if not options.name:
        options = replace(options, name=_name_of(function))
    program = program_of_graph(traced, options)
    read = traced.meta.get(tracing.READ_NUMBERS, {})
    plan = replace(program.plan, numbers=read) if read else program.plan
    return replace(program, plan=plan, device=program.device if device is None else device)


def program_of_graph(
    module: Any,
    options: GenerateOptions | None = None,
    *,
    guarded: bool = False,
    keep: bool = False,
) -> Program:
    """Return the program of an FX graph whose nodes have fake tensors.

    Args:
        module: the graph.
        options: see `GenerateOptions`.
        guarded: have torch see to it that sizes which change fit where they were taken to, so that
            it compiles anew where they do not.
        keep: take the program that another process, or this one, kept of an equal graph, or else
            keep it; for `guarded` ones alone.
    """
    options = options or GenerateOptions()
    with refusals("the graph"):
        # A bundle holds no constants, so a program that goes into one gets none by itself.
        host_constants = importlib.import_module("bundler.codegen.host_constants")
        placed = host_constants.on_device(module, constants=guarded)
        file = ProgramFile(placed, options) if keep else None
        found = None if file is None else file.read()
        if file is not None and found is not None:
            return as_kept(*found, options, module=module, digest=file.digest)
        faster: Collection[Any] = ()
        small: Collection[Any] = ()
        decisions: Sequence[Pair] = ()
        if options.templates == WHERE_FASTER:
            choices = importlib.import_module("bundler.codegen.measured_templates")
            make = partial(program_of_graph, guarded=True)
            faster, decisions = choices.faster_templates(placed, options, make)
        if options.templates == BY_RULE and not options.policy.deterministic:
            uneven = importlib.import_module("bundler.codegen.uneven_products")
            rules = importlib.import_module("bundler.codegen.small_products")
            small = rules.small_products(placed)
            faster = uneven.uneven_results(placed) | small
        lowering = importlib.import_module("bundler.codegen.lower")
        graph = lowering.lower_graph(
            placed,
            deterministic=options.policy.deterministic,
            templates=options.templates == ALL or faster,
            unmeasured=small,
        )
    # torch.compile guards that narrow indices fit, and compiles anew; a program of its own checks
    # each call instead, by the limits of its plan.
    bounded = graph.guarded if guarded else lambda _: True
    graph.guards = [] if guarded else graph.conditions()
    # After torch.use_deterministic_algorithms(True) nothing is measured either, as in
    # TorchInductor.  Programs that wait for each other add in an order that is known.
    shared = options.policy.cooperative_reductions
    policy = (
        ProgramPolicy(deterministic=True, cooperative_reductions=shared)
        if graph.builder.deterministic
        else options.policy
    )
    measured = None
    if policy.measured_fusion:
        measured = FusionMeasurements.here(graph.device, policy, options.sources)
    with refusals("the schedule"):
        built = schedule_program(
            graph,
            None if options.wide_indices else bounded,
            asserted=options.assert_indices,
            upcast=options.upcast,
            modules=KernelModules(harness=options.benchmark_harness, policy=policy.metadata),
            measurements=measured,
        )
    if options.templates == ALL:
        refuse_called(built.plan, graph.fallbacks)
    fallbacks = tuple(FallbackCall(found.operator, found.reason) for found in graph.fallbacks)
    buffers = graph.builder.buffers
    # Constants on the host stay there when the others are moved to the program's device.
    away = frozenset(name for name in graph.constants if buffers[name].layout.device)
    strides = tuple(map(_known_strides, graph.outputs))
    is_kept = False
    if file is not None:
        kept = KeptProgram(
            {name: kernel.source for name, kernel in built.kernels.items()},
            built.plan,
            [(one.operator, one.reason) for one in fallbacks],
            graph.attributes,
            away,
            graph.device,
            strides,
            graph.callers_results,
        )
        is_kept = file.write(kept, graph.asked)
    verifier = Verifier(module, built.plan, graph.callers_results) if options.verify else None
    comments: dict[str, tuple[tuple[str, ...], ...]] = {}
    for name, filled in built.launches:
        comments[name] = (*comments.get(name, ()), graph.sources.comment(filled))
    return Program(
        built.kernels,
        built.plan,
        fallbacks,
        graph.constants,
        graph.device,
        options,
        guarded,
        verifier,
        away,
        strides,
        comments,
        (*decisions, *([] if measured is None else measured.records)),
        file.digest if file is not None and is_kept else None,
    )


def as_kept(
    kept: KeptProgram,
    constants: Mapping[str, Any],
    options: GenerateOptions,
    *,
    digest: str | None,
    module: Any = None,
) -> Program:
    """Return a program that was kept.

    Args:
        kept: what was kept.
        constants: tensors that the graph holds for it.
        options: by which it was generated.
        digest: under which it is kept.
        module: the graph, which eager torch runs beside the program where it is verified.
    """
    return Program(
        {name: ProgramKernel(name, source) for name, source in kept.kernels.items()},
        kept.plan,
        tuple(FallbackCall(operator, reason) for operator, reason in kept.fallbacks),
        constants,
        kept.device,
        options,
        True,
        Verifier(module, kept.plan, kept.callers_results) if options.verify else None,
        kept.host_constants,
        tuple(kept.result_strides),
        kept_as=digest,
    )


def _known_strides(result: Any) -> tuple[int, ...] | None:
    if not isinstance(result, Reference):
        return None
    strides = result.layout.strides
    return tuple(map(int, strides)) if all(stride.is_Integer for stride in strides) else None


def _name_of(function: Any) -> str:
    """Return what a function, method or module is called, as a name that a program may have."""
    name = getattr(function, "__name__", "") or type(function).__name__
    return (
        "".join(filter(set(ascii_letters + digits + "_").__contains__, name)).lstrip("_")
        or _UNNAMED
    )
