# SPDX-License-Identifier: Apache-2.0
"""Simulates a cluster: R ranks that need K kernels at once, against a real Redis server.

    python -m tools.cluster simulation [--check] [--quick] [--bundle FILE] [--processes N] [--results DIR]
    python -m tools.cluster simulation --ranks N --kernels N [--compile-s S] [--host-ranks N] [--group N] [--order O] [--real]
    python -m tools.cluster simulation --document [--check]

The first form measures a plan of points, and writes docs/results/cluster-sim.json.  Ranks are
threads of a few processes, each with a store and connections of its own; a compile is a delay; in
one point real processes compile with Triton for sm_90.  Each point has a fresh server, and goes
through a cold start (nobody has anything, everybody asks, `compile_once` decides) and a warm one
(restore by tag).  Compiles are counted by a second server, commands, bytes and expired leases by
the first one itself, round trips at the sockets.  In two points a process is killed or frozen while
it compiles.  Last, one rank's conversation is replayed on up to 10,000 connections at once.
`--check` exits 1 when a target is missed, and names it.

The second form measures one point of your own and prints it.  The third rewrites the figures in
docs/scaling.md and the plot from the results; with `--check` it writes nothing, and exits 1 when
they are stale.

The kernels are compiled by Triton here, unless a bundle file is given; what is needed beyond 200
are copies under other keys.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.cluster import report
from tools.cluster.kernels import real_kernels
from tools.cluster.points import PHASES, PROCESSES, Herd, Point, defaults, measure, measure_herd
from tools.shared import measurement
from tools.shared.measurement import row, shown, target

NAME = "cluster-sim"
MOST_ROUND_TRIPS = 6
# The holder that is killed or frozen is missed after this time.
SHORT_LEASE_S = 2.0
LEAST_HIT_RATE = 0.95
REAL = Point("real compiles", 4, 20, group=1, restores=False)
GROWTH_KERNELS, GROWTH_RANKS = 25, 100
PLAN = (
    *(Point("growth", ranks, GROWTH_KERNELS) for ranks in (1, 10, 100, 300, 1000)),
    *(Point("growth", GROWTH_RANKS, kernels) for kernels in (1, 10, 50, 100, 200)),
    Point("target", 1000, 200),
    Point("hosts", 96, 200, host_ranks=8, reads=True),
    Point("one by one", 100, 50, group=1, restores=False),
    Point("same order", 200, 10, group=1, order="same", compile_s=0.2, restores=False),
    Point("waiting", 200, 1, compile_s=5.0, restores=False),
    Point("killed", 40, 20, compile_s=1.0, lease_s=SHORT_LEASE_S, fault="kill", restores=False),
    Point("frozen", 40, 20, compile_s=1.0, lease_s=SHORT_LEASE_S, fault="freeze", restores=False),
)
HERDS = (
    *(Herd(ranks) for ranks in (100, 1000, 10000)),
    Herd(10000, backlog=8192),
    *(Herd(ranks, read_only=True) for ranks in (100, 1000)),
    Herd(10000, read_only=True, backlog=8192),
)
HERD_KERNELS = 200
QUICK_PLAN = (
    Point("growth", 8, 6, compile_s=0.05),
    Point("hosts", 8, 6, host_ranks=4, compile_s=0.05, reads=True),
    Point("waiting", 8, 1, compile_s=0.3, restores=False),
    Point("killed", 8, 4, compile_s=0.6, lease_s=0.5, fault="kill", restores=False),
)
QUICK_HERDS = (Herd(20), Herd(20, read_only=True, backlog=1024))


def main() -> int:
    """Measure, or make the document."""
    options = arguments()
    if options.document:
        return document(options)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cluster.") as name:
        if options.ranks:
            point = Point(
                "asked for",
                options.ranks,
                options.kernels,
                options.host_ranks,
                options.group,
                options.order,
                options.compile_s,
                restores=not options.real,
            )
            kernels = (
                None
                if options.real
                else options.bundle or real_kernels(Path(name), options.kernels)
            )
            print(json.dumps(measure(point, kernels, options.processes), indent=1))
            return 0
        most = max(point.kernels for point in (QUICK_PLAN if options.quick else PLAN))
        kernels = options.bundle or real_kernels(Path(name), most)
        result = run(kernels, options)
    result["seconds"] = round(time.monotonic() - started, 1)
    print(report.tables(result))
    print(
        f"written to {measurement.save(NAME, result, options.results)} after {result['seconds']} s"
    )
    missed = [line for line in result["rows"] if not line["ok"]]
    for line in missed:
        print(f"missed: {line['work']}: {shown(line['figure'], line['unit'])}, {target(line)}")
    return 1 if options.check and missed else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when a target is missed, or the document is stale",
    )
    parser.add_argument("--quick", action="store_true", help="a few small points")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="kernels to copy; compiled when not given"
    )
    parser.add_argument(
        "--processes",
        type=_count,
        default=PROCESSES,
        metavar="N",
        help="for the ranks to be threads of",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=measurement.RESULTS,
        metavar="DIR",
        help="where the results are",
    )
    parser.add_argument(
        "--document", action="store_true", help="measure nothing; put the results into the document"
    )
    parser.add_argument(
        "--page", type=Path, default=report.PAGE, metavar="FILE", help="the document"
    )
    own = parser.add_argument_group("one point of your own")
    own.add_argument("--ranks", type=_count, metavar="N", help="how many ranks")
    own.add_argument(
        "--kernels",
        type=_count,
        default=GROWTH_KERNELS,
        metavar="N",
        help="that each of them needs",
    )
    own.add_argument(
        "--compile-s",
        type=float,
        default=Point.compile_s,
        metavar="S",
        help="what a simulated compile takes",
    )
    own.add_argument(
        "--host-ranks",
        type=int,
        default=0,
        metavar="N",
        help="ranks that share a near directory; 0: none do",
    )
    own.add_argument(
        "--group",
        type=_count,
        default=Point.group,
        metavar="N",
        help="kernels that are looked up together",
    )
    own.add_argument(
        "--order",
        choices=("spread", "same"),
        default=Point.order,
        help="in which ranks want their kernels",
    )
    own.add_argument(
        "--real", action="store_true", help="compile with Triton, one process for each rank"
    )
    options = parser.parse_args()
    if options.bundle and not options.bundle.is_file():
        parser.error(f"there is no file {options.bundle}")
    if options.real and not options.ranks:
        parser.error("--real is for one point of your own: say how many ranks with --ranks")
    if options.real:
        options.processes = options.ranks
    return options


def run(kernels: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the plan."""
    points = []
    for point in QUICK_PLAN if options.quick else PLAN:
        print(
            f"{point.name}: {point.ranks} ranks, {point.kernels} kernels",
            file=sys.stderr,
            flush=True,
        )
        points.append(measure(point, kernels, options.processes))
    if not options.quick:
        print("real compiles", file=sys.stderr, flush=True)
        points.append(measure(REAL, None, REAL.ranks))
    herds = []
    count = QUICK_PLAN[0].kernels if options.quick else HERD_KERNELS
    for one in QUICK_HERDS if options.quick else HERDS:
        print(
            f"{one.ranks} ranks in one moment{' that only read' * one.read_only}",
            file=sys.stderr,
            flush=True,
        )
        herds.append(measure_herd(one, kernels, count))
    return {"points": points, "herds": herds, "defaults": defaults(), "rows": rows(points)}


def rows(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each target."""
    found = []
    for point in points:
        what = f"{point['name']}: {point['ranks']} ranks, {point['kernels']} kernels"
        cold = point["cold"]
        expired = cold["expired"]
        found += [
            row(
                f"{what}: compiles beside the first, with {expired} leases expired",
                cold["duplicates"],
                "",
                most=expired,
            ),
            row(f"{what}: kernels that nobody compiled", cold["not_compiled"], "", most=0),
            row(
                f"{what}: ranks that met an error",
                sum(point[phase]["error_count"] for phase in PHASES if phase in point),
                "",
                most=0,
            ),
        ]
        if point["fault"]:
            how = cold["how"]
            hits = sum(how.get(name, 0) for name in ("found together", "found", "waited"))
            asked = hits + how.get("compiled", 0) + how.get("late", 0)
            found += [
                row(f"{what}: leases that expired", expired, "", least=1),
                row(
                    f"{what}: hits of the living, of what was compiled before",
                    hits / (asked - point["kernels"]),
                    "",
                    least=LEAST_HIT_RATE,
                ),
            ]
        found += [
            row(
                f"{what}: round trips of a {phase} rank",
                point[phase]["round_trips"] / point["ranks"],
                "",
                most=MOST_ROUND_TRIPS,
            )
            for phase in PHASES[1:]
            if phase in point
        ]
    return found


def document(options: argparse.Namespace) -> int:
    """Rewrite the document and the plot, or say whether they are stale."""
    result = json.loads((options.results / f"{NAME}.json").read_text())
    try:
        page = report.filled(options.page.read_text(), result)
    except ValueError as error:
        print(f"{options.page}: {error}", file=sys.stderr)
        return 1
    plot = options.results / f"{NAME}.svg"
    for path, text in ((options.page, page), (plot, report.plot(result))):
        if not options.check:
            path.write_text(text)
            print(f"written to {path}")
        elif not path.exists() or path.read_text() != text:
            print(f"{path} is stale: run python -m tools.cluster simulation --document")
            return 1
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number
