# SPDX-License-Identifier: Apache-2.0
"""Writes a container: which blob goes into which frame, how frames are compressed, header last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import zstandard

from bundler.format import names, wire
from bundler.format.digest import digest_raw, sha256
from bundler.format.layout import (
    CONTENT,
    FRAME_TARGET_BYTES,
    HEADER,
    HEADER_BYTES,
    HELPERS,
    IR,
    LAUNCH,
    MAGIC,
    MAJOR,
    MINOR,
    OBSERVED,
    OPAQUE,
    STORED,
    TUNING,
    ZSTD,
    Section,
    dictionary,
)
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.manifest import Content, Observed

# Level of zstd, and size of its hash table (0: the level's own), tried in turn until a reader would take the result for no
# bomb.  Chosen on a real Inductor cache (docs/benchmarks.md): level 6 leaves its graph entries twice as large.  The first is
# for frames with a prefix: in the level's own table of 8 MiB, what lies more than a few MiB back is forgotten.
EFFORTS = ((9, 24), (9, 0), (1, 0))
COMPRESSION_THREADS = 4


def plan_frames(content: Content) -> list[tuple[int, list[int]]]:
    """Decide which blob goes into which frame: launch set first, then the rest, each blob once."""
    index = {raw: position for position, (raw, _) in enumerate(content.blobs)}
    placed: set[int] = set()
    frames: list[tuple[int, list[int]]] = []

    def add(section: int, digests: Iterator[str]) -> None:
        fill = FRAME_TARGET_BYTES[section] + 1  # over, so that even an empty blob begins a frame of this section
        for digest in digests:
            blob = index[digest_raw(digest)]
            if blob in placed:
                continue
            placed.add(blob)
            size = content.blobs[blob][1]
            if fill + size > FRAME_TARGET_BYTES[section]:
                frames.append((section, []))
                fill = 0
            frames[-1][1].append(blob)
            fill += size

    add(LAUNCH, (a.digest for k in content.kernels for a in k.launch_set))
    add(TUNING, (e.artifact.digest for e in content.tuning_files))
    add(IR, (a.digest for k in content.kernels for a in k.artifacts if a.kind not in names.LAUNCH_KINDS))
    add(HELPERS, (e.artifact.digest for e in content.helpers))
    add(OPAQUE, (e.artifact.digest for e in content.opaque))
    return frames


def write_container(
    out: BinaryIO, content: Content, content_bytes: bytes, observed_bytes: bytes, read_blob: Callable[[bytes], bytes]
) -> None:
    """Write a container to a seekable file at position 0.

    Args:
        out: the file; the header is written last, so an interrupted write leaves no valid container.
        content: the entries; `content_bytes` is its encoding.
        content_bytes: bytes of the content section.
        observed_bytes: bytes of the observed section.
        read_blob: returns the verified bytes of a blob by raw digest.

    Raises:
        FormatError: the manifest is beyond the default limits, or has names that a reader refuses.
    """
    frames = plan_frames(content)
    prefix = _prefix_for_opaque(frames, content)

    def load(blobs: list[int]) -> bytes:
        return b"".join(read_blob(content.blobs[blob][0]) for blob in blobs)

    shared = b"".join(load(frames[position][1]) for position in prefix)

    def compress(frame: tuple[int, list[int]]) -> tuple[int, bytes, int]:
        raw = load(frame[1])
        return (*_compress(raw, shared if frame[0] == OPAQUE else b""), len(raw))

    out.write(b"\0" * HEADER_BYTES)
    sections: list[Section] = []
    position = HEADER_BYTES

    def put(kind: int, codec: int, data: bytes, raw: int, blobs: list[int], prefix: list[int]) -> None:
        nonlocal position
        out.write(data)
        sections.append(Section(kind, codec, position, len(data), raw, sha256(data), tuple(blobs), tuple(prefix)))
        position += len(data)

    with ThreadPoolExecutor(COMPRESSION_THREADS) as pool:
        compressed = pool.map(compress, frames)
        # What readers refuse is not written; looked at while the threads compress.
        Content.decode(content_bytes)
        Observed.decode(observed_bytes)
        for (kind, blobs), (codec, data, raw) in zip(frames, compressed, strict=True):
            put(kind, codec, data, raw, blobs, prefix if kind == OPAQUE and codec == ZSTD else [])
    for kind, raw_bytes in ((CONTENT, content_bytes), (OBSERVED, observed_bytes)):
        codec, data = _compress(raw_bytes)
        put(kind, codec, data, len(raw_bytes), [], [])
    table = wire.pack([section.to_wire() for section in sections])
    out.write(table)
    head = HEADER.pack(MAGIC, MAJOR, MINOR, 0, 0, 0, position, len(table))
    out.seek(0)
    out.write(head + sha256(head + table))


def _prefix_for_opaque(frames: list[tuple[int, list[int]]], content: Content) -> list[int]:
    """Frames that opaque frames may copy from: torch's graph entries hold a second copy of the kernels."""
    chosen: list[int] = []
    room = DEFAULT_LIMITS.window_bytes // 2
    if any(kind == OPAQUE for kind, _ in frames):
        for position, (kind, blobs) in enumerate(frames):
            size = sum(content.blobs[blob][1] for blob in blobs)
            if kind in {LAUNCH, IR} and size <= room:
                chosen.append(position)
                room -= size
    return chosen


def _compress(raw: bytes, shared: bytes = b"") -> tuple[int, bytes]:
    """Return codec and stored bytes; a frame that does not shrink, or shrinks suspiciously well, is stored as it is."""
    ratio_limit = DEFAULT_LIMITS.ratio if len(raw) > DEFAULT_LIMITS.ratio_applies_above_bytes else len(raw) + 1
    for level, hash_log in EFFORTS if shared else EFFORTS[1:]:
        data = _zstd(raw, shared, level, hash_log)
        if len(data) >= len(raw):
            break
        if len(raw) <= ratio_limit * len(data):
            return ZSTD, data
    return STORED, raw


def _zstd(raw: bytes, shared: bytes, level: int, hash_log: int) -> bytes:
    # zstd's long-distance matcher stays off: with it, real graph entries came out twice as large, in twice the time.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=len(raw) + len(shared),
        window_log=max(10, min(25, (len(raw) + len(shared)).bit_length())),
        hash_log=hash_log,
        write_checksum=True,
        write_content_size=True,
        write_dict_id=False,
    )
    compressor = zstandard.ZstdCompressor(
        compression_params=parameters, dict_data=dictionary(shared) if shared else None
    )
    data: bytes = compressor.compress(raw)
    return data
