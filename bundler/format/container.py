# SPDX-License-Identifier: Apache-2.0
"""Reads a container: size, then digest, then parse, at every level.

`Container` is the reader of one bundle; `Bundle` makes it when a bundle is opened (`bundle.py`), and fetches its blobs from it.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence

import zstandard

from bundler.errors import FormatError, NotFound
from bundler.format.container_layout import (
    BLOB_SECTIONS,
    CONTENT,
    IR,
    LAUNCH,
    OBSERVED,
    STORED,
    ByteSource,
    Section,
    dictionary,
    frame_bytes,
)
from bundler.format.digest import check_digest, digest_text
from bundler.format.frame_buffers import FrameBuffers
from bundler.format.frames_ahead import decoded_together, frames_at_once
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content
from bundler.format.section_table import read_exactly, read_head
from bundler.format.summary import count, plural

# A restore goes through launch set and IR side by side, and a kernel may lie across the border of two frames.
CACHED_FRAMES = 3
# Who asks for so many blobs at once goes through the bundle, and wants the frames that follow too.
_MANY = 16
_NOWHERE = -1


class _DecodedFrame:
    """A decoded section.

    Attributes:
        number: which.
        data: its bytes.
        ends: where its blobs end; the first begins at the beginning.
        places: raw digest of a blob -> its place among them.
        used: when it was last looked at.
    """

    __slots__ = ("data", "ends", "number", "places", "used")

    def __init__(self, number: int, data: memoryview, sizes: Iterable[int], digests: Iterable[bytes]) -> None:
        self.number, self.data, self.used = number, data, 0
        self.ends = [*itertools.accumulate(sizes), 0]  # so that the one before the first is 0
        self.places = dict(zip(digests, itertools.count(), strict=False))


_CHUNK_BYTES = 1 << 20


class Container:
    """Reads a container lazily.

    Opening reads header, table and manifest; a blob decodes its frame, and the last few frames stay decoded.
    Safe under threads.  After a fork, child and parent share the open file without disturbing each other, since
    reads carry their own offset.
    """

    # What a blob source says of itself (`BlobSource`): it reads a local file, and hashes each blob before it returns it.
    waits = False
    verified = True
    verifies_stored = False

    def __init__(self, source: ByteSource, limits: Limits = DEFAULT_LIMITS) -> None:
        self._source = source
        self._limits = limits
        # No lock: another thread could hold it at the moment of a fork.  This list is never changed, but replaced.
        self._frames: list[_DecodedFrame] = []
        self._uses = itertools.count(1)
        self._ahead = 0
        self._buffers = FrameBuffers(CACHED_FRAMES + 2 * (frames_at_once() - 1))
        head = read_head(source, limits)
        self.major, self.minor, self.newer_minor = head.major, head.minor, head.newer_minor
        self.read_only, self.compatible_flags, self.sections = head.read_only, head.compatible_flags, head.sections
        self.content_bytes = self._manifest(CONTENT)
        self.observed_bytes = self._manifest(OBSERVED)
        self.content = Content.decode(self.content_bytes, limits, newer_minor=self.newer_minor)
        if self.content.schema != self.major:
            raise FormatError(
                f"content: schema {self.content.schema} in a bundle of version {self.major}.x, expected {self.major}",
                got=self.content.schema, expected=self.major,
            )  # fmt: skip
        self._section_numbers = self._checked_places()

    def stored(self, section: Section) -> bytes:
        """Return the bytes of a section as they are stored, verified; raises `TruncatedBundle`, `DigestMismatch`."""
        data = read_exactly(self._source, section.offset, section.stored_bytes, "section")
        check_digest(data, section.sha256, f"section at offset {section.offset}")
        return data

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the whole file in pieces."""
        for offset in range(0, self._source.size, _CHUNK_BYTES):
            yield self._source.read(offset, _CHUNK_BYTES)

    def close(self) -> None:
        """Release the source and the decoded frames."""
        self._frames = []
        self._buffers.clear()
        self._source.close()

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Note whether frames are to be decoded ahead; each is decoded when the first of its blobs is read, if not before."""
        self._ahead = frames_at_once() - 1 if len(digests) >= _MANY else 0

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> memoryview:
        """Return the verified bytes of a blob where they lie in their decoded frame, which stays in memory as long.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the stored bytes are damaged.
        """
        (data,) = self.stored_blobs((digest,))
        if hashlib.sha256(data).digest() != digest:
            check_digest(data, digest, "blob")
        return data

    def view_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the verified bytes of several blobs, as `view_blob` does."""
        views, sha256 = self.stored_blobs(digests), hashlib.sha256
        for digest, data in zip(digests, views, strict=True):
            if sha256(data).digest() != digest:
                # Hashes again and raises, with both digests in the message: only damaged bytes pay for that.
                check_digest(data, digest, "blob")
        return views

    def stored_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes of several blobs, which the caller compares with their digests.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the section that a blob lies in is damaged.
        """
        views: list[memoryview] = []
        places: dict[bytes, int] = {}
        data, ends = memoryview(b""), [0]
        # A restore reads hundreds of thousands: nearly all lie in the frame of the one before.
        for digest in digests:
            if digest not in places:
                frame = self._frame_of(digest)
                data, ends, places = frame.data, frame.ends, frame.places
            place = places[digest]
            views.append(data[ends[place - 1] : ends[place]])
        return views

    def verify(self, digests: Collection[bytes]) -> None:
        """Decode and check every section and these blobs; raises what reading them would raise."""
        wanted = set(digests)
        for number, section in enumerate(self.sections):
            if section.kind in BLOB_SECTIONS:
                self.view_blobs([*wanted.intersection(self._frame(number).places)])
            else:
                self.stored(section)

    def _manifest(self, kind: int) -> bytes:
        found = [section for section in self.sections if section.kind == kind]
        if len(found) != 1:
            raise FormatError(f"expected one section of kind {kind}, got {len(found)}")
        return self.decoded(found[0])

    def _checked_places(self) -> array[int]:
        """Return which section each blob lies in; raises `FormatError` unless the sections hold each blob once, and nothing else."""
        sizes = [*self.content.blob_sizes]
        numbers = [_NOWHERE] * len(sizes)
        there = 0
        for number, section in enumerate(self.sections):
            if section.kind not in BLOB_SECTIONS:
                continue
            blobs = section.blobs
            there += len(blobs)
            known = not blobs or 0 <= min(blobs) <= max(blobs) < len(sizes)
            if not known or sum(map(sizes.__getitem__, blobs)) != section.raw_bytes:
                self._raise_misplaced()
            for blob in blobs:
                numbers[blob] = number
        # As many as there are, and each of them: so each once.
        if there != len(sizes) or _NOWHERE in numbers:
            self._raise_misplaced()
        return array("i", numbers)

    def _raise_misplaced(self) -> None:
        """Tell what is wrong with the places of blobs, if anything is."""
        sizes, places = self.content.blob_sizes, dict[int, int]()
        for number, section in enumerate(self.sections):
            if section.kind not in BLOB_SECTIONS:
                continue
            for blob in section.blobs:
                if not 0 <= blob < len(sizes) or blob in places:
                    raise FormatError(f"section {number}: blob {blob} is unknown or stored twice")
                places[blob] = number
            size = sum([sizes[blob] for blob in section.blobs])
            if size != section.raw_bytes:
                raise FormatError(f"section {number}: blobs of {count(size, 'byte')} in a frame of {section.raw_bytes}")
        lost = len(sizes) - len(places)
        if lost:
            raise FormatError(f"{count(lost, 'blob')} of the manifest {plural(lost, 'is')} in no section")

    def _frame_of(self, digest: bytes) -> _DecodedFrame:
        """Return the frame that a blob lies in; raises `NotFound`."""
        for frame in self._frames:
            if digest in frame.places:
                frame.used = next(self._uses)
                return frame
        blob = self.content.blob_number(digest)
        if blob is None:
            raise NotFound(f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest))
        return self._frame(self._section_numbers[blob])

    def _frame(self, number: int) -> _DecodedFrame:
        # Two threads may decode the same frame, which costs time, never correctness.
        frame = next((frame for frame in self._frames if frame.number == number), None)
        if frame is None:
            # Those that are ahead, of launch set and of IR, stay beside those that are looked at.
            most, ahead = CACHED_FRAMES + 2 * self._ahead, self._following(number)
            # Before the next ones are decoded, so that their memory can be used again.
            self._frames = self._youngest(most - 1 - len(ahead))
            decoded = decoded_together(self._decoded, number, ahead)
            for frame in decoded:
                frame.used = next(self._uses)
            self._frames = [*self._youngest(most - len(decoded)), *decoded]
            return decoded[-1]
        frame.used = next(self._uses)
        return frame

    def _following(self, number: int) -> list[int]:
        """Return the frames of the same kind that follow, as many as are wanted, without those that are decoded."""
        kind, present = self.sections[number].kind, {frame.number for frame in self._frames}
        if not self._ahead or kind not in {LAUNCH, IR}:
            return []
        same = (n for n in range(number + 1, len(self.sections)) if self.sections[n].kind == kind and n not in present)
        return list(itertools.islice(same, self._ahead))

    def _decoded(self, number: int) -> _DecodedFrame:
        section, sizes = self.sections[number], self.content.blob_sizes
        prefix = b"".join(self._frame(p).data for p in section.prefix if self.sections[p].raw_bytes)
        return _DecodedFrame(
            number, self._decode_blobs(section, prefix), [sizes[blob] for blob in section.blobs],
            self.content.digests_of(section.blobs),
        )  # fmt: skip

    def _youngest(self, most: int) -> list[_DecodedFrame]:
        return sorted(self._frames, key=lambda frame: frame.used)[-most:]

    def decoded(self, section: Section) -> bytes:
        """Return the raw bytes of a section that needs no prefix; raises as `stored`, and `FormatError`."""
        data = self.stored(section)
        if section.codec == STORED:
            return data
        try:
            self._check_frame(section, data)
            raw: bytes = zstandard.ZstdDecompressor().decompress(
                data, max_output_size=section.raw_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise _undecodable(section, error) from error
        return raw

    def _decode_blobs(self, section: Section, prefix: bytes) -> memoryview:
        data = self.stored(section)
        if section.codec == STORED:
            return memoryview(data)
        try:
            self._check_frame(section, data)
            room = self._buffers.take(section.raw_bytes)
            decoder = zstandard.ZstdDecompressor(dict_data=dictionary(prefix) if prefix else None)
            with decoder.stream_reader(data) as reader:
                # Nothing follows; but the decoder compares the checksum when it is asked for more.
                whole = reader.readinto(room) == section.raw_bytes and not reader.read(1)
            if not whole or frame_bytes(data) != len(data):
                raise FormatError(
                    f"section at offset {section.offset}: not one whole frame of {section.raw_bytes} bytes"
                )
        except zstandard.ZstdError as error:
            raise _undecodable(section, error) from error
        return room.toreadonly()

    def _check_frame(self, section: Section, data: bytes) -> None:
        """Check what a frame declares; the decoder makes room for it, whatever limit it is given."""
        frame = zstandard.get_frame_parameters(data)
        self._limits.check("window_bytes", frame.window_size, "zstd window")
        if frame.content_size != section.raw_bytes or not frame.has_checksum:
            raise FormatError(
                f"section at offset {section.offset}: the frame declares {frame.content_size} bytes "
                f"(checksum: {frame.has_checksum}), the table {section.raw_bytes}"
            )


def _undecodable(section: Section, error: zstandard.ZstdError) -> FormatError:
    return FormatError(f"section at offset {section.offset}: {error}", offset=section.offset)
