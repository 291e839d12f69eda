# SPDX-License-Identifier: Apache-2.0
"""Random functions at real sizes on a GPU: generated kernels against torch, in its own dtypes and
in float64; writes docs/results/codegen-random.json.

    python -m tools.codegen random-graphs --count 2000 --small 500 --results OUT
    python -m tools.codegen random-graphs --first SEED --count 1                   one again
    python -m tools.codegen random-graphs --again --results OUT                    those that the result says are wrong, after a change
    python -m tools.codegen random-graphs --check

The functions are those of tests/test_codegen/random_graphs.py, which draws, compares and makes
smaller: here with sizes around powers of two and up to two million elements, then the small ones
that the tests run in Triton's interpreter.  A failure is printed with its seed and as small as it
gets.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tools.codegen import bench_rows
from tools.codegen.worker_pool import Answer, WorkerPool
from tools.shared import measurement

NAME = "codegen-random"
PROCESSES = 16
LEAST_LARGE, LEAST_SMALL = 2000, 500
# What was measured as wrong, and is not: the judge allows it since.
EXPLAINED = {
    "large 1070": (
        "a product and a difference in one instruction leave the rounding error of the product,"
        " which layer_norm divides by the root of its epsilon; infinities beside it hid from the"
        " judge that the row has no variance"
    ),
}
# Seeds that one answer is about.
_CHUNK = 10
Found = dict[str, Any]


def main() -> int:
    """Run all seeds; 1 when something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=LEAST_LARGE, help="functions at real sizes")
    parser.add_argument("--small", type=int, default=0, help="functions at the sizes of the tests")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="begin nothing new after so long"
    )
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--results", type=Path, default=measurement.RESULTS)
    parser.add_argument(
        "--again", action="store_true", help="only what was wrong; the result is completed by it"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing; exit 1 when the result misses a target"
    )
    options = parser.parse_args()
    if options.check:
        return bench_rows.show(json.loads((options.results / f"{NAME}.json").read_text()))
    if options.again:
        return again(options.results, options.processes, options.seconds)
    tasks = [
        *_tasks("large", options.first, options.count),
        *_tasks("small", options.first, options.small),
    ]
    result = run(tasks, options.processes, options.seconds)
    result["rows"] = rows(result)
    measurement.save(NAME, result, options.results)
    return bench_rows.show(result)


def again(folder: Path, processes: int, seconds: float) -> int:
    """Run what was wrong once more, and put what came of it into the result, which keeps the commit
    of the first run.
    """
    result = json.loads((folder / f"{NAME}.json").read_text())
    names = sorted(result["wrong"])
    found = run([(name.split()[0], int(name.split()[1]), 1) for name in names], processes, seconds)
    for scale, counts in found["counts"].items():
        # The first run counted these functions, and of what is wrong nothing else.
        for what in ("right", "kernels", "elements", "calls"):
            result["counts"][scale][what] += counts[what]
    first = {"commit": result.pop("commit", None), "wrong": result["wrong"]}
    result |= {"wrong": found["wrong"], "late": found["late"], "first": first}
    result["rows"] = rows(result)
    measurement.save(NAME, result | measurement.facts(), folder)
    return bench_rows.show(result)


Task = tuple[str, int, int]


def _tasks(scale: str, first: int, count: int) -> list[Task]:
    return [
        (scale, seed, min(_CHUNK, first + count - seed))
        for seed in range(first, first + count, _CHUNK)
    ]


def run(tasks: list[Task], processes: int, seconds: float) -> Found:
    """Return how many functions were right by scale, and what is wrong with the others, by seed."""
    started = time.monotonic()
    counts: dict[str, dict[str, int]] = {}
    wrong: dict[str, Any] = {}

    def tell(task: Task, answer: Answer) -> None:
        for name, number in answer.get("counts", {}).items():
            counts.setdefault(task[0], {})[name] = (
                counts.setdefault(task[0], {}).get(name, 0) + number
            )
        found = (
            answer.get("wrong", {})
            if "error" not in answer
            else {f"{task[1]} to {task[1] + task[2] - 1}": answer["error"]}
        )
        for seed, problem in found.items():
            wrong[f"{task[0]} {seed}"] = problem
            print(
                f"{time.monotonic() - started:6.1f} s  {task[0]} seed {seed}: {problem}"[:1500],
                flush=True,
            )

    pool = WorkerPool("tools.codegen.random_sides", min(processes, len(tasks)))
    try:
        answers = pool.answers("compare", tasks, seconds, tell)
    finally:
        pool.close()
    late = [task for task in tasks if "not done" in answers[task].get("error", "")]
    return {
        "counts": counts,
        "wrong": wrong,
        "late": late,
        "seconds": round(time.monotonic() - started, 1),
    }


def rows(result: Found) -> list[Found]:
    """Return what the page and `--check` show."""
    return [
        measurement.row(
            f"random functions {words}, equal to torch's",
            result["counts"].get(scale, {}).get("right", 0),
            f"of {result['counts'].get(scale, {}).get('graphs', 0):,}",
            least=max(least, result["counts"].get(scale, {}).get("graphs", 0))
            - _explained(result, scale),
            peer=(
                f"{result['counts'].get(scale, {}).get('kernels', 0):,} kernels,"
                f" {result['counts'].get(scale, {}).get('elements', 0) / 1e6:,.0f} M numbers"
            ),
            wrong=sorted(name for name in result["wrong"] if name.startswith(scale)),
        )
        for scale, words, least in (
            ("large", "at real sizes", LEAST_LARGE),
            ("small", "of the tests", LEAST_SMALL),
        )
        if scale in result["counts"] or scale == "large"
    ]


def _explained(result: Found, scale: str) -> int:
    return sum(name.startswith(scale) for name in EXPLAINED if name in result["wrong"])


def section(result: Found) -> str:
    """Return the section of the page."""
    lines = [
        [
            row["work"],
            measurement.shown(row["figure"], row["unit"]),
            row["peer"],
            measurement.target(row),
        ]
        for row in result["rows"]
    ]
    head = ["what", "figure", "beside it", "target"]
    table = "\n".join(f"| {' | '.join(one)} |" for one in (head, ["---"] * len(head), *lines))
    about = (
        "`python -m tools.codegen random-graphs`. Functions drawn from seeds, up to eight"
        " operators, all dtypes and layouts, sizes 0, 1 and around powers of two; floats off by no"
        " more than twice what torch's own are from float64, all else exact."
    )
    known = "".join(
        f"\n{name}: {reason}.\n" for name, reason in EXPLAINED.items() if name in result["wrong"]
    )
    return f"## Random functions on a GPU\n\n{about}\n\n{table}\n{known}"
