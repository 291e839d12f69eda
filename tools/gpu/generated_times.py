# SPDX-License-Identifier: Apache-2.0
"""`paired_times`: what a launch takes on each side: of the GPU, and of the host that calls it, in
turns.

GPU: `count` launches are one CUDA graph; the graphs of both sides are replayed one after the other,
each between two events.  Host: `count` calls between two looks at the clock, after the queue has
run empty; so few that no call waits for the queue.  In each round the sides take turns, and the
side that is first changes from round to round.  What is said of a pair is its ratio; of a kernel,
the median of its ratios, so that what disturbs one round disturbs no figure.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tools.gpu.generated_launches import OURS, THEIRS, Launch

ROUNDS = 25
# Far shorter than the driver's queue of launches.
CALLS = 100
# A replay takes about so long, so that the resolution of events (about half a microsecond) is far
# below what is looked for.
REPLAY_US, MOST_LAUNCHES = 500.0, 200
_ESTIMATES = 10
Samples = dict[str, list[float]]
Run = Callable[[], None]


def paired_times(launch: Launch) -> dict[str, Any]:
    """Return the samples of both sides in microseconds a launch, and the median of the ratios;
    launches on equal memory.
    """
    args = launch.cloned()
    runs = {THEIRS: launch.theirs.run, OURS: launch.ours.run}
    for run in runs.values():
        run(*args, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    count = _count(runs[THEIRS], args)
    gc.collect()
    gc.disable()
    try:
        gpu, way = _gpu(runs, args, count)
        host = _in_turns({side: _host(run, args) for side, run in runs.items()}, ROUNDS)
    finally:
        gc.enable()
    return {
        "gpu_us": gpu,
        "host_us": host,
        "gpu_ratio": ratio(gpu),
        "host_ratio": ratio(host),
        "launches": count,
        "way": way,
    }


def ratio(samples: Samples) -> float:
    """Return the median of the ratios of the pairs, ours to Inductor's."""
    return statistics.median(
        ours / theirs for ours, theirs in zip(samples[OURS], samples[THEIRS], strict=True)
    )


def _count(run: Callable[..., Any], args: list[Any]) -> int:
    """Return how many launches a replay has."""
    stream = torch.cuda.current_stream().cuda_stream

    def some() -> None:
        for _ in range(_ESTIMATES):
            run(*args, stream=stream)

    some()
    took_us = _events(some) / _ESTIMATES
    return max(3, min(int(REPLAY_US / max(took_us, 0.1)), MOST_LAUNCHES))


def _gpu(runs: dict[str, Callable[..., Any]], args: list[Any], count: int) -> tuple[Samples, str]:
    """Return microseconds of the GPU for a launch, and how they were found."""
    try:
        replays = {side: _graph(run, args, count) for side, run in runs.items()}
        way = "graph"
    except RuntimeError as error:
        # What cannot be captured is launched between the events; the host is in these times, too.
        torch.cuda.synchronize()
        replays = {side: _loop(run, args, count) for side, run in runs.items()}
        way = f"events: {str(error).splitlines()[0][:200]}"
    timed = {side: _replayed(replay, count) for side, replay in replays.items()}
    _in_turns(timed, 3)
    return _in_turns(timed, ROUNDS), way


def _graph(run: Callable[..., Any], args: list[Any], count: int) -> Run:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(count):
            run(*args, stream=stream)
    replay: Run = graph.replay
    return replay


def _replayed(replay: Run, count: int) -> Callable[[], float]:
    return lambda: _events(replay) / count


def _loop(run: Callable[..., Any], args: list[Any], count: int) -> Run:
    stream = torch.cuda.current_stream().cuda_stream

    def replay() -> None:
        for _ in range(count):
            run(*args, stream=stream)

    return replay


def _host(run: Callable[..., Any], args: list[Any]) -> Callable[[], float]:
    """Return what gives microseconds of the host for a call."""
    stream = torch.cuda.current_stream().cuda_stream

    def timed() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            run(*args, stream=stream)
        took = time.perf_counter_ns() - started
        torch.cuda.synchronize()
        return took / CALLS / 1e3

    return timed


def _events(run: Run) -> float:
    """Return how long the GPU took for what `run` starts, in microseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _in_turns(timed: dict[str, Callable[[], float]], rounds: int) -> Samples:
    """Take a sample of each side in each round; who is first changes."""
    samples: Samples = {side: [] for side in timed}
    sides = list(timed)
    for number in range(rounds):
        for side in sides if number % 2 else reversed(sides):
            samples[side].append(timed[side]())
    return samples
