# SPDX-License-Identifier: Apache-2.0
"""`HeuristicKernel`: a JIT function with the candidates that a heuristic chose and a grid that
follows from its arguments.

The decorators of `heuristic_decorators` and Inductor's generated modules make one from
`Candidates`. All candidates may be compiled in the workers of a service before the first call
(`HeuristicKernel.compile_in`). Sizes repeat, so grids are remembered by config and sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bundler.compile.build_plan import jobs_of
from bundler.compile.compile_job import Compiled, Job, SourceRef
from bundler.compile.job_futures import CompileFuture, JoinedFuture
from bundler.compile.service import CompileService
from bundler.errors import CompileFailed, ConfigError
from bundler.format.entries import Target
from bundler.format.host_descriptors import PARAMETER
from bundler.format.summary import count
from bundler.runtime import grids
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics import launch_grids
from bundler.runtime.heuristics.block_limits import block_name, max_block
from bundler.runtime.heuristics.combo_rules import ComboPlan
from bundler.runtime.heuristics.facts import HeuristicKind, Setting, SizeHints
from bundler.runtime.heuristics.grid_expressions import GridExpressions, expressions_of
from bundler.runtime.heuristics.launch_grids import Grid, LaunchGrid, launch_grid
from bundler.runtime.launch.compiled_dispatch import compiled_dispatcher
from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel, Launched
from bundler.runtime.tuning.benchmark import Clock
from bundler.runtime.tuning.candidate_compiler import asked_for, importable
from bundler.runtime.tuning.config_list import ListedConfigs, Pruning, effective_on, keywords_on
from bundler.runtime.tuning.descent import SKIPPED_DETERMINISTIC, Space
from bundler.runtime.tuning.kernel_export import Exported
from bundler.runtime.tuning.occupancy import DeviceLimits
from bundler.runtime.tuning.result_lookup import Choice
from bundler.runtime.tuning.tuner import ArgumentEffects
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import jit_specialization, profiler_hooks
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.argument_specs import Spec
from bundler.toolchain.descriptor_arguments import declared_by, with_descriptors

MAX_KNOWN = 4096
MAX_GRIDS = 4096
# Kinds of calls; Inductor makes a kernel of its own for each.
MAX_KINDS = 256
Args = tuple[Any, ...]
GridOf = Callable[[Choice, Args], grids.Grid]


@dataclass(frozen=True)
class Candidates:
    """The candidates that a heuristic chose, and what it chose them by.

    Attributes:
        kind: of heuristic; tuners look at it.
        configs: the default first.
        setting: device, facts and policy that it looked at.
        hints: sizes; empty for kinds that do not look at them.
        combo: how a combined kernel may be tuned further.
    """

    kind: HeuristicKind
    configs: tuple[Config, ...]
    setting: Setting
    hints: SizeHints = field(default_factory=dict)
    combo: ComboPlan | None = None


@dataclass(frozen=True)
class _CallGrid:
    """The grid of one call: a function of its arguments, with what only the grid needs."""

    grid: Grid
    work: Callable[[Mapping[str, Any], Mapping[str, Any]], LaunchGrid]
    extra: Mapping[str, Any]

    def __call__(self, meta: Mapping[str, Any]) -> LaunchGrid:
        return self.work(meta, {**meta, **self.extra})

    def expressions(self, blocks: Mapping[str, Any]) -> GridExpressions:
        """Return the grid of any call; raises as `expressions_of`."""
        return expressions_of(self.grid, blocks)


class HeuristicKernel:
    """A JIT function, its candidates, and its grid; launched with `run(*args)`, without a grid or
    blocks.

    The first call measures the candidates, when there are several, and later ones launch the
    winner, as `AutotunedKernel` does it: records, bundles and tables hold here too.  In Triton's
    interpreter the first candidate runs.  Any thread may call it.

    Args:
        fn: what `@triton.jit` made.
        candidates: of a heuristic.
        grid: how many programs, from blocks and sizes.
        mutated: arguments that the kernel changes.
        zeroed: arguments that have to be zero before it runs.
        constants: values of further constexpr parameters.
        extra_arguments: names of arguments that only the grid needs; a call gives them last.
        compile_options: compiler options of every candidate.
        options: of the tuner; kind, space and determinism follow from the candidates.
        clock: makes what times a launch; None for the GPU's own.
        source: where another process finds the function, so that it can compile candidates; None
            where it can be imported by name.
        first: candidates in front of the heuristic's.

    Raises:
        ConfigError: the candidates do not fit the function's parameters.
    """

    def __init__(
        self,
        fn: Any,
        candidates: Candidates,
        grid: Grid,
        *,
        mutated: Sequence[str] = (),
        zeroed: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
        extra_arguments: Sequence[str] = (),
        compile_options: Mapping[str, Any] | None = None,
        options: TunerOptions | None = None,
        clock: Callable[[], Clock] | None = None,
        source: SourceRef | None = None,
        first: Sequence[Config] = (),
    ) -> None:
        self.fn = fn
        self.source = source
        self.candidates = candidates
        self.grid = grid
        self.mutated, self.zeroed = tuple(mutated), tuple(zeroed)
        self.parameters: tuple[str, ...] = tuple(fn.arg_names)
        self.__name__: str = fn.__name__
        self.__doc__ = fn.__doc__
        fixed = _constexprs(
            fn
        )  # metadata of generated code may name constants that the function does not have
        self.constants = {name: value for name, value in (constants or {}).items() if name in fixed}
        self.configs = self._fitting([*first, *candidates.configs])
        # A call gives the parameters that neither a constant nor a config does, then what only the
        # grid needs.
        known = {*self.constants, *self.configs[0].kwargs}
        if declared_by(toolchain.innermost(fn)) is not None:
            known.add(PARAMETER)
        self.extra_arguments = tuple(extra_arguments)
        self.arguments = (
            *(name for name in self.parameters if name not in known),
            *extra_arguments,
        )
        self.compile_options = dict(compile_options or {})
        self.tuned = self._tuner(options or TunerOptions(), clock)
        self._fixed = {**self.constants, **self.compile_options}
        self._count = len(self.arguments) - len(self.extra_arguments)
        # Constants and blocks mostly come last, so that a call's arguments are the first
        # parameters, in their order.
        self._in_order = self.arguments[: self._count] == self.parameters[: self._count]
        # The kinds of grids here look at whole numbers alone; a function of the user's may look at
        # anything.
        self._pure = getattr(grid, "__module__", None) == launch_grids.__name__
        self._choice_grids: dict[int, _OfChoice] = {}

    def __repr__(self) -> str:
        return (
            f"HeuristicKernel({self.__name__}, {self.candidates.kind},"
            f" {count(len(self.configs), 'config')})"
        )

    def _fitting(self, configs: Sequence[Config]) -> tuple[Config, ...]:
        """Return the candidates, each once; without a block for x where the function has none, so
        that no tuner varies it.
        """
        # Rules propose a block for x for every kernel; a function without one handles a single x in
        # each program.
        if "XBLOCK" not in self.parameters:
            odd = [config for config in configs if config.kwargs.get("XBLOCK", 1) != 1]
            if odd:
                raise ConfigError(
                    f"{self.__name__}: has no XBLOCK, so each program has one element of x; a"
                    f" candidate has {odd[0]}",
                    kernel=self.__name__,
                )
            configs = [config.without_kwargs("XBLOCK") for config in configs]
        if not configs:
            raise ConfigError(
                f"{self.__name__}: expected at least one config", kernel=self.__name__
            )
        return ListedConfigs.of(unique(configs)).for_kernel(self.__name__, self.parameters).configs

    def _tuner(self, options: TunerOptions, clock: Callable[[], Clock] | None) -> AutotunedKernel:
        kind, setting = self.candidates.kind, self.candidates.setting
        policy, device = setting.policy, setting.device
        options = replace(
            options,
            kind=kind,
            space=self.space(),
            steps=options.steps or self._steps(),
            custom=bool(
                options.custom
            ),  # a heuristic's candidates, or a list of a generator, were not chosen by a person
            limits=options.limits.or_else(
                DeviceLimits(device.regs_per_multiprocessor, device.max_threads_per_multiprocessor)
            ),
            # Other blocks add in another order, which gives other numbers; a pointwise kernel adds
            # nothing up.
            deterministic=options.deterministic
            or (policy.deterministic and kind in SKIPPED_DETERMINISTIC),
        )
        effects = ArgumentEffects(self.mutated, self.zeroed)
        return AutotunedKernel(
            self.fn,
            ListedConfigs.of(self.configs),
            (),
            Pruning(),
            effects=effects,
            clock=clock,
            options=options,
            source=self.source,
        )

    def _steps(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """Return how a combined kernel is tuned further; not at all where a reduction among its
        kernels has to give the same numbers.
        """
        combo, policy = self.candidates.combo, self.candidates.setting.policy
        return () if combo is None or policy.deterministic else combo.steps

    def run(self, *args: Any, stream: int | None = None, **kwargs: Any) -> None:
        """Launch with the grid that follows from the arguments; a grid with a zero launches
        nothing.

        Args:
            args, kwargs: as `arguments` lists them: no block, and no constant that is known.
            stream: None for the current one.

        Raises:
            ConfigError: an argument is missing or too many, a size is none, or what tuning raises.
            CannotLaunchStatically: the grid is larger than the device can launch.
            NoValidConfig: no candidate can be used.
        """
        tuned = self.tuned
        # Calls as generated wrappers make them: arguments by position, on the current stream.
        if self._in_order and not kwargs and len(args) == len(self.arguments):
            again = tuned.again
            if again and (stream is None or stream == again.stream(again.device())):
                again.launch(
                    args[again.start :], *(args[: self._count] if self.extra_arguments else args)
                )
                return
            if self._launch_known(args, stream):
                if again is None:
                    self._launch_quickly_from_now_on(args)
                return
        bound = self.bind(*args, **kwargs)
        if toolchain.interpreted(self.fn):
            self._interpret(bound)
        elif stream is None:
            self._first_run(bound)
        else:
            with tuned.on_stream(stream):
                self._first_run(bound)

    # What binds programs launches it with `tuned.again` then, without a frame of Python.
    __call__ = run

    def _launch_known(self, args: tuple[Any, ...], stream: int | None) -> bool:
        """Launch a call whose config is known; False where it is not, or the stream is not the
        current one.
        """
        given = args[: self._count] if self.extra_arguments else args
        choice = self.tuned.known(given, stream)
        if choice is None:
            return False
        self.tuned.launch(choice, self._known_grid(choice, args), given, self._fixed)
        return True

    def _launch_quickly_from_now_on(self, args: tuple[Any, ...]) -> None:
        """Make what launches calls like this one, which was launched, without Python between the call
        and the launcher, where there is a compiled dispatcher and the call is of that form.

        Generated wrappers call a kernel with tensors and then whole numbers, by position, on the
        current stream.  The compiled dispatcher tells such calls apart by type and alignment, as a
        `StaticKernel` has it; the numbers decide about the grid, so they stand in the place of one.
        """

        # What launches slowly must not come back here, so it is not `run`.
        def slow(args: tuple[Any, ...]) -> None:
            if not self._launch_known(args, None):
                self._first_run(self.bind(*args))

        start = len(args)
        while start and type(args[start - 1]) is int:
            start -= 1
        # A number in front of a tensor may be a size, too, and has no place in what the dispatcher
        # looks grids up by.
        looked_at = self.tuned.options.dump is not None or self.tuned.options.plugins
        if self._pure and not looked_at and int not in map(type, args[:start]):
            made = RepeatedLaunches(
                self.tuned, start, self._count, slow, self._known_grid, self._fixed
            )
            self.tuned.again = made if made.launch is not None else False
        else:
            self.tuned.again = False

    def _interpret(self, bound: dict[str, Any]) -> None:
        grid = self.grid_of(self.configs[0], bound)
        extra = {*self.extra_arguments}
        given = {name: value for name, value in bound.items() if name not in extra}
        if 0 not in grid:
            call = {**given, **self.constants, **self.configs[0].kwargs}
            self.fn.run(**with_descriptors(self.fn, call), grid=grid, warmup=False)

    def _first_run(self, bound: dict[str, Any]) -> None:
        if self.tuned.best_config is None and 0 in self.grid_of(self.configs[0], bound):
            return  # an empty problem is neither tuned nor launched
        self.tuned[self._call_grid(bound)](**bound, **self._fixed)

    def _call_grid(self, bound: dict[str, Any]) -> _CallGrid:
        """Return the grid of a call as the tuner takes it, and take what only the grid needs out of
        the arguments.
        """
        extra = {
            name: bound.pop(name) for name in self.extra_arguments
        }  # the kernel has no such parameters
        return _CallGrid(self.grid, self._grid, extra)

    def launched(self) -> Launched | None:
        """Return how it was launched so far; None where another process cannot launch it so by the
        arguments alone, and as `AutotunedKernel.launched`.
        """
        if self.extra_arguments or not self._in_order:
            return None
        return self.tuned.launched(self._fixed)

    def export(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Exported:
        """Write the kernel that a call with these arguments launches: binary, stages, grid and
        metadata; see `AutotunedKernel.export`.

        Args:
            directory: made when it is not there.
            args, kwargs: as for `run`.

        Raises:
            as `run`, and as `AutotunedKernel.export`.
        """
        bound = self.bind(*args, **kwargs)
        grid = self._call_grid(bound)
        return self.tuned.export(directory, grid=grid, **bound, **self._fixed)

    def compile_in(
        self, service: CompileService, arguments: Mapping[str, Spec], target: Target
    ) -> CompileFuture[HeuristicKernel]:
        """Compile every candidate in the workers of a service, beside other kernels, and before the
        first call.

        Args:
            service: its `cache_dir` has to be where this process's Triton looks, as it is unless it
                was given another.
            arguments: of calls: name -> spec such as `"*fp32:16"` (docs/compile.md).
            target: what for.

        Returns:
            A future of this kernel, done when all candidates are compiled; `CompileService.wait`
            takes it.  It raises `CompileFailed` when none compiles, or one for a reason that is not
            its size.

        Raises:
            ConfigError: no other process can import the function, or the arguments do not fit it.
        """
        name = toolchain.innermost(self.fn).__name__
        jobs = self.jobs(arguments, target)
        return JoinedFuture(name, [service.submit(job) for job in jobs], self._compiled)

    def jobs(self, arguments: Mapping[str, Spec], target: Target) -> list[Job]:
        """Return the compile of each candidate; arguments and errors as `compile_in`."""
        name = toolchain.innermost(self.fn).__name__
        source = self.source or importable(toolchain.innermost(self.fn))
        if source is None:
            raise ConfigError(
                f"{name}: no other process can import it; define it in a module file, or make one"
                " of its text with source_module",
                name=name,
            )
        # Two configs that count the same on this target are one kernel.
        counted = {effective_on(config, target): config for config in reversed(self.configs)}
        jobs = []
        for config in reversed(counted.values()):
            call = {**self._fixed, **keywords_on(config, target)}
            found = jit_specialization.specialize(self.fn, arguments, call, target)
            jobs += [asked_for(jobs_of(name, source, one, target)) for one in found]
        return jobs

    def _compiled(self, outcomes: Sequence[Any]) -> HeuristicKernel:
        """Return this kernel unless it does not compile: a candidate that is only too large is one
        candidate less.
        """
        failures = [outcome for outcome in outcomes if not isinstance(outcome, Compiled)]
        for failure in failures:
            too_large = isinstance(failure, CompileFailed) and toolchain.tolerated(failure)
            if not too_large or len(failures) == len(outcomes):
                raise failure
        return self

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a call's arguments by name; raises `ConfigError` when one is missing, unknown,
        given twice or too many.
        """
        if len(args) > len(self.arguments):
            raise ConfigError(
                f"{self.__name__} takes {count(len(self.arguments), 'argument')}"
                f" ({', '.join(self.arguments)}), got {len(args)}; give the stream as stream="
            )
        bound = dict(zip(self.arguments, args, strict=False))
        wrong = sorted(kwargs.keys() & bound.keys()) or sorted(kwargs.keys() - set(self.arguments))
        if wrong:
            raise ConfigError(
                f"{self.__name__}: argument {wrong[0]!r} is given twice, or is none of"
                f" {self.arguments}"
            )
        bound |= kwargs
        missing = [name for name in self.arguments if name not in bound]
        if missing:
            raise ConfigError(f"{self.__name__}: missing {', '.join(missing)}")
        return bound

    def grid_of(self, config: Config, arguments: Mapping[str, Any]) -> LaunchGrid:
        """Return the grid of a launch with a config and a call's arguments.

        Raises:
            ConfigError: a size that the grid needs is no argument.
            CannotLaunchStatically: the device cannot launch so many programs.
        """
        return self._grid(
            {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages},
            arguments,
        )

    def _grid(self, blocks: Mapping[str, Any], sizes: Mapping[str, Any]) -> LaunchGrid:
        backend = self.candidates.setting.device.type
        return launch_grid(self.grid, blocks, sizes, kernel=self.__name__, backend=backend)

    def _known_grid(self, choice: Choice, args: Args) -> LaunchGrid:
        """Return the grid of a call, each worked out once; any thread may ask; raises as
        `grid_of`.
        """
        # By its number, since hashing a choice takes longer than all the rest; it is kept, so that
        # no other object gets the number.
        mine = self._choice_grids.get(id(choice))
        if mine is None:
            return self._first_grid(choice, args)
        sizes = tuple([args[place] for place in mine.places])
        # True and 1.0 are equal to 1, and no sizes.
        # a generator takes twice as long
        if not self._pure or not all([type(size) is int for size in sizes]):  # noqa: C419
            return self._worked_out(mine, args)
        grid = mine.known.get(sizes)
        if grid is None:
            grid = self._worked_out(mine, args)
            if len(mine.known) >= MAX_KNOWN:
                mine.known.clear()
            mine.known[sizes] = grid
        return grid

    def _first_grid(self, choice: Choice, args: Args) -> LaunchGrid:
        # What a grid needs is a whole number in every call for which it can be worked out, so it is
        # one in this call.
        places = [place for place, value in enumerate(args) if type(value) is int]
        mine = _OfChoice(choice, {**self._fixed, **choice.keywords}, places)
        grid = self._worked_out(mine, args)
        if len(self._choice_grids) >= MAX_KNOWN:
            self._choice_grids.clear()
        self._choice_grids[id(choice)] = mine
        return grid

    def _worked_out(self, mine: _OfChoice, args: Args) -> LaunchGrid:
        named = dict(zip(self.arguments, args, strict=True))
        blocks = {**named, **mine.blocks}
        return self._grid(blocks, blocks)

    def space(self) -> Space:
        """Return the configs that coordinate descent may try, starting from the candidates."""
        setting, hints, combo = (
            self.candidates.setting,
            self.candidates.hints,
            self.candidates.combo,
        )
        device, facts = setting.device, setting.facts
        limits = dict(combo.field_limits) if combo else {}
        floors = {"x": facts.min_xblock or 1, "r0_": facts.min_rblock or 1}
        for axis in hints:
            least = facts.tma_min_blocks.get(block_name(axis), 1)
            if least > floors.get(axis, 1):
                floors[axis] = least
        threads = device.max_threads_per_block
        return Space(
            size_hints={**hints, **limits},
            max_blocks={axis: max_block(axis, setting) for axis in hints},
            min_blocks={axis: floors[axis] for axis in hints if axis in floors},
            max_warps=None if threads is None else threads // device.warp_size,
            native_matmul=facts.native_matmul,
            mix_order=bool(facts.rsplit_size),
            hip=device.is_hip,
            first=tuple(name for group in combo.groups for name in group.fields) if combo else (),
        )


def _constexprs(fn: Any) -> set[str]:
    """Return the parameters that are declared constexpr, of a compiled or an interpreted
    function.
    """
    parameters = getattr(fn, "params", None)
    if parameters is not None:
        return {parameter.name for parameter in parameters if parameter.is_constexpr}
    return {
        name for name, annotation in fn.fn.__annotations__.items() if "constexpr" in str(annotation)
    }


class _OfChoice:
    """The grids of one choice."""

    def __init__(self, choice: Choice, blocks: Mapping[str, Any], places: Sequence[int]) -> None:
        self.choice, self.blocks, self.places = choice, blocks, places
        self.known: dict[tuple[int, ...], LaunchGrid] = {}


class RepeatedLaunches:
    """Launches a kernel's calls of one form: `count` arguments by position, of which those from
    `start` on are numbers.

    Args:
        tuned: the kernel, launched.
        start, count: the form; what follows after `count` is for the grid alone.
        slow: launches any call.
        grid_of: the grid of a choice and a call.
        fixed: keywords of each launch.

    Attributes:
        launch: gets the numbers at the end of a call, then the kernel's arguments; None where there
            is no compiled dispatcher.
        start, count: as given.
        device, stream: the driver's, to tell whether a stream is the current one.
    """

    def __init__(
        self,
        tuned: AutotunedKernel,
        start: int,
        count: int,
        slow: Callable[[Args], None],
        grid_of: GridOf,
        fixed: dict[str, Any],
    ) -> None:
        self.tuned, self.start, self.count, self.slow = tuned, start, count, slow
        self.grid_of, self.fixed = grid_of, fixed
        state = tuned.ready()
        self.device, self.stream = state.driver.device, state.driver.stream
        self._hooks, self._backend = state.hooks, state.driver.backend
        self.launch = compiled_dispatcher(
            state.driver,
            state.hooks,
            self._slow,
            self._first,
            self._measure,
            (False,) * count,
            {},
            MAX_KINDS,
            self._observed,
        )

    def _observed(self) -> bool:
        return self._hooks.present() or profiler_hooks.is_recording()

    def _slow(self, numbers: Args, *args: Any) -> None:
        self.slow((*args[: self.start], *numbers))

    def _first(self, numbers: Args, *args: Any) -> tuple[Any, ...] | None:
        """Launch the first call of a kind; returns what the dispatcher keeps of it, None where each
        has to be looked at.
        """
        self._slow(numbers, *args)
        choice, tuned = self.tuned.known(args), self.tuned
        if len(tuned.choices) > 1:
            # `best_config` is that of the last call, so each call has to tell which it was
            tuned.again = False
        if choice is None or len(tuned.choices) > 1:
            return None
        state = tuned.ready()
        if choice.config in state.through_triton:
            return None
        repeated = state.static.repeated(args, {**self.fixed, **choice.keywords})
        if repeated is None:
            return None
        launcher, taken, cluster = repeated
        # Keywords are the same in each such call, and compiled in, so that nothing of them is
        # passed.
        if (taken if isinstance(taken, int) else max(taken) + 1) > len(args):
            return None
        known: dict[Args, tuple[int, int, int]] = {}
        return launcher, taken, known, _Repeated(choice, cluster, known), None

    def _measure(
        self, row: _Repeated, args: Args, _keywords: dict[str, Any], numbers: Args
    ) -> tuple[int, int, int]:
        grid = self.grid_of(row.choice, (*args[: self.start], *numbers))
        sizes = grids.checked(grid, self.tuned.__name__, self._backend, row.cluster)
        # True and 1.0 are equal to 1, and no sizes.
        if all(type(number) is int for number in numbers):
            if len(row.known) >= MAX_GRIDS:
                row.known.clear()
            row.known[numbers] = sizes
        return sizes


class _Repeated(NamedTuple):
    """What is known of one kind of calls: its choice, the blocks of a cluster, and grids by
    numbers.
    """

    choice: Choice
    cluster: int
    known: dict[Args, tuple[int, int, int]]
