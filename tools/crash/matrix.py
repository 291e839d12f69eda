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
is.  The counts go to docs/results/crash-matrix.json; exit status 1 when a promise did not hold or
the time was not enough.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.crash import worker
from tools.crash.cases import KINDS, Case
from tools.shared import measurement
from tools.shared.processes import ROOT, command

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
TIME_LIMIT_S = 1800.0


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


@dataclass
class Found:
    """What the workers report."""

    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[Cell, dict[str, str]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Helper:
    """A program of ours that answers lines of JSON with lines of JSON."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.turn = threading.Lock()
        self._module = module
        self._process = subprocess.Popen(
            command(module, *arguments),
            env=environment,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, question: Any) -> Any:
        """Send one line and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with status {self._process.wait()}; its error is above"
            )
        return json.loads(line)

    def close(self) -> None:
        """End it, by force when it does not end by itself."""
        try:
            self._process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate()


class Matrix:
    """The helpers, and the loop that feeds them."""

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
        self.found = Found()
        self._triton = Helper("tools.crash.triton_process", ["serve"], environment)
        self._workers = []
        for number in range(jobs):
            place = folder / f"worker-{number}"
            place.mkdir()
            self._workers.append(
                Helper("tools.crash.worker", [str(materials), str(place)], preloaded)
            )
        self.cases = worker.cases(materials)

    def calls(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the calls that each case makes when nothing goes wrong."""
        return {name: self._workers[0].ask({"case": name})["calls"] for name in names}

    def run(self, cells: Sequence[Cell], until: float) -> int:
        """Run the cells on all workers; returns how many were left when the time was up."""
        todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            todo.put(cell)
        threads = [
            threading.Thread(target=self._feed, args=(worker, todo, until))
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return todo.qsize()

    def close(self) -> None:
        """End the helpers."""
        for helper in (self._triton, *self._workers):
            helper.close()

    def _feed(self, worker: Helper, todo: queue.SimpleQueue[Cell], until: float) -> None:
        while time.monotonic() < until:
            try:
                cell = todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._run(worker, cell)
            except (RuntimeError, ValueError, OSError) as error:
                self.found.failures.append(f"{cell}: {error}")
                return

    def _run(self, worker: Helper, cell: Cell) -> None:
        answer = worker.ask(asdict(cell))
        while "ask" in answer:
            with self._triton.turn:
                seen = self._triton.ask({"cache": answer["ask"], "compile": answer["compile"]})
            self.found.looks.update(look["did"].partition(" ")[0] for look in seen)
            answer = worker.ask(seen)
        self.found.runs[cell.entry, cell.fault] += 1
        self.found.problems += [(cell, problem) for problem in answer["problems"]]


def main() -> int:
    """Run the matrix, print its table, write its counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="only N cells, of each entry point and fault",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the order")
    parser.add_argument(
        "--cases", default="", help="names or entry points, separated by commas; all"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that run cells; cores",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_S,
        metavar="S",
        help="stop after so many seconds",
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where crash-matrix.json goes"
    )
    options = parser.parse_args()
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
    with tempfile.TemporaryDirectory(prefix="crash.", dir=memory()) as folder:
        # Names in /proc, by which the shim knows files, have no symbolic links.
        matrix = Matrix(Path(folder).resolve(), options.jobs)
        try:
            calls = matrix.calls(chosen(matrix.cases, options.cases))
            cells = plan(calls, options.sample, random.Random(options.seed))
            cells = shown_to_triton(
                cells, matrix.cases, SAMPLED_TRITON_EVERY if options.sample else TRITON_EVERY
            )
            left = matrix.run(cells, started + options.time_limit)
        finally:
            matrix.close()
    found = matrix.found
    for line in table(found):
        print(line)
    result = summary(calls, found) | {"seed": options.seed, "sample": options.sample, "left": left}
    result["seconds"] = round(time.monotonic() - started, 1)
    path = measurement.save("crash-matrix", result, options.results)
    print(
        f"{result['runs']} runs and {sum(found.looks.values())} lookups by Triton in"
        f" {result['seconds']} s; written to {path}"
    )
    # One of each kind and entry point first: a hundred like it tell no more.
    for cell, problem in sorted(found.problems, key=seen_before(found.problems))[:SHOWN_PROBLEMS]:
        print(
            f"{problem['kind']}: {cell.case}, {cell.fault} at call {cell.at}: {problem['text']}",
            file=sys.stderr,
        )
    for failure in found.failures + ([f"time was up with {left} cells to go"] if left else []):
        print(f"crash matrix: {failure}", file=sys.stderr)
    return 1 if found.problems or found.failures or left else 0


def seen_before(
    problems: Iterable[tuple[Cell, dict[str, str]]],
) -> Callable[[tuple[Cell, dict[str, str]]], int]:
    """Return a sort key: how many problems of that entry point and kind come before it."""
    count: Counter[tuple[str, str]] = Counter()
    rank = {}
    for cell, problem in problems:
        count[cell.entry, problem["kind"]] += 1
        rank[id(problem)] = count[cell.entry, problem["kind"]]
    return lambda pair: rank[id(pair[1])]


def compiler() -> str | None:
    """Return a C compiler, None when there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_shim(folder: Path) -> Path:
    """Compile the shim."""
    built, found = folder / "shim.so", compiler()
    assert found is not None
    subprocess.run([found, "-shared", "-fPIC", "-O1", "-o", str(built), str(SHIM)], check=True)
    return built


def memory() -> str | None:
    """Return a directory in memory, where flushing is quick; None for the usual place where there
    is none.
    """
    # a fresh directory is made in it
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108


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
        rank: Counter[tuple[str, str]] = Counter()
        ranked = []
        for cell in cells:
            rank[cell.entry, cell.fault] += 1
            ranked.append((rank[cell.entry, cell.fault], cell))
        cells = [cell for _, cell in sorted(ranked, key=lambda pair: pair[0])[:sample]]
    return cells


def shown_to_triton(cells: Sequence[Cell], cases: dict[str, Case], every: int) -> list[Cell]:
    """Mark one in so many of the cells that leave a cache directory."""
    marked, number = [], 0
    for cell in cells:
        if cases[cell.case].triton_caches():
            looked = number % every == 0
            marked.append(
                replace(cell, triton=number % (every * COMPILE_EVERY) == 0 if looked else None)
            )
            number += 1
        else:
            marked.append(cell)
    return marked


def table(found: Found) -> list[str]:
    """Return the lines of the table: entry point and fault, runs, and what went wrong by kind."""
    bad = Counter((cell.entry, cell.fault, problem["kind"]) for cell, problem in found.problems)
    lines = [
        f"{'entry point':<12}{'fault':<14}{'runs':>6}" + "".join(f"{kind:>15}" for kind in KINDS)
    ]
    for (entry, fault), runs in sorted(found.runs.items()):
        lines.append(
            f"{entry:<12}{fault:<14}{runs:>6}"
            + "".join(f"{bad[entry, fault, k]:>15}" for k in KINDS)
        )
    return lines


def summary(calls: dict[str, list[str]], found: Found) -> dict[str, Any]:
    """Return what goes to the result file."""
    bad = Counter((cell.entry, cell.fault, problem["kind"]) for cell, problem in found.problems)
    return {
        "runs": sum(found.runs.values()),
        "calls": {case: len(made) for case, made in calls.items()},
        "rows": [
            {"entry": entry, "fault": fault, "runs": runs}
            | {kind: bad[entry, fault, kind] for kind in KINDS}
            for (entry, fault), runs in sorted(found.runs.items())
        ],
        "lookups_by_triton": dict(sorted(found.looks.items())),
        "problems": len(found.problems),
    }
