# SPDX-License-Identifier: Apache-2.0
"""`UsageMarks`: marks what was pulled as in use, at once or while it is placed; `prune` spares what is
marked.

`BundleStore` makes one for each pull.  In a restore `StoreBlobs` begins it when the first units
were read: from then on kernels are written, and nobody waits for the server.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable, Collection

from bundler.backends.port import Backend
from bundler.errors import BundlerError
from bundler.package_loggers import logger
from bundler.store.store_failures import store_errors
from bundler.store.store_layout import Unit

_log = logger("bundler.store")


class UsageMarks:
    """Objects that are touched once: in a thread of its own after `begin`, else in `finish`.

    A store that we may only read, or that does not answer, stays as it is.

    Args:
        backend, name: the store.
        keys: of a manifest and dictionaries.
        units: returns those of the bundle; they are asked for, and their keys computed, when they
            are touched.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        keys: Collection[str],
        units: Callable[[], Collection[Unit]],
    ) -> None:
        self._backend, self._name, self._keys, self._units = backend, name, keys, units
        # An interrupt may arrive while the thread is being started: who touches them is decided
        # under this lock.
        self._gate = threading.Lock()
        self._asked = self._taken = self._apart = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Begin, unless that was done."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # no thread can be had: it is left to `finish`
                _thread.start_new_thread(self._touch_apart, ())

    def wait(self) -> None:
        """Wait for the thread, if it has begun."""
        if self._apart:
            self._ended.wait()

    def finish(self) -> None:
        """See to it that they were touched; calling this again is fine."""
        with self._gate:
            ours, self._taken = not self._taken, True
        if ours:
            self._touch()
        self.wait()

    def _touch_apart(self) -> None:
        with self._gate:
            if self._taken:
                return
            self._taken = self._apart = True
        try:
            self._touch()
        finally:
            self._ended.set()

    def _touch(self) -> None:
        try:
            with store_errors(self._name):
                self._backend.touch([*self._keys, *[unit.key for unit in self._units()]])
        except BundlerError as error:
            _log.info("%s: not marked as in use: %s", self._name, error)
