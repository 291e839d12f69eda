# SPDX-License-Identifier: Apache-2.0
"""The `.tbundle` container: a checked header and table of contents around independent zstd frames.

`read_head` reads both, says what lies where, and refuses what cannot be; `Container` reads one
bundle: size, then digest, then parse, at every level.  `Bundle` makes it when a bundle is opened
(`bundle.py`), and fetches its blobs from it.

::

    0   8   magic  89 'T' 'B' 'N' 'D' 'L' 0D 0A
    8   2   major     little-endian, like every number here
    10  2   minor
    12  4   incompatible flags   an unknown bit: do not read
    16  4   read-only flags      an unknown bit: read, never write again
    20  4   compatible flags     an unknown bit: ignore
    24  8   offset of the table of contents
    32  8   size of the table of contents
    40  32  sha256 over bytes 0..39 and the table of contents
    72  …   sections, one after the other, then the table, which ends the file

The launch set of all kernels is in frames of its own, so a reader that only launches never touches
IR.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, Protocol

import msgspec
import zstandard

from bundler.errors import (
    BundlerError,
    FormatError,
    LimitExceeded,
    NotFound,
    TruncatedBundle,
    UnsupportedVersion,
)
from bundler.format import wire
from bundler.format.digest import DIGEST_BYTES, check_digest, digest_text, sha256
from bundler.format.frames import (
    Frame,
    FrameBuffers,
    FramesAhead,
    Section,
    check_frame,
    frames_at_once,
    undecodable,
)
from bundler.format.limits import DEFAULT_LIMITS, MIB, Limits
from bundler.format.manifest import Content
from bundler.format.summary import count, plural
from bundler.format.wire import version_fix

MAGIC = b"\x89TBNDL\r\n"
# The version that is read and written; the major is the schema of the content.
MAJOR, MINOR = 2, 0
HEADER = struct.Struct("<8sHHIIIQQ")
HEADER_BYTES = HEADER.size + DIGEST_BYTES

LAUNCH, IR, TUNING, HELPERS, OPAQUE, CONTENT, OBSERVED, SIGNATURES = 1, 2, 3, 4, 5, 16, 17, 18
BLOB_SECTIONS = frozenset({LAUNCH, IR, TUNING, HELPERS, OPAQUE})
STORED, ZSTD = 0, 1
# Chosen on a real Inductor cache (docs/benchmarks.md): level 6 leaves its graph entries twice as
# large.
ZSTD_LEVEL = 9
# Raw bytes in one frame: small enough that one kernel costs little, large enough that neighbours
# share.
FRAME_TARGET_BYTES = {
    LAUNCH: 4 * MIB,
    IR: 8 * MIB,
    TUNING: 1 * MIB,
    HELPERS: 4 * MIB,
    OPAQUE: 32 * MIB,
}


class ByteSource(Protocol):
    """Random access to the bytes of a container; `read` may be called from several threads."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`, fewer only at the end of the source."""

    def close(self) -> None:
        """Release the source; closing twice is fine."""


# Our writer's sections with a prefix are larger than that prefix, but for the last one.
PREFIX_FACTOR = 4
# A section has two inside its own, and all are in one.
_ARRAYS_PER_SECTION, _NESTING = 3, 3


_SECTIONS = msgspec.msgpack.Decoder(list[Section])


def read_exactly(source: ByteSource, offset: int, size: int, what: str) -> bytes:
    """Return so many bytes; raises `TruncatedBundle` where the file ends before."""
    data = source.read(offset, size)
    if len(data) != size:
        raise TruncatedBundle(
            f"{what}: expected {count(size, 'byte')} at offset {offset}, the file has"
            f" {count(source.size, 'byte')}; copy or download the bundle again",
            what=what,
            expected=offset + size,
            got=source.size,
        )
    return data


def read_head(source: ByteSource, limits: Limits) -> tuple[bool, bool, int, list[Section]]:
    """Read header and table.

    Returns:
        Whether the minor version is newer than ours, so that records may have further fields;
        whether it has features without which nobody may write it again; bits that may be ignored;
        and the table.

    Raises:
        FormatError, TruncatedBundle, DigestMismatch, LimitExceeded, UnsupportedVersion: they are
            not those of a sound container.
    """
    magic = source.read(0, len(MAGIC))
    # A file that ends within these bytes begins like a bundle: it is told as truncated, by the next
    # read.
    if not magic or not MAGIC.startswith(magic):
        raise FormatError(
            f"not a bundle: expected it to begin with {MAGIC!r}, got {magic!r}",
            expected=MAGIC,
            got=magic,
        )
    header = read_exactly(source, 0, HEADER_BYTES, "header")
    _, major, minor, incompatible, read_only, compatible, offset, size = HEADER.unpack_from(header)
    if major != MAJOR or incompatible:
        raise UnsupportedVersion(
            f"bundle format {major}.{minor} with incompatible flags {incompatible:#x}, "
            f"expected {MAJOR}.x without such flags; {version_fix(major, MAJOR)}",
            got=(major, minor, incompatible),
            expected=(MAJOR, MINOR, 0),
        )
    table = _read_table(source, offset, size, limits)
    check_digest(
        header[: HEADER.size] + table, header[HEADER.size :], "header and table of contents"
    )
    newer_minor = minor > MINOR
    sections = _check_sections(_unpacked(table, limits, open_ended=newer_minor), offset, limits)
    return newer_minor, read_only != 0, compatible, sections


def _read_table(source: ByteSource, offset: int, size: int, limits: Limits) -> bytes:
    limits.check("document_bytes", size, "table of contents")
    if offset < HEADER_BYTES or offset + size > source.size:
        raise TruncatedBundle(
            f"table of contents: expected the file to have {offset + size} bytes, it has"
            f" {source.size}; copy or download the bundle again",
            expected=offset + size,
            got=source.size,
        )
    if offset + size != source.size:
        raise FormatError(
            f"{count(source.size - offset - size, 'byte')} after the end of the bundle"
        )
    return read_exactly(source, offset, size, "table of contents")


def _unpacked(table: bytes, limits: Limits, *, open_ended: bool) -> Iterable[Section]:
    """Return the sections; the first that is none raises `FormatError` when it is reached."""
    found = _decoded(table, limits)
    if found is not None:
        return found
    # One by one, each by the types that are expected: it says which field is wrong, and takes what
    # a newer minor added.
    rows = wire.unpack(table, "table of contents", limits)
    return (_section(number, row, open_ended=open_ended) for number, row in enumerate(rows))


def _decoded(table: bytes, limits: Limits) -> list[Section] | None:
    """Return the sections where all of them are as this version writes them, and within the limits
    for certain.
    """
    try:
        sections = wire.decode(table, _SECTIONS, "table of contents", limits)
    except FormatError:
        return None
    members = max([max(len(section.blobs), len(section.prefix)) for section in sections], default=0)
    small = (
        limits.depth >= _NESTING
        and max(members, _ARRAYS_PER_SECTION * len(sections)) <= limits.array_items
        and all(len(section.sha256) == DIGEST_BYTES for section in sections)
    )
    return sections if small and wire.is_canonical(table, sections) else None


def _section(number: int, row: Any, *, open_ended: bool) -> Section:
    kind, codec, offset, stored, raw, digest, blobs, prefix = wire.fields(
        row, "section", int, int, int, int, int, bytes, list, list, open_ended=open_ended
    )
    if not {*map(type, blobs), *map(type, prefix)} <= {int}:
        raise FormatError(f"section {number}: expected numbers of blobs, and of sections before it")
    if min(blobs, default=0) < 0:
        raise FormatError(f"section {number}: blob {min(blobs)} is unknown")
    return Section(kind, codec, offset, stored, raw, digest, tuple(blobs), tuple(prefix))


def _check_sections(found: Iterable[Section], end: int, limits: Limits) -> list[Section]:
    sections: list[Section] = []
    position = HEADER_BYTES
    for section in found:
        # No digest covers bytes between sections, so there must be none.
        if section.offset != position:
            raise FormatError(
                f"section {len(sections)} begins at {section.offset}, expected {position}: a hole"
                " or overlap"
            )
        _check_section(len(sections), section, sections, limits)
        sections.append(section)
        position += section.stored_bytes
    _check_prefixes(sections, limits)
    if position != end:
        raise FormatError(f"sections end at {position}, expected {end}: a hole or overlap")
    return sections


def _check_section(number: int, section: Section, before: list[Section], limits: Limits) -> None:
    what = f"section {number}"
    # A megabyte more as stored: what does not compress grows a little.
    limit = limits.frame_bytes if section.kind in BLOB_SECTIONS else limits.manifest_bytes
    if section.raw_bytes > limit or section.stored_bytes > limit + MIB:
        raise LimitExceeded(
            f"{what}: {section.raw_bytes} bytes, over the limit of {limit}", limit=limit
        )
    if section.codec not in {STORED, ZSTD} or (
        section.codec == STORED and section.raw_bytes != section.stored_bytes
    ):
        raise FormatError(
            f"{what}: codec {section.codec} with sizes {section.stored_bytes}, {section.raw_bytes}"
        )
    # A small section may well be all zeros; of a large one such growth is a bomb.
    large = section.raw_bytes > limits.ratio_applies_above_bytes
    if large and section.raw_bytes > limits.ratio * section.stored_bytes:
        raise LimitExceeded(
            f"{what}: {section.stored_bytes} bytes would expand to {section.raw_bytes}, more than "
            f"{limits.ratio} times",
            limit=limits.ratio,
        )
    # A section of a prefix has no prefix itself, so a blob costs one level of further frames at the
    # most.
    earlier = [before[p] for p in section.prefix if 0 <= p < len(before)]
    if len(earlier) != len(section.prefix) or any(
        s.kind not in {LAUNCH, IR} or s.prefix for s in earlier
    ):
        raise FormatError(f"{what}: its prefix is not a list of earlier kernel sections")
    if sum(s.raw_bytes for s in earlier) > limits.window_bytes:
        raise LimitExceeded(f"{what}: its prefix is over the limit of {limits.window_bytes} bytes")


def _check_prefixes(sections: list[Section], limits: Limits) -> None:
    """Bound what a reader decodes for prefixes by what there is: one large prefix may serve a
    thousand tiny sections.
    """
    raw = sum(section.raw_bytes for section in sections)
    prefixed = sum(sections[p].raw_bytes for section in sections for p in section.prefix)
    limit = PREFIX_FACTOR * raw + limits.window_bytes
    if prefixed > limit:
        raise LimitExceeded(
            f"table of contents: prefixes of {prefixed} bytes in all for sections of {raw}, over"
            f" the limit of {limit}",
            limit=limit,
            got=prefixed,
        )


def write_end(
    out: BinaryIO, sections: Sequence[Section], position: int, compatible_flags: int = 0
) -> None:
    """Write the table of a container whose sections were written and end at a position, then its
    header.
    """
    table = wire.pack(sections)
    out.write(table)
    head = HEADER.pack(MAGIC, MAJOR, MINOR, 0, 0, compatible_flags, position, len(table))
    out.seek(0)
    out.write(head + sha256(head + table))


_NOWHERE = -1


def sections_of_blobs(sections: Sequence[Section], sizes: Sequence[int]) -> array[int]:
    """Return for each blob the number of its section.

    Args:
        sections: those of the container.
        sizes: the size of each blob.

    Raises:
        FormatError: a blob is stored twice, or nowhere, or sections hold something else.
    """
    sizes = [*sizes]  # of an array each look would make a number
    found = _sections_of(sections, sizes)
    if found is None:
        found = _looked_up(sections, sizes)
    return array("i", found)


def _sections_of(sections: Sequence[Section], sizes: Sequence[int]) -> list[int] | None:
    """Return the section of each blob, None where something is wrong."""
    found, stored = [_NOWHERE] * len(sizes), 0
    for number, section in enumerate(sections):
        blobs = section.blobs  # none of them is negative
        if section.kind not in BLOB_SECTIONS:
            continue
        try:
            size = sum(map(sizes.__getitem__, blobs))
        except IndexError:
            return None
        if size != section.raw_bytes:
            return None
        for blob in blobs:
            found[blob] = number
        stored += len(blobs)
    # As many as there are, and all of them: so each once.
    return found if stored == len(sizes) and _NOWHERE not in found else None


def _looked_up(sections: Sequence[Section], sizes: Sequence[int]) -> list[int]:
    """Return the same, one blob after the other, which tells what is wrong."""
    found = [_NOWHERE] * len(sizes)
    for number, section in enumerate(sections):
        if section.kind not in BLOB_SECTIONS:
            continue
        for blob in section.blobs:
            if not 0 <= blob < len(sizes) or found[blob] != _NOWHERE:
                raise FormatError(f"section {number}: blob {blob} is unknown or stored twice")
            found[blob] = number
        size = sum([sizes[blob] for blob in section.blobs])
        if size != section.raw_bytes:
            raise FormatError(
                f"section {number}: blobs of {count(size, 'byte')} in a frame of"
                f" {section.raw_bytes}"
            )
    lost = found.count(_NOWHERE)
    if lost:
        raise FormatError(
            f"{count(lost, 'blob')} of the manifest {plural(lost, 'is')} in no section"
        )
    return found


# A restore goes through launch set and IR side by side, and a kernel may lie across the border of
# two frames.
CACHED_FRAMES = 3
# Who asks for so many blobs at once goes through the bundle, and wants the frames that follow too.
_MANY = 16
_CHUNK_BYTES = 1 << 20


class Container:
    """Reads a container lazily.

    Opening reads header, table and manifest; a blob decodes its frame, and the last few frames stay
    decoded. Safe under threads.  After a fork, child and parent share the open file without
    disturbing each other, since reads carry their own offset.
    """

    # What a blob source says of itself (`BlobSource`): it reads a local file, and hashes each blob
    # before it returns it.
    waits = False
    verified = True
    verifies_stored = False

    def __init__(self, source: ByteSource, limits: Limits = DEFAULT_LIMITS) -> None:
        self._source = source
        self._limits = limits
        # By number.  No lock: another thread could hold it at the moment of a fork.  This
        # dictionary is never changed, but replaced.
        self._frames: dict[int, Frame] = {}
        self._uses = itertools.count(1)
        # Made when frames are decoded ahead for the first time.
        self._ahead: FramesAhead | None = None
        self._threads = 0
        self._buffers = FrameBuffers(CACHED_FRAMES + 2 * (frames_at_once() - 1))
        self.newer_minor, self.read_only, self.compatible_flags, self.sections = read_head(
            source, limits
        )
        self.content_bytes = self._manifest(CONTENT)
        self.observed_bytes = self._manifest(OBSERVED)
        self.content = Content.decode(self.content_bytes, limits, newer_minor=self.newer_minor)
        self._sections_of_blobs = sections_of_blobs(self.sections, self.content.blobs.sizes)

    def stored(self, section: Section) -> bytes:
        """Return the bytes of a section as they are stored, verified; raises `TruncatedBundle`,
        `DigestMismatch`.
        """
        data = read_exactly(self._source, section.offset, section.stored_bytes, "section")
        check_digest(data, section.sha256, f"section at offset {section.offset}")
        return data

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the whole file in pieces."""
        for offset in range(0, self._source.size, _CHUNK_BYTES):
            yield self._source.read(offset, _CHUNK_BYTES)

    def close(self) -> None:
        """Release the source and the decoded frames."""
        if self._ahead is not None:
            self._ahead.close()
        self._frames = {}
        self._buffers.clear()
        self._source.close()

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Have the frames of many blobs decoded ahead, where there are processors to spare; each is
        decoded when it is read, if not before.
        """
        self._threads = frames_at_once() - 1 if len(digests) >= _MANY else 0
        if not self._threads:
            return
        if self._ahead is None:
            self._ahead = FramesAhead()
        if not self._frames:
            # Of a restore of everything, one of the launch set and one of IR.
            known = map(self.content.blobs.number, itertools.islice(digests, _MANY))
            first = dict.fromkeys([self._sections_of_blobs[n] for n in known if n is not None])
            self._begin(self._ahead, [*filter(self._may_be_ahead, first)][: self._threads])

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> memoryview:
        """Return the verified bytes of a blob where they lie in their decoded frame, which stays in
        memory as long.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the stored bytes are damaged.
        """
        frame = self._frame_of(digest)
        data = frame.data[self._slices_of(frame)[digest]]
        check_digest(data, digest, "blob")
        return data

    def view_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the verified bytes of several blobs, as `view_blob` does."""
        views = self.stored_blobs(digests)
        for digest, data in zip(digests, views, strict=True):
            check_digest(data, digest, "blob")
        return views

    def stored_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes of several blobs, which the caller compares with their digests.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the section that a blob lies in is damaged.
        """
        views: list[memoryview] = []
        data, slices = memoryview(b""), dict[bytes, slice]()
        # A restore reads hundreds of thousands: nearly all lie in the frame of the one before.
        for digest in digests:
            if digest not in slices:
                frame = self._frame_of(digest)
                data, slices = frame.data, self._slices_of(frame)
            views.append(data[slices[digest]])
        return views

    def verify(self, digests: Collection[bytes]) -> None:
        """Decode and check every section and these blobs; raises what reading them would raise."""
        wanted = set(digests)
        for number, section in enumerate(self.sections):
            if section.kind in BLOB_SECTIONS:
                self.view_blobs([*wanted.intersection(self._slices_of(self._frame(number)))])
            else:
                self.stored(section)

    def _manifest(self, kind: int) -> bytes:
        found = [section for section in self.sections if section.kind == kind]
        if len(found) != 1:
            raise FormatError(f"expected one section of kind {kind}, got {len(found)}")
        return self.decoded(found[0])

    def _frame_of(self, digest: bytes) -> Frame:
        """Return the frame that a blob lies in; raises `NotFound`."""
        for frame in reversed(self._frames.values()):
            if digest in self._slices_of(frame):
                frame.used = next(self._uses)
                return frame
        blob = self.content.blobs.number(digest)
        if blob is None:
            raise NotFound(
                f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest)
            )
        return self._frame(self._sections_of_blobs[blob])

    def _slices_of(self, frame: Frame) -> dict[bytes, slice]:
        """Return where each blob of a frame lies in it, by raw digest."""
        if frame.slices is None:
            blobs = frame.section.blobs
            ends = [*accumulate(self.content.blobs.sizes_of(blobs))]
            frame.slices = dict(
                zip(self.content.blobs.digests_of(blobs), map(slice, [0, *ends], ends), strict=True)
            )
        return frame.slices

    def _frame(self, number: int) -> Frame:
        # Two threads may decode the same frame, which costs time, never correctness.
        frame = self._frames.get(number)
        if frame is None:
            # Before others are decoded, so that their memory can be used again.
            self._frames = self._youngest()
            if self._ahead is not None:
                self._begin_following(self._ahead, number)
            frame = self._read(number)
            self._frames = {**self._youngest(), number: frame}
        frame.used = next(self._uses)
        return frame

    def _youngest(self) -> dict[int, Frame]:
        frames = sorted(self._frames.items(), key=lambda frame: frame[1].used)
        return dict(frames[1 - CACHED_FRAMES :])

    # ---------------------------------------------------------------- Frames that are decoded ahead

    def _begin_following(self, ahead: FramesAhead, number: int) -> None:
        """Begin the frames of the same kind that follow, as many as threads decode at once, and
        forget others of this kind.
        """
        kind, wanted = self.sections[number].kind, [number]
        if self._threads and kind in {LAUNCH, IR}:
            after = range(number + 1, len(self.sections))
            same = (n for n in after if self.sections[n].kind == kind and n not in self._frames)
            wanted += filter(self._may_be_ahead, itertools.islice(same, self._threads))
        ahead.forget(
            n
            for n in ahead.begun()
            if n not in wanted and (self.sections[n].kind == kind or not self._threads)
        )
        self._begin(ahead, wanted[1:])

    def _begin(self, ahead: FramesAhead, numbers: Iterable[int]) -> None:
        begun = ahead.begun()
        for number in numbers:
            if number not in begun:
                # What is wrong with it shows when it is asked for.
                with contextlib.suppress(BundlerError, MemoryError):
                    ahead.begin(number, self._prepared(number, b""), self._threads)

    def _may_be_ahead(self, number: int) -> bool:
        section = self.sections[number]
        return section.kind in {LAUNCH, IR} and section.codec == ZSTD and not section.prefix

    # ------------------------------------------------------------------------------------- Decoding

    def _read(self, number: int) -> Frame:
        section = self.sections[number]
        frame = None if self._ahead is None else self._ahead.take(number)
        if frame is None:
            if section.codec == STORED:
                return Frame.of_bytes(section, self.stored(section))
            prefix = [self._frame(p).data for p in section.prefix if self.sections[p].raw_bytes]
            frame = self._prepared(number, b"".join(prefix))
            frame.decode()
        frame.finish()
        return frame

    def _prepared(self, number: int, prefix: bytes) -> Frame:
        section = self.sections[number]
        return Frame(section, self.stored(section), prefix, self._limits, self._buffers)

    def decoded(self, section: Section) -> bytes:
        """Return the raw bytes of a section that needs no prefix; raises as `stored`, and
        `FormatError`.
        """
        data = self.stored(section)
        if section.codec == STORED:
            return data
        try:
            check_frame(data, section, self._limits)
            raw: bytes = zstandard.ZstdDecompressor().decompress(
                data, max_output_size=section.raw_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        return raw
