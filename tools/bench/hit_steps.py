# SPDX-License-Identifier: Apache-2.0
"""Step by step, what the time of a hit in a store in a directory consists of.

`HitSteps` puts a clock around the functions that do the steps, while `hits.py` has some more kernels found; `page.py` shows it.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tools.shared import measurement

BARE = "bare: the same files by the write loop, which the figure leaves out"
REST = "rest: the manager, its calls, the account of hits, what lies between the steps"
# Which functions do a step; what a function spends in one of another step counts there.
STEPS: dict[str, tuple[str, ...]] = {
    "read: open, read and close the record and the units": ("bundler.backends.local:LocalBackend.get_within",),
    "record: digest, decompress, decode and check its manifest": ("bundler.store.kernel_records:KernelRecords._records",),
    "units: digests, decompress, take the files apart": (
        "bundler.store.blob_source:StoreBlobs.prefetch",
        "bundler.store.blob_source:StoreBlobs.view_blobs",
    ),
    "marks: touch record and units, which keeps them from being pruned": (
        "bundler.store.kernel_records:KernelRecords._keep_alive",
    ),
    "look up: units of the kernel, and a bundle of it in memory": ("bundler.store.kernel_records:KernelRecords.look_up",),
    "trust: whether signatures are required": ("bundler.integrations.kernel_lookup:Shelves.trust_in",),
    "check: digests, metadata and binary, this machine's paths": (
        "bundler.lifecycle.kernel_placement:StoredKernel.read",
        "bundler.lifecycle.kernel_placement:StoredKernel.ready_for",
    ),
    "write: temporary directory, files, group file, rename": ("bundler.lifecycle.cache_directory:CacheDirectory.publish",),
}  # fmt: skip


class HitSteps:
    """Clocks around the functions of `STEPS`, for one thread; each sample is of one hit."""

    def __init__(self) -> None:
        self._spent_ns = dict.fromkeys(STEPS, 0)
        self._inner_ns: list[int] = []
        self.samples: list[dict[str, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Put the clocks there, and take them away again."""
        plain: list[tuple[Any, str, Any]] = []
        try:
            for step, functions in STEPS.items():
                for place in functions:
                    module, _, path = place.partition(":")
                    owner_name, _, name = path.partition(".")
                    owner = getattr(importlib.import_module(module), owner_name)
                    kept = vars(owner)[name]
                    plain.append((owner, name, kept))
                    setattr(owner, name, self._clocked(step, kept))
            yield
        finally:
            for owner, name, kept in plain:
                setattr(owner, name, kept)

    def _clocked(self, step: str, kept: Any) -> Any:
        function: Callable[..., Any] = kept.__func__ if isinstance(kept, classmethod) else kept

        @functools.wraps(function)
        def clocked(*arguments: Any, **more: Any) -> Any:
            self._inner_ns.append(0)
            started = time.perf_counter_ns()
            try:
                return function(*arguments, **more)
            finally:
                spent = time.perf_counter_ns() - started
                self._spent_ns[step] += spent - self._inner_ns.pop()
                if self._inner_ns:
                    self._inner_ns[-1] += spent

        return classmethod(clocked) if isinstance(kept, classmethod) else clocked

    def hit(self, whole_us: float) -> None:
        """Note a hit that took so long in all, and begin with the next one."""
        steps = {step: spent / 1e3 for step, spent in self._spent_ns.items()}
        self.samples.append({**steps, REST: whole_us - sum(steps.values())})
        self._spent_ns = dict.fromkeys(STEPS, 0)


def seconds_of(samples: Sequence[dict[str, float]], bare_us: Sequence[float]) -> dict[str, float]:
    """Return the seconds of each step, medians, and of the write loop beside them, which is taken away."""
    found = {step: measurement.median([one[step] for one in samples]) / 1e6 for step in samples[0]}
    return {**found, BARE: -measurement.median(bare_us) / 1e6}
