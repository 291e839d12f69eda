# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of the crash matrix, each in a process of its own that the shim stops, and judges
what is left.

    LD_PRELOAD=shim.so python -m tools.crash.worker MATERIALS FOLDER

It reads jobs as JSON lines and answers each with one; a line with "ask" in between asks the driver
what Triton makes of a cache directory.  A run is a fork of this process, which has imported the
package already: that is ten times quicker than a new interpreter, and the forked process has
nothing open below the directory it works in.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.crash.cases import (
    Case,
    Materials,
    Problem,
    Tree,
    below,
    every_case,
    shorten,
    tree,
)

DONE, TYPED, UNTYPED = 0, 3, 4
CHILD_LIMIT_S = 30
LONG_AGO_S = 30 * 24 * 3600
WRITES = ("write", "pwrite", "writev", "sendfile", "copy_file_range")


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit status or, negative, the signal; the error's text; the counted
    calls.
    """

    status: int
    text: str
    calls: tuple[str, ...]

    @property
    def hits(self) -> int:
        """How many calls got the fault."""
        return sum(call.startswith("* ") for call in self.calls)


class Worker:
    """One directory to work in, and the starting states that were made there once."""

    def __init__(self, materials: Path, folder: Path) -> None:
        self.materials = Materials(materials)
        self.cases = every_case(self.materials)
        self.folder, self.root = folder, folder / "root"
        self.library = ctypes.CDLL(None)
        self._before: dict[str, Tree] = {}

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do a dry run ({"case"}) or a cell ({"case", "fault", "at", "triton"}) and return what was
        found.
        """
        case = self.cases[job["case"]]
        if "fault" not in job:
            return {"calls": self._dry(case)}
        return {"problems": [asdict(problem) for problem in self._cell(case, job)]}

    def _dry(self, case: Case) -> list[str]:
        before = self._start(case)
        ended = self._run(case)
        problems = [
            *_unless(ended, DONE),
            *case.wrong_now(self.root, before),
            *case.wrong_when_done(self.root, before),
        ]
        problems += case.reveal(self.root)
        if problems:
            raise RuntimeError(f"{case.name} is wrong without any fault: {problems[0].text}")
        return list(ended.calls)

    def _cell(self, case: Case, job: dict[str, Any]) -> Iterator[Problem]:
        before = self._start(case)
        ended = self._run(case, job["fault"], job["at"])
        if not ended.hits:
            yield Problem(
                "shim",
                f"call {job['at']} was not reached in {len(ended.calls)} calls: {ended.text}",
            )
        if ended.status not in {DONE, TYPED, -signal.SIGKILL}:
            yield Problem("untyped error", ended.text)
        yield from case.wrong_now(self.root, before)
        if ended.status == DONE:
            yield from case.wrong_when_done(self.root, before)
        if job["triton"] is not None:
            yield from case.reveal(self.root)
            yield from self._ask_triton(case, before, compiles=job["triton"])
            before = tree(self.root)  # what Triton made or compiled there may stay
        for sweep in (False, True):
            _age(self.root, case)
            again = self._run(case, sweep=sweep)
            yield from _unless(again, DONE)
            yield from case.wrong_now(self.root, before)
            yield from case.wrong_when_done(self.root, before)
        for path in sorted(filter(case.is_temporary, tree(self.root))):
            yield Problem("leftover", f"{path} was not swept")

    def _start(self, case: Case) -> Tree:
        """Put a fresh copy of the starting state in place; always at the same path, which group
        files name.
        """
        kept = self.folder / "states" / case.name.replace("/", " ")
        shutil.rmtree(self.root, ignore_errors=True)
        if case.name not in self._before:
            self.root.mkdir()
            case.prepare(self.root)
            self._before[case.name] = tree(self.root)
            kept.parent.mkdir(exist_ok=True)
            self.root.rename(kept)
        shutil.copytree(kept, self.root, symlinks=True)
        return self._before[case.name]

    def _run(self, case: Case, fault: str = "", at: int = 0, *, sweep: bool = False) -> Ended:
        log, told = self.folder / "calls", self.folder / "told"
        log.write_bytes(b"")
        told.write_bytes(b"")
        child = os.fork()
        if child == 0:
            status = UNTYPED
            try:
                if sweep:
                    shorten(case.shortened)
                os.environ.update(
                    CRASH_ROOT=str(self.root),
                    CRASH_LOG=str(log),
                    CRASH_FAULT=fault,
                    CRASH_AT=str(at),
                )
                self.library.crash_arm()
                status = perform(case, case.sweep if sweep else case.work, self.root, told)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(
            status, told.read_text() or f"ended with {status}", tuple(log.read_text().splitlines())
        )

    def _ask_triton(self, case: Case, before: Tree, *, compiles: bool) -> Iterator[Problem]:
        """Have Triton look the kernels up: right bytes or a miss, unless a directory is as broken
        as it was at the start.
        """
        now = tree(self.root)
        for cache in case.triton_caches():
            print(json.dumps({"ask": str(self.root / cache), "compile": compiles}), flush=True)
            for answer in json.loads(sys.stdin.readline()):
                yield from self._judge(case, cache, answer, before, now)

    def _judge(
        self, case: Case, cache: str, answer: dict[str, str], before: Tree, now: Tree
    ) -> Iterator[Problem]:
        key = self._key_of(answer["name"])
        place = f"{cache}/{key}"
        untouched = place in before and below(before, place) == below(now, place)
        if answer["did"] == "missed" or (untouched and case.state == "broken"):
            return
        if answer["did"].startswith("raised"):
            yield Problem("partial", f"Triton {answer['did']} at {key}")
        elif answer["binary"] not in self._binaries(key):
            yield Problem(
                "wrong bytes", f"Triton {answer['did']} {key} with a binary of neither build"
            )

    def _key_of(self, name: str) -> str:
        return next(
            key
            for key in self.materials.keys
            if (self.materials.folder / "ours" / key / f"{name}_kernel.json").exists()
        )

    def _binaries(self, key: str) -> set[str]:
        builds = [self.materials.build(whose, key, "") for whose in ("ours", "theirs")]
        return {
            hashlib.sha256(data).hexdigest()
            for files in builds
            for name, data in files.items()
            if name.endswith((".cubin", ".hsaco"))
        }


def perform(case: Case, work: Callable[[Path], None], root: Path, told: Path) -> int:
    """Do a case's work, or its sweeping, in this process; returns the exit status, and leaves the
    error's text in `told`.
    """
    signal.alarm(CHILD_LIMIT_S)
    ignored: list[str] = []
    # Python only prints an error in a thread or a destructor; here it counts as an untyped error.
    sys.unraisablehook = lambda found: ignored.append(f"ignored {found.exc_value!r}")
    threading.excepthook = lambda found: ignored.append(f"in a thread: {found.exc_value!r}")
    try:
        work(root)
    except case.errors as error:
        told.write_text(f"{type(error).__name__}: {error}")
        return UNTYPED if ignored else TYPED
    except BaseException:  # noqa: BLE001  # any other class is what the matrix looks for
        told.write_text(traceback.format_exc())
        return UNTYPED
    told.write_text("; ".join(ignored))
    return UNTYPED if ignored else DONE


def _unless(ended: Ended, status: int) -> Iterator[Problem]:
    if ended.status != status:
        yield Problem("unfinished", f"a run without faults: {ended.text}")


def _age(root: Path, case: Case) -> None:
    """Set the times of leftovers back; their ctime stays, see `Case.shortened`."""
    then = time.time() - LONG_AGO_S
    for path in tree(root):
        if case.is_temporary(path):
            if os.lstat(root / path).st_nlink > 1 and (root / path).is_file():
                # Killed between link and unlink: an object has the same inode, and would grow old
                # with it.
                data = (root / path).read_bytes()
                (root / path).unlink()
                (root / path).write_bytes(data)
            os.utime(root / path, (then, then), follow_symlinks=False)


def main() -> int:
    """Answer until the input ends."""
    import bundler
    from bundler.lifecycle import restoration

    del restoration, bundler  # imported before the forks, for all of them
    logging.disable()
    worker = Worker(Path(sys.argv[1]), Path(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
