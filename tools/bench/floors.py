# SPDX-License-Identifier: Apache-2.0
"""What a missed target of a restore has to be compared with: the calls that no verified restore can
leave out, each timed in a bare loop that checks and remembers nothing, and their sum.

`bare_steps`, for a bundle file, and `bare_start`, for a server, are jobs of `jobs.py`.  `page.py` and
`remote.py` show `table` below what a restore's time goes into, and `told` behind each row whose
target is missed; `concluded` ends each benchmark.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.sides import TAG, Watch
from tools.shared import measurement
from tools.shared.measurement import shown, target
from tools.shared.measurement import table as markdown
from tools.shared.redis_server import admin_of

# What comes before anything can be written; what a reader does beside the writers; what writers do.
SERVER, MANIFEST, READER, WRITER = "server", "manifest", "reader", "writer"
IN_THREADS = "together: the writers' steps by the extension in C, in as many threads as processors"
THREADS = "threads"
# So many GETs before their answers are read.
PIPELINED = 512
# Up to so many writers there are.
MOST_WRITERS = 8
_CLOCK = time.perf_counter
_PAGE_BYTES = 4096
_TIME_BYTES = 16

Seconds = dict[str, float]
# Results are kept in the order of the alphabet.
_READ = ("read", "sha256 of what was read", "zstd")
_STEPS = {
    SERVER: (f"connect, log in, GET everything, {PIPELINED} in a pipeline",),
    MANIFEST: (*_READ, "decode its MessagePack"),
    READER: (*_READ, "decode five members of each metadata file"),
    WRITER: ("sha256 of the files", "mkdir", "open", "write", "close", "rename"),
}
ORDER = tuple(f"{who}: {step}" for who, steps in _STEPS.items() for step in steps)
# Where a row was measured and what -> which floor it has, and whether what comes before the first
# kernel counts.
ROWS = {
    ("tmpfs", "restore everything, digests verified"): ("all", False),
    ("tmpfs", "restore the launch set"): ("launch", False),
    ("tmpfs", "load and restore everything: how much faster"): ("all", True),
    ("tmpfs", "load and restore the launch set: how much faster"): ("launch", True),
    ("0 ms", "restore everything: how much faster"): ("all", True),
    ("0 ms", "restore the launch set: how much faster"): ("launch", True),
    ("0 ms", "restore everything"): ("all", True),
    ("0 ms", "restore the launch set"): ("launch", True),
}
INTRODUCTION = """### {title}

The same bytes, by bare loops in Python over the calls that any verified restore makes, one after the other in one thread; they check
nothing else, and keep nothing. Only what a writer does can be done in several threads at once without the interpreter: the line `together` is
how long the extension takes for that, with {threads}, and with nothing to prepare.
"""
BELOW = """No restore is faster than {before} the writers' steps together, and the reader's steps {beside}. That is the floor in this
table, and what it would give for each target, with the peer's time of the same run. What we take above it is shown, step by step, before:
"""
_SERVERS_PART = "the server's part, the manifest,"
_MANIFEST_ALONE = "the manifest, where loading counts,"
_DIVIDED = "divided by {cores} processors, all of which the writers use"


def bare_steps(file: str, into: str, keep: str) -> Seconds:
    """Return the seconds of each bare step of a restore, and of the writers' steps in as many
    threads as they may have.
    """
    import zstandard

    from bundler.format.bundle import Bundle
    from bundler.format.container import BLOB_SECTIONS, LAUNCH, ZSTD, Container

    seconds: Seconds = {}
    decompressor = zstandard.ZstdDecompressor()
    with Bundle.load(file) as bundle, open(file, "rb", buffering=0) as opened:
        container = bundle.blobs
        assert isinstance(container, Container)
        kernels = _new_kernels(bundle, into, keep)
        blobs = BLOB_SECTIONS if keep == "all" else {LAUNCH}
        for name, wanted in (
            (MANIFEST, [one for one in container.sections if one.kind not in BLOB_SECTIONS]),
            (READER, [one for one in container.sections if one.kind in blobs]),
        ):

            def read(one: Any) -> bytes:
                return os.pread(opened.fileno(), one.stored_bytes, one.offset)

            stored = _timed(seconds, f"{name}: read", read, wanted)
            _timed(seconds, f"{name}: sha256 of what was read", _sha256, stored)
            packed = [
                (data, bytearray(one.raw_bytes))
                for data, one in zip(stored, wanted, strict=True)
                if one.codec == ZSTD
            ]
            for _, room in packed:
                # its pages are there, as in memory that is used again
                room[::_PAGE_BYTES] = bytes(len(room[::_PAGE_BYTES]))

            def decompress(one: tuple[bytes, bytearray]) -> int:
                return decompressor.stream_reader(one[0]).readinto(one[1])

            _timed(seconds, f"{name}: zstd", decompress, packed)
        _place(seconds, into, kernels, [container.content_bytes, container.observed_bytes])
    return seconds


def bare_start(url: str, into: str, keep: str, address: str, names: str) -> Seconds:
    """Return the seconds of each bare step of a restore by tag from a Redis server; `names` is a
    file with the keys that it needs.
    """
    import bundler
    from bundler.store import store_layout

    seconds: Seconds = {}
    keys = Path(names).read_text().split()
    fetching = f"{SERVER}: connect, log in, GET everything, {PIPELINED} in a pipeline"
    (stored,) = _timed(seconds, fetching, lambda keys: pipelined(address, keys), [keys])
    # Before each value stands when it was stored.
    values = [
        value[_TIME_BYTES:]
        for key, value in zip(keys, stored, strict=True)
        if store_layout.TAGS not in key
    ]
    with (
        bundler.open_store(url) as store,
        store.pull(TAG, read_only=True) as bundle,
    ):
        kernels = _new_kernels(bundle, into, keep)
        _timed(seconds, f"{READER}: sha256 of what was read", _sha256, values)
        # Those that were fetched
        dictionaries = bundle.blobs._dictionaries  # type: ignore[attr-defined]  # noqa: SLF001
        frames = []
        for value in values:
            digest = store_layout.dictionary_of(value)
            known = None if digest is None else dictionaries.known(digest)
            decoder = store_layout.decompressor(None if known is None else known.data)
            frames.append((decoder, store_layout.checked_frame(value, "bench")))
        _timed(seconds, f"{READER}: zstd", lambda one: one[0].decompress(one[1]), frames)
        _place(seconds, into, kernels, [bundle.content.encode(), bundle.observed.encode()])
    return seconds


def pipelined(address: str, keys: Sequence[str]) -> list[bytes]:
    """GET values whose names are known from the Redis server at `port:password`."""
    values: list[bytes] = []
    with admin_of(address) as client:
        for start in range(0, len(keys), PIPELINED):
            with client.pipeline(transaction=False) as pipeline:
                for key in keys[start : start + PIPELINED]:
                    pipeline.get(key)
                values += pipeline.execute()
    return values


def _place(seconds: Seconds, into: str, kernels: Sequence[Any], manifest: Sequence[bytes]) -> None:
    """Decode the manifest, look at the metadata of each kernel and write it, in this thread, and
    then once more in many.
    """
    import msgspec

    from bundler.format.metadata import MetadataHead

    _timed(seconds, f"{MANIFEST}: decode its MessagePack", msgspec.msgpack.decode, manifest)
    head = msgspec.json.Decoder(MetadataHead)
    metadata = [
        bytes(data)
        for _, _, names, contents, *_ in kernels
        for name, data in zip(names, contents, strict=True)
        if name.endswith(".json")
    ]
    _timed(seconds, f"{READER}: decode five members of each metadata file", head.decode, metadata)
    _write(seconds, into, kernels)
    seconds |= _in_threads(into, kernels)


def _new_kernels(bundle: Any, into: str, keep: str) -> list[Any]:
    """Return what writers are given for each kernel."""
    from bundler.lifecycle.cache_directory import CacheDirectory
    from bundler.lifecycle.kernel_placement import localized, planned, read
    from bundler.toolchain import identity

    place, triton_dir = CacheDirectory(into), identity.triton_dir()
    wanted = [planned(kernel, "launch" if keep == "launch" else "all") for kernel in bundle.kernels]
    bundle.blobs.prefetch([digest for one in wanted for digest in one.digests])
    read(bundle.blobs, wanted)
    return [*place.new_kernels([localized(one, place.path, triton_dir) for one in wanted])]


def _timed(
    seconds: Seconds, name: str, call: Callable[[Any], Any], items: Iterable[Any]
) -> list[Any]:
    items = list(items)
    started = _CLOCK()
    found = [call(item) for item in items]
    seconds[name] = _CLOCK() - started
    return found


def _sha256(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


def _write(seconds: Seconds, into: str, kernels: Sequence[Any]) -> None:
    """Hash and write each kernel by system calls, and add up the time of each of these."""
    calls = Watch()
    for temporary, key, names, contents, _, _, _, _, *group in kernels:
        for data in contents:
            _sha256(data)
        calls.lap("sha256 of the files")
        os.mkdir(f"{into}/{temporary}")
        calls.lap("mkdir")
        for name, data in (*zip(names, contents, strict=True), group):
            fd = os.open(f"{into}/{temporary}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            calls.lap("open")
            os.write(fd, data)
            calls.lap("write")
            os.close(fd)
            calls.lap("close")
        os.rename(f"{into}/{temporary}", f"{into}/bare.{key}")
        calls.lap("rename")
    seconds |= {f"{WRITER}: {name}": spent for name, spent in calls.seconds.items()}


def _in_threads(into: str, kernels: Sequence[Any]) -> Seconds:
    from bundler.format.frames import processors
    from bundler.lifecycle.kernel_writer import start_threads, write_kernels

    count = processors(MOST_WRITERS)
    threads, since = start_threads(count), _CLOCK()
    codes = write_kernels(into, tuple(kernels), threads)
    spent = _CLOCK() - since
    assert not any(codes)
    return {IN_THREADS: spent, THREADS: count}


def floor(steps: Mapping[str, float], cores: int, *, whole: bool) -> float:
    """Return the seconds below which no restore comes that makes these calls; `whole` with what
    comes before the first kernel.
    """
    reader = _sum(steps, READER)
    # Where the writers use all processors, the reader takes its time from them.
    writers = steps[IN_THREADS]
    both = max(reader, writers) if cores > MOST_WRITERS else writers + reader / cores
    return both + (_sum(steps, MANIFEST) + _sum(steps, SERVER) if whole else 0.0)


def _sum(steps: Mapping[str, float], who: str) -> float:
    return sum(spent for name, spent in steps.items() if name.startswith(f"{who}: "))


def told(line: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return what the page says of the floor of a missed row; nothing for a row without one."""
    if _place_of(line) not in ROWS or "floor" not in result:
        return ""
    lowest, figure = _floor_of(line, result)
    verdict = (
        "even that misses the target"
        if _misses(line, figure)
        else (
            "that meets the target, and what we take beyond it is our own, which the page shows"
            " step by step"
        )
    )
    return (
        f" Its floor, which the page shows call by call: {shown(lowest * 1e3, 'ms')} of our"
        f" {shown(line['ours_ms'], 'ms')}, which would be {shown(figure, 'x')}: {verdict}."
    )


def missed(line: dict[str, Any], result: Mapping[str, Any]) -> str:
    """Return what a benchmark prints of a row whose target is missed."""
    figure = f"{line['work']}: {shown(line['figure'], line['unit'])}, {target(line)}."
    return figure + told(line, {"machine": {"cores": len(os.sched_getaffinity(0))}, **result})


def concluded(name: str, result: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the rows of a result, write it, and name those that miss their target; returns the exit
    status.
    """
    lines = measurement.report(name, result, options.results)
    for line in lines:
        print(f"missed: {missed(line, result)}")
    return 1 if options.check and lines else 0


def table(result: Mapping[str, Any], title: str) -> str:
    """Return the tables of a result; nothing where it has no floor."""
    if "floor" not in result:
        return ""
    columns, cores = result["floor"], result["machine"]["cores"]
    names = [name for name in ORDER if name in columns["all"]]
    count = int(columns["all"][THREADS])

    def line(name: str, spent: Iterable[float], form: str = "{}") -> list[str]:
        return [form.format(each) for each in (name, *(shown(one * 1e3, "ms") for one in spent))]

    rows = [line(name, (steps[name] for steps in columns.values())) for name in names]
    sums = (sum(steps[name] for name in names) for steps in columns.values())
    rows.append(line("sum, in one thread", sums, "**{}**"))
    rows.append(line(IN_THREADS, (steps[IN_THREADS] for steps in columns.values())))
    lowest = []
    for one in result["rows"]:
        if _place_of(one) in ROWS:
            least, figure = _floor_of(one, result)
            times = [shown(spent, "ms") for spent in (one["ours_ms"], least * 1e3)]
            factors = [shown(factor, "x") for factor in (one["figure"], figure)]
            lowest.append([one["work"], *times, *factors, target(one)])
    before = _SERVERS_PART if names[0].startswith(SERVER) else _MANIFEST_ALONE
    beside = "beside them" if cores > MOST_WRITERS else _DIVIDED.format(cores=cores)
    parts = [
        INTRODUCTION.format(title=title, threads=f"{count} threads" if count > 1 else "one"),
        markdown(
            ["step", *({"all": "everything", "launch": "launch set"}[k] for k in columns)], rows
        ),
        BELOW.format(before=before, beside=beside),
        markdown(["work", "ours", "floor", "ratio", "ratio at the floor", "target"], lowest),
    ]
    return "\n".join(parts)


def _place_of(line: Mapping[str, Any]) -> tuple[str, str]:
    place, _, work = line["work"].partition(": ")
    return place, work


def _floor_of(line: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float]:
    keep, whole = ROWS[_place_of(line)]
    lowest = floor(result["floor"][keep], result["machine"]["cores"], whole=whole)
    ratio = lowest * 1e3 / line["peer_ms"]
    return lowest, 1 / ratio if "faster" in line["work"] else ratio


def _misses(line: Mapping[str, Any], figure: float) -> bool:
    return bool(figure > line["most"] if line["least"] is None else figure < line["least"])
