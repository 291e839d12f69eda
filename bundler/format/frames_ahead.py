# SPDX-License-Identifier: Apache-2.0
"""`FramesAhead`: frames that threads decode before somebody asks for them, where there are
processors to spare.

`Container` has one for who goes through a whole bundle: then decoding takes most of the time, and
needs no interpreter.
"""

from __future__ import annotations

import _thread
import os
from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, Protocol, TypeVar

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
