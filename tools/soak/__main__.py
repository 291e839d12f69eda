# SPDX-License-Identifier: Apache-2.0
"""A service that runs for hours while it is harmed: nothing grows, nothing is lost.

    python -m tools.soak [--hours H | --minutes M] [--seed N] [--results DIR] [--check]

Two processes record, push, pull, restore, replay, delete, prune and sync, on a store in a directory
and one on a real Redis server; where mounting is permitted each now and then fills a small disk.
One is killed with SIGKILL again and again; the other lives all the time, so that what it leaks can
be seen. The server is killed and started anew with its append-only file, which it writes before it
answers: what was acknowledged must be there again. What must be there is known by a ledger, and the
right bytes from what Triton wrote. Samples go to soak.json, and beside it a plot; `--check` exits 1
when a target is missed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bundler.backends.local import GENERATIONS
from bundler.backends.refs import KEPT_S
from tools.shared import kernel_variants, measurement, programs
from tools.shared.measurement import row
from tools.shared.processes import Helper, python_path
from tools.shared.redis_server import Server, running
from tools.soak import growth
from tools.soak.ledger import Ledger
from tools.soak.service import ALL, STORES, TAGS_EACH, Service

RESULT = "soak"
KERNELS = 24
SERVICES = 2
# What services do that leaves something for a prune.
CHANGES = frozenset({"record", "push", "delete", "sync", "fill"})
NICE = 10
KILL_S, RESTART_S = 12.0, 20.0
SMALL_DISK = "size=2m,mode=700"
SHOWN = 20
DAY_S = 24 * 3600.0
# Nobody writes to a temporary file for so long.
LEFT_S = 20.0
# Written before the answer, but not flushed: a killed process loses nothing of it.  The file is
# rewritten when it has grown since the server began, by a part of 100: one that is killed every 20
# seconds never comes to Redis's own, 100.
APPEND_ONLY = (
    *("--appendonly", "yes", "--appendfsync", "no"),
    *("--auto-aof-rewrite-min-size", "8mb", "--auto-aof-rewrite-percentage", "1"),
)
PATIENT = {"timeout_s": 2, "connect_timeout_s": 1}
MIB = 1 << 20


class Life:
    """One life after the other of a service: its process, and what its journals said."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.ledger = settings, Ledger()
        self.lives, self._read = 0, 0
        self.start()

    def start(self) -> None:
        """Start the process, with what is known from the lives before."""
        folder, self._read = Path(self.settings["folder"]), 0
        self.journal = folder / f"journal-{self.settings['number']}-{self.lives}"
        environment = {name: str(folder / name.lower()) for name in ("HOME", "TMPDIR")}
        self.helper = Helper(
            "tools.soak.service",
            environment={**os.environ, **environment, "PYTHONPATH": python_path()},
        )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, NICE)
        more = {"life": self.lives, "journal": str(self.journal), "ledger": self.ledger.to_json()}
        self.helper.tell({**self.settings, **more})
        self.lives += 1

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.helper.process.pid

    def kill(self) -> None:
        """Kill the process, wherever it is."""
        self.helper.process.kill()
        self.helper.process.wait()

    def stop(self) -> None:
        """Let the process end after what it does, by force where that takes too long."""
        self.helper.process.terminate()
        self.helper.close()

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that the journal has more than the last time."""
        if not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    told: dict[str, Any] = json.loads(line)
                    self.ledger.hear(told)
                    yield told


class Soak:
    """Services, their server, and what is seen of them."""

    def __init__(self, folder: Path, full: Path | None, server: Server, seconds: float) -> None:
        self.folder, self.server = folder, server
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        # When each change of a store was heard of, as far back as a grace reaches.
        self._changes: deque[float] = deque()
        urls = dict(zip(STORES, (f"file://{folder}/store", server.url(**PATIENT)), strict=True))
        # Long beside a push; short beside the run, so that what is pruned evens out.
        self.settings: dict[str, Any] = {
            "folder": str(folder),
            "urls": urls,
            "cache": str(kernel_variants.cache_of(KERNELS, folder)),
            "kernels": KERNELS,
            "grace_s": max(5.0, min(60.0, seconds / 10)),
            "full": full and str(full),
        }
        for name in ("home", "tmpdir"):
            (folder / name).mkdir()

    def run(self, seconds: float, seed: int) -> None:
        """Let the services act for so long, harm them, and look."""
        chance, began = random.Random(f"{seed}/harm"), time.monotonic()
        made = [Life({**self.settings, "number": n, "seed": seed}) for n in range(SERVICES)]
        every_s = max(1.0, min(10.0, seconds / 360))
        look_s, kill_s, restart_s = every_s, KILL_S, RESTART_S / 2
        try:
            while (now_s := time.monotonic() - began) < seconds:
                if now_s >= kill_s:
                    self._kill(made[-1])
                    kill_s = now_s + KILL_S * chance.uniform(0.5, 1.5)
                if now_s >= restart_s:
                    self.server.restart()
                    self.counts["restarts of the server"] += 1
                    restart_s = now_s + RESTART_S * chance.uniform(0.5, 1.5)
                if now_s >= look_s:
                    self._listen(made)
                    self.samples.append({"time_s": round(now_s, 1), **self._sample(made[0].pid)})
                    look_s = now_s + every_s
                time.sleep(chance.uniform(0.05, 0.25))
                if (status := made[0].helper.process.poll()) is not None:
                    self.problems.append(f"the service that lives ended with status {status}")
                    break
        finally:
            for one in made:
                one.stop()
        self._listen(made)
        self._judge(made)

    def _kill(self, one: Life) -> None:
        if one.helper.process.poll() is not None:
            self.problems.append("a service ended by itself")
        one.kill()
        self._listen([one])
        one.helper.close()
        one.journal.unlink(missing_ok=True)
        self.counts["kills of a service"] += 1
        # What it was writing is swept once it is a day old.
        for path in (self.folder / "store" / "tmp").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - LEFT_S:
                    os.utime(path, (time.time() - 2 * DAY_S,) * 2)
        one.start()

    def _listen(self, made: list[Life]) -> None:
        for one in made:
            for line in one.heard():
                if "end" not in line:
                    continue
                self.counts[line["end"]] += 1
                if line["end"] in CHANGES and not line["error"]:
                    self._changes.append(time.monotonic())
                if line["error"]:
                    self.counts[f"{line['end']}: {line['error']}"] += 1
                self.problems += line["problems"]
                for name, taken_s in line["s"].items():
                    self._seconds[name].append(taken_s)

    def _sample(self, pid: int) -> dict[str, Any]:
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        found = {name: _percentiles(taken) for name, taken in self._seconds.items() if taken}
        self._seconds.clear()
        while self._changes and self._changes[0] < time.monotonic() - self.settings["grace_s"]:
            self._changes.popleft()
        admin = self.server.admin
        memory = admin.info("memory")["used_memory_dataset"]
        file_bytes = sum(size for _, size in _files(self.server.folder))
        store = [path for path, _ in _files(self.folder / "store")]
        temporary = [path for path in store if path.parent.name == "tmp"]
        others = [*_files(self.folder / "home"), *_files(self.folder / "tmpdir")]
        return {
            "memory_mib": round(int(fields["VmRSS"].split()[0]) / 1024, 2),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": int(fields["Threads"]),
            "store_files": len(store) - len(temporary) - _young_numbers(store),
            "temporary_files": len(temporary),
            "other_files": len(others),
            "redis_keys": admin.dbsize(),
            "redis_mib": round(memory / MIB, 2),
            "redis_file_mib": round(file_bytes / MIB, 2),
            "redis_clients": len(admin.client_list()),
            "changes": len(self._changes),
            "latencies": found,
        }

    def _judge(self, made: list[Life]) -> None:
        """Look at every tag once more, alone; then remove all, after which nothing may be left."""
        ledgers = [one.ledger.to_json() for one in made]
        for number, ledger in enumerate(ledgers):
            more = {"number": number, "seed": 0, "life": -1, "ledger": ledger, "full": None}
            service = Service({**self.settings, **more, "journal": str(self.folder / "last")})
            for store in STORES:
                for tag in [ALL, *(f"w{number}/{n}" for n in range(TAGS_EACH))]:
                    service.restore_tag(store, tag)
            self.problems += [f"at the end: {line}" for line in service.problems]
            if number == SERVICES - 1:
                self._empty(service)
            service.close()

    def _empty(self, service: Service) -> None:
        for name, store in service.stores.items():
            report = store.verify()
            found = [*report.damaged, *report.dangling]
            self.problems += [f"{name} is not sound: {what}: {why}" for what, why in found]
            for info in store.tags():
                store.delete_tag(info.name)
            store.prune(grace_s=0)
            stats = store.stats()
            self.counts[f"objects left in {name}"] = stats.units + stats.manifests
            self.counts[f"index bytes left in {name}"] = stats.index_bytes


def _files(folder: Path) -> list[tuple[Path, int]]:
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append((Path(place, name), Path(place, name).lstat().st_size))
    return found


def _young_numbers(paths: Iterable[Path]) -> int:
    """Return how many files are numbers of a tag's values that a directory keeps for an hour: in a
    run's first hour they can only grow.
    """
    found, now_s = 0, time.time()
    for path in paths:
        if path.parent.name == GENERATIONS:
            with contextlib.suppress(FileNotFoundError):
                found += now_s - path.lstat().st_mtime < KEPT_S
    return found


def _percentiles(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    worst = ordered[math.ceil(len(ordered) * 0.99) - 1]
    return {"median": round(statistics.median(ordered), 5), "p99": round(worst, 5)}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small file system while the block runs; None where that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, check=False, capture_output=True, text=True)
        reason = done.stderr.strip()
    except OSError as error:
        reason = str(error)
    if reason:
        print(f"no disk will be full: {reason}", file=sys.stderr)
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def rows(soak: Soak) -> list[dict[str, Any]]:
    """Return a row for each promise."""
    left = sum(found for name, found in soak.counts.items() if name.startswith("objects left"))
    return [
        row("problems: lost, wrong, left over, or not typed", len(soak.problems), "", most=0),
        row("kills of a service", soak.counts["kills of a service"], "", least=1),
        row("restarts of the server", soak.counts["restarts of the server"], "", least=1),
        row("objects left once all tags were removed", left, "", most=0),
        *growth.growth_rows(soak.samples),
    ]


def main() -> int:
    """Run, print, write."""
    options = programs.arguments(
        __doc__,
        hours=(0.0, "how long"),
        minutes=(0.0, "how long, beside the hours; 10 when neither is given"),
        seed=(0, "of what is done"),
        results=(measurement.RESULTS, f"where {RESULT}.json and its plot go"),
        check=(False, "exit 1 when a target is missed"),
    )
    seconds = options.hours * 3600 + options.minutes * 60 or 600.0
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="soak.", dir=measurement.fast_directory()))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        full = stack.enter_context(small_disk(folder / "full"))
        soak = Soak(folder, full, stack.enter_context(running(*APPEND_ONLY)), seconds)
        soak.run(seconds, options.seed)
    for name, count in sorted(soak.counts.items()):
        print(f"{name:<40}{count:>10,}")
    for problem in soak.problems[:SHOWN]:
        print(problem, file=sys.stderr)
    result = {
        "seconds": seconds,
        "seed": options.seed,
        "full_disk": full is not None,
        "counts": dict(soak.counts),
        "problems": soak.problems[:SHOWN],
        "samples": soak.samples,
        "rows": rows(soak),
    }
    missed = measurement.report(RESULT, result, options.results)
    (options.results / f"{RESULT}.svg").write_text(growth.plot(soak.samples))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
