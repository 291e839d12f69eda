# SPDX-License-Identifier: Apache-2.0
"""What the arguments of a `CompileService` may be: its defaults, how many workers it takes, and the
checks of the rest.
"""

from __future__ import annotations

import contextlib
import os

from bundler.errors import ConfigError

# Beyond this, compiles of one program wait for memory and disk, not for cores.
MOST_WORKERS = 32
# Triton and one kernel take more than this.
LEAST_MEMORY_BYTES = 64 << 20
QUEUE_LIMIT = 10_000
# What a worker may have at least, where nothing else is said: an equal part of a small machine
# could be too little for a kernel.
LEAST_SHARE_BYTES = 4 << 30
IDLE_S = 60.0
TIMEOUT_S = 600.0
# Of a container: control groups of version 2 and 1.
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def worker_count(workers: int | None) -> int:
    """Return how many workers there are: one a core for None; raises `ConfigError`."""
    if workers is None:
        return min(
            MOST_WORKERS,
            (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            ),
        )
    if type(workers) is not int or workers < 1:
        raise ConfigError(
            f"workers={workers!r}: expected a number of processes, at least 1", got=workers
        )
    return workers


def memory_share(workers: int) -> int:
    """Return how much private memory each of so many workers may have: its part of the machine's,
    and at least `LEAST_SHARE_BYTES`.

    The machine's memory is what its control group may have, where there is one.  Returns 0, no
    limit, where nobody says how much there is.
    """
    whole = machine_memory_bytes()
    return max(LEAST_SHARE_BYTES, whole // workers) if whole else 0


def machine_memory_bytes() -> int:
    """Return how much memory this process may use, 0 where that is not known."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _GROUP_LIMITS:
        with contextlib.suppress(ValueError, OSError), open(path, encoding="ascii") as file:
            sizes.append(int(file.read()))  # "max" where there is none
    return min((size for size in sizes if size > 0), default=0)


def check_limits(
    timeout_s: float | None, memory_bytes: int | None, queue_limit: int, idle_s: float
) -> None:
    """Raise `ConfigError` for a limit that cannot be one."""
    for name, value in (("timeout_s", timeout_s), ("queue_limit", queue_limit), ("idle_s", idle_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r}: expected more than 0", got=value)
    if memory_bytes is not None and memory_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"memory_bytes={memory_bytes}: expected at least {LEAST_MEMORY_BYTES}, which Triton"
            " alone takes",
            got=memory_bytes,
        )
