# SPDX-License-Identifier: Apache-2.0
"""What a session used, gathered into the bundle that its tag gets at the end.

The lookup engine tells a `UsedKernels` of each kernel, and calls its `gather` when the session
pushes its tag.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from bundler.lifecycle.directory_watch import DirectoryWatch

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.toolchain.recording.spool_records import SpooledEvent


class UsedKernels:
    """The kernels that one process compiled or found, until they are gathered.

    Besides what the cache manager was asked for it takes what the JIT has loaded, and complete
    kernel directories that appeared in this process's caches: torch's workers and its static
    launcher ask no manager of this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, SpooledEvent] = {}
        self._watch = DirectoryWatch()
        self._pid = os.getpid()

    def __contains__(self, key: str) -> bool:
        return key in self._events

    def add(self, event: SpooledEvent) -> None:
        """Add a kernel."""
        with self._lock:
            self._events[event.key] = event

    def gather(self, keep: Keep) -> Bundle:
        """Return everything as a bundle; what could not be read is left out."""
        # At the end of the session, when nobody waits for a kernel.
        from bundler.lifecycle.recorder import JIT_CACHE, RecordedKernels, collect_recorded
        from bundler.toolchain import inductor_caches
        from bundler.toolchain.recording import compile_listener

        with self._lock:
            events = list(self._events.values())
        kernels = RecordedKernels()
        for event in events:
            kernels.add_spooled(event)
        # A forked child has its parent's caches, which the parent gathers.
        if self._pid == os.getpid():
            for found in compile_listener.loaded_kernels():
                kernels.add_event(found, JIT_CACHE)
            for directory in (*self._watch.appeared(), *inductor_caches.loaded_directories()):
                if directory not in kernels:
                    kernels.add_directory(directory)
        roots = {recorded.root for recorded in kernels}
        bundle, _ = collect_recorded(kernels, roots, keep)
        return bundle

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its own; for the child only."""
        self._lock = threading.Lock()
        self._events = {}
