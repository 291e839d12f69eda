# SPDX-License-Identifier: Apache-2.0
"""`Search`: finds the fastest config: compiles all, measures what compiled, refines the best, and
reports on each config.

It knows neither GPU nor Triton: a `CandidateCompiler` builds candidates and a clock times them.
`Trial`, one tuning of one call, gives it both: it keeps the caller's tensors safe, times each
candidate, and runs the user's hooks around launches. Kernels that use so many registers that too few
blocks run at once get another candidate, with half the reduction block (`rescaled`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bundler.errors import (
    BundlerError,
    CannotLaunchStatically,
    ConfigError,
    DriverError,
    NoValidConfig,
)
from bundler.format.cached_properties import cached_property
from bundler.format.candidate_timings import Timing
from bundler.format.summary import count
from bundler.package_loggers import logger
from bundler.runtime.configs import Config
from bundler.runtime.tuning.benchmark import Clock, CudaClock, Sample, Sandbox, usable
from bundler.runtime.tuning.candidate_compiler import (
    Candidate,
    CandidateCompiler,
    Refused,
)
from bundler.runtime.tuning.descent import (
    SKIPPED,
    SKIPPED_DETERMINISTIC,
    UNMEASURED_DETERMINISTIC,
    put,
)
from bundler.runtime.tuning.occupancy import DeviceLimits, Occupancy, most_spills
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_reports import BandwidthReport, moved_bytes
from bundler.runtime.tuning.tuning_winners import describe, named_of
from bundler.toolchain import tuner_toolchain as toolchain

_NS_OF_MS = 1e6
# How long a candidate of a heuristic is measured for: some 200 launches, the cache emptied before
# each. A program has hundreds of candidates, so their time is most of what a first call waits for.
_WARMUP_MS, _REP_MS = 5.0, 20.0
_LOG = logger("bundler.runtime")
_SMALLEST_R = 64
_LEAST_MAJOR = 8


@dataclass(frozen=True)
class TuningOutcome:
    """The result of a search.

    Attributes:
        winner: the candidate to launch, still loaded.
        found_by: `autotune`, `steps`, `coordinate_descent`, or `only` when nothing had to be
            measured.
        timings: every config that was tried.
        compile_s, measure_s: wall time spent.
    """

    winner: Candidate
    found_by: str
    timings: tuple[Timing, ...]
    compile_s: float
    measure_s: float


class Search:
    """One search for one kernel and one tuning key; used once.

    Args:
        name: the kernel's, for errors.
        compiler: makes candidates of configs.
        bench: times one candidate.
        options: of the tuner: what kind of kernel it is, and what to try beyond the list.
        occupancy: of the device; None where registers do not matter.
    """

    def __init__(
        self,
        name: str,
        compiler: CandidateCompiler,
        bench: Callable[[Candidate], Sample],
        options: TunerOptions,
        occupancy: Occupancy | None = None,
    ) -> None:
        self._name, self._compiler, self._bench = name, compiler, bench
        self._options, self._occupancy = options, occupancy
        default = most_spills("cuda" if occupancy is None else occupancy.backend)
        given = options.spill_threshold
        self._spill_threshold = default if given is None else given
        self._timings: dict[Config, Timing] = {}
        self._samples: dict[Config, float] = {}
        self._best: tuple[Candidate, float] | None = None
        self._compile_s = self._measure_s = 0.0

    def run(self, configs: Sequence[Config]) -> TuningOutcome:
        """Return the fastest config.

        Raises:
            NoValidConfig: none compiled, or none ran; `reasons` says of each why.
            CompileFailed: the kernel does not compile, whatever the config.
        """
        candidates = self._build(configs)
        # How many registers a kernel uses is known once it is compiled, so smaller blocks are added
        # in a second round.
        candidates += self._build(self._smaller(candidates))
        if not candidates:
            raise self._none()
        if self._must_not_measure(candidates):
            # The list has the same order in every process, so its first candidate is the same
            # choice everywhere.
            for loser in candidates[1:]:
                loser.close()
            return self._outcome(candidates[0], "only")
        self._time_all(candidates)
        if self._best is None:
            raise self._none()
        found_by = "autotune" if len(self._samples) > 1 else "only"
        if self._options.steps:
            self._step_through()
            found_by = "steps"
        # Descent finds the nearest minimum, so it begins at the best config so far.
        if self._refines():
            self._refine(self._best[0].config)
            found_by = "coordinate_descent"
        return self._outcome(self._best[0], found_by)

    def _must_not_measure(self, candidates: Sequence[Candidate]) -> bool:
        if self._options.deterministic and self._options.kind in UNMEASURED_DETERMINISTIC:
            return True
        return len(candidates) == 1 and not self._refines() and not self._options.steps

    def _refines(self) -> bool:
        if self._options.descent is None or (
            self._options.kind in SKIPPED and self._options.space.fields is None
        ):
            return False
        return not (self._options.deterministic and self._options.kind in SKIPPED_DETERMINISTIC)

    def _build(self, configs: Sequence[Config]) -> list[Candidate]:
        if not configs:
            return []
        started = time.perf_counter()
        built = []
        for found in self._compiler.build(configs):
            if isinstance(found, Refused):
                self._timings[found.config] = Timing(
                    named_of(found.config), found.key, reason=found.reason
                )
                _LOG.info("%s: %s is left out: %s", self._name, found.config, found.reason)
            else:
                built.append(found)
                # Replaced by its time, if it is measured; what is left says why a config has none.
                self._timings[found.config] = Timing(
                    named_of(found.config), found.key, reason="not measured"
                )
        self._compile_s += time.perf_counter() - started
        return built

    def _smaller(self, candidates: Sequence[Candidate]) -> list[Config]:
        """Return configs with a halved reduction block, for those that use many registers."""
        options, device = self._options, self._occupancy
        hints = options.space.size_hints
        if not options.rescale or device is None:
            return []
        if not may_rescale(options.kind, hints, device, deterministic=options.deterministic):
            return []
        least = options.space.min_blocks.get("r0_", 1)
        found: dict[
            Config, None
        ] = {}  # an ordered set: two configs may lead to the same smaller one
        for candidate in candidates:
            smaller = rescaled(candidate.config, candidate.registers, hints, device, least)
            if smaller is not None and smaller not in self._timings:
                found[smaller] = None
        return list(found)

    def _time_all(self, candidates: Sequence[Candidate]) -> None:
        # One after the other: two launches at once would disturb each other's times.
        spilling = [candidate for candidate in candidates if self._spills(candidate)]
        for candidate in candidates:
            if candidate not in spilling:
                self._time(candidate)
        for candidate in spilling:
            if self._best is None or self._best[0] in spilling:
                # A kernel that runs in no other config is still better than none.
                self._time(candidate)
            else:
                self._leave_out(candidate)

    def _leave_out(self, candidate: Candidate) -> None:
        spills = count(candidate.spills or 0, "word")
        words = f"register spilling: {spills}, and {self._spill_threshold} are allowed"
        self._timings[candidate.config] = replace(self._timings[candidate.config], reason=words)
        candidate.close()

    def _time(self, candidate: Candidate) -> float:
        """Measure a candidate, and keep it loaded only while it is the best."""
        started = time.perf_counter()
        time_ms, timing = self._measured(candidate)
        self._measure_s += time.perf_counter() - started
        self._timings[candidate.config] = timing
        if timing.time_ns is not None:
            self._samples[candidate.config] = time_ms
        # Equal times keep the earlier config, so that the order of the list decides and not chance.
        if timing.time_ns is None or (self._best is not None and time_ms >= self._best[1]):
            candidate.close()
            return time_ms
        if self._best is not None:
            self._best[0].close()
        self._best = (candidate, time_ms)
        return time_ms

    def _measured(self, candidate: Candidate) -> tuple[float, Timing]:
        blank = Timing(named_of(candidate.config), candidate.key)
        try:
            sample = self._bench(candidate)
        # Too many registers, too much shared memory or too long a grid for this device: the others
        # may do.
        except (DriverError, CannotLaunchStatically) as error:
            return math.inf, replace(blank, reason=f"cannot be launched: {error.message}")
        if not usable(sample):
            return math.inf, replace(
                blank, reason="invalid configuration: the benchmark returned no time"
            )
        times = (round(ms * _NS_OF_MS) for ms in (sample.median_ms, sample.low_ms, sample.high_ms))
        median, low, high = times
        return sample.compared_ms, replace(
            blank, time_ns=median, low_ns=max(low, 0), high_ns=max(high, 0)
        )

    def _spills(self, candidate: Candidate) -> bool:
        # Spilled words go through memory at each use.  Only a user's own config is timed all the
        # same: its author chose it.
        return self._options.custom is False and (candidate.spills or 0) > self._spill_threshold

    def _step_through(self) -> None:
        """Try each step's changes on top of the best config so far; one that is not faster changes
        nothing.
        """
        for step in self._options.steps:
            for change in step:
                assert self._best is not None
                config = self._best[0].config
                for name, value in change.items():
                    config = put(config, name, value)
                self._time_of(config)

    def _refine(self, start: Config) -> None:
        # A persistent kernel holds its row whole, in its source; a block for it would be a field
        # that changes nothing.
        if self._options.kind == "persistent_reduction" and _r_blocks(start):
            raise ConfigError(
                f"{self._name}: {start} has a reduction block, and a persistent reduction has none"
            )
        assert self._options.descent is not None
        self._options.descent.run(start, self._options.space, self._time_of)

    def _time_of(self, config: Config) -> float:
        """Return a config's time; infinite where it does not compile or run."""
        # Already timed or refused with the list: descent must not compile it again.
        if config in self._timings:
            return self._samples.get(config, math.inf)
        try:
            built = self._build([config])
        except BundlerError as error:  # descent goes beyond the user's list, so a config of its own may fail and end nothing
            self._timings[config] = Timing(named_of(config), reason=str(error))
            return math.inf
        if built and self._spills(built[0]):
            self._leave_out(built[0])
            return math.inf
        return self._time(built[0]) if built else math.inf

    def _outcome(self, winner: Candidate, found_by: str) -> TuningOutcome:
        if found_by == "only" and winner.config not in self._samples:
            self._timings[winner.config] = replace(
                self._timings[winner.config], reason="not measured: nothing to choose"
            )
        return TuningOutcome(
            winner,
            found_by,
            tuple(self._timings.values()),
            self._compile_s,
            self._measure_s,
        )

    def _none(self) -> NoValidConfig:
        reasons = tuple(
            (describe(timing.config), timing.reason) for timing in self._timings.values()
        )
        lines = "\n".join(f"  {config}: {reason}" for config, reason in reasons)
        return NoValidConfig(
            f"{self._name}: none of {count(len(reasons), 'config')} can be used; give smaller"
            f" blocks, fewer stages, or fix the kernel:\n{lines}",
            kernel=self._name,
            reasons=reasons,
        )


def _r_blocks(config: Config) -> dict[str, int]:
    """Return the reduction blocks of a config; RSPLIT and the like are none."""
    return {
        n: v
        for n, v in config.kwargs.items()
        if n.startswith("R") and n.endswith("BLOCK") and type(v) is int
    }


def _has_long_block(config: Config) -> bool:
    """Whether a config reduces so many elements at once that half of them are a block, too."""
    return config.dynamic_scale and math.prod(_r_blocks(config).values()) > _SMALLEST_R


def may_be_halved(config: Config, options: TunerOptions) -> bool:
    """Whether the tuner may give a config of a looped reduction a smaller block: it is known once
    it is compiled.
    """
    space = options.space
    return (
        options.rescale
        and options.kind == "reduction"
        and not options.deterministic
        and space.size_hints.get("x", 1) > config.kwargs.get("XBLOCK", 1)
        and _has_long_block(config)
    )


def may_rescale(
    kind: str, size_hints: Mapping[str, int], device: Occupancy, *, deterministic: bool
) -> bool:
    """Whether a kernel's configs are looked at: a looped reduction with size hints, on a GPU that
    is new enough.

    Persistent reductions have no block to halve; in deterministic mode the order of additions must
    not depend on registers.
    """
    return (
        kind == "reduction"
        and bool(size_hints)
        and not deterministic
        and (device.backend == "hip" or (device.backend == "cuda" and device.major >= _LEAST_MAJOR))
        and device.registers > 0
        and device.threads > 0
    )


def rescaled(
    config: Config,
    registers: int | None,
    size_hints: Mapping[str, int],
    device: Occupancy,
    min_r: int = 1,
) -> Config | None:
    """Return the config with its largest reduction block halved, None when it is fine as it is.

    Args:
        config: what was compiled.
        registers: registers of a thread in its binary; None when that is not known.
        size_hints: sizes by axis.
        device: what a multiprocessor has.
        min_r: the smallest block of the first reduced axis (`R0_BLOCK`) allowed.
    """
    blocks = _r_blocks(config)
    if registers is None or not _has_long_block(config):
        return None
    if registers <= device.registers // device.threads:
        return None
    running = max(1, device.registers // (registers * device.warp_size * config.num_warps))
    needed = -(-size_hints.get("x", 1) // config.kwargs.get("XBLOCK", 1))
    if needed <= running * device.multiprocessors:
        return None
    largest = max(blocks, key=lambda name: blocks[name])
    half = blocks[largest] // 2
    least = min_r if largest == "R0_BLOCK" else 1
    return config.with_kwargs(**{largest: half}) if half >= max(least, 1) else None


Hook = Callable[..., Any]
_BYTES_OF_GB = 1e9


@dataclass(frozen=True)
class ArgumentEffects:
    """What a launch does to its arguments, and what is done about it before the next measured
    launch.

    Attributes:
        mutated, zeroed: names of tensors that are restored, or filled with zeros, before each
            launch.
        before, after: the user's own hooks; with `before`, nothing is restored or zeroed, as in
            Triton.
    """

    mutated: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    before: Hook | None = None
    after: Hook | None = None


class Trial:
    """Measures the configs of one call.

    Args:
        name: the kernel's.
        compiler: makes the candidates of the call.
        effects: what launches do to its arguments.
        clock: makes the clock; None for the GPU's own, for a short time each.
        options: the tuner's.
    """

    def __init__(
        self,
        name: str,
        compiler: CandidateCompiler,
        effects: ArgumentEffects,
        clock: Callable[[], Clock] | None,
        options: TunerOptions,
    ) -> None:
        self._name, self._compiler, self._effects, self._options = name, compiler, effects, options
        self._make_clock: Callable[[], Clock] = clock if clock is not None else _short_clock
        # A user's own hook prepares the arguments, so restoring or zeroing them as well would undo
        # its work.
        own = effects.before is not None
        self._sandbox = Sandbox(
            compiler.call,
            () if own else effects.mutated,
            () if own else effects.zeroed,
            stage=options.stage_to_host,
        )

    def run(self, configs: Sequence[Config]) -> TuningOutcome:
        """Return the fastest config; raises as `Search.run`."""
        with self._sandbox.open():
            outcome = Search(
                self._name, self._compiler, self.sample, self._options, self._occupancy()
            ).run(configs)
            # After the last launch the hook runs once more, so that the arguments are as before the
            # first one.
            if self._effects.before is not None:
                self._effects.before(
                    self._compiler.keywords(outcome.winner.config), reset_only=True
                )
        return outcome

    def add_to(self, report: BandwidthReport, config: Config, time_ms: float | None) -> None:
        """Add the kernel with a config to a report; one that cannot be launched is not added.

        Args:
            report: with a clock of its own, it is measured by that.
            config: was chosen already, here or elsewhere.
            time_ms: what a tuning measured just now; None to measure it.
        """
        if time_ms is None or report.clock is not None:
            candidate = self._compiler.build([config])[0]
            if isinstance(candidate, Refused):
                return
            try:
                with self._sandbox.open():
                    time_ms = self.sample(candidate).median_ms
            finally:
                candidate.close()
        known = self._options.gigabytes
        report.add(
            self._name,
            time_ms,
            moved_bytes(self._compiler.call) / _BYTES_OF_GB if known is None else known,
        )

    def _occupancy(self) -> Occupancy:
        options, place = self._options, self._compiler
        # The device of this process knows best, then who declared it; figures by architecture are
        # for what neither tells.
        told = DeviceLimits(*toolchain.device_limits(place.device)).or_else(options.limits)
        return Occupancy.of(place.driver.backend, place.driver.properties(place.device), told)

    @cached_property
    def _clock(self) -> Clock:
        # Made when there is something to measure: a single candidate is chosen without a clock,
        # also where no GPU could be timed.
        return self._make_clock()

    def sample(self, candidate: Candidate) -> Sample:
        """Time one candidate; restoring tensors, and the user's hooks, are no part of its time."""
        call = self._compiler.call
        # Clones take the place of the caller's tensors; all other arguments are the caller's own.
        changed = {
            name: value
            for name, value in self._sandbox.values.items()
            if value is not call.get(name)
        }
        launch = candidate.prepare(changed)
        before, after = self._effects.before, self._effects.after
        if before is None and after is None:
            return self._clock.sample(launch, self._sandbox.reset)
        around = _HookedLaunches(
            self._sandbox.reset,
            before,
            after,
            {**self._compiler.keywords(candidate.config), **changed},
        )
        try:
            sample = self._clock.sample(launch, around.reset)
        except Exception as error:  # the hook after a launch is told why it failed, as in Triton
            around.finish(error)
            raise
        around.finish()
        return sample


def _short_clock() -> Clock:
    return CudaClock(_WARMUP_MS, _REP_MS)


class _HookedLaunches:
    """Calls the user's hooks around launches; a clock only says that the next launch is due, so the
    hook after one runs then.
    """

    def __init__(
        self,
        reset: Callable[[], None],
        before: Hook | None,
        after: Hook | None,
        arguments: dict[str, Any],
    ) -> None:
        self._reset, self._before, self._after, self._arguments = reset, before, after, arguments
        self._launched = False

    def reset(self) -> None:
        self.finish()
        self._reset()
        if self._before is not None:
            self._before(self._arguments)
        self._launched = True

    def finish(self, error: Exception | None = None) -> None:
        if self._launched and self._after is not None:
            self._after(self._arguments, exception=error)
        self._launched = False
