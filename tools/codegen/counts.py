# SPDX-License-Identifier: Apache-2.0
"""Generates the kernels of 44 graphs, and lets Inductor generate them too, without a GPU: writes docs/results/codegen-counts.json.

    python -m tools.codegen counts [NAME ...]

A row has, for both, the launches and calls of operators of one run, and of each kernel its size hints, the dimensions without a mask (`full`), the types
of its parameters, how many of these are not known to be multiples of 16, and how many are known to be 1.  Where both launch kernels of the same sizes, what differs between these is named.
Exit status 1 when we launch more kernels than Inductor for a graph that `EXPLAINED` does not name, or no longer for one that it does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.codegen.compared_graphs import GRAPHS
from tools.codegen.inductor_kernels import of_inductor, of_ours
from tools.shared import measurement

RESULT = "codegen-counts"
Row = dict[str, Any]
# Graphs for which we launch more kernels, and why.
EXPLAINED: Mapping[str, str] = {}
# Graphs with a kernel of the same sizes as Inductor's and other parameters, and why.
OTHER_PARAMETERS: Mapping[str, str] = {
    "joined": "one kernel reads every part; Inductor writes each part in a kernel of its own",
    "softmax_looped": "nobody reads the maxima and the sums, so they are not stored",
    "group_norm_backward": "what belongs to a group is computed again for its elements; Inductor stores some of it before",
    "rotary": "both halves are read where they are needed; Inductor joins them in memory before",
    "adamw": "moments and parameters are changed where they are; Inductor reads and writes them as two parameters",
}
_COMPARED = ("full", "unaligned", "ones", "types")


def main() -> int:
    """Count, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="graphs; without one all, whose result is written"
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where the result is written"
    )
    options = parser.parse_args()
    unknown = set(options.names) - GRAPHS.keys()
    if unknown:
        parser.error(
            f"no graph is called {', '.join(sorted(unknown))}; there are {', '.join(GRAPHS)}"
        )
    rows = [row_of(name) for name in options.names or GRAPHS]
    wrong = unexplained(rows)
    for row in rows:
        print(
            f"{row['graph']:<24} {row['ours']['launches']:>2} {row['inductor']['launches']:>2}  {'; '.join(row['differs'])}"
        )
    for line in wrong:
        print(line)
    if not options.names:
        print(f"wrote {measurement.save(RESULT, {'rows': rows}, options.results)}")
    return 1 if wrong else 0


def row_of(name: str) -> Row:
    """Return what both make of a graph."""
    function, make = GRAPHS[name]
    ours, theirs = of_ours(function, make()), of_inductor(function, make())
    row: Row = {
        "graph": name,
        "ours": ours,
        "inductor": theirs,
        "differs": differences(ours, theirs),
    }
    for side in (ours, theirs):
        side["launches"] = len(side["kernels"])
    if name in OTHER_PARAMETERS:
        row["parameters"] = OTHER_PARAMETERS[name]
    if name in EXPLAINED:
        row["explained"] = EXPLAINED[name]
    return row


def differences(ours: Row, theirs: Row) -> list[str]:
    """Return what differs between kernels of one kind and one size, where each side has one such kernel."""
    found = []
    for kernel in ours["kernels"]:
        same = [[k for k in side["kernels"] if _key(k) == _key(kernel)] for side in (ours, theirs)]
        if list(map(len, same)) != [1, 1]:
            continue
        other = same[1][0]
        found += [
            f"{kernel['kind']} {_sizes(kernel)}: {name} {kernel[name]}, Inductor {other[name]}"
            for name in _COMPARED
            if kernel[name] != other[name]
        ]
    return found


def unexplained(rows: list[Row]) -> list[str]:
    """Return what is wrong: more kernels than Inductor has without a reason, or a reason where there are not more."""
    found = []
    for row in rows:
        more = row["ours"]["launches"] - row["inductor"]["launches"]
        if more > 0 and row["graph"] not in EXPLAINED:
            found.append(f"{row['graph']}: {more} more launches than Inductor")
        if more <= 0 and row["graph"] in EXPLAINED:
            found.append(
                f"{row['graph']}: not more launches than Inductor; take the graph out of EXPLAINED"
            )
    return found


def _key(kernel: Row) -> tuple[str, str]:
    return kernel["kind"], _sizes(kernel)


def _sizes(kernel: Row) -> str:
    return " ".join(f"{prefix}={size}" for prefix, size in sorted(kernel["size_hints"].items()))


if __name__ == "__main__":
    sys.exit(main())
