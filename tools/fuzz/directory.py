# SPDX-License-Identifier: Apache-2.0
"""Puts what is no object into directory stores and caches, and uses them; exit status 1 when a
promise did not hold.

    python -m tools.fuzz directory [--count N] [--seed S] [--jobs N]

Each case is a copy of one store and one cache directory in which a few files, directories and names
were replaced: by named pipes, sockets, links, devices, directories, files of many gigabytes, other
objects and damaged ones.  Then everything is done with them that a user could do, in any order.
Promised: each call returns or raises an error of ours, in time and in little memory; what comes out
of a store has the bytes that went in; nothing that a link leads to is changed.

The work is done by one process a core, whose memory is limited; the same seed and number give the
same case.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import socket
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bundler
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.lifecycle.machine_store import Store
from tools.fuzz.container import draft, kernel
from tools.fuzz.judge import working_directory
from tools.fuzz.mutations import flip

# Of address space: the libraries take the most of it.
MEMORY_BYTES = 1 << 30
CASE_S = 20.0
HUGE_BYTES = 40 << 30
TAG = "team/t"


class Finding(Exception):
    """A promise that did not hold."""


# ---------------------------------------------------------------- What is put in place of something


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _socket(path: Path) -> None:
    # The name of a socket is short; its directory is reached by a descriptor.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name[:40]}")
        os.rename(path.parent / path.name[:40], path)
    finally:
        os.close(folder)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(HUGE_BYTES)


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "0000000009").write_bytes(b"in the way")


#: What can stand in place of a file, by name; each is given a path at which nothing is.
HOSTILE: dict[str, Callable[[Path], Any]] = {
    "named pipe": os.mkfifo,
    "socket": _socket,
    "sparse file": _sparse,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "directory": lambda path: path.mkdir(),
    "full directory": _full_directory,
    "empty file": lambda path: path.write_bytes(b""),
}


def replace(path: Path, kind: str) -> None:
    """Put something hostile in place of what is at a path."""
    _remove(path)
    HOSTILE[kind](path)


def grow(path: Path) -> None:
    """Make a file larger than any object, and leave its beginning as it is."""
    os.truncate(path, HUGE_BYTES)


# -------------------------------------------------------------------------------------------- Cases


class Template:
    """A sound store and a sound cache directory, to be copied for each case."""

    def __init__(self, place: Path) -> None:
        self.store, self.cache = place / "template" / "store", place / "template" / "cache"
        made = draft()
        made.kernels.append(kernel("three"))
        self.bundle = Bundle.from_bytes(made.join())
        self.single = Bundle.from_bytes(draft().join())
        self.contents = contents(self.bundle)
        self.keys = [found.key for found in self.bundle.kernels]
        with bundler.open_store(f"file://{self.store}") as store:
            store.push(self.single, TAG)
            store.push(self.bundle, TAG)
            store.push(self.single, "other")
            store.kernel_records().publish(self.bundle)
            store.file_records().publish("name", "k.autotune.json", b"{}")
            store.kernel_records().tell_failure(self.keys[0], "it did not compile")
            store.kernel_records().lease(self.keys[0], 600)
        bundler.restore(self.bundle, str(self.cache), only="all")


def contents(bundle: Bundle) -> dict[tuple[str, str], bytes]:
    """Return the bytes of every file of every kernel."""
    return {(k.key, a.filename): bundle.read(a) for k in bundle.kernels for a in k.artifacts}


class Case:
    """One damaged copy, and what is done with it."""

    def __init__(self, template: Template, place: Path, chance: random.Random) -> None:
        self.template, self.chance, self.root, self.cache = (
            template,
            chance,
            place / "store",
            place / "cache",
        )
        self.outside = place / "outside"
        for folder in (self.root, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template.store, self.root)
        shutil.copytree(template.cache, self.cache)
        self.outside.write_bytes(b"untouched")
        self.done: list[str] = []

    def damage(self) -> None:
        """Put something hostile in a few places."""
        for top in (self.root, self.cache):
            for _ in range(
                self.chance.choice([0, 1, 1, 2, 4])
                if top == self.cache
                else self.chance.choice([1, 1, 2, 5])
            ):
                # Files are what is read, and there are more of them; a directory takes all in it
                # along.
                found = sorted(
                    path
                    for path in top.rglob("*")
                    if path.parent != top or self.chance.random() < 0.2
                )
                if found:
                    self._damage_one(self.chance.choice(found))

    def _damage_one(self, path: Path) -> None:
        chance = self.chance
        kind = chance.choice(
            [*HOSTILE, *HOSTILE, "grown", "flipped", "other", "cut", "name", "link to outside"]
        )
        self.done.append(f"{kind}: {path.relative_to(self.root.parent)}")
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < HUGE_BYTES
        if kind in HOSTILE:
            replace(path, kind)
        elif kind == "link to outside":
            _remove(path)
            path.symlink_to(self.outside)
        elif kind == "name":
            odd = chance.choice(
                [
                    "7",
                    "\u0663\u0663",
                    "00000000001",
                    "9" * 250,
                    "9" * 15,
                    "0000000099",
                    "-1",
                    "x\n",
                    "\udcff",
                    "+gen",
                    "tmp",
                ]
            )
            with contextlib.suppress(OSError):
                (
                    path.with_name(odd).symlink_to("nowhere")
                    if chance.random() < 0.3
                    else path.with_name(odd).write_bytes(b"odd")
                )
        elif plain and kind == "grown":
            grow(path)
        elif plain and kind == "cut":
            os.truncate(path, chance.randrange(path.stat().st_size + 1))
        elif plain and kind == "flipped":
            path.write_bytes(flip(chance, path.read_bytes()))
        elif plain:
            others = [
                other
                for other in path.parent.parent.rglob("*")
                if other.is_file() and not other.is_symlink()
            ]
            others = [other for other in others if other.stat().st_size < HUGE_BYTES]
            path.write_bytes(chance.choice(others).read_bytes() if others else b"")

    def operations(self, store: Store) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what a user could do, in some order, then what should mend it."""
        made, cache, records = self.template, str(self.cache), store.kernel_records()
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("restore", lambda: store.restore(TAG, cache_dir=cache, only="all")),
            (
                "restore digest",
                lambda: store.restore(made.bundle.digest, cache_dir=cache, only="all"),
            ),
            ("pull", lambda: self._right(store.pull(TAG))),
            ("pull read-only", lambda: self._right(store.pull("other", read_only=True))),
            ("tags", store.tags),
            ("stats", store.stats),
            ("verify", store.verify),
            (
                "prune",
                lambda: store.prune(
                    grace_s=self.chance.choice([0, 3600]), dry_run=self.chance.random() < 0.8
                ),
            ),
            ("push", lambda: store.push(made.bundle, TAG)),
            ("push another", lambda: store.push(made.single, "third")),
            ("look up", lambda: self._right(records.look_up(made.keys).bundle)),
            ("publish", lambda: self._right(records.publish(made.bundle).bundle)),
            ("recorded", lambda: list(records.recorded(9))),
            ("failure", lambda: records.failure(made.keys[0])),
            ("tell failure", lambda: records.tell_failure(made.keys[0], "again")),
            ("lease", lambda: records.lease(made.keys[0], 1)),
            (
                "file",
                lambda: (
                    store.file_records().look_up("name"),
                    store.file_records().publish("name", "k.so", b"x"),
                ),
            ),
            ("delete tag", lambda: store.delete_tag("other")),
            ("check", lambda: bundler.check(made.bundle, cache, only="all")),
            ("pack", lambda: bundler.pack(cache)),
            (
                "restore bundle",
                lambda: bundler.restore(made.bundle, cache, only="all", trust="code"),
            ),
        ]
        self.chance.shuffle(calls)
        yield from calls[: self.chance.choice([4, 10, len(calls)])]
        yield "repair", lambda: store.verify(repair=True)
        yield "replace", lambda: store.push(made.bundle, TAG, mode="replace")
        yield "mended", lambda: self._mended(store)

    def _right(self, found: Bundle) -> None:
        with found:
            for key in [k.key for k in found.kernels]:
                with contextlib.suppress(BundlerError):  # said, and not wrong
                    self._check(
                        {at: data for at, data in contents(found.select()).items() if at[0] == key}
                    )

    def _check(self, got: dict[tuple[str, str], bytes]) -> None:
        wrong = [at for at, data in got.items() if self.template.contents.get(at) != data]
        if wrong:
            raise Finding(f"other bytes came out: {wrong[0]}")

    def _mended(self, store: Store) -> None:
        with store.pull(TAG) as found:
            self._check(contents(found))
            if contents(found) != self.template.contents:
                raise Finding("a push that raised nothing left something out")

    def run(self) -> Counter[str]:
        """Do everything; returns how often each came out well or with which error."""
        outcomes: Counter[str] = Counter()
        self.damage()
        replaced = False
        try:
            with bundler.open_store(f"file://{self.root}") as store:
                for name, call in self.operations(store):
                    if name == "mended" and not replaced:
                        continue
                    try:
                        call()
                        outcomes["fine"] += 1
                        replaced = replaced or name == "replace"
                    except BundlerError as error:
                        outcomes[type(error).__name__] += 1
                        if name == "mended":
                            raise Finding(
                                f"a push that raised nothing cannot be pulled: {error}"
                            ) from error
                        str(error).encode("utf-8", "surrogateescape")
        except BundlerError as error:
            outcomes[type(error).__name__] += 1
        if self.outside.read_bytes() != b"untouched":
            raise Finding("what a link leads to was changed")
        return outcomes


# ---------------------------------------------------------------------------------------- Processes


def work(seed: int, numbers: range, place: Path, results: Connection) -> None:
    """Judge some cases, in a process of its own; the parent hears of each when it is done."""
    warnings.simplefilter("ignore")
    template = Template(place)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number in numbers:
        results.send((number, *judged(template, place, seed, number)))


def judged(
    template: Template, place: Path, seed: int, number: int
) -> tuple[Counter[str], str | None]:
    """Return the outcomes of a case, and what was found."""
    case = Case(template, place, random.Random(f"{seed}/{number}"))
    # The thread that hangs is the one that counts, and it may be in a system call.
    faulthandler.dump_traceback_later(CASE_S, exit=True)
    try:
        return case.run(), None
    except BaseException as error:  # noqa: BLE001  # whatever comes out that is not ours is what we are looking for
        return Counter(), f"{'; '.join(case.done)}\n{''.join(traceback.format_exception(error))}"
    finally:
        faulthandler.cancel_dump_traceback_later()


class Worker:
    """A child process, the cases that it has still to judge, and where it works."""

    def __init__(self, seed: int, numbers: range) -> None:
        self.seed, self.numbers, self.ended = seed, numbers, False
        context = multiprocessing.get_context("spawn")
        self.results, theirs = context.Pipe(duplex=False)
        self.place = working_directory()
        self.process = context.Process(
            target=work, args=(seed, numbers, self.place, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[Counter[str], str | None] | None:
        """Return the next result; None when there is none left."""
        try:
            _, outcomes, problem = self.results.recv()
        except EOFError:
            self.ended = True
            self.process.join()
            if not self.numbers:
                return None
            how = f"hung for {CASE_S:.0f} s, or died: exit status {self.process.exitcode}"
            outcomes, problem = Counter[str](), how
        if problem is not None:
            problem = f"seed {self.seed}, number {self.numbers[0]}: {problem}"
        self.numbers = self.numbers[1:]
        return outcomes, problem

    def close(self) -> None:
        """End the process, whatever it does, and remove its files."""
        self.process.kill()
        self.process.join()
        self.results.close()
        shutil.rmtree(self.place, ignore_errors=True)


def fuzz(count: int, seed: int, jobs: int) -> tuple[Counter[str], list[str]]:
    """Judge cases 0 to count; returns the outcomes and the findings."""
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    workers = [Worker(seed, range(job, count, jobs)) for job in range(min(jobs, count))]
    try:
        while workers:
            ready = multiprocessing.connection.wait([worker.results for worker in workers])
            for worker in [worker for worker in workers if worker.results in ready]:
                result = worker.receive()
                if worker.ended:
                    workers.remove(worker)
                    worker.close()
                    if worker.numbers:
                        workers.append(Worker(seed, worker.numbers))
                if result is not None:
                    outcomes += result[0]
                    if result[1] is not None:
                        findings.append(result[1])
                        print(f"finding: {result[1]}", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            worker.close()
    return outcomes, findings


def main() -> int:
    """Fuzz and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    started = time.monotonic()
    outcomes, findings = fuzz(options.count, options.seed, max(1, options.jobs))
    for name, number in outcomes.most_common():
        print(f"{name:20} {number:8,}")
    print(
        f"{options.count:,} stores in {time.monotonic() - started:.1f} s; {len(findings)} findings"
    )
    return 1 if findings or not outcomes["fine"] else 0
