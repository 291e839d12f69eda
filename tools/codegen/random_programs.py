# SPDX-License-Identifier: Apache-2.0
"""Random programs through torch.compile, beside eager torch: products, convolutions, attention,
sorts, norms, views, in-place changes, gradients, sizes.

    python -m tools.codegen random-programs --count 5000 --shard 1/4 --results OUT
        on a GPU
    python -m tools.codegen random-programs --device cpu --count 500 --results OUT
        in Triton's interpreter
    python -m tools.codegen random-programs --first SEED --count 1
        one again
    python -m tools.codegen random-programs --merge --results OUT
        the shards as one result
    python -m tools.codegen random-programs --check --results OUT

The programs are those of tests/test_codegen/random_programs.py, which draws, compares and makes
smaller: numbers by the rule of TorchInductor's dashboard against float64, dtype, sizes, strides and
shared memory as eager's.  A failure is printed as Python text, as small as it gets.  Answers are
noted in a journal beside the result as they come; `--resume` asks for the others.
"""

from __future__ import annotations

import collections
import json
import os
import time
from pathlib import Path
from typing import Any

from tools.codegen import bench_rows, worker_pool
from tools.codegen.command_line import parser
from tools.codegen.drawn_candidates import ASKED
from tools.codegen.worker_pool import Answer
from tools.shared import measurement

NAME = "codegen-random-programs"
LEAST = 5000
# Seeds that one answer is about: a process that dies takes no more with it.
_CHUNK = 5
# Progress is told so often.
_TOLD_S = 20.0
Found = dict[str, Any]


def main() -> int:
    """Run all seeds of a shard; 1 when something is wrong."""
    line = parser(
        __doc__,
        "first shard device seconds processes results drawn-candidates resume check",
        device="cuda",
        seconds=500.0,
        processes=os.cpu_count() or 1,
    )
    line.add_argument("--count", type=int, default=LEAST)
    line.add_argument("--no-smaller", action="store_true", help="show failures as drawn")
    line.add_argument("--merge", action="store_true", help="run nothing; merge the shards there")
    options = line.parse_args()
    name = f"{NAME}-{options.device}"
    if options.check:
        return bench_rows.show(json.loads((options.results / f"{name}.json").read_text()))
    if options.merge:
        shards = sorted(options.results.glob(f"{name}.shard-*.json"))
        whole = merged([json.loads(path.read_text()) for path in shards])
        return _save(name, whole, options.results, LEAST)
    number, of = options.shard
    name += f".shard-{number}-of-{of}" if of > 1 else ""
    tasks = _tasks(options.first, options.count, number, of, small=not options.no_smaller)
    os.environ["CODEGEN_BENCH_DEVICE"] = options.device
    if options.drawn_candidates:
        os.environ[ASKED] = "1"
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    options.results.mkdir(parents=True, exist_ok=True)
    journal = options.results / f"{name}.journal"
    if not options.resume:
        journal.unlink(missing_ok=True)
    result = run(tasks, options.processes, options.seconds, journal)
    return _save(name, result, options.results, 0 if of > 1 else LEAST)


def _save(name: str, result: Found, folder: Path, least: int) -> int:
    result["rows"] = rows(result, least)
    measurement.save(name, result, folder)
    return bench_rows.show(result)


def _tasks(
    first: int, count: int, number: int, of: int, *, small: bool
) -> list[tuple[int, int, bool]]:
    chunks = range(first, first + count, _CHUNK)[number - 1 :: of]
    return [(seed, min(_CHUNK, first + count - seed), small) for seed in chunks]


def run(tasks: list[tuple[int, int, bool]], processes: int, seconds: float, journal: Path) -> Found:
    """Return how many programs were right, and what is wrong with the others, by seed; tasks that
    the journal has an answer for are not asked again.
    """
    started = told = time.monotonic()
    answers = worker_pool.noted(journal, "task")
    waiting = [task for task in tasks if task not in answers]

    def tell(task: Any, answer: Answer) -> None:
        nonlocal told
        answers[task] = answer
        worker_pool.note(journal, "task", task, answer)
        for seed, (problem, text) in _wrong(task, answer).items():
            print(
                f"{time.monotonic() - started:6.1f} s  seed {seed}: {problem}\n{text}", flush=True
            )
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            print(
                f"{told - started:6.1f} s  {len(answers)} of {len(tasks)} answers, {_CHUNK}"
                " programs each",
                flush=True,
            )

    sides = "tools.codegen.random_program_sides"
    worker_pool.answered(sides, "compare", waiting, processes, seconds, tell)
    known = [(task, answers[task]) for task in tasks if task in answers]
    parts = [{**answer, "wrong": _wrong(task, answer)} for task, answer in known]
    late = [list(task[:2]) for task in tasks if task not in answers]
    return _summed(parts, late, time.monotonic() - started)


def _summed(parts: list[Found], late: list[Any], seconds: float) -> Found:
    """Return the result that answers, or shards, have together."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: dict[str, Any] = {}
    for part in parts:
        counts.update(part.get("counts", {}))
        wrong |= part["wrong"]
    return {
        "counts": dict(counts),
        "wrong": wrong,
        "late": late,
        "kinds": kinds(wrong),
        "seconds": round(seconds, 1),
    }


def _wrong(task: tuple[int, int, bool], answer: Answer) -> dict[str, Any]:
    if "error" in answer:
        return {f"{task[0]} to {task[0] + task[1] - 1}": [answer["error"], ""]}
    found: dict[str, Any] = answer.get("wrong", {})
    return found


def kinds(wrong: Found) -> dict[str, int]:
    """Return how many programs fail in each way, which the first word of a problem says."""
    return dict(collections.Counter(problem.partition(":")[0] for problem, _ in wrong.values()))


def merged(shards: list[Found]) -> Found:
    """Return results of several shards as one, beside the facts of the first one's machine."""
    facts = {name: shards[0][name] for name in measurement.facts() if name in shards[0]}
    late = [late for shard in shards for late in shard["late"]]
    return facts | _summed(shards, late, sum(shard["seconds"] for shard in shards))


def rows(result: Found, least: int) -> list[Found]:
    """Return what `--check` shows; `least` is how many programs there have to be."""
    counts = result["counts"]
    drawn = counts.get("programs", 0)
    return [
        measurement.row(
            "random programs through torch.compile, equal to eager torch's",
            counts.get("right", 0),
            f"of {drawn:,}",
            least=max(least, drawn),
            peer=(
                f"{counts.get('backward', 0):,} with gradients, {counts.get('dynamic', 0):,} at two"
                f" sizes, {counts.get('kernels', 0):,} kernels"
            ),
            wrong=sorted(result["wrong"]),
        ),
        measurement.row(
            "graphs that ran as torch has them",
            counts.get("as torch has it", 0),
            f"of {counts.get('graphs', 0):,}",
            most=0,
            peer="",
        ),
    ]
