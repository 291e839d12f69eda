# SPDX-License-Identifier: Apache-2.0
"""`measured`: how long a model takes in eager mode, by Inductor and by us, in one process, in
turns; `first_call`: how long a side takes for its first call, in a process that does nothing else.
`models --time` and `--starts` run them, and `lines` are the rows.

Wall time is that of a call between two waits for the GPU, host time that of a call which nobody
waits for; device time is the sum over the kernels of a call, as torch's profiler has it, launched
while the GPU is kept waiting: a kernel that comes after a pause takes longer; `generated` is the
part of kernels that are neither a library's nor made from a template.  One process of a run
measures at a time, and the others are stopped meanwhile: what they run on the GPU and on the CPU
would be part of its times.  No first call is charged for such a pause.

A first start is the first call in a new process with empty caches, and a second start that in one
that finds what the first left: ours, and Inductor with its warm caches; each side may compile on
all `cores` that the process has.  Models that are started side by side share the GPU.  `whole_s`
is that call, forward and backward, with the wait for the device; `rest_s` is that without what
Dynamo and AOTAutograd take, as torch's own meters have it.
Both sides take a graph from a cache of what AOTAutograd made, so in a second start nothing of it is
AOTAutograd's.
"""

from __future__ import annotations

import copy
import fcntl
import functools
import importlib
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import _dynamo as dynamo
from torch._dynamo import utils

from bundler.codegen.program import FallbackCall
from tools.codegen.model_rows import START_RATIOS, start_ratio
from tools.codegen.models import TIMING_LOCK, fallbacks

Found = dict[str, Any]
SIDES = ("eager", "inductor", "ours")
_WARM, _PROFILED = 5, 3
# Rounds of slow models end early.
_ROUNDS, _LEAST_ROUNDS, _ROUNDS_S = 40, 10, 4.0
# For so long the GPU waits while launches queue up: some 30 ms.
_WAIT_CYCLES = 50_000_000
# Names of kernels of loops, ours and Inductor's: of elements, reductions and scans.
_GENERATED = re.compile(r"triton_(?!mm|att|tem)")


def measured(subject: Any, *, graphs: bool = False) -> Found:
    """Return by side what the first example takes: `first_s`, then medians in microseconds `wall`,
    `host`, `device` and `generated`, all samples of the first two, `kernels` a call, and `peak`
    bytes; of ours also `fallbacks`, how many graphs ran as torch has them.

    Args:
        subject: the model.
        graphs: let both sides launch repeated calls as CUDA graphs.
    """
    from bundler.codegen.torch_backend import triton_bundler

    dynamo.reset()
    programs: list[Any] = []
    compiled: dict[str, Any] = {
        "inductor": {"backend": "inductor", "mode": "reduce-overhead" if graphs else None},
        "ours": {
            "backend": triton_bundler,
            "options": {"programs": programs, "graphs": graphs},
        },
    }
    found: Found = {side: {} for side in SIDES}
    steps, models = {}, {}
    for side in SIDES:
        model = models[side] = copy.deepcopy(subject.model)
        called = model if side == "eager" else torch.compile(model, **compiled[side])
        steps[side] = functools.partial(subject.ran, model, called, subject.examples[0])
        started = time.perf_counter()
        steps[side]()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        found[side]["first_s"] = round(ended - started - _stopped(started, ended), 3)
    with _alone():
        for step in steps.values():
            for _ in range(_WARM):
                step()
        samples = _samples(steps)
        for side, step in steps.items():
            found[side] |= samples[side] | _profiled(step) | {"peak": _peak(models[side], step)}
    found["ours"]["fallbacks"] = _fallbacks(programs)
    return found


def _fallbacks(programs: Iterable[Any]) -> int:
    """Return how many graphs run as torch has them."""
    return sum(isinstance(one, FallbackCall) for one in programs)


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of those who measure, and let the other processes of the run stand still."""
    lock = Path(os.environ[TIMING_LOCK])
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        others, started = _siblings(), time.perf_counter()
        _signal(others, signal.SIGSTOP)
        try:
            torch.cuda.synchronize()
            yield
        finally:
            with _pauses().open("a") as told:
                told.write(f"{started} {time.perf_counter()}\n")
            _signal(others, signal.SIGCONT)


def _siblings() -> list[int]:
    """Return the processes that have the parent of this one."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            found += [int(status.parent.name)] if parent == os.getppid() else []
    return [number for number in found if number != os.getpid()]


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _pauses() -> Path:
    return Path(os.environ[TIMING_LOCK]).with_suffix(".pauses")


def _stopped(started: float, ended: float) -> float:
    """Return how long this process stood still between two times."""
    if not _pauses().exists():
        return 0.0
    pauses = [tuple(map(float, line.split())) for line in _pauses().read_text().splitlines()]
    mine = (min(ended, until) - max(started, since) for since, until in pauses)
    return sum(max(0.0, seconds) for seconds in mine)


def _samples(steps: Mapping[str, Callable[[], Any]]) -> Found:
    taken: dict[str, dict[str, list[float]]] = {side: {"wall": [], "host": []} for side in steps}
    begun = time.perf_counter()
    for number in range(_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begun > _ROUNDS_S:
            break
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
            torch.cuda._sleep(_WAIT_CYCLES)  # noqa: SLF001  # torch has no other name for it
            step()
            torch.cuda.synchronize()
    kernels = [
        one
        for one in profile.events()
        if one.device_type.name == "CUDA" and "spin_kernel" not in one.name
    ]
    generated = [one for one in kernels if _GENERATED.match(one.name)]
    device, alone = (sum(one.device_time for one in some) for some in (kernels, generated))
    return {
        "device": round(device / _PROFILED, 1),
        "generated": round(alone / _PROFILED, 1),
        "kernels": round(len(kernels) / _PROFILED, 1),
    }


def _peak(model: torch.nn.Module, step: Callable[[], Any]) -> int:
    """Return the bytes that a call has at most, beyond weights and inputs."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def ratios(times: Found) -> dict[str, float]:
    """Return ours beside Inductor's, of what was measured: wall, host, device, of generated
    kernels, kernels, first call, peak memory, and starts.
    """
    names = ("wall", "host", "device", "generated", "kernels", "first_s", "peak")
    ours, theirs = times.get("ours", {}), times.get("inductor", {})
    found = {name: round(ours[name] / theirs[name], 3) for name in names if theirs.get(name)}
    return found | (start_ratios(times) if "second" in times else {})


def lines(models: Mapping[str, Found]) -> Iterable[str]:
    """Yield a line for each model, and one with the geometric means."""
    known = {name: ratios(one) for name, one in models.items()}
    for name, one in sorted(known.items()):
        ours, starts = models[name].get("ours"), models[name].get("second")
        words = [", ".join(f"{key} {value:.2f}" for key, value in one.items())]
        if ours:
            words.append(f"ours wall {ours['wall']:.0f} us, device {ours['device']:.0f} us")
        if starts:
            words.append(f"starts on {starts['ours']['cores']} cores")
        if fallbacks(models[name]):
            words.append(f"FALLBACKS, graphs that run as torch has them: {fallbacks(models[name])}")
        yield f"{name}: {'; '.join(words)}"
    names = ("wall", "host", "device", "generated", "first_s", "peak", *START_RATIOS)
    values = {key: [one[key] for one in known.values() if one.get(key, 0) > 0] for key in names}
    means = [
        f"{key} {statistics.geometric_mean(some):.3f} of {len(some)}"
        for key, some in values.items()
        if some
    ]
    if means:
        yield f"geometric means: {', '.join(means)}"


# ----------------------------------------------------------------------------------------- Starts


def first_call(subject: Any, side: str) -> Found:
    """Return what the first call of a model takes in this process, on how many cores, and how often
    it compiled, lowered a graph and tuned a kernel, and had a graph run as torch has it.
    """
    cores = len(os.sched_getaffinity(0))
    # Who forked this process has read its settings, and not this process's cores.
    settings: Any = importlib.import_module("torch._inductor.config")
    settings.compile_threads = cores
    importlib.import_module("torch._inductor.compile_fx")  # no start is charged for imports
    counts: Counter[str] = Counter()
    programs: list[Any] = []
    model = copy.deepcopy(subject.model)
    with _counted(counts) as backend:
        given: Found = {"backend": "inductor"}
        if side == "ours":
            given = {"backend": backend, "options": {"programs": programs}}
        called = torch.compile(model, **given)
        _wait(subject.device)
        started = time.perf_counter()
        subject.ran(model, called, subject.examples[0])
        _wait(subject.device)
        whole = time.perf_counter() - started
    spent = {name: sum(times) for name, times in utils.compilation_time_metrics.items()}
    by_torch = _by_torch(spent, counts["inside_us"] / 1e6)
    return {
        "whole_s": round(whole, 3),
        "rest_s": round(whole - by_torch, 3),
        "cores": cores,
        "fallbacks": _fallbacks(programs),
        **{name: counts[name] for name in ("compiled", "lowered", "tuned")},
    }


def _by_torch(spent: dict[str, float], inside: float) -> float:
    """Return the seconds of Dynamo and AOTAutograd, which call our compilers, or Inductor's, for
    `inside` seconds.
    """
    frames, backend = spent["_compile.compile_inner"], spent["OutputGraph.call_user_compiler"]
    inside += spent.get("compile_fx.<locals>.fw_compiler_base", 0.0)
    graphs = spent.get("create_aot_dispatcher_function", inside)
    return frames - backend + max(0.0, graphs - inside)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@contextmanager
def _counted(counts: Counter[str]) -> Iterator[Callable[..., Any]]:
    """Count what a process does that has nothing to do; gives our backend."""
    from triton.runtime.cache import FileCacheManager

    from bundler.codegen import lower, torch_backend
    from bundler.lifecycle.tuning_directory import tuning_counters

    lower_graph, compile_graph = lower.lower_graph, torch_backend.compile_graph
    put_group, tuned, forward = FileCacheManager.put_group, tuning_counters().tuned, False

    def lowered(*given: Any, **named: Any) -> Any:
        counts["lowered"] += 1
        return lower_graph(*given, **named)

    def compiled(*given: Any) -> Any:
        counts["compiled"] += 1
        return put_group(*given)

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        made = compile_graph(*given, **named)
        # A backward graph is compiled when it is first called, outside of Dynamo's frame.
        counts["inside_us"] += int((time.perf_counter() - started) * 1e6) if forward else 0
        return made

    def backend(*given: Any, **named: Any) -> Any:
        nonlocal forward
        forward = True
        try:
            return torch_backend.triton_bundler(*given, **named)
        finally:
            forward = False

    with (
        mock.patch.object(lower, "lower_graph", lowered),
        mock.patch.object(torch_backend, "compile_graph", timed),
        mock.patch.object(FileCacheManager, "put_group", compiled),
    ):
        yield backend
    counts["tuned"] = tuning_counters().tuned - tuned


def start_ratios(times: Found) -> dict[str, float]:
    """Return ours beside Inductor's."""
    ratios = {name: start_ratio(times, name) for name in START_RATIOS}
    return {name: round(ratio, 3) for name, ratio in ratios.items() if ratio is not None}
