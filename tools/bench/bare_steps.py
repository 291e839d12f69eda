# SPDX-License-Identifier: Apache-2.0
"""The calls that no verified restore can leave out, each timed in a bare loop that checks and
remembers nothing.

`bare_steps` is a job of `jobs.py`, for a bundle file, and `bare_start` one of `remote_jobs.py`, for
a server; `floors.py` shows what they find.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.sides import Watch

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


def bare_start(
    url: str, into: str, tag: str, patience_s: str, keep: str, port: str, password: str, names: str
) -> Seconds:
    """Return the seconds of each bare step of a restore by tag from a Redis server; `names` is a
    file with the keys that it needs.
    """
    import bundler
    from bundler.store import store_layout

    seconds: Seconds = {}
    keys = Path(names).read_text().split()
    fetching = f"{SERVER}: connect, log in, GET everything, {PIPELINED} in a pipeline"
    (stored,) = _timed(seconds, fetching, lambda keys: pipelined(port, password, keys), [keys])
    # Before each value stands when it was stored.
    values = [
        value[_TIME_BYTES:]
        for key, value in zip(keys, stored, strict=True)
        if store_layout.TAGS not in key
    ]
    with (
        bundler.open_store(url, timeout_s=float(patience_s)) as store,
        store.pull(tag, read_only=True) as bundle,
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


def pipelined(port: str, password: str, keys: Sequence[str]) -> list[bytes]:
    """GET values whose names are known from a Redis server."""
    import redis

    values: list[bytes] = []
    with redis.Redis(port=int(port), username="admin", password=password, protocol=2) as client:
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
