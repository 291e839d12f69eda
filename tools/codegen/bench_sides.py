# SPDX-License-Identifier: Apache-2.0
"""What a worker of `bench` does with one graph: generate and compile on both sides, compare
numbers, say what the kernels take, and time them.

Generation is timed in the same process, in turns, as CPU time of the thread: ours from a traced
graph to sources and plan (`program_of_graph`), Inductor's from the graph that AOTAutograd hands
over to the text of its module (`GraphLowering.run` and `GraphLowering.codegen`). What traces and
takes operators apart before it is in neither, what compiles after it in neither.

Calls are timed in turns, from memory that is in no cache (`_paired_times`): the calls of one CUDA
graph take turns among copies of the inputs that together are several times the L2 cache, and all
results stay. The graphs of both sides are replayed one after the other, each between two events;
who is first changes from round to round. A figure is the median of the ratios of the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bundler.codegen.program import GenerateOptions, Program, program_of_graph
from bundler.codegen.program_policy import ProgramPolicy
from bundler.codegen.trace import trace
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.heuristics.launch_expressions import evaluate
from bundler.runtime.program.device_tensors import item_bytes, span
from bundler.runtime.program.program_plan import (
    Allocate,
    Cooperation,
    Launch,
    OperatorStep,
    Step,
    TensorSpec,
)
from tools.codegen.bench_rows import OURS, THEIRS
from tools.codegen.compared_graphs import CHANGING, GRAPHS, MEASURED, STEPS, TUNED, filled
from tools.codegen.counts import CALLED
from tools.codegen.tensor_distance import distance

Found = dict[str, Any]
# Between these two, with the first compile of each side, generation is timed again.
GENERATIONS = 3
SEED = 7
DEVICE = os.environ.get("CODEGEN_BENCH_DEVICE", "cuda")
# Whose results are random numbers, which differ from eager's.
RANDOM = frozenset({"dropout"})
# Place of an input of which few rows are read.
LOOKED_UP = {"embedding_sum": 1}
_folders: dict[str, Path] = {}
_warm: list[bool] = []
_ROUNDS = 25
# A replay takes at least about so long, so that the resolution of events is far below what is
# looked for.
_REPLAY_US, _MOST_CALLS, _LEAST_CALLS = 600.0, 64, 3
# The L2 cache of an H200 has 60 MB.
_COPIES_BYTES = 300 << 20
_ESTIMATES = 3
_Inputs = Sequence[Any]
_Run = Callable[..., Any]


def prepare(name: str) -> Found:
    """Compile a graph on both sides, and say what they made of it."""
    _warm_up()
    folder = Path(tempfile.mkdtemp(prefix="codegen-bench."))
    seconds: dict[str, list[float]] = {OURS: [], THEIRS: []}
    with _cache(folder / THEIRS):
        theirs, text = _inductor(name, seconds[THEIRS])
    with _cache(folder / OURS):
        program = _ours(name, folder, seconds[OURS])
        results = {OURS: _results(program.run, name)}
    with _cache(folder / THEIRS):
        results[THEIRS] = _results(theirs, name)
        for _ in range(GENERATIONS - 1):
            _ours(name, folder, seconds[OURS])
            _inductor(name, seconds[THEIRS])
    _folders[name] = folder
    return {
        "generation_ms": {side: [1e3 * one for one in found] for side, found in seconds.items()},
        "kernels": {
            OURS: _count(program, Launch),
            THEIRS: len(re.findall(r"^ +\w+\.run\(", text, re.MULTILINE)),
        },
        "calls": {OURS: _count(program, OperatorStep), THEIRS: len(CALLED.findall(text))},
        "bytes": _moved(program, filled(name, DEVICE)),
        "least_bytes": least_bytes(name),
        "resources": {side: _resources(folder / side) for side in (OURS, THEIRS)},
        "fallbacks": [f"{one.operator}: {one.reason}" for one in program.fallbacks],
        "off": {} if name in RANDOM else _distances(name, results),
    }


def times(name: str) -> Found:
    """Time a graph that was prepared: both sides anew, so that they choose among candidates while
    nothing else runs.
    """
    folder, nothing = _folders.pop(name), list[float]()
    with _cache(folder / THEIRS):
        theirs, _ = _inductor(name, nothing)
    seeds = iter(range(10_000))
    with _cache(folder / OURS), torch.no_grad():
        program = _ours(name, Path(tempfile.mkdtemp(prefix="codegen-bench.")), nothing)
        program.run(*filled(name, DEVICE))
        runs = {OURS: program.run, THEIRS: theirs}
        found = _paired_times(runs, lambda: filled(name, DEVICE, next(seeds)))
    torch.cuda.empty_cache()
    return found | {
        "configs": {kernel: _config(module) for kernel, module in program.modules.items()}
    }


def _warm_up() -> None:
    """Import what both sides import late, so that it is in nobody's time."""
    if not _warm:
        torch._logging.set_logs(inductor=40)  # noqa: SLF001  # torch has no other name for it
        _warm.append(True)
        nothing: list[float] = []
        with _cache(Path(tempfile.mkdtemp(prefix="codegen-bench."))) as folder:
            _inductor("rows_looped", nothing)
            _ours("rows_looped", folder, nothing)


@contextlib.contextmanager
def _cache(folder: Path) -> Iterator[Path]:
    """Have Triton keep binaries in a folder of its own, so that they can be told apart."""
    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)):
        yield folder


# ------------------------------------------------------------------------------------ The two sides


def _ours(name: str, folder: Path, seconds: list[float]) -> Program:
    graph = trace(GRAPHS[name][0], filled(name, DEVICE), dynamic=name in CHANGING)
    started = time.thread_time()
    policy = ProgramPolicy(max_autotune=name in TUNED, measured_fusion=name in MEASURED)
    options = GenerateOptions(sources=str(folder / "sources"), policy=policy)
    program = program_of_graph(graph, options)
    seconds.append(time.thread_time() - started)
    return program


def _inductor(name: str, seconds: list[float]) -> tuple[Callable[..., Any], str]:
    """Return the compiled function, and the text of its module."""
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []
    spent = [0.0]
    running: list[str] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            running.append("")
            started = time.thread_time()
            try:
                found = method(self, *args, **kwargs)
            finally:
                running.pop()
                if not running:
                    spent[0] += time.thread_time() - started
            if method.__name__ == "codegen":
                texts.append(found[0].value)
            return found

        return called

    torch._dynamo.reset()  # noqa: SLF001
    compiled = torch.compile(
        GRAPHS[name][0],
        dynamic=name in CHANGING,
        options={
            "fx_graph_cache": False,
            "autotune_local_cache": False,
            "max_autotune": name in TUNED,
            "benchmark_fusion": name in MEASURED,
            "benchmark_combo_kernel": name in MEASURED,
        },
    )
    with (
        mock.patch.object(GraphLowering, "run", timed(GraphLowering.run)),
        mock.patch.object(GraphLowering, "codegen", timed(GraphLowering.codegen)),
        torch.no_grad(),
    ):
        compiled(*filled(name, DEVICE))
    seconds.append(spent[0])
    return compiled, texts[0][texts[0].index("def call(") :]


# ------------------------------------------------------------------------------------------ Numbers


def _results(run: Callable[..., Any], name: str) -> list[torch.Tensor]:
    """Return what a side returns, and what it changed."""
    given = filled(name, DEVICE, SEED)
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(run(*given))  # noqa: SLF001
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] + (
        given if name in STEPS else []
    )


def _distances(name: str, results: dict[str, list[torch.Tensor]]) -> Found:
    """Return how far each side is from float64, in tolerances of the dtype, and relative to the
    largest number.
    """
    wide = [one.double() if one.is_floating_point() else one for one in filled(name, DEVICE, SEED)]
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(GRAPHS[name][0](*wide))  # noqa: SLF001
    exact = [*leaves, *(wide if name in STEPS else [])]
    return {
        side: max(
            distance(one, other.to(one.dtype)) for one, other in zip(found, exact, strict=True)
        )
        for side, found in results.items()
    }


# -------------------------------------------------------------------------------- What kernels take


def _steps(program: Program) -> list[Step]:
    """Return the steps of a program that was run; of two forms of a computation those of the one
    that was chosen.
    """
    found: list[Step] = []
    for step in program.plan.steps:
        if isinstance(step, Cooperation):
            name = step.launch.kernel
            (made,) = program.modules[name]._several.values()  # noqa: SLF001  # what was measured
            found += step.together if made.choice == name else step.apart
        else:
            found.append(step)
    return found


def _count(program: Program, kind: type) -> int:
    return sum(isinstance(step, kind) for step in _steps(program))


def _config(module: Any) -> str:
    made = list(module._made.values())  # noqa: SLF001  # what this process launched
    return str(made[0].tuned.best_config) if made else ""


def _moved(program: Program, given: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the buffers of all launches, each buffer once a launch, and twice where
    the launch reads and writes it.

    Args:
        program: of a graph.
        given: its inputs.
    """
    specs = {one.name: one.spec for one in program.plan.inputs if one.spec}
    steps = _steps(program)
    specs |= {step.name: step.spec for step in steps if isinstance(step, Allocate)}
    sizes = {
        name: (*given[number].shape, *given[number].stride())[place]
        for name, (number, place) in program.plan.sizes.items()
    }
    total = 0
    for step in steps:
        if isinstance(step, Launch):
            parameters = program.plan.kernels[step.kernel].parameters
            names = dict(zip(map(str, step.arguments), parameters, strict=False))
            for buffer, parameter in names.items():
                spec = specs.get(buffer[1:]) if buffer.startswith("@") else None
                if spec is not None:
                    total += _bytes(spec, sizes) * (2 if parameter.startswith("in_out") else 1)
    return total


def _bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    shape, strides = ([evaluate(one, sizes) for one in of] for of in (spec.sizes, spec.strides))
    return span(shape, strides) * item_bytes(spec.dtype)


def least_bytes(name: str) -> int:
    """Return the bytes of inputs, of results, and of inputs that are changed, which any program
    moves; of a table what is looked up.
    """
    given = filled(name, DEVICE)
    with torch.no_grad():
        leaves = torch.utils._pytree.tree_leaves(GRAPHS[name][0](*given))  # noqa: SLF001
    memory = [one.untyped_storage() for one in given]
    inputs = {one.data_ptr() for one in memory}
    results = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in leaves}
    written = sum(size for address, size in results.items() if address not in inputs)
    # how often it was changed
    written += sum(one.untyped_storage().nbytes() for one in given if one._version)  # noqa: SLF001
    table = LOOKED_UP.get(name)
    sizes = [
        min(one.nbytes(), written) if place == table else one.nbytes()
        for place, one in enumerate(memory)
    ]
    return int(written + sum(sizes))


def _resources(folder: Path) -> Found:
    """Return registers and stack of the binaries in a cache of Triton, which has all candidates."""
    names = {
        path: json.loads(path.with_suffix(".json").read_text())["name"]
        for path in sorted(folder.rglob("*.cubin"))
    }
    found = [read_resources(path.read_bytes(), name) for path, name in names.items()]
    return {
        "binaries": len(found),
        "registers": max((one.registers or 0 for one in found), default=0),
        "stack_bytes": max((one.stack_bytes or 0 for one in found), default=0),
    }


def _paired_times(runs: dict[str, _Run], make: Callable[[], _Inputs]) -> dict[str, Any]:
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
        samples = _in_turns(graphs, _ROUNDS, calls)
    finally:
        gc.enable()
    return {"us": samples, "ratio": _ratio(samples), "calls": calls, "copies": copies}


def _ratio(samples: dict[str, list[float]]) -> float:
    """Return the median of the ratios of the pairs, ours to Inductor's."""
    return statistics.median(
        ours / theirs for ours, theirs in zip(samples[OURS], samples[THEIRS], strict=True)
    )


class _Captured:
    """A CUDA graph of many calls, which keeps their results."""

    def __init__(self, run: _Run, inputs: list[list[Any]], calls: int) -> None:
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
