# SPDX-License-Identifier: Apache-2.0
"""`BlobPlaces`: in which section of a container each blob lies, and where in it, by the number of the blob.

`Container` makes one when a bundle is opened, which checks that the sections hold each blob once, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from bundler.errors import FormatError
from bundler.format.container_layout import BLOB_SECTIONS, Section
from bundler.format.summary import count, plural

_NOWHERE = -1


class BlobPlaces:
    """Where blobs lie.

    Args:
        sections: those of the container.
        sizes: the size of each blob.

    Raises:
        FormatError: a blob is stored twice, or nowhere, or sections hold something else.

    Attributes:
        sections: for each blob the number of its section.
        sizes: for each blob how many bytes it has.
    """

    def __init__(self, sections: Sequence[Section], sizes: array[int]) -> None:
        self._all, self.sizes = sections, sizes
        found = _sections_of(sections, [*sizes])
        if found is None:
            found = _looked_up(sections, sizes)
        self.sections = array("i", found)
        self._offsets: array[int] | None = None

    # Not a `cached_property`: that has a lock up to Python 3.11, which another thread may hold at the moment of a fork.
    @property
    def offsets(self) -> array[int]:
        """For each blob where it begins in the raw bytes of its section."""
        if self._offsets is None:
            self._offsets = self._made_offsets()
        return self._offsets

    def _made_offsets(self) -> array[int]:
        found, sizes = [0] * len(self.sizes), [*self.sizes]
        for section in self._all:
            if section.kind in BLOB_SECTIONS:
                offsets = accumulate(map(sizes.__getitem__, section.blobs), initial=0)
                for blob, offset in zip(section.blobs, offsets, strict=False):  # the last one is where the section ends
                    found[blob] = offset
        return array("Q", found)


def _sections_of(sections: Sequence[Section], sizes: Sequence[int]) -> list[int] | None:
    """Return the section of each blob, None where something is wrong."""
    found, stored = [_NOWHERE] * len(sizes), 0
    for number, section in enumerate(sections):
        blobs = section.blobs
        if section.kind not in BLOB_SECTIONS:
            continue
        if blobs and not 0 <= min(blobs) <= max(blobs) < len(sizes):
            return None
        if sum(map(sizes.__getitem__, blobs)) != section.raw_bytes:
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
            raise FormatError(f"section {number}: blobs of {count(size, 'byte')} in a frame of {section.raw_bytes}")
    lost = found.count(_NOWHERE)
    if lost:
        raise FormatError(f"{count(lost, 'blob')} of the manifest {plural(lost, 'is')} in no section")
    return found
