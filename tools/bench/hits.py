# SPDX-License-Identifier: Apache-2.0
"""What a kernel that is found costs through the cache manager, above what it would cost anybody to
write the same files.

    python -m tools.bench.hits FOLDER ROUNDS     one process with Triton; prints microseconds as JSON

Calls of `get_group` inside Triton's own `compile`, for the example kernels: from Triton's
directory, from the tag of a session into another directory, and from a store that is a directory,
without a tag.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.shared import example_kernels
from tools.shared.measurement import differences, median, row
from tools.shared.processes import answer

TARGET = "cuda:90"
# Where kernels are, what the row is called, and its target in microseconds.
PLACES = (
    ("triton", "a hit in Triton's directory, above Triton's own", 300.0),
    ("tag", "a hit in the tag, above writing the files", 300.0),
    ("store", "a hit in a store in a directory, above writing the files", 1000.0),
)
Samples = dict[str, list[float]]


def hits(work: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the rows."""
    environment = {"XDG_CACHE_HOME": str(work / "xdg"), "PYTHONWARNINGS": "ignore"}
    found = answer(__name__, str(work), str(rounds), environment=environment)
    rows = []
    for place, name, most in PLACES:
        samples = found[place]
        ours = differences(samples["whole"], samples["bare"])
        rows.append(row(name, median(ours), "us", most=most, samples=samples))
    return rows


def measure(folder: str, rounds: int) -> dict[str, Samples]:
    """Return microseconds of each call, and of what is compared with it, by place."""
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
    return found


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
        compiler.get_cache_manager = self._timed

    def compile_all(self, cache: str, bare: Any = None) -> list[Sample]:
        """Compile every kernel into a cache directory; returns what each took, and what was
        compared with it.
        """
        self._samples, self._bare = [], bare
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


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
