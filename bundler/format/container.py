# SPDX-License-Identifier: Apache-2.0
"""Reads a container: size, then digest, then parse, at every level.

`FrameDecoding` is one zstd frame on its way into memory, in three steps of which the second needs
no interpreter; `FramesAhead` has threads that do the second step of several at once, where there
are processors to spare.

`Container` is the reader of one bundle; `Bundle` makes it when a bundle is opened (`bundle.py`),
and fetches its blobs from it.
"""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import zstandard

from bundler.errors import BundlerError, FormatError, NotFound
from bundler.format.container_layout import (
    BLOB_SECTIONS,
    CONTENT,
    IR,
    LAUNCH,
    OBSERVED,
    STORED,
    ZSTD,
    ByteSource,
    Section,
    dictionary,
    frame_bytes,
    read_exactly,
    read_head,
    sections_of_blobs,
)
from bundler.format.digest import check_digest, digest_text
from bundler.format.frame_buffers import FrameBuffers
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content


class FrameDecoding:
    """A frame that is decoded.

    Args:
        section: where it lies, and what it should become.
        data: its bytes, verified.
        prefix: what it may copy from.
        limits: bounds.
        buffers: where memory for it is taken from.

    Raises:
        FormatError, LimitExceeded: what it declares of itself is not what the table says.
    """

    __slots__ = ("_data", "_raw_bytes", "_reader", "_room", "_section")

    def __init__(
        self, section: Section, data: bytes, prefix: bytes, limits: Limits, buffers: FrameBuffers
    ) -> None:
        try:
            check_frame(section, data, limits)
            self._room = buffers.take(section.raw_bytes)
            decoder = zstandard.ZstdDecompressor(dict_data=dictionary(prefix) if prefix else None)
            self._reader = decoder.stream_reader(data)
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        self._section, self._data, self._raw_bytes = section, data, 0

    def decode(self) -> None:
        """Decode; the interpreter is left to others meanwhile.  Raises `FormatError`."""
        try:
            self._raw_bytes = self._reader.readinto(self._room)
        except zstandard.ZstdError as error:
            raise undecodable(self._section, error) from error

    def finish(self) -> memoryview:
        """Return what was decoded; raises `FormatError` where it is not one whole frame."""
        section = self._section
        try:
            # Nothing follows; but the decoder compares the checksum when it is asked for more.
            whole = self._raw_bytes == section.raw_bytes and not self._reader.read(1)
            if not whole or frame_bytes(self._data) != len(self._data):
                raise FormatError(
                    f"section at offset {section.offset}: not one whole frame of"
                    f" {section.raw_bytes} bytes"
                )
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        return self._room.toreadonly()


def check_frame(section: Section, data: bytes, limits: Limits) -> None:
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


# Each takes some megabytes until it is used.  With three or four, restores on 16 processors
# differed by no more than from run to run.
_MOST = 2
T = TypeVar("T", bound="DecodableFrame")


class DecodableFrame(Protocol):
    """A frame that is prepared; `decode` may be called by any thread, once."""

    def decode(self) -> None:
        """Decode it."""


def frames_at_once() -> int:
    """Return how many frames are decoded at once; one where the other processors have enough to do
    with writing files.
    """
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(_MOST, available // 2))


class _FrameTask(Generic[T]):
    """A frame that is decoded by the thread that takes it first."""

    __slots__ = ("_ended", "_taken", "decoded", "decoding")

    def __init__(self, decoding: T) -> None:
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


class FramesAhead(Generic[T]):
    """Frames that are decoded ahead, each until somebody takes it.

    Threads begin when there is something to do, and end when nothing is left.  Safe under threads.
    A forked child, which has none of these threads, forgets what they were doing.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, _FrameTask[T]] = {}
        self._waiting: deque[_FrameTask[T]] = deque()
        self._renew()

    def begin(self, number: int, decoding: T, threads: int) -> None:
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

    def take(self, number: int) -> T | None:
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

    def _here(self) -> dict[int, _FrameTask[T]]:
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


# A restore goes through launch set and IR side by side, and a kernel may lie across the border of
# two frames.
CACHED_FRAMES = 3
# Who asks for so many blobs at once goes through the bundle, and wants the frames that follow too.
_MANY = 16
_CHUNK_BYTES = 1 << 20


class _DecodedFrame:
    """A decoded section.

    Attributes:
        number: which.
        data: its bytes.
        used: when it was last looked at.
    """

    __slots__ = ("_content", "_section", "_slices", "data", "number", "used")

    def __init__(self, number: int, data: memoryview, section: Section, content: Content) -> None:
        self.number, self.data, self.used = number, data, 0
        self._section, self._content = section, content
        self._slices: dict[bytes, slice] | None = None

    @property
    def slices(self) -> dict[bytes, slice]:
        """Where each of its blobs lies in `data`, by raw digest."""
        if self._slices is None:
            blobs = self._section.blobs
            ends = [*accumulate(self._content.sizes_of(blobs))]
            self._slices = dict(
                zip(self._content.digests_of(blobs), map(slice, [0, *ends], ends), strict=True)
            )
        return self._slices


class Container:
    """Reads a container lazily.

    Opening reads header, table and manifest; a blob decodes its frame, and the last few frames stay
    decoded. Safe under threads.  After a fork, child and parent share the open file without
    disturbing each other, since reads carry their own offset.
    """

    # What a blob source says of itself (`BlobSource`): it reads a local file, and hashes each blob
    # before it returns it.
    waits = False
    verified = True
    verifies_stored = False

    def __init__(self, source: ByteSource, limits: Limits = DEFAULT_LIMITS) -> None:
        self._source = source
        self._limits = limits
        # By number.  No lock: another thread could hold it at the moment of a fork.  This
        # dictionary is never changed, but replaced.
        self._frames: dict[int, _DecodedFrame] = {}
        self._uses = itertools.count(1)
        self._ahead, self._threads = FramesAhead[FrameDecoding](), 0
        self._buffers = FrameBuffers(CACHED_FRAMES + 2 * (frames_at_once() - 1))
        head = read_head(source, limits)
        self.major, self.minor, self.newer_minor = head.major, head.minor, head.newer_minor
        self.read_only, self.compatible_flags, self.sections = (
            head.read_only,
            head.compatible_flags,
            head.sections,
        )
        self.content_bytes = self._manifest(CONTENT)
        self.observed_bytes = self._manifest(OBSERVED)
        self.content = Content.decode(self.content_bytes, limits, newer_minor=self.newer_minor)
        self._sections_of_blobs = sections_of_blobs(self.sections, self.content.blob_sizes)

    def stored(self, section: Section) -> bytes:
        """Return the bytes of a section as they are stored, verified; raises `TruncatedBundle`,
        `DigestMismatch`.
        """
        data = read_exactly(self._source, section.offset, section.stored_bytes, "section")
        check_digest(data, section.sha256, f"section at offset {section.offset}")
        return data

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the whole file in pieces."""
        for offset in range(0, self._source.size, _CHUNK_BYTES):
            yield self._source.read(offset, _CHUNK_BYTES)

    def close(self) -> None:
        """Release the source and the decoded frames."""
        self._ahead.close()
        self._frames = {}
        self._buffers.clear()
        self._source.close()

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Have the frames of many blobs decoded ahead, where there are processors to spare; each is
        decoded when it is read, if not before.
        """
        first = itertools.islice(digests, _MANY) if len(digests) >= _MANY else ()
        known = (
            [self.content.blob_number(digest) for digest in first]
            if self._wants_frames(digests)
            else []
        )
        self._begin_with([number for number in known if number is not None])

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> memoryview:
        """Return the verified bytes of a blob where they lie in their decoded frame, which stays in
        memory as long.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the stored bytes are damaged.
        """
        frame = self._frame_of(digest)
        data = frame.data[frame.slices[digest]]
        if hashlib.sha256(data).digest() != digest:
            check_digest(data, digest, "blob")
        return data

    def view_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the verified bytes of several blobs, as `view_blob` does."""
        views, sha256 = self.stored_blobs(digests), hashlib.sha256
        for digest, data in zip(digests, views, strict=True):
            if sha256(data).digest() != digest:
                # Hashes again and raises, with both digests in the message: only damaged bytes pay
                # for that.
                check_digest(data, digest, "blob")
        return views

    def stored_blobs(self, digests: Sequence[bytes]) -> list[memoryview]:
        """Return the bytes of several blobs, which the caller compares with their digests.

        Raises:
            NotFound: the bundle has no such blob.
            DigestMismatch, FormatError: the section that a blob lies in is damaged.
        """
        views: list[memoryview] = []
        data, slices = memoryview(b""), dict[bytes, slice]()
        # A restore reads hundreds of thousands: nearly all lie in the frame of the one before.
        for digest in digests:
            if digest not in slices:
                frame = self._frame_of(digest)
                data, slices = frame.data, frame.slices
            views.append(data[slices[digest]])
        return views

    def verify(self, digests: Collection[bytes]) -> None:
        """Decode and check every section and these blobs; raises what reading them would raise."""
        wanted = set(digests)
        for number, section in enumerate(self.sections):
            if section.kind in BLOB_SECTIONS:
                self.view_blobs([*wanted.intersection(self._frame(number).slices)])
            else:
                self.stored(section)

    def _manifest(self, kind: int) -> bytes:
        found = [section for section in self.sections if section.kind == kind]
        if len(found) != 1:
            raise FormatError(f"expected one section of kind {kind}, got {len(found)}")
        return self.decoded(found[0])

    def _frame_of(self, digest: bytes) -> _DecodedFrame:
        """Return the frame that a blob lies in; raises `NotFound`."""
        for frame in reversed(self._frames.values()):
            if digest in frame.slices:
                frame.used = next(self._uses)
                return frame
        blob = self.content.blob_number(digest)
        if blob is None:
            raise NotFound(
                f"no blob {digest_text(digest)} in this bundle", digest=digest_text(digest)
            )
        return self._frame(self._sections_of_blobs[blob])

    def _frame(self, number: int) -> _DecodedFrame:
        # Two threads may decode the same frame, which costs time, never correctness.
        frame = self._frames.get(number)
        if frame is None:
            # Before others are decoded, so that their memory can be used again.
            self._frames = self._youngest(CACHED_FRAMES - 1)
            self._begin_following(number)
            frame = _DecodedFrame(number, self._raw(number), self.sections[number], self.content)
            self._frames = {**self._youngest(CACHED_FRAMES - 1), number: frame}
        frame.used = next(self._uses)
        return frame

    def _youngest(self, most: int) -> dict[int, _DecodedFrame]:
        frames = sorted(self._frames.values(), key=lambda frame: frame.used)
        return {frame.number: frame for frame in frames[-most:]}

    # ---------------------------------------------------------------- Frames that are decoded ahead

    def _wants_frames(self, blobs: Collection[object]) -> bool:
        """Note whether frames are to be decoded ahead for who asks for these blobs; tells whether
        the first are to be begun now.
        """
        self._threads = frames_at_once() - 1 if len(blobs) >= _MANY else 0
        return self._threads > 0 and not self._frames

    def _begin_with(self, blobs: Iterable[int]) -> None:
        """Begin the frames of the blobs that are read first: of a restore of everything, one of the
        launch set and one of IR.
        """
        first = dict.fromkeys([self._sections_of_blobs[blob] for blob in blobs])
        self._begin([number for number in first if self._may_be_ahead(number)][: self._threads])

    def _begin_following(self, number: int) -> None:
        """Begin the frames of the same kind that follow, as many as threads decode at once, and
        forget others of this kind.
        """
        kind, wanted = self.sections[number].kind, [number]
        if self._threads and kind in {LAUNCH, IR}:
            after = range(number + 1, len(self.sections))
            same = (n for n in after if self.sections[n].kind == kind and n not in self._frames)
            wanted += filter(self._may_be_ahead, itertools.islice(same, self._threads))
        self._ahead.forget(
            n
            for n in self._ahead.begun()
            if n not in wanted and (self.sections[n].kind == kind or not self._threads)
        )
        self._begin(wanted[1:])

    def _begin(self, numbers: Iterable[int]) -> None:
        begun = self._ahead.begun()
        for number in numbers:
            if number not in begun:
                # What is wrong with it shows when it is asked for.
                with contextlib.suppress(BundlerError, MemoryError):
                    self._ahead.begin(number, self._prepared(number, b""), self._threads)

    def _may_be_ahead(self, number: int) -> bool:
        section = self.sections[number]
        return section.kind in {LAUNCH, IR} and section.codec == ZSTD and not section.prefix

    # ------------------------------------------------------------------------------------- Decoding

    def _raw(self, number: int) -> memoryview:
        section = self.sections[number]
        decoding = self._ahead.take(number)
        if decoding is None:
            if section.codec == STORED:
                return memoryview(self.stored(section))
            decoding = self._prepared(
                number,
                b"".join(
                    [self._frame(p).data for p in section.prefix if self.sections[p].raw_bytes]
                ),
            )
            decoding.decode()
        return decoding.finish()

    def _prepared(self, number: int, prefix: bytes) -> FrameDecoding:
        section = self.sections[number]
        return FrameDecoding(section, self.stored(section), prefix, self._limits, self._buffers)

    def decoded(self, section: Section) -> bytes:
        """Return the raw bytes of a section that needs no prefix; raises as `stored`, and
        `FormatError`.
        """
        data = self.stored(section)
        if section.codec == STORED:
            return data
        try:
            check_frame(section, data, self._limits)
            raw: bytes = zstandard.ZstdDecompressor().decompress(
                data, max_output_size=section.raw_bytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise undecodable(section, error) from error
        return raw
