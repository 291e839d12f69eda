# SPDX-License-Identifier: Apache-2.0
"""Feeds damaged and hostile bundles to the package; exit status 1 when a promise did not hold.

    python -m tools.fuzz bundle [--count N] [--seed S] [--jobs N] [--keep DIR] [FILE ...]

Half of the bundles are golden ones (tests/data/v2.0): every second of these was damaged in its
bytes, its manifest or its container, the others by the meaning of their fields (`structured` of mutations.py), and
those are launched dry, stored and tuned with too.  Half are made from scratch: each attack of
hostile.py once (in the first 25,000), pairs of attacks, and damaged attacks.  Each is opened, read,
verified, selected from and merged; each accepted one, each fiftieth, and a part of the hostile ones
that open are restored.  What must hold is in judge.py.

Given as FILE, a bundle is judged alone, as one that a finding left in --keep.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tools.fuzz import workers
from tools.fuzz.container import draft
from tools.fuzz.hostile import hostile
from tools.fuzz.judge import Judge, working_directory
from tools.fuzz.mutations import mutated, structured
from tools.shared.processes import ROOT

GOLDEN = ROOT / "tests" / "data" / "v2.0"
MEMORY_BYTES = 1 << 30
RESTORE_EVERY = 50
# Of hostile bundles that open, but are not accepted.
HOSTILE_RESTORE_EVERY = 4


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


class Bundles(workers.Fuzzer):
    """Damaged and hostile bundles."""

    name = "bundle"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.golden = [path.read_bytes() for path in sorted(GOLDEN.glob("*.tbundle"))]
        # What hostile bundles are merged with and restored beside: the same keys, other files.
        self.sound = draft().join()

    def case(self, number: int) -> tuple[bytes, int, bool | None]:
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
        data, few = hostile(chance, number // 2), chance.randrange(HOSTILE_RESTORE_EVERY) == 0
        return data, len(self.golden), True if few else always

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Limit memory beside what Triton takes, and guard the directories of this process."""
        limit_memory()
        guard = place / "guard"
        os.environ |= {"HOME": str(guard / "home"), "TMPDIR": str(guard / "temporary")}
        self.judging, self.made = Judge(place, [*self.golden, self.sound]), made

    def make(self, number: int, made: Connection) -> None:
        """A bundle of two bombs takes more memory, and time, than who judges it is allowed."""
        data, *facts = self.case(number)
        made.send(facts)
        made.send_bytes(data)

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Judge the next bundle that is made."""
        golden, restore = self.made.recv()
        data = self.made.recv_bytes()
        begin()
        used = structural(number)
        return Counter({self.judging.judge(data, golden, restore, used=used): 1})

    def bytes_of(self, number: int) -> bytes:
        """Make the bundle once more."""
        return self.case(number)[0]


def judge_files(paths: list[Path]) -> int:
    """Judge bundles that were kept, restored whatever they are, and print what came out of each."""
    limit_memory()
    place = working_directory()
    try:
        made = Bundles(0)
        judge = Judge(place, [*made.golden, made.sound])
        for path in paths:
            started = time.process_time()
            outcome = judge.judge(path.read_bytes(), len(made.golden), restore=True)
            print(f"{path.name} {outcome} {time.process_time() - started:.2f}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 0


def main() -> int:
    """Fuzz and print the table."""
    parser = workers.parser(__doc__, 100_000)
    parser.add_argument(
        "files", nargs="*", type=Path, help="judge these bundles instead, in this process"
    )
    options = parser.parse_args()
    if options.files:
        return judge_files(options.files)
    return workers.run(Bundles(options.seed), options)
