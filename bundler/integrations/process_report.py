# SPDX-License-Identifier: Apache-2.0
"""`Counters`: what a session did so far, in numbers; and the report of a process: its counters as a
JSON file, and the most important ones in one line.

A session calls `write_report` and `summary` when it ends (`sessions.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bundler.format.summary import Summarized
from bundler.integrations.user_directories import write_whole
from bundler.toolchain import instances

if TYPE_CHECKING:
    from bundler.lifecycle.machine_store import Store

PID = "{pid}"


@dataclass(frozen=True, repr=False)
class Counters(Summarized):
    """What a session did so far in this process; a snapshot that does not change.

    Attributes:
        hits: kernels that Triton did not compile.
        found: the same by where they were: `triton` (its own directory), `tag`, `store`,
            `registered`.
        misses: kernels that were nowhere.
        compiles: kernels that Triton compiled and stored.
        compile_seconds: time that these took.
        seconds_saved: time that the compiles of the hits took when they were recorded, as far as
            known.
        published: kernels and files that were sent to the store.
        bytes_fetched, bytes_sent: their sizes, uncompressed.
        errors: how often something failed, by cause; the program went on.
        slowest: (name, seconds) of the compiles that took longest.
        strict_warnings: kernels that were compiled although strict mode `warn` was on, each counted
            once.
        launchers: modules that Triton was given in place of ones that a C compiler would have
            built: launchers, and `cuda_utils`.
        launchers_of_triton: how many of these it had to build or load itself, by reason.
        moved: of the hits, kernels that differ from the recorded one in line numbers alone.
    """

    hits: int = 0
    found: Mapping[str, int] = field(default_factory=dict)
    misses: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    seconds_saved: float = 0.0
    published: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    slowest: tuple[tuple[str, float], ...] = ()
    strict_warnings: int = 0
    launchers: int = 0
    launchers_of_triton: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0


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
    from bundler.lifecycle.tuning_directory import tuning_counters

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
