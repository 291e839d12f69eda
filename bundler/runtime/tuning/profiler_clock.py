# SPDX-License-Identifier: Apache-2.0
"""`ProfilerClock`: times launches by torch's profiler: the time that the GPU was at work for a
kernel, without the launch around it.

A `BandwidthReport` measures with one where it is given as its clock, and
`autotune(do_bench=ProfilerClock())` tunes with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bundler.errors import ConfigError
from bundler.runtime.tuning.benchmark import Launch, Sample, pattern_of, summary
from bundler.toolchain import tuner_toolchain as toolchain

WARMUPS, RUNS = 5, 25
_MS_OF_US = 1e-3
# What restores tensors and empties the cache between launches: torch's own kernels, copies and
# fills; and the wait at the end.
_AROUND = re.compile(
    r"Memcpy|Memset|(void )?at::|(void )?at_cuda_detail::|(Context|Device|Stream|Event) Sync"
)
# Names that an error lists.
_MOST_NAMED = 5

Profile = Callable[[Callable[[], None]], Sequence[tuple[str, float]]]


class ProfilerClock:
    """Times launches by what a profiler says of the GPU.

    Args:
        pattern: a regular expression; only kernels of the GPU whose name has a match count.  None
            counts all but torch's own, copies and fills.
        warmups, runs: launches before it counts, and while it counts.
        profile: runs a function and returns (name, microseconds) of what the GPU did meanwhile;
            None for torch's profiler.
        flush: empties the second-level cache before each launch; None for a fill of torch's where
            torch's profiler measures.

    Raises:
        ConfigError: the pattern is no regular expression, or `runs` below one.
    """

    def __init__(
        self,
        pattern: str | None = None,
        *,
        warmups: int = WARMUPS,
        runs: int = RUNS,
        profile: Profile | None = None,
        flush: Launch | None = None,
    ) -> None:
        if runs < 1 or warmups < 0:
            raise ConfigError(
                f"runs={runs}, warmups={warmups}: expected at least 1 and 0", got=runs
            )
        self._pattern = pattern_of(pattern)
        self._warmups, self._runs = warmups, runs
        self._profile, self._flush = profile, flush

    def __call__(self, fn: Launch, quantiles: Sequence[float] = ()) -> list[float]:
        """Return median, 20th and 80th percentile in milliseconds, as a `do_bench`; `quantiles` has
        to ask for these.
        """
        del quantiles
        found = self.sample(fn, _nothing)
        return [found.median_ms, found.low_ms, found.high_ms]

    def sample(self, launch: Launch, reset: Launch) -> Sample:
        """Return how long `launch` keeps the GPU at work; raises `ConfigError` where the profiler
        saw no kernel that counts.
        """
        # Made now: a program may name its clock where there is no GPU.
        if self._profile is None:
            self._profile, self._flush = (
                toolchain.profiled_kernels,
                self._flush or toolchain.cache_flusher(),
            )
        flush = self._flush or _nothing

        def repeat(times: int) -> None:
            for _ in range(times):
                reset()
                flush()
                launch()

        repeat(self._warmups)
        found = self._profile(lambda: repeat(self._runs))
        times = [us * _MS_OF_US for name, us in found if self._counts(name)]
        if not times:
            names = sorted({name for name, _ in found})[:_MOST_NAMED]
            wanted = (
                "that is not torch's own"
                if self._pattern is None
                else f"that {self._pattern.pattern!r} matches"
            )
            raise ConfigError(
                f"the profiler saw no kernel {wanted}, but {', '.join(names) or 'nothing'}",
                got=names,
            )
        # A launch may run several kernels; each of its turns has as many, one after the other.
        each, rest = divmod(len(times), self._runs)
        if rest:  # the profiler lost some, so that no turn is whole for certain
            mean = sum(times) / self._runs
            return Sample(mean, mean, mean)
        return summary([sum(times[i : i + each]) for i in range(0, len(times), each)])

    def _counts(self, name: str) -> bool:
        return (
            _AROUND.match(name) is None
            if self._pattern is None
            else self._pattern.search(name) is not None
        )


def _nothing() -> None:
    """Reset or flush nothing."""
