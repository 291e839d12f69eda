# SPDX-License-Identifier: Apache-2.0
"""Writes a container: which blob goes into which frame, how frames are compressed, header last.

`write_container` writes what `plan_frames` decides.  `Bundle` calls it when it is saved or turned
into bytes, and `check_level` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import zstandard

from bundler.errors import ConfigError
from bundler.format import names
from bundler.format.container import (
    CONTENT,
    FRAME_TARGET_BYTES,
    HEADER_BYTES,
    HELPERS,
    IR,
    LAUNCH,
    OBSERVED,
    OPAQUE,
    STORED,
    TUNING,
    ZSTD,
    ZSTD_LEVEL,
    write_end,
)
from bundler.format.digest import digest_raw, sha256
from bundler.format.frames import Section, dictionary
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.manifest import Content, Observed

HIGHEST_LEVEL = zstandard.MAX_COMPRESSION_LEVEL
# A table of 64 MiB: in the level's own, of 8 MiB, what lies more than a few MiB back in a prefix is
# forgotten.
PREFIX_HASH_LOG = 24
# Copies of one kernel shrink so well that a reader would take the frame for a bomb; the headers of
# blocks of this size keep it just under the limit.
SMALL_BLOCK_BYTES = 2048
COMPRESSION_THREADS = 4
# So little is compressed before threads have begun.
COMPRESSED_HERE_BYTES = 256 << 10


def plan_frames(content: Content) -> list[tuple[int, list[int]]]:
    """Decide which blob goes into which frame: launch set first, then the rest, each blob once."""
    index = {raw: position for position, (raw, _) in enumerate(content.blobs)}
    placed: set[int] = set()
    frames: list[tuple[int, list[int]]] = []

    def add(section: int, digests: Iterator[str]) -> None:
        fill = (
            FRAME_TARGET_BYTES[section] + 1
        )  # over, so that even an empty blob begins a frame of this section
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
    add(
        IR,
        (
            a.digest
            for k in content.kernels
            for a in k.artifacts
            if a.kind not in names.LAUNCH_KINDS
        ),
    )
    add(HELPERS, (e.artifact.digest for e in content.helpers))
    add(OPAQUE, (e.artifact.digest for e in content.opaque))
    return frames


def check_level(level: int) -> None:
    """Raise `ConfigError` when this is no level of compression."""
    if type(level) is not int or not 1 <= level <= HIGHEST_LEVEL:
        raise ConfigError(
            f"level={level!r}: expected a whole number from 1, the fastest, to {HIGHEST_LEVEL}",
            got=level,
        )


def write_container(
    out: BinaryIO,
    content: Content,
    encode: Callable[[], tuple[bytes, bytes]],
    read_blob: Callable[[bytes], bytes],
    level: int = ZSTD_LEVEL,
) -> None:
    """Write a container to a seekable file at position 0.

    Args:
        out: the file; the header is written last, so an interrupted write leaves no valid
            container.
        content: the entries.
        encode: returns the bytes of the content section and of the observed one.
        read_blob: returns the verified bytes of a blob by raw digest.
        level: of compression, as zstd counts.

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
        return (*_compress(raw, level, shared if frame[0] == OPAQUE else b""), len(raw))

    out.write(b"\0" * HEADER_BYTES)
    sections: list[Section] = []
    position = HEADER_BYTES

    def put(
        kind: int, codec: int, data: bytes, raw: int, blobs: list[int], prefix: list[int]
    ) -> None:
        nonlocal position
        out.write(data)
        sections.append(
            Section(
                kind, codec, position, len(data), raw, sha256(data), tuple(blobs), tuple(prefix)
            )
        )
        position += len(data)

    def put_all(compressed: Iterable[tuple[int, bytes, int]]) -> tuple[bytes, bytes]:
        # While threads compress; what readers refuse is not written.
        content_bytes, observed_bytes = encode()
        Content.decode(content_bytes)
        Observed.decode(observed_bytes)
        for (kind, blobs), (codec, data, raw) in zip(frames, compressed, strict=True):
            put(kind, codec, data, raw, blobs, prefix if kind == OPAQUE and codec == ZSTD else [])
        return content_bytes, observed_bytes

    if sum(size for _, size in content.blobs) <= COMPRESSED_HERE_BYTES:
        content_bytes, observed_bytes = put_all(map(compress, frames))
    else:
        from concurrent.futures import ThreadPoolExecutor  # who only reads imports this module too

        with ThreadPoolExecutor(COMPRESSION_THREADS) as pool:
            try:
                content_bytes, observed_bytes = put_all(pool.map(compress, frames))
            except BaseException:
                # After an error, or Ctrl-C, nobody waits for the frames that no thread has begun.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for kind, raw_bytes in ((CONTENT, content_bytes), (OBSERVED, observed_bytes)):
        codec, data = _compress(raw_bytes, level)
        put(kind, codec, data, len(raw_bytes), [], [])
    write_end(out, sections, position)


def _prefix_for_opaque(frames: list[tuple[int, list[int]]], content: Content) -> list[int]:
    """Frames that opaque frames may copy from: torch's graph entries hold a second copy of the
    kernels.
    """
    chosen: list[int] = []
    room = DEFAULT_LIMITS.window_bytes // 2
    if any(kind == OPAQUE for kind, _ in frames):
        for position, (kind, blobs) in enumerate(frames):
            size = sum(content.blobs[blob][1] for blob in blobs)
            if kind in {LAUNCH, IR} and size <= room:
                chosen.append(position)
                room -= size
    return chosen


def _compress(raw: bytes, level: int, shared: bytes = b"") -> tuple[int, bytes]:
    """Return codec and stored bytes; a frame that does not shrink, or shrinks suspiciously well, is
    stored as it is.
    """
    # zstd's long-distance matcher stays off: with it, real graph entries came out twice as large,
    # in twice the time.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=len(raw) + len(shared),
        window_log=max(10, min(25, (len(raw) + len(shared)).bit_length())),
        hash_log=PREFIX_HASH_LOG if shared else 0,
        write_checksum=True,
        write_content_size=True,
        write_dict_id=False,
    )
    compressor = zstandard.ZstdCompressor(
        compression_params=parameters, dict_data=dictionary(shared) if shared else None
    )
    data = compressor.compress(raw)
    if _like_a_bomb(raw, data):
        data = _in_small_blocks(compressor, raw)
    return (STORED, raw) if len(data) >= len(raw) or _like_a_bomb(raw, data) else (ZSTD, data)


def _like_a_bomb(raw: bytes, data: bytes) -> bool:
    return len(raw) > DEFAULT_LIMITS.ratio_applies_above_bytes and len(
        raw
    ) > DEFAULT_LIMITS.ratio * len(data)


def _in_small_blocks(compressor: zstandard.ZstdCompressor, raw: bytes) -> bytes:
    steps = compressor.compressobj(size=len(raw))
    pieces = (
        raw[start : start + SMALL_BLOCK_BYTES] for start in range(0, len(raw), SMALL_BLOCK_BYTES)
    )
    flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
    return b"".join(
        [*(steps.compress(piece) + steps.flush(flush) for piece in pieces), steps.flush()]
    )
