# SPDX-License-Identifier: Apache-2.0
"""`measured`: how long a model takes in eager mode, by Inductor and by us, in one process, in
turns; `models --time` runs it, and `lines` are its rows.

Wall time is that of a call between two waits for the GPU, host time that of a call which nobody
waits for; device time is the sum over the kernels of a call, as torch's profiler has it.  Other
processes of the same run wait at a lock, so that one measures at a time.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import _dynamo as dynamo

from tools.codegen import second_start
from tools.codegen.models import TIMING_LOCK

Found = dict[str, Any]
SIDES = ("eager", "inductor", "ours")
_WARM, _ROUNDS, _PROFILED = 5, 40, 3


def measured(subject: Any, *task: str, graphs: bool = False) -> Found:
    """Return by side what the first example takes: `first_s`, then medians in microseconds `wall`,
    `host` and `device`, all samples of the first two, `kernels` a call, and `peak` bytes.

    Args:
        subject: the model.
        task: that other processes are given which measure its second start, `second`; without one
            nobody does.
        graphs: let both sides launch repeated calls as CUDA graphs.
    """
    from bundler.codegen.torch_backend import triton_bundler

    dynamo.reset()
    mode = "reduce-overhead" if graphs else None
    backends: dict[str, Any] = {"inductor": "inductor", "ours": triton_bundler}
    found: Found = {side: {} for side in SIDES}
    steps = {}
    for side in SIDES:
        model = copy.deepcopy(subject.model)
        called = (
            model if side == "eager" else torch.compile(model, backend=backends[side], mode=mode)
        )
        steps[side] = functools.partial(subject.ran, model, called, subject.examples[0])
        started = time.perf_counter()
        steps[side]()
        torch.cuda.synchronize()
        found[side]["first_s"] = round(time.perf_counter() - started, 3)
    with _alone():
        for step in steps.values():
            for _ in range(_WARM):
                step()
        samples = _samples(steps)
        for side, step in steps.items():
            found[side] |= samples[side] | _profiled(step) | {"peak": _peak(step)}
        if task:
            found["second"] = second_start.measured(*task)
    return found


@contextmanager
def _alone() -> Any:
    with open(os.environ[TIMING_LOCK], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _samples(steps: Mapping[str, Callable[[], Any]]) -> Found:
    taken: dict[str, dict[str, list[float]]] = {side: {"wall": [], "host": []} for side in steps}
    for _ in range(_ROUNDS):
        for side, step in steps.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            held = step()
            returned = time.perf_counter()
            torch.cuda.synchronize()
            taken[side]["wall"].append(round((time.perf_counter() - started) * 1e6, 1))
            taken[side]["host"].append(round((returned - started) * 1e6, 1))
            del held
    return {
        side: {
            **{name: statistics.median(values) for name, values in one.items()},
            "samples": one,
        }
        for side, one in taken.items()
    }


def _profiled(step: Callable[[], Any]) -> Found:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            step()
        torch.cuda.synchronize()
    kernels = [one for one in profile.events() if one.device_type.name == "CUDA"]
    device = sum(one.device_time for one in kernels)
    return {
        "device": round(device / _PROFILED, 1),
        "kernels": round(len(kernels) / _PROFILED, 1),
    }


def _peak(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def ratios(times: Found) -> dict[str, float]:
    """Return ours beside Inductor's: wall, host, device, kernels, first call, peak memory, and the
    first call of a second process.
    """
    names = ("wall", "host", "device", "kernels", "first_s", "peak")
    ours, theirs = times["ours"], times["inductor"]
    found = {name: round(ours[name] / theirs[name], 3) for name in names if theirs[name]}
    return found | (second_start.ratios(times["second"]) if "second" in times else {})


def lines(models: Mapping[str, Found]) -> Iterable[str]:
    """Yield a line for each model, and one with the geometric means."""
    known = {name: ratios(one) for name, one in models.items() if "ours" in one}
    for name, one in sorted(known.items()):
        ours = models[name]["ours"]
        told = ", ".join(f"{key} {value:.2f}" for key, value in one.items())
        yield f"{name}: {told}; ours wall {ours['wall']:.0f} us, device {ours['device']:.0f} us"
    if known:
        names = ("wall", "host", "device", "first_s", "peak", *second_start.RATIOS)
        means = {
            key: math.exp(statistics.fmean(math.log(one[key]) for one in known.values()))
            for key in names
            if all(one.get(key, 0) > 0 for one in known.values())
        }
        told = ", ".join(f"{key} {value:.3f}" for key, value in means.items())
        yield f"geometric mean of {len(known)}: {told}"
