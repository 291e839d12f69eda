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
from tools.cluster.points import (
    PHASES,
    PROCESSES,
    Herd,
    Point,
    defaults,
    measure,
    measure_herd,
    real_kernels,
)
from tools.shared import measurement, programs
from tools.shared.measurement import row

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
_SETTINGS = ("ranks", "kernels", "host_ranks", "group", "order", "compile_s")
QUICK_HERDS = (Herd(20), Herd(20, read_only=True, backlog=1024))


def main() -> int:
    """Measure, or make the document."""
    options = arguments()
    if options.document:
        return document(options)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cluster.") as name:
        if options.ranks:
            found = measure_one(options, Path(name))
            print(json.dumps(found, indent=1))
            return 0
        most = max(point.kernels for point in (QUICK_PLAN if options.quick else PLAN))
        kernels = options.bundle or real_kernels(Path(name), most)
        result = run(kernels, options)
    result["seconds"] = round(time.monotonic() - started, 1)
    print(report.tables(result))
    path = measurement.save(NAME, result, options.results)
    print(f"written to {path} after {result['seconds']} s")
    missed = [line for line in result["rows"] if not line["ok"]]
    measurement.missed(missed)
    return 1 if options.check and missed else 0


def measure_one(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a point of one's own."""
    settings = {name: getattr(options, name) for name in _SETTINGS}
    point = Point("asked for", **settings, restores=not options.real)
    kernels = None
    if not options.real:
        kernels = options.bundle or real_kernels(folder, options.kernels)
    return measure(point, kernels, options.processes)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    own = "one point of your own: "
    parser = programs.parser(
        __doc__,
        check=(False, "exit 1 when a target is missed, or the document is stale"),
        quick=(False, "a few small points"),
        bundle=(Path, "kernels to copy; compiled when not given"),
        processes=(PROCESSES, "for the ranks to be threads of"),
        results=(measurement.RESULTS, "where the results are"),
        document=(False, "measure nothing; put the results into the document"),
        page=(report.PAGE, "the document"),
        ranks=(int, f"{own}how many ranks"),
        kernels=(GROWTH_KERNELS, f"{own}that each of them needs"),
        compile_s=(Point.compile_s, f"{own}what a simulated compile takes"),
        host_ranks=(0, f"{own}ranks that share a near directory; 0: none do"),
        group=(Point.group, f"{own}kernels that are looked up together"),
        real=(False, f"{own}compile with Triton, one process for each rank"),
    )
    orders = ("spread", "same")
    parser.add_argument("--order", choices=orders, default=Point.order, help=f"{own}of kernels")
    options = parser.parse_args()
    for name in ("processes", "ranks", "kernels", "group"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name}: {given}: expected 1 or more")
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
        _say(f"{point.name}: {point.ranks} ranks, {point.kernels} kernels")
        points.append(measure(point, kernels, options.processes))
    if not options.quick:
        _say("real compiles")
        points.append(measure(REAL, None, REAL.ranks))
    herds = []
    count = QUICK_PLAN[0].kernels if options.quick else HERD_KERNELS
    for one in QUICK_HERDS if options.quick else HERDS:
        _say(f"{one.ranks} ranks in one moment{' that only read' * one.read_only}")
        herds.append(measure_herd(one, kernels, count))
    return {"points": points, "herds": herds, "defaults": defaults(), "rows": rows(points)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each target."""
    found = []
    for point in points:
        what = f"{point['name']}: {point['ranks']} ranks, {point['kernels']} kernels"
        cold = point["cold"]
        expired = cold["expired"]
        errors = sum(point[phase]["error_count"] for phase in PHASES if phase in point)
        again = f"{what}: compiles beside the first, with {expired} leases expired"
        found += [
            row(again, cold["duplicates"], "", most=expired),
            row(f"{what}: kernels that nobody compiled", cold["not_compiled"], "", most=0),
            row(f"{what}: ranks that met an error", errors, "", most=0),
        ]
        if point["fault"]:
            how = cold["how"]
            hits = sum(how.get(name, 0) for name in ("found together", "found", "waited"))
            asked = hits + how.get("compiled", 0) + how.get("late", 0)
            rate, living = hits / (asked - point["kernels"]), "hits of the living"
            before = f"{what}: {living}, of what was compiled before"
            found += [
                row(f"{what}: leases that expired", expired, "", least=1),
                row(before, rate, "", least=LEAST_HIT_RATE),
            ]
        for phase in PHASES[1:]:
            if phase in point:
                trips = point[phase]["round_trips"] / point["ranks"]
                name = f"{what}: round trips of a {phase} rank"
                found.append(row(name, trips, "", most=MOST_ROUND_TRIPS))
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
        program = "tools.cluster simulation --document"
        if measurement.write_page(path, text, program, check=options.check):
            return 1
    return 0
