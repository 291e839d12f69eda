# SPDX-License-Identifier: Apache-2.0
"""`sections_of_blobs`: in which section of a container each blob lies, by the number of the blob.

`Container` asks when a bundle is opened, which checks that the sections hold each blob once, and
nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bundler.errors import FormatError
from bundler.format.container_layout import BLOB_SECTIONS, Section
from bundler.format.summary import count, plural

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
