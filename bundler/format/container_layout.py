# SPDX-License-Identifier: Apache-2.0
"""The `.tbundle` container: a checked header and table of contents around independent zstd frames.

`read_head` reads both, says what lies where, and refuses what cannot be; `sections_of_blobs` says
in which section each blob lies.

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

import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec
import zstandard
from msgspec import Struct

from bundler.errors import FormatError, LimitExceeded, TruncatedBundle, UnsupportedVersion
from bundler.format import wire
from bundler.format.digest import DIGEST_BYTES, check_digest
from bundler.format.entry_rows import Count, version_fix
from bundler.format.limits import MIB, Limits
from bundler.format.summary import count, plural

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
# Of a zstd frame (RFC 8878): a block begins with three bytes; one of this type has one byte,
# whatever its size says; a checksum ends it.
_BLOCK_HEADER_BYTES, _REPEATED_BYTE, _CHECKSUM_BYTES = 3, 1, 4


class ByteSource(Protocol):
    """Random access to the bytes of a container; `read` may be called from several threads."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`, fewer only at the end of the source."""

    def close(self) -> None:
        """Release the source; closing twice is fine."""


class Section(Struct, array_like=True, frozen=True, gc=False):
    """One entry of the table of contents; `blobs` are indices into the content's blob table, in
    frame order.
    """

    kind: Count
    codec: Count
    offset: Count
    stored_bytes: Count
    raw_bytes: Count
    sha256: bytes
    blobs: tuple[Count, ...] = ()
    prefix: tuple[int, ...] = ()

    def to_wire(self) -> list[Any]:
        """Return the positional form."""
        return [
            self.kind,
            self.codec,
            self.offset,
            self.stored_bytes,
            self.raw_bytes,
            self.sha256,
            list(self.blobs),
            list(self.prefix),
        ]


def dictionary(data: bytes) -> zstandard.ZstdCompressionDict:
    """Return raw bytes as a dictionary that a frame may copy from."""
    return zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def frame_bytes(data: bytes) -> int:
    """Return how long a zstd frame with a checksum is that begins with `data`; a decoder of streams
    says nothing of what follows it.
    """
    position, last = zstandard.frame_header_size(data), 0
    while not last and position < len(data):
        block = int.from_bytes(data[position : position + _BLOCK_HEADER_BYTES], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        position += _BLOCK_HEADER_BYTES + (1 if kind == _REPEATED_BYTE else size)
    return position + _CHECKSUM_BYTES


# Our writer's sections with a prefix are larger than that prefix, but for the last one.
PREFIX_FACTOR = 4
# A section has two inside its own, and all are in one.
_ARRAYS_PER_SECTION, _NESTING = 3, 3


class ContainerHead(Struct, frozen=True):
    """What the header and the table of a container say.

    Attributes:
        major, minor: the version of the format.
        newer_minor: whether the minor is newer than ours, so that records may have further fields.
        read_only: whether it has features without which nobody may write it again.
        compatible_flags: bits that may be ignored.
        sections: the table.
    """

    major: int
    minor: int
    newer_minor: bool
    read_only: bool
    compatible_flags: int
    sections: list[Section]


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


def read_head(source: ByteSource, limits: Limits) -> ContainerHead:
    """Read header and table.

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
    return ContainerHead(major, minor, newer_minor, read_only != 0, compatible, sections)


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
    return sections if small and wire.encodes_to(sections, table) else None


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
        _check_section(section, sections, limits)
        sections.append(section)
        position += section.stored_bytes
    _check_prefixes(sections, limits)
    if position != end:
        raise FormatError(f"sections end at {position}, expected {end}: a hole or overlap")
    return sections


def _check_section(section: Section, before: list[Section], limits: Limits) -> None:
    what = f"section {len(before)}"
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
        raise LimitExceeded(f"{what}: its prefix is over {limits.window_bytes} bytes")


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
