# SPDX-License-Identifier: Apache-2.0
"""`start`: has worker processes compile what a program's first call needs, side by side, while
torch traces on; `wait` waits for it.  `torch_backend` calls them.

Workers fill Triton's cache, where the first launches find the kernels.  What cannot be compiled
ahead, a launch compiles; so nothing here fails.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Sequence
from typing import Any

from bundler.codegen.program import Program
from bundler.compile.job_futures import CompileFuture
from bundler.compile.service import CompileService
from bundler.compile.worker_pool import worker_count
from bundler.package_loggers import logger
from bundler.toolchain.directories import triton_cache_dir

_log = logger("bundler.codegen")
# Processes end so long after the last graph of a model.
_IDLE_S = 20.0
Started = Sequence[CompileFuture[Any]]


def start(program: Program, workers: int | None) -> Started:
    """Return futures of the kernels that are not in Triton's cache yet.

    Args:
        program: whose kernels run on the current device; those of an earlier process are there.
        workers: processes that compile; None for one a core, 1 for none.
    """
    count = worker_count(workers)
    kept = program.kept_launches or ()
    # Rows that are longer than the example's may never come.
    later = {name for entry in program.plan.kernels.values() for name in entry.beyond}
    names = [name for name in program.kernels if name not in kept and name not in later]
    if count == 1 or not names or program.is_interpreted:
        return ()
    service = _service(count)
    jobs = []
    for name in names:
        try:
            jobs += program.modules[name].jobs(program.sources[name])
        # Triton raises whatever it likes; the launch will raise it again, and is judged then.
        except Exception as error:  # noqa: BLE001
            _log.debug("%s: not compiled ahead", name, exc_info=error)
    missing = [job for job in jobs if not os.path.isdir(os.path.join(service.cache_dir, job.key))]
    # One is compiled sooner than a process has begun.
    return [service.submit(job) for job in missing] if len(missing) > 1 else ()


def start_again(program: Program, workers: int | None) -> Started:
    """Return as `start` for a program that ran in an earlier process: its launches find in Triton's
    cache what that process compiled, unless the cache is empty now.
    """
    try:
        with os.scandir(triton_cache_dir()) as entries:
            is_empty = next(entries, None) is None
    except FileNotFoundError:
        is_empty = True
    return start(program, workers) if is_empty else ()


def wait(started: Started) -> None:
    """Wait until all are compiled, or failed: their launches tell why."""
    concurrent.futures.wait(started)


@functools.lru_cache(maxsize=4)
def _service(workers: int) -> CompileService:
    return CompileService(workers, idle_s=_IDLE_S)
