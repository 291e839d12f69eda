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
from pathlib import Path
from typing import Any

from tools.bench import tables
from tools.bench.bundle import plant, real_caches
from tools.bench.delay import delayed
from tools.bench.jobs import PIPELINED
from tools.bench.sides import (
    TAG,
    Samples,
    Side,
    Turn,
    arguments,
    concluded,
    sides,
    take_turns,
    working_folder,
)
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import median, ratio_row, row, shown, table
from tools.shared.redis_server import Server, running

KERNELS, ROUNDS = (300, 12), (7, 1)
PATIENT = {"timeout_s": 20.0}
DELAYS_S = (0.0, 0.001, 0.01)
# With a delay Triton takes seconds, which do not vary much.
DELAYED_ROUNDS = 3

ONCE = "0 ms"
# How many times faster than Triton, for everything and for the launch set, by what is added to each
# answer.
FASTER_TARGETS = {ONCE: (6.0, 14.0), "10 ms": (90.0, 140.0)}
LIMIT_TARGET, MEMORY_TARGET = 2.5, 20.0
_SIDES = ("ours", "gets", "write")
SAMPLED = ("triton", *(f"{side} {keep}" for side in _SIDES for keep in ("all", "launch")))
SECTION = """`python -m tools.bench remote`. {kernels:,} kernels, compiled by Triton for sm_90 and recorded, on servers of this host started from
`deploy/redis`; everything goes into an empty directory, on {place}. {rounds} rounds without a delay, fewer with one: a program between
both passes every answer on so much later. Each piece of work runs in a process of its own, forked from one that has done its imports, whose memory it has copied before.
Redis {server}, redis-py {client}; load of the machine by other work before the run: {load_before}.

* *Triton*: `RemoteCacheManager` over `RedisRemoteCacheBackend`, `get_group` for each kernel, all of them hits. It fetches and writes
  every file, and verifies nothing.
* *ours*: `open_store`, `Store.restore` by tag, `close`. Every digest is checked.
* *the limit*: GETs of the very values that our restore needs, {pipelined} in a pipeline, whose bytes are thrown away; and the loop that
  writes the files.
"""

MEASURED = (
    "Memory is `used_memory` above that of the empty server; sizes are of units and dictionaries."
    " Why units are compressed with dictionaries, and what they take alone, is in"
    " [cluster.md](cluster.md#compression)."
)


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels, rounds, keep = options.kernels, options.rounds, options.keep
    cache = cache_of(kernels, keep)
    load = os.getloadavg()[0]
    few = min(rounds, DELAYED_ROUNDS)
    speaking = {"ours": ("redis", "bundler", "redis://127.0.0.1"), "triton": ("redis", "triton")}
    with (
        working_folder(measurement.fast_directory() or keep) as work,
        sides(**speaking, plain=("redis",)) as serving,
        running() as theirs,
        running() as ours,
    ):
        planted = plant(cache, work / "cache")
        recorded = serving["triton"].do("record", kernels, planted, work / "bundle")
        assert recorded["kernels"] == kernels, recorded
        theirs_bytes = put_theirs(theirs, planted, work, serving["triton"])
        ours_bytes, pushed, again = put_ours(ours, work, serving["ours"], rounds)
        delays = {
            f"{delay * 1000:g} ms": measure(
                delay, few if delay else rounds, planted, work, serving, theirs, ours
            )
            for delay in DELAYS_S
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
        "memory": {"triton": theirs_bytes, "ours": ours_bytes},
        "stored": sizes,
        "push": pushed,
        "push again": again,
    }
    result["rows"] = rows_of(result)
    return concluded("bench-remote", result, options)


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
        pushed = side.do("push", server.url(**PATIENT), work / "bundle")
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
    with delayed(theirs.port, delay) as their_port, delayed(ours.port, delay) as our_port:
        url = ours.url(**PATIENT).replace(f":{ours.port}/", f":{our_port}/")
        address = ours.address.replace(f"{ours.port}:", f"{our_port}:", 1)
        out = work / "out"
        turns: list[Turn] = [("triton", "triton", "triton_get", (their_port, cache, out), "get")]
        for keep in ("all", "launch"):
            asked = (address, needed(ours, work, keep))
            turns += [
                ("ours", f"ours {keep}", "pull_counted", (url, out, keep), "pull and restore"),
                ("plain", f"gets {keep}", "gets", asked, "get"),
                ("plain", f"write {keep}", "write_loop", (cache, out, keep), "write"),
            ]
        for _ in range(rounds):
            take_turns(turns, samples, serving, out)
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
    for name, top in real_caches(work / "corpus") if corpus else ():
        with bundler.pack(top) as bundle:
            # Beside its kernels a cache of Inductor's holds what torch pickles, which is compressed
            # alone.
            bundle.select(names="*").save(work / name)
        bundles[name] = work / name
    found = {}
    for name, file in bundles.items():
        with running() as server:
            found[name] = side.do("stored", server.url(**PATIENT), file)
    return found


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of every delay, then those of memory and of sizes."""
    rows: list[dict[str, Any]] = []
    for delay, samples in result["delays"].items():
        rows += _delay_rows(delay, samples, result["kernels"])
    ours, triton = result["memory"]["ours"], result["memory"]["triton"]
    less = f"server memory, {shown(ours / 1e6, 'MB')}: how many times less"
    peer = f"Triton, {shown(triton / 1e6, 'MB')}"
    sizes = {"ours_bytes": ours, "peer_bytes": triton}
    rows.append(row(less, triton / ours, "x", least=MEMORY_TARGET, peer=peer, **sizes))
    for name, stored in result["stored"].items():
        shared, file, alone = (
            shown(stored[what] / 1e6, "MB") for what in ("shared", "file", "alone")
        )
        work = f"{name} in a store, {shared}: beside one file"
        sizes = {"ours_bytes": stored["shared"], "peer_bytes": stored["file"]}
        figure, peer = stored["shared"] / stored["file"], f"a bundle file, {file}; alone {alone}"
        rows.append(row(work, figure, "x", peer=peer, **sizes))
    return rows


def _delay_rows(delay: str, samples: Samples, kernels: int) -> list[dict[str, Any]]:
    least = FASTER_TARGETS.get(delay, (None, None))
    most = {"launch": LIMIT_TARGET} if delay == ONCE else {}
    keeps = {"all": "restore everything", "launch": "restore the launch set"}
    faster = [
        ratio_row(
            f"{delay}: {work}: how much faster",
            samples[f"ours {keep}"],
            samples["triton"],
            "Triton",
            faster=True,
            kernels=kernels,
            least=bound,
        )
        for (keep, work), bound in zip(keeps.items(), least, strict=True)
    ]
    limits = {
        keep: list(map(sum, zip(samples[f"gets {keep}"], samples[f"write {keep}"], strict=True)))
        for keep in keeps
    }
    return faster + [
        ratio_row(
            f"{delay}: {work}",
            samples[f"ours {keep}"],
            limits[keep],
            "the limit",
            kernels=kernels,
            most=most.get(keep),
        )
        for keep, work in keeps.items()
    ]


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    timed = [line for line in result["rows"] if "peer_ms" in line]
    rest = [line for line in result["rows"] if "peer_ms" not in line]
    delays = result["delays"].values()
    steps = [
        [name, *(shown(median(samples[name]) * 1e3, "ms") for samples in delays)]
        for name in SAMPLED
    ]
    steps += [
        [
            f"{name}: exchanges with the server",
            *(f"{median(found[f'{name}: round trips']):.0f}" for found in delays),
        ]
        for name in ("ours all", "ours launch")
    ]
    pushes = [[name, shown(median(result[name]) * 1e3, "ms")] for name in ("push", "push again")]
    parts = [
        f"## A start from a server\n\n{SECTION.format(**result, pipelined=PIPELINED)}",
        tables.of_times(timed, "added to each answer: work"),
        table(["step", *result["delays"]], steps),
        table(["into an empty server, without a delay", "time"], pushes),
        f"{MEASURED}\n",
        tables.of_rows(rest, work="what", peer="peer", figure="ratio", target="target"),
    ]
    return "\n".join(parts)
