# SPDX-License-Identifier: Apache-2.0
"""`Trial`: one tuning of one call: it keeps the caller's tensors safe, times each candidate, and
runs the user's hooks around launches.

`AutotunedKernel` runs one for each tuning key that it has no config for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.format.cached_properties import cached_property
from bundler.runtime.configs import Config
from bundler.runtime.tuning.benchmark import Clock, CudaClock, Sample, Sandbox
from bundler.runtime.tuning.candidate_compiler import (
    CandidateCompiler,
    StaticCandidate,
    TritonCandidate,
)
from bundler.runtime.tuning.occupancy import DeviceLimits, Occupancy
from bundler.runtime.tuning.tuner import Candidate, Refused, Search, Traits, TuningOutcome
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_reports import BandwidthReport, moved_bytes
from bundler.toolchain import tuner_toolchain as toolchain

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
        clock: makes the clock; None for the GPU's own.
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
        self._make_clock: Callable[[], Clock] = clock if clock is not None else CudaClock
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
                self._name,
                self._compiler,
                self.sample,
                self._traits(),
                descent=self._options.descent,
                spill_threshold=self._options.spill_threshold,
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

    def _traits(self) -> Traits:
        options, place = self._options, self._compiler.place
        # The device of this process knows best, then who declared it; figures by architecture are
        # for what neither tells.
        told = DeviceLimits(*toolchain.device_limits(place.device)).or_else(options.limits)
        occupancy = Occupancy.of(place.driver.backend, place.driver.properties(place.device), told)
        return Traits(
            options.kind,
            options.space,
            occupancy,
            options.custom is not False,
            options.deterministic,
            min_r=options.space.min_blocks.get("r0_", 1),
            rescale=options.rescale,
            steps=options.steps,
        )

    @cached_property
    def _clock(self) -> Clock:
        # Made when there is something to measure: a single candidate is chosen without a clock,
        # also where no GPU could be timed.
        return self._make_clock()

    def sample(self, candidate: Candidate) -> Sample:
        """Time one candidate; restoring tensors, and the user's hooks, are no part of its time."""
        assert isinstance(candidate, StaticCandidate | TritonCandidate)
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
