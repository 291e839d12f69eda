# SPDX-License-Identifier: Apache-2.0
"""Kernels that Inductor generated, by `load_generated` and by Inductor itself, on a GPU: numbers and times.

    python -m tools.gpu generated --corpus DIR --results OUT            all; DIR has the unpacked Inductor cache of the corpus
    python -m tools.gpu generated --only kinds                          without the corpus
    python -m tools.gpu generated --check                               is every target of docs/results met?

Corpus: each of the 42 kernels of the two recorded wrappers, with the arguments of its first launch in the wrapper's own harness.  Kinds: small
torch functions (`generated_kinds.py`), compiled by torch.compile here; the wrappers that torch wrote are loaded by `load_generated`.  Our
kernels get the configs that Inductor chose.  Compared are: the bits of all memory that a launch may write, on both sides; what the whole
function, or the part of the graph that the kernel computes, gives in torch eager; the time of a launch, of the GPU and of the host, in
pairs (`generated_times.py`).  Processes compile at the same time, and measure one after the other, while all others wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tools.gpu import generated_table
from tools.shared import measurement

NAME = "gpu-generated"
SECTIONS = ("corpus", "kinds")
PROCESSES = 12
# So much of the time is kept for timing.
TIMES_SHARE = 0.45
Task = int | str


def main() -> int:
    """Run the sections, save after each step; 1 when a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--corpus", type=Path, help="the unpacked cache directory of the corpus")
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help=f"where {NAME}.json goes"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument(
        "--seconds", type=float, default=235.0, help="begin nothing new after so long"
    )
    parser.add_argument(
        "--device",
        default="cuda",
        help="cpu compares numbers in Triton's interpreter, and times nothing",
    )
    parser.add_argument("--kinds", nargs="+", help="names of kinds, for a trial")
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit 1 when the result misses a target"
    )
    options = parser.parse_args()
    if options.check:
        return generated_table.show(json.loads((options.results / f"{NAME}.json").read_text()))
    sections = (
        [options.only]
        if options.only
        else [name for name in SECTIONS if name == "kinds" or options.corpus]
    )
    run = Run(options, sections)
    try:
        run.numbers()
        if options.device == "cuda":
            run.times()
    finally:
        run.close()
    return generated_table.show(run.result())


class Run:
    """The worker processes, what they were given, and what they found."""

    def __init__(self, options: argparse.Namespace, sections: list[str]) -> None:
        self.options, self.started = options, time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="generated."))
        self.facts = measurement.facts()
        self.found: dict[Task, dict[str, Any]] = {}
        self.owners: dict[Task, Connection] = {}
        os.environ.update(environment(self.folder, options.device))
        context = multiprocessing.get_context("spawn")
        self.workers: list[tuple[Any, Connection]] = []
        for _ in range(options.processes):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, options.device), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))
        # Once the processes start, since to list the kinds this one has to import torch, too.
        self.tasks = self._tasks(sections)

    def _tasks(self, sections: list[str]) -> list[Task]:
        """Return what there is to do; the wrappers of the corpus first, since they take longest."""
        from tools.gpu.generated_kinds import KINDS

        tasks: list[Task] = []
        if "corpus" in sections:
            # A copy, since Inductor writes into the directory, and finds there what it compiled when it was recorded.
            shutil.copytree(self.options.corpus, self.folder / "inductor", symlinks=True)
            wrappers = [
                path for path in sorted((self.folder / "inductor").glob("??/*.py"))
                if "async_compile.triton(" in path.read_text(encoding="utf-8")
            ]  # fmt: skip
            tasks += map(str, wrappers)
        if "kinds" in sections:
            tasks += [
                number
                for number, kind in enumerate(KINDS)
                if self.options.kinds in (None, []) or kind.name in self.options.kinds
            ]
        return tasks

    def numbers(self) -> None:
        """Have every task compiled and compared, by all processes at once."""
        waiting, idle = list(self.tasks), [connection for _, connection in self.workers]
        busy: dict[Connection, Task] = {}
        limit = self.options.seconds * (1 - TIMES_SHARE)
        while waiting or busy:
            while waiting and idle and self._spent() < limit:
                connection, task = idle.pop(), waiting.pop(0)
                connection.send(("numbers", task))
                busy[connection], self.owners[task] = task, connection
            ready = wait(list(busy), timeout=max(limit - self._spent(), 0.0) + 5.0) if busy else []
            if not ready:
                for task in [*busy.values(), *waiting]:
                    self.found[task] = {"error": "not done in the time that there was"}
                    self.owners.pop(task, None)
                break
            for connection in [one for one in busy if one in ready]:
                task = busy.pop(connection)
                try:
                    _, _, self.found[task] = connection.recv()
                    idle.append(connection)
                except EOFError:
                    self.found[task] = {"error": "its process ended"}
                    self._drop(connection)
                self._tell(task)
        self.save()

    def times(self) -> None:
        """Have the launches timed, one process after the other, while nothing else runs."""
        for task in self.tasks:
            connection = self.owners.get(task)
            if connection is None or "error" in self.found.get(task, {"error": ""}):
                continue
            if self._spent() > self.options.seconds:
                self.found[task]["times"] = {"error": "not done in the time that there was"}
                continue
            try:
                connection.send(("times", task))
                answer = (
                    connection.recv()[2] if connection.poll(60) else {"error": "no answer in 60 s"}
                )
                self.found[task]["times"] = answer
                if "error" in answer and "no answer" in answer["error"]:
                    self._drop(connection)
            except (EOFError, OSError):
                self.found[task]["times"] = {"error": "its process ended"}
                self._drop(connection)
            if task == self.tasks[-1] or isinstance(task, str):
                self.save()
        self.save()

    def result(self) -> dict[str, Any]:
        """Return what was found so far, with the rows."""
        from tools.gpu.generated_kinds import KINDS

        corpus = [
            self.found[task] for task in self.tasks if isinstance(task, str) and task in self.found
        ]
        kinds = [
            {"kind": KINDS[task].name, **self.found[task]}
            for task in self.tasks
            if isinstance(task, int) and task in self.found
        ]
        found = {"corpus": corpus, "kinds": kinds, "seconds": round(self._spent(), 1)}
        return {**self.facts, **found, "rows": generated_table.rows(found)}

    def save(self) -> None:
        """Write what was found so far, whole or not at all."""
        self.options.results.mkdir(parents=True, exist_ok=True)
        path = self.options.results / f"{NAME}.json"
        path.with_suffix(".tmp").write_text(
            json.dumps(self.result(), indent=1, sort_keys=True) + "\n"
        )
        path.with_suffix(".tmp").rename(path)

    def close(self) -> None:
        """End the processes."""
        self.save()
        for process, _ in self.workers:
            process.kill()
        for process, _ in self.workers:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spent(self) -> float:
        return time.monotonic() - self.started

    def _drop(self, connection: Connection) -> None:
        self.owners = {
            task: owner for task, owner in self.owners.items() if owner is not connection
        }

    def _tell(self, task: Task) -> None:
        found = self.found[task]
        words = found.get("error") or f"{len(found['kernels'])} kernels {' '.join(found['faults'])}"
        print(f"{self._spent():6.1f} s  {found.get('name', task)}: {words[:300]}", flush=True)


def environment(folder: Path, device: str) -> dict[str, str]:
    """Return what a worker's environment needs: caches that all of them share, and no processes of torch's below it."""
    found = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # torch keeps kernels of each device in a directory of its own.
        "TRITON_CACHE_DIR": str(folder / "inductor" / "triton" / "0"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return found | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})


def _serve(connection: Connection, device: str) -> None:
    from tools.gpu import generated_workers

    generated_workers.serve(connection, device)


if __name__ == "__main__":
    raise SystemExit(main())
