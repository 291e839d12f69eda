# SPDX-License-Identifier: Apache-2.0
"""How a fuzzer judges its cases: in one process a core, whose memory is limited.

A program says in a `Fuzzer` what a case is, and calls `run`. The same seed and number give the same
case. A case that takes too long, or ends its process, is a finding too. Of each finding a JSON file,
and the bytes where it is about some, go to `--keep`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from tools.fuzz.judge import Finding, working_directory
from tools.shared import programs
from tools.shared.processes import ROOT

POLL_S = 0.5
MAX_FINDINGS = 200


class Fuzzer:
    """What the cases of a program are; it is sent to the processes that judge.

    Attributes:
        name: of the program.
        case_s: how long a case may take.
        memory_bytes: how much memory a process may address once it is `ready`; None where that
            limits it.
        accepts: what some cases end with, or the program attacks nothing; empty for none.
    """

    name = ""
    case_s = 10.0
    memory_bytes: int | None = None
    accepts = "accepted"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Prepare this process.

        Args:
            place: an empty directory of its own.
            job: its number among those that run at once.
            made: what `make` of this process's twin sends.
        """
        raise NotImplementedError

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Judge a case; returns how often each class of error came out of it.

        Args:
            number: which.
            begin: called when the case is there, and its time begins.
            done: where what is done is noted, for a finding.

        Raises:
            Finding: a promise did not hold; so does any error that is not ours.
        """
        raise NotImplementedError

    def make(self, number: int, made: Connection) -> None:
        """Make a case in a process of its own, for what takes more memory, and time, than who
        judges it is allowed.
        """

    def bytes_of(self, number: int) -> bytes:
        """Return the bytes that a case is about; none for what is no file."""
        del number
        return b""


class Result(NamedTuple):
    """What became of a case; `problem` is empty where every promise held."""

    number: int
    problem: str
    outcomes: Counter[str]
    seconds: float
    peak_bytes: int
    done: list[str]


def _make(fuzzer: Fuzzer, numbers: range, made: Connection) -> None:
    try:
        for number in numbers:
            fuzzer.make(number, made)
    except BrokenPipeError:
        return  # who judges them has ended, and the parent says why
    made.close()


def _work(
    fuzzer: Fuzzer,
    numbers: range,
    job: int,
    log: str,
    place: Path,
    made: Connection,
    results: Connection,
) -> None:
    """Judge some cases; the parent hears of each what it is when it is there, and when it is
    done.
    """
    with open(log, "w", encoding="utf-8") as file:
        faulthandler.enable(file)
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        fuzzer.ready(place, job, made)
        if fuzzer.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (fuzzer.memory_bytes, fuzzer.memory_bytes))
        for number in numbers:
            results.send(_judged(fuzzer, number, results.send))
    results.close()


def _judged(fuzzer: Fuzzer, number: int, begin: Callable[[list[str]], None]) -> Result:
    started, problem, done = time.monotonic(), "", list[str]()

    def begun() -> None:
        nonlocal started
        begin(done)
        started = time.monotonic()

    try:
        outcomes = fuzzer.judge(number, begun, done)
    except Finding as finding:
        outcomes, problem = Counter({"Finding": 1}), str(finding)
    except BaseException as error:  # noqa: BLE001  # whatever comes out that is not ours is what we are looking for
        outcomes = Counter({type(error).__name__: 1})
        problem = "".join(traceback.format_exception(error))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(number, problem, outcomes, time.monotonic() - started, peak, done)


class Worker:
    """A child process and what it has still to do."""

    def __init__(self, fuzzer: Fuzzer, numbers: range, job: int, log: str) -> None:
        self.fuzzer, self.numbers, self.job, self.log = fuzzer, numbers, job, log
        # Not forked: the parent's memory would count.
        context = multiprocessing.get_context("spawn")
        made, makes = context.Pipe(duplex=False)
        self.results, theirs = context.Pipe(duplex=False)
        self.place = working_directory()
        makes_them = (fuzzer, numbers, makes)
        judges = (fuzzer, numbers, job, log, self.place, made, theirs)
        self.maker: BaseProcess = context.Process(target=_make, args=makes_them, daemon=True)
        self.process: BaseProcess = context.Process(target=_work, args=judges, daemon=True)
        for process, end in ((self.maker, makes), (self.process, theirs)):
            process.start()
            end.close()
        made.close()
        # When the case under way was there to be judged; None while it is being made.
        self.begun: float | None = None
        self.done: list[str] = []

    def receive(self) -> Result | None:
        """Return the next result; None when the process has ended, or has only begun."""
        try:
            said: Result | list[str] = self.results.recv()
        except EOFError:
            self.begun = -math.inf
            return None
        if isinstance(said, Result):
            self.begun, self.done, self.numbers = None, [], self.numbers[1:]
            return said
        self.begun, self.done = time.monotonic(), said
        return None

    def is_late(self) -> bool:
        """Tell whether it has ended, or judges one case for too long."""
        return self.begun is not None and time.monotonic() - self.begun > self.fuzzer.case_s

    def stop(self) -> str:
        """End the process if it is still there; returns what it was doing."""
        self.process.join(1)
        how = f"exit status {self.process.exitcode}"
        if self.process.is_alive() and self.process.pid is not None:
            how = f"no result after {self.fuzzer.case_s:.0f} s"
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


class Report:
    """What came out.

    Args:
        keep: where findings are written.
    """

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.outcomes: Counter[str] = Counter()
        self.cases = self.findings = self.slowest = self.peak_bytes = 0
        self.slowest_s = 0.0

    def add(self, fuzzer: Fuzzer, result: Result) -> None:
        """Count a case; what broke a promise is written down."""
        self.cases += 1
        self.outcomes += result.outcomes
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
        if result.seconds > self.slowest_s:
            self.slowest_s, self.slowest = result.seconds, result.number
        if not result.problem:
            return
        self.findings += 1
        self.keep.mkdir(parents=True, exist_ok=True)
        name, data = f"{fuzzer.name}-{fuzzer.seed}-{result.number}", fuzzer.bytes_of(result.number)
        if data:
            (self.keep / f"{name}.tbundle").write_bytes(data)
        facts: dict[str, object] = {"seed": fuzzer.seed, "number": result.number}
        facts |= {"bytes": len(data), "what": result.problem, "done": result.done}
        (self.keep / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        lines = result.problem.strip().splitlines()
        # A traceback says what happened in its last line, a dead process in its first.
        said = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        print(f"finding: {name}: {said[:300]}; {result.done}"[:2000], file=sys.stderr, flush=True)

    def table(self, seconds: float) -> str:
        """Return what there is to say."""
        count = max(1, sum(self.outcomes.values()))
        lines = [f"{name:20} {n:8,} {n / count:7.1%}" for name, n in self.outcomes.most_common()]
        each = f"{self.cases:,} cases in {seconds:.1f} s, {self.cases / max(seconds, 1e-9):.0f} a second"
        slowest = f"slowest {self.slowest_s:.2f} s (number {self.slowest})"
        peak = f"{slowest}; peak memory {self.peak_bytes >> 20} MiB a process"
        return "\n".join([*lines, each, peak, f"{self.findings} findings"])


def fuzz(fuzzer: Fuzzer, numbers: range, jobs: int, report: Report) -> None:
    """Judge cases; findings are written as they come."""
    # For each thread glibc reserves 64 MB of addresses, which the limit on memory counts; the
    # processes that judge begin with this.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    with tempfile.TemporaryDirectory() as logs:
        workers = {}

        def start(left: range, job: int) -> None:
            if left:
                worker = Worker(fuzzer, left, job, os.path.join(logs, str(job)))
                workers[worker.results] = worker

        try:
            for job in range(jobs):
                start(numbers[job::jobs], job)
            while workers and report.findings < MAX_FINDINGS:
                ready = multiprocessing.connection.wait(list(workers), POLL_S)
                for results, worker in [*workers.items()]:
                    result = worker.receive() if results in ready else None
                    if result is not None:
                        report.add(fuzzer, result)
                    if worker.is_late():
                        del workers[results]
                        what = worker.stop()
                        for number in worker.numbers[:1]:
                            died = Counter({"died or hung": 1})
                            report.add(fuzzer, Result(number, what, died, 0.0, 0, worker.done))
                        start(worker.numbers[1:], worker.job)
        finally:
            for worker in workers.values():
                worker.close()


def parser(description: str | None, count: int) -> argparse.ArgumentParser:
    """Return the reader of a fuzzer's command line."""
    return programs.parser(
        description,
        count=(count, "cases"),
        seed=(1, "of the cases"),
        jobs=(len(os.sched_getaffinity(0)), "processes"),
        keep=(ROOT / ".build" / "fuzz", "where findings go"),
        only=(int, "judge this case alone"),
    )


def run(fuzzer: Fuzzer, options: argparse.Namespace) -> int:
    """Judge the cases that the command line asks for, and print the table; returns the exit
    status.
    """
    started, report, only = time.monotonic(), Report(options.keep), options.only
    numbers = range(options.count) if only is None else range(only, only + 1)
    fuzz(fuzzer, numbers, max(1, min(options.jobs, len(numbers))), report)
    print(report.table(time.monotonic() - started))
    attacked = only is not None or not fuzzer.accepts or report.outcomes[fuzzer.accepts]
    return 0 if attacked and not report.findings else 1
