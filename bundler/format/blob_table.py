# SPDX-License-Identifier: Apache-2.0
"""`BlobTable`: the blobs of a manifest of schema 2, packed; a hundred thousand kernels have a million.

`content_tables` makes one of what it decodes, and `Content` has it as its blobs.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from bundler.format.digest import DIGEST_BYTES


class BlobTable(Sequence[tuple[bytes, int]]):
    """Raw digest and size of every blob, by digest."""

    def __init__(self, digests: bytes, sizes: Iterable[int]) -> None:
        self.digests, self.sizes = digests, array("Q", sizes)

    def digest(self, number: int) -> bytes:
        """Return the raw digest of a blob."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def digests_of(self, numbers: Iterable[int]) -> list[bytes]:
        """Return the raw digests of several blobs."""
        digests = self.digests
        return [digests[number * DIGEST_BYTES : number * DIGEST_BYTES + DIGEST_BYTES] for number in numbers]

    def split_digests(self) -> list[bytes]:
        """Return the raw digests, cut apart at once."""
        return [*chain.from_iterable(struct.iter_unpack(f"{DIGEST_BYTES}s", self.digests))]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self)[number]
        size = self.sizes[number]
        return self.digest(number % len(self.sizes)), size

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, BlobTable) else other)

    def __hash__(self) -> int:
        return hash(self.digests)
