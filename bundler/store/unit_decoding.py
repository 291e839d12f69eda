# SPDX-License-Identifier: Apache-2.0
"""`FetchedUnits`: units that a store gave, each decoded when the first of its blobs is read.

A restore fetches hundreds of units at once.  What is decoded as late as it is written needs no
second pass through memory, and writing begins with the first kernel.  The payloads of one fetch
share a buffer, as the frames of a file do.  `StoreBlobs` has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import zstandard

from bundler.format.frames import FrameBuffers, frame_bytes
from bundler.format.limits import KIB
from bundler.store.dictionaries import Dictionaries
from bundler.store.store_failures import DAMAGED
from bundler.store.store_layout import Unit, check_seal, decompressor, frame_of

# One fetch is decoded while the next arrives, and kernels of the one before are still being read.
_FETCHES_IN_USE = 3
# Of one kernel as a rule: the next one has another size, and finds room there too.
_SHARED_BYTES = 512 * KIB
# Decoded into memory that was used a moment before, and copied from there: a stream, which needs no
# copy, takes longer to set up.
_COPIED_BYTES = 64 * KIB


class FetchedUnits:
    """Units by key, with what the store gave for each, in the order in which they came.

    Safe under threads, without locks: whoever takes a unit out is alone with it.

    Args:
        dictionaries: where to look for those that were fetched.
        verified: whether values come compared with the digest in their head.
        buffers: memory that others use too, one after the other; None for memory of its own.
    """

    def __init__(
        self, dictionaries: Dictionaries, *, verified: bool, buffers: FrameBuffers | None = None
    ) -> None:
        self._dictionaries, self._verified = dictionaries, verified
        self._waiting: dict[str, tuple[Unit, bytes, memoryview]] = {}
        self._shared = buffers is not None
        self._buffers = FrameBuffers(_FETCHES_IN_USE) if buffers is None else buffers

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def add(self, units: Iterable[Unit], values: Mapping[str, bytes]) -> None:
        """Add those of some units that the store gave."""
        found = [unit for unit in units if unit.key in values]
        # Pages of it take memory as they are written, so a value that is damaged costs none.
        size = sum([unit.size for unit in found])
        room, start = self._buffers.take(max(size, _SHARED_BYTES) if self._shared else size), 0
        for unit in found:
            end = start + unit.size
            self._waiting[unit.key] = unit, values[unit.key], room[start:end]
            start = end

    def take(self, key: str) -> tuple[bytes, memoryview | None] | None:
        """Take a unit out; returns its value, and its payload of the right size, or None where it
        has to be opened by who can say why.

        No blob is compared with its digest.  None: the unit is not here.
        """
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return None
        unit, value, room = waiting
        return value, room.toreadonly() if self._is_decoded(unit, value, room) else None

    def drop(self, key: str) -> bool:
        """Forget a unit; True when it was here."""
        return self._waiting.pop(key, None) is not None

    def sizes(self) -> list[tuple[str, int]]:
        """Return the key of each unit and the size of its payload, the oldest first."""
        return [(key, unit.size) for key, (unit, _, _) in list(self._waiting.items())]

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        if not self._shared:
            self._buffers.clear()

    def _is_decoded(self, unit: Unit, value: bytes, room: memoryview) -> bool:
        """Decode a value into the room that its payload has; tell whether it filled it."""
        digest, frame = frame_of(value)
        dictionary = None if digest is None else self._dictionaries.known(digest)
        if dictionary is None and digest is not None:
            return False
        try:
            if not self._verified or not frame:
                check_seal(value, unit.key, unit.size)
            if zstandard.frame_content_size(frame) != unit.size or not unit.size:
                return False
            decoder = decompressor(None if dictionary is None else dictionary.data)
            if unit.size <= _COPIED_BYTES:
                room[:] = decoder.decompress(
                    frame, max_output_size=unit.size, allow_extra_data=False
                )
                return True
            with decoder.stream_reader(frame) as reader:
                # The decoder compares the checksum when it is asked for more than there is, and
                # does not tell what follows the frame.
                return (
                    reader.readinto(room) == unit.size
                    and not reader.read(1)
                    and frame_bytes(frame) == len(frame)
                )
        except (*DAMAGED, zstandard.ZstdError):
            return False
