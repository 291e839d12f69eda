# SPDX-License-Identifier: Apache-2.0
"""Random functions at real sizes on a GPU: generated kernels against torch, in its own dtypes and
in float64; writes docs/results/codegen-random.json.

    python -m tools.codegen random-graphs --count 2000 --small 500 --results OUT
    python -m tools.codegen random-graphs --first SEED --count 1
        one again
    python -m tools.codegen random-graphs --check

The functions are those of tests/test_codegen/random_graphs.py, which draws, compares and makes
smaller: here with sizes around powers of two and up to two million elements, then the small ones
that the tests run in Triton's interpreter.  A failure is printed with its seed and as small as it
gets.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from tools.codegen import bench_rows
from tools.codegen.command_line import parser
from tools.codegen.worker_pool import Answer, answered
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
    line = parser(
        __doc__,
        "first seconds processes results check",
        seconds=300.0,
        processes=PROCESSES,
    )
    line.add_argument("--count", type=int, default=LEAST_LARGE, help="functions at real sizes")
    line.add_argument("--small", type=int, default=0, help="functions at the sizes of the tests")
    options = line.parse_args()
    if options.check:
        return bench_rows.show(json.loads((options.results / f"{NAME}.json").read_text()))
    tasks = [
        *_tasks("large", options.first, options.count),
        *_tasks("small", options.first, options.small),
    ]
    result = run(tasks, options.processes, options.seconds)
    result["rows"] = rows(result)
    measurement.save(NAME, result, options.results)
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
    counts: dict[str, Counter[str]] = {}
    wrong: dict[str, Any] = {}

    def tell(task: Task, answer: Answer) -> None:
        scale, first, count = task
        counts.setdefault(scale, Counter()).update(answer.get("counts", {}))
        found = answer.get("wrong", {})
        if "error" in answer:
            found = {f"{first} to {first + count - 1}": answer["error"]}
        for seed, problem in found.items():
            wrong[f"{scale} {seed}"] = problem
            seconds = time.monotonic() - started
            print(f"{seconds:6.1f} s  {scale} seed {seed}: {problem}"[:1500], flush=True)

    sides = "tools.codegen.random_sides"
    answers = answered(sides, "compare", tasks, processes, seconds, tell)
    late = [task for task in tasks if "not done" in answers[task].get("error", "")]
    return {
        "counts": counts,
        "wrong": wrong,
        "late": late,
        "seconds": round(time.monotonic() - started, 1),
    }


def rows(result: Found) -> list[Found]:
    """Return what the page and `--check` show."""
    found = []
    for scale, words, least in (
        ("large", "at real sizes", LEAST_LARGE),
        ("small", "of the tests", LEAST_SMALL),
    ):
        counts = Counter(result["counts"].get(scale, {}))
        if counts or scale == "large":
            graphs, kernels, millions = (
                counts["graphs"],
                counts["kernels"],
                counts["elements"] / 1e6,
            )
            row = measurement.row(
                f"random functions {words}, equal to torch's",
                counts["right"],
                f"of {graphs:,}",
                least=max(least, graphs) - _explained(result, scale),
                peer=f"{kernels:,} kernels, {millions:,.0f} M numbers",
                wrong=sorted(name for name in result["wrong"] if name.startswith(scale)),
            )
            found.append(row)
    return found


def _explained(result: Found, scale: str) -> int:
    return sum(name.startswith(scale) for name in EXPLAINED if name in result["wrong"])


def section(result: Found) -> str:
    """Return the section of the page."""
    about = (
        "`python -m tools.codegen random-graphs`. Functions drawn from seeds, up to eight"
        " operators, all dtypes and layouts, sizes 0, 1 and around powers of two; floats off by no"
        " more than twice what torch's own are from float64, all else exact."
    )
    known = "".join(
        f"\n{name}: {reason}.\n" for name, reason in EXPLAINED.items() if name in result["wrong"]
    )
    table = bench_rows.rows_table(result["rows"])
    return f"## Random functions on a GPU\n\n{about}\n\n{table}{known}"
