# SPDX-License-Identifier: Apache-2.0
"""`FrameBuffers`: memory that frames are decoded into, used again as soon as nobody looks at the
frame that was there.

`Container` has one.  Fresh memory is what decoding costs most: the system hands it out page by page
and clears each page first, which takes three times as long as zstd takes to fill it.
"""

from __future__ import annotations

import mmap

from bundler.format.limits import MIB

# A mapping of whole huge pages is handed out in a few steps, where the system has them.
_HUGE_PAGE_BYTES = 2 * MIB
# A page of the usual size is made in 0.5 to 2 us, a huge one in 40 to 100: so many of the former
# take longer.
_LEAST_FOR_HUGE_PAGES_BYTES = MIB // 2
# Beside the frames that stay decoded, those whose kernels are being written.
_BEING_WRITTEN = 3


class FrameBuffers:
    """Buffers for decoded frames.

    Safe under threads: a buffer that is looked at is in no list, so two threads never take the same
    one.  After a fork parent and child each have their own.

    Args:
        stay: how many frames stay decoded.
    """

    def __init__(self, stay: int) -> None:
        self._buffers: list[mmap.mmap] = []
        self._most = stay + _BEING_WRITTEN

    def take(self, size: int) -> memoryview:
        """Return a writable view of `size` bytes, which hold anything; while a view of its buffer
        is left nobody else gets it.
        """
        if size == 0:
            return memoryview(bytearray())
        buffer = self._unused(size)
        if buffer is None:
            buffer = _new_buffer(size)
        view = memoryview(buffer)[:size]
        self._buffers.append(buffer)
        if len(self._buffers) > self._most:
            del self._buffers[0]  # its views, if there are any, keep it
        return view

    def clear(self) -> None:
        """Let go of all buffers; those that somebody looks at live as long as their views."""
        self._buffers.clear()

    def _unused(self, size: int) -> mmap.mmap | None:
        for _ in range(len(self._buffers)):
            try:
                buffer = self._buffers.pop(0)
            except IndexError:  # another thread was faster
                return None
            # A much larger one is left to larger frames, which would need one more otherwise.  One
            # of twice the size is taken: a frame that is the last of its kind, and nearly half as
            # long as the others, needs none of its own.
            if size <= len(buffer) <= 2 * _rounded(size) and _is_unused(buffer):
                return buffer
            self._buffers.append(buffer)
        return None


def _rounded(size: int) -> int:
    return (
        size
        if size <= _LEAST_FOR_HUGE_PAGES_BYTES
        else -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    )


def _new_buffer(size: int) -> mmap.mmap:
    try:
        # Private: a forked child must not write into the frames of its parent.
        buffer = mmap.mmap(-1, _rounded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a frame of {size} bytes: {error.strerror}") from error
    if size > _LEAST_FOR_HUGE_PAGES_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return buffer  # a system without huge pages: slower, nothing else
    return buffer


def _is_unused(buffer: mmap.mmap) -> bool:
    """Tell whether no view of a buffer is left: one that is viewed refuses any change of its size,
    even to the one that it has.
    """
    try:
        buffer.resize(len(buffer))
    except (
        BufferError,
        OSError,
        SystemError,
        ValueError,
    ):  # the last three: a system that cannot change sizes at all
        return False
    return True
