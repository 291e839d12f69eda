# SPDX-License-Identifier: Apache-2.0
"""One measured point: so many ranks and kernels against one fresh server, cold and then warm."""

from __future__ import annotations

import array
import contextlib
import json
import math
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tools.cluster.kernels import make_stand_ins
from tools.cluster.ranks import TAG, Job
from tools.shared import measurement
from tools.shared.processes import ROOT, command
from tools.shared.redis_server import CompileLog, Meter, Server, Work, running

RANKS, REAL, REPLAY = (f"tools.cluster.{name}" for name in ("ranks", "real_rank", "replay"))
PHASES = ("cold", "warm", "reading")
PROCESSES = 4
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
            job = Job(
                "cold",
                [],
                point.ranks,
                point.kernels,
                point.host_ranks,
                point.group,
                point.order,
                store.url(**PATIENT),
                other.address,
                str(bundle),
                name,
                "",
                point.compile_s,
                point.lease_s,
            )
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
            again = replace(
                job,
                phase="warm",
                url=store.url(**PATIENT, readonly=int(phase == "reading")),
                folder=str(Path(name, phase)),
            )
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
    settings = [
        "--maxclients",
        str(herd.ranks + 100),
        *(["--tcp-backlog", str(herd.backlog)] if herd.backlog else []),
    ]
    with folder as name, running(*settings) as store:
        bundle = Path(name, "kernels.tbundle")
        make_stand_ins(kernels, count, bundle)
        _push(store, bundle)
        url = store.url(**PATIENT, readonly=int(herd.read_only))
        job = Job(
            "warm", [0], 1, count, 0, 1, "same", url, store.address, str(bundle), name, "", 0.0, 1.0
        )
        turns = _recorded(job)
        meter = Meter(store)
        line = json.dumps(
            {"port": store.port, "turns": turns, "ranks": herd.ranks, "limit_s": limit_s}
        )
        done = subprocess.run(
            command(REPLAY),
            cwd=ROOT,
            input=line,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=limit_s + 60,
        )
        answer, work = json.loads(done.stdout), meter.stop()
    waits = sorted(answer.pop("waits_s"))
    return {
        **asdict(herd),
        "kernels": count,
        "round_trips": len(turns),
        "longest_answer_bytes": max(size for _, size in turns),
        "waits_s": {name: _percentile(waits, percent) for name, percent in PERCENTILES.items()},
        **answer,
        **_costs(work),
    }


def _recorded(job: Job) -> list[tuple[str, int]]:
    """Return what a rank says to a server that knows our scripts, which the first rank tells it."""
    record = Path(job.folder, "turns")
    for name in ("", str(record)):
        with _started(
            [(RANKS, replace(job, samples=str(Path(job.folder, "samples")), record=name))]
        ) as (process,):
            _tell(process, "")
            if _answer(process)["error_count"]:
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
            _tell(process, "")
        harmed = (
            _harm(started, [own.ranks for _, own in commands], point, compile_log)
            if compile_log and point.fault
            else None
        )
        answers = [
            _answer(process)
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
def _started(commands: list[tuple[str, Job]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes and wait until all their ranks are ready."""
    started: list[subprocess.Popen[str]] = []
    try:
        for module, job in commands:
            process = subprocess.Popen(
                command(module), cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            started.append(process)
            _tell(process, job.encode())
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(
                    f"a process of ranks ended with status {process.wait()}; its error is above"
                )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _shares(job: Job, processes: int) -> Iterator[list[int]]:
    """Split the ranks among processes, those of one host together."""
    width = max(1, job.host_ranks)
    hosts = math.ceil(job.of / width)
    for number in range(processes):
        first, last = (hosts * end // processes * width for end in (number, number + 1))
        if first < min(last, job.of):
            yield list(range(first, min(last, job.of)))


def _harm(
    started: Sequence[subprocess.Popen[str]],
    shares: Sequence[list[int]],
    point: Point,
    compile_log: CompileLog,
) -> subprocess.Popen[str]:
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
        victim.kill()
    else:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(point.lease_s * 1.5)
        victim.send_signal(signal.SIGCONT)
    return victim


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(
            f"a process of ranks ended with status {process.wait()}; its error is above"
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


def _summary(
    answers: list[dict[str, Any]], waits: list[float], work: Work, began: float
) -> dict[str, Any]:
    return {
        "seconds": max(answer["done_at_s"] for answer in answers) - began,
        "waits_s": {name: _percentile(waits, percent) for name, percent in PERCENTILES.items()},
        "how": dict(sum((Counter(answer["how"]) for answer in answers), Counter())),
        "round_trips": sum(answer["round_trips"] for answer in answers),
        "errors": [error for answer in answers for error in answer["errors"]],
        "error_count": sum(answer["error_count"] for answer in answers),
        **_costs(work),
    }


def _costs(work: Work) -> dict[str, Any]:
    costs: dict[str, Any] = asdict(work)
    return {**costs.pop("counts"), **costs}


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the least sample that so many percent are not above; 0 when there is none."""
    return (
        round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 6) if ordered else 0.0
    )
