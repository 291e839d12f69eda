# SPDX-License-Identifier: Apache-2.0
"""`measured`: what the first call of a model takes in a new process that finds what another one
left: ours, and Inductor with its warm caches; `models --time` runs it after the other times.

`whole_s` is the first call, forward and backward, with the wait for the device; `rest_s` is that
without what Dynamo and AOTAutograd take, as torch's own meters have it.  A warm Inductor takes a
graph from AOTAutograd's cache, so nothing of it is AOTAutograd's then.
"""

from __future__ import annotations

import copy
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import utils

from tools.shared.processes import ROOT, command

Found = dict[str, Any]
SIDES = ("inductor", "ours")
#: Names of the ratios, by what of a first call each compares.
RATIOS = {"second start": "whole_s", "second start's rest": "rest_s"}
#: What a side's process is asked for.
ASKED = "second-"
# The shortest counts: what else goes on only makes it longer.
_ROUNDS = 3


def measured(*task: str) -> Found:
    """Return by side what `first_call` says in processes of their own, which find what this process
    left, or the first of them.

    Args:
        task: the first arguments of `model_process`: library, name, mode, device.
    """
    return {
        side: min(
            (_process(*task, side=side) for _ in range(_ROUNDS)), key=lambda one: one["whole_s"]
        )
        for side in SIDES
    }


def _process(*task: str, side: str) -> Found:
    with tempfile.TemporaryDirectory(prefix="second.") as folder:
        answer = Path(folder, "answer.json")
        line = command("tools.codegen.model_process", *task, str(answer), f"{ASKED}{side}")
        subprocess.run(line, check=True, cwd=ROOT, capture_output=True)
        found: Found = json.loads(answer.read_text())["first"]
        return found


def first_call(subject: Any, side: str) -> Found:
    """Return what the first call of a model takes in this process, and how often it compiled,
    lowered a graph and tuned a kernel.
    """
    counts: Counter[str] = Counter()
    model = copy.deepcopy(subject.model)
    with _counted(counts) as backend:
        called = torch.compile(model, backend=backend if side == "ours" else "inductor")
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

    def lowered(*given: Any) -> Any:
        counts["lowered"] += 1
        return lower_graph(*given)

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


def ratios(second: Found) -> dict[str, float]:
    """Return ours beside Inductor's."""
    ours, theirs = second["ours"], second["inductor"]
    pairs = ((name, ours[what], theirs[what]) for name, what in RATIOS.items())
    return {name: round(one / other, 3) for name, one, other in pairs if other > 0}
