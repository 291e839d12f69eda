# SPDX-License-Identifier: Apache-2.0
"""What a kernel that is found costs through the cache manager, above what it would cost anybody to write the same files.

    python -m tools.bench.hits FOLDER ROUNDS     one process with Triton; prints microseconds as JSON

Calls of `get_group` inside Triton's own `compile`, for the example kernels: from Triton's directory, from the tag of a session
into another directory, and from a store that is a directory, without a tag.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.hit_steps import HitSteps, seconds_of
from tools.shared import example_kernels, measurement
from tools.shared.measurement import row
from tools.shared.processes import output

TARGET = "cuda:90"
# Where kernels are, what the row is called, and its target in microseconds.
PLACES = (
    ("triton", "a hit in Triton's directory, above Triton's own", 300.0),
    ("tag", "a hit in the tag, above writing the files", 300.0),
    ("store", "a hit in a store in a directory, above writing the files", 1000.0),
)


Samples = dict[str, list[float]]


def hits(work: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the rows, and the seconds of each step of a hit in the store."""
    environment = {"XDG_CACHE_HOME": str(work / "xdg"), "PYTHONWARNINGS": "ignore"}
    answer = output(__name__, str(work), str(rounds), environment=environment)
    found, steps = json.loads(answer.splitlines()[-1])
    rows = []
    for place, name, most in PLACES:
        samples = found[place]
        ours = [whole - bare for whole, bare in zip(samples["whole"], samples["bare"], strict=True)]
        rows.append(row(name, measurement.median(ours), "us", most=most, samples=samples))
    return rows, steps


def measure(folder: str, rounds: int) -> tuple[dict[str, Samples], dict[str, float]]:
    """Return microseconds of each call, and of what is compared with it, by place; and the seconds of each step of a hit in the store."""
    import bundler

    store = f"file://{folder}/store"
    caller = _Caller()
    caller.compile_all(f"{folder}/alone")
    with bundler.session(store, "tag"):
        caller.compile_all(f"{folder}/first")
    # Triton's own manager, for what is in its directory.
    own = [caller.compile_all(f"{folder}/alone", _none) for _ in range(rounds)]
    found: dict[str, Samples] = {}
    with bundler.session(store, "tag", push=None):
        there = [caller.compile_all(f"{folder}/first", _none) for _ in range(rounds)]
        found["triton"] = {"whole": _times(there), "bare": _times(own)}
        placed = [caller.compile_all(f"{folder}/tag{number}", _write) for number in range(rounds)]
        found["tag"] = {"whole": _times(placed), "bare": _bares(placed)}
    with bundler.session(store, push=None):
        fetched = [
            caller.compile_all(f"{folder}/store{number}", _write) for number in range(rounds)
        ]
        found["store"] = {"whole": _times(fetched), "bare": _bares(fetched)}
        clocks = HitSteps()
        with clocks.running():
            for number in range(rounds):
                caller.compile_all(f"{folder}/steps{number}", _none, clocks.hit)
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
        self._bare: Any = _none
        self._hit: Any = _unnoted
        compiler.get_cache_manager = self._timed

    def compile_all(self, cache: str, bare: Any = None, hit: Any = None) -> list[Sample]:
        """Compile every kernel into a cache directory; returns what each took, and what was compared with it; tells `hit` of the former."""
        self._samples, self._bare, self._hit = [], bare or _none, hit or _unnoted
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
            self._hit(whole_ns / 1e3)
            self._samples.append((whole_ns / 1e3, self._bare(group)))
            return group

        manager.get_group = timed_get_group
        return manager


def _none(_group: dict[str, str] | None) -> float:
    return 0.0


def _unnoted(_whole_us: float) -> None:
    pass


def _write(group: dict[str, str] | None) -> float:
    """Write the files of a kernel once more, in the way they must be written; returns microseconds."""
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


def _times(rounds: list[list[Sample]]) -> list[float]:
    return [whole for samples in rounds for whole, _ in samples]


def _bares(rounds: list[list[Sample]]) -> list[float]:
    return [bare for samples in rounds for _, bare in samples]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
