# SPDX-License-Identifier: Apache-2.0
"""Frames that threads decode before somebody asks: each is there as soon as it is decoded, and none
is waited for but the one that is asked for.
"""

import os
import threading
import time

import pytest
from waiting import until

from bundler.format import container
from bundler.format import frames as frames_module
from bundler.format.bundle import Bundle
from bundler.format.frames import Frame as RealFrame
from bundler.format.frames import FramesAhead

WAIT_S = 10
THREADS = 3


class Frame:
    """A frame whose decoding waits until it may go on."""

    def __init__(self, *, goes_on=True, fails=False):
        self.may_go_on, self.begun, self.ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.fails, self.times = fails, 0
        if goes_on:
            self.may_go_on.set()

    def decode(self):
        self.times += 1
        self.begun.set()
        assert self.may_go_on.wait(WAIT_S)
        if self.fails:
            raise ValueError("damaged")
        self.ended.set()


@pytest.fixture
def ahead():
    """Frames ahead, of which no thread is left at the end."""
    frames = FramesAhead()
    yield frames
    frames.close()
    until(lambda: not frames._running)


def test_a_frame_is_there_while_others_are_being_decoded(ahead):
    """Who asks for one waits for no other."""
    slow, quick = Frame(goes_on=False), Frame()
    ahead.begin(1, slow, THREADS)
    ahead.begin(2, quick, THREADS)
    assert slow.begun.wait(WAIT_S)
    assert ahead.take(2) is quick
    assert not slow.ended.is_set()
    slow.may_go_on.set()
    assert ahead.take(1) is slow
    assert (slow.times, quick.times) == (1, 1)
    assert ahead.take(1) is None


def test_who_takes_a_frame_that_no_thread_has_begun_decodes_it(ahead):
    """There are fewer threads than frames."""
    slow, other = Frame(goes_on=False), Frame()
    ahead.begin(1, slow, 1)
    assert slow.begun.wait(WAIT_S)
    ahead.begin(2, other, 1)
    assert ahead.take(2) is other
    assert other.times == 1
    slow.may_go_on.set()


def test_one_that_cannot_be_decoded_is_nobodys(ahead):
    """Whoever asks for it decodes it again, and is told."""
    ahead.begin(1, Frame(fails=True), THREADS)
    ahead.begin(2, Frame(), THREADS)
    assert ahead.take(1) is None
    assert ahead.take(2) is not None


def test_so_many_threads_decode_at_once_and_no_more(ahead):
    frames = [Frame(goes_on=False) for _ in range(5)]
    for number, frame in enumerate(frames):
        ahead.begin(number, frame, 2)
    until(lambda: sum(frame.begun.is_set() for frame in frames) == 2)
    time.sleep(0.01)
    assert sum(frame.begun.is_set() for frame in frames) == 2
    for frame in frames:
        frame.may_go_on.set()
    until(lambda: all(frame.ended.is_set() for frame in frames))


def test_closing_waits_for_those_under_way_and_lets_go_of_the_others(ahead):
    under_way, waiting = Frame(goes_on=False), Frame()
    ahead.begin(1, under_way, 1)
    assert under_way.begun.wait(WAIT_S)
    ahead.begin(2, waiting, 1)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    until(lambda: not ahead.begun())
    assert closing.is_alive()
    under_way.may_go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert under_way.ended.is_set()
    assert waiting.times == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_waits_for_no_thread_of_its_parent(ahead):
    """What the parent's threads were doing is forgotten in the child, which may begin its own."""
    slow = Frame(goes_on=False)
    ahead.begin(1, slow, THREADS)
    assert slow.begun.wait(WAIT_S)
    child = os.fork()
    if not child:
        mine = Frame()
        fine = ahead.take(1) is None and not ahead.begun()
        ahead.begin(1, mine, THREADS)
        os._exit(0 if fine and ahead.take(1) is mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slow.may_go_on.set()
    assert ahead.take(1) is slow


def test_frames_at_once_leaves_processors_to_the_writers(monkeypatch):
    for available, expected in ((1, 1), (2, 1), (4, 2), (16, 2)):
        monkeypatch.setattr(
            frames_module.os,
            "sched_getaffinity",
            lambda _, n=available: set(range(n)),
            raising=False,
        )
        assert frames_module.frames_at_once() == expected


@pytest.fixture
def spacious(monkeypatch):
    """A machine with processors for four frames at once."""
    monkeypatch.setattr(container, "frames_at_once", lambda: 4)


def test_the_first_frames_are_begun_before_anything_is_read(wide, spacious):
    """One of the launch set and one of IR: who restores everything begins with both."""
    with Bundle.from_bytes(wide[0]) as bundle:
        source, content = bundle.blobs, bundle.content
        digests = [digest for kernel in bundle.kernels for _, digest, *_ in kernel.files()]
        source.prefetch(digests)
        begun = source._ahead.begun()
        first = {source._sections_of_blobs[content.blobs.number(digest)] for digest in digests[:3]}
        assert 0 < len(begun) <= THREADS
        assert {number for number in first if source.sections[number].codec == container.ZSTD} <= {
            *begun
        }


@pytest.mark.parametrize("seed", range(3))
def test_any_order_gives_the_same_bytes(wide, spacious, seed):
    """Back and forth, from several threads, through frames that are decoded ahead and forgotten
    again.
    """
    data, blobs = wide
    order = sorted(blobs, key=lambda digest: hash((digest, seed))) * 2
    with Bundle.from_bytes(data) as bundle:
        bundle.blobs.prefetch(order)
        wrong = []

        def read():
            wrong.extend(
                digest for digest in order if bundle.blobs.read_blob(digest) != blobs[digest]
            )

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(bundle.blobs._ahead.begun()) <= 4 * THREADS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_amid_decoding_reads_everything(wide, spacious):
    data, blobs = wide
    with Bundle.from_bytes(data) as bundle:
        for _ in range(5):
            bundle.blobs.prefetch(blobs)
            bundle.blobs.read_blob(next(iter(blobs)))
            child = os.fork()
            if not child:
                os._exit(
                    0
                    if all(bundle.blobs.read_blob(digest) == raw for digest, raw in blobs.items())
                    else 1
                )
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_frame_that_is_not_whole_is_told_to_who_asks_for_it(wide, spacious, monkeypatch):
    """Also where a thread has decoded it."""
    data, _ = wide
    real = RealFrame.decode

    def short(self):
        real(self)
        self._raw_bytes -= 1

    with Bundle.from_bytes(data) as bundle:
        source = bundle.blobs
        monkeypatch.setattr(RealFrame, "decode", short)
        numbers = [
            blob
            for section in source.sections
            if section.kind == container.IR
            for blob in section.blobs
        ]
        digests = bundle.content.blobs.digests_of(numbers)
        source.prefetch(digests * container._MANY)
        with pytest.raises(container.FormatError, match="not one whole frame"):
            source.stored_blobs(digests)
