# SPDX-License-Identifier: Apache-2.0
"""`BlobTable`: the blobs of a manifest, packed; a hundred thousand kernels have a million.

`content_tables` makes one of what it decodes, and `Content` has it as its blobs.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from bundler.format.digest import DIGEST_BYTES

# What is compared of a digest first.
_HEAD_BYTES = 8


class BlobTable(Sequence[tuple[bytes, int]]):
    """Raw digest and size of every blob, by digest; the number of a blob is its place here.

    Attributes:
        digests: the raw digests, one after the other: that of blob `n` begins at 32 `n`.
        sizes: how many bytes each has.
    """

    def __init__(self, digests: bytes, sizes: Iterable[int]) -> None:
        self.digests, self.sizes = digests, array("Q", sizes)

    def digest(self, number: int) -> bytes:
        """Return the raw digest of a blob."""
        return self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def digests_of(self, numbers: Iterable[int]) -> list[bytes]:
        """Return the raw digests of several blobs."""
        digests = self.digests
        return [
            digests[number * DIGEST_BYTES : number * DIGEST_BYTES + DIGEST_BYTES]
            for number in numbers
        ]

    def sizes_of(self, numbers: Iterable[int]) -> list[int]:
        """Return the sizes of several blobs."""
        sizes = self.sizes
        return [sizes[number] for number in numbers]

    def is_sorted(self) -> bool:
        """Tell whether each digest is greater than the one before it."""
        packed = array("Q", self.digests)[:: DIGEST_BYTES // _HEAD_BYTES]
        if sys.byteorder == "little":
            packed.byteswap()
        # As numbers, of which each is greater than the one before it, unless two digests begin
        # alike.
        return _is_ascending(packed.tolist()) or _is_ascending(self.digests_of(range(len(self))))

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


def _is_ascending(values: Sequence[Any]) -> bool:
    return all(map(operator.lt, values, islice(values, 1, None)))
