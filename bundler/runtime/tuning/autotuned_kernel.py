# SPDX-License-Identifier: Apache-2.0
"""`AutotunedKernel`: finds a kernel's fastest config for each tuning key, and launches it; made by
`autotune` and `HeuristicKernel`.

`TunedCalls` says what calls have to look like and what their arguments say before a config is
known; `LaunchWatch` shows launches to a dump, to plug-ins and to the profiler of torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bundler.compile.compile_job import SourceRef
from bundler.errors import CannotLaunchStatically, ConfigError, NotFound, ToolchainMismatch
from bundler.format.bundle import Bundle, Keep
from bundler.format.entries import Target
from bundler.format.summary import count
from bundler.lifecycle.tuning_directory import Miss
from bundler.package_loggers import logger
from bundler.runtime import grids
from bundler.runtime.configs import Config
from bundler.runtime.launch.calls.argument_types import is_tensor
from bundler.runtime.launch.handle import Handle
from bundler.runtime.launch.launch_hooks import Hooks
from bundler.runtime.tuning import profiler_ranges, tuning_winners
from bundler.runtime.tuning.benchmark import Clock
from bundler.runtime.tuning.candidate_compiler import (
    CandidateCompiler,
    CompiledConfig,
    StaticCandidate,
    TritonCandidate,
    TuningDevice,
    expand,
    make,
)
from bundler.runtime.tuning.config_list import ListedConfigs, Pruning, keywords_on
from bundler.runtime.tuning.kernel_export import Exported, ExportNotes, export_kernel, grid_notes
from bundler.runtime.tuning.launch_state import LaunchState
from bundler.runtime.tuning.result_lookup import Choice, LookupQuestion
from bundler.runtime.tuning.trial import ArgumentEffects, Trial
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_plugins import Plugins, TunedLaunch
from bundler.toolchain import profiler_hooks
from bundler.toolchain import tuner_toolchain as toolchain

_NS_OF_MS = 1e6
_LOG = logger("bundler.runtime")
Args = tuple[Any, ...]
Keywords = dict[str, Any]


class TunedCall(NamedTuple):
    """One call of a tuned kernel; `grid` is None where none was given."""

    grid: grids.Grid | None
    args: Args
    keywords: Keywords


# Names that Inductor has for them, in its metadata and in its ranges.
_WORK = ("kernel_num_gb", "kernel_flop")


class AutotunedKernel:
    """What `autotune` makes of a kernel; called like it: `kernel[grid](*args, **keywords)`.

    The first call for a tuning key looks for a config, in this order: the table, this process's
    memory, the bundle, the records beside Triton's kernels, Triton's own result file (with
    `cache_results`).  A record counts only when all named parts are equal: kernel source, configs,
    key, device, toolchain, way of searching; `misses` says of each that did not.  Else all configs
    are compiled and measured, which happens once: other threads wait.  Under TRITON_INTERPRET=1 the
    first config runs in the interpreter.

    A call raises `NoValidConfig` when no config can be used, `CompileFailed` when the kernel does
    not compile, `ConfigError` for arguments that contradict each other, and what a launch raises.

    Attributes:
        fn: the kernel as it was, with its heuristics.
        best_config: the config of the last call, None before the first.
        misses: (tuning key, why there was no record) of each search.
        metadata: of the generator that wrote the kernel, for exports and profiles; empty for a
            kernel of a person.
    """

    def __init__(
        self,
        function: Any,
        listed: ListedConfigs,
        key: tuple[str, ...],
        pruning: Pruning,
        *,
        effects: ArgumentEffects,
        clock: Callable[[], Clock] | None = None,
        cache_results: bool = False,
        options: TunerOptions,
        source: SourceRef | None = None,
    ) -> None:
        self._source = source  # where a worker finds the function, if not by its name
        self.fn, self.arg_names = function, list(function.arg_names)
        self.base = toolchain.innermost(function)
        self.__name__: str = self.base.__name__
        for what, names in (
            ("key", key),
            ("reset_to_zero", effects.zeroed),
            ("restore_value", effects.mutated),
        ):
            unknown = [name for name in names if name not in self.arg_names]
            if unknown:
                raise ConfigError(
                    f"{self.__name__}: {what} names {unknown[0]!r}, which is no argument; there are"
                    f" {', '.join(self.arg_names)}",
                    kernel=self.__name__,
                    name=unknown[0],
                )
        listed = listed.for_kernel(self.__name__, self.arg_names)
        self.configs, self.keys, self.options = list(listed.originals), list(key), options
        self.best_config: Config | None = None
        self.misses: list[tuple[tuple[Any, ...], str]] = []
        self._listed, self._pruning, self._make_clock, self._cache_results = (
            listed,
            pruning,
            clock,
            cache_results,
        )
        self._effects = effects
        self._interpreted, self._wrapped = (
            toolchain.interpreted(function),
            function is not self.base,
        )
        self._places = [
            self.arg_names.index(name) for name in key
        ]  # once, since `_memo` runs at every call
        self.metadata: Mapping[str, Any] = {}
        self._plugins = Plugins(self.__name__, options.plugins)
        self._watch = LaunchWatch(self.__name__, self.base, options, self._plugins)
        self._calls = TunedCalls(self.__name__, function, key, listed)
        self._state: LaunchState | None = None
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._lock = threading.RLock()
        self.again: Any = (
            None  # what launches a kernel's later calls of one form; None until it was tried
        )

    def __repr__(self) -> str:
        return (
            f"<autotuned kernel {self.__name__!r}, {count(len(self.configs), 'config')},"
            f" {count(len(self._choices), 'key')} chosen>"
        )

    def __getitem__(self, grid: grids.Grid) -> Callable[..., None]:
        return functools.partial(self._call, grid)

    def run(self, *args: Any, grid: grids.Grid, warmup: bool = False, **keywords: Any) -> None:
        """Launch, as Triton's own `run`; with `warmup` compile the configs and launch nothing."""
        if warmup:
            self.warmup(*args, grid=grid, **keywords)
        else:
            self._call(grid, *args, **keywords)

    @property
    def cache(self) -> dict[tuple[Any, ...], Config]:
        """The configs chosen so far, by device and tuning key."""
        return {key: choice.config for key, choice in self._choices.items()}

    @property
    def choices(self) -> dict[tuple[Any, ...], Choice]:
        """What was chosen so far and where it is from, by device and tuning key."""
        return dict(self._choices)

    def keywords_of(self, config: Any, target: Target) -> dict[str, Any]:
        """Return what one of `configs` adds to a call on a target: parameters, and the options that
        its compiler has.
        """
        return keywords_on(Config.from_triton(config).for_parameters(self.arg_names), target)

    @property
    def hooks(self) -> Hooks:
        """What is called around each launch."""
        return self.ready().hooks

    def forget(self) -> None:
        """Drop what was chosen and loaded; records on disk stay."""
        with self._lock:
            state, self._state, self._choices, self.again = self._state, None, {}, None
            if state is not None:
                state.close(bundle_stays=isinstance(self.options.bundle, Bundle))

    # ------------------------------------------------------------------------------------ Launching

    def _call(self, grid: grids.Grid, /, *args: Any, **keywords: Any) -> None:
        if self._interpreted:
            self._interpret(grid, args, keywords)
            return
        state = self._state or self.ready()
        choice = self._known(state, args, keywords)
        if choice is None:
            # An empty problem must not be tuned: measurements of nothing would decide for every
            # size of this key.
            if self._calls.launches_nothing(grid, args, keywords):
                return
            choice = self._choose(state, TunedCall(grid, args, keywords))
        # Only conflicts are looked for here; a call's other faults were reported when its config
        # was chosen.
        if keywords and not keywords.keys().isdisjoint(choice.keywords):
            self._calls.check(args, keywords)
        if self._wrapped:
            keywords = self._with_heuristics(args, keywords, choice)
        self.launch(choice, grid, args, keywords)

    def known(self, args: Args, stream: int | None = None) -> Choice | None:
        """Return the choice for a call with these arguments; None when it is not known, or the
        stream is not the current one.
        """
        state = self._state
        if state is None or self._interpreted or self._wrapped:
            return None
        if stream is not None and stream != state.driver.stream(state.driver.device()):
            return None
        return self._known(state, args, {})

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Let this thread's calls launch on a stream while the block runs: torch's current one too,
        where torch uses the GPU.
        """
        state = self.ready()
        # A driver asks torch for the current stream; where torch is not, the launch itself is told.
        with toolchain.torch_stream(stream, state.driver.device()), state.on_stream(stream):
            yield

    def launch(self, choice: Choice, grid: grids.Grid, args: Args, keywords: Keywords) -> None:
        """Launch a choice that was made for a call like this one; what the choice adds is no part
        of `keywords`.
        """
        state = self._state or self.ready()
        self.best_config = (
            choice.config
        )  # for programs that read it after a call, as Triton's tuner has it
        # To show a launch takes longer than to launch.
        if not (self._watch.always or profiler_hooks.is_recording()):
            self._launch(state, choice, grid, args, keywords)
            return
        call, handle = (
            self._calls.named(args, keywords),
            functools.partial(self._handle, state, choice, args, keywords),
        )
        start = functools.partial(self._launch, state, choice, grid, args, keywords)
        self._watch.launch(state, choice, grid, call, len(args), handle, self.metadata, start)

    def _launch(
        self, state: LaunchState, choice: Choice, grid: grids.Grid, args: Args, keywords: Keywords
    ) -> None:
        try:
            state.start(self.fn, choice, grid, args, keywords)
        except (NotFound, ToolchainMismatch):
            # The same tuning key, but other alignments or types: the config is known, and its
            # kernel for them not compiled yet.
            call = TunedCall(None, args, keywords)
            state.adopt(self.__name__, choice.config, self._compile(state, choice.config, call))
            state.start(self.fn, choice, grid, args, keywords)

    def handle(self, *args: Any, grid: grids.Grid | None = None, **keywords: Any) -> Handle:
        """Return the kernel that a call like this one would launch, to be launched again and again
        without choosing.

        Args:
            args, keywords: as for a call.
            grid: needed only where the config has yet to be found.

        Raises:
            ConfigError: the config has to be found, and there is no grid to launch with.
            CannotLaunchStatically: only Triton can launch it.
        """
        state = self._state or self.ready()
        choice = self._choice(state, TunedCall(grid, args, keywords))
        if self._wrapped:
            keywords = self._with_heuristics(args, keywords, choice)
        return self._handle(state, choice, args, keywords)

    def _handle(self, state: LaunchState, choice: Choice, args: Args, keywords: Keywords) -> Handle:
        try:
            return state.static.handle(*args, **keywords, **choice.keywords)
        except (NotFound, ToolchainMismatch):
            call = TunedCall(None, args, keywords)
            state.adopt(self.__name__, choice.config, self._compile(state, choice.config, call))
            return state.static.handle(*args, **keywords, **choice.keywords)

    def warmup(self, *args: Any, grid: grids.Grid | None = None, **keywords: Any) -> list[str]:
        """Compile every config for a call, on all cores, and launch nothing; returns the kernels'
        keys.

        Raises:
            CompileFailed: the kernel does not compile.
        """
        state = self.ready()
        compiler = self._compiler(state, TunedCall(grid, args, keywords))
        found = compiler.build(self._pruned(args, keywords).configs)
        for candidate in found:
            if isinstance(candidate, StaticCandidate):  # loaded to see whether the device takes it
                candidate.close()
        return [candidate.key for candidate in found if candidate.key]

    def export(
        self,
        directory: str | os.PathLike[str],
        *args: Any,
        grid: grids.Grid | None = None,
        **keywords: Any,
    ) -> Exported:
        """Write the chosen kernel's binary and how to launch it, for programs in other languages;
        see `export_kernel`.

        Args:
            directory: made when it is not there.
            args, keywords: as for a call.
            grid: a `TextGrid` is written as expressions and as C++; another says nothing of other
                sizes.
        """
        state, call = self.ready(), TunedCall(grid, args, keywords)
        return self._export(state, self._choice(state, call), directory, call)

    def _export(
        self, state: LaunchState, choice: Choice, directory: str | os.PathLike[str], call: TunedCall
    ) -> Exported:
        grid, args, keywords = call
        if self._wrapped:
            keywords = self._with_heuristics(args, keywords, choice)
        made = self._compile(state, choice.config, TunedCall(grid, args, keywords), keep="all")
        expressions, why = grid_notes(
            grid, {**self._calls.constants(args, keywords), **choice.keywords}
        )
        notes = ExportNotes(choice.config, expressions, why, self.metadata)
        return export_kernel(made.kernel, made.image, made.bundle, notes, directory)

    def _interpret(self, grid: grids.Grid, args: Args, keywords: Keywords) -> None:
        config = self._pruned(args, keywords).configs[0]
        self.best_config = config
        self.fn.run(*args, grid=grid, warmup=False, **keywords, **config.kwargs)

    def _with_heuristics(self, args: Args, keywords: Keywords, choice: Choice) -> dict[str, Any]:
        call = {**self._calls.named(args, keywords), **choice.keywords}
        added = expand(self.fn, call)
        return {**keywords, **{name: added[name] for name in added.keys() - call.keys()}}

    # ------------------------------------------------------------------------------------- Choosing

    def _memo(self, state: LaunchState, args: Args, keywords: Keywords) -> tuple[Any, ...]:
        """Return device and tuning key: the values of the key's arguments, then the element types
        of all tensors.
        """
        # Element types are part of the key, as in Triton: equal sizes in another precision are
        # another problem.
        if keywords:
            named = self._calls.named(args, keywords)
            values = [named[name] for name in self.keys if name in named]
            types = [
                named[name].dtype for name in self.arg_names if hasattr(named.get(name), "dtype")
            ]
        else:
            count = len(args)
            values = [args[place] for place in self._places if place < count]
            types = [value.dtype for value in args if hasattr(value, "dtype")]
        return (state.driver.device(), *values, *types)

    def ready(self) -> LaunchState:
        """Return what it launches with; the first call opens the driver and the bundle."""
        with self._lock:
            if self._state is None:
                self._state = LaunchState.open(
                    self.__name__, self.base, self.options, results=self._cache_results
                )
            return self._state

    def _known(self, state: LaunchState, args: Args, keywords: Keywords) -> Choice | None:
        memo = self._memo(state, args, keywords)
        try:
            return self._choices.get(memo)
        except TypeError as error:
            raise ConfigError(
                f"{self.__name__}: the tuning key {memo[1:]!r:.200} cannot be compared: {error};"
                " give numbers, text or tuples",
                kernel=self.__name__,
            ) from error

    def _choice(self, state: LaunchState, call: TunedCall) -> Choice:
        return self._known(state, call.args, call.keywords) or self._choose(state, call)

    def _choose(self, state: LaunchState, call: TunedCall) -> Choice:
        _, args, keywords = call
        self._calls.check(args, keywords)
        memo = self._memo(state, args, keywords)
        # Under the lock, so that of several first calls one tunes and the others get its choice.
        with self._lock:
            known = self._choices.get(memo)
            if known is not None:
                return known
            question = state.lookup.question(state.driver, self._pruned(args, keywords), memo[1:])
            found = state.lookup.find(question)
            if isinstance(found, Miss):
                self.misses.append((question.key, found.reason))
                found = self._decided(found, question) or self._tune(state, question, call)
            else:
                state.adopt_from_bundle(found)
            if found.ignored:
                _LOG.info(
                    "%s: %s has no %s; the config %s is used without",
                    self.__name__,
                    state.driver.backend,
                    ", ".join(found.ignored),
                    found.config,
                )
            self._report(state, found, call)
            if self.options.export is not None:
                self._export(state, found, self.options.export, call)
            self._choices[memo] = found
            return found

    def _pruned(self, args: Args, keywords: Keywords) -> ListedConfigs:
        named = dict(zip(self.arg_names, args, strict=False))
        return self._plugins.listed(self._pruning.apply(self._listed, named, keywords))

    def _decided(self, miss: Miss, question: LookupQuestion) -> Choice | None:
        """Return a plug-in's choice where no record has one."""
        config = self._plugins.config(question.listed.configs, question.parts)
        _LOG.info(
            "%s is %s: %s",
            self.__name__,
            "tuned" if config is None else "chosen by a plug-in",
            miss.reason,
        )
        return None if config is None else Choice.of(config, "plugin", question.target)

    # --------------------------------------------------------------------------------------- Tuning

    def _tune(self, state: LaunchState, question: LookupQuestion, call: TunedCall) -> Choice:
        if call.grid is None:
            raise ConfigError(
                f"{self.__name__} has to be tuned first: give a grid to launch with",
                kernel=self.__name__,
            )
        outcome = self._trial(self._compiler(state, call)).run(question.listed.configs)
        winner = outcome.winner
        assert isinstance(winner, StaticCandidate | TritonCandidate)
        # Compiled already, so the launch need not.
        state.adopt(self.__name__, winner.config, winner.made)
        winner.close()
        state.lookup.keep(outcome, question)
        named = tuning_winners.named_of(winner.config)
        best = next((timing.time_ns for timing in outcome.timings if timing.config == named), None)
        time_ms = None if best is None else best / _NS_OF_MS
        return Choice.of(winner.config, outcome.found_by, question.target, time_ms)

    def _compiler(self, state: LaunchState, call: TunedCall) -> CandidateCompiler:
        return CandidateCompiler(
            self.fn,
            self._calls.named(call.args, call.keywords),
            TuningDevice.of(state.driver, state.driver.device()),
            # A grid is no part of what is compiled.
            (1,) if call.grid is None else call.grid,
            state.hooks,
            workers=self.options.workers,
            service=self.options.service,
            source=self._source,
            told=self._plugins.compiled,
            hook_args=self.options.hook_args,
        )

    def _trial(
        self, compiler: CandidateCompiler, clock: Callable[[], Clock] | None = None
    ) -> Trial:
        clock = clock or self._make_clock
        return Trial(self.__name__, compiler, self._effects, clock, self.options)

    def _compile(
        self, state: LaunchState, config: Config, call: TunedCall, *, keep: Keep = "launch"
    ) -> CompiledConfig:
        compiler = self._compiler(state, call)
        made = make(
            self.base,
            compiler.keywords(config),
            compiler.place.target,
            keep=keep,
            hook_args=compiler.hook_args,
        )
        self._plugins.compiled(config, made)
        return made

    def _report(self, state: LaunchState, choice: Choice, call: TunedCall) -> None:
        """Add the kernel to the bandwidth report, if there is one."""
        report = self.options.bandwidth
        if report is not None and call.grid is not None and report.wants(self.__name__):
            trial = self._trial(self._compiler(state, call), report.clock)
            trial.add_to(report, choice.config, choice.time_ms)


class LaunchWatch:
    """Shows launches of one kernel.

    Attributes:
        always: whether somebody wants to see each; a profiler wants it while it is active.

    Args:
        name, function: the kernel's, and its JIT function.
        options: the tuner's, with the dump.
        plugins: those of the kernel.
    """

    def __init__(self, name: str, function: Any, options: TunerOptions, plugins: Plugins) -> None:
        self._name, self._function, self._options, self._plugins = name, function, options, plugins
        self.always = options.dump is not None or plugins.watching
        self._file = toolchain.file_of(function)

    def launch(
        self,
        state: LaunchState,
        choice: Choice,
        grid: grids.Grid,
        call: Mapping[str, Any],
        by_position: int,
        handle: Callable[[], Handle],
        metadata: Mapping[str, Any],
        start: Callable[[], None],
    ) -> None:
        """Launch, and show it.

        Args:
            state: what it is launched with.
            choice: what is launched.
            grid, call: the caller's, arguments by name.
            by_position: how many of them were given so.
            handle: returns the compiled kernel for the call.
            metadata: of the generator that wrote the kernel.
            start: launches.
        """
        launch = replace(
            self._described(state, choice, grid, call, handle), by_position=by_position
        )
        if self._plugins.launched(launch):
            return
        if self._options.dump is not None:
            self._options.dump.write(launch)
        if not profiler_hooks.is_recording():
            start()
            return
        told = metadata.get("inductor_meta", {})
        known = {name: told[name] for name in _WORK if told.get(name) is not None}
        if self._options.gigabytes is not None:
            known["kernel_num_gb"] = self._options.gigabytes
        with profiler_ranges.launch_range(launch, known):
            start()

    def _described(
        self,
        state: LaunchState,
        choice: Choice,
        grid: grids.Grid,
        call: Mapping[str, Any],
        handle: Callable[[], Handle],
    ) -> TunedLaunch:
        key, cluster = "", choice.config.num_ctas
        if choice.config not in state.through_triton:
            # Only Triton can launch what cannot be handled here, and says nothing of its key.
            with contextlib.suppress(NotFound, CannotLaunchStatically):
                plan = handle().plan
                key, cluster = plan.key, plan.cluster
        given = grid({**call, **choice.keywords}) if callable(grid) else grid
        sizes = grids.checked(given, self._name, state.driver.backend, cluster)
        return TunedLaunch(
            self._name,
            self._file,
            key,
            choice.config,
            sizes,
            state.stream(),
            state.driver.device(),
            dict(call),
        )


class TunedCalls:
    """Calls of one kernel.

    Args:
        name, function: the kernel's, with the heuristics around it.
        keys: the arguments whose values are the tuning key.
        listed: the configs.
    """

    def __init__(
        self, name: str, function: Any, keys: tuple[str, ...], listed: ListedConfigs
    ) -> None:
        self._name, self._function, self._listed = name, function, listed
        self._parameters = list(function.arg_names)
        self._keys = [(key, self._parameters.index(key)) for key in keys]

    def named(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return a call's arguments by name."""
        return {**dict(zip(self._parameters, args, strict=False)), **keywords}

    def constants(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return the arguments that are compiled in: whoever launches the binary gives no
        others.
        """
        call = self.named(args, keywords)
        return {
            name: call[name]
            for name in toolchain.constexprs(toolchain.innermost(self._function))
            if name in call
        }

    def launches_nothing(self, grid: grids.Grid, args: Args, keywords: Keywords) -> bool:
        """Whether the grid of a call has no program, so that there is nothing to measure or
        launch.
        """
        sizes: Any = grid
        if callable(grid):
            call = {**self.named(args, keywords), **self._listed.configs[0].all_kwargs()}
            sizes = grid(expand(self._function, call))
        return 0 in (sizes if isinstance(sizes, tuple | list) else (sizes,))

    def check(self, args: Args, keywords: Keywords) -> None:
        """Raise `ConfigError` for too many arguments, for what the tuner chooses, and for a tensor
        in the tuning key.
        """
        if len(args) > len(self._parameters):
            expected = count(len(self._parameters), "argument")
            raise ConfigError(f"{self._name}: takes {expected}, got {len(args)}", kernel=self._name)
        self._listed.check_given(self._name, {*self._parameters[: len(args)], *keywords})
        for name, place in self._keys:
            if is_tensor(args[place] if place < len(args) else keywords.get(name)):
                raise ConfigError(
                    f"{self._name}: the key names {name!r}, which is a tensor; name the numbers"
                    " that decide, such as its size",
                    kernel=self._name,
                    name=name,
                )
