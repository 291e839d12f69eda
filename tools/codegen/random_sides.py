# SPDX-License-Identifier: Apache-2.0
"""What a worker of `random_graphs` does: draws functions of seeds, runs their programs on a GPU,
and compares them with torch.

Functions at real sizes run from bundles, those of the tests by Triton's JIT, tuned.  torch computes
on the CPU, since as many processes as cores would wait for each other's small pieces of work on the
GPU.
"""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bundler.codegen.program import GenerateOptions, Program, generate
from bundler.runtime.program.bundle_programs import load_program
from bundler.toolchain.torch_memory import TorchMemory
from tools.shared import example_kernels
from tools.shared.processes import ROOT

DEVICE = os.environ.get("CODEGEN_BENCH_DEVICE", "cuda")
# fmt: off
SIZES = (
    1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 257, 513, 768, 1000, 1023, 1024,
    1025, 2048, 4095, 4096, 4097, 8193, 65_536, 100_003,
)
# fmt: on
LARGEST = 2_000_000
# So often is a smaller function tried that fails too.
_TRIES = 40
Found = dict[str, Any]


def compare(task: tuple[str, int, int]) -> Found:
    """Return how many functions of some seeds are right, and of the others what is wrong."""
    scale, first, count = task
    torch.set_num_threads(1)  # there are as many processes as cores
    graphs = _graphs(scale)
    counts = dict.fromkeys(("graphs", "right", "kernels", "elements", "calls"), 0)
    wrong = {}
    for seed in range(first, first + count):
        description = graphs.drawn(seed)
        problem = _problem(graphs, description, counts)
        counts["graphs"] += 1
        counts["right"] += not problem
        if problem:
            wrong[str(seed)] = _smallest(graphs, description, problem)
    torch.cuda.empty_cache()
    return {"counts": counts, "wrong": wrong}


@functools.cache
def _graphs(scale: str) -> Any:
    """Return the module that draws, for a scale: a copy of its own, since sizes and device are the
    module's.
    """
    path = ROOT / "tests" / "test_codegen" / "random_graphs.py"
    module = example_kernels.load(path, f"drawn_graphs_{scale}")
    if scale == "large":
        # what a file defines is not known here
        module.SIZES, module.LARGEST = SIZES, LARGEST  # type: ignore[attr-defined]
    return module


@functools.cache
def _sources() -> str:
    """Return a folder for modules; Triton's cache is beside it, since processes that compile equal
    text at one time would mix their files.
    """
    folder = tempfile.mkdtemp(prefix="random-graphs.")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "cache")
    return folder


def _problem(graphs: Any, description: Any, counts: Found | None = None) -> str:
    """Return what is wrong with the program of a description; nothing where nothing is."""
    try:
        given = [_moved(tensor) for tensor in graphs.inputs(description)]
        program = generate(
            graphs.function(description), given, options=GenerateOptions(sources=_sources())
        )
        run = _static(program) if DEVICE == "cuda" and graphs.LARGEST == LARGEST else program.run
        results = [_moved(tensor, "cpu") for tensor in run(*given)]
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__}: {str(error)[-300:]}"
            f" ({last.filename.rpartition('/')[2]}:{last.lineno})"
        )
    if counts is not None:
        counts["kernels"] += len(program.kernels)
        counts["calls"] += bool(program.fallbacks)
        counts["elements"] += sum(one.numel() for one in results)
    problem: str = graphs.checked(description, results)
    return problem


def _static(program: Program) -> Callable[..., Any]:
    """Return what runs a program from a bundle: with the first candidate of each kernel, and no
    tuner that others disturb.
    """
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    return load_program(
        program.build([target]), memory=TorchMemory("cuda"), constants=program.constants
    )


def _moved(tensor: torch.Tensor, device: str = DEVICE) -> torch.Tensor:
    """Return a tensor on a device, with the same strides and offset in memory of its own."""
    if tensor.device.type == device:
        return tensor
    memory = tensor.as_strided(
        (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
    ).to(device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _smallest(graphs: Any, description: Any, problem: str) -> list[str]:
    """Return the problem of the smallest function that fails in the same way, and that function."""
    if "CUDA" in problem or "illegal" in problem:
        return [problem, repr(description)]  # nothing else runs in this process any more
    kind = problem.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    least = graphs.smaller(
        description, lambda one: _problem(graphs, one).startswith(kind), tries=_TRIES
    )
    return [_problem(graphs, least), repr(least)]
