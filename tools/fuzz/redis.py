# SPDX-License-Identifier: Apache-2.0
"""Puts hostile values into a real Redis server under a store's keys; exit status 1 when a promise
did not hold.

    python -m tools.fuzz redis [--count N] [--seed S] [--jobs N] [--keep DIR] [--only NUMBER]

Each case fills a database of the server with two bundles, changes up to three keys of the first as
redis_values.py says, or adds some, and does what users do, in any order.  Promised: errors are ours
and can be printed; what is read has its digest; the bundle whose keys nobody touched is pulled
whole; after `verify --repair` the first can be pushed and read again; none of it takes a gigabyte
or ten seconds.

The work is done by one process a core, whose memory is limited, each with a database of its own;
the same seed and number give the same case.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bundler
from bundler.errors import BundlerError, LimitExceeded
from tools.fuzz.judge import ACCEPTED, MESSAGE_CHARACTERS, Finding, read_everything
from tools.fuzz.redis_values import attack, sound
from tools.shared import redis_server
from tools.shared.processes import ROOT, command

MEMORY_BYTES = 1 << 30
CASE_S = 10.0
PATIENT: dict[str, Any] = {"timeout_s": 5, "connect_timeout_s": 5}
DATABASES = 16
# A push, a read that finds what is forged, another push, and one to spare.
ATTEMPTS = 3
# An object over a limit is not damaged, and stays after a repair.
LIMITS = ("limit", "at most", "deeper than", "upgrade")


class Case:
    """The two bundles, and one store of them after the other.

    Args:
        url: of an empty database.
        admin: a client of it that may do everything.
    """

    def __init__(self, url: str, admin: Any) -> None:
        self.url, self.admin = url, admin
        self.first = bundler.Bundle.from_bytes(
            sound(*(f"{n}" for n in range(6)), extra_bytes=50_000)
        )
        self.large = bundler.Bundle.from_bytes(sound("large", extra_bytes=300_000))
        self.other = bundler.Bundle.from_bytes(sound("x", "y"))
        admin.flushdb()
        with bundler.open_store(url, **PATIENT) as store:
            for bundle in (self.first, self.large):
                store.push(bundle, "t")
            store.kernel_records().publish(self.first)
            store.kernel_records().tell_failure(self.first.kernels[0].key, "it failed")
            store.file_records().publish("name", "k.json", b"{}")
            self.stored = {name: admin.get(name) for name in admin.keys("*")}
            store.push(self.other, "u")
        self.everything = {name: admin.get(name) for name in admin.keys("*")}

    def judge(self, chance: random.Random, done: list[str]) -> str:
        """Return the class of the first error, or `accepted`, and add what was done; raises
        `Finding`.
        """
        self.admin.flushdb()
        with self.admin.pipeline(transaction=False) as pipeline:
            for name, value in self.everything.items():
                pipeline.set(name, value, px=3_600_000)
            pipeline.execute()
        for _ in range(chance.choice([1, 1, 2, 3])):
            label, change = attack(chance, self.stored)
            change(self.admin)
            done.append(label)
        with (
            bundler.open_store(self.url, **PATIENT) as store,
            tempfile.TemporaryDirectory() as cache,
        ):
            acts = self._acts(store, cache)
            outcomes = []
            for name in chance.sample(sorted(acts), 5):
                done.append(name)
                outcomes.append(typed(acts[name], done))
            self._look_after(store, done)
        errors = [
            type(outcome).__name__ for outcome in outcomes if isinstance(outcome, BundlerError)
        ]
        return errors[0] if errors else ACCEPTED

    def _acts(self, store: Any, cache: str) -> dict[str, Callable[[], object]]:
        keys = [kernel.key for kernel in self.first.kernels]
        records = store.kernel_records()
        return {
            "push": lambda: store.push(self.first, "t"),
            "replace": lambda: store.push(self.first, "t", "replace"),
            "create": lambda: store.push(self.first, "t", "create"),
            "pull": lambda: self._pull(store, "t"),
            "pull by digest": lambda: self._pull(store, self.first.digest),
            "restore": lambda: store.restore("t", cache_dir=cache, only="all"),
            "tags": store.tags,
            "stats": store.stats,
            "verify": store.verify,
            "repair": lambda: store.verify(repair=True),
            "prune": store.prune,
            "prune to nothing": lambda: store.prune(max_bytes=0, older_than_s=1),
            "delete": lambda: store.delete_tag("t"),
            "look up": lambda: records.look_up(keys),
            "publish": lambda: records.publish(self.first),
            "recorded": lambda: list(records.recorded(100)),
            "failure": lambda: records.failure(keys[0]),
            "tell failure": lambda: records.tell_failure(keys[0], "again"),
            "file": lambda: store.file_records().look_up("name"),
            "publish file": lambda: store.file_records().publish("name", "k.json", b"{}"),
        }

    @staticmethod
    def _pull(store: Any, name: str) -> None:
        with store.pull(name) as bundle:
            bundle.blobs.prefetch([digest for digest, _ in bundle.content.blobs])
            read_everything(bundle)

    def _look_after(self, store: Any, done: list[str]) -> None:
        """The other bundle is whole before anything is repaired, and the first afterwards."""
        _whole(store, "u", self.other, done)
        repaired = typed(lambda: store.verify(repair=True), done)
        if isinstance(repaired, BundlerError):
            raise Finding(f"cannot be repaired: {repaired!r}")
        self._push_whole(store, done)
        _whole(store, "u", self.other, done)
        left = typed(store.verify, done)
        if isinstance(left, BundlerError):
            raise Finding(f"cannot be verified after a repair: {left!r}")
        bad = [entry for entry in left.damaged if not any(word in entry[1] for word in LIMITS)]
        if bad:
            raise Finding(f"still damaged after a repair: {bad[:3]}")

    def _push_whole(self, store: Any, done: list[str]) -> None:
        """Push until the bundle can be read: what nobody named before is found to be forged when it
        is read, and removed.
        """
        read: object = None
        for _ in range(ATTEMPTS):
            pushed = typed(lambda: store.push(self.first, "t", "replace"), done)
            if isinstance(pushed, BundlerError):
                raise Finding(f"cannot be pushed after a repair: {pushed!r}")
            read = typed(lambda: self._pull(store, "t"), done)
            if not isinstance(read, BundlerError) or isinstance(read, LimitExceeded):
                return
        raise Finding(f"not whole after {ATTEMPTS} pushes: {read!r}")


def typed(call: Callable[[], Any], done: list[str]) -> Any:
    """Return what a call returns or raises, if that is an error of ours that can be printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except BundlerError as error:
            text = str(error)
            if len(text) > MESSAGE_CHARACTERS:
                raise Finding(
                    f"a message of {len(text)} characters after {done}: {text[:200]!r}"
                ) from error
            text.encode()
            return error


def _whole(store: Any, tag: str, bundle: Any, done: list[str]) -> None:
    def read() -> object:
        with store.pull(tag) as pulled:
            read_everything(pulled)
            return pulled.digest

    digest = typed(read, done)
    if digest != bundle.digest:
        raise Finding(f"tag {tag} gives {digest!r}, expected {bundle.digest}")


def work(url: str, address: str, database: int, seed: int, numbers: range) -> None:
    """Judge some cases; the parent reads a line for each."""
    import redis

    faulthandler.enable()
    port, _, password = address.partition(":")
    admin = redis.Redis(
        port=int(port), username="admin", password=password, db=database, protocol=2
    )
    case = Case(url, admin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in numbers:
        started, problem = time.monotonic(), None
        done: list[str] = []
        try:
            outcome = case.judge(random.Random(f"{seed}/{number}"), done)
        except Finding as finding:
            outcome, problem = "Finding", str(finding)
        except BaseException as error:  # noqa: BLE001  # whatever comes out that is not ours is what we are looking for
            outcome, problem = type(error).__name__, "".join(traceback.format_exception(error))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = [number, outcome, time.monotonic() - started, peak, problem, done]
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class Worker:
    """A child process and what it has still to do."""

    def __init__(
        self, server: redis_server.Server, database: int, seed: int, numbers: range, log: Path
    ) -> None:
        self.server, self.database, self.seed, self.numbers, self.log = (
            server,
            database,
            seed,
            numbers,
            log,
        )
        url = server.url(db=database)
        numbered = [str(number) for number in (numbers.start, numbers.stop, numbers.step)]
        words = command(
            "tools.fuzz",
            "redis",
            "--work",
            url,
            server.address,
            str(database),
            str(seed),
            *numbered,
        )
        with log.open("w") as errors:
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
        self.heard, self._rest = time.monotonic(), b""

    def receive(self) -> list[list[Any]] | None:
        """Return results that have come; None when the process has ended."""
        data = os.read(self.process.stdout.fileno(), 1 << 16) if self.process.stdout else b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self.numbers, self.heard = self.numbers[len(found) :], time.monotonic()
        return found

    def close(self) -> str:
        """End the process if it is still there; returns what it said."""
        late = self.process.poll() is None and bool(self.numbers)
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        how = (
            f"no result after {CASE_S:.0f} s" if late else f"exit status {self.process.returncode}"
        )
        return f"{how}\n{self.log.read_text(errors='replace')[-4000:]}"


class Report:
    """What came out."""

    def __init__(self, keep: Path, seed: int) -> None:
        self.keep, self.seed = keep, seed
        self.outcomes: Counter[str] = Counter()
        self.findings, self.slowest_s, self.peak_bytes = 0, 0.0, 0

    def add(
        self,
        number: int,
        outcome: str,
        seconds: float,
        peak_bytes: int,
        problem: str | None,
        done: list[str],
    ) -> None:
        """Count a case; what broke a promise is written down."""
        self.outcomes[outcome] += 1
        self.slowest_s, self.peak_bytes = (
            max(self.slowest_s, seconds),
            max(self.peak_bytes, peak_bytes),
        )
        if problem is None:
            return
        self.findings += 1
        self.keep.mkdir(parents=True, exist_ok=True)
        facts = {"seed": self.seed, "number": number, "what": problem, "done": done}
        (self.keep / f"redis-{self.seed}-{number}.json").write_text(
            json.dumps(facts, indent=1) + "\n"
        )
        print(
            f"finding: number {number}: {problem.strip().splitlines()[-1][:300]}",
            file=sys.stderr,
            flush=True,
        )

    def table(self) -> str:
        """Return what there is to say."""
        count = max(1, sum(self.outcomes.values()))
        lines = [f"{name:20} {n:8,} {n / count:7.1%}" for name, n in self.outcomes.most_common()]
        peak = f"slowest {self.slowest_s:.2f} s; peak memory {self.peak_bytes >> 20} MiB a process"
        return "\n".join([*lines, peak, f"{self.findings} findings"])


def fuzz(numbers: range, jobs: int, report: Report) -> None:
    """Judge cases on a server of our own."""
    logs = Path(tempfile.mkdtemp(prefix="bundler-fuzz-"))
    # Without eviction: what is missing here is to be missing because of an attack.
    with (
        redis_server.running("--maxmemory", "0") as server,
        selectors.DefaultSelector() as selector,
    ):

        def start(job: int, left: range) -> None:
            if left:
                worker = Worker(server, job, report.seed, left, logs / str(job))
                # a pipe
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

        for job in range(jobs):
            start(job, numbers[job::jobs])
        while selector.get_map():
            ready = {key.data for key, _ in selector.select(0.5)}
            for worker in [key.data for key in selector.get_map().values()]:
                found = worker.receive() if worker in ready else []
                for result in found or []:
                    report.add(*result)
                if found is None or time.monotonic() - worker.heard > 2 * CASE_S:
                    selector.unregister(worker.process.stdout)
                    said = worker.close()
                    if worker.numbers:
                        report.add(worker.numbers[0], "died or hung", 0, 0, said, [])
                    start(worker.database, worker.numbers[1:])
    shutil.rmtree(logs, ignore_errors=True)


def main() -> int:
    """Fuzz and print the table."""
    if sys.argv[1:2] == ["--work"]:
        url, address, database, seed, *bounds = sys.argv[2:]
        work(url, address, int(database), int(seed), range(*map(int, bounds)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(DATABASES, len(os.sched_getaffinity(0))))
    parser.add_argument("--keep", type=Path, default=ROOT / ".build" / "fuzz")
    parser.add_argument("--only", type=int, help="judge this case alone")
    options = parser.parse_args()
    numbers = (
        range(options.count) if options.only is None else range(options.only, options.only + 1)
    )
    report = Report(options.keep, options.seed)
    fuzz(numbers, max(1, min(DATABASES, options.jobs)), report)
    print(report.table())
    return 1 if report.findings or (options.only is None and not report.outcomes[ACCEPTED]) else 0
