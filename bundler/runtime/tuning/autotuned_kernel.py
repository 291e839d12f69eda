# SPDX-License-Identifier: Apache-2.0
"""`AutotunedKernel`: finds a kernel's fastest config for each tuning key, and launches it; made by
`autotune` and `HeuristicKernel`.

`autotune` is Triton's decorator of the same name, with results that travel and launches that need no
compiler.  `LaunchState` is what a tuned kernel launches with: its driver, the kernels loaded so far,
the records that it looks configs up in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bundler.compile.compile_job import SourceRef
from bundler.errors import CannotLaunchStatically, ConfigError, NotFound, ToolchainMismatch
from bundler.format.bundle import Bundle, Keep
from bundler.format.bundle_union import merge
from bundler.format.candidate_timings import Parts
from bundler.format.entries import Target
from bundler.format.summary import count
from bundler.lifecycle.tuning_directory import Miss
from bundler.package_loggers import logger
from bundler.runtime import grids
from bundler.runtime.configs import Config
from bundler.runtime.launch.argument_types import is_tensor
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.launch.handle import Handle, PlanLoader
from bundler.runtime.launch.launch_hooks import Hooks, launch_facts
from bundler.runtime.launch.plan_builder import BACKENDS
from bundler.runtime.launch.specialization_match import Specialization
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.runtime.tuning import tuner_reports, tuning_winners
from bundler.runtime.tuning.benchmark import REP_MS, WARMUP_MS, Clock, CudaClock, GivenClock
from bundler.runtime.tuning.candidate_compiler import (
    CandidateCompiler,
    CompiledConfig,
    Refused,
    expand,
    make,
)
from bundler.runtime.tuning.config_list import ListedConfigs, Pruning, keywords_on
from bundler.runtime.tuning.kernel_export import Exported, ExportNotes, export_kernel, grid_notes
from bundler.runtime.tuning.result_lookup import Choice, LookupQuestion, ResultLookup
from bundler.runtime.tuning.tuner import ArgumentEffects, Trial
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_plugins import Plugins, TunedLaunch
from bundler.toolchain import profiler_hooks
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.compiler_settings import compiler_settings
from bundler.trust.admission import admit
from bundler.user_warnings import warn

_NS_OF_MS = 1e6
_LOG = logger("bundler.runtime")
Args = tuple[Any, ...]
Keywords = dict[str, Any]


class TunedCall(NamedTuple):
    """One call of a tuned kernel; `grid` is None where none was given."""

    grid: grids.Grid | None
    args: Args
    keywords: Keywords


class Launched(NamedTuple):
    """How a kernel is launched, for another process that launches it without Triton.

    Attributes:
        keywords: of each launch, beside its arguments.
        parts: of the tuning record that its config is from; None where there was one config.
        settings: `compiler_settings` by which its kernels were compiled or found; none or several
            where these changed meanwhile, or somebody wanted to hear of it.
        kernels: what was launched so far.
    """

    keywords: Mapping[str, Any]
    parts: Parts | None
    settings: frozenset[str | None]
    kernels: Bundle


# Names that Inductor has for them, in its metadata and in its ranges.
_WORK = ("kernel_num_gb", "kernel_flop")
# How a config was found that another process finds otherwise, or not at all.
_WITHOUT_RECORD = frozenset({"table", "results", "plugin"})


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
        self._listed, self._pruning = listed, pruning
        self._make_clock, self._cache_results = clock, cache_results
        self._effects = effects
        self._interpreted = toolchain.interpreted(function)
        self._wrapped = function is not self.base
        self._places = [
            self.arg_names.index(name) for name in key
        ]  # once, since `_memo` runs at every call
        self.metadata: Mapping[str, Any] = {}
        self._plugins = Plugins(self.__name__, options.plugins)
        # To show a launch takes longer than to launch.
        self._watched = options.dump is not None or self._plugins.watching
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

    def launched(self, fixed: Mapping[str, Any]) -> Launched | None:
        """Return how it was launched so far; None where it was not, by several configs or by Triton
        itself, where its config is from no record, and where plug-ins look at launches.

        Args:
            fixed: keywords of each launch that no config adds.
        """
        state, choices = self._state, tuple(self._choices.items())
        if state is None or len(choices) != 1 or state.through_triton or self._watched:
            return None
        ((_, *key), choice) = choices[0]
        if not state.adopted or choice.how in _WITHOUT_RECORD:
            return None
        parts = None
        if choice.how != "only":
            parts = state.lookup.question(state.driver, self._listed, key).parts
        settings = frozenset(one for one, _ in state.adopted)
        bundles = merge(bundle for _, bundle in state.adopted)
        return Launched({**fixed, **choice.keywords}, parts, settings, bundles)

    def forget(self) -> None:
        """Drop what was chosen and loaded; records on disk stay."""
        with self._lock:
            state, self._state, self._choices, self.again = self._state, None, {}, None
            if state is not None:
                state.close()

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
            if self._launches_nothing(grid, args, keywords):
                return
            choice = self._choose(state, TunedCall(grid, args, keywords))
        # Only conflicts are looked for here; a call's other faults were reported when its config
        # was chosen.
        if keywords and not keywords.keys().isdisjoint(choice.keywords):
            self._check_call(args, keywords)
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
        if self._watched or profiler_hooks.is_recording():
            self._launch_watched(state, choice, grid, args, keywords)
        else:
            self._launch(state, choice, grid, args, keywords)

    def _launch_watched(
        self, state: LaunchState, choice: Choice, grid: grids.Grid, args: Args, keywords: Keywords
    ) -> None:
        """Launch, and show it to plug-ins, to the dump and to torch's profiler."""
        launch = self._described(state, choice, grid, args, keywords)
        if self._plugins.launched(launch):
            return
        if self.options.dump is not None:
            self.options.dump.write(launch)
        if not profiler_hooks.is_recording():
            self._launch(state, choice, grid, args, keywords)
            return
        told = self.metadata.get("inductor_meta", {})
        known = {name: told[name] for name in _WORK if told.get(name) is not None}
        if self.options.gigabytes is not None:
            known["kernel_num_gb"] = self.options.gigabytes
        with tuner_reports.launch_range(launch, known):
            self._launch(state, choice, grid, args, keywords)

    def _described(
        self, state: LaunchState, choice: Choice, grid: grids.Grid, args: Args, keywords: Keywords
    ) -> TunedLaunch:
        call, key, cluster = self._named(args, keywords), "", choice.config.num_ctas
        if choice.config not in state.through_triton:
            # Only Triton can launch what cannot be handled here, and says nothing of its key.
            with contextlib.suppress(NotFound, CannotLaunchStatically):
                plan = self._handle(state, choice, args, keywords).plan
                key, cluster = plan.key, plan.cluster
        given = grid({**call, **choice.keywords}) if callable(grid) else grid
        return TunedLaunch(
            self.__name__,
            toolchain.file_of(self.base),
            key,
            choice.config,
            grids.checked(given, self.__name__, state.driver.backend, cluster),
            state.stream(),
            state.driver.device(),
            call,
            len(args),
        )

    def _launch(
        self, state: LaunchState, choice: Choice, grid: grids.Grid, args: Args, keywords: Keywords
    ) -> None:
        try:
            state.start(self.fn, choice, grid, args, keywords)
        except (NotFound, ToolchainMismatch):
            # The same tuning key, but other alignments or types: the config is known, and its
            # kernel for them not compiled yet.
            call = TunedCall(None, args, keywords)
            state.adopt(choice.config, self._compile(state, choice.config, call))
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
            state.adopt(choice.config, self._compile(state, choice.config, call))
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
            if not isinstance(candidate, Refused):  # loaded to see whether the device takes it
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
        expressions, why = grid_notes(grid, {**self._constants(args, keywords), **choice.keywords})
        notes = ExportNotes(choice.config, expressions, why, self.metadata)
        return export_kernel(made.kernel, made.image, made.bundle, notes, directory)

    def _interpret(self, grid: grids.Grid, args: Args, keywords: Keywords) -> None:
        config = self._pruned(args, keywords).configs[0]
        self.best_config = config
        self.fn.run(*args, grid=grid, warmup=False, **keywords, **config.kwargs)

    def _with_heuristics(self, args: Args, keywords: Keywords, choice: Choice) -> dict[str, Any]:
        call = {**self._named(args, keywords), **choice.keywords}
        added = expand(self.fn, call)
        return {**keywords, **{name: added[name] for name in added.keys() - call.keys()}}

    # ------------------------------------------------------------------------------ A call's arguments

    def _named(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return a call's arguments by name."""
        return {**dict(zip(self.arg_names, args, strict=False)), **keywords}

    def _constants(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return the arguments that are compiled in: whoever launches the binary gives no
        others.
        """
        call = self._named(args, keywords)
        return {name: call[name] for name in toolchain.constexprs(self.base) if name in call}

    def _launches_nothing(self, grid: grids.Grid, args: Args, keywords: Keywords) -> bool:
        """Whether the grid of a call has no program, so that there is nothing to measure or
        launch.
        """
        sizes: Any = grid
        if callable(grid):
            call = {**self._named(args, keywords), **self._listed.configs[0].all_kwargs()}
            sizes = grid(expand(self.fn, call))
        return 0 in (sizes if isinstance(sizes, tuple | list) else (sizes,))

    def _check_call(self, args: Args, keywords: Keywords) -> None:
        """Raise `ConfigError` for too many arguments, for what the tuner chooses, and for a tensor
        in the tuning key.
        """
        name = self.__name__
        if len(args) > len(self.arg_names):
            expected = count(len(self.arg_names), "argument")
            raise ConfigError(f"{name}: takes {expected}, got {len(args)}", kernel=name)
        self._listed.check_given(name, {*self.arg_names[: len(args)], *keywords})
        for key, place in zip(self.keys, self._places, strict=True):
            if is_tensor(args[place] if place < len(args) else keywords.get(key)):
                raise ConfigError(
                    f"{name}: the key names {key!r}, which is a tensor; name the numbers"
                    " that decide, such as its size",
                    kernel=name,
                    name=key,
                )

    # ------------------------------------------------------------------------------------- Choosing

    def _memo(self, state: LaunchState, args: Args, keywords: Keywords) -> tuple[Any, ...]:
        """Return device and tuning key: the values of the key's arguments, then the element types
        of all tensors.
        """
        # Element types are part of the key, as in Triton: equal sizes in another precision are
        # another problem.
        if keywords:
            named = self._named(args, keywords)
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
                self._state = LaunchState(
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
        self._check_call(args, keywords)
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
        # Compiled already, so the launch need not.
        state.adopt(winner.config, winner.made)
        winner.close()
        state.lookup.keep(outcome, question)
        named = tuning_winners.named_of(winner.config)
        best = next((timing.time_ns for timing in outcome.timings if timing.config == named), None)
        time_ms = None if best is None else best / _NS_OF_MS
        return Choice.of(winner.config, outcome.found_by, question.target, time_ms)

    def _compiler(self, state: LaunchState, call: TunedCall) -> CandidateCompiler:
        return CandidateCompiler(
            self.fn,
            self._named(call.args, call.keywords),
            state.driver,
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
            compiler.target,
            keep=keep,
            hook_args=compiler.hook_args,
            # Else nobody sees the kernel but the launch.
            lines=keep == "all" or bool(self.options.plugins),
        )
        self._plugins.compiled(config, made)
        return made

    def _report(self, state: LaunchState, choice: Choice, call: TunedCall) -> None:
        """Add the kernel to the bandwidth report, if there is one."""
        report = self.options.bandwidth
        if report is not None and call.grid is not None and report.wants(self.__name__):
            trial = self._trial(self._compiler(state, call), report.clock)
            trial.add_to(report, choice.config, choice.time_ms)


class LaunchState:
    """What a kernel launches with, opened at its first call, so that it can be declared where there
    is no GPU; any thread may launch, one at a time may `adopt`.

    Args:
        name, function: the kernel's, and its JIT function.
        options: the tuner's.
        results: whether Triton's own result files are read and written.
    """

    def __init__(self, name: str, function: Any, options: TunerOptions, *, results: bool) -> None:
        self.driver = options.driver or open_first_driver(BACKENDS)
        self.loader, self.hooks, given = PlanLoader(self.driver), Hooks(), options.bundle
        self.bundle = given if isinstance(given, Bundle | None) else Bundle.load(given)
        # A bundle that the user gave stays open at the end.
        self._opened = None if isinstance(given, Bundle) else self.bundle
        if self.bundle is not None:
            admit(self.bundle)
        self.lookup = ResultLookup(name, function, self.bundle, options, results=results)
        self.static = StaticKernel(name, [], self.loader, self.hooks)
        self.through_triton: set[Config] = set()
        # What was compiled, or found, here, each with the settings by which it was.
        self.adopted: list[tuple[str | None, Bundle]] = []
        self._streams = threading.local()

    def close(self) -> None:
        """Take everything off the device, and close a bundle that was opened from a path."""
        self.static.forget()
        self.loader.unload()
        if self._opened is not None:
            self._opened.close()

    def adopt(self, config: Config, made: CompiledConfig) -> None:
        """Let a compiled config be launched from now on."""
        if (
            made.reason is not None
        ):  # it needs something that only Triton's own launcher gives a kernel
            _LOG.info("%s is launched by Triton: %s", self.static.name, made.reason)
            self.through_triton.add(config)
            return
        self.adopted.append((compiler_settings(), made.bundle))
        self.loader.add_source(made.bundle)
        self.static.add([Specialization(made.kernel)])

    def adopt_from_bundle(self, choice: Choice) -> None:
        """Let the kernels that came with a record be launched."""
        if choice.specializations and self.bundle is not None:
            self.loader.add_source(self.bundle)
            self.static.add(choice.specializations)

    def start(
        self,
        fn: Any,
        choice: Choice,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        """Launch a chosen config; raises as a call of `StaticKernel`."""
        stream = getattr(self._streams, "stream", None)
        if stream is not None:
            self._start_on(stream, fn, choice, grid, args, {**keywords, **choice.keywords})
        # The set is empty for nearly every kernel, and hashing a config takes longer than this
        # look.
        elif self.through_triton and choice.config in self.through_triton:
            fn.run(*args, grid=grid, warmup=False, **{**keywords, **choice.keywords})
        else:
            self.static[grid](*args, **keywords, **choice.keywords)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Let this thread launch on a stream that the driver does not know as the current one."""
        self._streams.stream = (
            None if stream == self.driver.stream(self.driver.device()) else stream
        )
        try:
            yield
        finally:
            self._streams.stream = None

    def stream(self) -> int:
        """Return the stream that this thread's launches go to."""
        named: int | None = getattr(self._streams, "stream", None)
        return self.driver.stream(self.driver.device()) if named is None else named

    def _start_on(
        self,
        stream: int,
        fn: Any,
        choice: Choice,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        if choice.config in self.through_triton:
            raise ConfigError(
                f"{self.static.name}: only Triton can launch it, on torch's current stream; make"
                f" {stream:#x} that",
                kernel=self.static.name,
            )
        handle = self.static.handle(*args, **keywords)
        names = toolchain.innermost(fn).arg_names
        call = {**dict(zip(names, args, strict=False)), **keywords}
        cluster = handle.plan.cluster
        sizes = grids.checked(
            grid(call) if callable(grid) else grid, self.static.name, self.driver.backend, cluster
        )
        values = handle.values(**{name: value for name, value in call.items() if name in names})
        if 0 in sizes:
            return
        facts = launch_facts(self.static.name, handle.plan.key, sizes, stream, handle.device)
        self.hooks.around(facts, lambda: handle.launch(*sizes, stream, *values))


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: float | None = None,
    rep: float | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    options: TunerOptions | None = None,
) -> Callable[[Any], AutotunedKernel]:
    """Return a decorator for a `triton.jit` kernel that chooses, for each tuning key, the fastest
    of some configs.

    ::

        @bundler.autotune(
            [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256}, num_warps=8)], key=["n"]
        )
        @triton.jit
        def add(x, y, out, n, BLOCK: tl.constexpr): ...

    Takes what `triton.autotune` takes.  What differs: the winner is remembered in a record that
    goes into bundles and stores, and comes back with a restore, so that the next process neither
    compiles nor measures; kernels are launched without Triton where that can be; a benchmark runs
    on clones of the tensors named in `reset_to_zero` and `restore_value`, made outside of what is
    timed, and never zeroes the caller's.

    Args:
        configs: `triton.Config` objects, or `bundler.runtime.Config`; the first of equal ones
            counts.
        key: names of arguments; another value of one of them, or another element type of a tensor,
            is tuned anew.
        prune_configs_by: `early_config_prune`, `perf_model` and `top_k`, as for Triton.
        reset_to_zero: tensors that the kernel adds to; zero before each measured launch.
        restore_value: tensors that the kernel changes; as the caller gave them before each measured
            launch.
        pre_hook, post_hook: called around each measured launch, in place of the two above, with
            `(arguments)` and `(arguments, exception)`; `pre_hook(arguments, reset_only=True)` once
            after the last one.
        warmup, rep: milliseconds to warm up, and to measure each config.
        use_cuda_graph: measure launches captured in a CUDA graph, by
            `triton.testing.do_bench_cudagraph`.
        do_bench: measures, in place of `CudaClock`: `do_bench(fn, quantiles)` returns milliseconds.
        cache_results: also read and write the result files of Triton's own tuner
            (`*.autotune.json`).
        options: what Triton's decorator has no parameter for.

    Raises:
        ConfigError: no config, a config with a `pre_hook` of its own, a name that is no argument,
            or something that is no config.
    """
    if (warmup is not None and not warmup >= 0) or (rep is not None and not rep > 0):
        raise ConfigError(
            f"warmup={warmup!r}, rep={rep!r}: expected milliseconds, the second more than 0"
        )
    clock = _clock(warmup, rep, do_bench, use_cuda_graph=use_cuda_graph)
    listed = ListedConfigs.of(configs)
    pruning = Pruning.of(prune_configs_by)
    chosen = options or TunerOptions()
    effects = ArgumentEffects(
        tuple(restore_value or ()), tuple(reset_to_zero or ()), pre_hook, post_hook
    )

    def decorate(function: Any) -> AutotunedKernel:
        return AutotunedKernel(
            function,
            listed,
            tuple(key),
            pruning,
            effects=effects,
            clock=clock,
            cache_results=cache_results,
            options=chosen,
        )

    return decorate


def _clock(
    warmup: float | None,
    rep: float | None,
    do_bench: Callable[..., Any] | None,
    *,
    use_cuda_graph: bool,
) -> Callable[[], Any] | None:
    """Return what makes the clock, None for the device's own."""
    if warmup is None and rep is None and not use_cuda_graph:
        return None if do_bench is None else functools.partial(GivenClock, do_bench)
    if do_bench is not None:
        warn("do_bench does not count where warmup, rep or use_cuda_graph are given, as in Triton")
    if use_cuda_graph:
        return lambda: GivenClock(toolchain.graph_benchmark(rep if rep is not None else REP_MS))
    return lambda: CudaClock(
        WARMUP_MS if warmup is None else warmup, REP_MS if rep is None else rep
    )
