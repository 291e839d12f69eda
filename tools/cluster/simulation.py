# SPDX-License-Identifier: Apache-2.0
"""Simulates a cluster: R ranks that need K kernels at once, against a real Redis server.

    python -m tools.cluster simulation [--check] [--quick] [--bundle FILE] [--processes N] [--results DIR]
    python -m tools.cluster simulation --ranks N --kernels N [--compile-s S] [--host-ranks N]
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
import array
import contextlib
import json
import math
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tools.cluster import report
from tools.cluster.ranks import PHASES, TAG, Job
from tools.shared import kernel_copies, kernel_variants, measurement, programs
from tools.shared.measurement import row
from tools.shared.processes import Helper
from tools.shared.redis_server import CompileLog, Meter, Server, running

NAME = "cluster-sim"
MOST_ROUND_TRIPS = 6
# The holder that is killed or frozen is missed after this time.
SHORT_LEASE_S = 2.0
LEAST_HIT_RATE = 0.95
RANKS, REPLAY = "tools.cluster.ranks", "tools.cluster.replay"
PROCESSES, MOST_COMPILED = 4, 200
# Here a thousand ranks share a few cores, and wait for each other as they never would: no time-out
# is to come of that.
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
# How often we look whether compiles have begun, and for how long.
LOOK_S, HARM_S = 0.01, 60.0
# After this time a rank of a herd that has not been answered has failed.
ANSWER_S = 90.0


@dataclass(frozen=True)
class Point:
    """What is simulated.

    Attributes:
        name: tells points apart.
        ranks, kernels: how many.
        host_ranks: how many ranks make a host with a near directory; 0 for none.
        group, order: see `ranks.Job`.
        compile_s: what a compile takes on average.
        lease_s: for how long a holder counts as alive.
        fault: what happens to one of the processes in the middle of its compiles: it is killed, or
            frozen past its leases.
        restores: also restore by tag.
        reads: and once more with `readonly=1`, on other hosts.
    """

    name: str
    ranks: int
    kernels: int
    host_ranks: int = 0
    group: int = 25
    order: Literal["spread", "same"] = "spread"
    compile_s: float = 0.5
    lease_s: float = 15.0
    fault: Literal["", "kill", "freeze"] = ""
    restores: bool = True
    reads: bool = False


@dataclass(frozen=True)
class Herd:
    """Ranks that restore in the same moment.

    Attributes:
        ranks: how many connections.
        read_only: they open the store with `readonly=1`, and so mark nothing as used.
        backlog: the server's `tcp-backlog`; 0 for what is deployed.
    """

    ranks: int
    read_only: bool = False
    backlog: int = 0


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
_SETTINGS = ("ranks", "kernels", "host_ranks", "compile_s")
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
    kernels = options.bundle or real_kernels(folder, options.kernels)
    return measure(Point("asked for", **settings), kernels, options.processes)


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
    )
    options = parser.parse_args()
    for name in ("processes", "ranks", "kernels"):
        if (given := getattr(options, name)) is not None and given < 1:
            parser.error(f"--{name}: {given}: expected 1 or more")
    if options.bundle and not options.bundle.is_file():
        parser.error(f"there is no file {options.bundle}")
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


def measure(point: Point, kernels: Path | None, processes: int = PROCESSES) -> dict[str, Any]:
    """Run a point and return its row: its own settings, and what its phases took and cost.

    Args:
        point: what to run.
        kernels: the bundle file that stand-ins are made from; None for real compiles.
        processes: how many processes the ranks are spread over.
    """
    row: dict[str, Any] = {**asdict(point), "processes": processes, "real": kernels is None}
    with (
        tempfile.TemporaryDirectory(prefix="cluster.", dir=measurement.fast_directory()) as name,
        running() as store,
    ):
        bundle = Path(name, "kernels.tbundle")
        if kernels is not None:
            make_stand_ins(kernels, point.kernels, bundle)
        with running() as other:
            compile_log = CompileLog(other)
            counts = (point.ranks, point.kernels, point.host_ranks, point.group, point.order)
            file = "" if kernels is None else str(bundle)
            places = (store.url(**PATIENT), other.address, file, name, "")
            job = Job("cold", [], *counts, *places, point.compile_s, point.lease_s)
            row["cold"] = _phase(job, point, store, _shared_out(job, processes), compile_log)
            compiles = compile_log.compiles()
        row["cold"] |= {
            "compiles": sum(compiles.values()),
            "duplicates": sum(compiles.values()) - len(compiles),
            "not_compiled": point.kernels - len(compiles),
        }
        if point.restores:
            # What was published one by one is not what a push makes of a bundle.
            store.admin.flushall()
            _push(store, bundle)
        for phase in PHASES[1 : 1 + point.restores + point.reads]:
            # New hosts, with nothing near.
            Path(name, phase).mkdir()
            url = store.url(**PATIENT, readonly=int(phase == "reading"))
            again = replace(job, phase="warm", url=url, folder=str(Path(name, phase)))
            row[phase] = _phase(again, point, store, _shared_out(again, processes), None)
    return row


def measure_herd(herd: Herd, kernels: Path, count: int) -> dict[str, Any]:
    """Let one rank restore, and then a herd say what it said; returns what they waited for.

    Args:
        herd: who.
        kernels: the bundle file that stand-ins are made from.
        count: how many kernels.
    """
    folder = tempfile.TemporaryDirectory(prefix="cluster.", dir=measurement.fast_directory())
    settings = ["--maxclients", str(herd.ranks + 100)]
    settings += ["--tcp-backlog", str(herd.backlog)] if herd.backlog else []
    with folder as name, running(*settings) as store:
        bundle = Path(name, "kernels.tbundle")
        make_stand_ins(kernels, count, bundle)
        _push(store, bundle)
        places = (store.url(**PATIENT, readonly=int(herd.read_only)), store.address, str(bundle))
        turns = _recorded(Job("warm", [0], 1, count, 0, 1, "same", *places, name, "", 0.0, 1.0))
        meter = Meter(store)
        replay = Helper(REPLAY)
        job = {"port": store.port, "turns": turns, "ranks": herd.ranks, "limit_s": ANSWER_S}
        found, work = replay.ask(job), meter.stop()
        replay.close()
    waits = sorted(found.pop("waits_s"))
    return {
        **asdict(herd),
        "kernels": count,
        "round_trips": len(turns),
        "longest_answer_bytes": max(size for _, size in turns),
        "waits_s": {name: _percentile(waits, percent) for name, percent in PERCENTILES.items()},
        **found,
        **work,
    }


def _recorded(job: Job) -> list[tuple[str, int]]:
    """Return what a rank says to a server that knows our scripts, which the first rank tells it."""
    record = Path(job.folder, "turns")
    for name in ("", str(record)):
        own = replace(job, samples=str(Path(job.folder, "samples")), record=name)
        with _started([own]) as (process,):
            if process.ask(None)["error_count"]:
                raise RuntimeError("the rank whose conversation was to be recorded failed")
    turns: list[tuple[str, int]] = json.loads(record.read_text())
    return turns


def defaults() -> dict[str, Any]:
    """Return what holds unless somebody sets something else, of our server files and of our
    URLs.
    """
    from bundler.backends.redis import server_connections, url_settings

    with running() as store:
        # One by one: servers before 7.0 answer no more.
        said = {
            name: int(store.admin.config_get(name)[name])
            for name in ("maxclients", "maxmemory", "tcp-backlog")
        }
        version = store.admin.info("server")["redis_version"]
    return {
        "maxclients": said["maxclients"],
        "maxmemory_bytes": said["maxmemory"],
        "tcp_backlog": said["tcp-backlog"],
        "redis": version,
        "timeout_s": url_settings.DEFAULT_TIMEOUT_S,
        "bytes_per_s": server_connections.BYTES_PER_S,
    }


def real_kernels(folder: Path, count: int) -> Path:
    """Compile so many kernels for sm_90 with Triton, `MOST_COMPILED` at most; returns a bundle
    file.
    """
    import bundler

    path = folder / "real.tbundle"
    with bundler.pack(kernel_variants.cache_of(min(count, MOST_COMPILED), folder)) as bundle:
        bundle.save(path)
    return path


def make_stand_ins(source: Path, count: int, path: Path) -> None:
    """Write a bundle of `count` kernels made from the CUDA kernels of a bundle file."""
    import bundler

    blobs: dict[bytes, bytes] = {}
    with bundler.Bundle.load(source) as bundle:
        kernels = [kernel for kernel in bundle.kernels if kernel.target.backend == "cuda"]
        if not kernels:
            raise RuntimeError(f"{source} has no kernel for CUDA to make stand-ins from")
        made = [
            kernel_copies.copy_of(bundle, kernels[number % len(kernels)], number, blobs)
            for number in range(count)
        ]
    kernel_copies.save(made, blobs, path)


def _push(store: Server, bundle: Path) -> None:
    import bundler

    with bundler.Bundle.load(bundle) as made, bundler.open_store(store.url(**PATIENT)) as opened:
        opened.push(made, tag=TAG)


def _shared_out(job: Job, processes: int) -> list[Job]:
    """Return a job for each process."""
    return [
        replace(job, ranks=ranks, samples=str(Path(job.folder, f"samples{number}")))
        for number, ranks in enumerate(_shares(job, min(processes, job.of)))
    ]


def _phase(
    job: Job,
    point: Point,
    store: Server,
    jobs: list[Job],
    compile_log: CompileLog | None,
) -> dict[str, Any]:
    with _started(jobs) as started:
        meter = Meter(store)
        began = time.monotonic()
        for process in started:
            process.tell(None)
        harmed = None
        if compile_log and point.fault:
            harmed = _harm(started, [own.ranks for own in jobs], point, compile_log)
        answers = [
            process.hear()
            for process in started
            if process is not harmed or point.fault == "freeze"
        ]
        work = meter.stop()
    waits = array.array("f")
    for path in sorted(Path(job.folder).glob("samples*")):
        waits.frombytes(path.read_bytes())
        path.unlink()
    return _summary(answers, sorted(waits), work, began)


@contextlib.contextmanager
def _started(jobs: list[Job]) -> Iterator[list[Helper]]:
    """Start processes and wait until all their ranks are ready."""
    started: list[Helper] = []
    try:
        for job in jobs:
            started.append(Helper(RANKS))
            started[-1].tell(asdict(job))
        for process in started:
            process.hear()
        yield started
    finally:
        for process in started:
            process.process.kill()
            process.close()


def _shares(job: Job, processes: int) -> Iterator[list[int]]:
    """Split the ranks among processes, those of one host together."""
    width = max(1, job.host_ranks)
    hosts = math.ceil(job.of / width)
    for number in range(processes):
        first, last = (hosts * end // processes * width for end in (number, number + 1))
        if first < min(last, job.of):
            yield list(range(first, min(last, job.of)))


def _harm(
    started: Sequence[Helper],
    shares: Sequence[list[int]],
    point: Point,
    compile_log: CompileLog,
) -> Helper:
    """Kill or freeze the first process that compiles, in the middle of it."""
    until_s = time.monotonic() + HARM_S
    while not (compiling := compile_log.ranks()):
        if time.monotonic() > until_s:
            raise RuntimeError(f"nobody compiled anything for {HARM_S:.0f} s")
        time.sleep(LOOK_S)
    victim = next(
        process for process, ranks in zip(started, shares, strict=True) if compiling[0] in ranks
    )
    if point.fault == "kill":
        victim.process.kill()
    else:
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(point.lease_s * 1.5)
        victim.process.send_signal(signal.SIGCONT)
    return victim


def _summary(
    answers: list[dict[str, Any]], waits: list[float], work: dict[str, Any], began: float
) -> dict[str, Any]:
    return {
        "seconds": max(answer["done_at_s"] for answer in answers) - began,
        "waits_s": {name: _percentile(waits, percent) for name, percent in PERCENTILES.items()},
        "how": dict(sum((Counter(answer["how"]) for answer in answers), Counter())),
        "round_trips": sum(answer["round_trips"] for answer in answers),
        "errors": [error for answer in answers for error in answer["errors"]],
        "error_count": sum(answer["error_count"] for answer in answers),
        **work,
    }


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the least sample that so many percent are not above; 0 when there is none."""
    place = max(0, math.ceil(len(ordered) * percent / 100) - 1)
    return round(ordered[place], 6) if ordered else 0.0
