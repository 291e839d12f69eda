# SPDX-License-Identifier: Apache-2.0
"""The `.tbundle` container: a checked header and table of contents around independent zstd frames.

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

# Annotations are real ones in this module, as in `entry_rows`.
import struct
from typing import Any, Protocol

import zstandard
from msgspec import Struct

from bundler.format.digest import DIGEST_BYTES
from bundler.format.entry_rows import Count
from bundler.format.limits import MIB

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
