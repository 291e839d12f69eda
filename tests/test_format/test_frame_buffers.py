# SPDX-License-Identifier: Apache-2.0
"""Memory that frames are decoded into: used again, and never while somebody looks at it."""

import os
import threading

import pytest
import zstandard
from waiting import until

from bundler.errors import DigestMismatch, FormatError, NotFound
from bundler.format import container, frames
from bundler.format.bundle import Bundle
from bundler.format.digest import digest_raw
from bundler.format.frames import Frame, FrameBuffers

SIZES = [1, 4096, 100_000, 3 << 20, 4 << 20, 8 << 20]


@pytest.fixture
def buffers():
    return FrameBuffers(container.CACHED_FRAMES)


@pytest.mark.parametrize("size", SIZES)
def test_a_view_has_the_size_that_was_asked_for(buffers, size):
    view = buffers.take(size)
    view[-1] = 7
    assert (len(view), view[-1], view.readonly) == (size, 7, False)


def test_nothing_needs_no_memory(buffers):
    assert len(buffers.take(0)) == 0


def test_a_buffer_nobody_looks_at_is_used_again(buffers):
    """What was written into it is still there, which tells that it is the same memory."""
    view = buffers.take(3 << 20)
    view[:5] = b"first"
    del view
    assert bytes(buffers.take(3 << 20)[:5]) == b"first"


@pytest.mark.parametrize(
    "held", [lambda view: view, lambda view: view[5:6], lambda view: view.toreadonly()[7:7]]
)
def test_a_buffer_that_is_looked_at_is_left_alone(buffers, held):
    """As long as any view of it is left, however small, nobody else gets the memory."""
    view = buffers.take(4096)
    view[:] = b"a" * 4096
    kept = held(view)
    del view
    others = [buffers.take(4096) for _ in range(20)]
    for other in others:
        other[:] = b"b" * 4096
    assert set(kept.obj[:4096]) == {ord("a")}


def test_much_larger_buffers_are_left_to_larger_frames(buffers):
    view = buffers.take(8 << 20)
    view[0] = 1
    del view
    small = buffers.take(1 << 20)
    assert small[0] == 0
    assert buffers.take(8 << 20)[0] == 1


def test_a_last_frame_of_half_the_size_needs_no_buffer_of_its_own(buffers):
    """It is decoded where one of the others was."""
    view = buffers.take(4 << 20)
    view[0] = 1
    del view
    assert buffers.take((2 << 20) - 5)[0] == 1


def test_few_buffers_are_kept(buffers):
    """Frames that were all in use at once do not stay in memory."""
    views = [buffers.take(4096) for _ in range(50)]
    del views
    assert len(buffers._buffers) <= buffers._most
    buffers.clear()
    assert buffers._buffers == []


def test_threads_never_get_the_same_buffer(buffers):
    """Each writes its own number everywhere, and finds nothing else there."""
    wrong = []

    def work(number):
        for _ in range(300):
            view = buffers.take(5000)
            view[:] = bytes([number]) * 5000
            if bytes(view) != bytes([number]) * 5000:
                wrong.append(number)
            del view

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_write_into_its_parents_frames(buffers):
    view = buffers.take(4096)
    view[:] = b"p" * 4096
    child = os.fork()
    if not child:
        view[:] = b"c" * 4096
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(view) == b"p" * 4096


def test_a_system_that_has_no_huge_pages_is_fine(buffers, monkeypatch):
    monkeypatch.setattr(frames.mmap, "MADV_HUGEPAGE", -1, raising=False)
    assert len(buffers.take(8 << 20)) == 8 << 20


def test_no_memory_is_a_memory_error(buffers):
    """As it is when Python itself finds none; an error of the system would look like one of the
    file.
    """
    with pytest.raises(MemoryError, match="no memory for a frame of"):
        buffers.take(1 << 62)


@pytest.mark.parametrize("order", [1, -1])
def test_blobs_stay_what_they_are_while_other_frames_are_decoded(wide, order, monkeypatch):
    """A blob that somebody holds has its bytes also after more frames than stay decoded, and than
    there are buffers.
    """
    monkeypatch.setattr(container, "frames_at_once", lambda: 1)
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        frames = [
            section
            for section in bundle.blobs.sections
            if section.codec == container.ZSTD and section.blobs
        ]
        assert len(frames) > bundle.blobs._buffers._most > container.CACHED_FRAMES
        held = {digest: bundle.blobs.stored_blobs([digest])[0] for digest in [*blobs][::order]}
    assert held == blobs
    assert all(view.readonly for view in held.values())


def test_frames_are_decoded_into_memory_that_was_used_before(wide, monkeypatch):
    """Who holds no blob makes a restore need no more memory than a few frames take."""
    made = []
    real = frames._new_buffer
    monkeypatch.setattr(frames, "_new_buffer", lambda size: made.append(size) or real(size))
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        for _ in range(3):
            assert all(bundle.blobs.read_blob(digest) == raw for digest, raw in blobs.items())
    assert 0 < len(made) <= container.CACHED_FRAMES + 1


@pytest.fixture
def decoded(monkeypatch):
    """Which sections were decoded, by offset, where there are processors for four at once."""
    seen = []
    real = Frame.decode
    monkeypatch.setattr(container, "frames_at_once", lambda: 4)
    monkeypatch.setattr(
        Frame, "decode", lambda self: seen.append(self.section.offset) or real(self)
    )
    return seen


def test_who_goes_through_a_bundle_has_the_next_frames_decoded(wide, decoded):
    """The same bytes; each frame once; and few stay in memory, as few as are wanted at once."""
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        source = bundle.blobs
        source.prefetch([bytes(32)] * container._MANY)
        frames = [section for section in source.sections if section.blobs]
        digests = source.content.blobs.digests_of(
            [blob for section in frames for blob in section.blobs]
        )
        found = {}
        for number, digest in enumerate(digests):
            found[digest] = bytes(source.stored_blobs([digest])[0])
            if not number:
                same = sum(section.kind == frames[0].kind for section in frames)
                # called here and now
                until(lambda: len(decoded) == 1 + min(3, same - 1))  # noqa: B023
            assert len(source._frames) <= container.CACHED_FRAMES
            assert len(source._ahead.begun()) <= 6
    assert found == blobs
    assert sorted(decoded) == sorted(
        section.offset for section in frames if section.codec == container.ZSTD
    )


def test_who_asks_for_a_few_blobs_has_no_other_frame_decoded(wide, decoded):
    data, _ = wide
    with Bundle.from_bytes(data) as bundle:
        wanted = [digest for digest, _ in bundle.content.blobs][:2]
        bundle.blobs.prefetch(wanted)
        bundle.blobs.stored_blobs(wanted[:1])
        assert len(decoded) == 1


def test_a_damaged_frame_that_is_decoded_ahead_spoils_no_other(wide, decoded, monkeypatch):
    """What is wrong with it shows when its own blobs are asked for."""
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        source = bundle.blobs
        source.prefetch([bytes(32)] * container._MANY)
        irs = [section for section in source.sections if section.kind == container.IR]
        real = container.Container.stored

        def damaged(self, section):
            if section is irs[1]:
                raise DigestMismatch("damaged", what="section")
            return real(self, section)

        monkeypatch.setattr(container.Container, "stored", damaged)
        digests = [source.content.blobs.digests_of(section.blobs)[0] for section in irs]
        assert source.stored_blobs(digests[:1])[0] == blobs[digests[0]]
        with pytest.raises(DigestMismatch, match="damaged"):
            source.stored_blobs(digests[1:2])
        assert source.stored_blobs(digests[2:3])[0] == blobs[digests[2]]


def test_without_another_thread_frames_are_decoded_one_by_one(wide, decoded, monkeypatch):
    def refuse(call, arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(frames._thread, "start_new_thread", refuse)
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        bundle.blobs.prefetch([bytes(32)] * container._MANY)
        assert all(bundle.blobs.stored_blobs([digest])[0] == raw for digest, raw in blobs.items())


def test_unverified_blobs_are_what_the_frame_holds(build):
    """`stored_blobs` leaves the digest to its caller; reading the same blob as usual raises."""
    parts = build.Parts.of(build.several().to_bytes())
    section = parts.find(2)
    section.data = build.compressed(b"x" * section.raw)
    with Bundle.from_bytes(parts.join()) as bundle:
        artifact = bundle.kernels[0].artifact("k.ttir")
        (view,) = bundle.blobs.stored_blobs([digest_raw(artifact.digest)])
        assert bytes(view) == b"x" * artifact.size
        with pytest.raises(DigestMismatch):
            bundle.read(artifact)
        with pytest.raises(NotFound, match="no blob sha256:"):
            bundle.blobs.stored_blobs([bytes(32)])


EMPTY = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(b"")
SKIPPABLE = b"\x50\x2a\x4d\x18\1\0\0\0x"


@pytest.mark.parametrize(
    "tail", [b"\0", b"\x28", EMPTY, SKIPPABLE, EMPTY[:5], SKIPPABLE[:8], b"x" * 100]
)
def test_nothing_follows_a_frame(build, tail):
    """Whatever stands behind the frame in its section, also what a decoder of streams passes over,
    is refused.
    """
    parts = build.Parts.of(build.several().to_bytes())
    parts.find(2).data += tail
    with (
        Bundle.from_bytes(parts.join()) as bundle,
        pytest.raises(FormatError, match="section at offset"),
    ):
        bundle.verify()


@pytest.mark.parametrize("block", [100, 1 << 17])
@pytest.mark.parametrize("raw", [b"", b"a", b"a" * 1000, bytes(1 << 20), bytes(range(256)) * 5000])
def test_a_cut_frame_is_noticed_wherever_it_is_cut(build, raw, block):
    """`frame_bytes` finds the end of frames of every kind of block; of a shorter one nothing is
    taken.
    """
    compressor = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True)
    steps = compressor.compressobj(size=len(raw))
    pieces = [
        raw[start : start + block] for start in range(0, min(len(raw), 20 * block), block)
    ] + [raw[20 * block :]]
    flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
    frame = b"".join(
        [*(steps.compress(piece) + steps.flush(flush) for piece in pieces), steps.flush()]
    )
    assert zstandard.decompress(frame) == raw
    assert frames.frame_bytes(frame) == len(frame)
    assert all(
        frames.frame_bytes(frame[:size]) != size
        for size in range(max(len(frame) - 300, 18), len(frame))
    )


def test_the_last_bytes_of_a_checksum_are_compared(build):
    parts = build.Parts.of(build.several().to_bytes())
    section = parts.find(2)
    section.data = section.data[:-4] + bytes(4)
    with Bundle.from_bytes(parts.join()) as bundle, pytest.raises(FormatError, match="checksum"):
        bundle.verify()
