# SPDX-License-Identifier: Apache-2.0
"""Feeds damaged and hostile bundles to the package; exit status 1 when a promise did not hold.

    python -m tools.fuzz bundle [--count N] [--seed S] [--jobs N] [--keep DIR] [FILE ...]

Half of the bundles are golden ones (tests/data/v2.0): every second of these was damaged in its
bytes, its manifest or its container, the others by the meaning of their fields (structure.py), and
those are launched dry, stored and tuned with too.  Half are made from scratch: each attack of
hostile.py once (in the first 25,000), pairs of attacks, and damaged attacks.  Each is opened, read,
verified, selected from and merged; each accepted one, each fiftieth, and a part of the hostile ones
that open are restored.  What must hold is in judge.py.

The work is done by one process a core, whose memory is limited; the same seed and number give the
same bundle.  A case that takes too long, or a process that dies, is a finding too.  For each
finding the bytes and a JSON file go to --keep; given as FILE, a bundle is judged alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tools.fuzz.container import draft
from tools.fuzz.hostile import hostile
from tools.fuzz.judge import ACCEPTED, Finding, Judge, working_directory
from tools.fuzz.mutations import mutated
from tools.fuzz.structure import structured
from tools.shared.processes import ROOT

GOLDEN = ROOT / "tests" / "data" / "v2.0"
MEMORY_BYTES = 1 << 30
CASE_S = 10.0
RESTORE_EVERY = 50
# Of hostile bundles that open, but are not accepted.
HOSTILE_RESTORE_EVERY = 4
POLL_S = 0.5
MAX_FINDINGS = 200


class Result(NamedTuple):
    """What became of a case; `problem` is empty where every promise held."""

    number: int
    problem: str
    outcome: str
    seconds: float
    peak_bytes: int


@dataclasses.dataclass
class Report:
    """What came out."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    slowest_s: float = 0.0
    slowest: int = -1
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        """Count a case."""
        self.outcomes[result.outcome] += 1
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
        if result.seconds > self.slowest_s:
            self.slowest_s, self.slowest = result.seconds, result.number

    def table(self) -> str:
        """Return what there is to say."""
        count = sum(self.outcomes.values())
        lines = [
            f"{name:20} {n:8,} {n / max(1, count):7.1%}" for name, n in self.outcomes.most_common()
        ]
        lines += [
            (
                f"{count:,} bundles in {self.seconds:.1f} s, {count / max(self.seconds, 1e-9):.0f}"
                " a second"
            ),
            (
                f"slowest {self.slowest_s:.2f} s (number {self.slowest}); peak memory"
                f" {self.peak_bytes >> 20} MiB a process"
            ),
            f"{len(self.findings)} findings",
        ]
        return "\n".join(lines)


class Cases:
    """The bundles of a seed, by number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.golden = [path.read_bytes() for path in sorted(GOLDEN.glob("*.tbundle"))]
        # What hostile bundles are merged with and restored beside: the same keys, other files.
        self.sound = draft().join()

    def make(self, number: int) -> tuple[bytes, int, bool | None]:
        """Return the bytes, which golden bundle to merge with, and whether to restore."""
        chance = random.Random(f"{self.seed}/{number}")
        # The empty bundle offers little to damage.
        golden = chance.choices(
            range(len(self.golden)), [1 if len(data) < 1000 else 10 for data in self.golden]
        )[0]
        always = True if number % RESTORE_EVERY == 0 else None
        if number % 2:
            damage = structured if structural(number) else mutated
            return damage(chance, self.golden[golden]), golden, always
        data = hostile(chance, number // 2)
        return (
            data,
            len(self.golden),
            True if chance.randrange(HOSTILE_RESTORE_EVERY) == 0 else always,
        )


def limit_memory() -> None:
    """Let this process have `MEMORY_BYTES` more than Triton takes, which computes keys for some
    cases.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, resource.RLIM_INFINITY)
    )


def structural(number: int) -> bool:
    """Tell whether a case is a bundle that was damaged by the meaning of its fields."""
    return number % 4 == 3  # every second of the odd ones


def make(seed: int, numbers: range, made: Connection) -> None:
    """Make some cases, in a process of its own: a bundle of two bombs takes more memory, and time,
    than who judges it is allowed.
    """
    cases = Cases(seed)
    with contextlib.suppress(BrokenPipeError):  # who judges them has ended, and the parent says why
        for number in numbers:
            data, *facts = cases.make(number)
            made.send(facts)
            made.send_bytes(data)
    made.close()


def work(
    seed: int,
    numbers: range,
    log: str,
    place: Path,
    made: Connection,
    results: Connection,
) -> None:
    """Judge some cases, in a process of its own; the parent hears of each when it is there, and
    when it is done.
    """
    with open(log, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory()
        os.environ |= {
            "HOME": str(place / "guard" / "home"),
            "TMPDIR": str(place / "guard" / "temporary"),
        }
        cases = Cases(seed)
        judge = Judge(place, [*cases.golden, cases.sound])
        for number in numbers:
            golden, restore = made.recv()
            data = made.recv_bytes()
            results.send(None)
            results.send(_judged(judge, number, data, golden, restore))
    results.close()


def _judged(judge: Judge, number: int, data: bytes, golden: int, restore: bool | None) -> Result:
    started, problem = time.monotonic(), ""
    try:
        outcome = judge.judge(data, golden, restore, used=structural(number))
    except Finding as finding:
        outcome, problem = "Finding", str(finding)
    except BaseException as error:  # noqa: BLE001  # whatever comes out that is not ours is what we are looking for
        outcome, problem = type(error).__name__, "".join(traceback.format_exception(error))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(number, problem, outcome, time.monotonic() - started, peak)


class Worker:
    """A child process and what it has still to do."""

    def __init__(self, seed: int, numbers: range, log: str) -> None:
        self.seed, self.numbers, self.log = seed, numbers, log
        # Not forked: the parent's memory would count.
        context = multiprocessing.get_context("spawn")
        made, makes = context.Pipe(duplex=False)
        self.results, theirs = context.Pipe(duplex=False)
        self.place = working_directory()
        self.maker: BaseProcess = context.Process(
            target=make, args=(seed, numbers, makes), daemon=True
        )
        arguments = (seed, numbers, log, self.place, made, theirs)
        self.process: BaseProcess = context.Process(target=work, args=arguments, daemon=True)
        for process, end in ((self.maker, makes), (self.process, theirs)):
            process.start()
            end.close()
        made.close()
        # When the case under way was there to be judged; None while it is being made.
        self.begun: float | None = None

    def receive(self) -> Result | None:
        """Return the next result; None when the process has ended, or has only begun."""
        try:
            result: Result | None = self.results.recv()
        except EOFError:
            self.begun = -math.inf
            return None
        self.begun = time.monotonic() if result is None else None
        if result is not None:
            self.numbers = self.numbers[1:]
        return result

    def is_late(self) -> bool:
        """Tell whether it has ended, or judges one case for too long."""
        return self.begun is not None and time.monotonic() - self.begun > CASE_S

    def stop(self) -> str:
        """End the process if it is still there; returns what it was doing."""
        self.process.join(1)
        how = f"exit status {self.process.exitcode}"
        if self.process.is_alive() and self.process.pid is not None:
            how = f"no result after {CASE_S:.0f} s"
            os.kill(self.process.pid, signal.SIGABRT)  # makes it write where each thread is
            self.process.join(10)
        self.close()
        return f"{how}\n{Path(self.log).read_text(encoding='utf-8')[-4000:]}"

    def close(self) -> None:
        """End the process, whatever it does, and remove its files."""
        for process in (self.process, self.maker):
            process.kill()
            process.join()
        self.results.close()
        shutil.rmtree(self.place, ignore_errors=True)


def fuzz(count: int, seed: int, jobs: int, keep: Path) -> Report:
    """Judge cases 0 to count; findings are written as they come."""
    report, started = Report(), time.monotonic()
    # For each thread glibc reserves 64 MB of addresses, which the limit on memory counts; the
    # processes that judge begin with this.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    with tempfile.TemporaryDirectory() as logs:
        workers = {}

        def start(numbers: range, name: str) -> None:
            worker = Worker(seed, numbers, os.path.join(logs, name))
            workers[worker.results] = worker

        for job in range(jobs):
            start(range(job, count, jobs), str(job))
        while workers and len(report.findings) < MAX_FINDINGS:
            ready = multiprocessing.connection.wait(list(workers), POLL_S)
            for results, worker in [*workers.items()]:
                result = worker.receive() if results in ready else None
                if result is not None:
                    report.add(result)
                    report.findings += (
                        [_keep(keep, Cases(seed), *result[:2])] if result.problem else []
                    )
                if not worker.is_late():
                    continue
                del workers[results]
                what = worker.stop()
                if worker.numbers:
                    report.add(Result(worker.numbers[0], what, "died or hung", 0, 0))
                    report.findings.append(_keep(keep, Cases(seed), worker.numbers[0], what))
                if worker.numbers[1:]:
                    start(worker.numbers[1:], os.path.basename(worker.log))
        for worker in workers.values():
            worker.close()
    report.seconds = time.monotonic() - started
    return report


def _keep(directory: Path, cases: Cases, number: int, what: str) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    data, golden, restore = cases.make(number)
    seed = cases.seed
    facts = {
        "seed": seed,
        "number": number,
        "golden": golden,
        "restore": restore,
        "bytes": len(data),
        "what": what,
    }
    (directory / f"{seed}-{number}.tbundle").write_bytes(data)
    (directory / f"{seed}-{number}.json").write_text(
        json.dumps(facts, indent=1) + "\n", encoding="utf-8"
    )
    lines = what.strip().splitlines()
    # A traceback says what happened in its last line, a dead process in its first.
    said = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    print(f"finding: seed {seed}, number {number}: {said[:300]}", file=sys.stderr, flush=True)
    return facts


def judge_files(paths: list[Path]) -> int:
    """Judge bundles that were kept, restored whatever they are, and print what came out of each."""
    limit_memory()
    place = working_directory()
    try:
        cases = Cases(0)
        judge = Judge(place, [*cases.golden, cases.sound])
        for path in paths:
            started = time.process_time()
            outcome = judge.judge(path.read_bytes(), len(cases.golden), restore=True)
            print(f"{path.name} {outcome} {time.process_time() - started:.2f}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 0


def main() -> int:
    """Fuzz and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--keep", type=Path, default=ROOT / ".build" / "fuzz", help="where findings go"
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="judge these bundles instead, in this process"
    )
    options = parser.parse_args()
    if options.files:
        return judge_files(options.files)
    report = fuzz(options.count, options.seed, max(1, options.jobs), options.keep)
    print(report.table())
    return 1 if report.findings or not report.outcomes[ACCEPTED] else 0
