# SPDX-License-Identifier: Apache-2.0
"""Stops every entry point at every call that changes files, and checks what readers, Triton and the
next run find.

    python -m tools.crash matrix [--sample N] [--seed S] [--cases restore/broken,save] [--jobs N] [--results DIR]

For each case (an entry point in a starting state), each of its file-system calls and each fault -
killed before or after it, a torn write, a short write, disk full or input/output error once or from
then on - a process does the work under the shim (shim.c, which needs a C compiler), and then:

1. an independent reader finds every visible thing whole, in the old state or the new one; in a sample of the runs Triton
   itself looks the kernels up, and in some of them compiles what it misses;
2. the run has ended well, by the kill, or with an error of ours;
3. the same work again, undisturbed, completes, and the state is then exactly right;
4. what lies around has only our temporary names, and is swept by another run once it is stale: its times are set back a
   month, and where the package looks at the ctime, which cannot be set, that run's age limit is
   shortened.

It needs Triton (to compile four kernels once).  The work happens in memory (/dev/shm) where that
is.  The counts go to docs/results/crash-matrix.json; exit status 1 when a promise did not hold.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tools.crash import worker
from tools.crash.cases import KINDS, Case, Materials, every_case
from tools.shared import measurement, programs
from tools.shared.processes import ROOT, Helper, command

T = TypeVar("T")
SHIM = Path(__file__).with_name("shim.c")
FAULTS = ("kill", "killed-after", "torn", "short", "enospc", "enospc-from", "eio", "eio-from")
TEARING = ("torn", "short")
COMPILERS = ("cc", "gcc", "clang")
# Of the runs that leave a cache directory, one in so many is shown to Triton, and of those one in
# so many may compile.
TRITON_EVERY = 20
SAMPLED_TRITON_EVERY = 4
COMPILE_EVERY = 10
SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class Cell:
    """One run: a case, a fault, and the call that gets it; `triton`: None, look up (False), or
    compile too (True).
    """

    case: str
    fault: str
    at: int
    triton: bool | None = None

    @property
    def entry(self) -> str:
        """The entry point."""
        return self.case.partition("/")[0]


class Matrix:
    """The helpers, the loop that feeds them, and what they report."""

    def __init__(self, folder: Path, jobs: int) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
        }
        environment |= {"HOME": str(folder), "TMPDIR": str(folder)}
        materials = folder / "materials"
        materials.mkdir()
        make = command("tools.crash.triton_process", "make", str(materials))
        subprocess.run(make, check=True, env=environment, cwd=ROOT)
        preloaded = {**environment, "LD_PRELOAD": str(build_shim(folder))}
        self.runs: Counter[tuple[str, str]] = Counter()
        self.looks: Counter[str] = Counter()
        self.problems: list[tuple[Cell, dict[str, str]]] = []
        self.failures: list[str] = []
        self._triton = Helper("tools.crash.triton_process", "serve", environment=environment)
        self._turn = threading.Lock()
        places = [folder / f"worker-{number}" for number in range(jobs)]
        for place in places:
            place.mkdir()
        self._workers = [
            Helper("tools.crash.worker", str(materials), str(place), environment=preloaded)
            for place in places
        ]
        self.cases = every_case(Materials(materials))

    def calls(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the calls that each case makes when nothing goes wrong."""
        return {name: self._workers[0].ask({"case": name})["calls"] for name in names}

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells on all workers."""
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            todo.put(cell)
        threads = [
            threading.Thread(target=self._feed, args=(worker, todo)) for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End the helpers."""
        for helper in (self._triton, *self._workers):
            helper.close()

    def _feed(self, worker: Helper, todo: queue.SimpleQueue[Cell]) -> None:
        while True:
            try:
                cell = todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._run(worker, cell)
            except (RuntimeError, ValueError, OSError) as error:
                self.failures.append(f"{cell}: {error}")
                return

    def _run(self, worker: Helper, cell: Cell) -> None:
        answer = worker.ask(asdict(cell))
        while "ask" in answer:
            with self._turn:
                seen = self._triton.ask({"cache": answer["ask"], "compile": answer["compile"]})
            self.looks.update(look["did"].partition(" ")[0] for look in seen)
            answer = worker.ask(seen)
        self.runs[cell.entry, cell.fault] += 1
        self.problems += [(cell, problem) for problem in answer["problems"]]


def main() -> int:
    """Run the matrix, print its table, write its counts."""
    options = programs.arguments(
        __doc__,
        sample=(0, "only so many cells, of each entry point and fault in turn"),
        seed=(0, "of the sample and the order"),
        cases=("", "names or entry points, separated by commas; all"),
        jobs=(len(os.sched_getaffinity(0)), "processes that run cells; cores"),
        results=(measurement.RESULTS, "where crash-matrix.json goes"),
    )
    if not sys.platform.startswith("linux") or compiler() is None:
        print(
            f"crash matrix: needs Linux and a C compiler ({', '.join(COMPILERS)}), e.g. gcc",
            file=sys.stderr,
        )
        return 2
    if importlib.util.find_spec("triton") is None:
        print(
            "crash matrix: needs Triton, to compile the kernels that it restores", file=sys.stderr
        )
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash.", dir=measurement.fast_directory()) as folder:
        # Names in /proc, by which the shim knows files, have no symbolic links.
        matrix = Matrix(Path(folder).resolve(), options.jobs)
        try:
            calls = matrix.calls(chosen(matrix.cases, options.cases))
            cells = plan(calls, options.sample, random.Random(options.seed))
            cells = shown_to_triton(
                cells, matrix.cases, SAMPLED_TRITON_EVERY if options.sample else TRITON_EVERY
            )
            matrix.run(cells)
        finally:
            matrix.close()
    print(f"{'entry point':<12}{'fault':<14}{'runs':>6}", *(f"{kind:>14}" for kind in KINDS))
    for one in rows(matrix):
        entry, fault, runs, *bad = one.values()
        print(f"{entry:<12}{fault:<14}{runs:>6}", *(f"{count:>14}" for count in bad))
    result = summary(calls, matrix) | {"seed": options.seed, "sample": options.sample}
    result["seconds"] = round(time.monotonic() - started, 1)
    path = measurement.save("crash-matrix", result, options.results)
    print(
        f"{result['runs']} runs and {sum(matrix.looks.values())} lookups by Triton in"
        f" {result['seconds']} s; written to {path}"
    )
    # One of each kind and entry point first: a hundred like it tell no more.
    problems = in_turn(matrix.problems, lambda one: (one[0].entry, one[1]["kind"]))
    for cell, problem in problems[:SHOWN_PROBLEMS]:
        print(
            f"{problem['kind']}: {cell.case}, {cell.fault} at call {cell.at}: {problem['text']}",
            file=sys.stderr,
        )
    for failure in matrix.failures:
        print(f"crash matrix: {failure}", file=sys.stderr)
    return 1 if matrix.problems or matrix.failures else 0


def in_turn(items: Iterable[T], name: Callable[[T], Hashable]) -> list[T]:
    """Return the items in another order: first one of each name, then the second of each."""
    count: Counter[Hashable] = Counter()
    ranked = []
    for item in items:
        ranked.append((count[name(item)], item))
        count[name(item)] += 1
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def compiler() -> str | None:
    """Return a C compiler, None when there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_shim(folder: Path) -> Path:
    """Compile the shim."""
    built, found = folder / "shim.so", compiler()
    assert found is not None
    subprocess.run([found, "-shared", "-fPIC", "-O1", "-o", str(built), str(SHIM)], check=True)
    return built


def chosen(cases: Iterable[str], wanted: str) -> list[str]:
    """Return the cases that `--cases` names."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [n for n in names if not any(n in {case, case.partition("/")[0]} for case in cases)]
    if unknown:
        raise SystemExit(f"crash matrix: no case {unknown[0]!r}; there are: {', '.join(cases)}")
    return [case for case in cases if not names or case in names or case.partition("/")[0] in names]


def plan(calls: dict[str, list[str]], sample: int, chance: random.Random) -> list[Cell]:
    """List the cells in random order; of a sample, each entry point and fault in turn."""
    cells = [
        Cell(case, fault, at)
        for case, made in calls.items()
        for fault in FAULTS
        for at, call in enumerate(made, 1)
        if fault not in TEARING or call.partition(" ")[0] in worker.WRITES
    ]
    chance.shuffle(cells)
    if sample:
        cells = in_turn(cells, lambda cell: (cell.entry, cell.fault))[:sample]
    return cells


def shown_to_triton(cells: Sequence[Cell], cases: dict[str, Case], every: int) -> list[Cell]:
    """Mark one in so many of the cells that leave a cache directory."""
    number = itertools.count()

    def marked(cell: Cell) -> Cell:
        if not cases[cell.case].triton_caches() or (place := next(number)) % every:
            return cell
        return replace(cell, triton=place % (every * COMPILE_EVERY) == 0)

    return [marked(cell) for cell in cells]


def rows(matrix: Matrix) -> list[dict[str, Any]]:
    """Return for each entry point and fault the runs, and what went wrong by kind."""
    bad = Counter((cell.entry, cell.fault, problem["kind"]) for cell, problem in matrix.problems)
    return [
        {"entry": entry, "fault": fault, "runs": runs}
        | {kind: bad[entry, fault, kind] for kind in KINDS}
        for (entry, fault), runs in sorted(matrix.runs.items())
    ]


def summary(calls: dict[str, list[str]], matrix: Matrix) -> dict[str, Any]:
    """Return what goes to the result file."""
    return {
        "runs": sum(matrix.runs.values()),
        "calls": {case: len(made) for case, made in calls.items()},
        "rows": rows(matrix),
        "lookups_by_triton": dict(sorted(matrix.looks.items())),
        "problems": len(matrix.problems),
    }
