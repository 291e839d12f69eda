# SPDX-License-Identifier: Apache-2.0
"""What a kernel that is found costs through the cache manager, above what it would cost anybody to
write the same files.

    python -m tools.bench.hits FOLDER ROUNDS     one process with Triton; prints microseconds as JSON

Calls of `get_group` inside Triton's own `compile`, for the example kernels: from Triton's
directory, from the tag of a session into another directory, and from a store that is a directory,
without a tag. `HitSteps` puts a clock around the functions that do the steps of the last, while
some more kernels are found; `page.py` shows that.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.shared import example_kernels
from tools.shared.measurement import differences, median, medians, row
from tools.shared.processes import answer

TARGET = "cuda:90"
# Where kernels are, what the row is called, and its target in microseconds.
PLACES = (
    ("triton", "a hit in Triton's directory, above Triton's own", 300.0),
    ("tag", "a hit in the tag, above writing the files", 300.0),
    ("store", "a hit in a store in a directory, above writing the files", 1000.0),
)
Samples = dict[str, list[float]]
BARE = "bare: the same files by the write loop, which the figure leaves out"
REST = "rest: the manager, its calls, the account of hits, what lies between the steps"
# Which functions do a step; what a function spends in one of another step counts there.
STEPS: dict[str, tuple[str, ...]] = {
    "read: open, read and close the record and the units": (
        "bundler.backends.local:LocalBackend.get_within",
    ),
    "record: digest, decompress, decode and check its manifest": (
        "bundler.store.kernel_records:KernelRecords._records",
    ),
    "units: digests, decompress, take the files apart": (
        "bundler.store.kernel_records:KernelRecords._read_all",
    ),
    "marks: touch record and units, which keeps them from being pruned": (
        "bundler.store.kernel_records:KernelRecords._keep_alive",
    ),
    "look up: units of the kernel": ("bundler.store.kernel_records:KernelRecords._look_up",),
    "trust: whether signatures are required": (
        "bundler.integrations.kernel_lookup:KernelSources.trust_in",
    ),
    "check: digests, metadata and binary, this machine's paths": (
        "bundler.lifecycle.cache_directory:read",
        "bundler.lifecycle.cache_directory:localized",
    ),
    "write: temporary directory, files, group file, rename": (
        "bundler.lifecycle.cache_directory:CacheDirectory.publish",
    ),
}


def hits(work: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the rows, and the seconds of each step of a hit in the store."""
    environment = {"XDG_CACHE_HOME": str(work / "xdg"), "PYTHONWARNINGS": "ignore"}
    found, steps = answer(__name__, str(work), str(rounds), environment=environment)
    rows = []
    for place, name, most in PLACES:
        samples = found[place]
        ours = differences(samples["whole"], samples["bare"])
        rows.append(row(name, median(ours), "us", most=most, samples=samples))
    return rows, steps


def measure(folder: str, rounds: int) -> tuple[dict[str, Samples], dict[str, float]]:
    """Return microseconds of each call, and of what is compared with it, by place; and the seconds
    of each step of a hit in the store.
    """
    import bundler

    store = f"file://{folder}/store"
    caller = _Caller()
    caller.compile_all(f"{folder}/alone")
    with bundler.session(store, "tag"):
        caller.compile_all(f"{folder}/first")

    def calls(name: str, bare: Any = None) -> Samples:
        """Each round of `_write` has a directory of its own."""
        folders = [f"{folder}/{name}{number if bare else ''}" for number in range(rounds)]
        found = [sample for each in folders for sample in caller.compile_all(each, bare)]
        return dict(zip(("whole", "bare"), map(list, zip(*found, strict=True)), strict=True))

    # Triton's own manager, for what is in its directory.
    own, found = calls("alone")["whole"], dict[str, Samples]()
    with bundler.session(store, "tag", push=None):
        found["triton"] = {"whole": calls("first")["whole"], "bare": own}
        found["tag"] = calls("tag", _write)
    with bundler.session(store, push=None):
        found["store"] = calls("store", _write)
        clocks = HitSteps()
        with clocks.running():
            for number in range(rounds):
                caller.compile_all(f"{folder}/steps{number}", hit=clocks.hit)
    return found, seconds_of(clocks.samples, found["store"]["bare"])


Sample = tuple[float, float]


class _Caller:
    """Compiles the example kernels and times what Triton asks the manager for."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.compiler import compiler

        self._knobs, self._kernels = knobs, example_kernels.load()
        self._make = compiler.get_cache_manager
        self._samples: list[Sample] = []
        self._bare: Any = None
        self._hit: Any = None
        compiler.get_cache_manager = self._timed

    def compile_all(self, cache: str, bare: Any = None, hit: Any = None) -> list[Sample]:
        """Compile every kernel into a cache directory; returns what each took, and what was
        compared with it; tells `hit` of the former.
        """
        self._samples, self._bare, self._hit = [], bare, hit
        self._knobs.cache.dir = cache
        for name in self._kernels.RECIPES:
            self._kernels.compile_one(name, TARGET)
        return self._samples[1:]  # the first one looks at the directory

    def _timed(self, *arguments: Any, **more: Any) -> Any:
        started = time.perf_counter_ns()
        manager = self._make(*arguments, **more)
        made_ns = time.perf_counter_ns() - started
        get_group = manager.get_group

        def timed_get_group(filename: str) -> Any:
            started = time.perf_counter_ns()
            group = get_group(filename)
            whole_ns = made_ns + time.perf_counter_ns() - started
            if self._hit:
                self._hit(whole_ns / 1e3)
            self._samples.append((whole_ns / 1e3, self._bare(group) if self._bare else 0.0))
            return group

        manager.get_group = timed_get_group
        return manager


def _write(group: dict[str, str] | None) -> float:
    """Write the files of a kernel once more, in the way they must be written; returns
    microseconds.
    """
    if group is None:
        raise RuntimeError("a kernel was not found")
    directory = Path(next(iter(group.values()))).parent
    files = [(path.name, path.read_bytes()) for path in directory.iterdir()]
    temporary, target = f"{directory}.tmp", f"{directory}.bare"
    started = time.perf_counter_ns()
    os.mkdir(temporary)
    for name, data in files:
        handle = os.open(f"{temporary}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(handle, data)
        os.close(handle)
    os.rename(temporary, target)
    return (time.perf_counter_ns() - started) / 1e3


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
                    *owners, name = path.split(".")
                    owner: Any = importlib.import_module(module)
                    for one in owners:
                        owner = getattr(owner, one)
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
    """Return the seconds of each step, medians, and of the write loop beside them, which is taken
    away.
    """
    found = {step: taken / 1e6 for step, taken in medians(samples).items()}
    return {**found, BARE: -median(bare_us) / 1e6}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
