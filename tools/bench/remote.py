# SPDX-License-Identifier: Apache-2.0
"""Measures a start from a server beside Triton's own remote cache, and beside fetching and writing
the same bytes.

    python -m tools.bench remote [--check] [--kernels N] [--rounds N] [--quick] [--results DIR] [--keep DIR]

N real kernels lie on two Redis servers of this host, started from deploy/redis: on one as Triton's
RemoteCacheManager puts them there, on the other as a push does.  Each round fetches them into an
empty directory, in memory where there is such a place: (a) Triton, all hits, (b) our restore by
tag, everything and the launch set, (c) bare pipelined GETs of the values that (b) needs, and the
loop that writes the files.  All of that again with 1 ms and 10 ms added to each answer.  `--check`
exits 1 when a target is missed, and names it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench import floors, remote_jobs
from tools.bench.bundle import finish, plant, working_folder
from tools.bench.delay import delayed
from tools.bench.remote_jobs import PATIENCE_S, TAG
from tools.bench.remote_rows import rows_of
from tools.bench.sides import Side, arguments, sides
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.processes import ROOT
from tools.shared.redis_server import Server, running

KERNELS, ROUNDS = 300, 7
QUICK_KERNELS, QUICK_ROUNDS = 12, 1
DELAYS_S = (0.0, 0.001, 0.01)
# With a delay Triton takes seconds, which do not vary much.
DELAYED_ROUNDS = 3
CORPUS = ROOT.parent / "shared" / "corpus"

Samples = dict[str, list[float]]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    keep = options.keep.resolve()
    cache = cache_of(kernels, keep)
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        work = stack.enter_context(working_folder(measurement.fast_directory() or keep))
        serving = stack.enter_context(sides(remote_jobs.__name__, "ours", "triton", "plain"))
        planted = plant(cache, work / "cache")
        recorded = serving["triton"].do("record", kernels, planted, work / "bundle")
        assert recorded["kernels"] == kernels, recorded
        theirs = stack.enter_context(running())
        theirs_bytes = put_theirs(theirs, planted, work, serving["triton"])
        ours = stack.enter_context(running())
        ours_bytes, pushed, again = put_ours(ours, work, serving["ours"], rounds)
        delays = {}
        for delay in DELAYS_S:
            times = rounds if not delay else min(rounds, DELAYED_ROUNDS)
            delays[f"{delay * 1000:g} ms"] = measure(
                delay, times, planted, work, serving, theirs, ours
            )
        profile = {
            name: start_profile(ours, work, serving["ours"], rounds, keep)
            for name, keep in (("start", "launch"), ("start all", "all"))
        }
        floor = {
            keep: bare_profile(ours, work, serving["ours"], rounds, keep)
            for keep in ("all", "launch")
        }
        sizes = stored(work, serving["ours"], corpus=not options.quick)
        server = ours.admin.info("server")["redis_version"]
    result: dict[str, Any] = {
        "kernels": kernels,
        "rounds": rounds,
        "place": "tmpfs" if measurement.fast_directory() else "disk",
        "load_before": round(load, 2),
        "server": server,
        "client": importlib.metadata.version("redis"),
        "delays": delays,
        "profile": profile,
        "floor": floor,
        "memory": {"triton": theirs_bytes, "ours": ours_bytes},
        "stored": sizes,
        "push": pushed,
        "push again": again,
    }
    result["rows"] = rows_of(result)
    missed = finish("bench-remote", result, options.results)
    for line in missed:
        print(f"missed: {floors.missed(line, result)}")
    return 1 if options.check and missed else 0


def start_profile(
    server: Server, work: Path, side: Side, rounds: int, keep: str
) -> dict[str, float]:
    """Return the seconds of each step of a restore, without a delay."""
    found = []
    for _ in range(rounds):
        found.append(side.do("start_steps", server.url(), work / "out", TAG, PATIENCE_S, keep))
        shutil.rmtree(work / "out")
    return {step: measurement.median([one[step] for one in found]) for step in found[0]}


def bare_profile(
    server: Server, work: Path, side: Side, rounds: int, keep: str
) -> dict[str, float]:
    """Return the seconds of each step that no restore can leave out, without a delay."""
    names, password = needed(server, work, keep), server.address.partition(":")[2]
    found = []
    for _ in range(rounds):
        found.append(
            side.do(
                "bare_start",
                server.url(),
                work / "out",
                TAG,
                PATIENCE_S,
                keep,
                server.port,
                password,
                names,
            )
        )
        shutil.rmtree(work / "out")
    return {step: measurement.median([one[step] for one in found]) for step in found[0]}


def used(server: Server) -> int:
    """Return the bytes that a server uses."""
    return int(server.admin.info("memory")["used_memory"])


def put_theirs(server: Server, cache: Path, work: Path, side: Side) -> int:
    """Let Triton put the kernels on a server; returns the memory that they take there."""
    # Triton's backend has no user and no password.
    server.admin.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
    empty = used(server)
    side.do("triton_put", server.port, cache, work / "put")
    shutil.rmtree(work / "put")
    return used(server) - empty


def put_ours(
    server: Server, work: Path, side: Side, rounds: int
) -> tuple[int, list[float], list[float]]:
    """Push the bundle; returns the memory that it takes, and how long each push took, into an empty
    store and again.
    """
    first, again = [], []
    empty = used(server)
    for _ in range(rounds):
        server.admin.flushall()
        server.admin.script_flush()
        pushed = side.do("push", server.url(), work / "bundle")
        first.append(pushed["push"])
        again.append(pushed["push again"])
    return used(server) - empty, first, again


def measure(
    delay: float,
    rounds: int,
    cache: Path,
    work: Path,
    serving: dict[str, Side],
    theirs: Server,
    ours: Server,
) -> Samples:
    """Run every job in turn; returns samples by what was done."""
    samples: Samples = {}
    password = ours.address.partition(":")[2]
    with delayed(theirs.port, delay) as their_port, delayed(ours.port, delay) as our_port:
        url = ours.url().replace(f":{ours.port}/", f":{our_port}/")
        jobs = (
            ("triton", "triton", "triton_get", (their_port, cache, work / "out"), "get"),
            *(
                job
                for keep in ("all", "launch")
                for job in (
                    ("ours", f"ours {keep}", "restore", (url, work / "out", keep), "restore"),
                    (
                        "plain",
                        f"gets {keep}",
                        "gets",
                        (our_port, password, needed(ours, work, keep)),
                        "get",
                    ),
                    ("plain", f"write {keep}", "write_loop", (cache, work / "out", keep), "write"),
                )
            ),
        )
        for _ in range(rounds):
            for side, name, job, words, step in jobs:
                found = serving[side].do(job, *words)
                samples.setdefault(name, []).append(found[step])
                for more in ("kernels", "round trips", "bytes"):
                    if more in found and not name.startswith("write"):
                        samples.setdefault(f"{name}: {more}", []).append(found[more])
                shutil.rmtree(work / "out", ignore_errors=True)
    return samples


def needed(server: Server, work: Path, keep: str) -> Path:
    """Write down the names of the values that a restore needs: the tag, the manifest, dictionaries
    and units.
    """
    import bundler
    from bundler.store import store_layout

    with bundler.open_store(server.url()) as store, store.pull(TAG, read_only=True) as bundle:
        units = {
            unit.key
            for unit in store_layout.units_of(bundle.content)
            if keep == "all" or unit.family.endswith("/launch")
        }
    stored = {name.decode() for name in server.admin.scan_iter("tb:*", count=2000)}
    others = {
        f"tb:r:{store_layout.tag_key(TAG)}",
        *(name for name in stored if name.startswith(f"tb:o:{store_layout.MANIFESTS}/")),
    }
    heads = {name: server.admin.get(name)[16:] for name in (f"tb:o:{unit}" for unit in units)}
    digests = {store_layout.dictionary_of(value) for value in heads.values()} - {None}
    shared = {
        f"tb:o:{store_layout.dictionary_key(digest)}" for digest in digests if digest is not None
    }
    file = work / f"names-{keep}"
    file.write_text("\n".join(sorted({*heads, *others, *shared})))
    return file


def stored(work: Path, side: Side, *, corpus: bool) -> dict[str, dict[str, float]]:
    """Return what the kernels, and those of real caches, take in a store and in a file."""
    import bundler

    bundles = {"the kernels of this benchmark": work / "bundle"}
    archives = sorted(CORPUS.glob("*.tar.xz")) if corpus else []
    if corpus and not archives:
        print("skipped: the corpus of real caches is not beside this checkout", file=sys.stderr)
    for archive in archives:
        name = archive.name.partition(".")[0]
        with tempfile.TemporaryDirectory(dir=work) as into, tarfile.open(archive) as packed:
            packed.extractall(into, filter="data")
            (top,) = Path(into).iterdir()
            with bundler.pack(top) as bundle:
                # Beside its kernels a cache of Inductor's holds what torch pickles, which is
                # compressed alone.
                bundle.select(names="*").save(work / name)
        bundles[name] = work / name
    found = {}
    for name, file in bundles.items():
        with running() as server:
            found[name] = side.do("stored", server.url(), file)
    return found
