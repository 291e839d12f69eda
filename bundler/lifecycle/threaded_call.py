# SPDX-License-Identifier: Apache-2.0
"""`ThreadedCall`: one call in a thread of its own, for calls that leave the interpreter to others.

`kernel_reader` reads ahead with it, a restore from a store far away fetches ahead, and each restore
asks what this machine has.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

MOST_THREADS = 4
T = TypeVar("T")


class ThreadedCall(Generic[T]):
    """A call whose result is waited for later, or not at all."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: T | None = None
        self._problem: BaseException | None = None
        # An interrupt may arrive while the thread is being started: whether it runs is decided
        # under this lock.
        self._gate = threading.Lock()
        self._begun = self._abandoned = False
        self._ended = threading.Event()

    def start(self, *, apart: bool) -> None:
        """Begin; in this thread unless `apart`, or where no other can be had, and then it raises
        what the call raises.
        """
        if apart:
            with contextlib.suppress(RuntimeError):
                # `threading.Thread` would wait until the new one runs, which takes milliseconds on
                # a busy machine.
                _thread.start_new_thread(self._run, ())
                return
        self._run()
        if self._problem is not None:
            raise self._problem

    def result(self) -> T:
        """Wait for the result; raises what the call raised."""
        self._ended.wait()
        if self._problem is not None:
            raise self._problem
        return cast(T, self._result)

    def ended(self, within_s: float) -> bool:
        """Wait for so long at most, and leave the interpreter to the call meanwhile; returns
        whether it has ended.
        """
        return self._ended.wait(within_s)

    def abandon(self) -> None:
        """Return when the call has ended, or will never begin; calling it twice is fine."""
        with self._gate:
            self._abandoned = True
        if self._begun:
            self._ended.wait()

    def _run(self) -> None:
        with self._gate:
            if self._abandoned or self._begun:
                return
            self._begun = True
        try:
            self._result = self._call()
        except BaseException as problem:  # noqa: BLE001  # raised again in the thread that waits
            self._problem = problem
        finally:
            self._ended.set()


def processors(most: int = MOST_THREADS) -> int:
    """Return how many threads such a call uses: as many as there are processors for this process,
    and a few at most.
    """
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(most, available)
