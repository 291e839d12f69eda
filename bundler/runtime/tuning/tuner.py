# SPDX-License-Identifier: Apache-2.0
"""`Search`: finds the fastest config: compiles all, measures what compiled, refines the best, and
reports on each config.

It knows neither GPU nor Triton: a `CandidateBuilder` builds candidates and a clock times them.
`Trial` gives it both. Kernels that use so many registers that too few blocks run at once get
another candidate, with half the reduction block (`rescaled`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bundler.errors import BundlerError, ConfigError, DriverError, NoValidConfig
from bundler.format.candidate_timings import Timing
from bundler.format.summary import count
from bundler.package_loggers import logger
from bundler.runtime.configs import Config
from bundler.runtime.tuning.benchmark import Sample, usable
from bundler.runtime.tuning.descent import (
    SKIPPED,
    SKIPPED_DETERMINISTIC,
    UNMEASURED_DETERMINISTIC,
    Descent,
    Space,
    put,
)
from bundler.runtime.tuning.occupancy import Occupancy
from bundler.runtime.tuning.tuning_winners import named_of

# 32-bit words; the thresholds that Inductor has for its own kernels.
SPILL_THRESHOLD, SPILL_THRESHOLD_HIP = 16, 32
_NS_OF_MS = 1e6
_LOG = logger("bundler.runtime")
_SMALLEST_R = 64
_LEAST_MAJOR = 8


class Candidate(Protocol):
    """A config that was compiled and can be launched.

    Attributes:
        config: what it was compiled from.
        key: the kernel's.
        registers: registers of a thread, None when that is not known.
        spills: 32-bit words of a thread that registers had no room for, None when that is not
            known.
    """

    config: Config
    key: str
    registers: int | None
    spills: int | None

    def close(self) -> None:
        """Take it off the device; twice is fine."""


@dataclass(frozen=True)
class Refused:
    """A config that cannot be compiled or loaded, and why."""

    config: Config
    reason: str
    key: str = ""


class CandidateBuilder(Protocol):
    """Makes candidates of configs; `CandidateCompiler` is the one for real kernels."""

    def build(self, configs: Sequence[Config]) -> list[Candidate | Refused]:
        """Return, in order, a candidate for each config or why there is none.

        Raises:
            CompileFailed: a config does not compile for a reason that all configs share.
        """


@dataclass(frozen=True)
class Traits:
    """What is known of a kernel beyond its configs.

    Attributes:
        kind: `pointwise`, `reduction`, `persistent_reduction`, `split_scan`, `template`,
            `user_autotune`, `fixed`, …
        space: what coordinate descent may try, size hints among it.
        occupancy: of the device; None where registers do not matter.
        custom: written by a user, whose configs are timed however much they spill.
        deterministic: equal input has to give equal output in every process, so no measurement may
            choose among reductions.
        min_r: the smallest reduction block.
        rescale: whether reduction blocks may be halved.
        steps: changes to try on top of the best config, one step after the other.
    """

    kind: str = "user_autotune"
    space: Space = field(default_factory=Space)
    occupancy: Occupancy | None = None
    custom: bool = True
    deterministic: bool = False
    min_r: int = 1
    rescale: bool = True
    steps: tuple[tuple[Mapping[str, Any], ...], ...] = ()


@dataclass(frozen=True)
class TuningOutcome:
    """The result of a search.

    Attributes:
        winner: the candidate to launch, still loaded.
        found_by: `autotune`, `steps`, `coordinate_descent`, or `only` when nothing had to be
            measured.
        timings: every config that was tried.
        compile_s, measure_s: wall time spent.
        measured: how many configs were timed.
    """

    winner: Candidate
    found_by: str
    timings: tuple[Timing, ...]
    compile_s: float
    measure_s: float
    measured: int


class Search:
    """One search for one kernel and one tuning key; used once.

    Args:
        name: the kernel's, for errors.
        compiler: makes candidates of configs.
        bench: times one candidate.
        traits: what is known of the kernel.
        descent: how to refine the winner; None not to.
        spill_threshold: candidates that spill more are not timed, unless the kernel is a user's own
            or no other runs; None for 16, and 32 on AMD.
    """

    def __init__(
        self,
        name: str,
        compiler: CandidateBuilder,
        bench: Callable[[Candidate], Sample],
        traits: Traits,
        *,
        descent: Descent | None = None,
        spill_threshold: int | None = None,
    ) -> None:
        self._name, self._compiler, self._bench, self._traits, self._descent = (
            name,
            compiler,
            bench,
            traits,
            descent,
        )
        hip = traits.occupancy is not None and traits.occupancy.backend == "hip"
        default = SPILL_THRESHOLD_HIP if hip else SPILL_THRESHOLD
        self._spill_threshold = default if spill_threshold is None else spill_threshold
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
        if self._traits.steps:
            self._step_through()
            found_by = "steps"
        # Descent finds the nearest minimum, so it begins at the best config so far.
        if self._refines():
            self._refine(self._best[0].config)
            found_by = "coordinate_descent"
        return self._outcome(self._best[0], found_by)

    def _must_not_measure(self, candidates: Sequence[Candidate]) -> bool:
        if self._traits.deterministic and self._traits.kind in UNMEASURED_DETERMINISTIC:
            return True
        return len(candidates) == 1 and not self._refines() and not self._traits.steps

    def _refines(self) -> bool:
        if self._descent is None or (
            self._traits.kind in SKIPPED and self._traits.space.fields is None
        ):
            return False
        return not (self._traits.deterministic and self._traits.kind in SKIPPED_DETERMINISTIC)

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
        traits, hints = self._traits, self._traits.space.size_hints
        if not traits.rescale or traits.occupancy is None:
            return []
        if not may_rescale(
            traits.kind, hints, traits.occupancy, deterministic=traits.deterministic
        ):
            return []
        found: dict[
            Config, None
        ] = {}  # an ordered set: two configs may lead to the same smaller one
        for candidate in candidates:
            smaller = rescaled(
                candidate.config, candidate.registers, hints, traits.occupancy, traits.min_r
            )
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
        except DriverError as error:  # too many registers or too much shared memory for this device: the others may do
            return math.inf, replace(blank, reason=f"cannot be launched: {error.message}")
        if not usable(sample):
            return math.inf, replace(
                blank, reason="invalid configuration: the benchmark returned no time"
            )
        times = (round(ms * _NS_OF_MS) for ms in (sample.median_ms, sample.low_ms, sample.high_ms))
        median, low, high = times
        return sample.median_ms, replace(
            blank, time_ns=median, low_ns=max(low, 0), high_ns=max(high, 0)
        )

    def _spills(self, candidate: Candidate) -> bool:
        # Spilled words go through memory at each use.  Only a user's own config is timed all the
        # same: its author chose it.
        return not self._traits.custom and (candidate.spills or 0) > self._spill_threshold

    def _step_through(self) -> None:
        """Try each step's changes on top of the best config so far; one that is not faster changes
        nothing.
        """
        for step in self._traits.steps:
            for change in step:
                assert self._best is not None
                config = self._best[0].config
                for name, value in change.items():
                    config = put(config, name, value)
                self._time_of(config)

    def _refine(self, start: Config) -> None:
        # A persistent kernel holds its row whole, in its source; a block for it would be a field
        # that changes nothing.
        if self._traits.kind == "persistent_reduction" and _r_blocks(start):
            raise ConfigError(
                f"{self._name}: {start} has a reduction block, and a persistent reduction has none"
            )
        assert self._descent is not None
        self._descent.run(start, self._traits.space, self._time_of)

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
            len(self._samples),
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


def describe(config: Any) -> str:
    """Return a record's config as a line for people, without the defaults of rarely used fields."""
    silent = {("num_ctas", 1), ("maxnreg", None)}
    pairs = [(name, value.plain()) for name, value in config]
    return ", ".join(f"{name}={value}" for name, value in pairs if (name, value) not in silent)


def _r_blocks(config: Config) -> dict[str, int]:
    """Return the reduction blocks of a config; RSPLIT and the like are none."""
    return {
        n: v
        for n, v in config.kwargs.items()
        if n.startswith("R") and n.endswith("BLOCK") and type(v) is int
    }


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
    if (
        registers is None
        or not config.dynamic_scale
        or math.prod(blocks.values()) <= _SMALLEST_R
        or not blocks
    ):
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
