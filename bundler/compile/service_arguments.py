# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a `CompileService` may be: its defaults, how many workers it takes, and the checks of the rest."""

from __future__ import annotations

import os

from bundler.errors import ConfigError

# Beyond this, compiles of one program wait for memory and disk, not for cores.
MOST_WORKERS = 32
# Triton and one kernel take more than this.
LEAST_MEMORY_BYTES = 64 << 20
QUEUE_LIMIT = 10_000
IDLE_S = 60.0
TIMEOUT_S = 600.0


def worker_count(workers: int | None) -> int:
    """Return how many workers there are: one a core for None; raises `ConfigError`."""
    if workers is None:
        return min(
            MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers={workers!r}: expected a number of processes, at least 1", got=workers)
    return workers


def check_limits(timeout_s: float | None, memory_bytes: int | None, queue_limit: int, idle_s: float) -> None:
    """Raise `ConfigError` for a limit that cannot be one."""
    for name, value in (("timeout_s", timeout_s), ("queue_limit", queue_limit), ("idle_s", idle_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r}: expected more than 0", got=value)
    if memory_bytes is not None and memory_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"memory_bytes={memory_bytes}: expected at least {LEAST_MEMORY_BYTES}, which Triton alone takes",
            got=memory_bytes,
        )
