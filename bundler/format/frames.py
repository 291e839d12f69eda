# SPDX-License-Identifier: Apache-2.0
"""zstd frames on their way into memory, and the memory that they are decoded into.

`Section` says where one lies in a container, and `Frame` is what it holds, decoded in three steps of which the second needs no
interpreter; `FramesAhead` has threads that do the second step of several at once, where there are
processors to spare.  `FrameBuffers` is memory that is used again as soon as nobody looks at the
frame that was there: fresh memory is what decoding costs most, since the system hands it out page
by page and clears each page first, which takes three times as long as zstd takes to fill it.

`Container` has one of each, and stores decode their units with the same buffers.
"""

from __future__ import annotations

import _thread
import mmap
import os
from collections import deque
from collections.abc import Collection, Iterable

import zstandard
from msgspec import Struct

from bundler.errors import FormatError
from bundler.format.limits import MIB, Limits
from bundler.format.wire import Count

# Of a zstd frame (RFC 8878): a block begins with three bytes; one of this type has one byte,
# whatever its size says; a checksum ends it.
_BLOCK_HEADER_BYTES, _REPEATED_BYTE, _CHECKSUM_BYTES = 3, 1, 4
# Frames that are decoded at once.  Each takes some megabytes until it is used; with three or four,
# restores on 16 processors differed by no more than from run to run.
_AT_ONCE = 2


def processors(most: int) -> int:
    """Return how many processors this process has, and `most` at most: so many threads are of
    use.
    """
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(most, available)


def frames_at_once() -> int:
    """Return how many frames are decoded at once; one where the other processors have enough to do
    with writing files.
    """
    return max(1, processors(2 * _AT_ONCE) // 2)


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


class Frame:
    """A section of a container and what it holds.

    Args:
        section: where it lies, and what it should become.
        stored: its bytes, verified.
        prefix: what it may copy from.
        limits: bounds.
        buffers: where memory for it is taken from.

    Attributes:
        data: its decoded bytes, once it is finished.
        slices: where each of its blobs lies in them, by raw digest, once somebody has worked it
            out.
        used: when it was last looked at.

    Raises:
        FormatError, LimitExceeded: what it declares of itself is not what the table says.
    """

    __slots__ = ("_raw_bytes", "_reader", "_room", "_stored", "data", "section", "slices", "used")

    def __init__(
        self, section: Section, stored: bytes, prefix: bytes, limits: Limits, buffers: FrameBuffers
    ) -> None:
        try:
            check_frame(stored, section, limits)
            self._room = buffers.take(section.raw_bytes)
            decoder = zstandard.ZstdDecompressor(dict_data=dictionary(prefix) if prefix else None)
            self._reader = decoder.stream_reader(stored)
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        self.section, self._stored, self._raw_bytes = section, stored, 0
        self.slices: dict[bytes, slice] | None = None
        self.used = 0

    @classmethod
    def of_bytes(cls, section: Section, stored: bytes) -> Frame:
        """Return a section that is stored as it is."""
        frame = cls.__new__(cls)
        frame.section, frame.slices, frame.used = section, None, 0
        frame.data = memoryview(stored)
        return frame

    def decode(self) -> None:
        """Decode; the interpreter is left to others meanwhile.  Raises `FormatError`."""
        try:
            self._raw_bytes = self._reader.readinto(self._room)
        except zstandard.ZstdError as error:
            raise undecodable(self.section, error) from error

    def finish(self) -> None:
        """Check what was decoded; raises `FormatError` where it is not one whole frame."""
        section, stored = self.section, self._stored
        try:
            # Nothing follows; but the decoder compares the checksum when it is asked for more.
            whole = self._raw_bytes == section.raw_bytes and not self._reader.read(1)
            if not whole or frame_bytes(stored) != len(stored):
                raise FormatError(
                    f"section at offset {section.offset}: not one whole frame of"
                    f" {section.raw_bytes} bytes"
                )
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        self.data = self._room.toreadonly()
        del self._reader, self._stored, self._room


def dictionary(data: bytes) -> zstandard.ZstdCompressionDict:
    """Return raw bytes as a dictionary that a frame may copy from."""
    return zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def check_frame(data: bytes, section: Section, limits: Limits) -> None:
    """Check what a frame declares; the decoder makes room for it, whatever limit it is given."""
    frame = zstandard.get_frame_parameters(data)
    limits.check("window_bytes", frame.window_size, "zstd window")
    if frame.content_size != section.raw_bytes or not frame.has_checksum:
        raise FormatError(
            f"section at offset {section.offset}: the frame declares {frame.content_size} bytes "
            f"(checksum: {frame.has_checksum}), the table {section.raw_bytes}"
        )


def undecodable(section: Section, error: zstandard.ZstdError) -> FormatError:
    """Return the error for a frame that zstd refuses."""
    return FormatError(f"section at offset {section.offset}: {error}", offset=section.offset)


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


class _FrameTask:
    """A frame that is decoded by the thread that takes it first."""

    __slots__ = ("_ended", "_taken", "decoded", "decoding")

    def __init__(self, decoding: Frame) -> None:
        self.decoding, self.decoded = decoding, False
        self._taken, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._ended.acquire()

    def take(self) -> bool:
        """Tell whether the caller is the first to take it; then it is the caller's to decode, or to
        let be.
        """
        return self._taken.acquire(blocking=False)

    def is_taken(self) -> bool:
        """Tell whether somebody has taken it."""
        return self._taken.locked()

    def decode(self) -> None:
        """Decode it; what is wrong shows to who asks for the frame, and decodes it again."""
        try:
            self.decoding.decode()
            self.decoded = True
        except Exception:  # noqa: BLE001  # in a thread nobody would hear of it
            self.decoded = False
        finally:
            self._ended.release()

    def wait(self) -> None:
        """Return when it has ended; the caller knows that it was taken."""
        with self._ended:
            return


class FramesAhead:
    """Frames that are decoded ahead, each until somebody takes it.

    Threads begin when there is something to do, and end when nothing is left.  Safe under threads.
    A forked child, which has none of these threads, forgets what they were doing.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, _FrameTask] = {}
        self._waiting: deque[_FrameTask] = deque()
        self._renew()

    def begin(self, number: int, decoding: Frame, threads: int) -> None:
        """Have a frame decoded by one of so many threads, or by who takes it, if that is sooner."""
        task = _FrameTask(decoding)
        self._tasks[number] = task
        with self._gate:
            self._waiting.append(task)
            start = self._running < threads
            self._running += start
        if start:
            try:
                # `threading.Thread` would wait until the new one runs, which takes milliseconds on
                # a busy machine.
                _thread.start_new_thread(self._work, ())
            except RuntimeError:  # no thread can be had: who takes the frame decodes it
                with self._gate:
                    self._running -= 1

    def take(self, number: int) -> Frame | None:
        """Return a frame that is decoded, and wait for it; None where it was not begun, or could
        not be decoded.
        """
        task = self._here().pop(number, None)
        if task is None:
            return None
        if task.take():
            task.decode()
        else:
            task.wait()
        return task.decoding if task.decoded else None

    def begun(self) -> Collection[int]:
        """Return the frames that nobody has taken."""
        return [*self._here()]

    def forget(self, numbers: Iterable[int]) -> None:
        """Let go of frames that nobody will take, and return when no thread decodes one of them."""
        tasks = self._here()
        under_way = [
            task
            for task in [tasks.pop(number, None) for number in numbers]
            if task is not None and not task.take()
        ]
        with self._gate:
            self._waiting = deque(task for task in self._waiting if not task.is_taken())
        for task in under_way:
            task.wait()

    def close(self) -> None:
        """Let go of all frames; calling it twice is fine."""
        self.forget([*self._here()])

    def _here(self) -> dict[int, _FrameTask]:
        """Return the frames of this process."""
        if self._process != os.getpid():
            self._renew()
        return self._tasks

    def _renew(self) -> None:
        self._process, self._gate = os.getpid(), _thread.allocate_lock()
        self._tasks, self._waiting, self._running = {}, deque(), 0

    def _work(self) -> None:
        while True:
            with self._gate:
                if not self._waiting:
                    self._running -= 1
                    return
                task = self._waiting.popleft()
            if task.take():
                task.decode()
            del task  # its memory is not kept while this thread waits for the gate


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
