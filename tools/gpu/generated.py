# SPDX-License-Identifier: Apache-2.0
"""Kernels that Inductor generated, by `load_generated` and by Inductor itself, on a GPU: numbers
and times.

    python -m tools.gpu generated --corpus DIR --results OUT            all; DIR has the unpacked Inductor cache of the corpus
    python -m tools.gpu generated --only kinds                          without the corpus
    python -m tools.gpu generated --check                               is every target of docs/results met?

Corpus: each of the 42 kernels of the two recorded wrappers, with the arguments of its first launch
in the wrapper's own harness. Kinds: small torch functions (`generated_kinds.py`), compiled by
torch.compile here; the wrappers that torch wrote are loaded by `load_generated`. Our kernels get
the configs that Inductor chose. Compared are: the bits of all memory that a launch may write, on
both sides; what the whole function, or the part of the graph that the kernel computes, gives in
torch eager; the time of a launch, of the GPU and of the host, in pairs (`generated_times.py`).
Processes compile at the same time, and measure one after the other, while all others wait. `rows`
compares what was found with the targets, and docs/benchmarks.md has a section of it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tools.shared import measurement, programs

NAME = "gpu-generated"
SECTIONS = ("corpus", "kinds")
PROCESSES = 12
# So much of the time is kept for timing.
TIMES_SHARE = 0.45
Task = int | str
# Of Inductor's launch of the same module.
_MOST = 1.03
_CORPUS_KERNELS, _LEAST_KINDS = 42, 30
_Found = dict[str, Any]


def main() -> int:
    """Run the sections, save after each step; 1 when a target is missed."""
    parser = programs.parser(
        __doc__,
        corpus=(Path, "the unpacked cache directory of the corpus"),
        results=(measurement.RESULTS, f"where {NAME}.json goes"),
        processes=(PROCESSES, "that compile"),
        seconds=(235.0, "begin nothing new after so long"),
        device=("cuda", "cpu compares numbers in Triton's interpreter, and times nothing"),
        kinds=([], "names of kinds, for a trial"),
        check=(False, "run nothing; exit 1 when the result misses a target"),
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    options = parser.parse_args()
    if options.check:
        return _show(json.loads((options.results / f"{NAME}.json").read_text()))
    sections = [name for name in SECTIONS if name == "kinds" or options.corpus]
    if options.only:
        sections = [options.only]
    run = Run(options, sections)
    try:
        run.numbers()
        if options.device == "cuda":
            run.times()
    finally:
        run.close()
    return _show(run.result())


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
            # A copy, since Inductor writes into the directory, and finds there what it compiled
            # when it was recorded.
            shutil.copytree(self.options.corpus, self.folder / "inductor", symlinks=True)
            wrappers = [
                path
                for path in sorted((self.folder / "inductor").glob("??/*.py"))
                if "async_compile.triton(" in path.read_text(encoding="utf-8")
            ]
            tasks += map(str, wrappers)
        if "kinds" in sections:
            tasks += [
                number
                for number, kind in enumerate(KINDS)
                if not self.options.kinds or kind.name in self.options.kinds
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
        return {**self.facts, **found, "rows": rows(found)}

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
    """Return what a worker's environment needs: caches that all of them share, and no processes of
    torch's below it.
    """
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


def rows(found: _Found) -> list[_Found]:
    """Return the rows: counts of both sections, then a module a row."""
    modules = [*_corpus_modules(found["corpus"]), *map(_kind_module, found["kinds"])]
    lines = []
    for section, least in (("corpus", _CORPUS_KERNELS), ("kinds", _LEAST_KINDS)):
        mine = [module for module in modules if module["section"] == section]
        if not mine:
            continue
        lines += _counts(section, max(least, len(mine)), mine)
    return lines + [
        _line(module, what)
        for module in modules
        for what in ("gpu", "host")
        if module[what] is not None
    ]


def _counts(section: str, least: int, modules: list[_Found]) -> list[_Found]:
    unit = f"of {len(modules)}"
    made = [
        measurement.row(
            f"{section}: {words}",
            sum(module[what] for module in modules),
            unit,
            least=least,
            section=section,
            wrong=[module["name"] for module in modules if not module[what]],
        )
        for what, words in (
            ("loaded", "loaded by load_generated, and launched"),
            ("bits", "same bits as Inductor's launch"),
            ("eager", "numbers equal to torch eager"),
        )
    ]
    for what, words in (("gpu", "time of the GPU"), ("host", "time of the host for a call")):
        ratios = [module[what] for module in modules if module[what] is not None]
        if ratios:
            made.append(
                measurement.row(
                    f"{section}: {words}, all modules (geometric mean)",
                    _geometric(ratios),
                    "x",
                    most=_MOST,
                    section=section,
                    peer=(
                        f"Inductor's launch; from {min(ratios):.3f} to {max(ratios):.3f},"
                        f" {len(ratios)} modules"
                    ),
                )
            )
    return made


def _line(module: _Found, what: str) -> _Found:
    words = {"gpu": "GPU", "host": "host"}[what]
    ours, theirs = (statistics.median(side) for side in module[f"{what}_us"])
    return measurement.row(
        f"{module['section']}: {module['name']}: {words}",
        round(module[what], 4),
        "x",
        most=_MOST,
        section=module["section"],
        peer=f"{ours:.2f} us, Inductor {theirs:.2f} us; {', '.join(module['heuristics'])}",
        module=module["name"],
    )


def _geometric(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def _corpus_modules(wrappers: list[_Found]) -> list[_Found]:
    """Return each kernel of the recorded wrappers as a module, which it is in the recorded cache,
    too.
    """
    found = []
    for wrapper in wrappers:
        for kernel in wrapper.get("kernels", ()):
            times = _timed(wrapper).get(kernel["kernel"])
            found.append(
                _module("corpus", kernel["kernel"], [kernel], [times] if times else [])
                | {
                    "eager": (
                        kernel.get("eager") == "compared"
                        and kernel["written"] > 0
                        and kernel["off"] <= kernel["loose"]
                    ),
                }
            )
    return found


def _kind_module(kind: _Found) -> _Found:
    kernels = kind.get("kernels", [])
    made = _module("kinds", kind["kind"], kernels, list(_timed(kind).values()))
    return made | {
        "eager": bool(kind.get("close")),
        "loaded": made["loaded"] and not kind.get("faults", ["?"]),
    }


def _timed(found: _Found) -> _Found:
    times = found.get("times", {})
    return {} if "error" in times else times


def _module(section: str, name: str, kernels: list[_Found], times: list[_Found]) -> _Found:
    launched = [kernel for kernel in kernels if "unequal" in kernel]
    made: _Found = {
        "section": section,
        "name": name,
        "loaded": bool(launched) and (section == "kinds" or len(launched) == len(kernels)),
        # Floats that are added atomically differ between two launches of Inductor's, too.
        "bits": (
            bool(launched)
            and all(set(k["unequal"]) <= set(k["unequal_inductor"]) for k in launched)
        ),
        "heuristics": sorted({name for kernel in kernels for name in kernel["heuristics"]}),
    }
    for what in ("gpu", "host"):
        made[what] = _geometric(time[f"{what}_ratio"] for time in times) if times else None
        # A module's time is that of all its kernels.
        made[f"{what}_us"] = (
            [
                [
                    sum(parts)
                    for parts in zip(*(time[f"{what}_us"][side] for time in times), strict=True)
                ]
                for side in ("ours", "inductor")
            ]
            if times
            else None
        )
    return made


def _show(result: _Found) -> int:
    """Print the rows; 1 when a target is missed, or there is nothing."""
    for line in result["rows"]:
        print(
            f"{'ok  ' if line['ok'] else 'MISS'}  {line['work']:<76}"
            f" {measurement.shown(line['figure'], line['unit']):>10}  {measurement.target(line)} "
            f" {line['peer']}  {', '.join(line.get('wrong', []))}"
        )
    return 0 if result["rows"] and all(line["ok"] for line in result["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
