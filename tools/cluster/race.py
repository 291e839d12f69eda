# SPDX-License-Identifier: Apache-2.0
"""Eight processes restore, push, name, look, verify and prune at once, on one cache directory and
one store, for many rounds.

    python -m tools.cluster race [--rounds N] [--processes N] [--bundle FILE] [--seed S] [--results DIR]

In each round every process does a few things drawn by the seed.  While they run, some look into the
cache directory: every kernel that can be seen there must be whole and right.  After each round this
program looks alone, without the package for the cache directory, and checks that no process met an
exception, that the cache directory has whole kernels and no temporaries, that the store verifies,
that the tag which everybody merged into holds all that was pushed to it, and that the store has no
temporaries.  Then it sets the times of all objects back by two days, so that in the next round a
prune may remove what no tag reaches while others find it, name it and restore it; removes half of
the restored kernels; and now and then deletes tags.

Kernels are compiled once, which needs Triton, unless a bundle file is given.  The work happens in
memory where that is. Counts go to docs/results/race-store.json; exit status 1 when a promise did
not hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared import example_kernels, measurement, programs
from tools.shared.processes import Helper, output

if TYPE_CHECKING:
    from bundler import Bundle, Store

RESULT = "race-store"
ROUNDS = 1000
PROCESSES = 8
ACTS_A_ROUND = 3
KERNELS_A_PUSH = 3
TWO_DAYS_S = 2 * 24 * 3600
SHOWN_PROBLEMS = 10
# Every process merges into the first tag, so it must hold all; the others are replaced and deleted
# while processes use them.
ALL, LOOSE = "team/all", ("team/one", "two")
GROUP = "__grp__"
TEMPORARY = "tmp.bundler."
# What a reader may find of a bundle that was replaced and pruned before it could mark it as in use.
GONE = "is missing; push the bundle again"

Digests = dict[str, dict[str, str]]


class Racer:
    """One of the processes; everything it finds wrong is a line of text."""

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        import bundler

        self.number, self.seed, self.cache = number, seed, folder / "cache"
        self.store: Store = bundler.open_store(f"file://{folder}/store")
        self.bundle: Bundle = bundler.Bundle.load(folder / "kernels.tbundle")
        self.right: Digests = json.loads((folder / "right.json").read_text())
        self.acts: dict[str, tuple[int, Callable[[random.Random], Iterator[str]]]] = {
            "restore": (4, self._restore),
            "push": (4, self._push),
            "push loose": (3, self._push_loose),
            "look": (2, self._look),
            "prune": (2, self._prune),
            "verify": (1, self._verify),
            "delete tag": (1, self._delete_tag),
        }
        self.counts: Counter[str] = Counter()
        self.pushed: set[str] = set()

    def round(self, number: int) -> dict[str, Any]:
        """Do what the seed says for this round; return what was done, what was pushed to `ALL`, and
        what was wrong.
        """
        chance = random.Random(f"{self.seed}/{number}/{self.number}")
        self.counts, self.pushed, problems = Counter(), set(), []
        names = list(self.acts)
        for name in chance.choices(names, [self.acts[name][0] for name in names], k=ACTS_A_ROUND):
            self.counts[name] += 1
            try:
                problems += [f"{name}: {problem}" for problem in self.acts[name][1](chance)]
            except Exception:  # noqa: BLE001  # any exception is what the race looks for
                problems.append(f"{name}: {traceback.format_exc()}")
        return {"counts": self.counts, "pushed": sorted(self.pushed), "problems": problems}

    def _restore(self, chance: random.Random) -> Iterator[str]:
        tag = chance.choice([ALL, *LOOSE])
        report = self.store.restore(tag, missing_ok=True, cache_dir=self.cache, only="all")
        self.counts["kernels restored"] += len(report.restored)
        for key, reason in report.skipped:
            if tag != ALL and GONE in reason:
                self.counts["kernels pruned under a reader"] += 1
            else:
                yield f"of {tag}, {key} was skipped: {reason}"

    def _push(self, chance: random.Random) -> Iterator[str]:
        part = self._part(chance)
        self._count(self.store.push(part, ALL))
        self.pushed |= {kernel.key for kernel in part.kernels}
        return iter(())

    def _push_loose(self, chance: random.Random) -> Iterator[str]:
        tag = chance.choice([None, *LOOSE])
        self._count(self.store.push(self._part(chance), tag, chance.choice(["merge", "replace"])))
        return iter(())

    def _count(self, report: Any) -> None:
        self.counts["units sent"] += report.blobs_sent
        self.counts["units found"] += report.blobs_present
        self.counts["units repaired"] += report.repaired

    def _part(self, chance: random.Random) -> Bundle:
        from bundler import Bundle
        from bundler.format.manifest import Content

        chosen = chance.sample(list(self.bundle.kernels), KERNELS_A_PUSH)
        return Bundle(Content.of(chosen), self.bundle.observed, self.bundle.blobs)

    def _look(self, chance: random.Random) -> Iterator[str]:
        for _ in range(5):
            yield from wrong_kernels(self.cache, self.right)

    def _prune(self, chance: random.Random) -> Iterator[str]:
        report = self.store.prune()
        self.counts["objects pruned"] += len(report.removed)
        for tag, reason in report.unfollowed:
            yield f"{tag} could not be followed: {reason}"

    def _verify(self, chance: random.Random) -> Iterator[str]:
        report = self.store.verify()
        for name, reason in (*report.damaged, *report.dangling):
            yield f"{name}: {reason}"

    def _delete_tag(self, chance: random.Random) -> Iterator[str]:
        self.store.delete_tag(chance.choice(LOOSE))
        return iter(())


def wrong_kernels(cache: Path, right: Digests) -> Iterator[str]:
    """Say what is wrong with the kernels that can be seen in a cache directory; shares no code with
    the package.
    """
    for name in sorted(os.listdir(cache)):
        if name.startswith("tmp."):
            continue
        directory = cache / name
        if name not in right:
            yield f"{name} is none of the kernels"
            continue
        try:
            found = {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in directory.iterdir()
            }
        except FileNotFoundError as error:
            yield f"{name} vanished while it was read: {error}"
            continue
        if found != right[name]:
            missing = sorted(right[name].keys() - found.keys())
            yield f"{name} is partial, without {missing}" if missing else f"{name} has wrong bytes"


class Race:
    """The processes, and what is between the rounds."""

    def __init__(self, folder: Path, processes: int, seed: int) -> None:
        import bundler

        self.folder, self.cache, self.data = folder, folder / "cache", folder / "store" / "data"
        self.chance = random.Random(f"{seed}/between")
        self.bundle = bundler.Bundle.load(folder / "kernels.tbundle")
        self.cache.mkdir()
        bundler.restore(self.bundle, self.cache, only="all")
        self.right = digests(self.cache)
        (folder / "right.json").write_text(json.dumps(self.right))
        self.store = bundler.open_store(f"file://{folder}/store")
        self.counts: Counter[str] = Counter()
        self.expected: set[str] = set()
        self.problems: list[str] = []
        racer = ("race", "--step", "race", str(folder), str(seed))
        self.racers = [Helper("tools.cluster", *racer, str(n)) for n in range(processes)]

    def round(self, number: int) -> None:
        """Let everybody race, then look alone, then set the stage for the next round."""
        for racer in self.racers:
            racer.tell(number)
        for racer in self.racers:
            answer = racer.hear()
            self.counts.update(answer["counts"])
            self.expected |= set(answer["pushed"])
            self.problems += [f"round {number}, {problem}" for problem in answer["problems"]]
        self.problems += [f"after round {number}, {problem}" for problem in self._judge()]
        self._prepare()

    def close(self) -> None:
        """End the processes."""
        for racer in self.racers:
            racer.close()
        self.store.close()
        self.bundle.close()

    def _judge(self) -> Iterator[str]:
        yield from wrong_kernels(self.cache, self.right)
        left = [name for name in os.listdir(self.cache) if name.startswith(TEMPORARY)]
        left += os.listdir(self.folder / "store" / "tmp")
        if left:
            yield f"temporaries were left: {left}"
        report = self.store.verify()
        for name, reason in (*report.damaged, *report.dangling):
            yield f"the store is not sound: {name}: {reason}"
        named = {info.name for info in self.store.tags()}
        if not self.expected:
            return
        if ALL not in named:
            yield f"{ALL} is not set"
            return
        with self.store.pull(ALL, read_only=True) as pulled:
            theirs = {kernel.key: kernel for kernel in pulled.kernels}
            lost = sorted(self.expected - theirs.keys())
            if lost:
                yield f"{ALL} lacks {len(lost)} of {len(self.expected)} kernels: {lost[0]}"
            changed = [
                kernel.key
                for kernel in self.bundle.kernels
                if theirs.get(kernel.key, kernel) != kernel
            ]
            if changed:
                yield f"{ALL} has another kernel under {changed[0]}"

    def _prepare(self) -> None:
        then = time.time() - TWO_DAYS_S
        for path in self.data.rglob("*"):
            if path.is_file():
                os.utime(path, (then, then))
        for name in sorted(os.listdir(self.cache)):
            if self.chance.random() < 0.5:
                shutil.rmtree(self.cache / name)
        if self.chance.random() < 0.2:
            self.store.delete_tag(ALL)
            self.expected.clear()


def digests(cache: Path) -> Digests:
    """Return kernel key -> file name -> sha256 of what lies in a cache directory, after a look that
    the kernels are whole.
    """
    found: Digests = {}
    for directory in cache.iterdir():
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        (group,) = (name for name in files if name.startswith(GROUP))
        assert set(json.loads(files[group])["child_paths"]) == files.keys() - {group}
        hashed = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        found[directory.name] = hashed
    return found


def compile_kernels(path: str) -> None:
    """Record the compiles of the example kernels into a bundle file."""
    import bundler

    kernels = example_kernels.load()
    with bundler.recording() as recording:
        kernels.compile_all(["cuda:90", "hip:gfx942"])
    with recording.collect() as bundle:
        bundle.save(path)


def kernels_alone(source: Path, path: Path) -> None:
    """Save the kernels of a bundle without what else is in it."""
    import bundler
    from bundler.format.manifest import Content

    with bundler.Bundle.load(source) as bundle:
        bundler.Bundle(Content.of(bundle.kernels), bundle.observed, bundle.blobs).save(path)


def be_racer(folder: str, seed: str, number: str) -> None:
    """Answer each round's number with what happened, until the input ends."""
    racer = Racer(Path(folder), int(number), int(seed))
    for line in sys.stdin:
        print(json.dumps(racer.round(int(line))), flush=True)


def main() -> int:
    """Race, print the table, write the counts."""
    if programs.run_step({"compile": compile_kernels, "race": be_racer}):
        return 0
    options = programs.arguments(
        __doc__,
        rounds=(ROUNDS, "how many"),
        processes=(PROCESSES, "that race"),
        bundle=(Path, "kernels to race with; compiled when not given"),
        seed=(0, "of what is done"),
        results=(measurement.RESULTS, f"where {RESULT}.json goes"),
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="race.", dir=measurement.fast_directory()) as name:
        folder = Path(name)
        if options.bundle is None:
            places = {"HOME": name, "TRITON_CACHE_DIR": f"{name}/triton"}
            compiling = ("race", "--step", "compile", f"{name}/all.tbundle")
            output("tools.cluster", *compiling, environment=places)
        kernels_alone(options.bundle or folder / "all.tbundle", folder / "kernels.tbundle")
        race = Race(folder, options.processes, options.seed)
        try:
            for number in range(options.rounds):
                race.round(number)
        finally:
            race.close()
        kernels = len(race.right)
    result = {
        "rounds": options.rounds,
        "processes": options.processes,
        "kernels": kernels,
        "seed": options.seed,
        "acts": dict(sorted(race.counts.items())),
        "problems": race.problems[:SHOWN_PROBLEMS],
        "problem_count": len(race.problems),
        "seconds": round(time.monotonic() - started, 1),
    }
    for act, count in sorted(race.counts.items()):
        print(f"{act:<32}{count:>10,}")
    path = measurement.save(RESULT, result, options.results)
    print(
        f"{options.rounds} rounds of {options.processes} processes with {kernels} kernels in"
        f" {result['seconds']} s: {len(race.problems)} problems; written to {path}"
    )
    for problem in race.problems[:SHOWN_PROBLEMS]:
        print(problem, file=sys.stderr)
    return 1 if race.problems else 0
