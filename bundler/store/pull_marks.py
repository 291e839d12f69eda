# SPDX-License-Identifier: Apache-2.0
"""`Marks`: marks what was pulled as in use, while what was pulled is placed.

`BundleStore` makes one for a restore, and `StoreBlobs` begins it when the first units have come: from then on the restore waits for no server
for a while.  `prune` spares what is marked.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable


class Marks:
    """A call that is made once: in a thread of its own after `begin`, else in `finish`.

    Args:
        mark: the call; it raises nothing.
    """

    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark
        # An interrupt may arrive while the thread is being started: who makes the call is decided under this lock.
        self._gate = threading.Lock()
        self._asked = self._taken = self._apart = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Begin, unless that was done."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # no thread can be had: `finish` makes the call
                _thread.start_new_thread(self._run_apart, ())

    def wait(self) -> None:
        """Wait for the thread, if it has begun."""
        if self._apart:
            self._ended.wait()

    def finish(self) -> None:
        """See to it that the call was made; calling this again is fine."""
        with self._gate:
            ours, self._taken = not self._taken, True
        if ours:
            self._mark()
        self.wait()

    def _run_apart(self) -> None:
        with self._gate:
            if self._taken:
                return
            self._taken = self._apart = True
        try:
            self._mark()
        finally:
            self._ended.set()
