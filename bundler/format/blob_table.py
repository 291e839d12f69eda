# SPDX-License-Identifier: Apache-2.0
"""`BlobTable`: digests and sizes of a manifest's blobs, as two runs of numbers; `content_tables` makes it, entries hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bundler.format.digest import DIGEST_BYTES


class BlobTable(Sequence[tuple[bytes, int]]):
    """Raw digest and size of every blob, by digest; a hundred thousand kernels have a million."""

    def __init__(self, digests: bytes, sizes: tuple[int, ...]) -> None:
        self.digests, self.sizes = digests, sizes

    def split_digests(self) -> list[bytes]:
        """Return the raw digests, cut apart at once."""
        return [self.digests[start : start + DIGEST_BYTES] for start in range(0, len(self.digests), DIGEST_BYTES)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        if number.__class__ is slice:
            return tuple(self)[number]
        size = self.sizes[number]
        start = number % len(self.sizes) * DIGEST_BYTES
        return self.digests[start : start + DIGEST_BYTES], size

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, BlobTable) else other)

    def __hash__(self) -> int:
        return hash(self.digests)
