# SPDX-License-Identifier: Apache-2.0
"""One measured point: so many ranks and kernels against one fresh server, cold and then warm."""

from __future__ import annotations

import array
import contextlib
import json
import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tools.cluster.ranks import TAG, Job
from tools.shared import kernel_copies, kernel_variants, measurement
from tools.shared.processes import Helper
from tools.shared.redis_server import CompileLog, Meter, Server, running

RANKS, REAL, REPLAY = (f"tools.cluster.{name}" for name in ("ranks", "real_rank", "replay"))
PHASES = ("cold", "warm", "reading")
PROCESSES, MOST_COMPILED = 4, 200
# Here a thousand ranks share a few cores, and wait for each other as they never would: no time-out
# is to come of that.
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
# How often we look whether compiles have begun, and for how long.
LOOK_S, HARM_S = 0.01, 60.0


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
            places = (store.url(**PATIENT), other.address, str(bundle), name, "")
            job = Job("cold", [], *counts, *places, point.compile_s, point.lease_s)
            script = RANKS if kernels is not None else REAL
            row["cold"] = _phase(job, point, store, _commands(script, job, processes), compile_log)
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
            row[phase] = _phase(again, point, store, _commands(RANKS, again, processes), None)
    return row


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


def measure_herd(herd: Herd, kernels: Path, count: int, limit_s: float = 90.0) -> dict[str, Any]:
    """Let one rank restore, and then a herd say what it said; returns what they waited for.

    Args:
        herd: who.
        kernels: the bundle file that stand-ins are made from.
        count: how many kernels.
        limit_s: after this time, who has not been answered has failed.
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
        job = {"port": store.port, "turns": turns, "ranks": herd.ranks, "limit_s": limit_s}
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
        with _started([(RANKS, own)]) as (process,):
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


def _commands(module: str, job: Job, processes: int) -> list[tuple[str, Job]]:
    """Return a module and a job for each process."""
    return [
        (module, replace(job, ranks=ranks, samples=str(Path(job.folder, f"samples{number}"))))
        for number, ranks in enumerate(_shares(job, min(processes, job.of)))
    ]


def _phase(
    job: Job,
    point: Point,
    store: Server,
    commands: list[tuple[str, Job]],
    compile_log: CompileLog | None,
) -> dict[str, Any]:
    with _started(commands) as started:
        meter = Meter(store)
        began = time.monotonic()
        for process in started:
            process.tell(None)
        harmed = None
        if compile_log and point.fault:
            harmed = _harm(started, [own.ranks for _, own in commands], point, compile_log)
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
def _started(commands: list[tuple[str, Job]]) -> Iterator[list[Helper]]:
    """Start processes and wait until all their ranks are ready."""
    started: list[Helper] = []
    try:
        for module, job in commands:
            started.append(Helper(module))
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
