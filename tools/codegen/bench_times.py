# SPDX-License-Identifier: Apache-2.0
"""`paired_times`: what a call takes of the GPU on each side, in turns, from memory that is in no cache.

The calls of one CUDA graph take turns among copies of the inputs that together are several times the L2 cache, and all results stay, so no call reads
or writes what the one before it left in the cache.  The graphs of both sides are replayed one after the other, each between two events; who is first
changes from round to round.  A graph's figure is the median of the ratios of its rounds.  `bench_sides` calls it.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.codegen.bench_rows import OURS, THEIRS

ROUNDS = 25
# A replay takes at least about so long, so that the resolution of events is far below what is looked for.
_REPLAY_US, _MOST_CALLS, _LEAST_CALLS = 600.0, 64, 3
# The L2 cache of an H200 has 60 MB.
_COPIES_BYTES = 300 << 20
_ESTIMATES = 3
Inputs = Sequence[Any]
Run = Callable[..., Any]


def paired_times(runs: dict[str, Run], make: Callable[[], Inputs]) -> dict[str, Any]:
    """Return microseconds a call of each side, by round, and the median of the ratios.

    Args:
        runs: `ours` and `inductor`; each takes the inputs.
        make: returns new inputs.
    """
    first = list(make())
    for run in runs.values():
        run(*first)
    torch.cuda.synchronize()
    took_us = min(
        _events(functools.partial(run, *first)) for run in runs.values() for _ in range(_ESTIMATES)
    )
    size = sum(
        item.numel() * item.element_size() for item in first if isinstance(item, torch.Tensor)
    )
    copies = max(1, min(_MOST_CALLS, math.ceil(_COPIES_BYTES / max(size, 1))))
    calls = max(_LEAST_CALLS, copies, min(_MOST_CALLS, math.ceil(_REPLAY_US / max(took_us, 1.0))))
    inputs = [first, *(list(make()) for _ in range(copies - 1))]
    gc.collect()
    gc.disable()
    try:
        graphs = {side: _Captured(run, inputs, calls) for side, run in runs.items()}
        _in_turns(graphs, 3, calls)
        samples = _in_turns(graphs, ROUNDS, calls)
    finally:
        gc.enable()
    return {"us": samples, "ratio": ratio(samples), "calls": calls, "copies": copies}


def ratio(samples: dict[str, list[float]]) -> float:
    """Return the median of the ratios of the pairs, ours to Inductor's."""
    return statistics.median(
        ours / theirs for ours, theirs in zip(samples[OURS], samples[THEIRS], strict=True)
    )


class _Captured:
    """A CUDA graph of many calls, which keeps their results."""

    def __init__(self, run: Run, inputs: list[list[Any]], calls: int) -> None:
        self._graph, self._kept = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            for number in range(calls):
                self._kept.append(run(*inputs[number % len(inputs)]))

    def __call__(self) -> None:
        self._graph.replay()


def _events(run: Callable[[], Any]) -> float:
    """Return how long the GPU took for what `run` starts, in microseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _in_turns(graphs: dict[str, _Captured], rounds: int, calls: int) -> dict[str, list[float]]:
    """Take a sample of each side in each round."""
    samples: dict[str, list[float]] = {side: [] for side in graphs}
    sides = list(graphs)
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            samples[side].append(_events(graphs[side]) / calls)
    return samples
