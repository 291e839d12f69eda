# SPDX-License-Identifier: Apache-2.0
"""Reads the header and the table of contents of a container: `read_head` says what lies where, and
refuses what cannot be.

`Container` calls it when a bundle is opened.  What the numbers mean is in `container_layout.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from bundler.errors import FormatError, LimitExceeded, TruncatedBundle, UnsupportedVersion
from bundler.format import wire
from bundler.format.container_layout import (
    BLOB_SECTIONS,
    HEADER,
    HEADER_BYTES,
    IR,
    LAUNCH,
    MAGIC,
    MAJOR,
    MINOR,
    STORED,
    ZSTD,
    ByteSource,
    Section,
)
from bundler.format.digest import DIGEST_BYTES, check_digest
from bundler.format.entry_rows import version_fix
from bundler.format.limits import MIB, Limits
from bundler.format.summary import count

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
