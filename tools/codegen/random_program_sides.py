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
from tools.shared.processes import ROOT

DEVICE = os.environ.get("CODEGEN_BENCH_DEVICE", "cuda")
Found = dict[str, Any]


def compare(task: tuple[int, int, bool]) -> Found:
    """Return how many programs of some seeds are right, and of the others what is wrong, as small
    as it gets where that is asked for.
    """
    first, count, small = task
    worker = _worker()
    drawing = importlib.import_module("random_programs")
    counts: collections.Counter[str] = collections.Counter()
    wrong = {}
    for seed in range(first, first + count):
        program = drawing.drawn(seed)
        problem = worker.tried(program, counts, DEVICE)
        counts["right"] += not problem
        if problem:
            lost = (
                "CUDA" in problem or "illegal" in problem
            )  # nothing else runs in this process any more
            if small and not lost:
                kind = problem.partition(":")[0]
                program = drawing.smaller(
                    program,
                    lambda one, kind=kind: worker.tried(one, None, DEVICE).startswith(kind),
                )
                problem = worker.tried(program, None, DEVICE) or problem
            wrong[str(seed)] = [problem, program.shown()]
    return {"counts": dict(counts), "wrong": wrong}


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
