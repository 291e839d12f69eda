# SPDX-License-Identifier: Apache-2.0
"""`CandidateCompiler`: compiles the configs of one call, on all cores where it can, and makes
candidates that can be launched and timed; `handles_on` makes handles of what a compile service
compiled, so that kernel source goes in and a launch comes out.

`AutotunedKernel` makes a compiler for each call that it tunes, and `Trial` builds its candidates
with it.  Users hand `handles_on` to `CompileService.source` as `finish`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.compile import module_import
from bundler.compile.build_plan import jobs_of, source_of
from bundler.compile.compile_job import Compiled, Job, SourceRef
from bundler.compile.service import CompileService
from bundler.compile.worker_pool import worker_count
from bundler.errors import (
    BundlerError,
    CannotLaunchStatically,
    CompileFailed,
    ConfigError,
    FormatError,
    NotFound,
)
from bundler.format.bundle import Bundle, Keep
from bundler.format.entries import Kernel, Target
from bundler.format.manifest import Observation
from bundler.lifecycle.bundle_builder import Builder, join, known_facts
from bundler.package_loggers import logger
from bundler.runtime import grids
from bundler.runtime.configs import Config
from bundler.runtime.launch.drivers.driver import Driver, target_of
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.launch.handle import Handle, PlanLoader
from bundler.runtime.launch.launch_hooks import Hooks, launch_facts
from bundler.runtime.launch.plan_builder import BACKENDS, can_launch
from bundler.runtime.launch.specialization_match import Specialization
from bundler.runtime.tuning.config_list import effective_on, ignored_on, keywords_on
from bundler.runtime.tuning.occupancy import Usage, usage_of
from bundler.toolchain import identity, jit_specialization
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.descriptor_arguments import with_descriptors
from bundler.toolchain.events import CompileEvent

_LOG = logger("bundler.runtime")

# Fewer configs are compiled in this process before worker processes have started; those of a
# service that was given stand ready.
LEAST_PARALLEL, LEAST_FOR_SERVICE = 4, 2
_LOCAL = "<locals>"


@dataclass(frozen=True)
class Refused:
    """A config that cannot be compiled or loaded, and why."""

    config: Config
    reason: str
    key: str = ""


@dataclass(frozen=True)
class CompiledConfig:
    """A config's compiled kernel: a bundle of it alone, its binary, and why it cannot be launched
    without Triton (None: it can).
    """

    kernel: Kernel
    bundle: Bundle
    image: bytes
    reason: str | None


def expand(kernel: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with what Triton's heuristics between a tuner and its function add,
    and with descriptors where the function takes them.
    """
    values = dict(call)
    while not hasattr(kernel, "params") and hasattr(kernel, "fn"):
        for name, heuristic in getattr(kernel, "values", {}).items():
            values[name] = heuristic(values)
        kernel = kernel.fn
    return with_descriptors(toolchain.innermost(kernel), values)


def make(
    function: Any,
    call: Mapping[str, Any],
    target: Target,
    *,
    keep: Keep = "launch",
    hook_args: Any = None,
    lines: bool = True,
) -> CompiledConfig:
    """Compile a call's kernel, or find it in Triton's cache.

    Args:
        function: a JIT function.
        call: every argument by name, and options.
        target: what for.
        keep: `all` for the stages of the compile, too.
        hook_args: what a hook for compiles is told besides, if it takes that.
        lines: as `known_facts` has it.

    Raises:
        CompileFailed: it does not compile, or Triton left no complete kernel.
    """
    event = toolchain.compile_call(function, call, target, hook_args=hook_args)
    found = _compiled(event, keep, lines)
    if isinstance(found, CompiledConfig):
        return found
    # Processes that compile one key at the same time may leave files of both in its directory, for
    # as long as the cache lives.
    _LOG.info("%s is compiled anew: %s", function.__name__, found)
    with tempfile.TemporaryDirectory(prefix="bundler-", ignore_cleanup_errors=True) as folder:
        event = toolchain.compile_call(function, call, target, folder)
        found = _compiled(event, keep, lines)
    if isinstance(found, CompiledConfig):
        return found
    raise CompileFailed(
        f"{function.__name__}: {found}", name=function.__name__, reason="incomplete", key=event.key
    )


def _compiled(event: CompileEvent, keep: Keep, lines: bool) -> CompiledConfig | str:
    """Return the kernel of a compile, with its files in memory; or why it cannot be taken from its
    directory.
    """
    problems: list[tuple[str, str]] = []
    root, key = os.path.split(event.directory)
    # A bundle in memory: kernels of bundles and of this process are then loaded in one way.
    builder = Builder(root, keep)
    # A hit has the times of the compile that made it, which is not this one.
    times = () if event.cache_hit else tuple(event.stage_times_us)
    known = known_facts(event, problems, lines=lines)
    if not builder.add_directory(key, Observation(layouts=("triton",), times_us=times), known):
        return dict(builder.left_out)[key]
    bundle = join([builder], identity.environment())
    kernel = bundle.kernels[0]
    image = bundle.read(kernel.binary)
    return CompiledConfig(kernel, bundle, image, can_launch(kernel, image))


class CandidateCompiler:
    """Makes candidates for one call of a kernel.

    Args:
        kernel: a JIT function, perhaps with heuristics around it.
        call: the arguments by name, and options that are no part of a config.
        driver: on whose current device they run.
        grid: the call's grid.
        hooks: what is called around each launch.
        workers: processes that compile; None for one a core, 1 for none.
        service: a compile service to use; None makes one for the call.
        source: where a worker finds the function; None where it can be imported by its name.
        told: hears of each config that was compiled.
        hook_args: as for `make`.
    """

    def __init__(
        self,
        kernel: Any,
        call: Mapping[str, Any],
        driver: Driver,
        grid: grids.Grid,
        hooks: Hooks,
        *,
        workers: int | None = None,
        service: CompileService | None = None,
        source: SourceRef | None = None,
        told: Callable[[Config, CompiledConfig], None] | None = None,
        hook_args: Any = None,
    ) -> None:
        self._told, self.hook_args = told, hook_args
        self.driver, self.device = driver, driver.device()
        self.target = target_of(driver, self.device)
        self.kernel, self.call, self.grid, self.hooks = kernel, dict(call), grid, hooks
        self._function = toolchain.innermost(kernel)
        self._workers, self._service, self._source = workers, service, source
        self.made: dict[Config, CompiledConfig] = {}
        self._counted: dict[Config, Config] = {}

    def build(self, configs: Sequence[Config]) -> list[Candidate | Refused]:
        """Return, in order, a candidate for each config or why there is none.

        Raises:
            CompileFailed: a config does not compile for a reason that all configs share.
        """
        target = self.target
        # Configs that differ from an earlier one only in options that this target does not have.
        same: dict[Config, Config] = {}
        for config in configs:
            first = self._counted.setdefault(effective_on(config, target), config)
            if first != config:
                same[config] = first
        failed = self._compile_ahead([config for config in configs if config not in same])
        return [
            (
                Refused(
                    config,
                    f"here it is the same as {same[config]}:"
                    f" {target.backend} has no {', '.join(ignored_on(config, target))}",
                )
                if config in same
                else self._candidate(config, failed.get(config))
            )
            for config in configs
        ]

    def keywords(self, config: Config) -> dict[str, Any]:
        """Return the call with a config's values and options, and what heuristics make of them."""
        return expand(self.kernel, {**self.call, **keywords_on(config, self.target)})

    def _candidate(self, config: Config, failed: CompileFailed | None) -> Candidate | Refused:
        try:
            if failed is not None:
                raise failed
            made = self.made[config] = make(
                self._function,
                self.keywords(config),
                self.target,
                hook_args=self.hook_args,
            )
        except CompileFailed as error:
            # A fault of the kernel is the user's to see; a config that is only too large is one
            # candidate less.
            if not toolchain.tolerated(error):
                error.facts["config"] = str(config)
                raise
            return Refused(config, str(error.facts.get("reason") or error.message))
        if self._told is not None:
            self._told(config, made)
        if made.reason is None:
            # Loaded at once: too much shared memory shows here, before the config takes a turn on
            # the clock.
            static = StaticCandidate(config, made, self)
            reason = static.why_not()
            return static if reason is None else Refused(config, reason, made.kernel.key)
        return TritonCandidate(config, made, self)

    def _compile_ahead(self, configs: Sequence[Config]) -> dict[Config, CompileFailed]:
        """Let worker processes fill Triton's cache; returns what they could not compile."""
        # Workers only fill Triton's cache: a config that they compiled is compiled again here, and
        # is a hit then.
        if len(configs) < (LEAST_PARALLEL if self._service is None else LEAST_FOR_SERVICE):
            return {}
        wanted = self._workers != 1 or self._service is not None
        source = (self._source or importable(self._function)) if wanted else None
        if source is None:
            return {}
        jobs: dict[Config, Job] = {}
        with toolchain.for_target(self.target):  # specializing asks Triton's driver for the target
            for config in configs:
                try:
                    found = jit_specialization.specialize_call(
                        self._function, self.keywords(config)
                    )
                except Exception:  # noqa: BLE001, S112  # the compile in this process will raise the reason
                    continue
                jobs[config] = asked_for(
                    jobs_of(self._function.__name__, source, found, self.target)
                )
        if self._service is not None:
            return _failures(jobs, self._service)
        with CompileService(min(worker_count(self._workers), len(configs))) as service:
            return {} if service.in_process else _failures(jobs, service)


def asked_for(jobs: Iterable[Job]) -> Job:
    """Return the one of a compile's jobs whose key this process asks for: specializing left the
    function's hash at the last one.
    """
    *_, last = jobs
    return last


def _failures(jobs: Mapping[Config, Job], service: CompileService) -> dict[Config, CompileFailed]:
    results = service.compile_all(jobs.values())
    # What is not a matter of size is compiled again here: a worker may only have failed to import
    # the function.
    return {
        config: found
        for config, found in zip(jobs, results, strict=True)
        if isinstance(found, CompileFailed) and toolchain.tolerated(found)
    }


def importable(function: Any) -> SourceRef | None:
    """Return where another process can import a JIT function from, None where it cannot: a script,
    a notebook, a closure.
    """
    module = sys.modules.get(function.__module__)
    path, name = getattr(module, "__file__", None), function.fn.__qualname__
    if (
        module is None
        or module.__name__ == "__main__"
        or not path
        or not path.endswith(".py")
        or _LOCAL in name
    ):
        return None
    try:
        # Another decorator, or a later definition, may have taken the name: a worker would import
        # the wrong function.
        if jit_specialization.jit_function(module_import.function_in(module, name)) is not function:
            return None
        return source_of(module_import.find(path), name)
    except (NotFound, ConfigError):
        return None


# --------------------------------------------------------------------------------------- Candidates


class Candidate(ABC):
    """A config that was compiled and can be launched.

    Attributes:
        config: what it was compiled from.
        made: its kernel.
        key: the kernel's.
        registers: registers of a thread, None when that is not known.
        spills: 32-bit words of a thread that registers had no room for, None when that is not
            known.
    """

    def __init__(self, config: Config, made: CompiledConfig, compiler: CandidateCompiler) -> None:
        self.config, self.made, self.key = config, made, made.kernel.key
        self._compiler = compiler
        try:
            usage = usage_of(made.image, made.kernel.spec.entry, made.kernel.target)
        except FormatError:  # the binary may still run; it is only not judged by its usage
            usage = Usage(None, None)
        self.registers, self.spills = usage.registers, usage.spills

    @abstractmethod
    def prepare(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Return a launch with these arguments in place of the call's."""

    @abstractmethod
    def close(self) -> None:
        """Take it off the device; twice is fine."""


class StaticCandidate(Candidate):
    """A config's kernel, launched without Triton; loaded when it is first prepared."""

    def __init__(self, config: Config, made: CompiledConfig, compiler: CandidateCompiler) -> None:
        super().__init__(config, made, compiler)
        # A loader of its own, so that closing one candidate unloads nothing of another.
        self._loader = PlanLoader(compiler.driver)
        self._loader.add_source(made.bundle)

    def why_not(self) -> str | None:
        """Load it; returns why the device cannot, such as too much shared memory, None when
        it can.
        """
        try:
            self._loader.load(self.made.kernel, self._compiler.device)
        except (CannotLaunchStatically, FormatError):
            raise
        except BundlerError as error:
            return error.message
        return None

    def prepare(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Return a launch with these arguments in place of the call's."""
        place, hooks = self._compiler, self._compiler.hooks
        loaded = self._loader.load(self.made.kernel, place.device)
        arguments = Specialization(self.made.kernel).arguments
        handle = Handle(loaded, place.driver, arguments)
        call = {**self._compiler.keywords(self.config), **values}
        names = {argument.name for argument in arguments}
        given = handle.values(**{name: value for name, value in call.items() if name in names})
        grid = self._compiler.grid
        sizes = grids.checked(
            grid(call) if callable(grid) else grid,
            handle.plan.kernel,
            place.target.backend,
            handle.plan.cluster,
        )
        stream = place.driver.stream(place.device)
        name = self.made.kernel.name
        facts = launch_facts(name, self.key, sizes, stream, place.device, loaded.module)

        def launch() -> None:
            handle.launch(*sizes, stream, *given)

        # Hooks are asked for once: with none a timed launch has no extra call in it.
        return (lambda: hooks.around(facts, launch)) if hooks.present() else launch

    def close(self) -> None:
        """Take it off the device."""
        self._loader.unload()


class TritonCandidate(Candidate):
    """A config's kernel that only Triton can launch."""

    def prepare(self, values: Mapping[str, Any]) -> Callable[[], None]:
        """Return a launch with these arguments in place of the call's."""
        call = expand(self._compiler.kernel, {**self._compiler.keywords(self.config), **values})
        function, grid = toolchain.innermost(self._compiler.kernel), self._compiler.grid

        def launch() -> None:
            function.run(grid=grid, warmup=False, **call)

        return launch

    def close(self) -> None:
        """Do nothing: Triton keeps what it has loaded."""


# -------------------------------------------------------------------- What a service compiled


def handles_on(
    driver: Driver | None = None, device: int | None = None
) -> Callable[[Compiled], Handle]:
    """Return a function that loads a compiled kernel and returns its handle.

    Args:
        driver: whose GPUs to use; None opens CUDA's or HIP's when the function is first called.
        device: None for the current one.

    The function raises `CannotLaunchStatically` for a kernel that only Triton can launch or whose
    files are not complete, `ToolchainMismatch` for one of another target, and `DriverError`.
    """

    def load(compiled: Compiled) -> Handle:
        chosen = driver or open_first_driver(BACKENDS)
        builder = Builder(os.path.dirname(compiled.directory), "launch")
        reason = compiled.add_to(builder)
        if reason is not None:
            raise CannotLaunchStatically(f"{compiled.key}: {reason}", key=compiled.key)
        bundle = join([builder], identity.environment())
        loader, kernel = PlanLoader(chosen), bundle.kernels[0]
        loader.add_source(bundle)
        loaded = loader.load(kernel, chosen.device() if device is None else device)
        return Handle(loaded, chosen, Specialization(kernel).arguments)

    return load
