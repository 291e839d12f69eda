# SPDX-License-Identifier: Apache-2.0
"""`Clock`, `Sandbox`: measuring launches without harm to the caller's data.

A `Clock` times a launch, `CudaClock` by events of the GPU; a `Sandbox` holds clones of the tensors
that the kernel changes, and copies and zeroes them outside of what is timed.  `tuner.py` and
`multi_kernel.py` measure with them.  `ProfilerClock` times by torch's profiler: the time that the
GPU was at work for a kernel, without the launch around it; a `BandwidthReport` measures with one
where it is given as its clock, and `autotune(do_bench=ProfilerClock())` tunes with it.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bundler.errors import ConfigError
from bundler.runtime.launch.argument_types import is_tensor
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.tuner_toolchain import FLUSH_BYTES

QUANTILES = (0.5, 0.2, 0.8)
WARMUP_MS, REP_MS = 25.0, 100.0
_ESTIMATES = 5
_MOST_RUNS = 10_000
_LEAST_RUNS = 3

Launch = Callable[[], None]


@dataclass(frozen=True)
class Sample:
    """How long one launch took, in milliseconds: the median, and the 20th and 80th percentile."""

    median_ms: float
    low_ms: float
    high_ms: float

    @property
    def compared_ms(self) -> float:
        """What launches are compared by, the 20th percentile: what else the GPU runs meanwhile, as
        for other processes, makes a launch longer and never shorter.
        """
        return self.low_ms


class Clock(Protocol):
    """Times launches."""

    def sample(self, launch: Launch, reset: Launch) -> Sample:
        """Return how long `launch` takes; `reset` is called before each launch and does not count.

        Raises whatever the launch raises.
        """


class CudaClock:
    """Times with events on torch's current stream, with a cold second-level cache, as Triton's
    benchmark does.

    Args:
        warmup_ms, rep_ms: for how long a launch is repeated before it counts, and while it counts.
    """

    def __init__(self, warmup_ms: float = WARMUP_MS, rep_ms: float = REP_MS) -> None:
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise ConfigError(
                "nothing here can time a launch on a GPU: torch is not imported, or sees no GPU;"
                " import torch, or give do_bench"
            )
        self._torch, self._warmup_ms, self._rep_ms = torch, warmup_ms, rep_ms
        self._buffer: Any = None

    def sample(self, launch: Launch, reset: Launch) -> Sample:
        """Return how long `launch` takes."""
        cuda = self._torch.cuda
        reset()
        launch()
        cuda.synchronize()  # the first launch may load the kernel, which is no part of its time
        # Emptying the cache can take longer than the launch.  So the time of a whole round decides
        # how many there are, and a measurement takes about `rep_ms` of wall time.
        _, round_ms = self._timed(launch, reset, _ESTIMATES)
        for _ in range(_runs(self._warmup_ms, round_ms)):
            reset()
            launch()
        return summary(self._timed(launch, reset, _runs(self._rep_ms, round_ms))[0])

    def _timed(self, launch: Launch, reset: Launch, runs: int) -> tuple[list[float], float]:
        """Return the time of each launch, and the mean time of a whole round, in milliseconds."""
        if self._buffer is None:
            # So that zeroing it leaves nothing of the kernel's data there.
            self._buffer = self._torch.empty(FLUSH_BYTES, dtype=self._torch.int8, device="cuda")
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(runs)]
        # All rounds are queued before the one wait at the end: a wait after each would measure the
        # idle GPU's wake-up, too.
        for start, end in pairs:
            reset()
            self._buffer.zero_()
            start.record()
            launch()
            end.record()
        self._torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in pairs]
        between = pairs[0][0].elapsed_time(pairs[-1][1])
        return times, max(between / runs, 1e-3)

    def release(self) -> None:
        """Give back the memory that empties the cache."""
        self._buffer = None


class GivenClock:
    """Times with a function of Triton's kind, `do_bench(fn, quantiles)`; what has to be reset is
    reset within `fn`.

    Args:
        do_bench: returns milliseconds: a number, or one for each quantile.
    """

    def __init__(self, do_bench: Callable[..., Any]) -> None:
        self._do_bench = do_bench

    def sample(self, launch: Launch, reset: Launch) -> Sample:
        """Return how long `launch` takes, as the function says."""

        def call() -> None:
            reset()
            launch()

        found = self._do_bench(call, quantiles=QUANTILES)
        times = (
            [float(found)] if isinstance(found, int | float) else [float(value) for value in found]
        )
        if not times:
            raise ConfigError(
                "do_bench returned nothing; it has to return milliseconds", got=repr(found)
            )
        median = times[0]
        return Sample(median, *(times[1:] if len(times) == len(QUANTILES) else (median, median)))


def pattern_of(text: str | None) -> re.Pattern[str] | None:
    """Return which kernels are meant; raises `ConfigError` for what is no regular expression."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"pattern={text!r}: no regular expression: {error}", got=text) from error


def _runs(span_ms: float, estimate_ms: float) -> int:
    return max(_LEAST_RUNS, min(int(span_ms / estimate_ms), _MOST_RUNS))


def summary(times: Sequence[float]) -> Sample:
    """Return the median and both percentiles of some times in milliseconds."""
    ordered = sorted(times)

    def at(quantile: float) -> float:
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    return Sample(statistics.median(ordered), at(QUANTILES[1]), at(QUANTILES[2]))


# -------------------------------------------------------------------------------- The caller's data


class Sandbox:
    """Lets a kernel run again and again on one call's arguments, and leaves the caller's tensors as
    they were.

    Tensors that the kernel changes (`mutated`) or adds to (`zeroed`) are cloned, one clone for each
    that is the same memory; where a clone would take more device memory than the program ever used,
    the caller's tensor is used, and restored from a copy in pinned memory of the host.

    Args:
        values: the arguments by name.
        mutated, zeroed: names of tensors to restore before each launch, and to fill with zeros.
        stage: whether copies on the host are allowed.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        mutated: Iterable[str],
        zeroed: Iterable[str],
        *,
        stage: bool = True,
    ) -> None:
        self._zeroed = [name for name in zeroed if is_tensor(values.get(name))]
        self._restored = [
            name for name in mutated if is_tensor(values.get(name)) and name not in self._zeroed
        ]
        self.values = dict(values)
        self.staged: dict[str, Any] = {}
        self._originals: dict[str, Any] = {}
        # Clones may use what the program has used before, so that tuning does not raise its peak;
        # beyond that, host memory.
        budget = free_budget() if stage else None
        same: dict[tuple[Any, ...], Any] = {}
        for name in dict.fromkeys([*self._restored, *self._zeroed]):
            tensor = values[name]
            size = span_bytes(tensor)
            identity = (
                tensor.data_ptr(),
                tuple(tensor.size()),
                tuple(tensor.stride()),
                tensor.dtype,
            )
            # The same memory under two names stays the same memory: a kernel may rely on the two
            # being one.
            if identity in same:
                self.values[name] = same[identity]
            elif budget is not None and size > budget:
                self._stage(name, tensor)
            else:
                budget = None if budget is None else budget - size
                self._clone(name, tensor, stage=stage)
            self._originals[name] = tensor
            same[identity] = self.values[name]

    def reset(self) -> None:
        """Put the tensors back to what the caller gave, or to zeros."""
        for name in self._restored:
            source = self.staged.get(name, self._originals[name])
            if self.values[name] is not source:
                self.values[name].copy_(source)
        for name in self._zeroed:
            self.values[name].zero_()

    @contextlib.contextmanager
    def open(self) -> Iterator[Sandbox]:
        """Restore the caller's own tensors at the end, whatever happened."""
        try:
            yield self
        finally:
            # Only staged tensors were used in place; clones left the caller's alone.
            for name, copy in self.staged.items():
                self._originals[name].copy_(copy)
            self.staged.clear()

    def _clone(self, name: str, tensor: Any, *, stage: bool) -> None:
        try:
            # With the same strides, by which the kernel reads.
            clone = tensor.new_empty_strided(tensor.size(), tensor.stride())
            clone.copy_(tensor)
        except RuntimeError as error:
            if not stage or type(error).__name__ not in {"OutOfMemoryError", "AcceleratorError"}:
                raise
            self._stage(name, tensor)
            return
        self.values[name] = clone

    def _stage(self, name: str, tensor: Any) -> None:
        copy = tensor.new_empty_strided(
            tensor.size(),
            tensor.stride(),
            device="cpu",
            pin_memory=bool(getattr(tensor, "is_cuda", False)),
        )
        copy.copy_(tensor)
        self.staged[name] = copy


def span_bytes(tensor: Any) -> int:
    """Return how many bytes of memory a tensor spans by its sizes and strides."""
    sizes, strides = tuple(tensor.size()), tuple(tensor.stride())
    if 0 in sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    size: int = (last + 1) * int(tensor.dtype.itemsize)
    return size


def free_budget() -> int | None:
    """Return how much more device memory may be used without exceeding what the program once used;
    None when unknown.
    """
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    try:
        return int(cuda.max_memory_allocated() - cuda.memory_allocated())
    except RuntimeError:
        return None


def usable(sample: Sample) -> bool:
    """Whether a sample is a time at all; some benchmarks return infinity for a launch that
    failed.
    """
    return math.isfinite(sample.median_ms) and sample.median_ms >= 0


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
            self._profile = toolchain.profiled_kernels
            self._flush = self._flush or toolchain.cache_flusher()
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
