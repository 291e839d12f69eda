# SPDX-License-Identifier: Apache-2.0
"""What no restore can leave out, call by call: bare loops over the very calls, that check and remember nothing.

`bare_steps` is a job of `jobs.py`, `bundle.py` takes its medians, and `tables` and `told` show on the page what a missed target has to be
compared with.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tools.shared.measurement import shown, target

# What comes before anything can be written; what a reader does beside the writers; what writers do.
MANIFEST, READER, WRITER = "manifest", "reader", "writer"
IN_THREADS = "together: the writers' steps by the extension in C, in as many threads as processors"
THREADS = "threads"
# Results are kept in the order of the alphabet.
ORDER = (
    *(f"{MANIFEST}: {step}" for step in ("read", "sha256 of what was read", "zstd", "decode its MessagePack")),
    *(
        f"{READER}: {step}"
        for step in ("read", "sha256 of what was read", "zstd", "decode five members of each metadata file")
    ),
    *(f"{WRITER}: {step}" for step in ("sha256 of the files", "mkdir", "open", "write", "close", "rename")),
)
# Processors up to which writers use all of them, so that a reader takes its time from theirs.
MOST_WRITERS = 8
# Row of the bundle benchmark, without its place -> whether loading counts, and which floor it has.
ROWS = {
    "restore everything, digests verified": (False, "all"),
    "restore the launch set": (False, "launch"),
    "load and restore everything: how much faster": (True, "all"),
    "load and restore the launch set: how much faster": (True, "launch"),
}
INTRODUCTION = """### What no restore can leave out

The same files, by bare loops in Python over the calls that any verified restore makes, one after the other in one thread; they check
nothing else, and keep nothing. Only what a writer does can be done in several threads at once without the interpreter: the line `together` is
how long the extension takes for that, with {threads}, and with nothing to prepare.
"""
BELOW = """No restore is faster than the manifest, the writers' steps together, and the reader's steps {beside}. That is the floor in the
table below, and what it would give for each target, with the peer's time of the same run:
"""
_CLOCK = time.perf_counter
# Name and bytes: the group file, which is made here.
_WITHOUT_DIGEST = 2
_PAGE_BYTES = 4096

Seconds = dict[str, float]


def bare_steps(file: str, into: str, keep: str) -> Seconds:
    """Return the seconds of each bare step of a restore, and of the writers' steps in as many threads as they may have."""
    import msgspec
    import zstandard

    from bundler.format.bundle import Bundle
    from bundler.format.container import Container
    from bundler.format.container_layout import BLOB_SECTIONS, LAUNCH, ZSTD
    from bundler.format.metadata import MetadataHead

    seconds: Seconds = {}
    decompressor, head = zstandard.ZstdDecompressor(), msgspec.json.Decoder(MetadataHead)
    with Bundle.load(file) as bundle, open(file, "rb", buffering=0) as opened:
        container = bundle.blobs
        assert isinstance(container, Container)
        kernels = _new_kernels(bundle, into, keep)
        for name, wanted in (
            (MANIFEST, [one for one in container.sections if one.kind not in BLOB_SECTIONS]),
            (READER, [one for one in container.sections if one.kind == LAUNCH or (one.kind in BLOB_SECTIONS and keep == "all")]),
        ):  # fmt: skip
            stored = _timed(
                seconds, f"{name}: read", lambda one: os.pread(opened.fileno(), one.stored_bytes, one.offset), wanted
            )
            _timed(seconds, f"{name}: sha256 of what was read", _sha256, stored)
            packed = [
                (data, bytearray(one.raw_bytes)) for data, one in zip(stored, wanted, strict=True) if one.codec == ZSTD
            ]
            for _, room in packed:
                room[::_PAGE_BYTES] = bytes(
                    len(room[::_PAGE_BYTES])
                )  # its pages are there, as in memory that is used again
            _timed(seconds, f"{name}: zstd", lambda one: decompressor.stream_reader(one[0]).readinto(one[1]), packed)
        _timed(
            seconds,
            f"{MANIFEST}: decode its MessagePack",
            msgspec.msgpack.decode,
            [container.content_bytes, container.observed_bytes],
        )
        metadata = [bytes(next(file[1] for file in files if file[0].endswith(".json"))) for _, _, files, *_ in kernels]
        _timed(seconds, f"{READER}: decode five members of each metadata file", head.decode, metadata)
        _write(seconds, into, kernels)
        seconds |= _in_threads(into, kernels)
    return seconds


def _new_kernels(bundle: Any, into: str, keep: str) -> list[Any]:
    """Return what writers are given for each kernel."""
    from bundler.lifecycle.cache_directory import CacheDirectory
    from bundler.lifecycle.kernel_placement import StoredKernel, WantedKernel
    from bundler.toolchain import identity

    place, triton_dir = CacheDirectory(into), identity.triton_dir()
    wanted = [WantedKernel.of(kernel, "launch" if keep == "launch" else "all") for kernel in bundle.kernels]
    stored = [StoredKernel(one, bundle.blobs.stored_blobs(one.digests), verified=False) for one in wanted]
    return [place.new_kernel(one.ready_for(place.path, triton_dir)) for one in stored]


def _timed(seconds: Seconds, name: str, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    items = list(items)
    started = _CLOCK()
    found = [call(item) for item in items]
    seconds[name] = _CLOCK() - started
    return found


def _sha256(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


def _write(seconds: Seconds, into: str, kernels: Sequence[Any]) -> None:
    """Hash and write each kernel by system calls, and add up the time of each of these."""
    calls = _Calls()
    for temporary, key, files, *_ in kernels:
        for file in files:
            if len(file) > _WITHOUT_DIGEST:
                _sha256(file[1])
        calls.lap("sha256 of the files")
        os.mkdir(f"{into}/{temporary}")
        calls.lap("mkdir")
        for file in files:
            fd = os.open(f"{into}/{temporary}/{file[0]}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            calls.lap("open")
            os.write(fd, file[1])
            calls.lap("write")
            os.close(fd)
            calls.lap("close")
        os.rename(f"{into}/{temporary}", f"{into}/bare.{key}")
        calls.lap("rename")
    seconds |= {f"{WRITER}: {name}": spent for name, spent in calls.seconds.items()}


class _Calls:
    """Adds up the time of calls by their names."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}
        self._since = _CLOCK()

    def lap(self, name: str) -> None:
        """Give the time since the last lap a name."""
        now = _CLOCK()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = _CLOCK()


def _in_threads(into: str, kernels: Sequence[Any]) -> Seconds:
    from bundler.lifecycle.kernel_writer import start_threads, write_kernels
    from bundler.lifecycle.threaded_call import processors

    count = processors(MOST_WRITERS)
    threads, since = start_threads(count), _CLOCK()
    codes = write_kernels(into, tuple(kernels), threads)
    spent = _CLOCK() - since
    assert not any(codes)
    return {IN_THREADS: spent, THREADS: count}


def floor(steps: Mapping[str, float], cores: int, *, loaded: bool) -> float:
    """Return the seconds below which no restore comes that makes these calls."""
    reader = sum(spent for name, spent in steps.items() if name.startswith(READER))
    manifest = sum(spent for name, spent in steps.items() if name.startswith(MANIFEST)) if loaded else 0.0
    # Where the writers use all processors, the reader takes its time from them.
    both = max(reader, steps[IN_THREADS]) if cores > MOST_WRITERS else steps[IN_THREADS] + reader / cores
    return manifest + both


def told(line: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return what the page says of the floor of a missed row; nothing for a row without one."""
    place, _, work = line["work"].partition(": ")
    if place != "tmpfs" or work not in ROWS or "floor" not in result:
        return ""
    lowest, figure = _floor_of(line, result)
    possible = "out of reach" if _misses(line, figure) else "within it"
    return (
        f" Floor shown above, call by call: {shown(lowest * 1e3, 'ms')} of ours {shown(line['ours_ms'], 'ms')}, which would be "
        f"{shown(figure, 'x')}: the target is {possible}."
    )


def _floor_of(line: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[float, float]:
    loaded, keep = ROWS[line["work"].partition(": ")[2]]
    lowest = floor(result["floor"][keep], result["machine"]["cores"], loaded=loaded)
    ratio = lowest * 1e3 / line["peer_ms"]
    return lowest, ratio if line["least"] is None else 1 / ratio


def _misses(line: Mapping[str, Any], figure: float) -> bool:
    return bool(figure > line["most"] if line["least"] is None else figure < line["least"])


def tables(result: Mapping[str, Any]) -> str:
    """Return the tables of a result of the bundle benchmark; nothing where it has no floor."""
    if "floor" not in result:
        return ""
    columns, cores = result["floor"], result["machine"]["cores"]
    names = [name for name in ORDER if name in columns["all"]]
    count = int(columns["all"][THREADS])
    rows = [[name, *(shown(steps[name] * 1e3, "ms") for steps in columns.values())] for name in names]
    rows += [
        ["**sum, in one thread**", *(f"**{shown(sum(steps[name] for name in names) * 1e3, 'ms')}**" for steps in columns.values())],
        [IN_THREADS, *(shown(steps[IN_THREADS] * 1e3, "ms") for steps in columns.values())],
    ]  # fmt: skip
    beside = "beside them" if cores > MOST_WRITERS else f"divided by {cores} processors, all of which the writers use"
    floors = []
    for line in result["rows"]:
        if line["work"].partition(": ")[2] in ROWS and line["work"].startswith("tmpfs"):
            lowest, figure = _floor_of(line, result)
            floors.append([line["work"], shown(line["ours_ms"], "ms"), shown(lowest * 1e3, "ms"), shown(line["figure"], "x"),
                           shown(figure, "x"), target(line)])  # fmt: skip
    return "\n".join([
        INTRODUCTION.format(threads=f"{count} threads" if count > 1 else "one"),
        _table(["step", "everything", "launch set"], rows), BELOW.format(beside=beside),
        _table(["work", "ours", "floor", "ratio", "ratio at the floor", "target"], floors),
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
