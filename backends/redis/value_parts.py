# SPDX-License-Identifier: Apache-2.0
"""What is stored under which key, and how a large value is cut into parts.

::

    <ns>:o:<key>                      an object: a header, then the value, or, for a large one, a head that names its parts
    <ns>:p:<key>:<16 hex>:<number>    a part: a header, then up to `PART_BYTES` of the value
    <ns>:r:<key>                      a ref: its value alone
    <ns>:l:<key>                      a lease: its holder's token

    header  TB, a letter (w whole, s split, p part), 13 digits: how many ms it lives after its last use
    head    header, then 16 digits: bytes of the value, 16 hex: the beginning of their sha256

The lifetime in the header is the writer's choice: a touch sets the expiry to that much from now, so
the time of the last use is the expiry less the lifetime.  Parts carry a digest of the whole in
their names: two writers of different bytes under one key do not mix theirs, two of the same bytes
share them.

`RedisBackend` writes and reads values through `whole`, `split`, `read_head` and `payload`; the Lua
scripts rely on the same layout.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024
# A value up to here is stored whole, and comes in one round trip.
WHOLE_BYTES = 256 * KIB
PART_BYTES = 8 * MIB
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 512
# More than any unit or manifest may have; a head that says more is damaged.
MAX_BYTES = 1024 * MIB
HEAD_BYTES = 48
HEADER_BYTES = 16
# Tags and notes of failures have a few KB.  Of a larger value only one byte more than this is read,
# and compared.
REF_BYTES = 256 * KIB
# What scripts give in place of the first bytes of a value that cannot be an object here: too large,
# empty, a list, a hash.
NONE_OF_OURS = b"?"
#: What the head of a large value begins with.
SPLIT = b"TBs"
_HEADER = re.compile(rb"TB[wp]\d{13}")
_SPLIT = re.compile(rb"TBs(\d{13})(\d{16})([0-9a-f]{16})")
# A record names other objects, and should be gone before them: they live a day longer, and a
# quarter of its life.
RECORD = re.compile(r"v\d+/[km]/")
# Which bundle has a kernel, and under which key it was recorded, has some hundred bytes, and is
# asked for only by who knows no tag: it outlives long times of use by tag.
ENTRY, ENTRY_LIVES = re.compile(r"v\d+/[bl]/"), 12
MARGIN, MARGIN_S = 1.25, 24 * 3600.0


@dataclass(frozen=True)
class Head:
    """A large value: its key without namespace, its size, its digest and how long it lives."""

    key: str
    size_bytes: int
    digest: str
    ttl_ms: int

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Name, without namespace, and size of each part, without its header."""
        starts = range(0, self.size_bytes, PART_BYTES)
        sizes = (min(PART_BYTES, self.size_bytes - start) for start in starts)
        return [(f"{self.key}:{self.digest}:{number}", size) for number, size in enumerate(sizes)]

    def encode(self) -> bytes:
        """Return what is stored under the object's own key."""
        return b"TBs%013d%016d%s" % (self.ttl_ms, self.size_bytes, self.digest.encode())


def object_ttl_ms(key: str, ttl_s: float) -> int:
    """Return how long an object lives: records `ttl_s`, what they name longer."""
    if ENTRY.match(key):
        return int(1000 * ttl_s * ENTRY_LIVES)
    return int(1000 * (ttl_s if RECORD.match(key) else ttl_s * MARGIN + MARGIN_S))


def whole(value: bytes, ttl_ms: int) -> bytes:
    """Return what is stored for a value that is not split."""
    return b"TBw%013d%s" % (ttl_ms, value)


def split(key: str, value: bytes, ttl_ms: int) -> tuple[Head, dict[str, bytes]]:
    """Return the head of a large value, and what is stored for each part."""
    head = Head(key, len(value), hashlib.sha256(value).hexdigest()[:16], ttl_ms)
    view, parts, start = memoryview(value), {}, 0
    for name, size in head.parts:
        parts[name] = b"TBp%013d%s" % (ttl_ms, view[start : start + size])
        start += size
    return head, parts


def read_head(key: str, stored: bytes) -> Head | None:
    """Return the head that a stored value is; None when it is whole or damaged."""
    found = _SPLIT.fullmatch(stored)
    if found is None or not WHOLE_BYTES < int(found[2]) <= MAX_BYTES:
        return None
    return Head(key, int(found[2]), found[3].decode(), int(found[1]))


def payload(stored: bytes) -> bytes:
    """Return the value without its header; a damaged one as it is, since readers compare
    digests.
    """
    return stored[HEADER_BYTES:] if _HEADER.match(stored) else stored


def size_of(key: str, head: bytes, stored_bytes: int) -> int:
    """Return the size of an object, by its first bytes and how many are stored."""
    found = read_head(key, head)
    if found is not None:
        return found.size_bytes
    return stored_bytes - (HEADER_BYTES if _HEADER.match(head) else 0)
