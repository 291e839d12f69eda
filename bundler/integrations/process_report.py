# SPDX-License-Identifier: Apache-2.0
"""The report of a process: its counters as a JSON file, and the most important ones in one line.

A session calls `write_report` and `summary` when it ends (`sessions.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from bundler.integrations.session_counters import Counters
from bundler.integrations.user_directories import write_whole
from bundler.lifecycle.machine_store import Store
from bundler.lifecycle.tuning_directory import tuning_counters
from bundler.toolchain import instances

PID = "{pid}"


def report_of(
    counters: Counters,
    store: Store | None,
    hits_of: Mapping[str, int] | None = None,
    moved_from: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return what the report says, as JSON knows it.

    Args:
        counters: what it says.
        store: whose tiers it lists.
        hits_of: how often each kernel was found, by key.
        moved_from: of kernels that only moved, the key under which each was recorded, by the key
            that was asked for.
    """
    return {
        **dataclasses.asdict(counters),
        "slowest": [
            {"name": name, "seconds": round(seconds, 3)} for name, seconds in counters.slowest
        ],
        "tuning": dataclasses.asdict(tuning_counters()),
        "tuning_not_saved": list(_tuners_not_saved()),
        "store": store.name if store is not None else None,
        "tiers": [dataclasses.asdict(tier) for tier in store.tiers] if store is not None else [],
        "hits_of": dict(hits_of or {}),
        "moved_from": dict(moved_from or {}),
        "pid": os.getpid(),
    }


def summary(counters: Counters, path: str) -> str:
    """Return the line that says what a process did, and where its report is."""
    moved = f" ({counters.moved:,} moved)" if counters.moved else ""
    return (
        f"triton-bundler: hits {counters.hits:,}{moved}, misses {counters.misses:,}, compiles"
        f" {counters.compiles:,}, seconds saved {counters.seconds_saved:,.1f}; report in {path}"
    )


def write_report(
    path: str,
    counters: Counters,
    store: Store | None,
    hits_of: Mapping[str, int] | None = None,
    moved_from: Mapping[str, str] | None = None,
) -> str:
    """Write the report whole, in place of an older one; returns its path.

    Args:
        path: the file; `{pid}` in it stands for the process id.
        counters: what it says.
        store: whose tiers it lists.
        hits_of, moved_from: as for `report_of`.

    Raises:
        OSError: it cannot be written.
    """
    target = path.replace(PID, str(os.getpid()))
    told = json.dumps(report_of(counters, store, hits_of, moved_from), indent=2)
    write_whole(target, f"{told}\n".encode())
    return target


def _tuners_not_saved() -> tuple[str, ...]:
    """Return the names of tuned kernels that were timed here and will be timed again: their
    configurations have a `pre_hook`.

    Triton writes a result file only for configurations that it could write into one.  Empty when
    Triton is not imported.  Which tuners are known, says `instances`.
    """
    timed = [
        tuner
        for tuner in instances.instances(instances.TUNER)
        if tuner.cache and any(config.pre_hook for config in tuner.configs)
    ]
    return tuple(sorted({_name(tuner) for tuner in timed}))


def _name(tuner: object) -> str:
    function = tuner
    while hasattr(function, "fn") and not hasattr(function, "__name__"):
        function = function.fn
    return str(getattr(function, "__name__", "a kernel"))
