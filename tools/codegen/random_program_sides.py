# SPDX-License-Identifier: Apache-2.0
"""What a worker of `random_programs` does: draws programs of seeds, runs them through
torch.compile, and compares them with eager torch.
"""

from __future__ import annotations

import collections
import functools
import importlib
import os
import sys
import tempfile
import warnings
from typing import Any

from tools.codegen.drawn_candidates import draw_candidates
from tools.codegen.worker_pool import lost_device
from tools.shared.processes import ROOT

DEVICE = os.environ.get("CODEGEN_BENCH_DEVICE", "cuda")
Found = dict[str, Any]


def compare(task: tuple[int, int, bool]) -> Found:
    """Return how many programs of some seeds are right, and of the others what is wrong, as small
    as it gets where that is asked for.

    Where the device is lost to a fault, the seeds after it are counted as not run.
    """
    first, count, small = task
    worker = _worker()
    drawing = importlib.import_module("random_programs")
    counts: collections.Counter[str] = collections.Counter()
    wrong = {}
    for seed in range(first, first + count):
        program = drawing.drawn(seed)
        problem = _problem(worker, program, counts)
        counts["right"] += not problem
        if not problem:
            continue
        if lost := lost_device():
            left = first + count - seed - 1
            counts["not run, the device was lost"] += left
            wrong[str(seed)] = [f"{problem}\n{lost}, {left} more not run", program.shown()]
            break
        if small:
            kind = problem.partition(":")[0]
            program = drawing.smaller(
                program,
                lambda one, kind=kind: worker.tried(one, None, DEVICE).startswith(kind),
            )
            problem = worker.tried(program, None, DEVICE) or problem
        wrong[str(seed)] = [problem, program.shown()]
    return {"counts": dict(counts), "wrong": wrong}


def _problem(worker: Any, program: Any, counts: collections.Counter[str]) -> str:
    """Return what is wrong with a program, and whatever its run raises, eager mode's run too."""
    try:
        problem: str = worker.tried(program, counts, DEVICE)
    except RuntimeError as error:
        problem = f"raises: outside of the program, {type(error).__name__}: {error}"
    return problem


@functools.cache
def _worker() -> Any:
    """Return the tests' module that runs programs, in a process of which nothing is shared:
    sources, caches, threads.
    """
    folder = tempfile.mkdtemp(prefix="random-programs.")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    sys.path.insert(0, str(ROOT / "tests" / "test_codegen"))
    argv, sys.argv = sys.argv, [sys.argv[0], folder]
    try:
        module = importlib.import_module("random_program_worker")
    finally:
        sys.argv = argv
    warnings.simplefilter("ignore")
    draw_candidates()
    module.torch.set_num_threads(1)
    return module
